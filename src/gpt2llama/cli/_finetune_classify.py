"""`gpt2llama finetune classify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, field_names
from ._config import config_of
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import TrainingProgress

if TYPE_CHECKING:
    from ..finetune.classify import Result

MOST_SHOWN = 12  # classes: a wider matrix fits no terminal


def classify(
    data: Annotated[
        str, typer.Argument(help="A .csv or .jsonl file of texts and labels, or sms-spam.")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    begin: Annotated[
        str | None, typer.Option("--from", help="A model to tune: folder, run, asset or hub id.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A new model instead, by its name.")] = None,
    method: Annotated[
        Literal["last-layer", "lora", "full"] | None,
        typer.Option(help="What learns beside the head; lora for --from, full for --preset."),
    ] = None,
    class_weights: Annotated[
        Literal["none", "balanced"], typer.Option(help="balanced: each class counts alike.")
    ] = "balanced",
    lora_rank: Annotated[int | None, typer.Option(help="The adapters' rank; 8.")] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(help="They count alpha / rank times; twice the rank unless given."),
    ] = None,
    lora_dropout: Annotated[float | None, typer.Option(help="Of what they read.")] = None,
    lora_modules: Annotated[
        str | None, typer.Option(help="Where: q_proj,v_proj …; all-linear is all but the head.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the texts.")] = None,
    split_seed: Annotated[int, typer.Option(min=0, help="Of what is held out.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Make a classifier of texts, and score it on texts it has never seen.

    Fields for --set: steps (instead of --epochs), batch_size, seq_len, accumulate, lr, optimizer,
    schedule, warmup_steps, weight_decay, clip, eval_every, checkpoint_every, patience, seed,
    dtype, device; with --preset also those of the model.
    """
    from ..finetune.classify import USUAL, ClassifyConfig
    from ..finetune.classify import classify as run_classify
    from ..finetune.lora import LoraConfig
    from ..model.presets import preset as named
    from ..train.config import RunConfig
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted

    if (begin is None) == (preset is None):
        raise ConfigError("name what to tune, --from MODEL, or what to make, --preset zh-3m")
    method = method or ("lora" if begin else "full")
    if preset is not None and method != "full":
        raise ConfigError(
            f"--method {method} leaves the weights of a new model as they are drawn; leave it out "
            "or give --from MODEL"
        )
    options = {
        "rank": lora_rank,
        "alpha": 2 * lora_rank if lora_rank and lora_alpha is None else lora_alpha,
        "dropout": lora_dropout,
        "modules": lora_modules,
    }
    adapters: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
    if adapters and method != "lora":
        raise ConfigError(f"--lora-{next(iter(adapters))} is for --method lora, not {method}")
    usual_epochs, train = USUAL["new" if preset else method]
    before = config_of(begin) if begin else named(str(preset))
    run = RunConfig(model=before, train=train, data=data).set(settings or [])
    if begin and run.model != before:
        fields = [pair.partition("=")[0] for pair in settings or []]
        name = next(field for field in fields if field not in field_names(type(train)))
        raise ConfigError(f"--set {name}: the model's fields come with its weights; leave it out")
    stated = any(pair.startswith("steps=") for pair in settings or [])
    how = ClassifyConfig(
        method=method,
        class_weights=class_weights,
        epochs=usual_epochs if epochs is None else epochs,
        split_seed=split_seed,
    )

    def report(line: dict[str, Any], steps: int) -> None:
        # Else it would call the validation texts' loss held-out, as it is elsewhere.
        shown.update({k: v for k, v in line.items() if k != "held_out_loss"}, steps)
        if "accuracy" in line:
            tell(
                f"step {line['step']:,}: validation loss {line['held_out_loss']:.4f}, "
                f"accuracy {line['accuracy']:.2%}"
            )

    try:
        with TrainingProgress() as shown, Tracking(out, track or []) as tracked:
            result = run_classify(
                _lasting(data),
                out,
                _lasting(begin) if begin else run.model,
                how,
                run.train,
                LoraConfig(**adapters),
                steps=run.train.steps if stated else None,
                resume=resume,
                say=tell,
                report=tracked(report),
            )
    except Interrupted as error:
        tell(f"{error}; the same command with --resume goes on from there")
        raise typer.Exit(130) from None
    if json:
        print_json(result.to_dict())
        return
    _show(result)
    tell(f'\nnext:\n  gpt2llama classify {out} "a text"')


def _lasting(name: str) -> str:
    """That a run can be resumed from another folder."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _show(result: Result) -> None:
    console, scores = Console(highlight=False), result.scores
    console.print(
        f"accuracy {scores.accuracy:.2%} on {_held_out(result):,} held-out texts, equally many of "
        f"each label\n(always saying {escape(result.majority_label)}: {result.majority:.2%})",
        soft_wrap=True,
    )
    table = Table("", "precision", "recall", "F1", "texts", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, row in zip(result.labels, scores.classes, strict=True):
        figures = (f"{x:.2%}" for x in (row.precision, row.recall, row.f1))
        table.add_row(escape(label), *figures, f"{row.count:,}")
    console.print(table)
    if len(result.labels) <= MOST_SHOWN:
        names = [escape(label) for label in result.labels]
        table = Table("is ↓  said →", *names, title="confusion", title_justify="left")
        for name, counts in zip(names, scores.confusion, strict=True):
            table.add_row(name, *(f"{count:,}" for count in counts))
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)
    console.print(
        f"calibration error {scores.ece:.2%} with temperature {result.temperature:.3f}, "
        f"{result.ece_before:.2%} without\n"
        f"{result.step:,} steps in {result.seconds:,.0f} s; step {result.best_step:,} is kept",
        soft_wrap=True,
    )


def _held_out(result: Result) -> int:
    return sum(row.count for row in result.scores.classes)
