"""Prompts that begin alike: the keys and values of the last texts are kept and used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..quant.kv import Int8KVCache
from .engine import new_cache


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids the two begin with together."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class PrefixCache:
    """Of one model, whose weights stay as they are: a prompt runs only what is new in it.

    Give it to several calls as `prefix=`. It holds at most max_bytes; what was used longest ago
    goes first. One call at a time.
    """

    def __init__(
        self, model: Transformer, *, max_bytes: int = 1 << 28, kv_dtype: str = "auto"
    ) -> None:
        self.model, self.max_bytes, self.kv_dtype = model, max_bytes, kv_dtype
        self._kept: list[tuple[list[int], KVCache]] = []  # the last used at the end

    def take(self, model: Transformer, ids: Sequence[int], room: int) -> tuple[KVCache, int]:
        """A cache with room for that many tokens, and how many of ids it holds: not the last one,
        whose logits are wanted. It is the caller's until `keep`."""
        if model is not self.model:
            raise InputError("this PrefixCache is another model's; make one for each")
        shared = [common_prefix(text, ids[:-1]) for text, _ in self._kept]
        most = max(shared, default=0)
        if most == 0:
            return new_cache(model, 1, room, self.kv_dtype), 0
        _, cache = self._kept.pop(shared.index(most))
        cache.truncate(most)
        if cache.max_len < room:
            cache = self._copy(cache, room)
        return cache, most

    def keep(self, ids: Sequence[int], cache: KVCache) -> None:
        """Of a text, what of it the cache holds; the oldest others make room."""
        self._kept.append((list(ids[: cache.end]), cache))
        while self.nbytes > self.max_bytes:
            del self._kept[0]

    @property
    def nbytes(self) -> int:
        return sum(sum(part.nbytes for part in _parts(cache)) for _, cache in self._kept)

    def _copy(self, cache: KVCache, room: int) -> KVCache:
        larger, n = new_cache(self.model, 1, room, self.kv_dtype), cache.end
        for new, old in zip(_parts(larger), _parts(cache), strict=True):
            new[:, :, :, :n] = old[:, :, :, :n]
        larger.positions[:, :n] = cache.positions[:, :n]
        larger.length, larger.end, larger.plain = cache.length, n, cache.plain
        return larger


def _parts(cache: KVCache) -> list[torch.Tensor]:
    """What it holds for each slot: (layers, rows, heads, slots, …)."""
    scales = [cache.key_scales, cache.value_scales] if isinstance(cache, Int8KVCache) else []
    return [cache.keys, cache.values, *scales]
