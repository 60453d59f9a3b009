"""Parameters, FLOPs and bytes of one config. Every result is an exact whole number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, InputError
from ..model.config import DynamicScaling, ModelConfig

# Bits a number takes; a quantiser's scales come on top and are its own affair.
DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Trained numbers by part, and their `total`. A tied head is the embedding: it counts 0."""
    d, layers = cfg.d_model, cfg.n_layers
    q, kv = cfg.n_heads * cfg.head_size, cfg.kv_heads * cfg.head_size
    attention, mlp = matrices(cfg)
    attention += cfg.qkv_bias * (q + 2 * kv) + cfg.out_bias * d
    mlp += cfg.mlp_bias * ((1 + cfg.gated_mlp) * cfg.d_ff + d)
    norm = 2 * d if cfg.norm == "layernorm" and cfg.norm_bias else d
    parts = {
        "embedding": cfg.vocab_size * d,
        "positions": cfg.max_seq_len * d if cfg.position == "learned" else 0,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norms": 2 * layers * (norm + cfg.qk_norm * cfg.head_size)
        + (norm if cfg.norm_placement == "pre" else 0),
        "head": 0 if cfg.tie_embeddings else cfg.vocab_size * d,
    }
    return {**parts, "total": sum(parts.values())}


def matmul_parameters(cfg: ModelConfig) -> int:
    """Weights each token is multiplied by: the head, tied or not, but no look-up and no bias."""
    return cfg.n_layers * sum(matrices(cfg)) + cfg.vocab_size * cfg.d_model


def flops_per_token(cfg: ModelConfig, seq_len: int | None = None) -> int:
    """To train on one token, forward and backward, in texts of `seq_len` (None: max_seq_len).

    6 · matmul parameters + 12 · L · H · E · T: Chowdhery et al. 2022 (PaLM), appendix B. The
    attention scores are counted in full, though a causal mask or a window lets a kernel skip some.
    """
    t = context_length(cfg, seq_len)
    return 6 * matmul_parameters(cfg) + 12 * cfg.n_layers * cfg.n_heads * cfg.head_size * t


def kv_bytes_per_token(cfg: ModelConfig, dtype: str = "bf16") -> int:
    """Keys and values of one token in every layer."""
    return number_bytes(2 * cfg.n_layers * cfg.kv_heads * cfg.head_size, dtype)


def kv_bytes(
    cfg: ModelConfig, context: int | None = None, batch: int = 1, dtype: str = "bf16"
) -> int:
    """The cache of `batch` texts of `context` tokens (None: max_seq_len).

    A sliding window does not shrink it: our cache keeps every token, so that it can be truncated.
    """
    if batch < 1:
        raise InputError(f"batch must be at least 1 (got {batch})")
    return batch * context_length(cfg, context) * kv_bytes_per_token(cfg, dtype)


def weight_bytes(cfg: ModelConfig, dtype: str = "bf16") -> int:
    """Every parameter, a tied table once."""
    return number_bytes(parameters(cfg)["total"], dtype)


def largest_batch(
    cfg: ModelConfig,
    memory: int,
    context: int | None = None,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
) -> int:
    """Texts of `context` tokens whose cache fits in `memory` bytes beside the weights; 0: none.

    Activations and what a framework keeps for itself come on top.
    """
    left = max(0, memory - weight_bytes(cfg, dtype))
    return left // kv_bytes(cfg, context, 1, kv_dtype)


def largest_context(
    cfg: ModelConfig, memory: int, batch: int = 1, dtype: str = "bf16", kv_dtype: str = "bf16"
) -> int:
    """Tokens of each of `batch` texts whose cache fits in `memory` bytes beside the weights.

    More than max_seq_len where a model can go on (RoPE and sinusoids can, however well); never
    with learned positions, nor with dynamic scaling, beyond which there is no cache. 0: none.
    """
    left = max(0, memory - weight_bytes(cfg, dtype))
    tokens = left // kv_bytes(cfg, 1, batch, kv_dtype)
    ends = cfg.position == "learned" or isinstance(cfg.rope_scaling, DynamicScaling)
    return min(tokens, cfg.max_seq_len) if ends else tokens


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one field alone does to a config: differences, None where it cannot change alone.

    before, after: as in ModelConfig.to_dict(). refused: why it cannot.
    """

    field: str
    before: Any
    after: Any
    parameters: int | None = None
    flops_per_token: int | None = None
    kv_bytes_per_token: int | None = None
    refused: str = ""


def changes(base: ModelConfig, cfg: ModelConfig, kv_dtype: str = "bf16") -> list[Change]:
    """Each field in which `cfg` differs from `base`, alone put into `base`.

    FLOPs are those at max_seq_len. The lines need not add up: fields multiply each other.
    """
    before, after = base.to_dict(), cfg.to_dict()
    return [
        _change(base, name, before[name], after[name], kv_dtype)
        for name in before
        if before[name] != after[name]
    ]


def _change(base: ModelConfig, name: str, before: Any, after: Any, kv_dtype: str) -> Change:
    try:
        one = base.replace(**{name: after})
    except ConfigError as error:
        return Change(field=name, before=before, after=after, refused=str(error))
    return Change(
        field=name,
        before=before,
        after=after,
        parameters=parameters(one)["total"] - parameters(base)["total"],
        flops_per_token=flops_per_token(one) - flops_per_token(base),
        kv_bytes_per_token=kv_bytes_per_token(one, kv_dtype) - kv_bytes_per_token(base, kv_dtype),
    )


def matrices(cfg: ModelConfig) -> tuple[int, int]:
    """One layer's weights: attention (Q and O, K and V), MLP (two matrices, or three if gated)."""
    attention = 2 * cfg.d_model * (cfg.n_heads + cfg.kv_heads) * cfg.head_size
    return attention, (2 + cfg.gated_mlp) * cfg.d_model * cfg.d_ff


def context_length(cfg: ModelConfig, length: int | None) -> int:
    """`length`, or max_seq_len for None; InputError if there are no positions for it."""
    if length is None:
        return cfg.max_seq_len
    if length < 1:
        raise InputError(f"a context must have at least 1 token (got {length})")
    if cfg.position == "learned" and length > cfg.max_seq_len:
        raise InputError(
            f"a context of {length} tokens needs more learned positions than max_seq_len="
            f"{cfg.max_seq_len}; raise that first"
        )
    return length


def number_bytes(numbers: int, dtype: str) -> int:
    """So many numbers of one dtype, in whole bytes."""
    if dtype not in DTYPE_BITS:
        raise InputError(f"dtype must be one of {', '.join(DTYPE_BITS)} (got {dtype!r})")
    return -(-numbers * DTYPE_BITS[dtype] // 8)  # rounded up
