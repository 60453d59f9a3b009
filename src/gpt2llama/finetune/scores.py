"""How well a classifier does, and how well it knows that: from logits and classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 10
_WIDEST = math.log(20)  # a temperature beyond 20, or under 1/20, is a fit that ran away


@dataclass(frozen=True)
class ClassScore:
    """precision: of those said to be of the class, how many are; recall: of those that are, how
    many were found; f1: their harmonic mean. 0 where there is none to divide by."""

    precision: float
    recall: float
    f1: float
    count: int


@dataclass(frozen=True)
class Scores:
    """confusion[i][j]: texts of class i taken for class j. ece: expected calibration error."""

    accuracy: float
    classes: list[ClassScore]
    confusion: list[list[int]]
    ece: float


def score(logits: Tensor, classes: Tensor, temperature: float = 1.0) -> Scores:
    """logits (N, K), classes int64 (N,)."""
    kinds = logits.shape[1]
    said = logits.argmax(1)
    confusion = torch.bincount(classes * kinds + said, minlength=kinds**2).view(kinds, kinds)
    right, true, named = confusion.diag(), confusion.sum(1), confusion.sum(0)
    rows = []
    for hits, count, claims in zip(right.tolist(), true.tolist(), named.tolist(), strict=True):
        precision, recall = hits / max(1, claims), hits / max(1, count)
        rows.append(ClassScore(precision, recall, 2 * hits / max(1, count + claims), count))
    return Scores(
        accuracy=int(right.sum()) / len(classes),
        classes=rows,
        confusion=confusion.tolist(),
        ece=calibration_error(logits, classes, temperature),
    )


def calibration_error(logits: Tensor, classes: Tensor, temperature: float = 1.0) -> float:
    """ECE (Guo et al. 2017 §2): over BINS equal bins of confidence, how far the mean confidence
    lies from the accuracy, weighted by the texts in each."""
    confidence, said = (logits.double() / temperature).softmax(1).max(1)
    # (0, 0.1], (0.1, 0.2] and so on
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64, device=logits.device)
    gaps.index_add_(0, bins, (said == classes).double() - confidence)
    return gaps.abs().sum().item() / len(classes)


def fit_temperature(logits: Tensor, classes: Tensor, weights: Tensor | None = None) -> float:
    """What to divide logits by so that their probabilities fit best (Guo et al. 2017 §4.2).

    weights: (K,), of the classes. 1 where no temperature within reason is best, as when every
    text is classified right and the fit only grows surer.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]  # takes 0.3 s

    logits, weights = logits.double(), None if weights is None else weights.double()

    def loss(log_t: float) -> float:
        return F.cross_entropy(logits / math.exp(log_t), classes, weights).item()

    found = minimize_scalar(loss, bounds=(-_WIDEST, _WIDEST), method="bounded").x
    return 1.0 if abs(found) > _WIDEST - 1e-3 else math.exp(found)
