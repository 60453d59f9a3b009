"""`gpt2llama tokenizer train | encode | show | compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..data.documents import read_documents
from ..tokenizer import split_pieces, train_bpe
from ._print import Json, log, print_json
from ._tokenizer import tokenizer_of

app = typer.Typer(no_args_is_help=True, add_completion=False)
Source = Annotated[str, typer.Argument(metavar="PATH", help="A tokenizer's file, or any model.")]
Words = Annotated[str, typer.Argument(metavar="TEXT")]
_BACKGROUNDS = ("black on bright_cyan", "black on bright_yellow")


@app.callback()
def main() -> None:
    """Train, try and show tokenizers."""


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(help=".txt .md .json .jsonl .parquet, or folders")],
    vocab_size: Annotated[int, typer.Option(help="Pieces, bytes and special ones included.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    json: Json = False,
) -> None:
    """Train a byte-level BPE vocabulary."""
    log.print("counting and merging …")
    tokenizer = train_bpe((document.text for document in read_documents(files)), vocab_size)
    tokenizer.save(out)
    if tokenizer.vocab_size < vocab_size:
        log.print(
            f"warning: this text gives {tokenizer.vocab_size:,} pieces, not {vocab_size:,}: "
            "no other pair of pieces occurs twice"
        )
    if json:
        print_json(
            {
                "out": str(out),
                "vocab_size": tokenizer.vocab_size,
                "fingerprint": tokenizer.fingerprint,
            }
        )
    else:
        print(f"{out}: {tokenizer.vocab_size:,} pieces")


@app.command()
def encode(path: Source, text: Words, json: Json = False) -> None:
    """Print the ids of a text."""
    ids = tokenizer_of(path).encode(text)
    if json:
        print_json({"ids": ids})
    else:
        print(*ids)


@app.command()
def show(path: Source, text: Words, json: Json = False) -> None:
    """Print the pieces of a text, each with its ids; one that shares a character has several."""
    tokenizer = tokenizer_of(path)
    pieces = list(split_pieces(tokenizer, tokenizer.encode(text)))
    if json:
        print_json({"pieces": [{"text": piece, "ids": ids} for piece, ids in pieces]})
        return
    console = Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    line = Text()
    for i, (piece, ids) in enumerate(pieces):
        shown = _visible(piece)
        line.append(shown if colour else f"│{shown}│", _BACKGROUNDS[i % 2])
        line.append(" ".join(map(str, ids)) + " ", "dim")
    console.print(line, soft_wrap=True)


@app.command()
def compare(
    texts: Annotated[list[Path], typer.Argument(help="A row each: a language's file or folder.")],
    tokenizer: Annotated[list[str], typer.Option(help="A column each; give it several times.")],
    json: Json = False,
) -> None:
    """Bytes of text per token, for several tokenizers side by side: the more, the shorter."""
    tokenizers = [tokenizer_of(path) for path in tokenizer]
    table = Table(title="bytes per token", title_justify="left")
    table.add_column("text", overflow="fold")
    for heading in ("bytes", *tokenizer):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_row("(pieces)", "", *(f"{t.vocab_size:,}" for t in tokenizers), end_section=True)
    rows = []
    for path in texts:
        documents = [document.text for document in read_documents([path])]
        size = sum(len(text.encode("utf-8")) for text in documents)
        counts = [sum(len(t.encode(text)) for text in documents) for t in tokenizers]
        table.add_row(str(path), f"{size:,}", *(f"{size / count:.3f}" for count in counts))
        for name, count in zip(tokenizer, counts, strict=True):
            row = {"text": str(path), "tokenizer": name, "bytes": size, "tokens": count}
            rows.append(row | {"bytes_per_token": size / count})
    if json:
        print_json({"compared": rows})
    else:
        Console().print(table)


def _visible(piece: str) -> str:
    """Control characters and unusual spaces escaped, so that they are seen and do nothing."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in piece)
