"""Bad usage: exit 2, and a plain sentence without the names that libraries give their errors."""

from __future__ import annotations

import re
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
