"""`gpt2llama bench`: speeds on this machine, each beside its limit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ._print import Json, log, print_json

app = typer.Typer(no_args_is_help=True, help="Measure speed against this machine's limit.")


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
        _show(name, result)


def _show(name: str, result: dict[str, Any]) -> None:
    limit = result["gemm_limit_flops_per_second"] / 1e9
    print(
        f"{name}: {result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['fraction_of_limit']:.0%} of this machine's {result['dtype']} limit "
        f"({limit:,.0f} GFLOP/s), peak memory {(result['peak_rss_bytes'] or 0) / 2**20:,.0f} MiB"
    )
