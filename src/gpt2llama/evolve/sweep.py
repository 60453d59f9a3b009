"""A sweep from its question to its runs: planned once, run in any pieces by any processes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..atomic import write_text
from ..corpus import prepare_corpus
from ..data.batches import TokenData
from ..errors import DataError, FileError, Gpt2LlamaError, InputError, counted
from ..model.config import ModelConfig
from ..train.config import SHORT_RUN, RunConfig, TrainConfig
from ..train.run import pick_device
from ..train.step import computing_dtype
from .design import Match, Rung, rungs_of
from .engines import Engine, on_processes
from .run import Job, digest_of, probe, result_of, with_seed

Say = Callable[[str], None]
SHARE = 0.95  # of the minutes that is planned: machines drift
LEAST_STEPS = 30
TUNING_SEED = 1000  # of the runs that choose a learning rate: no result uses it


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user asks; two sweeps with the same one and the same plan have the same numbers."""

    base: str = "zh-3m-2017"
    to: str = "zh-3m"
    design: str = "ladder"
    match: Match = "params"
    seeds: int = 3
    data: str = "sanguo"
    tokens: int | None = None
    minutes: float | None = None
    tune_lr: bool = False
    switches: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError(f"--seeds must be at least 1 (got {self.seeds})")
        if (self.tokens is None) == (self.minutes is None):
            raise InputError("give either --tokens or --minutes")
        if self.tokens is not None and self.tokens < 1:
            raise InputError(f"--tokens must be at least 1 (got {self.tokens})")
        if self.minutes is not None and not 0 < self.minutes < 100_000:
            raise InputError(f"--minutes {self.minutes:g} must be above 0 and below 100,000")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """plan.json: the question, and what was settled by looking at the data and the machine."""

    question: Question
    train: TrainConfig
    rungs: list[Rung]
    corpus: str
    digest: str
    seconds: float | None  # expected of the whole sweep, where the machine was timed
    command: str  # that asked for it

    def write(self, folder: Path) -> None:
        values = {
            "question": asdict(self.question),
            "train": self.train.to_dict(),
            "rungs": [{**vars(rung), "config": rung.config.to_dict()} for rung in self.rungs],
            "corpus": self.corpus,
            "digest": self.digest,
            "seconds": self.seconds,
            "command": self.command,
        }
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        write_text(folder / "plan.json", text, overwrite=True)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Raises FileError for one that cannot be read or is another version's."""
        path = folder / "plan.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            rungs = [
                Rung(
                    **{
                        **rung,
                        "config": ModelConfig.from_dict(rung["config"]),
                        "levels": tuple(rung["levels"]),
                    }
                )
                for rung in values.pop("rungs")
            ]
            question, train = Question(**values.pop("question")), values.pop("train")
            return cls(question=question, train=TrainConfig.from_dict(train), rungs=rungs, **values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path} cannot be read ({error}); name another --out") from error

    def jobs(self, folder: Path, lrs: dict[str, float] | None = None) -> list[Job]:
        """All runs, seed by seed, so that a sweep that is stopped has whole ladders."""
        return [
            self._job(folder, rung, seed, (lrs or {}).get(rung.name))
            for seed in range(self.question.seeds)
            for rung in self.rungs
        ]

    def tuning(self, folder: Path) -> list[Job]:
        """Half, once and twice the learning rate."""
        if not self.question.tune_lr:
            return []
        rates = [self.train.lr * factor for factor in (0.5, 1.0, 2.0)]
        return [self._job(folder, rung, TUNING_SEED, lr) for rung in self.rungs for lr in rates]

    def _job(self, folder: Path, rung: Rung, seed: int, lr: float | None) -> Job:
        run = RunConfig(model=rung.config, train=self.train, data=str(folder.resolve() / "data"))
        return Job(rung.name, with_seed(run, seed, lr), self.digest)


