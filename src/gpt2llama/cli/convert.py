"""`gpt2llama convert SRC DST --to hf|gguf|gpt2llama`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, counted
from ._options import IgnoreKey, Model, RopeFactor
from ._print import Json, print_json, stopped, tell
from ._report import as_lines, as_rows

app = typer.Typer(add_completion=False)

_TORCH = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@app.command()
def convert(
    source: Model,
    target: Annotated[str, typer.Argument(help="A new folder, or a new .gguf file.")],
    to: Annotated[str, typer.Option(help="hf, gguf or gpt2llama.")],
    dtype: Annotated[
        str | None, typer.Option(help="F32, F16 or BF16; gguf also Q8_0 and Q4_0.")
    ] = None,
    ignore_key: IgnoreKey = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Write a model in another format, its tokenizer with it; the source stays as it is."""
    kind = dtype.upper() if dtype else None
    from ..weights import check_target, load, open_model, save

    if kind not in (None, *_TORCH) and to in ("hf", "gpt2llama"):
        raise InputError(f"--dtype must be one of {', '.join(_TORCH)} for {to} (got {dtype})")
    check_target(target, to, kind if to == "gguf" else None)
    import torch

    opened = open_model(source, ignore_key or (), rope_factor)
    wanted = getattr(torch, _TORCH[kind]) if kind in _TORCH and to != "gguf" else None
    expand = wanted is not None and bool(opened.schemes)
    as_read = None if expand else wanted
    with stopped("stopped: nothing was written"):
        model, tokenizer = load(
            source, dtype=as_read, ignore_keys=ignore_key or (), rope_factor=rope_factor
        )
        if expand:
            from ..quant.apply import dequantised

            model = dequantised(model).to(wanted)
        notes = save(model, tokenizer, target, to, dtype=kind if to == "gguf" else None)
    written = open_model(target)
    notes = [*opened.notes, *notes]
    if json:
        read = {"read": as_rows(opened), "written": as_rows(written)}
        print_json({"path": target, "format": to, "notes": notes, **read})
        return
    for verb, what in (("read", opened), ("written", written)):
        tell(f"{verb}: {what.format}, {counted(len(what.headers), 'tensor')}, {what.where}")
        for line in as_lines(what):
            tell(line)
    files = [path for path in Path(target).rglob("*") if path.is_file()] or [Path(target)]
    tell(f"{sum(file.stat().st_size for file in files) / 1e6:,.1f} MB")
    for note in notes:
        tell(f"note: {note}")
    print(target)
