"""`gpt2llama eval PATH --tasks …`: questions of a file or lm-eval's tasks, judged and compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import FileError, InputError, counted
from ._print import BadUsage, model_text, print_json, tell

if TYPE_CHECKING:
    from ..evaluate.judge import Judge
    from ..evaluate.tasks import Answer, Difference, Summary
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

Watch = Callable[[Iterable[Any], int], Iterable[Any]]
Loader = Callable[[str], "tuple[Transformer, Tokenizer]"]

NAMES = {
    "right": "right by all that is asked for",
    "exact_match": "exact match",
    "keywords": "all keywords",
    "choices": "the likeliest choice is right",
    "refusals": "out of scope, and says so",
    "false_refusals": "says so of what is not",
    "commonest": "one answer to different questions",
}


@dataclass(frozen=True, kw_only=True)
class How:
    """The options that go with --tasks."""

    limit: int | None
    max_new_tokens: int
    batch_size: int
    out: Path | None
    golden: Path | None
    write_golden: bool
    judge: str | None
    judge_model: str | None
    against: str | None
    json: bool

    def check(self, local: bool) -> None:
        if self.write_golden and self.golden is None:
            raise BadUsage("--write-golden needs --golden FILE")
        if (self.judge is None) != (self.judge_model is None):
            raise BadUsage("--judge and --judge-model belong together")
        if self.against is not None and self.judge is None:
            raise BadUsage("--against needs --judge, who compares the two")
        given = (self.out, self.golden, self.judge)
        if not local and any(option is not None for option in given):
            raise BadUsage("--out, --golden and --judge are for --tasks FILE.jsonl")
        if self.out is not None and self.out.exists():
            raise FileError(f"{self.out} exists already; name another --out or delete it")
        if self.golden is not None and not self.write_golden and not self.golden.is_file():
            raise FileError(f"there is no {self.golden} yet; make it with --write-golden")


def is_local(tasks: str) -> bool:
    return Path(tasks).suffix == ".jsonl"


def run_lm_eval(load: Loader, path: str, tasks: str, how: How, watch: Watch) -> None:
    from ..evaluate.lm_eval import run  # before the model: the extra may be missing

    model, tokenizer = load(path)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    figures = run(model, tokenizer, names, limit=how.limit, batch_size=how.batch_size, watch=watch)
    if how.json:
        print_json({"model": path, "limit": how.limit, "results": figures})
        return
    table = Table("task", "metric", "value", "standard error")
    for task, values in figures.items():
        for name, value in values.items():
            if not name.endswith("_stderr") and name not in ("sample_len", "sample_count"):
                error = values.get(f"{name}_stderr")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    Console().print(table)


def run_local(load: Loader, path: str, tasks: str, how: How, watch: Watch) -> None:
    from ..evaluate.judge import Judge
    from ..evaluate.tasks import (
        answer_tasks,
        compare_golden,
        read_tasks,
        summarise,
        write_answers,
        write_golden,
    )

    questions = read_tasks(tasks, how.limit)
    judge = None
    if how.judge is not None and how.judge_model is not None:
        judge = Judge(how.judge, how.judge_model, os.environ.get("OPENAI_API_KEY"))

    def answers_of(name: str) -> list[Answer]:
        model, tokenizer = load(name)
        return answer_tasks(
            model,
            tokenizer,
            questions,
            max_new_tokens=how.max_new_tokens,
            batch_size=how.batch_size,
            watch=watch,
        )

    begun = time.perf_counter()
    answers = answers_of(path)
    seconds = time.perf_counter() - begun
    if how.out is not None:
        write_answers(how.out, answers)
    summary = summarise(answers)
    differences: list[Difference] = []
    if how.golden is not None and how.write_golden:
        write_golden(how.golden, answers)
    elif how.golden is not None:
        differences = compare_golden(how.golden, answers)
    other = None if how.against is None else answers_of(how.against)
    opinion = None if judge is None else _opinion(judge, answers, other, watch)
    if how.json:
        values: dict[str, Any] = {
            "model": path,
            "tasks": tasks,
            "questions": len(answers),
            "seconds": round(seconds, 2),
            "metrics": {name: share.to_dict() for name, share in summary.shares.items()},
            "commonest_answer": summary.commonest,
        }
        if how.golden is not None and not how.write_golden:
            values["golden"] = {
                "same": len(answers) - len(differences),
                "different": [
                    {"line": d.question.line, "question": d.question.text,
                     "before": d.before, "after": d.after}
                    for d in differences
                ],
            }  # fmt: skip
        if opinion is not None:
            values["judge"] = opinion
        print_json(values)
    else:
        _show(summary, len(answers), seconds)
        if opinion is not None:
            _show_opinion(opinion)
    for d in differences:
        before = "not stored" if d.before is None else repr(d.before)
        tell(f"line {d.question.line}: {d.question.text!r}: {before} is now {d.after!r}")
    if differences:
        differ = "differs" if len(differences) == 1 else "differ"
        count = counted(len(answers), "answer")
        tell(f"{len(differences)} of {count} {differ} from {how.golden}")
        raise typer.Exit(1)


def _opinion(
    judge: Judge, answers: list[Answer], other: list[Answer] | None, watch: Watch
) -> dict[str, Any]:
    from ..evaluate.judge import Exchange, compare_all, grade_all

    exchanges = [
        Exchange(
            question=answer.question.conversation,
            answer=answer.text,
            other="" if other is None else other[i].text or "",
            reference=answer.question.answer or "",
        )
        for i, answer in enumerate(answers)
        if answer.text is not None
    ]
    if not exchanges:
        raise InputError("the tasks only choose: there is no answer for a judge to read")
    if other is None:
        return {"model": judge.model, **grade_all(judge, exchanges, watch).to_dict()}
    return {"model": judge.model, **compare_all(judge, exchanges, watch).to_dict()}


def _show(summary: Summary, count: int, seconds: float) -> None:
    table = Table("", "share", "95% interval", "of")
    for name, share in summary.shares.items():
        low, high = share.interval
        table.add_row(NAMES[name], f"{share.rate:.1%}", f"{low:.1%} to {high:.1%}", f"{share.of:,}")
    Console().print(table)
    if summary.commonest:
        print(f"the commonest answer: {model_text(summary.commonest)}")
    tell(f"{counted(count, 'question')} in {seconds:.1f} s")


def _show_opinion(opinion: dict[str, Any]) -> None:
    if "compared" in opinion:
        parts = []
        for name in ("wins", "ties", "losses"):
            share = opinion[name]
            if share["of"]:
                parts.append(
                    f"{name} {share['rate']:.1%} ({share['low']:.1%} to {share['high']:.1%})"
                )
        print(f"judged by {opinion['model']}: {', '.join(parts) or 'nothing could be read'}")
        print(f"{opinion['order_decides']} of {opinion['compared']} went to a place, not an answer")
    else:
        mean = f"{opinion['mean']:.2f} of 10" if "mean" in opinion else "no grade"
        if "low" in opinion:
            mean += f" ({opinion['low']:.2f} to {opinion['high']:.2f})"
        print(f"judged by {opinion['model']}: {mean} over {counted(opinion['graded'], 'answer')}")
    if opinion["unread"]:
        print(f"{counted(opinion['unread'], 'reply', 'replies')} could not be read")
