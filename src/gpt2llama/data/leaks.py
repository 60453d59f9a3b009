"""Held-out text that also stands in the training text makes a model look better than it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shards import Tokens

_CHUNK = 1 << 20  # training positions hashed at a time
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def count_leaks(
    train: Tokens | NDArray[Any], held_out: Tokens | NDArray[Any], window: int = 64
) -> int:
    """How many of the held-out tokens' whole windows, cut side by side, stand anywhere in `train`.

    Exact: a rolling hash (Karp and Rabin 1987) finds candidates, and their contents are compared.
    """
    count = len(held_out) // window
    rows = np.asarray(held_out[: count * window], np.int64).reshape(count, window)
    windows = Counter(row.tobytes() for row in rows)
    if not windows:
        return 0
    hashes = np.unique(rows.astype(np.uint64) @ _powers(_BASE, window))
    found: set[bytes] = set()
    for start in range(0, len(train) - window + 1, _CHUNK):
        chunk = np.asarray(train[start : start + _CHUNK + window - 1], np.int64)
        rolling = _rolling_hashes(chunk, window)
        nearest = hashes[np.searchsorted(hashes[:-1], rolling)]
        hits = np.flatnonzero(nearest == rolling)
        found.update(chunk[i : i + window].tobytes() for i in hits)
    return sum(windows[content] for content in found)


def _rolling_hashes(tokens: NDArray[np.int64], window: int) -> NDArray[np.uint64]:
    """One hash for each of the len - window + 1 windows: Σ_j tokens[i + j] · BASE^j mod 2^64."""
    powers = _powers(_BASE, len(tokens))
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(tokens.astype(np.uint64) * powers, out=sums[1:])
    inverse = _powers(pow(_BASE, -1, 1 << 64), len(tokens) - window + 1)
    return (sums[window:] - sums[:-window]) * inverse


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base^0, base^1, … modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
