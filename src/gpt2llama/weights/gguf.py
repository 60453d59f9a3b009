"""GGUF, the format of llama.cpp: its architectures llama, gpt2, qwen2 and qwen3.

gguf_file.py has the file, gguf_blocks.py the quantised types. Names and defaults are those of
llama.cpp's loader (src/llama-model.cpp) and of gguf-py. Every metadata key under the
architecture's prefix is read, must have the one value the model can do, says nothing about the
computation (`_INERT`), or is refused by name. No torch before a tensor is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, InputError, TokenizerError
from ..model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    RopeScaling,
    YarnScaling,
)
from ..quant.scheme import QuantScheme
from .gguf_blocks import BY_NAME, encode
from .gguf_file import (
    Metadata,
    Stored,
    read_blocks,
    read_header,
    read_start,
    read_tensor,
    shortest,
    write_file,
)
from .keys import plain, refuse, without
from .opened import PAIRS, SPLIT, Opened, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ..model.transformer import Transformer
    from ..tokenizer import Facts, Tokenizer
    from .opened import Parts, State

_NAMES = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "attn_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}
_TABLE, _HEAD, _POSITIONS = "token_embd.weight", "output.weight", "position_embd.weight"
_KEPT = {  # what QuantLinear can hold as it is
    "Q8_0": QuantScheme(bits=8, group=32, method="gguf"),
    "Q4_0": QuantScheme(bits=4, group=32, method="gguf"),
    "Q4_1": QuantScheme(bits=4, group=32, zero=True, method="gguf"),
}
_ROPE_FACTORS = "rope_freqs.weight"  # by what each pair's frequency is divided


@dataclass(frozen=True)
class Architecture:
    """keys: theirs, without the prefix -> our field. fixed: our fields that have one value in it.

    interleaved: the rows of Q and K of a head stand pairwise. fused: q, k and v are one tensor.
    """

    keys: dict[str, str]
    fixed: dict[str, Any]
    interleaved: bool = False
    fused: bool = False


_KEYS = {
    "context_length": "max_seq_len",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "d_ff",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
}
_ROPE_KEYS = {
    **_KEYS,
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_theta",
}
_OPTIONAL = ("n_kv_heads", "head_dim", "rope_theta")
_COMMON = {
    "norm_placement": "pre",
    "embed_scale": False,
    "sliding_window": None,
    "logit_softcap": None,
}
_ROPE = {
    **_COMMON,
    "norm": "rmsnorm",
    "position": "rope",
    "activation": "silu",
    "gated_mlp": True,
    "qk_norm": False,
}
_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_GPT2 = {
    **_COMMON,
    "norm": "layernorm",
    "norm_bias": True,
    "position": "learned",
    "activation": "gelu_tanh",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "n_kv_heads": None,
    "head_dim": None,
    "qk_norm": False,
}
ARCHITECTURES = {  # what several can express is written as the first of them
    "gpt2": Architecture({**_KEYS, "attention.layer_norm_epsilon": "norm_eps"}, _GPT2, fused=True),
    "qwen2": Architecture(_ROPE_KEYS, {**_ROPE, **_NO_BIAS, "qkv_bias": True, "head_dim": None}),
    "qwen3": Architecture(_ROPE_KEYS, {**_ROPE, **_NO_BIAS, "qk_norm": True}),
    "llama": Architecture(_ROPE_KEYS, _ROPE, interleaved=True),
}
_BIASES = {"qkv_bias": "attn_q", "out_bias": "attn_output", "mlp_bias": "ffn_up"}
_MUST_BE = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
_INERT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # llama.cpp's numbers
_OWN_DTYPE = {"torch.float16": "F16", "torch.bfloat16": "BF16"}


def config_from_gguf(
    metadata: Metadata,
    shapes: dict[str, tuple[int, ...]],
    rope_factors: list[float] | None = None,
    ignore_keys: Collection[str] = (),
) -> ModelConfig:
    """The config by the metadata and the tensors there are; `rope_factors` is rope_freqs.weight.

    ConfigError names the key that is missing, unknown or beyond us.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"its architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(
            f"it is one of {metadata['split.count']} files; join them with llama-gguf-split --merge"
        )
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    left = {
        key.removeprefix(prefix): value
        for key, value in without(metadata, ignore_keys).items()
        if key.startswith(prefix)
    }
    fields = dict(architecture.fixed)
    for key, field in architecture.keys.items():
        if key in left:
            fields[field] = _same_in_all_layers(prefix + key, left.pop(key))
        elif field not in _OPTIONAL:
            raise ConfigError(f"the key {prefix + key!r} is missing")
    for field, module in _BIASES.items():
        fields.setdefault(field, f"blk.0.{module}.bias" in shapes)
    if len(shapes.get(_TABLE, ())) != 2:
        raise ConfigError(f"there is no tensor {_TABLE} of (vocab_size, d_model)")
    fields["vocab_size"], fields["tie_embeddings"] = shapes[_TABLE][0], _HEAD not in shapes
    original = left.pop("rope.scaling.original_context_length", None)
    fields["rope_scaling"] = _read_scaling(left, original or fields["max_seq_len"])
    cfg = plain(ModelConfig(**fields))
    for field, value in architecture.fixed.items():
        if getattr(cfg, field) != value:
            raise ConfigError(f"{name} with {field}={fields[field]!r} is not known here")
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    must = {**_MUST_BE, **dict.fromkeys(sizes, cfg.head_size)}
    for key, value in left.items():
        if key in must and value != must[key]:
            refuse(prefix + key, value, f"is beyond this model, which has {must[key]!r}")
        if key not in must and key not in _INERT:
            refuse(prefix + key, value, "is not known here")
    if rope_factors is not None:
        cfg = cfg.replace(rope_scaling=_llama3_of(rope_factors, cfg, original))
    return cfg


