"""Trains the models of a sweep: each run once, resumable, the same whoever does it and when.

A sweep is a folder. Its runs/KEY/ holds one run, where KEY is the hash of all that its numbers
depend on, and KEY/result.json is there once it is finished.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..atomic import write_text
from ..data.batches import Batch, PackedBatches, TokenData, held_out_windows
from ..errors import TrainingError
from ..model.transformer import Transformer
from ..tokenizer import load_tokenizer
from ..train.config import RunConfig
from ..train.metrics import evaluate
from ..train.run import pick_device
from ..train.run_folder import RunFolder, read_metrics
from ..train.step import Step
from ..train.trainer import HeldOut, Trainer
from ..weights import load, save
from .measure import AT_ONCE, measure, positions, reset_peak, windows_of

VERSION = 2  # of what a run does: a change of it makes new keys
WATCHED = 16  # held-out windows that are scored during the training; all of them at the end
PROBE = 5  # steps that are timed, the first two left out

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """One run: a rung's model from one seed, or from the weights of another run that kept them."""

    rung: str
    run: RunConfig
    digest: str  # of the data
    begin: str = ""  # the key of that other run
    keep: bool = False  # its weights, in KEY/model

    @property
    def seed(self) -> int:
        return self.run.train.seed

    @property
    def key(self) -> str:
        values = {
            "version": VERSION,
            "model": self.run.model.to_dict(),
            "train": {k: v for k, v in self.run.train.to_dict().items() if k not in _NOT_NUMBERS},
            "data": self.digest,
        } | ({"begin": self.begin} if self.begin else {})
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Of the windows that are read: up to four times the length trained at first."""
        n = self.run.seq_len
        return (n // 4, n // 2, n) if self.begin else (n, 2 * n, 4 * n)


_NOT_NUMBERS = {"checkpoint_every"}  # settings that no result depends on


def digest_of(data: TokenData) -> str:
    """Of all tokens, and of the vocabulary they are of."""
    found = hashlib.sha256(data.fingerprint.encode())
    for tokens in (data.train, data.held_out):
        for start in range(0, len(tokens), 1 << 20):
            found.update(tokens[start : start + (1 << 20)].tobytes())
    return found.hexdigest()


def finish(folder: Path, job: Job, report: Report = lambda line: None) -> dict[str, Any]:
    """The job's result: read if it is there, else trained, measured and written.

    Raises FileError while another process holds the run, Interrupted on Ctrl-C.
    """
    result = result_of(folder, job)
    if result is None:
        place = folder / "runs" / job.key
        with RunFolder(place, resume=True) as run_folder:
            result = result_of(folder, job)  # another process may have been faster
            if result is None:
                begin = str(place.parent / job.begin / "model") if job.begin else ""
                run_folder.write_text("config.toml", replace(job.run, begin=begin).to_toml())
                result = _train(job, run_folder, report)
                shutil.rmtree(place / "checkpoints", ignore_errors=True)
                write_text(place / "result.json", json.dumps(result), overwrite=True)
    return result


def result_of(folder: Path, job: Job) -> dict[str, Any] | None:
    """None: not finished, or without the weights that the job is to keep."""
    place = folder / "runs" / job.key
    if not (place / "result.json").exists():
        return None
    result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    kept = result["diverged"] or (place / "model").exists()
    return result if kept or not job.keep else None


def _train(job: Job, folder: RunFolder, report: Report) -> dict[str, Any]:
    run, data = job.run, TokenData.open(job.run.data)
    tokenizer = load_tokenizer(Path(run.data) / "tokenizer")
    seq_len = run.seq_len
    windows = partial(held_out_windows, data.held_out, seq_len, tokenizer.bos_id)
    watched = list(islice(windows(WATCHED), 1))
    share = sum(int((batch.targets >= 0).sum()) for batch in watched) / len(data.held_out)
    reset_peak()
    model = new_model(run)
    texts = windows_of(data, job.lengths, tokenizer.bos_id)
    result: dict[str, Any] = {"rung": job.rung, "seed": job.seed, "lr": run.train.lr}
    if job.begin:
        begun, _ = load(folder.path.parent / job.begin / "model")
        model.load_state_dict(begun.state_dict())
        result["by_position_before"] = positions(model, texts)
    trainer = Trainer(
        model,
        PackedBatches(data, run.train.batch_size, seq_len, run.train.seed),
        run.train,
        folder,
        held_out=HeldOut(lambda: iter(watched), max(1, round(data.held_out_bytes * share))),
        report=report,
    )
    try:
        seconds = trainer.run().seconds
    except TrainingError as error:
        return {**result, "diverged": True, "why": str(error), "bits_per_byte": None}
    lines = read_metrics(folder.path)
    nats, _ = evaluate(model, windows(max(1, AT_ONCE // seq_len)))
    if job.keep:
        shutil.rmtree(folder.path / "model", ignore_errors=True)  # of a run that was cut off here
        save(model, tokenizer, folder.path / "model")
    curve = [[at["step"], at["tokens"], at["seconds"], at["loss"]] for at in _thinned(lines)]
    watched_curve = [[at["step"], at["bits_per_byte"]] for at in lines if "bits_per_byte" in at]
    return {
        **result,
        "diverged": False,
        "bits_per_byte": nats / math.log(2) / data.held_out_bytes,
        "seconds": seconds,
        "tokens_per_s": statistics.median(at["tokens_per_s"] for at in lines),
        "curve": curve,
        "held_out_curve": watched_curve,
        "by_position": positions(model, texts),
        **measure(model, texts[seq_len]),
    }


def new_model(run: RunConfig) -> Transformer:
    """Weights by seed and name: what two rungs have in the same shape begins the same."""
    model = Transformer(run.model).to(pick_device(run.train.device))

    def generator(name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{run.train.seed} {name}".encode()).digest()
        device = next(model.parameters()).device
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))

    model.reset_parameters(generator)
    return model.train()


def probe(run: RunConfig) -> tuple[float, float]:
    """Seconds of an optimiser step, and held-out tokens scored a second; on random tokens."""
    model = new_model(run)
    step, rows = Step(model, run.train, compiled=False), run.train.batch_size
    ids = torch.randint(run.model.vocab_size, (rows, run.seq_len + 1))
    batch, times = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), []
    for _ in range(PROBE):
        begun = time.perf_counter()
        step([batch] * run.train.accumulate, run.train.lr)
        times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    _, scored = evaluate(model, [batch])
    return statistics.median(times[2:]), scored / (time.perf_counter() - begun)


def _thinned(lines: list[dict[str, Any]], most: int = 200) -> list[dict[str, Any]]:
    """Evenly, the last one kept."""
    every = max(1, len(lines) // most)
    return [line for line in lines if line["step"] % every == 0 or line is lines[-1]]


def with_seed(run: RunConfig, seed: int, lr: float | None = None) -> RunConfig:
    changes = {"seed": seed} if lr is None else {"seed": seed, "lr": lr}
    return replace(run, train=run.train.replace(**changes))
