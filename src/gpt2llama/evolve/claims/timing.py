"""Small timings for the claims about speed."""

from __future__ import annotations

import time
from collections.abc import Callable


def fastest(*runs: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each run's fastest call. They take turns, so that a busy moment hits all alike."""
    for run in runs:
        run()  # warms up
    best = [float("inf")] * len(runs)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            begun = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - begun)
    return best
