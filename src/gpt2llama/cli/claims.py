"""`gpt2llama claims`: what is said of GPT and Llama, checked on the spot."""

from __future__ import annotations

import sys
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InputError
from ..evolve.claims import CLAIMS, IN_CHINESE, Claim, Finding
from ..evolve.claims.trained import COMPARISONS
from ._print import Json, print_json, tell

app = typer.Typer(add_completion=False)
COLOURS = {"true": "green", "true-if": "yellow", "wrong": "red", "wrong-in-part": "red"}


class Row(NamedTuple):
    claim: Claim
    finding: Finding


@app.command()
def claims(
    train: Annotated[
        bool,
        typer.Option(
            "--train/--quick", help="Also train what only training decides; or just compute."
        ),
    ] = False,
    number: Annotated[
        list[int] | None, typer.Option(help="Only this claim; give it several times.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="With --train: tokens each run trains on.")
    ] = 4_000_000,
    markdown: Annotated[
        Literal["en", "zh"] | None, typer.Option(help="A page for the docs, in this language.")
    ] = None,
    json: Json = False,
) -> None:
    """What is said of GPT and Llama: a verdict, our figure, and the command that makes it again.

    Without --train, claims that only training decides are listed as not-measured.
    """
    chosen = _chosen(number or [])
    if train:
        _train(chosen, tokens)
    rows = [Row(claim, claim.check()) for claim in chosen]
    if json:
        print_json({"claims": [_as_dict(row) for row in rows]})
    elif markdown is not None:
        print(page(rows, markdown), end="")
    elif sys.stdout.isatty():
        Console().print(table(rows))
    else:
        for row in rows:
            print(*_as_dict(row).values(), sep="\t")


def _chosen(numbers: list[int]) -> list[Claim]:
    by_number = {claim.number: claim for claim in CLAIMS}
    for number in numbers:
        if number not in by_number:
            raise InputError(f"--number {number}: the claims are numbered 1 to {len(by_number)}")
    return [by_number[number] for number in dict.fromkeys(numbers)] if numbers else list(CLAIMS)


def _train(chosen: list[Claim], tokens: int) -> None:
    """Shows what the trained rows would cost."""
    numbers = {claim.number for claim in chosen if claim.trained}
    if not numbers:
        raise InputError("--train: none of these claims is decided by training; use --quick")
    wanted = [comparison for comparison in COMPARISONS if comparison.number in numbers]
    for comparison in wanted:
        names = ", ".join(comparison.variants)
        runs, flops = comparison.runs(), comparison.flops(tokens)
        tell(f"claim {comparison.number}: {comparison.baseline} against {names}: {runs} runs")
        tell(f"  of {tokens:,} tokens: {flops:.1e} FLOPs")
    raise InputError(
        "--train cannot run these comparisons yet: use --quick for the rest, and gpt2llama evolve "
        "for the changes between two presets"
    )


def _as_dict(row: Row) -> dict[str, int | str]:
    return {
        "number": row.claim.number,
        "claim": row.claim.statement,
        "verdict": row.finding.verdict,
        "figure": row.finding.figure,
        "command": row.claim.command,
    }


def table(rows: list[Row]) -> Table:
    """For a terminal: the claim, and under it our figure."""
    found = Table(show_header=True, header_style="bold", show_lines=False, box=None)
    found.add_column("#", justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    found.add_column("claim, our figure, the command", overflow="fold")
    for claim, finding in rows:
        colour = COLOURS.get(finding.verdict, "dim")
        verdict = f"[{colour}]{finding.verdict}[/]"
        found.add_row(str(claim.number), verdict, f"[bold]{_plain(claim.statement)}[/]")
        found.add_row("", "", _plain(finding.figure))
        found.add_row("", "", f"[dim]{claim.command}[/]", end_section=True)
    return found


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


_TITLES = {
    "en": (
        "# What is said of GPT and Llama, checked",
        "[中文](claims.zh.md)",
        "Each row is a statement of published walk-throughs, decided by arithmetic, by a small "
        "exact computation or by training. This page is the output of",
        "A verdict is computed together with its figure. `true-if` names the condition; "
        "`not-measured` rows need training. Rows {timed} time the machine they run on. What comes "
        "from memory is marked as such.",
        "| # | claim | verdict | our figure | make it again |",
    ),
    "zh": (
        "# 关于 GPT 和 Llama 的说法，逐条核对",
        "[English](claims.md)",
        "每一行是公开教程里的一个说法，由算术、一个精确的小计算或训练来判定。本页是这条命令的输出：",
        "结论与数字一同算出。“有条件地对”会写明条件；“尚未测量”的行需要训练。第 {timed} 行测的是"
        "运行它的那台机器。凭记忆的数字都已注明。",
        "| # | 说法 | 结论 | 我们的数字 | 重做的命令 |",
    ),
}


def page(rows: list[Row], language: Literal["en", "zh"]) -> str:
    """The Markdown page of the docs."""
    title, other, about, legend, header = _TITLES[language]
    timed = [str(claim.number) for claim, _ in rows if claim.times_machine]
    command = f"gpt2llama claims --quick --markdown {language}"
    lines = [title, "", other, "", about, "", "```", command, "```", ""]
    joined = ("、" if language == "zh" else " and ").join(timed)
    lines += [legend.format(timed=joined or "–"), "", header, "| ---: | --- | --- | --- | --- |"]
    for claim, finding in rows:
        cells: list[str] = [claim.statement, finding.verdict, finding.figure]
        if language == "zh":
            cells = [claim.statement_zh, IN_CHINESE[finding.verdict], finding.figure_zh]
        escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| {claim.number} | {escaped} | `{claim.command}` |")
    return "\n".join(lines) + "\n"
