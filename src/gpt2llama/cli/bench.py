"""`gpt2llama bench`: speeds on this machine, each beside its limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import ConfigError, counted
from ._print import Json, log, print_json

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure speed against this machine's limit.",
)


Preset = Annotated[str, typer.Option(help="A named model, with random weights.")]
OnDisk = Annotated[
    str | None, typer.Option("--model", help="A model: folder, run, .gguf file, asset or hub id.")
]
Quant = Annotated[
    Literal["int8", "int4", "keep"] | None,
    typer.Option(help="Round the weights; keep: a GGUF file's blocks."),
]
Dtype = Annotated[str | None, typer.Option(help="fp32 or bf16; the file's unless given.")]
KVDtype = Annotated[Literal["auto", "fp32", "bf16", "int8"], typer.Option(help="Of the cache.")]
Seconds = Annotated[float, typer.Option(help="Time to measure for.")]


@app.callback()
def bench() -> None:
    """Measure speed against this machine's limit."""


@app.command()
def train(
    preset: Annotated[str, typer.Option(help="A named model.")] = "zh-3m",
    model: Annotated[
        str | None, typer.Option(help="A model on disk, whose sizes and switches are taken.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to measure for.")] = 15.0,
    json: Json = False,
) -> None:
    """Whole training steps at 16 x 128 (--set batch_size=…, seq_len=… for others)."""
    from ..model.presets import preset as named
    from ..train.config import RunConfig, TrainConfig
    from ..train.speed import measure_training
    from ..weights import open_model

    if dtype not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"--dtype {dtype!r} must be auto, fp32 or bf16")
    start = TrainConfig(seq_len=128)
    name, config = preset, named(preset)
    if model is not None:
        name, config = model, open_model(model).config
    run = RunConfig(model=config, train=start, data="")
    run = run.set([f"dtype={dtype}", *(settings or [])])
    log.print("warming up …")
    result = measure_training(run.model, run.train, run.seq_len, seconds)
    if json:
        print_json({"model": name, **result})
    else:
        _show_training(name, result)


@app.command()
def decode(
    preset: Preset = "zh-3m",
    model: OnDisk = None,
    quant: Quant = None,
    dtype: Dtype = None,
    kv_dtype: KVDtype = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    new: Annotated[int, typer.Option(min=2, help="Tokens generated after it.")] = 256,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """Greedy tokens of one text, one at a time, against the memory's bandwidth."""
    from ..inference_speed import measure_decoding

    with _model(preset, model, dtype) as (name, path, as_dtype):
        loaded, _ = _loaded(path, as_dtype, quant)
        result = measure_decoding(loaded, context, new, seconds, kv_dtype)
    if json:
        print_json({"model": name, **result})
        return
    print(
        f"{name}: {result['tokens_per_second']:,.1f} tokens/s, {result['fraction_of_limit']:.0%} "
        f"of what this machine can read ({result['bandwidth_bytes_per_second'] / 1e9:,.1f} GB/s), "
        f"{result['bytes_per_token'] / 1e6:,.1f} MB a token, {_facts(result)}"
    )


@app.command()
def prefill(
    preset: Preset = "zh-3m",
    model: OnDisk = None,
    quant: Quant = None,
    dtype: Dtype = None,
    kv_dtype: KVDtype = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """A prompt up to its first new token, against the fastest matrix product."""
    from ..inference_speed import measure_prefill

    with _model(preset, model, dtype) as (name, path, as_dtype):
        loaded, _ = _loaded(path, as_dtype, quant)
        result = measure_prefill(loaded, context, seconds, kv_dtype)
    if json:
        print_json({"model": name, **result})
        return
    limit = result["gemm_limit_flops_per_second"] / 1e9
    print(
        f"{name}: {result['tokens_per_second']:,.0f} tokens/s over {result['prompt_tokens']}, "
        f"{result['fraction_of_limit']:.0%} of this machine's limit ({limit:,.0f} GFLOP/s), "
        f"first token after {result['time_to_first_token_seconds']:.2f} s, {_facts(result)}"
    )


@app.command()
def load(
    preset: Preset = "zh-3m",
    model: OnDisk = None,
    quant: Quant = None,
    dtype: Dtype = None,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """From the start of a process to its first token."""
    from ..inference_speed import measure_loading

    with _model(preset, model, dtype) as (name, path, as_dtype):
        log.print("measuring …")
        result = measure_loading(path, as_dtype, quant, seconds)
    if json:
        print_json({"model": name, **result})
        return
    stages = ", ".join(
        f"{stage.replace('_', ' ')} {took:.2f}" for stage, took in result["stages"].items()
    )
    print(
        f"{name}: first token after {result['time_to_first_token_seconds']:.2f} s "
        f"({stages}), {_facts(result)}"
    )


@contextmanager
def _model(
    preset: str, model: str | None, dtype: str | None
) -> Iterator[tuple[str, str, torch.dtype | None]]:
    """Name and place of the model to measure, and the dtype to load it in."""
    import torch

    from ..inference_speed import random_model
    from ..machine import bf16_if_native
    from ..model.presets import preset as named

    known = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in known:
        raise ConfigError(f"--dtype {dtype!r} must be fp32 or bf16")
    if model is not None:
        yield model, model, known[dtype]
        return
    config = named(preset)
    log.print("making random weights …")
    with random_model(config, known[dtype] or bf16_if_native(torch.device("cpu"))) as path:
        yield preset, path, None


def _loaded(path: str, dtype: torch.dtype | None, quant: str | None) -> Any:
    from ..weights import load as load_model

    loaded = load_model(path, dtype=dtype, quant=quant)
    log.print("measuring …")
    return loaded


def _facts(result: dict[str, Any]) -> str:
    return (
        f"{result['quant'] or result['dtype']} at {result['bits_per_weight']:.2f} bits a weight, "
        f"{result['path']}, {counted(result['threads'], 'thread')}, peak memory "
        f"{(result['peak_rss_bytes'] or 0) / 2**20:,.0f} MiB"
    )


def _show_training(name: str, result: dict[str, Any]) -> None:
    limit = result["gemm_limit_flops_per_second"] / 1e9
    print(
        f"{name}: {result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['fraction_of_limit']:.0%} of this machine's {result['dtype']} limit "
        f"({limit:,.0f} GFLOP/s), peak memory {(result['peak_rss_bytes'] or 0) / 2**20:,.0f} MiB"
    )
