"""The only training loop: batches in, checkpoints and metrics out, resumable to the bit."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..atomic import new_folder
from ..data.batches import Batch
from ..errors import TrainingError, WeightsError
from ..weights.build import state_of
from ..weights.checkpoint import read_state as read_weights
from ..weights.checkpoint import write_model
from .config import TrainConfig, learning_rate
from .metrics import evaluate
from .run_folder import RunFolder, read_state, write_state
from .step import NothingToLearn, Objective, Step

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer


class BatchSource(Protocol):
    """Batch i must depend on i alone: a run resumes by its step number."""

    def batch(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class HeldOut:
    """What is only scored: `batches()` anew for each evaluation; bytes of the raw text, if it is
    plain text.

    measure: instead of cross entropy, the figures of metrics.jsonl, `held_out_loss` among them;
    the lowest is the best.
    """

    batches: Callable[[], Iterable[Batch]]
    bytes: int | None = None
    measure: Callable[[Transformer], dict[str, float]] | None = None


class Store(Protocol):
    """What of a model a checkpoint holds."""

    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None: ...
    def read(self, folder: Path, model: Transformer) -> None: ...


class WholeModel:
    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
        write_model(folder, model, tokenizer)

    def read(self, folder: Path, model: Transformer) -> None:
        weights = read_weights(folder)
        odd = sorted(weights.keys() ^ state_of(model).keys())
        if odd:
            raise WeightsError(f"{folder}: model.safetensors lacks {odd[0]}, or should")
        model.load_state_dict(weights, strict=False)  # a tied head is stored once


@dataclass
class Progress:
    """Where a run stands after `step` finished optimiser steps."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of all sessions, from the first batch on
    best: float | None = None  # the lowest held-out nats per token
    best_step: int = 0
    worse: int = 0  # evaluations since then
    skipped: int = 0  # steps whose batches had nothing to learn


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; the run stopped behind a whole step, with a checkpoint."""


class Trainer:
    """Trains `model` in place.

    report: called with each line of metrics.jsonl as it is written. `run()` trains to the end, or
    up to step `until`, and returns the progress; it raises TrainingError for a loss that is not
    finite (the last checkpoint stays), FileError for what cannot be written, Interrupted after a
    checkpoint on Ctrl-C or SIGTERM.
    """

    def __init__(
        self,
        model: Transformer,
        batches: BatchSource,
        cfg: TrainConfig,
        folder: RunFolder,
        *,
        tokenizer: Tokenizer | None = None,
        held_out: HeldOut | None = None,
        compiled: bool = False,
        objective: Objective | None = None,
        store: Store | None = None,
        report: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        if objective is not None:
            cfg.eager()
        self.model, self.batches, self.cfg, self.folder = model, batches, cfg, folder
        self.tokenizer, self.held_out, self.report = tokenizer, held_out, report
        torch.manual_seed(cfg.seed)  # dropout; the weights were drawn before
        self.step = Step(model, cfg, compiled, objective)
        self.store = store or WholeModel()
        self.progress = Progress()
        checkpoint = folder.latest()
        if checkpoint is not None:
            self._resume(checkpoint)

    def _resume(self, checkpoint: Path) -> None:
        self.store.read(checkpoint, self.model)
        rng, progress = read_state(checkpoint, self.model, self.step.optimizers)
        try:
            self.progress = Progress(**progress)
        except TypeError as error:
            raise WeightsError(f"{checkpoint}/trainer.json is another version's") from error
        self.step.refresh()
        self._point_to(checkpoint.name)  # a kill may have come between the two
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])

    def run(self, until: int | None = None) -> Progress:
        now, cfg, self._mark = self.progress, self.cfg, time.perf_counter()
        goal = cfg.steps if until is None else min(until, cfg.steps)
        with self.folder.log(now.step) as log, _stop_signals() as stop:
            while now.step < goal and not self._out_of_patience():
                line = self._one_step()
                last = now.step == cfg.steps
                if last and now.skipped == now.step:
                    raise NothingToLearn("no batch had a target to learn: every label is masked")
                better = False
                if self.held_out and (last or _due(now.step, cfg.eval_every)):
                    better = self._evaluate(line)
                    last = last or self._out_of_patience()
                log.write(line)
                self.report(line)
                stopping = stop.is_set()
                if last or better or stopping or _due(now.step, cfg.checkpoint_every):
                    self._save()
                if stopping and not last:
                    raise Interrupted(f"stopped after step {now.step}")
                self._tick()
        return now

    def _tick(self) -> None:
        """Counts the time since the last tick: steps, evaluations and checkpoints alike."""
        mark = time.perf_counter()
        self.progress.seconds += mark - self._mark
        self._mark = mark

    def _one_step(self) -> dict[str, Any]:
        now, count, begun = self.progress, self.cfg.accumulate, time.perf_counter()
        first = now.step * count
        batches = [self.batches.batch(index) for index in range(first, first + count)]
        lr, figures = learning_rate(self.cfg, now.step), {}
        try:
            loss, norm = self.step(batches, lr)
            figures = {"loss": loss, "lr": lr, "grad_norm": norm}
        except NothingToLearn:
            now.skipped += 1
            warnings.warn(
                f"step {now.step + 1} has nothing to learn and is skipped ({now.skipped} so far)",
                stacklevel=2,
            )
        except TrainingError as error:
            kept = self.folder.latest()
            raise TrainingError(
                f"step {now.step + 1} (batches {first} to {first + count - 1}): {error}; "
                f"the last good checkpoint is {kept.name if kept else 'none'}; try a lower lr"
            ) from error
        tokens = sum(batch.ids.numel() for batch in batches)
        speed = tokens / (time.perf_counter() - begun)
        self._tick()
        now.step, now.tokens = now.step + 1, now.tokens + tokens
        return {"step": now.step, "tokens": now.tokens, **figures,
                "tokens_per_s": round(speed, 1), "seconds": round(now.seconds, 3)}  # fmt: skip

    def _evaluate(self, line: dict[str, Any]) -> bool:
        """Adds the held-out figures; true if they are the best so far."""
        assert self.held_out is not None
        now, held_out = self.progress, self.held_out
        if held_out.measure is not None:
            line |= held_out.measure(self.step.compute)
        else:
            nats, tokens = evaluate(self.step.compute, held_out.batches())
            line["held_out_loss"] = nats / tokens
            if held_out.bytes is not None:
                line["bits_per_byte"] = nats / math.log(2) / held_out.bytes
        loss = line["held_out_loss"]
        if not math.isfinite(loss):
            raise TrainingError(f"step {now.step}: the held-out loss is {loss}; try a lower lr")
        better = now.best is None or loss < now.best
        if better:
            now.best, now.best_step, now.worse = loss, now.step, 0
        else:
            now.worse += 1
        return better

    def _out_of_patience(self) -> bool:
        return self.cfg.patience is not None and self.progress.worse >= self.cfg.patience

    def _save(self) -> None:
        target = self.folder.checkpoint(self.progress.step)
        rng = {"cpu": torch.get_rng_state()}
        if self.step.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        with new_folder(target) as folder:
            self.store.write(folder, self.model, self.tokenizer)
            progress = asdict(self.progress)
            write_state(folder, self.model, self.step.optimizers, rng, progress)
        self._point_to(target.name)

    def _point_to(self, latest: str) -> None:
        self.folder.write_text("latest", latest + "\n")
        if self.progress.best_step:
            best = self.folder.checkpoint(self.progress.best_step).name
            self.folder.write_text("best", best + "\n")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM, which lets the step finish; a second one does not."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, ask) for name in names]
    try:
        # Of the processes of a pool none speaks: all have the signal, and the first says it.
        with nullcontext() if parent_process() else said_at_once(names):
            yield stop
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


@contextmanager
def said_at_once(names: Sequence[int]) -> Iterator[None]:
    """Tells of the first of these signals on stderr, by a thread: a handler in Python waits
    till the backward pass, one call, is over. Only the main thread hears of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, sent = socket.socketpair()
    sent.setblocking(False)
    line = b"stopping after this step, which is saved; a second Ctrl-C stops within it, unsaved\n"

    def listen() -> None:
        while number := heard.recv(1):
            if number[0] in names:
                with suppress(OSError):  # past sys.stderr, which may be in the middle of a line
                    os.write(2, b"\n" * os.isatty(2) + line)
                return

    listener = threading.Thread(target=listen, daemon=True)
    before = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sent.close()  # which ends the listener
        listener.join()
        heard.close()
