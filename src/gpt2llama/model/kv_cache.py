"""The KV cache: keys and values of the tokens so far, and where each of them stands."""

import torch
from torch import Tensor

from ..errors import InputError
from .config import DynamicScaling, ModelConfig


class KVCache:
    """Room for `max_len` tokens a row, allocated once; K heads, never repeated to H.

    Slot s of a row holds its s-th real token: rows may differ in `length` (B,). A forward pass
    places its tokens, writes each layer, and commits; interrupted, it leaves the cache as it was.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(cfg.rope_scaling, DynamicScaling) and max_len > cfg.max_seq_len:
            rule = "where dynamic rope_scaling turns past keys anew: use no cache"
            raise InputError(f"max_len {max_len} is above max_seq_len {cfg.max_seq_len}, {rule}")
        # One slot more than max_len: where the padding of unequal rows is written.
        shape = (cfg.n_layers, batch_size, cfg.kv_heads, max_len + 1, cfg.head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.zeros(batch_size, max_len + 1, dtype=torch.long, device=device)
        self.length = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len = max_len
        self.end = 0  # the longest row's length, known without asking the device
        self.plain = True  # all rows equally long, at positions 0, 1, 2 …

    def place(
        self, positions: Tensor, real: Tensor | None, plain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Slots for T new tokens; all keys' positions (B, S), and which are real (None: all)."""
        rows, steps = len(self.length), positions.shape[1]
        new = torch.ones_like(positions).expand(rows, -1) if real is None else real.long()
        length = self.length + new.sum(1)
        end = self.end + steps if plain else max(1, int(length.max()))
        if end > self.max_len:
            mend = "make it with a larger max_len or truncate() it"
            raise InputError(f"the cache holds {self.max_len} tokens, {end} are needed; {mend}")
        slots = (self.length[:, None] + new.cumsum(1) - 1).where(new > 0, self.max_len)
        rows_first = torch.arange(rows, device=slots.device)[:, None]
        self.positions[rows_first, slots] = positions.expand(rows, -1)
        self._slots = (slice(None), slice(self.end, end)) if plain else (rows_first, slots)
        self._next = length, end, plain
        slot = torch.arange(end, device=slots.device)
        return self.positions[:, :end], None if plain else slot < length[:, None]

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores one layer's new k, v (B, K, T, E); returns all of that layer's (B, K, S, E)."""
        keys, values, end = self.keys[layer], self.values[layer], self._next[1]
        for buffer, new in ((keys, k), (values, v)):
            buffer.transpose(1, 2)[self._slots] = new.detach().transpose(1, 2).to(buffer.dtype)
        return keys[:, :, :end].to(k.dtype), values[:, :, :end].to(v.dtype)

    def commit(self) -> None:  # the placed tokens count from now on
        self.length, self.end, self.plain = self._next

    def truncate(self, n: int) -> None:
        """Keeps each row's first n tokens; a shorter row stays as it is."""
        if n < 0:
            raise InputError(f"truncate({n}): the number of tokens to keep cannot be negative")
        self.length, self.end = self.length.clamp(max=n), min(self.end, n)

    def select(self, rows: list[int] | Tensor) -> None:
        """Keeps these rows, in this order; a row named twice is copied (samples of one prompt)."""
        index = torch.as_tensor(rows, device=self.length.device)
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.positions, self.length = self.positions[index], self.length[index]