def config_to_gguf(cfg: ModelConfig) -> Metadata:
    """The metadata of the first architecture that can express `cfg`; ConfigError if none can."""
    name = architecture_of(cfg)
    ours = {**vars(cfg), "n_kv_heads": cfg.kv_heads, "head_dim": cfg.head_size}
    ours["norm_eps"], ours["rope_theta"] = float(cfg.norm_eps), float(cfg.rope_theta)
    if isinstance(cfg.rope_scaling, NTKScaling):  # no more than another theta
        ours["rope_theta"] *= cfg.rope_scaling.factor ** (cfg.head_size / (cfg.head_size - 2))
    values = {key: ours[field] for key, field in ARCHITECTURES[name].keys.items()}
    values["vocab_size"] = cfg.vocab_size
    if cfg.position == "rope":
        values["attention.value_length"] = values["rope.dimension_count"] = cfg.head_size
        values |= _write_scaling(cfg.rope_scaling)
    return {"general.architecture": name, **{f"{name}.{key}": v for key, v in values.items()}}


def architecture_of(cfg: ModelConfig) -> str:
    """The first that can express every switch of `cfg`; ConfigError names what none can."""
    cfg, in_the_way = plain(cfg), {}
    for name, architecture in ARCHITECTURES.items():
        wrong = [f for f, value in architecture.fixed.items() if getattr(cfg, f) != value]
        if not _expressible(cfg, name):
            wrong.append("rope_scaling")
        if not wrong:
            return name
        in_the_way[name] = wrong
    nearest = min(in_the_way, key=lambda name: len(in_the_way[name]))
    fields = ", ".join(f"{field}={getattr(cfg, field)!r}" for field in in_the_way[nearest])
    raise ConfigError(
        f"no GGUF architecture of ours has these switches: the nearest, {nearest}, cannot have "
        f"{fields}; format='gpt2llama' keeps every switch"
    )


