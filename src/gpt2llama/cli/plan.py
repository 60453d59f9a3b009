"""`gpt2llama plan NAME`: what a config costs, before anything is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from ..model.config import ModelConfig
from ..model.presets import presets
from ..plan import (
    DTYPE_BITS,
    HARDWARE,
    Bound,
    Hardware,
    activations,
    changes,
    decode_step,
    flops_per_token,
    hardware,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    largest_context,
    parameters,
    parse_bytes,
    parse_count,
    prefill_step,
    training_hours,
    training_memory,
    weight_bytes,
    weights_alone,
)
from . import _plan_tables as _show
from ._config import config_of, with_settings
from ._options import IgnoreKey, RopeFactor
from ._print import Json, log, print_json
from ._switches import values

app = typer.Typer(add_completion=False)
_DTYPES = ", ".join(DTYPE_BITS)
_MOST = 2**40  # of a context or a batch


@app.command()
def plan(
    name: Annotated[
        str,
        typer.Argument(help=f"A preset ({', '.join(presets())}), a model on disk, a config.toml."),
    ],
    context: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="Tokens in the cache and in a trained text."),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Texts in the cache, or trained on.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {_DTYPES}.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help=f"Of keys and values: {_DTYPES}.")] = "bf16",
    optimizer: Annotated[
        Literal["adamw", "muon"], typer.Option(help="Whose state training keeps.")
    ] = "adamw",
    accumulate: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Batches a training step adds up.")
    ] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any field of the model, first changed."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another config, shown beside: --compare A B.")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="What fits in it: 24GB, 80GiB. Repeatable.")
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(help=f"How fast at most, and what fits: {', '.join(HARDWARE)}. Repeatable."),
    ] = None,
    this_machine: Annotated[
        bool, typer.Option("--this-machine", help="The same here, by measuring. Loads torch.")
    ] = False,
    tokens: Annotated[
        str | None, typer.Option(help="To train on: 2M, 300B, 15T; hours for each --on.")
    ] = None,
    mfu: Annotated[
        float, typer.Option(help="Share of the hardware's FLOP/s that training reaches.")
    ] = 0.4,
    price: Annotated[
        float | None, typer.Option(min=0, help="Of one device for an hour, in any currency.")
    ] = None,
    ignore_key: IgnoreKey = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Parameters, FLOPs, bytes, what fits, how fast at most, what training costs: arithmetic.

    The context is the config's longest unless given. A quantised dtype's scales come on top.
    """
    cfg = with_settings(config_of(name, ignore_key, rope_factor), settings)
    base_name = compare or "gpt2"
    base = config_of(base_name, ignore_key, rope_factor)
    if price is not None and (tokens is None or not (on or this_machine)):
        raise InputError("--price needs --tokens, what to train on, and --on, the hardware")
    asked = _Question(context=context, batch=batch, dtype=dtype, kv_dtype=kv_dtype)
    devices = [hardware(device) for device in on or []]
    bf16 = this_machine and _multiplies_bf16()
    if this_machine:
        devices.append(_measured(cfg, asked))
    memories = {text: parse_bytes(text) for text in memory or []}
    memories |= {device.name: device.memory for device in devices if device.memory is not None}
    count = None if tokens is None else parse_count(tokens)

    def answer(cfg: ModelConfig) -> dict[str, Any]:
        found = _sizes(cfg, asked)
        found["training_memory"] = _training_memory(
            cfg, context, batch, accumulate, optimizer, bf16
        )
        if memories:
            found["fits"] = _fits(cfg, asked, memories)
        if devices:
            found["roofline"] = [_speeds(cfg, asked, device) for device in devices]
        if count is not None:
            found["training"] = _training(found["flops_per_token"], count, devices, mfu, price)
        return found

    shown_name = f"{name} {' '.join(settings)}" if settings else name
    result = {"name": shown_name, **answer(cfg)}
    other = {"name": base_name, **answer(base)} if compare else None
    steps = [asdict(change) for change in changes(base, cfg, kv_dtype)]
    if json:
        result |= {"changes_from": base_name, "changes": steps}
        print_json(result | ({"compare": other} if other else {}))
        return
    if other is not None:
        _show.side_by_side(other, result)
    else:
        _show.one(result)
    _show.changes(base_name, values(base), values(cfg), steps)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What is to be held in memory and computed."""

    context: int | None
    batch: int
    dtype: str
    kv_dtype: str


# What is found, as plain values for JSON.


def _sizes(cfg: ModelConfig, asked: _Question) -> dict[str, Any]:
    parts = parameters(cfg)
    total = parts.pop("total")
    return {
        "parameters": total,
        "flops_per_token": flops_per_token(cfg, asked.context),
        "weight_bytes": weight_bytes(cfg, asked.dtype),
        "kv_bytes": kv_bytes(cfg, asked.context, asked.batch, asked.kv_dtype),
        "kv_bytes_per_token": kv_bytes_per_token(cfg, asked.kv_dtype),
        "parts": parts,
        **asdict(asked),
        "context": asked.context or cfg.max_seq_len,
        "max_seq_len": cfg.max_seq_len,
        "bytes": {
            dtype: {
                "weights": weight_bytes(cfg, dtype),
                "kv": kv_bytes(cfg, asked.context, asked.batch, dtype),
            }
            for dtype in DTYPE_BITS
        },
    }


def _training_memory(
    cfg: ModelConfig,
    context: int | None,
    batch: int,
    accumulate: int,
    optimizer: Literal["adamw", "muon"],
    bf16: bool,
) -> dict[str, Any]:
    """At the fullest moment of a step; and, at the loss, the activations by part."""
    memory = training_memory(cfg, context, batch, accumulate, optimizer, bf16)
    return {
        "peak": memory.peak,
        **asdict(memory),
        "activations_by_part": asdict(activations(cfg, context, batch)),
        "accumulate": accumulate,
        "optimizer_name": optimizer,
    }


def _fits(cfg: ModelConfig, asked: _Question, memories: dict[str, int]) -> list[dict[str, Any]]:
    dtypes = {"dtype": asked.dtype, "kv_dtype": asked.kv_dtype}
    return [
        {
            "memory": name,
            "bytes": size,
            "largest_batch": largest_batch(cfg, size, asked.context, **dtypes),
            "largest_context": largest_context(cfg, size, asked.batch, **dtypes),
        }
        for name, size in memories.items()
    ]


def _speeds(cfg: ModelConfig, asked: _Question, device: Hardware) -> dict[str, Any]:
    return {
        "hardware": device.name,
        "bytes_per_second": device.bandwidth,
        "flops_per_second": device.flops,
        "prefill": _bound(prefill_step(cfg, **asdict(asked)).on(device)),
        "decode": _bound(decode_step(cfg, **asdict(asked)).on(device)),
        "weights_alone_tokens_per_second": weights_alone(cfg, device, asked.dtype),
    }


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "tokens_per_second": bound.tokens_per_second,
        "limit": bound.limit,
        **asdict(bound),
    }


def _training(
    flops_per_token: int, tokens: int, devices: list[Hardware], mfu: float, price: float | None
) -> dict[str, Any]:
    flops = tokens * flops_per_token
    hours = {device.name: training_hours(flops, device, mfu) for device in devices}
    return {
        "tokens": tokens,
        "flops": flops,
        "mfu": mfu,
        "on": [
            {"hardware": name, "hours": h, "cost": None if price is None else h * price}
            for name, h in hours.items()
        ],
    }


def _measured(cfg: ModelConfig, asked: _Question) -> Hardware:
    log.print("measuring this machine …")
    from ..train.speed import this_machine

    return this_machine(decode_step(cfg, **asdict(asked)).bytes)


def _multiplies_bf16() -> bool:
    import torch

    from ..machine import bf16_if_native

    return bf16_if_native(torch.device("cpu")) == torch.bfloat16
