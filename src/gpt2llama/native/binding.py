"""From a model and a cache to the kernel's structures, and a step of it."""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Collection
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, WeightsError
from ..memory import huge_pages
from ..model.kv_cache import KVCache
from ..model.transformer import MLP, Attention, Block, Transformer
from ..quant.linear import TILE, QuantEmbedding, QuantLinear
from .build import CannotBuild, library

MAX_TOKENS = 256  # in a step, over all rows
NOT_FINITE = "the model's logits are not finite: its weights hold NaN or infinity"
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INT8, _INT4 = 2, 3
_ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu")
_log = logging.getLogger("gpt2llama")


class _Matrix(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("group", c_int64),
        ("kind", c_int32),
        ("rounded", c_int32),
    )


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "heads", "kv_heads", "head_dim", "d_model")),
        *((name, c_int64) for name in ("d_ff", "vocab", "window")),
        *((name, c_int32) for name in ("layernorm", "post", "activation")),
        *((name, c_float) for name in ("eps", "embed_scale", "softcap")),
        *((name, _Matrix) for name in ("embed", "head")),
        *((name, c_void_p) for name in ("positions", "cos", "sin")),
        ("norm", _Norm),
        ("layer", POINTER(_Layer)),
    )


class _Cache(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("rows", c_int64),
        ("slots", c_int64),
        ("kind", c_int32),
    )


class _Tokens(Structure):
    _fields_ = (
        *((name, POINTER(c_int64)) for name in ("ids", "row", "slot", "wanted")),
        ("logits", c_void_p),
        ("n", c_int64),
        ("m", c_int64),
        ("strange", c_int),
    )


class _Choices(Structure):
    _fields_ = (
        ("stops", POINTER(c_int64)),
        ("ids", POINTER(c_int64)),
        ("logprobs", POINTER(c_float)),
        ("stop_count", c_int64),
        ("count", c_int64),
        ("vocab", c_int64),
    )


class _Declined(Exception):
    """What of a model the kernel cannot do."""


