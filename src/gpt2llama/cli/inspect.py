"""`gpt2llama inspect PATH [OTHER]`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..assets import ASSETS
from ..errors import InputError, counted
from ..model.config import ModelConfig
from ..model.presets import preset, presets
from ..plan import kv_bytes_per_token, parameters
from ..quant.scheme import to_dict
from ..tokenizer import Facts, facts_of
from ..weights import open_model
from ..weights.opened import Opened
from ._options import IgnoreKey, RopeFactor
from ._print import Json, print_json
from ._report import as_lines, as_rows
from ._switches import MEANING, side_by_side, values

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A model: folder, file, asset, hub id; or a preset.")],
    other: Annotated[str | None, typer.Argument(help="A second one, to compare with.")] = None,
    ignore_key: IgnoreKey = None,
    rope_factor: RopeFactor = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also every tensor, and what loading makes of it.")
    ] = False,
    json: Json = False,
) -> None:
    """What a model is, by its headers alone: switches, sizes, tokenizer, its way from GPT-2."""
    keys = ignore_key or ()
    cfg, opened = _config(path, keys, rope_factor)
    if other is not None:
        second, _ = _config(other, keys, rope_factor)
        if json:
            print_json({"differences": _differences(cfg, second)})
        elif cfg == second:
            print("no switch differs")
        else:
            Console().print(side_by_side(cfg, second, (_name(path), _name(other))))
        return
    if tensors and opened is None:
        raise InputError(f"{path} is a preset: it has no tensors yet; leave out --tensors")
    tokenizer = _facts(opened) if opened else None
    count, kv = parameters(cfg), kv_bytes_per_token(cfg)
    if json:
        print_json(
            {
                "parameters": count["total"],
                "kv_bytes_per_token": kv,
                "config": cfg.to_dict(),
                "format": opened.format if opened else "preset",
                "dtypes": _dtypes(opened),
                "tokenizer": tokenizer._asdict() if tokenizer else None,
                "quantization": to_dict(opened.schemes) if opened and opened.schemes else None,
                "changes": opened.changes() if opened else {},
                "notes": [*opened.notes, *_doubts(opened)] if opened else [],
                **({"tensors": as_rows(opened)} if tensors and opened else {}),
            }
        )
        return
    console = Console()
    switches = Table(title=_name(path), title_justify="left", show_header=False)
    for name, value in values(cfg).items():
        switches.add_row(name, value, f"[dim]{MEANING[name]}[/]")
    console.print(switches)
    sizes = Table(show_header=False)
    for part, numbers in count.items():
        share = f"{numbers / count['total']:.1%}"
        sizes.add_row(part, f"{numbers:,}", share, end_section=part == "head")
    sizes.add_section()
    sizes.add_row("KV bytes per token, bf16", f"{kv:,}", "")
    console.print(sizes)
    if opened is not None:
        kinds = ", ".join(f"{n} × {kind}" for kind, n in _dtypes(opened).items())
        console.print(f"format     {opened.format}: {kinds}", highlight=False)
        pieces = (
            f"{tokenizer.pieces:,} pieces, {tokenizer.special} special" if tokenizer else "none"
        )
        console.print(f"tokenizer  {pieces}", highlight=False)
        if tokenizer and tokenizer.chat_template:
            template = tokenizer.chat_template.replace("\n", "\\n")
            console.print(f"template   {template}", highlight=False, markup=False)
        if opened.schemes:
            console.print(f"quantised  {_quantisation(opened)}", highlight=False)
        for change, times in opened.changes().items():
            line = f"loading    {counted(times, 'tensor')}: {change}"
            console.print(line, highlight=False, markup=False)
        for note in [*opened.notes, *_doubts(opened)]:
            console.print(f"note       {note}", highlight=False, markup=False)
        for line in as_lines(opened) if tensors else ():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if cfg != preset("gpt2"):
        console.print(side_by_side(preset("gpt2"), cfg, ("gpt2", _name(path))))


def _facts(opened: Opened) -> Facts | None:
    """Without building the tokenizer, where the file says enough."""
    if (facts := opened.facts()) is not None:
        return facts
    tokenizer = opened.tokenizer()
    return facts_of(tokenizer) if tokenizer else None


def _quantisation(opened: Opened) -> str:
    """30 × int4, group 32, activations int8, rtn"""
    kinds = Counter(opened.schemes.values())
    return "; ".join(
        f"{n} × int{how.bits}, {f'group {how.group}' if how.group else 'a scale a row'}"
        f"{', minimums' if how.zero else ''}, activations {how.activations}, {how.method}"
        for how, n in kinds.items()
    )


def _doubts(opened: Opened) -> list[str]:
    """Loading compares every tensor with the config; here only their sum, since torch is slow."""
    if opened.schemes:  # of integers and scales the sum says nothing
        return []
    repeated = opened.repeats[0] if opened.repeats else ""
    held = sum(info.numel for name, info in opened.headers.items() if name != repeated)
    asked = parameters(opened.config)["total"]
    if held == asked:
        return []
    return [f"it will not load: it holds {held:,} parameters, and its config asks for {asked:,}"]


def _config(
    path: str, ignore_keys: list[str] | tuple[()], rope_factor: float | None
) -> tuple[ModelConfig, Opened | None]:
    if path in presets() and path not in ASSETS and not Path(path).exists():
        return preset(path), None
    opened = open_model(path, ignore_keys, rope_factor)
    return opened.config, opened


def _differences(first: ModelConfig, second: ModelConfig) -> dict[str, list[Any]]:
    left, right = first.to_dict(), second.to_dict()
    return {name: [left[name], right[name]] for name in left if left[name] != right[name]}


def _dtypes(opened: Opened | None) -> dict[str, int]:
    """How many tensors the file has of each type."""
    kinds = [info.kind or info.dtype for info in opened.headers.values()] if opened else []
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _name(path: str) -> str:
    return Path(path).name or path
