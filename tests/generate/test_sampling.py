"""Each filter against transformers' own, and the rules at their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpt2llama.errors import InputError
from gpt2llama.generate import sampling
from gpt2llama.generate.sampling import SamplingConfig, sample

V = 11
NO_IDS = torch.zeros(3, 0, dtype=torch.long)
seeds = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


def logits_of(seed: int) -> Tensor:
    """(3, V), from flat to sharp."""
    noise = torch.randn(3, V, generator=torch.Generator().manual_seed(seed))
    return noise * torch.tensor([[0.3], [1.0], [5.0]])


@few
@given(seeds, st.floats(0.01, 9), st.integers(1, V + 3), st.floats(0.01, 0.99), st.floats(0, 1))
def test_filters_are_those_of_transformers(
    seed: int, t: float, k: int, p: float, least: float
) -> None:
    logits = logits_of(seed)
    for ours, theirs in (
        (sampling.temperature(logits, t), TemperatureLogitsWarper(t)),
        (sampling.top_k(logits, k), TopKLogitsWarper(k)),
        (sampling.top_p(logits, p), TopPLogitsWarper(p)),
        (sampling.min_p(logits, least), MinPLogitsWarper(least)),
    ):
        assert torch.equal(ours, theirs(NO_IDS, logits))


@few
@given(seeds, st.floats(0.1, 9), st.lists(st.integers(0, V - 1), min_size=1))
def test_repetition_penalty_is_that_of_transformers(seed: int, t: float, ids: list[int]) -> None:
    logits, seen = logits_of(seed), torch.zeros(3, V, dtype=torch.bool)
    seen[:, ids] = True
    expected = RepetitionPenaltyLogitsProcessor(t)(torch.tensor([ids] * 3), logits.clone())
    assert torch.equal(sampling.repetition_penalty(logits, seen, t), expected)


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_sampled_as_often_as_transformers_says(seed: int) -> None:
    """All filters together, in transformers' order: a wrong order moves these frequencies."""
    logits, ids = logits_of(seed)[1:2], torch.tensor([[0, 3, 3]])
    how = SamplingConfig(
        temperature=1.5, top_k=6, top_p=0.8, min_p=0.2, repetition_penalty=1.7, seed=seed
    )
    seen = torch.zeros(1, V, dtype=torch.bool)
    seen[:, ids[0]] = True
    warpers = [
        RepetitionPenaltyLogitsProcessor(1.7),
        TemperatureLogitsWarper(1.5),
        TopKLogitsWarper(6),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.2),
    ]
    expected = LogitsProcessorList(warpers)(ids, logits.clone()).softmax(-1)[0]
    n = 40_000
    drawn = sample(logits.expand(n, V), how, how.generator(logits.device), seen.expand(n, V))
    share = drawn.bincount(minlength=V) / n
    assert share[expected == 0].sum() == 0
    assert (share - expected).abs().max() < 5 * math.sqrt(0.25 / n)  # five standard errors


def kept(logits: Tensor) -> list[int]:
    return logits.isfinite().nonzero()[:, 0].tolist()


def test_top_p_keeps_the_first_and_the_one_that_crosses() -> None:
    probs = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for p, ids in (
        (1e-9, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.76, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
    ):
        assert kept(sampling.top_p(probs, p)) == ids


def test_filters_that_let_all_through() -> None:
    """Even a tail that begins where rounding has brought the sum to 1."""
    logits = torch.tensor([30.0] + [0.0] * (V - 1))
    assert kept(sampling.top_p(logits, 1.0)) == [*range(V)]
    assert kept(sampling.min_p(logits, 0.0)) == [*range(V)]
    assert kept(sampling.top_k(logits, V + 1)) == [*range(V)]


@few
@given(seeds, st.sampled_from([0.0, 1e-9, 1e-300]))
def test_temperature_zero_is_greedy(seed: int, t: float) -> None:
    logits = logits_of(seed)
    chosen = sample(logits, SamplingConfig(temperature=t, top_k=5))
    assert torch.equal(chosen, logits.argmax(-1))


def test_greedy_heeds_the_repetition_penalty() -> None:
    logits, seen = torch.tensor([[3.0, 2.0, -1.0]]), torch.tensor([[True, False, False]])
    assert sample(logits, SamplingConfig(repetition_penalty=2.0), seen=seen).item() == 1
    assert sample(logits, SamplingConfig(repetition_penalty=1.2), seen=seen).item() == 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or above \(got -0.1\)"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k must be a whole number from 1 up"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        SamplingConfig(**setting)