class NativeDecoder:
    """A model's weights as the kernel sees them: matrices in place, norms and biases in fp32.

    Hold it no longer than the weights stay where they are; making one takes about a millisecond.
    """

    def __init__(self, model: Transformer) -> None:
        for name, module in model.named_modules():
            if _changed(module):
                kind = type(module).__name__
                raise _Declined(f"{name or 'the model'} ({kind}) is not our own, or has hooks")
        cfg = self.config = model.config
        self._model, self._kept = model, []  # type: tuple[Transformer, list[Tensor]]
        self._library, self._contexts = _bind(), 0
        self.wide = self._library.lanes() >= 8  # whether it is the faster one for many tokens, too
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last: tuple[list[Any], _Cache] = [], _Cache()
        self._layers = (_Layer * cfg.n_layers)(*(self._layer(block) for block in model.layers))
        self._struct = _Model(
            layers=cfg.n_layers,
            heads=cfg.n_heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_size,
            d_model=cfg.d_model,
            d_ff=cfg.d_ff,
            vocab=cfg.vocab_size,
            window=cfg.sliding_window or 2**62,
            layernorm=cfg.norm == "layernorm",
            post=cfg.norm_placement == "post",
            activation=_ACTIVATIONS.index(cfg.activation),
            eps=cfg.norm_eps,
            embed_scale=model.scale,
            softcap=cfg.logit_softcap or 0.0,
            embed=self._matrix(model.embed_tokens, cfg.vocab_size, cfg.d_model),
            head=self._matrix(model.lm_head, cfg.vocab_size, cfg.d_model),
            norm=self._norm(model.norm, cfg.d_model),
            layer=self._layers,
        )
        if isinstance(model.embed_positions, nn.Embedding):
            self._matrix(model.embed_positions, cfg.max_seq_len, cfg.d_model)  # of that size

    def fits(self, cache: KVCache) -> bool:
        """Whether it can go on with this cache: on the CPU, of this model's sizes and a kind it
        reads, positions plain. Then those of the free slots become what a step would make them."""
        slots = torch.arange(cache.max_len + 1)
        fits = self._reads(cache) and all(
            torch.equal(row[:n], slots[:n])
            for row, n in zip(cache.positions, cache.length.tolist(), strict=True)
        )
        if fits:
            cache.positions.copy_(slots)
        return fits

    def _reads(self, cache: KVCache) -> bool:
        cfg, keys, values, scales = self.config, cache.keys, cache.values, _scales(cache)
        slots, rows = cache.max_len + 1, len(cache.length)
        sized = scales if keys.dtype == torch.int8 else []
        return (
            keys.dtype in _KINDS
            and self._model.position_limit >= cache.max_len
            and keys.shape == (cfg.n_layers, rows, cfg.kv_heads, slots, cfg.head_size)
            and (values.shape, values.dtype) == (keys.shape, keys.dtype)
            and all(s is not None and s.shape == keys.shape[:-1] for s in sized)
            and all(t.device.type == "cpu" and t.is_contiguous() for t in (keys, values, *sized))
        )

    def step(self, ids: Tensor, cache: KVCache, keep: int = 1) -> Tensor:
        """Appends ids, int64 (B, T), to a cache that fits; fp32 logits (B, keep, V) of the last.

        As `model(ids, cache=cache, logits_to_keep=keep)`. At most MAX_TOKENS ids. InputError for
        sizes out of range, before anything is written; WeightsError for logits that are not finite;
        then, and interrupted, the cache stays as it was.
        """
        steps = ids.shape[1]
        tokens, logits = self._tokens(ids.tolist(), cache, keep, room=steps)
        if not self._run(self._library.decode, tokens, cache):
            raise WeightsError(NOT_FINITE)
        _grow(cache, steps)
        return logits

    def greedy(
        self, token: int, cache: KVCache, count: int, stop_ids: Collection[int], vocab_size: int
    ) -> tuple[list[int], list[float]]:
        """The `count` ids after `token`, each the likeliest below vocab_size, and the logarithms of
        their shares; fewer if one is of stop_ids. Python is not asked between them.

        A cache of one row, which fits; it then holds `token` and the ids but the last. Errors as
        of `step`.
        """
        tokens, _logits = self._tokens([[token]], cache, 1, room=count)  # which are written there
        if count < 1:
            raise InputError(f"count must be at least 1 (got {count})")
        most = self.config.vocab_size
        if not 0 < vocab_size <= most:
            raise InputError(f"vocab_size must be from 1 to {most} (got {vocab_size})")
        ids, logprobs = (c_int64 * count)(), (c_float * count)()
        stops = (c_int64 * len(stop_ids))(*stop_ids)
        choices = _Choices(stops, ids, logprobs, len(stop_ids), count, vocab_size)
        found = self._run(self._library.greedy, tokens, cache, choices)
        if found < 0:
            raise WeightsError(NOT_FINITE)
        _grow(cache, found)
        return ids[:found], logprobs[:found]

    def _tokens(
        self, ids: list[list[int]], cache: KVCache, keep: int, room: int
    ) -> tuple[_Tokens, Tensor]:
        """For a call that will add `room` tokens to each row, and where the logits will be."""
        rows, steps = len(ids), len(ids[0]) if ids else 0
        lengths: list[int] = cache.length.tolist()
        listed = [token for row in ids for token in row]
        if not 0 < rows * steps <= MAX_TOKENS or rows != len(lengths) or not 0 < keep <= steps:
            raise InputError(
                f"a step takes 1 to {MAX_TOKENS} ids, of the cache's rows each as many"
            )
        if (end := max(lengths) + room) > cache.max_len:
            mend = "make it with a larger max_len or truncate() it"
            raise InputError(f"the cache holds {cache.max_len} tokens, {end} are needed; {mend}")
        if min(listed) < 0 or max(listed) >= self.config.vocab_size:
            raise InputError(f"ids must be from 0 to {self.config.vocab_size - 1}")
        self._place(cache.max_len)
        logits = torch.empty(rows, keep, self.config.vocab_size)
        many = c_int64 * (rows * steps)
        wanted = (r * steps + t for r in range(rows) for t in range(steps - keep, steps))
        tokens = _Tokens(
            ids=many(*listed),
            row=many(*(r for r in range(rows) for _ in range(steps))),
            slot=many(*(n + t for n in lengths for t in range(steps))),
            wanted=many(*wanted),
            logits=logits.data_ptr(),
            n=rows * steps,
            m=rows * keep,
        )
        return tokens, logits

    def _run(self, call: Any, tokens: _Tokens, cache: KVCache, *more: Structure) -> int:
        held = self._held(cache)
        with _TEAM.lock:
            team = _TEAM.ready()
            size = self._library.scratch_bytes(self._struct, team.threads, tokens.n, cache.max_len)
            if len(self._scratch) < size:
                self._scratch = torch.empty(size, dtype=torch.uint8)
            scratch = self._scratch.data_ptr()
            return int(call(team.pointer, self._struct, held, tokens, scratch, *more))

    def _held(self, cache: KVCache) -> _Cache:
        """As the kernel sees it; made anew when select() or another cache brought other tensors."""
        tensors = [cache.keys, cache.values, *_scales(cache)]
        before, held = self._last
        if len(before) != len(tensors) or any(map(is_not, before, tensors)):
            if not self._reads(cache):
                raise InputError("the kernel cannot read this cache; ask fits() before step()")
            places = [None if t is None else t.data_ptr() for t in tensors]
            held = _Cache(*places, len(cache.length), cache.max_len + 1, _KINDS[cache.keys.dtype])
            self._last = tensors, held
        return held

    def _place(self, contexts: int) -> None:
        """Tables of the positions below `contexts`, the model's own."""
        if contexts <= self._contexts:
            return
        model, places = self._model, torch.arange(contexts)[None]
        if model.embed_positions is not None:
            if isinstance(model.embed_positions, nn.Embedding):
                table = model.embed_positions.weight.detach()
            else:
                table = model.embed_positions(places)[0]
            self._struct.positions = self._floats(table, table.numel())
        if model.rope is not None:
            cos, sin = model.rope(places, torch.float32)
            self._struct.cos = self._floats(cos, cos.numel())
            self._struct.sin = self._floats(sin, sin.numel())
        self._contexts = contexts

    def _layer(self, block: Any) -> _Layer:
        cfg, attn, mlp = self.config, block.self_attn, block.mlp
        d, f, q, kv = (
            cfg.d_model,
            cfg.d_ff,
            *(heads * cfg.head_size for heads in (cfg.n_heads, cfg.kv_heads)),
        )
        layer = _Layer(
            attn_norm=self._norm(block.attn_norm, d),
            mlp_norm=self._norm(block.mlp_norm, d),
            q_norm=self._norm(attn.q_norm, cfg.head_size),
            k_norm=self._norm(attn.k_norm, cfg.head_size),
            q=self._matrix(attn.q_proj, q, d),
            k=self._matrix(attn.k_proj, kv, d),
            v=self._matrix(attn.v_proj, kv, d),
            o=self._matrix(attn.o_proj, d, q),
            up=self._matrix(mlp.up_proj, f, d),
            down=self._matrix(mlp.down_proj, d, f),
        )
        if mlp.gate_proj is not None:
            layer.gate = self._matrix(mlp.gate_proj, f, d)
        return layer

    def _matrix(self, module: Any, rows: int, cols: int) -> _Matrix:
        """Of just these sizes: the kernel reads as many numbers whatever is there."""
        if isinstance(module, QuantEmbedding):
            return self._matrix(module.table, rows, cols)
        if isinstance(module, QuantLinear):
            return self._quantised(module, rows, cols)
        weight = module.weight
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise _Declined(f"its weights are {weight.dtype}")
        bias = getattr(module, "bias", None)
        return _Matrix(
            weight=self._in_place(weight, weight.dtype, rows, cols),
            bias=None if bias is None else self._floats(bias.detach(), rows),
            rows=rows,
            cols=cols,
            kind=_KINDS[weight.dtype],
        )

    def _quantised(self, module: QuantLinear, rows: int, cols: int) -> _Matrix:
        scheme, tiles, scale, low = module.scheme, -(-rows // TILE), module.scale, module.minimum
        words = self._in_place(module.words, torch.int32, tiles, cols * scheme.bits // 32, TILE)
        scales = (torch.float16, tiles, scheme.groups(cols), TILE)
        return _Matrix(
            weight=words,
            scale=self._in_place(scale, *scales),
            minimum=None if low is None else self._in_place(low, *scales),
            bias=None if module.bias is None else self._floats(module.bias, rows),
            rows=rows,
            cols=cols,
            group=scheme.group or cols,
            kind=_INT8 if scheme.bits == 8 else _INT4,
            rounded=scheme.activations == "int8",
        )

    def _norm(self, module: Any, size: int) -> _Norm:
        if isinstance(module, nn.Identity):
            return _Norm()
        bias = getattr(module, "bias", None)
        return _Norm(
            weight=self._floats(module.weight.detach(), size),
            bias=None if bias is None else self._floats(bias.detach(), size),
        )

    def _in_place(self, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
        """The address of numbers that lie as the kernel reads them."""
        if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.shape != shape:
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
            raise _Declined(f"it has weights {found}, where the config has {shape} on the CPU")
        if not tensor.is_contiguous():
            raise _Declined("its weights are strided")
        self._kept.append(tensor.detach())
        return tensor.data_ptr()

    def _floats(self, tensor: Tensor, size: int) -> int:
        """The address of fp32 numbers, a copy unless they are that already."""
        return self._in_place(tensor.float().contiguous().flatten(), torch.float32, size)


def _grow(cache: KVCache, steps: int) -> None:
    length = cache.length + steps
    cache.length, cache.end = length, int(length.max())  # both or, interrupted, neither


def _scales(cache: KVCache) -> list[Any]:
    """Of an int8 cache; None of others."""
    return [getattr(cache, name, None) for name in ("key_scales", "value_scales")]


_OURS = (Transformer, Block, Attention, MLP, QuantLinear, QuantEmbedding)
_TORCHS = (nn.ModuleList, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity)


def _changed(module: nn.Module) -> bool:
    """Whether it may compute something else than the kernel thinks. Dropout is off here."""
    ours = type(module) in (*_OURS, *_TORCHS) or isinstance(module, nn.Dropout)
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not ours or bool(hooks) or "forward" in vars(module)


def decoder(model: Transformer) -> NativeDecoder | None:
    """The kernel for this model, or None where it declines or cannot be built: said once."""
    try:
        return NativeDecoder(model)
    except (CannotBuild, _Declined) as why:
        if str(why) not in _SAID:
            _SAID.add(str(why))
            _log.warning("decoding runs through PyTorch, without the native kernel: %s", why)
        return None


_SAID: set[str] = set()


class _Team:
    """The process's threads, as many as torch has. One call at a time, which holds `lock`: the lock
    itself and no method of ours, between whose lines an interrupt would leave it locked."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked process none of the threads is there."""
        self.lock = threading.Lock()
        self._asked, self.threads, self.pointer = 0, 0, None  # type: tuple[int, int, int | None]

    def ready(self) -> _Team:
        """Itself, with threads; `lock` is held."""
        asked = torch.get_num_threads()
        if asked == self._asked:
            return self
        kernel, threads = _bind(), asked
        # Forgotten first: an interrupted call leaves no pointer to what is freed.
        old, self._asked, self.pointer = self.pointer, 0, None
        if old is not None:
            kernel.team_free(old)
        while (pointer := kernel.team_new(threads)) is None and threads > 1:
            threads //= 2
        if pointer is None:
            raise MemoryError("the system gives no memory for a thread team")
        self._asked, self.threads, self.pointer = asked, threads, pointer
        return self


_TEAM = _Team()


def _bind() -> Any:
    kernel: Any = library()
    if kernel.team_new.restype is not c_void_p:
        kernel.team_new.restype = c_void_p
        kernel.team_new.argtypes = (c_int,)
        kernel.team_free.restype = None
        kernel.team_free.argtypes = (c_void_p,)
        kernel.scratch_bytes.restype = c_int64
        kernel.scratch_bytes.argtypes = (POINTER(_Model), c_int, c_int64, c_int64)
        kernel.decode.restype = c_int
        step = c_void_p, POINTER(_Model), POINTER(_Cache), POINTER(_Tokens), c_void_p
        kernel.decode.argtypes = step
        kernel.greedy.restype = c_int64
        kernel.greedy.argtypes = (*step, POINTER(_Choices))
        kernel.lanes.restype = c_int
        kernel.read_all.restype = c_int32
        kernel.read_all.argtypes = (c_void_p, c_void_p, c_int64)
    return kernel


def read_bandwidth(size: int, repeats: int = 10) -> float | None:
    """Bytes a second at which all of torch's threads read `size` bytes, and do nothing else: the
    fastest of `repeats` passes. None where there is no kernel.
    """
    try:
        kernel = _bind()
    except CannotBuild:
        return None
    memory = huge_pages(max(size, mmap.PAGESIZE))
    data = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)  # untouched pages share one
    best = math.inf
    with _TEAM.lock:
        team = _TEAM.ready()
        for _ in range(repeats):
            begun = time.perf_counter()
            kernel.read_all(team.pointer, data.data_ptr(), len(data))
            best = min(best, time.perf_counter() - begun)
    return len(data) / best
