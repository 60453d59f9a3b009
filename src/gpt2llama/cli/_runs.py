"""A line for each run of a sweep, with the time that is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ._print import tell

if TYPE_CHECKING:
    from ..evolve.run import Job

AT_ONCE = 0.5  # seconds: a run that comes faster was there already


class RunLog:
    """Called with each job and its result as they come, of `runs` different ones in all."""

    def __init__(self, runs: int) -> None:
        self.runs, self.seen, self.there = runs, set[str](), 0
        self.begun = self.last = time.monotonic()

    def __call__(self, job: Job, result: dict[str, Any]) -> None:
        from ..evolve.sweep import TUNING_SEED

        if job.key in self.seen:
            return
        now = time.monotonic()
        self.seen.add(job.key)
        if now - self.last < AT_ONCE:
            self.there += 1
            self.begun += now - self.last
        self.last = now
        made = max(1, len(self.seen) - self.there)
        left = (now - self.begun) / made * max(0, self.runs - len(self.seen))
        score = result["bits_per_byte"]
        what = f"{score:.4f} bits per byte" if score is not None else f"diverged: {result['why']}"
        rate = f" at lr {job.run.train.lr:g}" if job.seed == TUNING_SEED else f", seed {job.seed}"
        counted = f"{len(self.seen)}/{self.runs}"
        tell(f"{counted} {job.rung}{rate}: {what}; {time_of(left)} left")


def time_of(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
