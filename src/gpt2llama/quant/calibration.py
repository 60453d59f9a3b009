"""Texts for the methods that look at what flows through a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DataError

_AT_ONCE = 4096  # tokens of a batch


def windows(ids: Sequence[int], seq_len: int, count: int = 128, seed: int = 0) -> list[Tensor]:
    """`count` stretches of seq_len tokens of a text, at places drawn by `seed`, in batches (B, T).

    A text that holds fewer is cut side by side, without its last part. Raises DataError for one
    shorter than a window.
    """
    if len(ids) < seq_len:
        raise DataError(
            f"the calibration text has {len(ids)} tokens and a window {seq_len}; give a longer one"
        )
    whole = torch.tensor(ids)
    starts = torch.arange(0, len(ids) - seq_len + 1, seq_len)
    if len(starts) > count:
        rng = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(ids) - seq_len + 1, (count,), generator=rng)
    rows = torch.stack([whole[start : start + seq_len] for start in starts.tolist()])
    return list(torch.split(rows, max(1, _AT_ONCE // seq_len)))
