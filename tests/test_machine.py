from __future__ import annotations

import pytest

from gpt2llama import machine


def test_bandwidth_is_bytes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks twice a second: begun, and half a second later done."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) / 2)
    monkeypatch.setattr(machine.native, "read_bandwidth", lambda *_: None)
    assert machine.read_bandwidth(3 * 8192 + 100) == 3 * 16_384  # two tables of whole rows of 1,024
