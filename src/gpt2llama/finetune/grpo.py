"""GRPO's objective (Shao et al. 2024, §4.1; DeepSeekMath) on answers that came in groups.

An answer's advantage is its reward beside its group's: no second model judges it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ..data.batches import IGNORED, Batch
from ..errors import CheckedFields, ConfigError

if TYPE_CHECKING:
    from ..model.transformer import Transformer

Logprobs = Callable[["Transformer", Tensor, Tensor], Tensor]  # of ids, targets (R, T), as theirs


@dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedFields):
    """How rewards are learned.

    reward: see `make_reward`. variant: grpo, or dr-grpo (Liu et al. 2025), which divides neither
    an advantage by its group's standard deviation nor an answer's terms by its length.
    group_size: answers to a prompt. max_new_tokens, temperature: of the samples. clip_ratio: how
    far from 1 the ratio of new to old probability counts. kl: the weight of the divergence from
    the model as it was, by the estimator k3 (Schulman 2020); 0 needs no second model. updates:
    optimiser steps on the same samples. chat: see `Writer`. TrainConfig's batch_size are prompts.
    """

    ZERO_ALLOWED: ClassVar = ("kl",)
    KIND: ClassVar = "reward"

    reward: str = "arithmetic"
    variant: Literal["grpo", "dr-grpo"] = "grpo"
    group_size: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    clip_ratio: float = 0.2
    kl: float = 0.04
    updates: int = 1
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ConfigError(
                f"group_size must be at least 2 (got {self.group_size}): answers are compared"
            )


def advantages(rewards: Tensor, variant: str) -> Tensor:
    """(P, G) rewards -> (P, G): less the group's mean, in grpo over its standard deviation (of a
    sample: G - 1). Groups of equal rewards must have been left out.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred if variant == "dr-grpo" else centred / rewards.std(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class GroupBatch(Batch):
    """Answers (R, T) of the groups that differ, or one row without a target if none does.

    advantages: (R,). old, reference: (R, T) log-probabilities of the targets when they were
    sampled (None: they are those of this step) and under the reference. figures: of all groups.
    """

    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    old: Tensor | None = None
    reference: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Answers."""
        return int((self.targets != IGNORED).any(1).sum())


class PolicyLoss:
    """The objective: the clipped ratio times the advantage, less the divergence; summed over
    answers, each the mean of its tokens, or in dr-grpo their sum over max_new_tokens.

    Of a step it keeps the mean of k3 over tokens, and the share of tokens beyond the clip.
    """

    def __init__(self, cfg: RewardConfig, logprobs: Logprobs) -> None:
        self.cfg, self.logprobs = cfg, logprobs
        self.by_length = self.cfg.variant == "grpo"
        self.seen: list[tuple[int, Tensor, Tensor]] = []

    def __call__(self, model: Transformer, batch: Batch) -> Tensor:
        assert isinstance(batch, GroupBatch)
        return self.of(self.logprobs(model, batch.ids, batch.targets), batch)

    def of(self, logprobs: Tensor, batch: GroupBatch) -> Tensor:
        """Of (R, T) log-probabilities under the policy."""
        clip, counted = self.cfg.clip_ratio, batch.targets != IGNORED
        old = logprobs.detach() if batch.old is None else batch.old
        advantage, ratio = batch.advantages[:, None], (logprobs - old).exp()
        plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
        gain, k3 = torch.minimum(plain, clipped), torch.zeros_like(logprobs)
        if batch.reference is not None:
            gap = batch.reference - logprobs
            k3 = gap.exp() - gap - 1
            gain = gain - self.cfg.kl * k3
        tokens = counted.sum(1)
        beyond = (clipped < plain) & counted
        self.seen.append((int(tokens.sum()), (k3.detach() * counted).sum(), beyond.sum()))
        length = tokens.clamp(min=1) if self.by_length else self.cfg.max_new_tokens
        return -((gain * counted).sum(1) / length).sum()

    def take_figures(self) -> dict[str, float]:
        """Since the last call."""
        tokens = sum(n for n, _, _ in self.seen)
        kl, clipped = (sum(float(t[i]) for t in self.seen) / max(1, tokens) for i in (1, 2))
        self.seen = []
        named = {"clipped": clipped} | ({"kl": kl} if self.cfg.kl else {})
        return named if tokens else {}
