"""Batches of packed tokens. A training batch is a function of (seed, index), so a run resumes by
its step number alone; held-out windows make every token a target exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError, FileError, InputError, counted
from .shards import Shard, Tokens, open_shard

IGNORED = -100  # a target that is not learned or scored


@dataclass(frozen=True, eq=False)
class Batch:
    ids: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, the next token of each id, or IGNORED
    documents: torch.Tensor | None = None  # (B, T) int64: where rows hold several, their numbers
    positions: torch.Tensor | None = None  # (B, T) int64, in the documents
    learned: torch.Tensor | None = None  # (N,) int64: where targets are, of B · T, if few are

    @property
    def count(self) -> int:
        """What the loss is summed over and divided by."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Self:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class TokenData:
    """A folder written by `prepare`, its tokens memory-mapped."""

    train: Tokens
    held_out: Tokens
    vocab_size: int
    fingerprint: str
    held_out_bytes: int  # UTF-8 length of the held-out documents, without what joins them
    held_out_text: Path  # those documents, raw, joined by newlines

    @classmethod
    def open(cls, folder: str | Path, tokenizer_fingerprint: str | None = None) -> TokenData:
        """Raises FileError without shards; DataError for a set of them that does not fit
        together or was made with a vocabulary other than `tokenizer_fingerprint`'s.
        """
        folder = Path(folder)
        train, held_out = _open_split(folder, "train"), _open_split(folder, "held-out")
        vocabularies = {(shard.vocab_size, shard.fingerprint) for shard in train + held_out}
        vocab_size, fingerprint = vocabularies.pop()
        if vocabularies:
            raise DataError(f"the shards of {folder} were made with different vocabularies")
        if tokenizer_fingerprint not in (None, fingerprint):
            raise DataError(
                f"the shards of {folder} were made with another vocabulary (fingerprint "
                f"{fingerprint[:12]}…, this tokenizer has {str(tokenizer_fingerprint)[:12]}…); "
                "use their tokenizer or prepare the text again"
            )
        return cls(
            train=Tokens([shard.tokens for shard in train], vocab_size),
            held_out=Tokens([shard.tokens for shard in held_out], vocab_size),
            vocab_size=vocab_size,
            fingerprint=fingerprint,
            held_out_bytes=sum(shard.bytes for shard in held_out),
            held_out_text=folder / "held-out.txt",
        )


def _open_split(folder: Path, split: str) -> list[Shard]:
    paths = sorted(folder.glob(f"{split}-*.safetensors"))
    if not folder.is_dir():
        raise FileError(f"there is no folder {folder}; make it with gpt2llama data prepare")
    if not paths:
        raise FileError(f"{folder} has no {split} shards; make them with gpt2llama data prepare")
    shards = [open_shard(path) for path in paths]
    places = [(shard.split, shard.index, shard.last) for shard in shards]
    if places != [(split, i, i == len(paths) - 1) for i in range(len(paths))]:
        raise DataError(f"the {split} shards of {folder} are not one whole set; prepare them again")
    return shards


class PackedBatches:
    """The training stream in windows of `seq_len` + 1 tokens, `seq_len` apart, in random order.

    Each epoch has its own offset of the first window and its own order. Batch i holds windows
    i·B to (i + 1)·B of all epochs laid end to end, so every batch is full. In an epoch a token is
    a target at most once, and all but fewer than 2·seq_len at the stream's ends are one.
    """

    def __init__(self, data: TokenData, batch_size: int, seq_len: int, seed: int) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seq_len", seq_len, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise InputError(f"{name} must be at least {least} (got {value})")
        count = len(data.train)
        if count < seq_len + 1:
            raise DataError(
                f"the training text has {counted(count, 'token')}, fewer than seq_len + 1 = "
                f"{seq_len + 1:,}; give more text or a smaller seq_len"
            )
        self._tokens, self._batch_size, self._seq_len, self._seed = (
            data.train, batch_size, seq_len, seed,
        )  # fmt: skip
        # As many windows as fit at every offset, so that all epochs are equally long.
        self.windows_per_epoch = max(1, count // seq_len - 1)
        self._offsets = min(seq_len, count - self.windows_per_epoch * seq_len)
        self._epoch, self._starts = -1, np.empty(0, np.int64)

    def epoch_of(self, index: int) -> int:
        """The epoch that batch `index` begins in."""
        return index * self._batch_size // self.windows_per_epoch

    def batch(self, index: int) -> Batch:
        """The batch of step `index`, the same whatever was asked before."""
        first = index * self._batch_size
        windows = []
        for window in range(first, first + self._batch_size):
            epoch, place = divmod(window, self.windows_per_epoch)
            start = self._window_starts(epoch)[place]
            windows.append(self._tokens[start : start + self._seq_len + 1])
        tokens = torch.from_numpy(np.stack(windows))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _window_starts(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            random = np.random.default_rng((self._seed, epoch))
            offset = random.integers(self._offsets)
            order = random.permutation(self.windows_per_epoch)
            self._epoch, self._starts = epoch, offset + order * self._seq_len
        return self._starts


def window_starts(
    count: int, seq_len: int, start_id: int | None, stride: int | None = None
) -> range:
    """The first target of each window over `count` tokens; see held_out_windows."""
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise InputError(f"stride must be from 1 to the window's {seq_len} (got {stride})")
    first = 0 if start_id is not None else 1
    enough = count - (seq_len - stride)  # a window that begins here has no token of its own
    return range(first, max(enough, min(first + 1, count)), stride)


def held_out_windows(
    tokens: Tokens | Sequence[int] | NDArray[np.int64],
    seq_len: int,
    start_id: int | None,
    batch_size: int,
    stride: int | None = None,
) -> Iterator[Batch]:
    """Windows that make every token a target exactly once, in order.

    They begin `stride` tokens apart, or side by side; where two overlap, the first has the
    targets. The first token is predicted from `start_id`, or left out if that is None; the first
    of any later window from the token before it. What is too many in a batch is IGNORED.
    """
    starts = window_starts(len(tokens), seq_len, start_id, stride)
    overlap = seq_len - starts.step
    for begin in range(0, len(starts), batch_size):
        firsts = starts[begin : begin + batch_size]
        shape = (len(firsts), min(seq_len, len(tokens) - firsts[0]))
        ids, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, start in enumerate(firsts):
            found = np.asarray(tokens[start : start + seq_len], np.int64)
            targets[row, : len(found)] = found
            if start != starts[0]:
                targets[row, :overlap] = IGNORED
            before = [start_id] if start == 0 else tokens[start - 1 : start]
            ids[row, 0] = np.asarray(before)[0]
            ids[row, 1 : len(found)] = found[:-1]
        yield Batch(torch.from_numpy(ids), torch.from_numpy(targets))
