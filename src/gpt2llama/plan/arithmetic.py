"""Parameters, FLOPs and bytes of one config. Every result is an exact whole number."""

from __future__ import annotations

from ..errors import InputError
from ..model.config import ModelConfig

# Bits a number takes; a quantiser's scales come on top and are its own affair.
DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Trained numbers by part, and their `total`. A tied head is the embedding: it counts 0."""
    d, layers = cfg.d_model, cfg.n_layers
    q, kv = cfg.n_heads * cfg.head_size, cfg.kv_heads * cfg.head_size
    attention, mlp = _matrices(cfg)
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
    return cfg.n_layers * sum(_matrices(cfg)) + cfg.vocab_size * cfg.d_model


def flops_per_token(cfg: ModelConfig, seq_len: int | None = None) -> int:
    """To train on one token, forward and backward, in texts of `seq_len` (None: max_seq_len).

    6 · matmul parameters + 12 · L · H · E · T: Chowdhery et al. 2022 (PaLM), appendix B. The
    attention scores are counted in full, though a causal mask or a window lets a kernel skip some.
    """
    t = _context(cfg, seq_len)
    return 6 * matmul_parameters(cfg) + 12 * cfg.n_layers * cfg.n_heads * cfg.head_size * t


def kv_bytes_per_token(cfg: ModelConfig, dtype: str = "bf16") -> int:
    """Keys and values of one token in every layer."""
    return _bytes(2 * cfg.n_layers * cfg.kv_heads * cfg.head_size, dtype)


def kv_bytes(
    cfg: ModelConfig, context: int | None = None, batch: int = 1, dtype: str = "bf16"
) -> int:
    """The cache of `batch` texts of `context` tokens (None: max_seq_len).

    A sliding window does not shrink it: our cache keeps every token, so that it can be truncated.
    """
    if batch < 1:
        raise InputError(f"batch must be at least 1 (got {batch})")
    return batch * _context(cfg, context) * kv_bytes_per_token(cfg, dtype)


def weight_bytes(cfg: ModelConfig, dtype: str = "bf16") -> int:
    """Every parameter, a tied table once."""
    return _bytes(parameters(cfg)["total"], dtype)


def _matrices(cfg: ModelConfig) -> tuple[int, int]:
    """One layer's weights: attention (Q and O, K and V), MLP (two matrices, or three if gated)."""
    attention = 2 * cfg.d_model * (cfg.n_heads + cfg.kv_heads) * cfg.head_size
    return attention, (2 + cfg.gated_mlp) * cfg.d_model * cfg.d_ff


def _context(cfg: ModelConfig, length: int | None) -> int:
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


def _bytes(numbers: int, dtype: str) -> int:
    if dtype not in DTYPE_BITS:
        raise InputError(f"dtype must be one of {', '.join(DTYPE_BITS)} (got {dtype!r})")
    return -(-numbers * DTYPE_BITS[dtype] // 8)  # rounded up
