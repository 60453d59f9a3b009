"""What this machine can do at most, measured: products, reads; and what a process has taken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import native


def gemm_limit(dtype: torch.dtype, device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """FLOP/s of the best of `repeats` products of two 2048 x 2048 matrices."""
    a, b = (torch.randn(2048, 2048, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        wait(device)
        begun = time.perf_counter()
        a @ b
        wait(device)
        times.append(time.perf_counter() - begun)
    return 2 * 2048**3 / min(times[1:])


def read_bandwidth(size: int, device: torch.device | str = "cpu", repeats: int = 20) -> float:
    """Bytes a second of the fastest pass by all of torch's threads over `size` bytes.

    The best of the native kernel's loop, of products with a vector (what decoding does with its
    weights), of a sum and a dot product, which read, and of a copy, which reads half and writes
    half: compilers and libraries differ in which of them is quick. Repeated, so that what fits in a
    cache is read from there.
    """
    row = 1024
    x = torch.ones(max(1, size // (8 * row)), row, device=device)  # zeros may share one page
    y, vector = torch.ones_like(x), torch.ones(row, device=device)
    moved, best = 2 * x.nbytes, 0.0
    moves: tuple[Callable[[], Tensor], ...] = (
        lambda: x @ vector + y @ vector,
        lambda: x.sum() + y.sum(),
        lambda: torch.dot(x.view(-1), y.view(-1)),
        lambda: y.copy_(x),
    )
    for move in moves:
        for _ in range(repeats):
            wait(device)
            begun = time.perf_counter()
            move()
            wait(device)
            best = max(best, moved / (time.perf_counter() - begun))
    if torch.device(device).type == "cpu":
        best = max(best, native.read_bandwidth(size, repeats) or 0.0)
    return best


def bf16_if_native(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it faster than fp32, else fp32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported()
    elif device.type == "cpu":
        can = torch.cpu.get_capabilities()
        native = bool(can.get("avx512_bf16") or can.get("amx_bf16"))
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def peak_rss() -> int | None:
    """This process's peak memory in bytes, compiler's helpers apart; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def wait(device: torch.device | str) -> None:
    """Until the device has done what it was given; a CPU has by then."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
