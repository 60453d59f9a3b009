"""`gpt2llama finetune distill STUDENT --teacher MODEL --data DATA --out RUN`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, counted
from ._options import Track
from ._print import Json, log, print_json, tell
from ._tuning import given, lasting

LOGITS, ANSWERS = "Learning its probabilities", "Writing its answers"


def distill(
    student: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDENT", help="What to train: a folder, run, asset, hub id or preset."
        ),
    ] = None,
    *,
    teacher: Annotated[str | None, typer.Option(help="The model to learn from.")] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; with --prompts a new .jsonl file.")],
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of `data prepare`.", rich_help_panel=LOGITS),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Softens both distributions.", show_default="2.0", rich_help_panel=LOGITS
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="The teacher's weight, 0 to 1; the data has the rest.",
            show_default="0.5",
            rich_help_panel=LOGITS,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run the teacher once and keep its k likeliest tokens of each place.",
            rich_help_panel=LOGITS,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A field of train; several.", rich_help_panel=LOGITS
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl (prompt, instruction or messages) or a text, a prompt a line.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", min=1, help="Of an answer.", rich_help_panel=ANSWERS
        ),
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Answers at a time.", rich_help_panel=ANSWERS)
    ] = 16,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was begun.")] = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Teach a model what a larger one says: its probabilities, or its answers.

    With --data a model of the same tokenizer learns the teacher's probabilities. With --prompts the
    teacher's answers are written as data for finetune instruct, whatever the tokenizer.
    """
    if prompts is not None:
        if student is not None or data is not None or track:
            what = "--track" if track else "STUDENT"
            raise ConfigError(f"--prompts writes answers and trains nothing: leave {what} out")
        if teacher is None:
            raise ConfigError("--teacher is missing: the model that answers")
        _answers(teacher, prompts, out, max_new_tokens, batch_size, resume, json)
        return
    from ..finetune.distill import DistillRun, distill
    from ..model.presets import presets
    from ..train.config import TrainConfig
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted
    from ._config import config_of, nothing_named
    from ._progress import TrainingProgress, nothing_left

    if resume and (out / "config.toml").exists():
        run = DistillRun.read(out / "config.toml")
    elif student is None or teacher is None or data is None:
        says = "give STUDENT, --teacher and --data (or --prompts, for its answers)"
        raise nothing_named(says, out, resume and student is None)
    else:
        run = DistillRun(model=config_of(student), train=TrainConfig(), data="")
    if student is not None:
        named = ("", student) if student in presets() else (lasting(student), "")
        if named != (run.begin, run.student):  # else its config stays as it was begun with
            run = replace(run, model=config_of(student), begin=named[0], student=named[1])
    if data is not None:
        run = replace(run, data=str(data.resolve()))
    changes = given(temperature=temperature, alpha=alpha, top_k=top_k)
    if teacher is not None:
        changes["teacher"] = _checkpoint(teacher, run.distill.teacher)
    run = run.changed(settings or [], changes)
    try:
        with (
            TrainingProgress() as shown,
            _counter("the teacher reads", "windows") as watch,
            Tracking(out, track or []) as tracked,
        ):
            report = tracked(partial(shown.update, steps=run.train.steps))
            done = distill(run, out, resume=resume, report=report, watch=watch)
    except KeyboardInterrupt as error:
        said = str(error) if isinstance(error, Interrupted) else "stopped"
        place = shlex.quote(str(out))
        tell(f"{said}; go on with: gpt2llama finetune distill --out {place} --resume")
        raise typer.Exit(130) from None
    if json:
        print_json({"run": str(out), "step": done.step, "tokens": done.tokens, **shown.last})
    elif not shown.last:
        tell(nothing_left(done, run.train.patience))
    else:
        tokens = counted(done.tokens, "token")
        tell(f"{counted(done.step, 'step')}, {tokens} in {done.seconds:.0f} s: {out}")


def _answers(
    teacher: str, prompts: Path, out: Path, count: int, batch_size: int, resume: bool, json: bool
) -> None:
    from ..finetune.teacher_answers import read_prompts, write_answers
    from ._model import load_with_tokenizer

    questions = read_prompts(prompts)
    model, tokenizer = load_with_tokenizer(teacher, None, None)
    try:
        with _counter("the teacher answers", "prompts") as watch:
            done = write_answers(
                model,
                tokenizer,
                questions,
                out,
                name=lasting(teacher),
                max_new_tokens=count,
                batch_size=batch_size,
                resume=resume,
                watch=watch,
            )
    except KeyboardInterrupt:
        tell("stopped; go on with the same command and --resume")
        raise typer.Exit(130) from None
    if json:
        print_json({"path": str(out), **vars(done)})
        return
    left = f", {done.empty} empty and {done.cut_off} cut off left out (-n sets how long)"
    tell(f"{counted(done.written, 'answer')}{left if done.empty or done.cut_off else ''}: {out}")


def _checkpoint(name: str, begun: str) -> str:
    """Of a run the one that was `begun` with, or its latest one now: a resumed distillation must
    not meet a later one."""
    from ..weights import open_model

    if (Path(name) / "latest").is_file():
        if Path(begun).is_relative_to(Path(name).resolve()):
            return begun
        return str(Path(open_model(name).where).parent.resolve())
    return lasting(name)


class _Counter:
    """Called with how many are done, of how many."""

    def __init__(self, what: str, unit: str) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        self.bar = Progress(
            *columns, TimeRemainingColumn(), console=log, transient=True,
            disable=not log.is_terminal,
        )  # fmt: skip
        self.what, self.unit, self.first = what, unit, 0
        self.task = self.bar.add_task(what, total=None, visible=False)
        self.begun = self.shown = 0.0

    def __call__(self, done: int, count: int) -> None:
        now = time.monotonic()
        if not self.begun:
            self.begun = self.shown = now
            self.first = done
            self.bar.start()
        self.bar.update(self.task, completed=done, total=count, visible=True)
        if done == count:
            self.bar.stop()
        elif not log.is_terminal and now - self.shown > 10 and done > self.first:
            left = (now - self.begun) / (done - self.first) * (count - done)
            log.print(f"{self.what}: {done:,}/{count:,} {self.unit}, {left:.0f} s left")
            self.shown = now


@contextmanager
def _counter(what: str, unit: str) -> Iterator[_Counter]:
    counter = _Counter(what, unit)
    try:
        yield counter
    finally:
        counter.bar.stop()
