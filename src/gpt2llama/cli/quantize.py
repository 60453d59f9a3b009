"""`gpt2llama quantize PATH --out DIR`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal, TypeVar

import typer

from ..errors import ConfigError, DataError, TokenizerError
from ._options import IgnoreKey, Model, RopeFactor
from ._print import Json, print_json, stopped, tell
from ._text import read_text

app = typer.Typer(add_completion=False)

Number = TypeVar("Number", int, float)
WINDOW = 512  # tokens of the calibration text at a time


@app.command()
def quantize(
    path: Model,
    out: Annotated[Path, typer.Option(help="A new folder for the quantised model.")],
    scheme: Annotated[
        Literal["int8", "int4"], typer.Option(help="int4 is half the size and rounds more.")
    ] = "int8",
    group: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale: 32, 64, 128. int4: 32; int8: a whole row."),
    ] = None,
    zero: Annotated[bool, typer.Option("--zero", help="int4: a minimum beside a scale.")] = False,
    weight_only: Annotated[
        bool, typer.Option("--weight-only", help="Leave the activations as they are.")
    ] = False,
    head: Annotated[bool, typer.Option(help="The embedding table and the head too.")] = True,
    method: Annotated[
        Literal["rtn", "gptq", "awq"], typer.Option(help="rtn rounds each weight to nearest.")
    ] = "rtn",
    calibration: Annotated[
        str | None, typer.Option(help="A text file for gptq and awq, like what the model reads.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the places in the calibration text.")] = 0,
    text: Annotated[
        str | None, typer.Option(help="A file to score before and after; - reads stdin.")
    ] = None,
    ignore_key: IgnoreKey = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Write a model with its weights in 8 or 4 bits, and say what it costs."""
    if (method == "rtn") != (calibration is None):
        reason = "is for gptq and awq" if calibration else f"is missing: {method} needs a text file"
        raise ConfigError(f"--calibration {reason}")
    from ..quant.scheme import SCHEMES

    how = SCHEMES[scheme].replace(
        group=group or SCHEMES[scheme].group,
        zero=zero,
        activations="float" if weight_only else "int8",
        method=method,
        head=head,
    )
    content = None if text is None else read_text(text)
    if content == "":
        raise DataError(f"{text} is empty; give some text to score")
    samples = None if calibration is None else read_text(calibration)
    from ..quant.apply import quantise
    from ..quant.calibration import windows
    from ..quant.report import report
    from ..train.metrics import evaluate_text
    from ..weights import check_target, load, save

    check_target(out, "gpt2llama", None)
    with stopped("stopped: nothing was written"):
        model, tokenizer = load(path, ignore_keys=ignore_key or (), rope_factor=rope_factor)
        if tokenizer is None and (content or samples):
            raise TokenizerError(f"{path} has no tokenizer for --text and --calibration")
        seen = None
        if samples is not None and tokenizer is not None:
            seq_len = min(model.config.max_seq_len, WINDOW)
            seen = windows(tokenizer.encode(samples), seq_len, seed=seed)
        small = quantise(model, how, seen)
        made = report(model, small)
        save(small, tokenizer, out)
    scores = {}
    if content and tokenizer is not None:
        with stopped(f"stopped while scoring: the model is whole, in {out}"):
            for name, scored in (("before", model), ("after", small)):
                scores[name] = evaluate_text(scored, tokenizer, content).bits_per_byte
    if json:
        values = {"path": str(out), "scheme": how.to_dict(), **asdict(made)}
        print_json(values | {"bits_per_byte": scores or None})
        return
    tell(
        f"{made.bits_per_weight:.2f} bits per weight, the head included; "
        f"{made.quantised_share:.1%} of {made.parameters:,} parameters in {how.bits} bits"
    )
    for name, errors in _like(made.errors).items():
        tell(f"{len(errors):>6} × {name:<28} error {mean(errors):.2%}, at most {max(errors):.2%}")
    for name, each in _like(dict.fromkeys(made.unscaled, 0.0)).items():
        tell(f"{len(each):>6} × {name:<28} only clipped: nothing before it can take up scales")
    for name, inputs in _like(made.left).items():
        fits = inputs[0] % how.divisor == 0
        why = "--no-head" if fits else f"{how.divisor} must divide its {inputs[0]} inputs"
        tell(f"{len(inputs):>6} × {name:<28} left as it is: {why}")
    if scores:
        before, after = scores["before"], scores["after"]
        tell(f"{before:.4f} bits per byte before, {after:.4f} after: {after / before - 1:+.2%}")
    print(out)


def _like(values: dict[str, Number]) -> dict[str, list[Number]]:
    """Those of like matrices of all layers together."""
    groups: dict[str, list[Number]] = {}
    for name, value in values.items():
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(value)
    return groups
