"""`gpt2llama finetune instruct MODEL --data TALKS.jsonl --out RUN`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, counted
from ._config import nothing_named
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import TrainingProgress, nothing_left
from ._tuning import (
    Begin,
    Lora,
    LoraAlpha,
    LoraDropout,
    LoraModules,
    Out,
    Resume,
    Settings,
    given,
    lasting,
    lora_of,
)


def instruct(
    model: Begin = None,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE[:WEIGHT]",
            help="Conversations as JSONL; several, each as often an epoch as its weight says.",
        ),
    ] = None,
    out: Out,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Conversations that are only scored.", show_default="5% of the data"),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data.", show_default="3.0")
    ] = None,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_modules: LoraModules = None,
    neftune: Annotated[
        float | None, typer.Option(help="Noise on the embeddings, such as 5.", show_default="none")
    ] = None,
    settings: Settings = None,
    resume: Resume = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Teach a model to answer, from conversations: the answers alone are learned.

    A line of FILE is an object with "messages" (OpenAI), "conversations" (ShareGPT) or
    "instruction", "input" and "output" (Alpaca).

    Fields for --set: steps (instead of --epochs), batch_size, seq_len, accumulate, lr, optimizer,
    schedule, warmup_steps, weight_decay, clip, eval_every, checkpoint_every, patience, seed,
    dtype, device, compile.

    To go on, --out RUN --resume is enough.
    """
    from ..finetune.instruct import InstructRun
    from ..finetune.instruct import instruct as tune
    from ..train.config import TrainConfig, parse_settings
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted

    (changes,) = parse_settings(settings or [], TrainConfig)
    written = out / "config.toml"
    if resume and written.exists():
        run = InstructRun.read(written)
        steps = run.train.steps if epochs is None else None
    elif model is None:
        says = "name the model to tune: gpt2llama finetune instruct MODEL …"
        raise nothing_named(says, out, resume)
    elif not data:
        raise ConfigError("--data is missing: give a JSONL file of conversations")
    else:
        run, steps = InstructRun(begin="", data=[]), None
    files = [_weighted(text) for text in data or []] or run.data
    held = str(held_out.resolve()) if held_out else run.held_out
    if run.held_out and held == str(Path(run.held_out).resolve()):
        held = run.held_out  # by its name in a config that says it relatively
    adapters = lora_of(lora, lora_alpha, lora_dropout, lora_modules, run.lora)
    how = run.how.replace(**given(epochs=epochs, neftune=neftune))
    train = run.train.replace(**changes)
    try:
        with TrainingProgress() as shown, Tracking(out, track or []) as tracked:
            done = tune(
                lasting(model) if model else run.begin, files, out, train, how,
                held_out=held or None, lora=adapters,
                steps=changes.get("steps", steps), resume=resume, say=tell,
                report=tracked(shown.update),
            )  # fmt: skip
    except Interrupted as error:
        place = shlex.quote(str(out))
        tell(f"{error}; go on with: gpt2llama finetune instruct --out {place} --resume")
        raise typer.Exit(130) from None
    result = {"run": str(out), "step": done.step, "tokens": done.tokens, **shown.last}
    if json:
        print_json(result)
    elif not shown.last:
        tell(nothing_left(done, train.patience))
    else:
        best = f"; the best by held-out loss is step {done.best_step}" * (done.best_step > 0)
        tell(f"{counted(done.step, 'step')} in {done.seconds:.0f} s{best}: talk to it with")
        tell(f"  gpt2llama chat {shlex.quote(str(out))}")


def _weighted(text: str) -> tuple[str, float]:
    """FILE:WEIGHT, or FILE alone, whose weight is 1."""
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        return lasting(text), 1.0
    try:
        return lasting(path), float(weight)
    except ValueError:
        if Path(path).exists():
            raise ConfigError(f"--data {text}: the weight {weight!r} is no number") from None
        return text, 1.0
