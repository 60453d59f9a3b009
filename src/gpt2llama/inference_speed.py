"""How fast decoding, prefill and loading are, beside what this machine can do at most.

Decoding reads every weight once a token, so its limit is the memory's bandwidth; prefill's is the
matrix product's FLOP/s. The limit is measured before and after every repeat, since machines drift.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from .errors import InputError
from .generate import SamplingConfig, decode
from .generate.generation import Generation
from .machine import bf16_if_native, gemm_limit, peak_rss, read_bandwidth
from .model.config import ModelConfig
from .model.transformer import Transformer
from .native import decoder
from .plan import kv_bytes_per_token, parameters, prefill_step
from .weights import load, save

LEAST_REPEATS = 3
_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def measure_decoding(
    model: Transformer,
    prompt: int = 64,
    new: int = 256,
    seconds: float = 15.0,
    kv_dtype: str = "auto",
) -> dict[str, Any]:
    """Greedy tokens of one text after a prompt of random ids, for about `seconds`.

    Fewer than `new` where the model's context ends. tokens_per_second: the median repeat's, from
    the first new token to the last. fraction_of_limit: the median of its bytes a second over the
    bandwidth. bytes_per_token: the weights once, and keys and values of the mean context.
    """
    new = min(new, model.config.max_seq_len - prompt)
    if new < 2:
        raise InputError(
            f"a prompt of {prompt} tokens leaves no room for two in the model's context of "
            f"{model.config.max_seq_len}; take a shorter one (--context)"
        )
    sampling: dict[str, Any] = {} if kv_dtype == "auto" else {"kv_dtype": kv_dtype}
    window = model.config.sliding_window or prompt + new
    seen = statistics.mean(min(n, window) for n in range(prompt + 1, prompt + new))
    read = weights_read(model) + kv_bytes_read(model, kv_dtype) * seen
    size = round(min(read, 1 << 29))  # half a GiB is beyond every cache

    def run() -> tuple[float, float]:
        return _timed(model, prompt, new, sampling)

    run()  # warms up
    peak = peak_rss()  # the loop that measures the bandwidth has not begun
    runs, limits, most = _repeat(run, lambda: read_bandwidth(size), seconds)
    speeds = [(new - 1) / rest for _, rest in runs]
    shares = [speed * read / limit for speed, limit in zip(speeds, most, strict=True)]
    return {
        "tokens_per_second": round(statistics.median(speeds), 2),
        "fraction_of_limit": round(statistics.median(shares), 4),
        **model_facts(model),
        "bytes_per_token": round(read),
        "bandwidth_bytes_per_second": round(statistics.median(limits)),
        "time_to_first_token_seconds": round(statistics.median(first for first, _ in runs), 4),
        "prompt_tokens": prompt,
        "new_tokens": new,
        "repeats": len(runs),
        "peak_rss_bytes": peak,
    }


def measure_prefill(
    model: Transformer, prompt: int = 512, seconds: float = 15.0, kv_dtype: str = "auto"
) -> dict[str, Any]:
    """Prompts of random ids up to the first new token, for about `seconds`.

    Shorter ones where the model's context ends. fraction_of_limit counts the FLOPs of
    `plan.prefill_step` against `gemm_limit` in the faster of fp32 and native bf16.
    """
    prompt = min(prompt, model.config.max_seq_len - 1)
    flops = prefill_step(model.config, prompt).flops
    sampling: dict[str, Any] = {} if kv_dtype == "auto" else {"kv_dtype": kv_dtype}
    dtypes = {torch.float32, bf16_if_native(torch.device("cpu"))}

    def run() -> tuple[float, float]:
        return _timed(model, prompt, 1, sampling)

    run()
    peak = peak_rss()
    runs, limits, most = _repeat(run, lambda: max(map(gemm_limit, dtypes)), seconds)
    times = [first for first, _ in runs]
    shares = [flops / first / limit for first, limit in zip(times, most, strict=True)]
    return {
        "tokens_per_second": round(prompt / statistics.median(times), 1),
        "fraction_of_limit": round(statistics.median(shares), 4),
        **model_facts(model),
        "flops_per_token": round(flops / prompt),
        "gemm_limit_flops_per_second": round(statistics.median(limits)),
        "time_to_first_token_seconds": round(statistics.median(times), 4),
        "prompt_tokens": prompt,
        "repeats": len(runs),
        "peak_rss_bytes": peak,
    }


def measure_loading(
    path: str, dtype: torch.dtype | None = None, quant: str | None = None, seconds: float = 15.0
) -> dict[str, Any]:
    """Fresh processes that import, load and generate one token, for about `seconds`.

    Medians, in seconds from the process's start; the files are in the system's cache. `stages` are
    the parts of time_to_first_token_seconds: Python and imports, the model, the first token.
    """
    runs: list[dict[str, Any]] = []
    begun = time.perf_counter()
    while len(runs) < LEAST_REPEATS or time.perf_counter() - begun < seconds:
        runs.append(_in_fresh_process(_first_token, path, dtype, quant, time.perf_counter()))
    stages = {
        name: round(statistics.median(run["stages"][name] for run in runs), 3)
        for name in runs[0]["stages"]
    }
    peaks = [run["peak_rss_bytes"] for run in runs if run["peak_rss_bytes"] is not None]
    return {
        "time_to_first_token_seconds": round(statistics.median(r["seconds"] for r in runs), 3),
        "stages": stages,
        **runs[0]["facts"],
        "repeats": len(runs),
        "peak_rss_bytes": max(peaks, default=None),
    }


@contextmanager
def random_model(cfg: ModelConfig, dtype: torch.dtype) -> Iterator[str]:
    """A folder with a model of these sizes, which a process of its own has made."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = str(Path(folder, "model"))
        _in_fresh_process(_write_random, path, cfg, dtype)
        yield path


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the weights take, shared ones once: scales and padding of quantised ones too."""
    tensors = {t.data_ptr(): t.nbytes for t in model.state_dict().values()}
    return sum(tensors.values())


def weights_read(model: Transformer) -> float:
    """Bytes of weights that a token needs: all but the rows that its look-ups leave alone."""
    cfg, unread = model.config, 0.0
    if not cfg.tie_embeddings:
        unread += weight_bytes(model.embed_tokens) * (1 - 1 / cfg.vocab_size)
    if cfg.position == "learned":
        unread += weight_bytes(model.embed_positions) * (1 - 1 / cfg.max_seq_len)
    return weight_bytes(model) - unread


def kv_bytes_read(model: Transformer, kv_dtype: str = "auto") -> int:
    """Bytes of one token's keys and values, of int8 with a scale in fp32 a head and layer."""
    cfg = model.config
    if kv_dtype == "int8":
        return kv_bytes_per_token(cfg, "int8") + 2 * cfg.n_layers * cfg.kv_heads * 4
    if kv_dtype == "auto":
        plain = _plain_dtype(model)
        kv_dtype = "bf16" if plain is None else _SHORT[plain]
    return kv_bytes_per_token(cfg, kv_dtype)


