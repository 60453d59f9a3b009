"""Examples side by side in rows, each of which sees itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..data.batches import IGNORED, Batch
from ..errors import InputError
from .examples import Example

Rows = list[list[Example]]


def pack(examples: Sequence[Example], seq_len: int) -> Rows:
    """Rows of at most seq_len inputs, by first-fit of the longest (Johnson 1973: at most 11/9 of
    the fewest rows). An example of n ids takes n - 1 places: its last id is only a target.

    Those of one length come in an order drawn by lot: neighbours in a file are often about one
    thing, and a row of them teaches little more than one of them."""
    if examples and (longest := max(len(e.ids) for e in examples) - 1) > seq_len:
        raise InputError(f"an example takes {longest} places and a row has {seq_len}; leave it out")
    drawn = np.random.default_rng(0).permutation(len(examples))
    order = sorted(drawn, key=lambda i: -len(examples[i].ids))
    room: list[int] = []
    rows: Rows = []
    # A row whose room is r may take what is no longer than r: kept in lists by room.
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    for i in order:
        size = len(examples[i].ids) - 1
        fits = next((r for r in range(size, seq_len + 1) if by_room[r]), None)
        if fits is None:
            row = len(rows)
            rows.append([])
            room.append(seq_len)
        else:
            row = by_room[fits].pop()
        rows[row].append(examples[i])
        room[row] -= size
        by_room[room[row]].append(row)
    return rows


def to_batch(rows: Rows, seq_len: int) -> Batch:
    """(B, seq_len); what is behind a row's last example is document 0, and no target."""
    shape = len(rows), seq_len
    ids, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for r, row in enumerate(rows):
        at = 0
        for number, example in enumerate(row, 1):
            n = len(example.ids) - 1
            here = slice(at, at + n)
            ids[r, here] = example.ids[:-1]
            learned = np.array(example.learned[1:], bool)
            targets[r, here] = np.where(learned, example.ids[1:], IGNORED)
            documents[r, here], positions[r, here] = number, np.arange(n)
            at += n
    arrays = (ids, targets, documents, positions, np.flatnonzero(targets != IGNORED))
    return Batch(*(torch.from_numpy(array) for array in arrays))


class PackedExamples:
    """Batch i holds rows i·B to (i + 1)·B of all epochs laid end to end, each in its own order."""

    def __init__(self, rows: Rows, batch_size: int, seq_len: int, seed: int) -> None:
        self.rows, self.batch_size, self.seq_len, self.seed = rows, batch_size, seq_len, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, index: int) -> Batch:
        first = index * self.batch_size
        chosen = []
        for at in range(first, first + self.batch_size):
            epoch, place = divmod(at, len(self.rows))
            if epoch != self._epoch:
                random = np.random.default_rng((self.seed, epoch))
                self._epoch, self._order = epoch, random.permutation(len(self.rows))
            chosen.append(self.rows[self._order[place]])
        return to_batch(chosen, self.seq_len)


def in_order(rows: Rows, batch_size: int, seq_len: int) -> Iterator[Batch]:
    """Each row once, for a held-out set."""
    for at in range(0, len(rows), batch_size):
        yield to_batch(rows[at : at + batch_size], seq_len)


def mixed(sets: Sequence[Sequence[Example]], weights: Sequence[float], seed: int) -> list[Example]:
    """One epoch: each set as often as its weight says, and of the rest a random share."""
    chosen: list[Example] = []
    for number, (examples, weight) in enumerate(zip(sets, weights, strict=True)):
        whole, part = divmod(weight * len(examples), len(examples))
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        chosen += list(examples) * int(whole) + [examples[i] for i in order[: round(part)]]
    return chosen
