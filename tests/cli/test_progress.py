"""What a long run says of the time that is left."""

from __future__ import annotations

import itertools

import pytest

from gpt2llama.cli._progress import TrainingProgress


def test_the_time_left_is_by_steps_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiling, before a stage's first step, does not count."""
    clock = itertools.count(0, 11)
    monkeypatch.setattr("gpt2llama.cli._progress.time.monotonic", lambda: next(clock))
    with TrainingProgress() as shown:
        for step, seconds, steps in (
            (1, 30.0, 0), (2, 31.0, 101), (11, 40.0, 101), (1, 5.0, 13), (3, 9.0, 13),
        ):  # fmt: skip
            shown.update({"step": step, "seconds": seconds, "loss": 1, "tokens_per_s": 2}, steps)
    said = [line.split()[-3] for line in capsys.readouterr().err.splitlines()]
    assert said == ["99", "90", "20"]
