"""How fast at most: what must be read and computed, over what a machine reads and computes.

Williams et al. 2009. Only what no program can do without is counted, so that a measurement stays
below: a weight is read once a step, of a look-up table one row, of the scores the causal half.
What is small enough to stay in a cache can be faster: a table of hardware knows main memory only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from ..model.config import ModelConfig
from .arithmetic import (
    context_length,
    kv_bytes_per_token,
    matmul_parameters,
    number_bytes,
    parameters,
    weight_bytes,
)
from .hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass of a batch: `tokens` come out of it, or go into it."""

    tokens: int
    bytes: int
    flops: int

    def on(self, hardware: Hardware) -> Bound:
        return Bound(
            by_bandwidth=self.tokens * hardware.bandwidth / self.bytes,
            by_compute=self.tokens * hardware.flops / self.flops,
        )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Tokens a second, all texts of the batch together, that cannot be exceeded."""

    by_bandwidth: float
    by_compute: float

    @property
    def tokens_per_second(self) -> float:
        return min(self.by_bandwidth, self.by_compute)

    @property
    def limit(self) -> str:
        return "bandwidth" if self.by_bandwidth <= self.by_compute else "compute"


def decode_step(
    cfg: ModelConfig,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
) -> Step:
    """One new token for each of `batch` texts of `context` tokens, itself among them.

    The batch shares the weights; each text reads its own keys and values, in a sliding window
    those inside. context None: max_seq_len.
    """
    seen = min(_check(cfg, context, batch), cfg.sliding_window or 2**63)
    return Step(
        tokens=batch,
        bytes=_weights_read(cfg, dtype) + batch * seen * kv_bytes_per_token(cfg, kv_dtype),
        flops=batch * (2 * matmul_parameters(cfg) + _score_flops(cfg) * seen),
    )


def prefill_step(
    cfg: ModelConfig,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
) -> Step:
    """`batch` prompts of `context` tokens through the model, logits for the last token alone.

    Bytes: the weights, and keys and values written. context None: max_seq_len.
    """
    length = _check(cfg, context, batch)
    window = min(length, cfg.sliding_window or length)
    pairs = window * (window + 1) // 2 + (length - window) * window
    head = cfg.vocab_size * cfg.d_model
    products = 2 * length * (matmul_parameters(cfg) - head) + 2 * head
    return Step(
        tokens=batch * length,
        bytes=_weights_read(cfg, dtype) + batch * length * kv_bytes_per_token(cfg, kv_dtype),
        flops=batch * (products + _score_flops(cfg) * pairs),
    )


def weights_alone(cfg: ModelConfig, hardware: Hardware, dtype: str = "bf16") -> float:
    """The usual rule of thumb for decoding one text: bandwidth over the bytes of all weights."""
    return hardware.bandwidth / weight_bytes(cfg, dtype)


def training_hours(flops: int, hardware: Hardware, mfu: float) -> float:
    """Hours of one device; mfu is the share of its FLOP/s that training reaches (PaLM's MFU)."""
    if not 0 < mfu <= 1:
        raise InputError(f"mfu is a share of the hardware's FLOP/s, above 0, at most 1 (got {mfu})")
    return flops / (hardware.flops * mfu) / 3600


def _weights_read(cfg: ModelConfig, dtype: str) -> int:
    """All but the rows that no look-up touches; a tied table is read whole, by the head."""
    unread = 0 if cfg.tie_embeddings else (cfg.vocab_size - 1) * cfg.d_model
    if cfg.position == "learned":
        unread += (cfg.max_seq_len - 1) * cfg.d_model
    return number_bytes(parameters(cfg)["total"] - unread, dtype)


def _score_flops(cfg: ModelConfig) -> int:
    """Of a query and one key: its score, and its value's part in the sum."""
    return 4 * cfg.n_layers * cfg.n_heads * cfg.head_size


def _check(cfg: ModelConfig, context: int | None, batch: int) -> int:
    if batch < 1:
        raise InputError(f"batch must be at least 1 (got {batch})")
    return context_length(cfg, context)
