"""How fast training is, against the fastest matrix product this machine does."""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import torch

from ..data.batches import Batch
from ..machine import bf16_if_native, gemm_limit, peak_rss, read_bandwidth, wait
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..plan import Hardware, flops_per_token
from .config import TrainConfig
from .run import pick_device
from .step import Step, can_compile


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
        wait(device)
        begun = time.perf_counter()
        step([batch], cfg.lr)
        wait(device)
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
