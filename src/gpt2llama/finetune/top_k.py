"""A teacher's likeliest tokens, written once and read in every epoch.

RUN/teacher/NNNNN.safetensors holds, of W windows of T places: `ids` (W, T, K), uint16 or int32;
`logprobs` (W, T, K) and `rest` (W, T), float32, softened by the run's temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..atomic import new_file
from ..data.batches import Batch
from ..data.shards import Tokens
from ..errors import DataError, WeightsError, counted
from ..weights.files import read_tensors

if TYPE_CHECKING:
    from ..model.transformer import Transformer

SHARD_BYTES = 8 << 20
AT_ONCE = 4096  # tokens the teacher reads in a pass
Watch = Callable[[int, int], None]  # done, of how many


@dataclass(frozen=True, eq=False)
class TopK:
    """A distribution: its likeliest tokens, and the rest as one bucket."""

    ids: Tensor  # (…, K) int64
    logprobs: Tensor  # (…, K) float32
    rest: Tensor  # (…,) float32, log-probability of all others together; -inf: there are none

    @classmethod
    def of(cls, logits: Tensor, k: int, temperature: float) -> TopK:
        """Of logits (…, V), softened."""
        p = (logits / temperature).log_softmax(-1)
        top = p.topk(min(k, p.shape[-1]), dim=-1)
        return cls(top.indices, top.values, _others(p, top.indices))


def bucket_divergence(student: Tensor, teacher: TopK, temperature: float) -> Tensor:
    """KL(teacher ‖ student) over K tokens and a bucket: logits (N, V) -> (N,) nats.

    Never more than over all tokens; equal where each has a place of its own.
    """
    q, p = (student / temperature).log_softmax(-1), teacher.logprobs
    kl = (p.exp() * (p - q.gather(-1, teacher.ids))).sum(-1)
    if teacher.ids.shape[-1] == student.shape[-1]:
        return kl
    return kl + teacher.rest.exp() * (teacher.rest - _others(q, teacher.ids))


def _others(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of all tokens (…, V) but these (…, K)."""
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)


@dataclass(frozen=True, eq=False)
class TaughtBatch(Batch):
    """Rows (B, T), and what the teacher says at each place."""

    top_ids: Tensor = field(default_factory=torch.Tensor)  # (B, T, K) int64
    top_logprobs: Tensor = field(default_factory=torch.Tensor)  # (B, T, K)
    rest: Tensor = field(default_factory=torch.Tensor)  # (B, T)

    def taught(self, real: Tensor) -> TopK:
        """At the places where `real`, bool (B, T), holds."""
        return TopK(self.top_ids[real], self.top_logprobs[real], self.rest[real])