def model_facts(model: Transformer) -> dict[str, Any]:
    """What a speed is told with: bits a weight, head included; dtype, quant, path, threads."""
    scheme, plain = _scheme(model), _plain_dtype(model)
    return {
        "bits_per_weight": round(8 * weight_bytes(model) / parameters(model.config)["total"], 3),
        "dtype": None if plain is None else _SHORT[plain],
        "quant": None if scheme is None else f"int{scheme.bits}",
        "path": "pytorch" if decoder(model) is None else "native",
        "threads": torch.get_num_threads(),
    }


def _timed(
    model: Transformer, prompt: int, new: int, settings: dict[str, Any]
) -> tuple[float, float]:
    """Seconds to the first new token, and of the others."""
    generator = torch.Generator().manual_seed(0)
    row = Generation(
        torch.randint(model.config.vocab_size, (prompt,), generator=generator).tolist()
    )
    steps = decode(
        model,
        [row],
        max_new_tokens=new,
        stop_ids=(),
        sampling=SamplingConfig(),
        **settings,
    )
    begun = time.perf_counter()
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    return first - begun, time.perf_counter() - first


def _repeat(
    run: Callable[[], tuple[float, float]], limit: Callable[[], float], seconds: float
) -> tuple[list[tuple[float, float]], list[float], list[float]]:
    """Runs in turn with the limit, which begins and ends; of each run, the higher of its two."""
    runs: list[tuple[float, float]] = []
    limits, begun = [limit()], time.perf_counter()
    while len(runs) < LEAST_REPEATS or time.perf_counter() - begun < seconds:
        runs.append(run())
        limits.append(limit())
    return runs, limits, [max(pair) for pair in pairwise(limits)]


def _scheme(model: Transformer) -> Any:
    """How its matrices are quantised; None if they are not."""
    return next((m.scheme for m in model.modules() if hasattr(m, "scheme")), None)


def _plain_dtype(model: Transformer) -> torch.dtype | None:
    return next(model.parameters()).dtype if _scheme(model) is None else None


def _in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns or raises there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _write_random(path: str, cfg: ModelConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    save(Transformer(cfg).to(dtype), None, path)


def _first_token(
    path: str, dtype: torch.dtype | None, quant: str | None, begun: float
) -> dict[str, Any]:
    """In a fresh process, which began at `begun` by the system's clock."""
    imported = time.perf_counter()
    model, _ = load(path, dtype=dtype, quant=quant)
    loaded = time.perf_counter()
    _timed(model, prompt=8, new=1, settings={})
    done = time.perf_counter()
    return {
        "seconds": done - begun,
        "stages": {
            "imports": imported - begun,
            "load": loaded - imported,
            "first_token": done - loaded,
        },
        "facts": model_facts(model),
        "peak_rss_bytes": peak_rss(),
    }
