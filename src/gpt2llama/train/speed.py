"""How fast training is, against the fastest matrix product this machine does."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..plan import Hardware, flops_per_token
from .config import TrainConfig
from .optim import bf16_if_native
from .run import pick_device
from .step import Step, can_compile


def gemm_limit(dtype: torch.dtype, device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """FLOP/s of the best of `repeats` products of two 2048 x 2048 matrices."""
    a, b = (torch.randn(2048, 2048, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        _wait(device)
        begun = time.perf_counter()
        a @ b
        _wait(device)
        times.append(time.perf_counter() - begun)
    return 2 * 2048**3 / min(times[1:])


def read_bandwidth(size: int, device: torch.device | str = "cpu", repeats: int = 20) -> float:
    """Bytes a second of the fastest pass by all of torch's threads over `size` bytes.

    The best of products with a vector (what decoding does with its weights), of a sum and a dot
    product, which read, and of a copy, which reads half and writes half: compilers and libraries
    differ in which of them is quick. Repeated, so that what fits in a cache is read from there.
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
            _wait(device)
            begun = time.perf_counter()
            move()
            _wait(device)
            best = max(best, moved / (time.perf_counter() - begun))
    return best


def this_machine(step_bytes: int) -> Hardware:
    """This machine's device as `plan` counts them: measured, not its maker's figures.

    step_bytes: what a step reads. Bandwidth is measured over as much (at most 512 MiB), since what
    fits in a cache is read faster. flops: fp32's GEMM limit, or bf16's where that is native
    and better.
    """
    device = pick_device("auto")
    size = min(max(step_bytes, 1 << 16), 1 << 29)
    dtypes = {torch.float32, bf16_if_native(torch.device(device))}
    return Hardware(
        name="this-machine",
        bandwidth=read_bandwidth(size, device),
        flops=max(gemm_limit(dtype, device) for dtype in dtypes),
        memory=_memory(device),
    )


def _memory(device: str) -> int | None:
    """Bytes in all, of the device or of the machine; None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure_training(
    model: ModelConfig, cfg: TrainConfig, seq_len: int, seconds: float = 15.0
) -> dict[str, Any]:
    """Whole optimiser steps on random tokens for about `seconds`, after compiling and warming up.

    tokens_per_second is the median step's. fraction_of_limit counts design FLOPs (6 for every
    matmul parameter and token, and attention) against `gemm_limit` in the computing dtype,
    measured before and after, the better one.
    """
    device = torch.device(pick_device(cfg.device))
    torch.manual_seed(cfg.seed)
    network = Transformer(model).to(device)
    compiled = cfg.compile == "on" or (cfg.compile == "auto" and can_compile())
    step = Step(network, cfg, compiled)
    dtype = next(step.compute.parameters()).dtype
    limits = [gemm_limit(dtype, device)]
    tokens = torch.randint(model.vocab_size, (cfg.batch_size, seq_len + 1), device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    begun = time.perf_counter()
    step([batch], cfg.lr)
    first = time.perf_counter() - begun
    for _ in range(3):
        step([batch], cfg.lr)
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        _wait(device)
        begun = time.perf_counter()
        step([batch], cfg.lr)
        _wait(device)
        times.append(time.perf_counter() - begun)
    limits.append(gemm_limit(dtype, device))
    speed = batch.ids.numel() / statistics.median(times)
    flops = flops_per_token(model, seq_len)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    return {
        "tokens_per_second": round(speed, 1),
        "fraction_of_limit": round(speed * flops / max(limits), 4),
        "flops_per_token": flops,
        "gemm_limit_flops_per_second": round(max(limits)),
        "dtype": str(dtype).removeprefix("torch."),
        "optimizer": cfg.optimizer,
        "compiled": compiled,
        "first_step_seconds": round(first, 2),
        "steps": len(times),
        "bits_per_weight": 8 * weights / sum(p.numel() for p in network.parameters()),
        "peak_rss_bytes": peak_rss(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def peak_rss() -> int | None:
    """This process's peak memory in bytes, compiler's helpers apart; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
