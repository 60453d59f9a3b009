"""What machines can do at most, by their makers' figures; and sizes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ..errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device. bandwidth: of its main memory, bytes a second; flops: dense bf16 products with
    fp32 sums, FLOP a second; memory: bytes, None if not known."""

    name: str
    bandwidth: float
    flops: float
    memory: int | None


def _device(name: str, *, gb: int, gb_per_s: float, tflops: float) -> tuple[str, Hardware]:
    """In the decimal units of data sheets. (Memory chips come in GiB: a card of "24 GB" has a
    little more, of which its driver takes some.)"""
    device = Hardware(name=name, bandwidth=gb_per_s * 1e9, flops=tflops * 1e12, memory=gb * 10**9)
    return name, device


# Sparse figures, which data sheets print largest, are halved. Sources as read in November 2026.
HARDWARE: dict[str, Hardware] = dict(
    [
        # 128 GB, 273 GB/s: ai-infrastructure.net/dgx-spark, after NVIDIA's hardware guide. 125
        # TFLOP/s: an eighth of its sparse FP4 PFLOP; from memory: not confirmed for bf16.
        _device("dgx-spark", gb=128, gb_per_s=273, tflops=125),
        # glennklockwood.com/garden/processors/A100 and h100, after NVIDIA's data sheets.
        _device("a100-80gb", gb=80, gb_per_s=2039, tflops=312),
        _device("h100", gb=80, gb_per_s=3350, tflops=989.4),  # the SXM one
        # aiwiki.ai/wiki/nvidia_h200: an H100 with more and faster memory.
        _device("h200", gb=141, gb_per_s=4800, tflops=989.4),
        # github.com/alpharomercoma/MI300X-vs-H200, after AMD's data sheet.
        _device("mi300x", gb=192, gb_per_s=5300, tflops=1307.4),
        # Memory and bandwidth: holynerdvana.blogspot.com, "RTX 3090 specifications". 71 TFLOP/s:
        # half the 142 it gives for fp16 sums; from memory: not confirmed.
        _device("rtx-3090", gb=24, gb_per_s=936, tflops=71),
        _device("rtx-4090", gb=24, gb_per_s=1008, tflops=165.2),  # waredb.com, NVIDIA's AD102
        # Bandwidth of Pro and Max: Apple's announcement of 30 October 2024 (macrumors.com). Apple
        # gives no FLOP/s: 18.4 for 40 GPU cores is huggingface.co/hardware's, the others their
        # share of it by cores. The M4's 120 GB/s, from memory: not confirmed.
        _device("m4", gb=32, gb_per_s=120, tflops=4.6),
        _device("m4-pro", gb=64, gb_per_s=273, tflops=9.2),
        _device("m4-max", gb=128, gb_per_s=546, tflops=18.4),
        # By definition: two 64-bit channels at 5,600 MT/s. Eight cores of two 256-bit FMA units at
        # 4 GHz, in fp32: most laptops have no bf16. 32 GB are what we call typical.
        _device("laptop-ddr5", gb=32, gb_per_s=89.6, tflops=1.0),
    ]
)


def hardware(name: str) -> Hardware:
    """A device of the table; InputError, with the nearest name, if there is none such."""
    if name.lower() not in HARDWARE:
        near = did_you_mean(name.lower(), HARDWARE)
        raise InputError(f"no hardware is called {name!r}{near}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_COUNTS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)"


def parse_bytes(text: str) -> int:
    """ "24GB" (1000³), "24GiB" (1024³), "512 MB", "100B" in bytes; InputError for anything else."""
    found = re.fullmatch(_NUMBER + r"\s*([kmgtp]?)(i?)b", text.strip().lower())
    if not found or (found[3] and not found[2]):
        raise InputError(f"{text!r} is no size of memory; write it like 24GB, 24GiB or 512MB")
    size = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** _PREFIXES[found[2]])
    if size < 1:
        raise InputError(f"a memory of {text!r} holds nothing; give at least 1B")
    return size


def parse_count(text: str) -> int:
    """ "2000000", "2M", "1.5B", "15T"; InputError for anything else."""
    found = re.fullmatch(_NUMBER + r"\s*([kmbt]?)", text.strip().lower())
    count = int(Fraction(found[1]) * 1000 ** _COUNTS[found[2]]) if found else 0
    if count < 1:
        raise InputError(f"{text!r} is no number of tokens; write it like 2000000, 300B or 15T")
    return count
