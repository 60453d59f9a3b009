"""`gpt2llama eval PATH --text FILE`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DataError
from ._print import Json, print_json
from ._text import read_text

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    path: Annotated[str, typer.Argument(help="A model: a folder or a run.")],
    text: Annotated[str, typer.Option(help="The file to score; - reads stdin.")],
    json: Json = False,
) -> None:
    """Bits per byte and perplexity of a text: every token once, in windows of the context."""
    content = read_text(text)
    if not content:
        raise DataError(f"{text} is empty; give some text to score")
    from ..train.metrics import evaluate_text
    from ._model import load_with_tokenizer

    score = evaluate_text(*load_with_tokenizer(path), content)
    if json:
        keys = ("bits_per_byte", "perplexity", "tokens", "bytes")
        print_json({key: getattr(score, key) for key in keys})
    else:
        print(
            f"{score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.2f}; "
            f"{score.tokens:,} tokens, {score.bytes:,} bytes"
        )
