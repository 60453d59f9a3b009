"""Groups of answers to learn from: prompts, what the policy says to them, and their rewards.

A group of equal rewards teaches nothing: it is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..data.batches import IGNORED
from ..errors import DataError, TrainingError, WeightsError
from ..generate import SamplingConfig, decode
from ..generate.generation import Generation
from .answers import Line, Writer, at, padded, shuffled, token_logprobs
from .grpo import GroupBatch, RewardConfig, advantages
from .lora import merged
from .rewards import Reward, has_number

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer
    from .settings import Tuning


@dataclass
class Sample(Generation):
    """With the stop id among its `tokens`: it is the policy's choice like any other."""

    tokens: list[int] = field(default_factory=list)

    def append(
        self,
        token: int,
        logprob: float,
        stop_ids: Collection[int],
        max_new_tokens: int,
        context: int,
    ) -> None:
        self.tokens.append(token)
        super().append(token, logprob, stop_ids, max_new_tokens, context)


@dataclass(frozen=True)
class Task:
    prompt: list[int]
    line: Line

    @property
    def tokens(self) -> int:
        """With the first of an answer."""
        return len(self.prompt) + 1


def encode_task(line: Line, writer: Writer, reward: str) -> Task:
    """Raises DataError, naming the line, for one that the arithmetic reward cannot check."""
    if reward == "arithmetic" and not has_number(line.values):
        raise DataError(
            f"{line.place}: answer must be the number that the reward arithmetic expects"
        )
    with at(line.place):
        return Task(writer.prompt(line.prompt), line)


class Sampler:
    """Batch i: groups of answers by the policy as it is when the batch is first asked for.

    The samples depend on (seed, i) and the weights. `policy` is set once the trainer has it.
    With several updates a batch serves that many steps; `pending` holds those in use, by index.
    """

    def __init__(
        self,
        tasks: list[Task],
        run: Tuning[RewardConfig],
        tokenizer: Tokenizer,
        reward: Reward,
        policy: Transformer,
        reference: Transformer | None,
    ) -> None:
        self.tasks, self.train, self.cfg = tasks, run.train, run.method
        self.tokenizer, self.reward = tokenizer, reward
        self.policy, self.reference = policy, reference
        # The decode kernel takes no adapters.
        self.speaker: Callable[[Transformer], Transformer] = merged if run.lora else lambda m: m
        self.pending: dict[int, GroupBatch] = {}

    def batch(self, index: int) -> GroupBatch:
        accumulate = self.train.accumulate
        step, place = divmod(index, accumulate)
        index = step // self.cfg.updates * accumulate + place
        if index not in self.pending:
            if place == 0:
                self.pending = {}
            self.pending[index] = self.make(index)
        return self.pending[index]

    def make(self, index: int) -> GroupBatch:
        cfg, size, seed = self.cfg, self.train.batch_size, self.train.seed
        tasks = [self.tasks[i] for i in shuffled(len(self.tasks), size, seed, index)]
        drawn = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
        sampling = SamplingConfig(temperature=cfg.temperature, seed=int(drawn >> 1))
        speaker = self.speaker(self.policy)
        asked = [task for task in tasks for _ in range(cfg.group_size)]
        samples = self.answer(speaker, asked, sampling)
        rewards = self.rewards(tasks, samples).view(size, -1)
        differ = (rewards != rewards[:, :1]).any(1)
        figures = {
            "reward": rewards.mean().item(),
            "equal_groups": int((~differ).sum()),
            "answer_tokens": sum(len(s.tokens) for s in samples) / len(samples),
        }
        if not differ.any():
            none = torch.full((1, 1), IGNORED)
            return GroupBatch(torch.zeros_like(none), none, advantages=torch.zeros(1),
                              figures=figures)  # fmt: skip
        kept = differ.repeat_interleave(cfg.group_size).nonzero()[:, 0].tolist()
        reference = self.reference
        ids, targets = padded([(samples[i].prompt, samples[i].tokens) for i in kept])
        return GroupBatch(
            ids,
            targets,
            advantages=advantages(rewards[differ], cfg.variant).flatten().float(),
            old=self.score(self.policy, ids, targets) if cfg.updates > 1 else None,
            reference=None if reference is None else self.score(reference, ids, targets),
            figures=figures,
        )

    def answer(
        self, speaker: Transformer, tasks: Sequence[Task], sampling: SamplingConfig
    ) -> list[Sample]:
        samples = [Sample(task.prompt) for task in tasks]
        steps = decode(
            speaker,
            samples,
            max_new_tokens=self.cfg.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
            sampling=sampling,
            vocab_size=self.tokenizer.vocab_size,
        )
        try:
            for _ in steps:
                pass
        except WeightsError as error:
            raise TrainingError(f"the policy cannot answer any more: {error}") from error
        return samples

    def rewards(self, tasks: Sequence[Task], samples: Sequence[Sample]) -> Tensor:
        """Of the samples, as many to each task, in order; fp64."""
        each = len(samples) // len(tasks)
        return torch.tensor(
            [
                self.reward(self.tokenizer.decode(sample.ids), tasks[i // each].line.values)
                for i, sample in enumerate(samples)
            ],
            dtype=torch.float64,
        )

    @torch.no_grad()
    def score(self, model: Transformer, ids: Tensor, targets: Tensor) -> Tensor:
        """The targets' log-probabilities without dropout."""
        device, was_training = next(model.parameters()).device, model.training
        model.eval()
        try:
            return self.logprobs(model, ids.to(device), targets.to(device)).cpu()
        finally:
            model.train(was_training)

    def logprobs(self, model: Transformer, ids: Tensor, targets: Tensor) -> Tensor:
        """Under the law that the samples are drawn by."""
        return token_logprobs(model, ids, targets, self.cfg.temperature, self.tokenizer.vocab_size)

    def measure(self, tasks: list[Task], rows: int = 64) -> dict[str, float]:
        """Mean rewards: of a group of sampled answers to each, which is what is learned, with the
        same seed each time; and of the greedy answers.
        """
        cfg, speaker = self.cfg, self.speaker(self.policy)
        sampled = SamplingConfig(temperature=cfg.temperature, seed=self.train.seed)
        found = []
        for sampling, each in ((sampled, cfg.group_size), (SamplingConfig(), 1)):
            size, total = max(1, rows // each), 0.0
            for start in range(0, len(tasks), size):
                part = tasks[start : start + size]
                asked = [task for task in part for _ in range(each)]
                samples = self.answer(speaker, asked, sampling)
                total += self.rewards(part, samples).sum().item()
            found.append(total / len(tasks) / each)
        return {
            "held_out_loss": -found[0], "held_out_reward": found[0], "held_out_greedy": found[1]
        }  # fmt: skip