class TaughtBatches:
    """The training stream in windows of seq_len + 1 tokens, each epoch in an order of its own.

    The windows lie still, unlike those of PackedBatches, so that a teacher's word on one holds in
    every epoch. Batch i is a function of (seed, i). vocab_size: the tokens that the teacher's
    probabilities are of.
    """

    def __init__(
        self,
        tokens: Tokens,
        folder: Path,
        *,
        vocab_size: int,
        k: int,
        temperature: float,
        batch_size: int,
        seq_len: int,
        seed: int,
    ) -> None:
        self.tokens, self.folder, self.vocab_size = tokens, folder, vocab_size
        self.k, self.temperature = min(k, vocab_size), temperature
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise DataError(
                f"the training text has {counted(len(tokens), 'token')}, fewer than seq_len + 1 = "
                f"{seq_len + 1:,}; give more text or a smaller seq_len"
            )
        self.id_type = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
        window_bytes = seq_len * (self.k * (self.id_type.itemsize + 4) + 4)
        self.per_shard = max(1, SHARD_BYTES // window_bytes)
        self._epoch, self._order = -1, np.empty(0, np.int64)
        first = self._window_order(0)
        self._place = np.empty_like(first)  # of each window in the shards: the first epoch's order
        self._place[first] = np.arange(self.windows)
        self._shards: dict[int, dict[str, Tensor]] = {}

    def batch(self, index: int) -> TaughtBatch:
        """Raises WeightsError for a shard that is damaged or another run's."""
        windows = []
        for number in range(index * self.batch_size, (index + 1) * self.batch_size):
            epoch, at = divmod(number, self.windows)
            windows.append(int(self._window_order(epoch)[at]))
        tokens, rows = self._rows(windows), []
        for window in windows:
            shard, row = divmod(int(self._place[window]), self.per_shard)
            rows.append({name: tensor[row] for name, tensor in self._shard(shard).items()})
        top = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return TaughtBatch(
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            top_ids=top["ids"].long(),
            top_logprobs=top["logprobs"],
            rest=top["rest"],
        )

    def fill(
        self,
        teacher: Callable[[], Transformer],
        batches: int,
        watch: Watch = lambda done, count: None,
    ) -> None:
        """Writes what the first `batches` will read, unless it is there; each shard appears whole.

        teacher: loaded only if something is missing. watch: windows done, and all there will be.
        Raises FileError for what cannot be written.
        """
        needed = min(self.windows, batches * self.batch_size)
        shards = -(-needed // self.per_shard)
        missing = [i for i in range(shards) if not self._path(i).is_file()]
        if not missing:
            return
        for partial in self.folder.glob(".*"):  # left by a kill in the middle of writing
            partial.unlink()
        from safetensors.torch import save

        model, order = teacher(), self._window_order(0)
        count = min(self.windows, shards * self.per_shard)
        for shard in missing:
            begin = shard * self.per_shard
            windows, parts = order[begin : begin + self.per_shard].tolist(), list[TopK]()
            rows = max(1, AT_ONCE // self.seq_len)
            for at in range(0, len(windows), rows):
                watch(begin + at, count)
                parts.append(self._taught(model, windows[at : at + rows]))
            with new_file(self._path(shard)) as file:
                file.write(
                    save(
                        {
                            "ids": torch.cat([part.ids for part in parts]).to(self.id_type),
                            "logprobs": torch.cat([part.logprobs for part in parts]),
                            "rest": torch.cat([part.rest for part in parts]),
                        }
                    )
                )
        watch(count, count)

    @torch.no_grad()
    def _taught(self, model: Transformer, windows: Sequence[int]) -> TopK:
        ids = self._rows(windows)[:, :-1].to(next(model.parameters()).device)
        logits = model(ids)[..., : self.vocab_size].float()
        top = TopK.of(logits, self.k, self.temperature)
        return TopK(top.ids.cpu(), top.logprobs.cpu(), top.rest.cpu())

    def _window_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, epoch))
            self._epoch, self._order = epoch, random.permutation(self.windows)
        return self._order

    def _rows(self, windows: Sequence[int]) -> Tensor:
        """Tokens (B, T + 1)."""
        starts = [window * self.seq_len for window in windows]
        rows = [self.tokens[start : start + self.seq_len + 1] for start in starts]
        return torch.from_numpy(np.stack(rows))

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def _shard(self, shard: int) -> dict[str, Tensor]:
        """Mapped from the file, and what the run expects."""
        if shard not in self._shards:
            path, found = self._path(shard), read_tensors(self._path(shard))
            rows = min(self.per_shard, self.windows - shard * self.per_shard)
            wanted: dict[str, Any] = {
                "ids": ((rows, self.seq_len, self.k), self.id_type),
                "logprobs": ((rows, self.seq_len, self.k), torch.float32),
                "rest": ((rows, self.seq_len), torch.float32),
            }
            if {name: (tuple(t.shape), t.dtype) for name, t in found.items()} != wanted:
                raise WeightsError(f"{path} is another run's; delete it and go on with --resume")
            self._shards[shard] = found
        return self._shards[shard]
