"""A small model learns the distribution of a larger one with the same tokenizer.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2: the loss
is alpha · T² · KL(teacher ‖ student), both softened by the temperature T, plus (1 - alpha) · the
cross entropy of the data; T² keeps the size of the gradient whatever T is.

The teacher runs beside the student (LiveTeacher) or, with top_k, once before it (top_k.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import IGNORED, Batch, TokenData
from ..errors import CheckedFields, ConfigError, TokenizerError
from ..train.config import RunConfig, read_toml, to_toml
from ..train.run import make_trainer, pick_device
from ..train.run_folder import RunFolder
from ..train.step import computing_dtype
from ..train.trainer import Progress, Trainer
from ..weights import load, open_model
from .run import tune
from .top_k import TaughtBatch, TaughtBatches, Watch, bucket_divergence

if TYPE_CHECKING:
    from ..model.transformer import Transformer

Report = Callable[[dict[str, Any]], None]
# The divergence (N,) of a student's logits (N, V) from a teacher, at the places of a batch where a
# bool (B, T) holds.
Teach = Callable[[Tensor, Batch, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedFields):
    """teacher: as `load` takes it. temperature: softens both distributions. alpha: the weight of
    the teacher, from 0 (the data alone) to 1. top_k: how many of its likeliest tokens are kept;
    none runs it beside the student."""

    ZERO_ALLOWED: ClassVar = ("alpha",)

    teacher: str
    temperature: float = 2.0
    alpha: float = 0.5
    top_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > 1:
            raise ConfigError(f"alpha is a share, at most 1 (got {self.alpha})")


@dataclass(frozen=True, kw_only=True)
class DistillRun(RunConfig):
    """A run with a table [distill] in its config.toml, so that `train` will not go on with it.

    student: the preset that a new one was made of; none if it begins with weights.
    """

    student: str = ""
    distill: DistillConfig = field(default_factory=lambda: DistillConfig(teacher=""))

    def settings(self) -> dict[str, Any]:
        """As they stand in config.toml."""
        begin = {"begin": self.begin} if self.begin else {}
        student = {"student": self.student} if self.student else {}
        tables = {"model": self.model.to_dict(), "train": self.train.to_dict()}
        return {"data": self.data, **begin, **tables, "distill": self.distill.to_dict() | student}

    def to_toml(self) -> str:
        return to_toml(self.settings())

    def changed(self, pairs: list[str], distill: dict[str, Any]) -> DistillRun:
        """With `key=value` strings as `set` takes them, and these fields of [distill]."""
        run = self.set(pairs)
        assert isinstance(run, DistillRun)
        return replace(run, distill=self.distill.replace(**distill))

    @classmethod
    def read(cls, path: str | Path) -> DistillRun:
        """Raises what RunConfig.read does, and ConfigError for a run that is no distillation."""
        run = super().read(path)
        assert isinstance(run, cls)
        table = read_toml(path).get("distill")
        if not isinstance(table, dict):
            raise ConfigError(f"{path} has no table [distill]: the run is no distillation")
        try:
            values = {k: None if v == "none" else v for k, v in table.items()}
            student = str(values.pop("student", ""))
            return replace(run, student=student, distill=DistillConfig.from_dict(values))
        except ConfigError as error:
            raise ConfigError(f"{path}: [distill]: {error}") from error


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) in nats, of logits (N, V) -> (N,), both softened."""
    p = (teacher / temperature).log_softmax(-1)
    q = (student / temperature).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class Distillation:
    """The trainer's objective: the teacher's word, T² times, mixed with the data's."""

    def __init__(self, how: DistillConfig, teach: Teach) -> None:
        self.alpha, self.scale, self.teach = how.alpha, how.temperature**2, teach

    def __call__(self, model: Transformer, batch: Batch) -> Tensor:
        real = batch.targets != IGNORED  # (B, T)
        logits = model(batch.ids, attention_mask=batch.documents, positions=batch.positions)
        logits = logits[real].float()  # (N, V)
        nats = F.cross_entropy(logits, batch.targets[real], reduction="sum")
        kl = self.teach(logits, batch, real).sum()
        return self.alpha * self.scale * kl + (1 - self.alpha) * nats


