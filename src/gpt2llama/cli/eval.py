"""`gpt2llama eval PATH --text FILE`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, TypeVar

import typer

from ..errors import DataError
from ._options import IgnoreKey, Model, Quant, RopeFactor
from ._print import Json, log, print_json
from ._text import read_text

app = typer.Typer(add_completion=False)

Item = TypeVar("Item")


@app.command()
def evaluate(
    path: Model,
    text: Annotated[str, typer.Option(help="The file to score; - reads stdin.")],
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from window to window; side by side unless given."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a window; the model's context unless given."),
    ] = None,
    by_position: Annotated[
        bool, typer.Option("--by-position", help="Also the loss in 16 parts of the window.")
    ] = False,
    rope_scaling: Annotated[
        str | None, typer.Option(help="Read on with linear, ntk, dynamic, yarn or llama3.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="Of --rope-scaling.")] = None,
    ignore_key: IgnoreKey = None,
    quant: Quant = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Bits per byte and perplexity of a text: every token once, in windows of the context."""
    if (rope_scaling is None) != (factor is None):
        raise typer.BadParameter("--rope-scaling and --factor belong together")
    content = read_text(text)
    if not content:
        raise DataError(f"{text} is empty; give some text to score")
    from ..evolve.measure import rescaled, text_by_position
    from ..train.metrics import evaluate_text
    from ._model import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(path, ignore_key, rope_factor, quant)
    if rope_scaling is not None and factor is not None:
        model = rescaled(model, rope_scaling, factor)
    score = evaluate_text(model, tokenizer, content, stride=stride, watch=_shown, seq_len=length)
    parts = text_by_position(model, tokenizer, content, length) if by_position else []
    if json:
        keys = ("bits_per_byte", "perplexity", "tokens", "bytes")
        values = {key: getattr(score, key) for key in keys}
        print_json({**values, "by_position": parts} if by_position else values)
        return
    print(
        f"{score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.2f}; "
        f"{score.tokens:,} tokens, {score.bytes:,} bytes"
    )
    width = length or model.config.max_seq_len
    for i, nats in enumerate(parts):
        first, last = i * width // len(parts) + 1, (i + 1) * width // len(parts)
        print(f"positions {first:>6,} to {last:>6,}: {nats:.4f} nats per token")


def _shown(items: Iterable[Item], count: int) -> Iterable[Item]:
    """A bar with the time left; without a terminal a line every ten seconds."""
    from rich.progress import track

    if log.is_terminal:
        yield from track(items, "scoring", count, console=log, transient=True)
        return
    begun = shown = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - shown > 10 and done:
            log.print(f"scored {done}/{count}, {(now - begun) / done * (count - done):.0f} s left")
            shown = now
        yield item
