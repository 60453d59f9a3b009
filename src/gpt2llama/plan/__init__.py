"""Sizes and costs of a config by arithmetic: nothing is built, no torch is loaded."""

from __future__ import annotations

from .arithmetic import (
    DTYPE_BITS,
    flops_per_token,
    kv_bytes,
    kv_bytes_per_token,
    matmul_parameters,
    parameters,
    weight_bytes,
)

__all__ = [
    "DTYPE_BITS",
    "flops_per_token",
    "kv_bytes",
    "kv_bytes_per_token",
    "matmul_parameters",
    "parameters",
    "weight_bytes",
]