def make_plan(folder: Path, question: Question, say: Say = lambda text: None) -> Plan:
    """Prepares the data and settles the number of steps; the minutes count from here.

    Raises InputError, DataError, AssetError, FileError; a folder that it made is then gone again.
    """
    known = folder.exists()
    try:
        return _plan(folder, question, say)
    except Gpt2LlamaError:
        if not known:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _plan(folder: Path, question: Question, say: Say) -> Plan:
    begun = time.perf_counter()
    rungs = rungs_of(
        question.base, question.to, question.design, question.match, switches=question.switches
    )
    corpus = prepare_corpus(folder, question.data, rungs[0].config.vocab_size, say)
    data = TokenData.open(folder / "data")
    seq_len = min(rung.config.max_seq_len for rung in rungs)
    if len(data.held_out) < 4 * seq_len or len(data.train) < 2 * seq_len:
        raise DataError(
            f"{question.data} is too small: {len(data.train):,} tokens to train on and "
            f"{len(data.held_out):,} held out, where 4 windows of {seq_len} are needed; "
            "give more text"
        )
    train = SHORT_RUN.replace(seq_len=seq_len, compile="off")
    a_step = train.batch_size * seq_len
    seconds = None
    if question.tokens is not None:
        steps = max(1, question.tokens // a_step)
    else:
        assert question.minutes is not None
        say("timing five steps of each model")
        budget = question.minutes * 60
        steps, seconds = _steps_within(budget, folder, rungs, train, question, data, begun)
    if steps < LEAST_STEPS:
        raise InputError(
            f"a run of {counted(steps, 'step')} is too short to learn from (at least "
            f"{LEAST_STEPS}): allow more minutes or tokens, fewer seeds or a smaller design"
        )
    train = train.replace(steps=steps, eval_every=max(1, steps // 8), checkpoint_every=40)
    return Plan(
        question=question,
        train=train,
        rungs=rungs,
        corpus=corpus,
        digest=digest_of(data),
        seconds=seconds,
        command=shlex.join(["gpt2llama", *sys.argv[1:]]),
    )


def _steps_within(
    budget: float,
    folder: Path,
    rungs: list[Rung],
    train: TrainConfig,
    question: Question,
    data: TokenData,
    begun: float,
) -> tuple[int, float]:
    """The steps of a run that fit, and the seconds of the whole sweep."""
    runs = question.seeds + 3 * question.tune_lr
    step_seconds, other_seconds = 0.0, 0.0
    for rung in rungs:
        run = RunConfig(model=rung.config, train=train, data=str(folder / "data"))
        step, scored = probe(run)
        step_seconds += runs * step
        other_seconds += runs * seconds_of_reading(len(data.held_out), run.seq_len, scored)
    left = SHARE * budget - (time.perf_counter() - begun) - other_seconds
    steps = int(left / step_seconds)
    return steps, (time.perf_counter() - begun) + steps * step_seconds + other_seconds


def seconds_of_reading(held_out_tokens: int, seq_len: int, tokens_per_s: float) -> float:
    """What a run does besides its steps: it scores the held-out text once and 16 windows eight
    times, reads 16,384 tokens six times, and decodes."""
    read = held_out_tokens + 8 * 16 * seq_len + 6 * 16384
    return 1.1 * read / tokens_per_s + 2.0


def run_jobs(
    folder: Path,
    jobs: list[Job],
    processes: int,
    done: Callable[[Job, dict[str, Any]], None],
    engine: Engine = on_processes,
) -> dict[str, dict[str, Any]]:
    """The result of each job by its key; `done` hears of each as it comes. A job that another
    process holds is taken up again after the others."""
    results: dict[str, dict[str, Any]] = {}
    waiting = []
    for job in jobs:
        result = result_of(folder, job)
        if result is None:
            waiting.append(job)
        else:
            results[job.key] = result
            done(job, result)
    while waiting:
        held = []
        for job, result in engine(folder, waiting, processes):
            if result is None:
                held.append(job)
            else:
                results[job.key] = result
                done(job, result)
        if len(held) == len(waiting):
            time.sleep(5)
        waiting = held
    return results


def best_rates(tuned: list[tuple[Job, dict[str, Any]]]) -> dict[str, float]:
    """Of each rung the learning rate with the lowest held-out loss."""
    best: dict[str, tuple[float, float]] = {}
    for job, result in tuned:
        if result["bits_per_byte"] is not None:
            found = (result["bits_per_byte"], job.run.train.lr)
            best[job.rung] = min(found, best.get(job.rung, found))
    return {rung: lr for rung, (_, lr) in best.items()}


def machine(train: TrainConfig) -> dict[str, Any]:
    """Where the runs were made, or at least summed up."""
    dtype = computing_dtype(train, torch.device(pick_device(train.device)))
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        names = [
            line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line
        ]
    except (OSError, IndexError):
        names = []
    return names[0] if names else platform.processor() or platform.machine()
