"""`gpt2llama finetune classify MODEL --data TEXTS --out RUN`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, counted
from ._config import nothing_named
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import TrainingProgress
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

if TYPE_CHECKING:
    from ..finetune.classify import ClassifyRun, Result

Method = Literal["last-layer", "lora", "full"]
MOST_SHOWN = 12  # classes: a wider matrix fits no terminal


def classify(
    model: Begin = None,
    *,
    data: Annotated[
        str | None, typer.Option(help="Texts and labels: a .csv or .jsonl file, or sms-spam.")
    ] = None,
    out: Out,
    preset: Annotated[
        str | None, typer.Option(help="A new model by its name, such as zh-3m, instead of MODEL.")
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(help="What learns beside the head.", show_default="lora; full of --preset"),
    ] = None,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_modules: LoraModules = None,
    class_weights: Annotated[
        Literal["none", "balanced"] | None,
        typer.Option(help="balanced: each class counts alike.", show_default="balanced"),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the texts.", show_default="1; 3 of last-layer, 5 of --preset"
        ),
    ] = None,
    split_seed: Annotated[
        int | None, typer.Option(min=0, help="Draws what is held out.", show_default="0")
    ] = None,
    settings: Settings = None,
    resume: Resume = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Make a classifier of texts, scored on texts that it has never seen.

    Fields for --set: steps (instead of --epochs), batch_size, seq_len, accumulate, lr, optimizer,
    schedule, warmup_steps, weight_decay, clip, eval_every, checkpoint_every, patience, seed,
    dtype, device; with --preset also those of the model.

    To go on, --out RUN --resume is enough.
    """
    from ..finetune.classify import ClassifyRun
    from ..finetune.classify import classify as run_classify
    from ..model.config import ModelConfig
    from ..model.presets import preset as named
    from ..train.config import TrainConfig, parse_settings
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted

    if model and preset:
        raise ConfigError("name what to tune, MODEL, or what to make, --preset, not both")
    written = out / "config.toml"
    if resume and written.exists():
        run = ClassifyRun.read(written)
        steps = run.train.steps if epochs is None else None
    elif not (model or preset):
        says = "name what to tune, MODEL, or what to make, --preset zh-3m"
        raise nothing_named(says, out, resume)
    else:
        run, steps = _new(model, preset, data, method or ("lora" if lora else None)), None
    adapters = lora_of(lora, lora_alpha, lora_dropout, lora_modules, run.lora)
    how = run.how.replace(
        **given(method=method, class_weights=class_weights, epochs=epochs, split_seed=split_seed)
    )
    if lora and how.method != "lora":
        raise ConfigError(f"--lora is for --method lora, not {how.method}; leave one out")
    changes, fields = parse_settings(settings or [], TrainConfig, ModelConfig)
    begin = lasting(model) if model else named(preset) if preset else run.begin
    if not isinstance(begin, str):
        begin = begin.replace(**fields)
    elif fields:
        name = next(iter(fields))
        raise ConfigError(f"--set {name}: the model's fields come with its weights; leave it out")

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
                lasting(data) if data else run.data,
                out,
                begin,
                how,
                run.train.replace(**changes),
                adapters,
                steps=changes.get("steps", steps),
                resume=resume,
                say=tell,
                report=tracked(report),
            )
    except Interrupted as error:
        place = shlex.quote(str(out))
        tell(f"{error}; go on with: gpt2llama finetune classify --out {place} --resume")
        raise typer.Exit(130) from None
    if json:
        print_json(result.to_dict())
        return
    _show(result)
    tell(f'\nnext:\n  gpt2llama classify {out} "a text"')


def _new(
    model: str | None, preset: str | None, data: str | None, method: Method | None
) -> ClassifyRun:
    """As its method, lora or full of a new model unless given, usually wants it."""
    from ..finetune.classify import USUAL, ClassifyConfig, ClassifyRun

    if data is None:
        raise ConfigError("--data is missing: give texts and labels, .csv, .jsonl or sms-spam")
    method = method or ("lora" if model else "full")
    if preset and method != "full":
        raise ConfigError(
            f"--method {method} leaves the weights of a new model as they are drawn; leave it out "
            "or name a MODEL"
        )
    epochs, train = USUAL["new" if preset else method]
    return ClassifyRun(
        data=data, begin="", how=ClassifyConfig(method=method, epochs=epochs), train=train
    )


def _show(result: Result) -> None:
    console, scores = Console(highlight=False), result.scores
    console.print(
        f"accuracy {scores.accuracy:.2%} on {counted(_held_out(result), 'held-out text')}, equally "
        "many of each label\n"
        f"(always saying {escape(result.majority_label)}: {result.majority:.2%})",
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
        f"{counted(result.step, 'step')} in {result.seconds:,.0f} s; "
        f"step {result.best_step:,} is kept",
        soft_wrap=True,
    )


def _held_out(result: Result) -> int:
    return sum(row.count for row in result.scores.classes)
