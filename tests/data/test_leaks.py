from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2llama.data import leaks
from gpt2llama.data.shards import Tokens

IDS = st.lists(st.integers(0, 2), max_size=60)


def by_hand(train: list[int], held_out: list[int], window: int) -> int:
    inside = [train[i : i + window] for i in range(len(train) - window + 1)]
    starts = range(0, len(held_out) - window + 1, window)
    return sum(held_out[i : i + window] in inside for i in starts)


@pytest.mark.parametrize("base", [leaks._BASE, 1])  # 1: all orders of a window collide
@given(train=IDS, held_out=IDS, window=st.integers(1, 6), chunk=st.integers(1, 20))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_brute_force(
    monkeypatch: pytest.MonkeyPatch,
    base: int,
    train: list[int],
    held_out: list[int],
    window: int,
    chunk: int,
) -> None:
    monkeypatch.setattr(leaks, "_BASE", base)
    monkeypatch.setattr(leaks, "_CHUNK", chunk)
    arrays = np.array(train, np.uint16), np.array(held_out, np.uint32)
    assert leaks.count_leaks(*arrays, window) == by_hand(train, held_out, window)


def test_a_copy_is_found_at_any_place_and_across_shards() -> None:
    random = np.random.default_rng(0)
    train = random.integers(0, 70_000, 5000).astype(np.uint32)
    held_out = random.integers(0, 70_000, 640).astype(np.uint32)
    held_out[64:192] = train[2437 : 2437 + 128]
    shards = Tokens([train[:2500], train[2500:]], 70_000)
    assert leaks.count_leaks(shards, Tokens([held_out], 70_000)) == 2
    assert leaks.count_leaks(train, train[:640]) == 10
    assert leaks.count_leaks(train, train[1:63]) == 0  # shorter than a window
