"""`gpt2llama evolve`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import FileError, counted
from ._print import Json, log, print_json, stopped, tell
from ._runs import RunLog, time_of

if TYPE_CHECKING:
    from ..evolve.sweep import Plan

app = typer.Typer(add_completion=False)


@app.command()
def evolve(
    out: Annotated[Path, typer.Option(help="The folder of the sweep.")] = Path("evolve"),
    base: Annotated[str, typer.Option(help="The preset to begin with.")] = "zh-3m-2017",
    to: Annotated[str, typer.Option(help="The preset to end with.")] = "zh-3m",
    design: Annotated[str, typer.Option(help="ladder, add, drop or factorial.")] = "ladder",
    match: Annotated[str, typer.Option(help="params, flops or none.")] = "params",
    seeds: Annotated[int, typer.Option(help="Runs of each model.")] = 3,
    data: Annotated[str, typer.Option(help="sanguo, or a file or folder of text.")] = "sanguo",
    tokens: Annotated[int | None, typer.Option(help="To train each run on.")] = None,
    minutes: Annotated[float | None, typer.Option(help="For all of it (30, unless given).")] = None,
    switch: Annotated[list[str] | None, typer.Option(help="Of a factorial; several.")] = None,
    tune_lr: Annotated[bool, typer.Option(help="First choose each rung's learning rate.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; threads are shared out.")] = 1,
    engine: Annotated[str, typer.Option(help="local (processes) or ray (a cluster).")] = "local",
    dry_run: Annotated[bool, typer.Option(help="Print the models and the time, run none.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with the folder's own plan.")] = False,
    json: Json = False,
) -> None:
    """What does each change buy? From one model to another, a switch at a time, with intervals."""
    from ..evolve.engines import engine_named
    from ..evolve.report import write_report
    from ..evolve.results import summarise
    from ..evolve.run import result_of
    from ..evolve.sweep import Plan, Question, best_rates, make_plan, run_jobs

    chosen = engine_named(engine)
    if (out / "plan.json").exists():
        if not resume:
            raise FileError(f"{out} holds a sweep; go on with --resume or name another --out")
        plan = Plan.read(out)
    elif resume:
        raise FileError(f"{out} holds no sweep to resume; mend --out, or leave --resume out")
    else:
        question = Question(
            base=base,
            to=to,
            design=design,
            match=match,  # type: ignore[arg-type]  # checked by rungs_of
            seeds=seeds,
            data=data,
            tokens=tokens,
            minutes=30.0 if tokens is None and minutes is None else minutes,
            tune_lr=tune_lr,
            switches=switch or [],
        )
        plan = make_plan(out, question, tell)
    show(plan)
    if dry_run:
        if json:
            print_json({"rungs": [rung.name for rung in plan.rungs], "steps": plan.train.steps,
                        "seconds": plan.seconds})  # fmt: skip
        return
    plan.write(out)
    again = f"gpt2llama evolve --out {shlex.quote(str(out))} --resume"
    with stopped(f"stopped; go on with: {again}"):
        tuning = plan.tuning(out)
        known = {job.key: job for job in tuning + plan.jobs(out)}.values()
        talk = RunLog(out, len(known), sum(result_of(out, job) is None for job in known))
        tuned = run_jobs(out, tuning, jobs, talk, chosen)
        rates = best_rates([(job, tuned[job.key]) for job in tuning])
        todo = plan.jobs(out, rates)
        done = run_jobs(out, todo, jobs, talk, chosen)
    by_rung: dict[str, list[dict[str, Any]]] = {}
    for job in todo:
        by_rung.setdefault(job.rung, []).append(done[job.key])
    results = summarise(out, plan, by_rung)
    write_report(results, out)
    if json:
        print_json(results)
    else:
        log.print(table(results))
        print(out / "report.html")


def show(plan: Plan) -> None:
    from ..plan import flops_per_token, parameters

    table = Table(title=f"{plan.question.design}, matched by {plan.question.match}")
    for name in ("rung", "change", "adjusted", "parameters", "FLOPs/token"):
        table.add_column(name, justify="right" if name in ("parameters", "FLOPs/token") else "left")
    for rung in plan.rungs:
        total = parameters(rung.config)["total"]
        flops = flops_per_token(rung.config, plan.train.seq_len)
        table.add_row(rung.name, rung.change, rung.adjusted, f"{total:,}", f"{flops:,}")
    log.print(table)
    tokens = plan.train.steps * plan.train.batch_size * (plan.train.seq_len or 0)
    runs = len(plan.rungs) * (plan.question.seeds + 3 * plan.question.tune_lr)
    expected = f", about {time_of(plan.seconds)}" if plan.seconds else ""
    steps = counted(plan.train.steps, "step")
    tell(f"{counted(runs, 'run')} of {steps}, {tokens:,} tokens each{expected}")


def table(results: dict[str, Any]) -> Table:
    shown = Table(title="held-out bits per byte", title_justify="left")
    for name in ("rung", "bits/byte", "difference", "95% interval", "verdict"):
        shown.add_column(name, justify="left" if name in ("rung", "verdict") else "right")
    for rung in results["rungs"]:
        score, difference, low = rung["bits_per_byte"], rung["difference"], rung["low"]
        shown.add_row(
            rung["name"],
            "diverged" if score is None else f"{score:.4f}",
            "" if difference is None else f"{difference:+.4f}",
            "" if low is None else f"{low:+.4f} to {rung['high']:+.4f}",
            rung["verdict"] or "",
        )
    return shown
