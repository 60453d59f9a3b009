"""`gpt2llama data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ..data.prepare import LEAK_WINDOW, Split, prepare
from ..errors import counted
from ._print import Json, log, print_json, stopped

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Turn text into token shards."""


@app.command("prepare")
def prepare_command(
    paths: Annotated[list[Path], typer.Argument(help=".txt .md .json .jsonl .parquet, or folders")],
    tokenizer: Annotated[
        str, typer.Option(help="A tokenizer's folder, its tokenizer.json, or any model.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the shards.")],
    held_out: Annotated[float, typer.Option(help="The share kept for evaluation.")] = 0.1,
    json: Json = False,
) -> None:
    """Encode text into shards of tokens, with a held-out split and a check for leaks."""
    from ._tokenizer import tokenizer_of

    with (
        stopped("stopped: nothing was written"),
        Progress(console=log, transient=True, disable=not log.is_terminal) as bar,
    ):
        task = bar.add_task("encoding", total=None)
        report = prepare(
            paths,
            tokenizer_of(tokenizer),
            out,
            held_out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        print_json(report.to_dict())
    else:
        print(
            f"{report.folder}\n{_line('train', report.train)}\n{_line('held out', report.held_out)}"
        )
    if report.skipped:
        names = " ".join(path.name for path in report.skipped[:3])
        count = counted(len(report.skipped), "file")
        log.print(f"skipped {count} (no text): {names}", markup=False)
    if report.leaked_windows or report.leaked_documents:
        log.print(
            f"warning: of the held-out text, {report.leaked_windows} of "
            f"{counted(report.held_out.tokens // LEAK_WINDOW, 'window')} of {LEAK_WINDOW} tokens "
            f"and {report.leaked_documents} of "
            f"{counted(report.held_out.documents, 'whole document')} are also in the training text"
        )


def _line(name: str, split: Split) -> str:
    return (
        f"{name:<9}{counted(split.documents, 'document'):>19} "
        f"{counted(split.tokens, 'token'):>20} {counted(split.bytes, 'byte'):>20} "
        f"{split.bytes_per_token:6.2f} bytes/token"
    )
