"""Training in the terminal: a bar with ETA, tokens/s and loss; plain lines where there is none."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from ._print import log

if TYPE_CHECKING:
    from ..train.trainer import Progress


def nothing_left(done: Progress, patience: int | None) -> str:
    """What there is to say of a run that was at its end when it was resumed."""
    if patience is not None and done.worse >= patience:
        return (
            f"nothing was left to do: the run stopped early at step {done.step:,}, out of "
            "patience; to go on, resume it with --set patience=none"
        )
    return (
        f"nothing was left to do: step {done.step:,} was the last; to go on, resume it with more, "
        f"such as --set steps={2 * done.step}"
    )


class TrainingProgress:
    """A context; `update` takes the lines of metrics.jsonl. `last` keeps the newest figures."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self.bar = Bar(
            TextColumn("training"),
            BarColumn(),
            TextColumn("step {task.completed:,}/{task.total:,}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=log,
            disable=not log.is_terminal,
        )
        self._task: TaskID | None = None
        self._shown = time.monotonic()
        self._from = (0, 0.0)  # a stage's first step that was told of, and the seconds until then

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Leaves the last figures on the screen and the line below free."""
        self.bar.stop()

    def update(self, line: dict[str, Any], steps: int) -> None:
        """`steps`: of the whole run; nothing is shown while it is 0, not known."""
        self.last |= line
        first, before = self._from
        if not 0 < first < line["step"]:  # what went before, such as compiling, tells no speed
            self._from = first, before = line["step"], line["seconds"]
        if not steps:
            return
        if self._task is None:
            self._task = self.bar.add_task("training", total=steps, figures="")
        if not self.bar.live.is_started:  # at first, and when a second stage begins
            self.bar.start()
        figures = (
            f"loss {self.last.get('loss', math.nan):.3f}  {line['tokens_per_s']:,.0f} tokens/s"
        )
        self.bar.update(self._task, total=steps, completed=line["step"], figures=figures)
        now = time.monotonic()
        if "bits_per_byte" in line:
            log.print(f"step {line['step']:,}: held out {line['bits_per_byte']:.3f} bits per byte")
        elif "held_out_loss" in line:
            log.print(f"step {line['step']:,}: held-out loss {line['held_out_loss']:.3f}")
        elif not log.is_terminal and now - self._shown > 10 and line["step"] > first:
            left = (steps - line["step"]) * (line["seconds"] - before) / (line["step"] - first)
            log.print(f"step {line['step']:,}/{steps:,}: {figures}, {left:.0f} s left")
            self._shown = now
