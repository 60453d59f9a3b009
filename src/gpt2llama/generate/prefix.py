"""Prompts that begin alike: the keys and values of the last texts are kept and used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..quant.kv import Int8KVCache
from .engine import new_cache
from .generation import Generation


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids the two begin with together."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class PrefixCache:
    """Of one model, whose weights stay as they are: a prompt runs only what is new in it.

    Give it to several calls as `prefix=`; they answer as they would without it. Between them it
    holds at most max_bytes, or the last text alone if that takes more; what was used longest ago
    goes first. Not for two threads.
    """

    def __init__(
        self, model: Transformer, *, max_bytes: int = 1 << 28, kv_dtype: str = "auto"
    ) -> None:
        self.model, self.max_bytes, self.kv_dtype = model, max_bytes, kv_dtype
        self._kept: list[tuple[list[int], KVCache]] = []  # the last used at the end

    @contextmanager
    def lend(self, model: Transformer, row: Generation, room: int) -> Iterator[KVCache]:
        """A cache with room for that many tokens, which holds the beginning of the row's prompt,
        but never the last token, whose logits are wanted. What the row then has is kept."""
        if model is not self.model:
            raise InputError("this PrefixCache is another model's; make one for each")
        cache = self._longest(row.prompt, room)
        try:
            yield cache
        finally:
            text = [*row.prompt, *row.ids]
            cache.truncate(len(text))  # tokens that nobody has read yet may lie behind it
            self._kept.append((text[: cache.end], cache))
            while len(self._kept) > 1 and self.nbytes > self.max_bytes:
                del self._kept[0]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, cache in self._kept for part in _parts(cache))

    def _longest(self, ids: Sequence[int], room: int) -> KVCache:
        shared = [common_prefix(text, ids[:-1]) for text, _ in self._kept]
        most = max(shared, default=0)
        if most == 0:
            return new_cache(self.model, 1, room, self.kv_dtype)
        text, cache = self._kept.pop(shared.index(most))
        stays = 2 * most < len(text)  # most of it is its own, and may come again
        if stays:
            self._kept.append((text, cache))
        if stays or cache.max_len < room:
            return self._copy(cache, most, room)
        cache.truncate(most)
        return cache

    def _copy(self, cache: KVCache, n: int, room: int) -> KVCache:
        """Of its first n tokens."""
        copy = new_cache(self.model, 1, room, self.kv_dtype)
        for new, old in zip(_parts(copy), _parts(cache), strict=True):
            new[:, :, :, :n] = old[:, :, :, :n]
        copy.positions[:, :n] = cache.positions[:, :n]
        copy.length, copy.end, copy.plain = cache.length.clamp(max=n), n, cache.plain
        return copy


def _parts(cache: KVCache) -> list[torch.Tensor]:
    """What it holds for each slot: (layers, rows, heads, slots, …)."""
    scales = [cache.key_scales, cache.value_scales] if isinstance(cache, Int8KVCache) else []
    return [cache.keys, cache.values, *scales]
