"""A fixed share of the fuzzing in fuzz.py, which has been run on 50,000 files: see the log."""

from __future__ import annotations

import pytest
from fuzz import TARGETS, run


@pytest.mark.parametrize("target", TARGETS)
def test_spoilt_files_give_our_errors(target: str) -> None:
    outcomes = run(target, 150)
    assert len(outcomes) > 1, "nothing was refused, or nothing loaded: the mutations are too weak"
