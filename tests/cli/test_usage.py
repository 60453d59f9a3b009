"""Bad usage: exit 2, and a plain sentence without the names that libraries give their errors."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

LITERAL = ("finetune", "classify", "x", "--data", "y", "--out", "z")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*LITERAL, "--method", "last"), "'last' is not one of 'last-layer', 'lora', 'full'"),
        (("finetune", "preference", "--out", "z", "--loss", "x"), "'x' is not one of 'dpo'"),
        (("train", "--out", "z", "--track", "x"), "'x' is not one of 'trackio'"),
        (("chat", "x", "-n", "x"), "'-n'"),
        (("chat", "x", "--json"), "│ --json prints one answer: it needs --prompt"),
        (("eval", "x"), "│ give a text to score, --text, or --tasks to answer"),
        (("eval", "x", "--tasks", "y", "--write-golden"), "│ --write-golden needs --golden FILE"),
    ],
)
def test_the_sentence_is_plain(run: Any, arguments: tuple[str, ...], says: str) -> None:
    out, err = run(*arguments, code=2)
    assert out == ""
    assert "error," not in err
    assert says in re.sub(r"\s*│\n│\s*", " ", err)


@pytest.mark.parametrize("command", [("train",), ("finetune", "instruct"), ("evolve",)])
def test_help_wraps_as_text(
    run: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """No line ends before the next one's first word would have passed its end."""
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run(*command, "--help")
    said = out.partition("╭")[0].split("\n")
    lines = [line.strip() for line in said]
    assert len(max(lines, key=len)) <= 80
    for line, following in pairwise(lines):
        if line and following and not line.startswith("Usage"):
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)
