"""Sizes and costs of a config by arithmetic: nothing is built, no torch is loaded."""

from __future__ import annotations

from .arithmetic import (
    DTYPE_BITS,
    Change,
    changes,
    flops_per_token,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    largest_context,
    matmul_parameters,
    parameters,
    weight_bytes,
)
from .hardware import HARDWARE, Hardware, hardware, parse_bytes, parse_count
from .memory import Activations, TrainingMemory, activations, training_memory
from .roofline import Bound, Step, decode_step, prefill_step, training_hours, weights_alone

__all__ = [
    "DTYPE_BITS",
    "HARDWARE",
    "Activations",
    "Bound",
    "Change",
    "Hardware",
    "Step",
    "TrainingMemory",
    "activations",
    "changes",
    "decode_step",
    "flops_per_token",
    "hardware",
    "kv_bytes",
    "kv_bytes_per_token",
    "largest_batch",
    "largest_context",
    "matmul_parameters",
    "parameters",
    "parse_bytes",
    "parse_count",
    "prefill_step",
    "training_hours",
    "training_memory",
    "weight_bytes",
    "weights_alone",
]
