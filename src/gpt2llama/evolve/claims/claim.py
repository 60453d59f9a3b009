"""One published statement and the function that checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Verdict = Literal[
    "true",
    "true-if",
    "wrong",
    "wrong-in-part",
    "both",
    "incomplete",
    "helps",
    "hurts",
    "no-difference-shown",
    "not-measurable-here",
    "not-measured",
]

IN_CHINESE: dict[Verdict, str] = {
    "true": "对",
    "true-if": "有条件成立",
    "wrong": "错",
    "wrong-in-part": "部分错",
    "both": "都对",
    "incomplete": "不完整",
    "helps": "有益",
    "hurts": "有害",
    "no-difference-shown": "未见差异",
    "not-measurable-here": "这里测不了",
    "not-measured": "尚未测量",
}


class Finding(NamedTuple):
    """What a check found: the verdict, and our figure in English and in Chinese."""

    verdict: Verdict
    figure: str
    figure_zh: str


Check = Callable[[], Finding]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`statement` as others make it; `check` computes the answer anew each time.

    times_machine: the figure is a speed of this machine, so that it differs from run to run.
    trained: only a trained comparison decides it (see trained.py).
    """

    number: int
    statement: str
    statement_zh: str
    check: Check
    times_machine: bool = False
    trained: bool = False

    @property
    def command(self) -> str:
        """What makes the figure again."""
        how = "--train" if self.trained else "--quick"
        return f"gpt2llama claims {how} --number {self.number}"


def claim(
    number: int, statement: str, statement_zh: str, *, times_machine: bool = False
) -> Callable[[Check], Claim]:
    """Makes the check below it a Claim."""

    def made(check: Check) -> Claim:
        return Claim(
            number=number,
            statement=statement,
            statement_zh=statement_zh,
            check=check,
            times_machine=times_machine,
        )

    return made
