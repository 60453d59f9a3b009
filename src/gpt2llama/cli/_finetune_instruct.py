"""`gpt2llama finetune instruct`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import TrainingProgress


def instruct(
    model: Annotated[str, typer.Argument(help="What to tune: folder, run, asset or hub id.")],
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="FILE[:WEIGHT]", help="Conversations as JSONL; several."),
    ],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    held_out: Annotated[
        Path | None, typer.Option(help="Conversations that are only scored; else a share of data.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    lora: Annotated[
        int | None, typer.Option("--lora", metavar="RANK", help="Adapters alone learn: their rank.")
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(help="They count alpha / rank times; twice the rank unless given."),
    ] = None,
    lora_dropout: Annotated[float, typer.Option(help="Of what they read.")] = 0.0,
    lora_modules: Annotated[
        str, typer.Option(help="Where: q_proj,v_proj …; all-linear is all but the head.")
    ] = "all-linear",
    neftune: Annotated[
        float | None, typer.Option(help="Noise on the embeddings: alpha, such as 5.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of training.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Teach a model to answer, from conversations: the answers alone are learned.

    A line of FILE is an object with "messages" (OpenAI), "conversations" (ShareGPT) or
    "instruction", "input" and "output" (Alpaca). Fields for --set: steps (instead of --epochs),
    batch_size, seq_len, accumulate, lr, optimizer, schedule, warmup_steps, weight_decay, clip,
    eval_every, checkpoint_every, patience, seed, dtype, device.
    """
    from ..finetune.instruct import SHORT_TUNE, InstructConfig
    from ..finetune.instruct import instruct as tune
    from ..finetune.lora import LoraConfig
    from ..train.config import TrainConfig, parse_settings
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted

    (changes,) = parse_settings(settings or [], TrainConfig)
    train, steps = SHORT_TUNE.replace(**changes), changes.get("steps")
    how = InstructConfig(epochs=epochs, neftune=neftune)
    files = [_weighted(text) for text in data]
    adapters = None
    if lora is not None:
        alpha = 2 * lora if lora_alpha is None else lora_alpha
        adapters = LoraConfig(rank=lora, alpha=alpha, dropout=lora_dropout, modules=lora_modules)
    try:
        with TrainingProgress() as shown, Tracking(out, track or []) as tracked:
            done = tune(
                model, files, out, train, how,
                held_out=held_out, lora=adapters, steps=steps, resume=resume, say=tell,
                report=tracked(shown.update),
            )  # fmt: skip
    except Interrupted as error:
        tell(f"{error}; go on with the same command and --resume: {shlex.quote(str(out))}")
        raise typer.Exit(130) from None
    result = {"run": str(out), "step": done.step, "tokens": done.tokens, **shown.last}
    if json:
        print_json(result)
    else:
        best = f"; the best by held-out loss is step {done.best_step}" * (done.best_step > 0)
        tell(f"{done.step} steps in {done.seconds:.0f} s{best}: talk to it with")
        tell(f"  gpt2llama chat {shlex.quote(str(out))}")


def _weighted(text: str) -> tuple[str, float]:
    """FILE:WEIGHT, or FILE alone, whose weight is 1."""
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        if Path(path).exists():
            raise ConfigError(f"--data {text}: the weight {weight!r} is no number") from None
        return text, 1.0
