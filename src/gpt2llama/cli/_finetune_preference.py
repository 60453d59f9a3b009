"""`gpt2llama finetune preference MODEL --data PAIRS.jsonl --out RUN`."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import counted
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import nothing_left
from ._tuning import (
    Begin,
    HeldOut,
    Lora,
    LoraAlpha,
    LoraDropout,
    LoraModules,
    Out,
    Resume,
    Settings,
    TuningProgress,
    lora_of,
    run_of,
    watched,
)


def preference(
    model: Begin = None,
    *,
    data: Annotated[
        Path | None, typer.Option(help="JSONL: prompt (text or messages), chosen, rejected.")
    ] = None,
    out: Out,
    held_out: HeldOut = None,
    loss: Annotated[
        Literal["dpo", "dpo-norm", "ipo", "ipo-norm", "simpo"] | None,
        typer.Option(help="The -norm ones count an answer per token.", show_default="dpo"),
    ] = None,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_modules: LoraModules = None,
    settings: Settings = None,
    resume: Resume = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Teach a model which of two answers is preferred.

    Fields for --set: beta, label_smoothing, margin (simpo), chat (false: a prompt is text to
    continue), and those of `train` but the model's (lr: 1e-5, with --lora 1e-4). The
    log-probabilities of the model as it was are computed once and kept in the run's folder.

    To go on, --out RUN --resume is enough.
    """
    from ..finetune.preference import DEFAULTS, PreferenceConfig, tune_preference
    from ..train.trackers import Tracking

    named = [] if loss is None else [f"loss={loss}"]
    pairs = [*named, *(settings or [])]
    adapters = partial(lora_of, lora, lora_alpha, lora_dropout, lora_modules)
    run = run_of(PreferenceConfig, DEFAULTS, model, out, data, held_out, pairs, resume, adapters)
    try:
        with TuningProgress(_words) as shown, Tracking(out, track or []) as tracked:
            report = tracked(partial(shown.update, steps=run.train.steps))
            done = tune_preference(run, out, resume=resume, report=report, watch=watched)
    except KeyboardInterrupt as error:
        said, place = str(error) or "stopped", shlex.quote(str(out))
        tell(f"{said}; go on with: gpt2llama finetune preference --out {place} --resume")
        raise typer.Exit(130) from None
    now, skipped = done.progress, done.pairs.skipped
    if json:
        result = {"run": str(out), "step": now.step, "skipped_pairs": skipped}
        result |= {"pairs": len(done.pairs.train), "held_out_pairs": len(done.pairs.held_out)}
        print_json(result | shown.last)
        return
    if not shown.last:
        tell(nothing_left(now, run.train.patience))
        return
    long = f"; {skipped:,} longer than the context left out" if skipped else ""
    tell(
        f"{counted(now.step, 'step')} on {counted(len(done.pairs.train), 'pair')} "
        f"({len(done.pairs.held_out)} held out{long}) in {now.seconds:.0f} s: {out}"
    )


def _words(line: dict[str, Any]) -> str:
    return (
        f"margin {line['held_out_margin']:.3f}, accuracy {line['held_out_accuracy']:.1%}, chosen "
        f"{line['held_out_chosen']:.2f}, rejected {line['held_out_rejected']:.2f} nats"
    )
