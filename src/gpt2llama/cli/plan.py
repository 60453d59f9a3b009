"""`gpt2llama plan NAME`: what a preset costs, before anything is built."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..model.presets import preset, presets
from ..plan import DTYPE_BITS, flops_per_token, kv_bytes, parameters, weight_bytes
from ._print import Json, print_json

app = typer.Typer(add_completion=False)
_DTYPES = ", ".join(DTYPE_BITS)


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help=f"A preset: {', '.join(presets())}.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in the cache and in a trained text.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts in the cache.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {_DTYPES}.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help=f"Of keys and values: {_DTYPES}.")] = "bf16",
    json: Json = False,
) -> None:
    """Parameters, training FLOPs per token, bytes of weights and of KV cache, by arithmetic.

    The context is the preset's longest unless given. A quantised dtype's scales come on top.
    """
    cfg = preset(name)
    parts = parameters(cfg)
    flops = flops_per_token(cfg, context)
    weights = weight_bytes(cfg, dtype)
    cache = kv_bytes(cfg, context, batch, kv_dtype)
    if json:
        print_json(
            {
                "parameters": parts["total"],
                "flops_per_token": flops,
                "weight_bytes": weights,
                "kv_bytes": cache,
            }
        )
        return
    tokens = f"{context or cfg.max_seq_len:,} tokens"
    table = Table(title=name, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for part, count in parts.items():
        table.add_row(
            part, f"{count:,}", f"{count / parts['total']:.1%}", end_section=part == "head"
        )
    table.add_section()
    table.add_row(f"training FLOPs per token, {tokens}", f"{flops:,}", "")
    table.add_row(f"weight bytes, {dtype}", f"{weights:,}", _binary(weights))
    table.add_row(f"KV bytes, {kv_dtype}, {batch} × {tokens}", f"{cache:,}", _binary(cache))
    Console().print(table)


def _binary(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
