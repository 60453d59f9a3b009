"""The KV cache in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.config import ModelConfig
from ..model.kv_cache import KVCache


class Int8KVCache(KVCache):
    """Keys and values int8, a scale for each head of each token: amax / 127, in fp32.

    key_scales, value_scales: (L, B, K, max_len + 1), the slots as in `keys` and `values`. A token
    is rounded once, when it is written, so that any split of a text gives the same numbers.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        batch_size: int,
        max_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(cfg, batch_size, max_len, torch.int8, device)
        self.key_scales = torch.zeros(self.keys.shape[:-1], device=device)
        self.value_scales = torch.zeros_like(self.key_scales)

    @property
    def nbytes(self) -> int:
        """Of keys, values and scales."""
        parts = self.keys, self.values, self.key_scales, self.value_scales
        return sum(part.nbytes for part in parts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores one layer's new k, v (B, K, T, E), rounded; returns all of that layer's
        (B, K, S, E), dequantised in their dtype."""
        held = self._write(self.keys[layer], self.key_scales[layer], k)
        return held, self._write(self.values[layer], self.value_scales[layer], v)

    def _write(self, buffer: Tensor, scales: Tensor, new: Tensor) -> Tensor:
        new, end = new.detach(), self._next[1]
        step = new.float().abs().amax(-1) / 127
        q = (new / step[..., None]).round().where(step[..., None] > 0, 0)
        buffer.transpose(1, 2)[self._slots] = q.transpose(1, 2).to(torch.int8)
        scales.transpose(1, 2)[self._slots] = step.transpose(1, 2)
        return (buffer[:, :, :end] * scales[:, :, :end, None]).to(new.dtype)

    def select(self, rows: list[int] | Tensor) -> None:
        super().select(rows)
        index = torch.as_tensor(rows, device=self.length.device)
        self.key_scales, self.value_scales = self.key_scales[:, index], self.value_scales[:, index]
