"""Where a model is run: through the native kernel where that is faster, else through PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InputError, WeightsError
from ..machine import bf16_if_native
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..native import NativeDecoder, decoder
from ..native.binding import MAX_TOKENS, NOT_FINITE
from ..quant.kv import Int8KVCache
from ..quant.linear import QuantLinear

KV_DTYPES = ("auto", "fp32", "bf16", "int8")

CHUNK = 512  # tokens that PyTorch takes at once: a long prompt's memory is bounded
MOMENT = 0.02  # seconds that the kernel goes on by itself, and a stream waits
FEW = 16  # tokens of plain weights up to which a kernel of narrow vectors beats PyTorch


@dataclass
class _Kernel:
    decoder: NativeDecoder
    at_once: int  # tokens from which on PyTorch is faster, or in which longer texts are cut
    cuts: bool
    checked: bool = False  # that the cache is one it reads, since PyTorch last wrote it
    pace: float = MOMENT  # seconds a token, of the last greedy call

    def reads(self, cache: KVCache) -> bool:
        self.checked = self.checked or self.decoder.fits(cache)
        return self.checked

    def takes(self, rows: int, steps: int) -> bool:
        return rows <= self.at_once if self.cuts else rows * steps <= self.at_once


_kernels: WeakKeyDictionary[KVCache, _Kernel] = WeakKeyDictionary()


def new_cache(model: Transformer, batch_size: int, max_len: int, kv_dtype: str = "auto") -> KVCache:
    """Room for max_len tokens in each of batch_size rows, on the model's device.

    kv_dtype: "auto" is that of the model's parameters, or bf16 if its weights are quantised. The
    kernel reads the weights where they are now: a cache is for a model that stays as it is.
    """
    if kv_dtype not in KV_DTYPES:
        raise InputError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}: {kv_dtype!r}")
    parameter = next(model.parameters())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(kv_dtype, parameter.dtype)
    quantised = any(isinstance(module, QuantLinear) for module in model.modules())
    if kv_dtype == "auto" and quantised:
        dtype = torch.bfloat16
    if kv_dtype == "int8":
        cache: KVCache = Int8KVCache(model.config, batch_size, max_len, parameter.device)
    else:
        cache = KVCache(model.config, batch_size, max_len, dtype, parameter.device)
    kernel = decoder(model)
    if kernel is not None and batch_size <= MAX_TOKENS:
        cuts = quantised or kernel.wide
        at_once = MAX_TOKENS if cuts or _widens(model) else FEW
        _kernels[cache] = _Kernel(kernel, at_once, cuts)
    return cache


def run(
    model: Transformer, ids: Tensor, cache: KVCache, real: Tensor | None = None, keep: int = 1
) -> Tensor:
    """Appends ids (B, T) to a cache of `new_cache`; fp32 logits (B, keep, V) of the last `keep`.

    real: bool (B, T), False is padding on the left. Dropout is off. Interrupted, the cache holds
    none or a part of the tokens. WeightsError for logits that are not finite.
    """
    kernel, (rows, steps) = _kernels.get(cache), ids.shape
    fits = kernel is not None and kernel.reads(cache) and kernel.takes(rows, steps)
    if kernel is None or not fits or real is not None:
        logits = _through_pytorch(model, ids, cache, real, keep)
        if not logits.isfinite().all():
            raise WeightsError(NOT_FINITE)
        return logits
    parts = _cut(ids, kernel.at_once // rows)
    step = kernel.decoder.step
    return _joined((step(part, cache, min(keep, part.shape[1])) for part in parts), keep)


def runs_ahead(cache: KVCache) -> bool:
    """Whether `greedy` serves this cache."""
    kernel = _kernels.get(cache)
    return kernel is not None and len(cache.length) == 1 and kernel.reads(cache)


def greedy(
    token: int, cache: KVCache, most: int, stop_ids: Collection[int], vocab_size: int
) -> list[tuple[int, float]]:
    """Up to `most` ids after `token`, as many as the kernel makes in a moment, each the likeliest
    below vocab_size, with their log-probabilities. A stop id is the last.

    The cache then holds `token` and the ids but the last. WeightsError as of `run`.
    """
    kernel, begun = _kernels[cache], time.perf_counter()
    count = max(1, min(most, int(MOMENT / kernel.pace)))
    found = kernel.decoder.greedy(token, cache, count, stop_ids, vocab_size)
    kernel.pace = (time.perf_counter() - begun) / len(found[0])
    return list(zip(*found, strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """For work on one row of logits, which two threads do no faster, and which keep spinning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def last_logits(
    model: Transformer, ids: Tensor, cache: KVCache, real: Tensor | None = None
) -> Tensor:
    """`run` for the last token alone: (B, V)."""
    return run(model, ids, cache, real)[:, -1]


def _cut(ids: Tensor, size: int) -> list[Tensor]:
    """Parts of `size` columns, the first one shorter."""
    steps = ids.shape[1]
    ends = range(steps % size or size, steps + 1, size)
    return [ids[:, max(0, end - size) : end] for end in ends]


def _joined(parts: Iterator[Tensor], keep: int) -> Tensor:
    """The last `keep` logits of a text run in parts, each of which gives as many as it can."""
    logits = next(parts)
    for more in parts:
        logits = torch.cat([logits, more], 1)[:, -keep:]
    return logits


def _through_pytorch(
    model: Transformer, ids: Tensor, cache: KVCache, real: Tensor | None, keep: int
) -> Tensor:
    if cache in _kernels:
        _kernels[cache].checked = False
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    size = max(1, CHUNK // len(ids))
    parts = _cut(ids, size)
    masks = [None] * len(parts) if real is None else _cut(real, size)
    try:
        with _Widened() if _widens(model) else nullcontext():
            passes = (
                model(part, cache=cache, attention_mask=mask, logits_to_keep=keep)
                for part, mask in zip(parts, masks, strict=True)
            )
            return _joined(passes, keep).float()
    finally:
        for module in training:
            module.training = True


def _widens(model: Transformer) -> bool:
    """Whether its weights are bf16 on a machine that multiplies that slowly."""
    parameter = next(model.parameters())
    return parameter.dtype == torch.bfloat16 != bf16_if_native(parameter.device)


class _Widened(TorchFunctionMode):
    """bf16 weights as fp32 for as long as an operator runs; sums and activations are fp32's, too.
    Processors without bf16 multiply it at a few hundredths of fp32's speed."""

    WIDER = (F.linear, F.layer_norm, F.rms_norm)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.embedding:
            return func(*args, **(kwargs or {})).float()
        if func in self.WIDER:
            args = [a.float() if isinstance(a, Tensor) else a for a in args]
            kwargs = {
                k: a.float() if isinstance(a, Tensor) else a for k, a in (kwargs or {}).items()
            }
        return func(*args, **(kwargs or {}))
