"""`gpt2llama finetune STAGE`: each stage's command lies in a file of its own."""

from __future__ import annotations

import typer

from . import _finetune_instruct

app = typer.Typer(no_args_is_help=True)


@app.callback()
def finetune() -> None:
    """Make an assistant of a model that continues text."""


app.command("instruct")(_finetune_instruct.instruct)
