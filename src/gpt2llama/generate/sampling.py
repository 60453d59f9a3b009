"""From logits to the next token: small pure functions on (B, V) logits, and their composition.

A token that a filter drops gets the logit -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen; None leaves a filter out. InputError for a bad value."""

    temperature: float = 0.0  # below 1e-5 is greedy: the likeliest token, whatever the filters
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: another text each time

    def __post_init__(self) -> None:
        t, k, p, m = self.temperature, self.top_k, self.top_p, self.min_p
        for name, holds, rule in (
            ("temperature", 0 <= t < math.inf, "0 (greedy) or above"),
            ("top_k", k is None or (isinstance(k, int) and k >= 1), "a whole number from 1 up"),
            ("top_p", p is None or 0 < p <= 1, "above 0 and at most 1"),
            ("min_p", m is None or 0 <= m <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1 is off)"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
        ):
            if not holds:
                raise InputError(f"{name} must be {rule} (got {getattr(self, name)!r})")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def generator(self, device: torch.device) -> torch.Generator:
        """A random stream of its own, so that torch's global one stays untouched."""
        generator = torch.Generator(device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        return generator


def temperature(logits: Tensor, t: float) -> Tensor:
    return logits / t


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the k likeliest, and what ties with the last of them (Fan et al. 2018)."""
    kth = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the likeliest up to and with the one that brings their sum to p (Holtzman 2020)."""
    few = min(256, logits.shape[-1])  # nearly always enough, and a fortieth of sorting them all
    probs, ids = logits.softmax(-1).topk(few)
    ties = few < logits.shape[-1] and bool((probs[..., 1:] == probs[..., :-1]).any())
    if p == 1 or ties or (probs.sum(-1) < p).any():
        ordered, ids = logits.sort(descending=True, stable=True)  # of equal ones the first
        probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # of the likelier tokens; 0 for the first, always kept
    keep = (before < p) | (p == 1)  # rounding may bring the sum to 1 before the end
    return logits.where(
        torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, keep), -torch.inf
    )


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keeps what is at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf)


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides the positive logits of `seen` tokens, bool (B, V), multiplies the negative ones.

    Keskar et al. 2019 §4.1; the sign case keeps a penalty above 1 from rewarding.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: Tensor, settings: SamplingConfig, seen: Tensor | None = None) -> Tensor:
    """Logits (B, V) after penalty and, unless greedy, temperature, top-k, top-p, min-p: this order.

    `seen`: bool (B, V), the tokens that the repetition penalty is for.
    """
    if seen is not None:
        logits = repetition_penalty(logits, seen, settings.repetition_penalty)
    if settings.greedy:
        return logits
    logits = temperature(logits, settings.temperature)
    if settings.top_k is not None:
        logits = top_k(logits, settings.top_k)
    if settings.top_p is not None:
        logits = top_p(logits, settings.top_p)
    if settings.min_p is not None:
        logits = min_p(logits, settings.min_p)
    return logits


def sample(
    logits: Tensor,
    settings: SamplingConfig,
    generator: torch.Generator | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Logits (B, V), as `filtered` leaves them -> ids (B,)."""
    logits = filtered(logits, settings, seen)
    if not settings.greedy:
        return draw(logits.softmax(-1), generator)
    if logits.device.type == "cpu":  # NumPy's takes a tenth of PyTorch's time
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Weights (B, V) of a choice, not all 0 -> ids (B,): one number a row, where it falls."""
    upto = probs.double().cumsum(-1)
    spot = torch.rand(len(probs), 1, generator=generator, dtype=torch.double, device=probs.device)
    return torch.searchsorted(upto, spot * upto[:, -1:], right=True)[:, 0]