class LiveTeacher:
    """Where one of the two embedding tables is padded, over the tokens that both have."""

    def __init__(self, model: Transformer, temperature: float) -> None:
        self.model, self.temperature = model, temperature

    def __call__(self, student: Tensor, batch: Batch, real: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.model(
                batch.ids, attention_mask=batch.documents, positions=batch.positions
            )[real].float()
        both = min(student.shape[-1], teacher.shape[-1])
        return divergence(student[:, :both], teacher[:, :both], self.temperature)


class StoredTeacher:
    """What TaughtBatches read, of a teacher with `vocab_size` tokens."""

    def __init__(self, vocab_size: int, temperature: float) -> None:
        self.vocab_size, self.temperature = vocab_size, temperature

    def __call__(self, student: Tensor, batch: Batch, real: Tensor) -> Tensor:
        assert isinstance(batch, TaughtBatch)
        student = student[:, : self.vocab_size]
        return bucket_divergence(student, batch.taught(real), self.temperature)


def distill(
    run: DistillRun,
    out: str | Path,
    *,
    resume: bool = False,
    report: Report = lambda line: None,
    watch: Watch = lambda done, count: None,
) -> Progress:
    """Trains `run` in the folder `out`; with `resume`, goes on from its last checkpoint, if any.

    watch: the windows that a teacher with top_k has read, of all that it will. Raises what `train`
    does, TokenizerError for a teacher of another vocabulary, ConfigError for one with a shorter
    context.
    """

    def make(folder: RunFolder) -> Trainer:
        return make_distiller(run, folder, report, watch)

    return tune(out, run.settings(), make, resume)


def make_distiller(
    run: DistillRun,
    folder: RunFolder,
    report: Report = lambda line: None,
    watch: Watch = lambda done, count: None,
) -> Trainer:
    """A trainer with a teacher, whose top-k are written by then; the same errors as `distill`."""
    how, cfg, device = run.distill, run.train, pick_device(run.train.device)
    vocab_size = check_teacher(run)

    def teacher() -> Transformer:
        model, _ = load(how.teacher, device=device)
        quantised = bool(open_model(how.teacher).schemes)
        dtype = computing_dtype(cfg, torch.device(device))
        return (model if quantised else model.to(dtype)).requires_grad_(False)

    trainer = make_trainer(replace(run, train=cfg.eager()), folder, report)
    folder.write_text("config.toml", run.to_toml())  # before the long part, to go on from
    if how.top_k is None:
        trainer.step.objective = Distillation(how, LiveTeacher(teacher(), how.temperature))
        return trainer
    batches = TaughtBatches(
        TokenData.open(run.data).train,
        folder.path / "teacher",
        vocab_size=vocab_size,
        k=how.top_k,
        temperature=how.temperature,
        batch_size=cfg.batch_size,
        seq_len=run.seq_len,
        seed=cfg.seed,
    )
    batches.fill(teacher, cfg.steps * cfg.accumulate, watch)
    trainer.batches = batches
    trainer.step.objective = Distillation(how, StoredTeacher(vocab_size, how.temperature))
    return trainer


def check_teacher(run: DistillRun) -> int:
    """From headers alone: how many tokens teacher and student have in common."""
    name, opened = run.distill.teacher, open_model(run.distill.teacher)
    data, its = TokenData.open(run.data), opened.tokenizer()
    size, context = opened.config.vocab_size, opened.config.max_seq_len
    if (its is not None and its.fingerprint != data.fingerprint) or size < data.vocab_size:
        raise TokenizerError(
            f"{name} has another tokenizer than the data in {run.data}, so its probabilities are "
            "of other tokens; take a teacher with the same one, or its answers: --prompts"
        )
    if context < run.seq_len:
        raise ConfigError(
            f"{name} has a context of {context} and seq_len is {run.seq_len}; add --set "
            f"seq_len={context} or take another teacher"
        )
    return min(size, run.model.vocab_size)