def state_from_gguf(state: State, name: str, head_size: int) -> State:
    """Their tensors under our names; the rows of Q and K from pairs to halves, gpt2's q, k and v
    apart (views)."""
    back, own = {theirs: ours for ours, theirs in _NAMES.items()}, {}
    back["attn_qkv"] = "self_attn.q_proj"
    for their_name, tensor in state.items():
        new_name = _rename(their_name, "blk.", "layers.", back)
        if ".attn_qkv." in their_name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                own[new_name.replace("q_proj", f"{part}_proj")] = rows
        elif ARCHITECTURES[name].interleaved and _is_q_or_k(new_name):
            own[new_name] = _turn(tensor, head_size // 2, 2)
        else:
            own[new_name] = tensor
    return own


def state_to_gguf(state: State, name: str, head_size: int) -> State:
    """Our tensors (a tied head once) under their names; all of q, k and v of a layer together."""
    theirs, architecture = {}, ARCHITECTURES[name]
    for our_name, tensor in state.items():
        new_name = _rename(our_name, "layers.", "blk.", _NAMES)
        if architecture.fused and ".q_proj." in our_name:
            # new_empty and not torch.cat, which imports torch._dynamo for meta tensors
            fused = tensor.new_empty(3 * len(tensor), *tensor.shape[1:])
            for part, rows in zip("qkv", fused.chunk(3), strict=True):
                rows.copy_(state[our_name.replace("q_proj", f"{part}_proj")])
            theirs[new_name.replace("attn_q", "attn_qkv")] = fused
        elif architecture.interleaved and _is_q_or_k(our_name):
            theirs[new_name] = _turn(tensor, 2, head_size // 2)
        elif not (architecture.fused and (".k_proj." in our_name or ".v_proj." in our_name)):
            theirs[new_name] = tensor
    return theirs


def open_model(path: Path, ignore_keys: Collection[str] = ()) -> Opened:
    """The model of a .gguf file; a quantised tensor counts as fp32.

    Raises FileError, WeightsError for a damaged file, ConfigError for a key or value beyond us.
    """
    metadata, stored = read_header(path)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    try:
        factors = _read_rope_factors(path, stored.pop(_ROPE_FACTORS, None))
        cfg = config_from_gguf(metadata, shapes, factors, ignore_keys)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    name: str = metadata["general.architecture"]
    tied = cfg.tie_embeddings or _begin_alike(path, stored[_HEAD], stored[_TABLE])
    return Opened(
        where=str(path),
        format="gguf",
        config=cfg.replace(tie_embeddings=tied),
        headers=_headers(stored),
        read=lambda name: read_tensor(path, name, stored[name]),
        to_file=partial(state_to_gguf, name=name, head_size=cfg.head_size),
        from_file=partial(state_from_gguf, name=name, head_size=cfg.head_size),
        change=partial(_change, ARCHITECTURES[name]),
        repeats=(_HEAD, _TABLE) if tied and _HEAD in stored else None,
        blocks=lambda name: _blocks(path, name, stored[name]),
        notes=[f"{_ROPE_FACTORS} is {cfg.rope_scaling}"] if factors else [],
        tokenizer=partial(_read_tokenizer, path, metadata),
        facts=partial(_read_facts, metadata),
        readers=2,  # NumPy decodes without holding the interpreter
    )


def write_model(
    path: Path, model: Transformer, tokenizer: Tokenizer | None, dtype: str | None = None
) -> list[str]:
    """A new file that llama.cpp loads, whole or not at all; returns notes, a line each.

    dtype: of the matrices, F32, F16, BF16, Q8_0 or Q4_0; the model's own unless given. Norms,
    biases and learned positions stay F32; a matrix whose rows the blocks do not divide is F16.
    Raises FileError, ConfigError for a switch that no architecture has, WeightsError for a weight
    that the dtype cannot hold.
    """
    from .build import state_of

    state, cfg = state_of(model), model.config
    if dtype is None:
        dtype = _OWN_DTYPE.get(str(state["embed_tokens.weight"].dtype), "F32")
    if dtype not in FILE_TYPES:
        raise InputError(f"dtype must be one of {', '.join(FILE_TYPES)} (got {dtype!r})")
    metadata = {
        **config_to_gguf(cfg),
        "general.name": path.stem,
        "general.file_type": FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **_write_tokenizer(tokenizer, cfg.vocab_size),
    }
    table: dict[str, Stored] = {}
    uneven = []
    for name, tensor in _in_file_order({n: t.to("meta") for n, t in state.items()}, cfg):
        kind = BY_NAME[dtype]
        if tensor.dim() == 1 or name == _POSITIONS:
            kind = BY_NAME["F32"]
        elif tensor.shape[-1] % kind.block:
            kind = BY_NAME["F16"]
            uneven.append(name)
        table[name] = Stored(kind, tuple(tensor.shape))
    pieces = (
        (name, piece)
        for name, tensor in _in_file_order(state, cfg)
        for piece in encode(table[name].kind, tensor, name)
    )
    write_file(path, metadata, table, pieces)
    named = ", ".join(uneven[:3]) + (f" and {len(uneven) - 3} more" if len(uneven) > 3 else "")
    return [f"F16, as {dtype}'s blocks do not divide their rows: {named}"] if uneven else []


def _in_file_order(state: State, cfg: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Their tensors by name; of the converted ones, those of one layer are held at a time."""
    name = architecture_of(cfg)
    parts: dict[str, State] = {}
    for our_name, tensor in state.items():
        layer = ".".join(our_name.split(".")[:2])  # "layers.0"; "norm.weight"
        parts.setdefault(layer, {})[our_name] = tensor
    for part in parts.values():
        yield from state_to_gguf(part, name, cfg.head_size).items()
    if isinstance(cfg.rope_scaling, Llama3Scaling):
        import torch

        factors = _llama3_factors(cfg, cfg.rope_scaling)
        yield _ROPE_FACTORS, torch.tensor(factors, dtype=torch.float32)


def _change(architecture: Architecture, name: str) -> str:
    if architecture.interleaved and re.search(r"\.attn_[qk]\.", name):
        return PAIRS
    return SPLIT if ".attn_qkv." in name else ""


def _same_in_all_layers(key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        refuse(key, value, "differs from layer to layer, which is beyond this model")
    return value[0]


def _read_scaling(left: Metadata, original: Any) -> RopeScaling | None:
    """Takes the keys of its kind out of `left`. `original`: the length before the stretching.

    In YaRN, llama.cpp multiplies `attn_factor` by the paper's 0.1 ln s + 1, whereas
    `yarn_attn_factor`, which gguf-py's converter copies from transformers, replaces it.
    """

    def take(key: str, default: Any) -> Any:
        return left.pop(f"rope.scaling.{key}", default)

    kind, by_an_old_name = take("type", "linear"), left.pop("rope.scale_linear", 0.0)
    factor, attention = take("factor", by_an_old_name), take("attn_factor", 1.0)
    if kind == "yarn":
        ramp = take("yarn_beta_fast", 32.0), take("yarn_beta_slow", 1.0)
        scaling = YarnScaling(factor, original, *ramp, take("yarn_attn_factor", None))
        if attention != 1:
            usual = scaling.attention_factor or _magnitude(scaling.factor)
            YarnScaling(factor, original, attention_factor=attention)  # refuses what is no number
            total = float(f"{attention * usual:.7g}")  # fp32 has no more digits
            scaling = scaling.replace(attention_factor=total)
        extrapolation = take("yarn_ext_factor", 1.0)
        if extrapolation != 1:
            raise ConfigError(f"YaRN with an extrapolation factor of {extrapolation} is beyond us")
        return scaling
    if kind not in ("linear", "none") or attention != 1:
        raise ConfigError(f"RoPE scaling {kind!r} with attn_factor={attention!r} is beyond us")
    return None if kind == "none" or factor in (0, 1) else LinearScaling(factor)


def _write_scaling(scaling: RopeScaling | None) -> Metadata:
    values: Metadata = {}
    if isinstance(scaling, LinearScaling | YarnScaling):
        values = {"type": scaling.KIND, "factor": float(scaling.factor)}
    if isinstance(scaling, YarnScaling | Llama3Scaling):
        values["original_context_length"] = scaling.original_max_seq_len
    if isinstance(scaling, YarnScaling) and scaling.attention_factor is not None:
        values["attn_factor"] = scaling.attention_factor / _magnitude(scaling.factor)
    return {f"rope.scaling.{key}": value for key, value in values.items()}


def _expressible(cfg: ModelConfig, name: str) -> bool:
    """Whether llama.cpp can do its RoPE scaling, and we recognise what is written of it."""
    scaling = cfg.rope_scaling
    if isinstance(scaling, YarnScaling):  # its loader reads no betas for these architectures
        return (scaling.beta_fast, scaling.beta_slow) == (32, 1)
    if isinstance(scaling, Llama3Scaling):
        factors, plain = _llama3_factors(cfg, scaling), cfg.replace(rope_scaling=None)
        try:
            found = _llama3_of(factors, plain, scaling.original_max_seq_len)
        except ConfigError:
            return False
        return found == scaling and name == "llama"  # the one that has rope_freqs.weight
    return not isinstance(scaling, DynamicScaling)


def _magnitude(factor: float) -> float:
    return 0.1 * math.log(max(factor, 1.0)) + 1


def _llama3_factors(cfg: ModelConfig, scaling: Llama3Scaling) -> list[float]:
    """By what the frequency of each pair is divided: the inverse of `position.rope_frequencies`."""
    low, high, factors = scaling.low_freq_factor, scaling.high_freq_factor, []
    for pair in range(cfg.head_size // 2):
        inv_freq = cfg.rope_theta ** (-2 * pair / cfg.head_size)
        turns = scaling.original_max_seq_len * inv_freq / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (keep + (1 - keep) / scaling.factor))
    return factors


def _llama3_of(factors: list[float], cfg: ModelConfig, original: int | None) -> Llama3Scaling:
    """The scaling with these factors: Llama's published 1, 4 and 8192 (or the file's `original`),
    and the largest of them. ConfigError if that is not it."""
    if cfg.rope_scaling is None and len(factors) == cfg.head_size // 2:
        for length in (8192, original):
            scaling = Llama3Scaling(max(factors), 1.0, 4.0, length or 8192)
            if all(map(_near, _llama3_factors(cfg, scaling), factors)):
                return scaling
    raise ConfigError(f"{_ROPE_FACTORS} holds other factors than Llama 3's RoPE scaling gives")


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)  # converters compute them in fp32


def _read_rope_factors(path: Path, stored: Stored | None) -> list[float] | None:
    if stored is None:
        return None
    if stored.kind.name != "F32" or stored.size > 4096:
        raise ConfigError(f"{_ROPE_FACTORS} must hold at most 1024 numbers in F32")
    raw = read_start(path, stored, stored.size)
    return [shortest(number) for (number,) in struct.iter_unpack("<f", raw)]


def _blocks(
    path: Path, name: str, stored: Stored
) -> tuple[QuantScheme, Callable[[], Parts]] | None:
    if stored.kind.name not in _KEPT or len(stored.shape) != 2:
        return None
    return _KEPT[stored.kind.name], partial(read_blocks, path, name, stored)


def _begin_alike(path: Path, head: Stored, table: Stored) -> bool:
    """Whether the head may be a copy of the table (old conversions of GPT-2 have one): told by
    the first numbers of those that are not. `assemble` compares all."""
    if (head.kind, head.shape) != (table.kind, table.shape):
        return False
    return read_start(path, head, 4096) == read_start(path, table, 4096)


def _headers(stored: dict[str, Stored]) -> dict[str, TensorInfo]:
    """Norms, biases and positions, F32 in any file, count as what the table is in."""
    table = stored[_TABLE].kind.dtype or "float32"
    headers = {}
    for name, tensor in stored.items():
        dtype, small = tensor.kind.dtype or "float32", len(tensor.shape) == 1 or name == _POSITIONS
        kind = "" if tensor.kind.dtype else tensor.kind.name
        counted = table if small and dtype == "float32" else dtype
        headers[name] = TensorInfo(tensor.shape, counted, kind)
    return headers


def _read_tokenizer(path: Path, metadata: Metadata) -> Tokenizer | None:
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    from ..tokenizer import tokenizer_from_gguf

    try:
        return tokenizer_from_gguf(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _read_facts(metadata: Metadata) -> Facts | None:
    from ..tokenizer import facts_of_gguf

    return facts_of_gguf(metadata)


def _write_tokenizer(tokenizer: Tokenizer | None, vocab_size: int) -> Metadata:
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    from ..tokenizer import tokenizer_to_gguf

    return tokenizer_to_gguf(tokenizer, vocab_size)


def _rename(name: str, old_prefix: str, prefix: str, modules: dict[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith(old_prefix):
        return f"{modules[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"{prefix}{layer}.{modules[module]}.{kind}"


def _is_q_or_k(our_name: str) -> bool:
    return ".q_proj." in our_name or ".k_proj." in our_name


def _turn(rows: Tensor, outer: int, inner: int) -> Tensor:
    """The rows of each head, or its biases, (outer, inner), as (inner, outer)."""
    heads = rows.reshape(-1, outer, inner, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
