"""Trains what the comparisons of `trained` ask for; a run that several ask for is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...corpus import prepare_corpus
from ...data.batches import TokenData
from ...errors import DataError, InputError
from ...model.config import ModelConfig
from ...model.presets import preset
from ...plan import flops_per_token
from ...train.config import SHORT_RUN, RunConfig, TrainConfig
from ..measure import bits_of_tokens
from ..run import Job, digest_of, probe, result_of, with_seed
from ..sweep import LEAST_STEPS, TUNING_SEED, best_rates, run_jobs, seconds_of_reading
from .trained import COMPARISONS, Comparison

Result = dict[str, Any]  # of a run: see evolve/run.py
Done = Callable[[Job, Result], None]
STRETCH = 4  # times the trained length
STRETCHED_SHARE = 0.2  # of the training's steps, at the stretched length
STRETCHED_RATE = 1 / 3  # of its learning rate


class Trained(NamedTuple):
    """What came of a comparison: the runs of each config, and of its learning rates."""

    runs: dict[str, list[Result]]  # name -> one a seed
    tuned: dict[str, list[Result]]  # name -> one a learning rate


@dataclass(frozen=True, kw_only=True)
class Study:
    """A folder of runs, all on the same text, for the same number of steps."""

    folder: Path
    train: TrainConfig
    seq_len: int
    seeds: int
    digest: str
    corpus: str  # its name
    held_out_tokens: int
    nats_to_bits: float  # from nats per held-out token to bits per held-out byte

    @classmethod
    def open(
        cls, folder: Path, source: str, tokens: int, seeds: int, say: Callable[[str], None]
    ) -> Study:
        """Prepares the text, unless it is there. Raises InputError, DataError, AssetError."""
        cfg = preset("zh-3m")
        train = SHORT_RUN.replace(seq_len=cfg.max_seq_len, compile="off")
        steps = tokens // (train.batch_size * cfg.max_seq_len)
        if steps < LEAST_STEPS:
            least = LEAST_STEPS * train.batch_size * cfg.max_seq_len
            raise InputError(f"--tokens {tokens:,} is too short to learn from: {least:,} at least")
        if seeds < 2:
            raise InputError(f"--seeds {seeds}: an interval needs 2 at least, and 5 to be useful")
        folder.mkdir(parents=True, exist_ok=True)
        corpus = prepare_corpus(folder, source, cfg.vocab_size, say)
        data = TokenData.open(folder / "data")
        least = 4 * STRETCH * cfg.max_seq_len
        if len(data.held_out) < least:
            raise DataError(
                f"{source} is too small: it holds out {len(data.held_out):,} tokens and "
                f"{least:,} are needed; give more text"
            )
        train = train.replace(steps=steps, eval_every=max(1, steps // 8), checkpoint_every=40)
        return cls(
            folder=folder,
            train=train,
            seq_len=cfg.max_seq_len,
            seeds=seeds,
            digest=digest_of(data),
            corpus=corpus,
            held_out_tokens=len(data.held_out),
            nats_to_bits=bits_of_tokens(1.0, data),
        )

    @property
    def tokens(self) -> int:
        """That each run trains on."""
        return self.train.steps * self.train.batch_size * self.seq_len

    @property
    def stretched_train(self) -> TrainConfig:
        """A short training at STRETCH times the length, on as many tokens a step."""
        steps = max(1, round(self.train.steps * STRETCHED_SHARE))
        return self.train.replace(
            seq_len=self.seq_len * STRETCH,
            batch_size=self.train.batch_size // STRETCH,
            steps=steps,
            warmup_steps=steps // 4,
            lr=self.train.lr * STRETCHED_RATE,
            eval_every=None,
        )

    def run(self, comparison: Comparison, processes: int, done: Done) -> Trained:
        """Trains what is not trained yet; `done` hears of each run as it comes."""
        tuning = self.tuning(comparison)
        tuned = run_jobs(self.folder, tuning, processes, done)
        jobs = self.jobs(comparison, best_rates([(job, tuned[job.key]) for job in tuning]))
        found = run_jobs(self.folder, jobs, processes, done)
        if comparison.without_training:
            jobs = self.stretched(comparison, [j for j in jobs if not found[j.key]["diverged"]])
            found = run_jobs(self.folder, jobs, processes, done)
        return Trained(_by_name(jobs, found), _by_name(tuning, tuned))

    def tuning(self, comparison: Comparison) -> list[Job]:
        """Each config at each learning rate, with a seed that no result uses."""
        return [
            self._job(name, cfg, TUNING_SEED, lr)
            for lr in comparison.learning_rates
            for name, cfg in comparison.trained().items()
        ]

    def jobs(self, comparison: Comparison, rates: Mapping[str, float]) -> list[Job]:
        """Each config from each seed; rates: of those that have one of their own."""
        return [
            self._job(name, cfg, seed, rates.get(name))
            for seed in range(self.seeds)
            for name, cfg in comparison.trained().items()
        ]

    def stretched(self, comparison: Comparison, bases: Sequence[Job]) -> list[Job]:
        """From each base's weights each config, read at the longer lengths before and after a
        short training there."""
        train = self.stretched_train
        return [
            Job(
                name,
                with_seed(
                    RunConfig(
                        model=cfg.replace(max_seq_len=self.seq_len * STRETCH),
                        train=train,
                        data=base.run.data,
                    ),
                    base.seed,
                ),
                self.digest,
                begin=base.key,
            )
            for base in bases
            for name, cfg in comparison.configs().items()
        ]

    def planned(self, comparisons: Sequence[Comparison]) -> list[Job]:
        """All different runs, for a budget: at the best learning rate so far, or the first."""
        jobs = []
        for comparison in comparisons:
            tuning = self.tuning(comparison)
            there = [(job, found) for job in tuning if (found := result_of(self.folder, job))]
            first = dict.fromkeys(comparison.trained(), comparison.learning_rates[:1])
            rates = {name: lr for name, lrs in first.items() for lr in lrs}
            own = self.jobs(comparison, rates | best_rates(there))
            jobs += tuning + own
            if comparison.without_training:
                jobs += self.stretched(comparison, own)
        return list({job.key: job for job in jobs}.values())

    def left(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if result_of(self.folder, job) is None]

    def seconds(self, jobs: Sequence[Job]) -> float:
        """About what they take here: the steps of zh-3m are timed, the others' by their FLOPs."""
        cfg = preset("zh-3m")
        step, scored = probe(RunConfig(model=cfg, train=self.train, data=""))
        a_read = seconds_of_reading(self.held_out_tokens, cfg.max_seq_len, scored)
        return sum(
            (job.run.train.steps * step + a_read)
            * flops_per_token(job.run.model, job.run.seq_len)
            / flops_per_token(cfg)
            for job in jobs
        )

    def _job(self, name: str, cfg: ModelConfig, seed: int, lr: float | None) -> Job:
        run = RunConfig(model=cfg, train=self.train, data=str(self.folder.resolve() / "data"))
        return Job(name, with_seed(run, seed, lr), self.digest, keep=_stretched_later(cfg))


def _stretched_later(cfg: ModelConfig) -> bool:
    return any(cfg in c.trained().values() for c in COMPARISONS if c.without_training)


def _by_name(jobs: Sequence[Job], results: dict[str, Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for job in jobs:
        found.setdefault(job.rung, []).append(results[job.key])
    return found
