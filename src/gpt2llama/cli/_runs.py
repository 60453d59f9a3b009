"""A line for each run of a sweep, with the time that is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._print import tell

if TYPE_CHECKING:
    from ..evolve.run import Job


class RunLog:
    """Called with each job and its result as they come: of `runs` different ones in all, `to_make`
    that are not there yet."""

    def __init__(self, folder: Path, runs: int, to_make: int) -> None:
        self.folder, self.runs, self.to_make = folder, runs, to_make
        self.seen, self.made, self.begun = set[str](), 0, time.time()

    def __call__(self, job: Job, result: dict[str, Any]) -> None:
        from ..evolve.sweep import TUNING_SEED

        if job.key in self.seen:
            return
        self.seen.add(job.key)
        score = result["bits_per_byte"]
        what = f"{score:.4f} bits per byte" if score is not None else f"diverged: {result['why']}"
        rate = f" at lr {job.run.train.lr:g}" if job.seed == TUNING_SEED else f", seed {job.seed}"
        written = (self.folder / "runs" / job.key / "result.json").stat().st_mtime
        self.made += written >= self.begun
        left = self.to_make - self.made
        if self.made and left > 0:
            what += f"; {time_of((time.time() - self.begun) / self.made * left)} left"
        tell(f"{len(self.seen)}/{self.runs} {job.rung}{rate}: {what}")


def time_of(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
