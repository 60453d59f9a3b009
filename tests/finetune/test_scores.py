"""Figures of a classifier, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.finetune.scores import calibration_error, fit_temperature, score


def logits_of(*shares: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(shares, dtype=torch.float64).log()


def test_by_hand() -> None:
    said = [0, 0, 0, 1, 1, 0, 2, 2, 1, 1]
    true = torch.tensor([0, 0, 1, 1, 1, 1, 2, 0, 2, 2])
    logits = torch.eye(4)[said]  # nothing is of class 3, and nothing is taken for it
    found = score(logits, true)
    assert found.confusion == [[2, 0, 1, 0], [2, 2, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]]
    assert found.accuracy == 5 / 10
    rows = [(c.precision, c.recall, c.f1, c.count) for c in found.classes]
    assert rows[0] == pytest.approx((2 / 4, 2 / 3, 4 / 7, 3))
    assert rows[1] == pytest.approx((2 / 4, 2 / 4, 4 / 8, 4))
    assert rows[2] == pytest.approx((1 / 2, 1 / 3, 2 / 5, 3))
    assert rows[3] == (0, 0, 0, 0)


def test_calibration_error_by_hand() -> None:
    """Bins (0.5, 0.6]: 0.6 right, 0.55 wrong; (0.8, 0.9]: 0.85 right; (0.9, 1]: 0.95 wrong."""
    logits = logits_of((0.6, 0.4), (0.45, 0.55), (0.15, 0.85), (0.95, 0.05))
    classes = torch.tensor([0, 0, 1, 1])
    by_hand = (abs(1 - 1.15) + abs(1 - 0.85) + abs(0 - 0.95)) / 4
    assert calibration_error(logits, classes) == pytest.approx(by_hand)
    assert calibration_error(3 * logits, classes, temperature=3.0) == pytest.approx(by_hand)
    sure = torch.tensor([[50.0, 0.0]] * 4)
    assert calibration_error(sure, torch.tensor([0, 0, 0, 1])) == pytest.approx(0.25)


@given(st.integers(0, 1000), st.floats(0.2, 5.0))
def test_the_temperature_that_was_put_in_comes_out(seed: int, temperature: float) -> None:
    """Classes at exactly the model's shares: 1 fits them best, and scaled logits the scale."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 20, (6, 3), generator=rng)
    logits = counts.double().log().repeat_interleave(counts.sum(1), 0)
    classes = torch.cat([torch.arange(3).repeat_interleave(row) for row in counts])
    assert fit_temperature(logits * temperature, classes) == pytest.approx(temperature, rel=1e-3)


def test_weights_count() -> None:
    """One answer for all: right once of class 0 and wrong w times of class 1 fits at 1/(1 + w)."""
    logits, classes = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    found = fit_temperature(logits, classes, torch.tensor([1.0, 1.5]))
    assert 1 / (1 + math.exp(-2 / found)) == pytest.approx(3 / (3 + 1.5), rel=1e-4)


def test_a_fit_that_runs_away_is_none() -> None:
    classes = torch.tensor([0, 1, 1])
    right = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.5, 1.0]])
    assert fit_temperature(right, classes) == 1.0
    assert fit_temperature(-right, classes) == 1.0
