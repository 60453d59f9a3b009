"""`gpt2llama finetune STAGE`: each stage's command lies in a file of its own."""

from __future__ import annotations

import typer

from . import (
    _finetune_classify,
    _finetune_distill,
    _finetune_instruct,
    _finetune_preference,
    _finetune_reward,
)

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def finetune() -> None:
    """Adapt a model: to classify, answer, prefer, earn rewards, or do as a larger one does."""


app.command("classify")(_finetune_classify.classify)
app.command("instruct")(_finetune_instruct.instruct)
app.command("preference")(_finetune_preference.preference)
app.command("reward")(_finetune_reward.reward)
app.command("distill")(_finetune_distill.distill)
