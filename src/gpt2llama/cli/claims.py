"""`gpt2llama claims`: what is said of GPT and Llama, checked on the spot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..atomic import write_text
from ..errors import InputError, counted
from ..evolve.claims import CLAIMS, Claim, Finding
from ._claims_page import Language, Row, Training, as_dict, page, table
from ._print import Json, print_json, tell
from ._runs import RunLog, time_of

if TYPE_CHECKING:
    from ..evolve.claims.trained import Comparison
    from ..evolve.claims.training import Study, Trained

    Done = list[tuple[Comparison, Trained]]  # what decides one claim

app = typer.Typer(add_completion=False)
TOKENS, SEEDS = 100_000, 5


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
    out: Annotated[
        Path, typer.Option(help="With --train: the folder of the runs; the same one goes on.")
    ] = Path("claims"),
    data: Annotated[
        str, typer.Option(help="With --train: sanguo, or a file or folder of text.")
    ] = "sanguo",
    tokens: Annotated[int, typer.Option(min=1, help="With --train: of each run.")] = TOKENS,
    seeds: Annotated[int, typer.Option(help="With --train: runs of each model.")] = SEEDS,
    jobs: Annotated[
        int, typer.Option(min=1, help="With --train: processes; threads are shared out.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option(help="With --train: show what it would cost, train nothing.")
    ] = False,
    markdown: Annotated[
        Language | None, typer.Option(help="A page for the docs, in this language.")
    ] = None,
    json: Json = False,
) -> None:
    """What is said of GPT and Llama: a verdict, our figure, and the command that makes it again.

    Without --train, claims that only training decides are listed as not-measured. Training can be
    stopped at any time: the same command goes on.
    """
    chosen = _chosen(number or [])
    findings: dict[int, Finding] = {}
    training = None
    if train:
        study, wanted, budget = _planned(chosen, out, data, tokens, seeds)
        if dry_run:
            if json:
                print_json(budget)
            return
        told = RunLog(out, budget["runs"], budget["left"])
        trained: dict[int, Done] = {}
        for comparison in wanted:
            found = study.run(comparison, jobs, told)
            trained.setdefault(comparison.number, []).append((comparison, found))
        findings, training = _decided(study, trained)
        # What makes these numbers again; threads and folders decide none.
        asked = {
            "--data": (data, "sanguo"),
            "--tokens": (tokens, TOKENS),
            "--seeds": (seeds, SEEDS),
        }
        flags = [f" {key} {value}" for key, (value, usual) in asked.items() if value != usual]
        training = training._replace(flags="".join(flags))
    rows = [Row(claim, findings.get(claim.number) or claim.check()) for claim in chosen]
    if json:
        made = {"training": training._asdict()} if training else {}
        print_json({"claims": [as_dict(row, training) for row in rows], **made})
    elif markdown is not None:
        print(page(rows, markdown, training), end="")
    elif sys.stdout.isatty():
        Console().print(table(rows, training))
    else:
        for row in rows:
            print(*as_dict(row, training).values(), sep="\t")


def _chosen(numbers: list[int]) -> list[Claim]:
    by_number = {claim.number: claim for claim in CLAIMS}
    for number in numbers:
        if number not in by_number:
            raise InputError(f"--number {number}: the claims are numbered 1 to {len(by_number)}")
    return [by_number[number] for number in dict.fromkeys(numbers)] if numbers else list(CLAIMS)


def _planned(
    chosen: list[Claim], out: Path, data: str, tokens: int, seeds: int
) -> tuple[Study, list[Comparison], dict[str, int]]:
    """What decides the chosen claims, and what that costs, which it tells."""
    from ..evolve.claims.trained import COMPARISONS
    from ..evolve.claims.training import Study

    numbers = {claim.number for claim in chosen if claim.trained}
    if not numbers:
        raise InputError("--train: none of these claims is decided by training; use --quick")
    wanted = [comparison for comparison in COMPARISONS if comparison.number in numbers]
    study = Study.open(out, data, tokens, seeds, tell)
    jobs = study.planned(wanted)
    left = study.left(jobs)
    for comparison in wanted:
        names, ours = ", ".join(comparison.variants), study.planned([comparison])
        count = counted(len(ours), "run")
        tell(f"claim {comparison.number}: {comparison.baseline} against {names}: {count}")
    seconds = round(study.seconds(left)) if left else 0
    about = f", about {time_of(seconds)} here" if left else ""
    count = counted(len(jobs), "different run")
    tell(f"{count} of {study.tokens:,} tokens, {len(left)} of them left{about}")
    budget = {"runs": len(jobs), "left": len(left), "tokens": study.tokens, "seconds": seconds}
    return study, wanted, budget


def _decided(study: Study, trained: dict[int, Done]) -> tuple[dict[int, Finding], Training]:
    """The verdicts, and how they came about; draws the chart if its claims are among them."""
    from ..evolve.claims.chart import long_context_svg
    from ..evolve.claims.decide import decide
    from ..evolve.sweep import machine

    charted = {13, 14} <= trained.keys()
    if charted:
        ((_, schemes),), ((_, scalings),) = trained[13], trained[14]
        for language, name in (("en", "long-context.svg"), ("zh", "long-context.zh.svg")):
            drawn = long_context_svg(schemes, scalings, study, language)
            write_text(study.folder / name, drawn, overwrite=True)
            tell(str(study.folder / name))
    training = Training(
        tokens=study.tokens,
        steps=study.train.steps,
        seeds=study.seeds,
        corpus=study.corpus,
        cpu=machine(study.train)["cpu"],
        chart=charted,
    )
    return {number: decide(number, done, study) for number, done in trained.items()}, training
