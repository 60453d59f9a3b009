"""The KV cache: keys and values of the tokens so far, and where each of them stands."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .config import DynamicScaling, ModelConfig


class KVCache:
    """Room for `max_len` tokens a row, allocated once; K heads, never repeated to H.

    Slot s of a row holds its s-th real token: padding is not stored, so rows may differ in
    `length` (B,). A forward pass places its tokens, writes each layer, and commits at its end;
    one that is interrupted leaves the cache as it was.
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
            raise InputError(
                f"max_len {max_len} is above max_seq_len {cfg.max_seq_len}, where dynamic "
                "rope_scaling turns past keys anew at each length; run without a cache"
            )
        # One slot more than max_len: where the padding of unequal rows is written.
        shape = (cfg.n_layers, batch_size, cfg.kv_heads, max_len + 1, cfg.head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(batch_size, max_len + 1, dtype=torch.long, device=device)
        self.length = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len = max_len
        self.end = 0  # the longest row's length, known without asking the device
        self.plain = True  # all rows equally long, positions 0, 1, 2 …

    def place(
        self, positions: Tensor, real: Tensor | None, plain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Slots for T new tokens; returns the positions (B, S) of all keys and which are real."""
        rows, steps = len(self.length), positions.shape[1]
        if plain:
            self._slots: Tensor | slice = slice(self.end, self.end + steps)
            self._next, self._next_end = self.length + steps, self.end + steps
        else:
            real = self.positions.new_ones(rows, steps).bool() if real is None else real
            self._next = self.length + real.sum(1)
            self._next_end = int(self._next.max())
            self._slots = self.length[:, None] + real.cumsum(1) - 1
            self._slots = torch.where(real, self._slots, self.max_len)
        if self._next_end > self.max_len:
            raise InputError(
                f"the cache holds {self.max_len} tokens and {self._next_end} are needed; "
                "make it with a larger max_len or truncate() it"
            )
        self._rows = torch.arange(rows, device=self.length.device)[:, None]
        self._plain = plain
        if plain:
            self.positions[:, self._slots] = positions
            return self.positions[:, : self._next_end], None
        self.positions[self._rows, self._slots] = positions.expand(rows, steps)
        slot = torch.arange(self._next_end, device=self.length.device)
        return self.positions[:, : self._next_end], slot < self._next[:, None]

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores one layer's new k, v (B, K, T, E); returns all of that layer's (B, K, S, E)."""
        stored = []
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            if isinstance(self._slots, slice):
                buffer[:, :, self._slots] = new.detach()
            else:  # the two index tensors stand apart, so their dimensions come first
                buffer[self._rows, :, self._slots] = new.detach().transpose(1, 2).to(buffer.dtype)
            stored.append(buffer[:, :, : self._next_end].to(new.dtype))
        return stored[0], stored[1]

    def commit(self) -> None:
        """The placed tokens count from now on."""
        self.length, self.end, self.plain = self._next, self._next_end, self._plain

    def truncate(self, n: int) -> None:
        """Keeps each row's first n tokens (a shorter row stays as it is)."""
        if n < 0:
            raise InputError(f"truncate({n}): the number of tokens to keep cannot be negative")
        self.length, self.end = self.length.clamp(max=n), min(self.end, n)
        self.plain = self.plain or n == 0

    def select(self, rows: list[int] | Tensor) -> None:
        """Keeps these rows, in this order; a row named twice is copied (samples of one prompt)."""
        index = torch.as_tensor(rows, device=self.length.device)
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.positions, self.length = self.positions[index], self.length[index]
