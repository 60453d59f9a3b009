"""`gpt2llama eval PATH --text FILE`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import typer

from ..errors import DataError
from ._print import Json, log, print_json
from ._text import read_text

app = typer.Typer(add_completion=False)

Item = TypeVar("Item")


@app.command()
def evaluate(
    path: Annotated[str, typer.Argument(help="A model: a folder or a run.")],
    text: Annotated[str, typer.Option(help="The file to score; - reads stdin.")],
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from window to window; side by side unless given."),
    ] = None,
    json: Json = False,
) -> None:
    """Bits per byte and perplexity of a text: every token once, in windows of the context."""
    content = read_text(text)
    if not content:
        raise DataError(f"{text} is empty; give some text to score")
    from ..train.metrics import evaluate_text
    from ._model import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(path)
    score = evaluate_text(model, tokenizer, content, stride=stride, watch=_bar)
    if json:
        keys = ("bits_per_byte", "perplexity", "tokens", "bytes")
        print_json({key: getattr(score, key) for key in keys})
    else:
        print(
            f"{score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.2f}; "
            f"{score.tokens:,} tokens, {score.bytes:,} bytes"
        )


def _bar(items: Iterable[Item], count: int) -> Iterable[Item]:
    """A bar with the time left, where there is a terminal."""
    from rich.progress import track

    return track(items, "scoring", count, console=log, disable=not log.is_terminal, transient=True)
