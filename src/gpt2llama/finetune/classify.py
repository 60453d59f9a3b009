"""A run that makes a classifier: labelled texts in, a scored model out."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import IGNORED, Batch
from ..errors import CheckedFields, ConfigError, DataError, WeightsError, counted
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..tokenizer import train_bpe
from ..train.config import TrainConfig
from ..train.run import pick_device
from ..train.run_folder import RunFolder
from ..train.step import Objective
from ..train.trainer import HeldOut, Trainer
from ..weights.files import read_tensors, write_json, write_tensors
from .classifier import ABOUT, Classifier, put_head, text_ids
from .examples import Example
from .labelled import Labelled, Split, read_labelled, split
from .lora import LoraConfig, add_lora, merge
from .packing import pack, to_batch
from .run import read_settings, table, tune
from .scores import Scores, fit_temperature, score
from .settings import load_to_tune

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

_EACH_EPOCH = TrainConfig(eval_every=None, checkpoint_every=None, warmup_steps=20, weight_decay=0.0)
# What a method usually wants: epochs, and how. A new model, all of whose weights learn, is "new".
USUAL = {
    "last-layer": (3.0, _EACH_EPOCH.replace(lr=1e-2)),
    "lora": (1.0, _EACH_EPOCH.replace(lr=1e-3)),
    "full": (1.0, _EACH_EPOCH.replace(lr=5e-5)),
    "new": (5.0, _EACH_EPOCH.replace(lr=2e-3, batch_size=32, warmup_steps=50, weight_decay=0.1)),
}
_AT_ONCE = 64  # texts that are scored together
_TRAINED = "trained.safetensors"


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(CheckedFields):
    """method: what learns besides the new head: nothing (last-layer), low-rank updates (lora) or
    all weights (full). class_weights: balanced counts each class alike, however few its texts.
    epochs: passes over the training texts. held_out, validation: shares, as `split` takes them.
    """

    ZERO_ALLOWED: ClassVar = ("split_seed",)

    method: Literal["last-layer", "lora", "full"] = "full"
    class_weights: Literal["none", "balanced"] = "balanced"
    epochs: float = 3.0
    held_out: float = 0.2
    validation: float = 0.1
    split_seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ClassifyRun:
    """What a run is begun with, as `classify` takes it; `config.toml` in its folder."""

    data: str
    begin: str | ModelConfig
    how: ClassifyConfig
    train: TrainConfig
    lora: LoraConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        new = None if isinstance(self.begin, str) else self.begin.to_dict()
        settings: dict[str, Any] = {
            "stage": "classify",
            "data": self.data,
            "begin": "" if new else self.begin,
            "tune": self.how.to_dict(),
            "train": self.train.to_dict(),
        }
        settings |= {"lora": self.lora.to_dict()} if self.lora else {}
        return settings | ({"model": new} if new else {})

    @classmethod
    def read(cls, path: Path) -> ClassifyRun:
        """What `to_dict` gave; raises FileError and ConfigError."""
        found = read_settings(path, "classify")
        new = "model" in found
        return cls(
            data=str(found.get("data", "")),
            begin=table(path, found, "model", ModelConfig) if new else str(found.get("begin", "")),
            how=table(path, found, "tune", ClassifyConfig),
            train=table(path, found, "train", TrainConfig),
            lora=table(path, found, "lora", LoraConfig) if "lora" in found else None,
        )


@dataclass(frozen=True)
class Result:
    """scores: on the held-out texts, after the temperature. ece_before: without it. majority: the
    accuracy of always saying the commonest label. cut: texts longer than seq_len, of all parts.
    seconds: of training, its evaluations and checkpoints."""

    folder: Path
    labels: list[str]
    scores: Scores
    ece_before: float
    temperature: float
    majority: float
    majority_label: str
    texts: dict[str, int]
    cut: int
    step: int
    best_step: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        by_label = zip(self.labels, self.scores.classes, strict=True)
        return {
            "run": str(self.folder),
            "accuracy": self.scores.accuracy,
            "majority_accuracy": self.majority,
            "majority_label": self.majority_label,
            "classes": {label: asdict(row) for label, row in by_label},
            "labels": self.labels,
            "confusion": self.scores.confusion,
            "ece": self.scores.ece,
            "ece_before": self.ece_before,
            "temperature": self.temperature,
            "texts": self.texts,
            "cut": self.cut,
            "step": self.step,
            "best_step": self.best_step,
            "seconds": self.seconds,
        }


def to_example(ids: Sequence[int], number: int) -> Example:
    """The class stands where the next token would: a target of the last real token alone."""
    return Example([*ids, number], [False] * len(ids) + [True])


def side_by_side(examples: Sequence[Example]) -> Batch:
    """In rows as long as the longest, where none sees another: next to no padding, whatever the
    lengths, so that texts of one length (and so, often, of one class) need not go together."""
    width = max(len(example.ids) - 1 for example in examples)
    return to_batch(pack(examples, width), width)


class TextBatches:
    """Batch i holds the i-th `batch_size` texts of all epochs, each in its own order; an epoch's
    last batch may be smaller."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.per_epoch = math.ceil(len(examples) / batch_size)

    def batch(self, index: int) -> Batch:
        epoch, place = divmod(index, self.per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return side_by_side([self.examples[i] for i in chosen])


def batch_logits(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """(N, K) fp32 and the classes (N,) of a batch's N texts."""
    ends = (batch.targets != IGNORED).flatten().nonzero()[:, 0]
    hidden = model.hidden(
        batch.ids, attention_mask=batch.documents, positions=batch.positions, places=ends
    )
    return model.logits(hidden).float(), batch.targets.flatten()[ends]


def weighted_loss(weights: Tensor | None) -> Objective:
    """Cross entropy in nats, summed over texts; weights: (K,), of the classes."""

    def loss(model: Transformer, batch: Batch) -> Tensor:
        logits, classes = batch_logits(model, batch)
        scale = None if weights is None else weights.to(logits.device)
        return F.cross_entropy(logits, classes, scale, reduction="sum")

    return loss


@torch.inference_mode()
def all_logits(model: Transformer, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """As batch_logits, of all batches, on the CPU; dropout is off meanwhile."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        parts = [batch_logits(model, batch.to(device)) for batch in batches]
    finally:
        model.train(was_training)
    logits, classes = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return logits, classes


class TrainedPart:
    """A checkpoint of the weights that learn; the others are still the begun model's."""

    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
        write_tensors(folder / _TRAINED, _trained(model))
        write_json(folder / ABOUT, {"unfinished": True})  # no language model: `load` refuses it

    def read(self, folder: Path, model: Transformer) -> None:
        mine, read = _trained(model), read_tensors(folder / _TRAINED)
        odd = sorted(mine.keys() ^ read.keys())
        odd += [name for name in mine if name in read and mine[name].shape != read[name].shape]
        if odd:
            raise WeightsError(f"{folder / _TRAINED}: {odd[0]} is not as this run has it")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(read[name])


def _trained(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Prepared:
    """A model with its head, frozen but for what learns, and its texts as ids."""

    model: Transformer
    tokenizer: Tokenizer
    seq_len: int
    train: list[Example]
    validation: list[Example]
    held_out: list[Example]
    cut: int
    weights: Tensor | None

    def scored(self, examples: Sequence[Example]) -> Iterator[Batch]:
        """Each once, those of like length together."""
        order = sorted(examples, key=lambda example: len(example.ids))
        for first in range(0, len(order), _AT_ONCE):
            yield side_by_side(order[first : first + _AT_ONCE])

    def measure(self, model: Transformer) -> dict[str, float]:
        """On the validation texts; the loss is weighted as in training."""
        logits, classes = all_logits(model, self.scored(self.validation))
        return {
            "held_out_loss": F.cross_entropy(logits, classes, self.weights).item(),
            "accuracy": (logits.argmax(1) == classes).double().mean().item(),
        }


def prepare(
    parts: Split,
    how: ClassifyConfig,
    train: TrainConfig,
    begin: str | Path | ModelConfig,
    lora: LoraConfig,
) -> Prepared:
    """begin: a model as `load` takes it, or the config of a new one, whose tokenizer is then
    trained on the training texts. Raises what `load` and add_lora raise, ConfigError for a context
    that is longer than the model's, DataError where there is nothing to validate by.
    """
    if not parts.validation:
        raise DataError(
            "there are too few texts to set some apart for validation; give at least ten a class"
        )
    torch.manual_seed(train.seed)
    if isinstance(begin, str | Path):
        model, tokenizer = load_to_tune(str(begin), train.seq_len)
    else:
        tokenizer = train_bpe([text for text, _ in parts.train], begin.vocab_size)
        model = Transformer(begin.replace(vocab_size=tokenizer.vocab_size))
    seq_len = train.seq_len or model.config.max_seq_len
    if seq_len > model.config.max_seq_len:
        raise ConfigError(
            f"seq_len {seq_len} is above the model's max_seq_len {model.config.max_seq_len}"
        )
    put_head(model, len(parts.labels))
    model.requires_grad_(how.method == "full")
    if how.method == "lora":
        add_lora(model, lora)
    model.lm_head.requires_grad_(True)
    number = {label: i for i, label in enumerate(parts.labels)}
    cut = 0

    def encoded(texts: Sequence[Labelled]) -> list[Example]:
        nonlocal cut
        examples = []
        for text, label in texts:
            ids, shortened = text_ids(tokenizer, text, seq_len)
            cut += shortened
            examples.append(to_example(ids, number[label]))
        return examples

    count = Counter(label for _, label in parts.train)
    balance = [len(parts.train) / (len(count) * count[label]) for label in parts.labels]
    return Prepared(
        model=model.to(pick_device(train.device)).train(),
        tokenizer=tokenizer,
        seq_len=seq_len,
        train=encoded(parts.train),
        validation=encoded(parts.validation),
        held_out=encoded(parts.held_out),
        cut=cut,
        weights=torch.tensor(balance) if how.class_weights == "balanced" else None,
    )


def classify(
    data: str | Path,
    out: str | Path,
    begin: str | Path | ModelConfig,
    how: ClassifyConfig,
    train: TrainConfig,
    lora: LoraConfig | None = None,
    *,
    steps: int | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: None,
    report: Callable[[dict[str, Any], int], None] = lambda line, steps: None,
) -> Result:
    """Trains a classifier of `data` in the run folder `out`, whose folder `model` it becomes.

    Of all steps the one with the lowest validation loss is kept; its temperature is fitted to the
    validation texts, and the held-out ones are scored once. begin: as of `prepare`. train: without
    eval_every and checkpoint_every, each once an epoch. steps: instead of how.epochs. report: a
    line of metrics.jsonl, and the steps in all. Raises what reading, `prepare` and training
    raise, ConfigError for other settings than a resumed run was begun with.
    """
    lora = lora or LoraConfig()
    texts = read_labelled(data)
    parts = split(texts, how.split_seed, how.held_out, how.validation)
    ready = prepare(parts, how, train, begin, lora)
    batches = TextBatches(ready.train, train.batch_size, train.seed)
    an_epoch = math.ceil(batches.per_epoch / train.accumulate)
    train = train.replace(
        steps=steps or max(1, round(how.epochs * an_epoch)),
        eval_every=train.eval_every or an_epoch,
        checkpoint_every=train.checkpoint_every or an_epoch,
    )
    sizes = {name: len(getattr(parts, name)) for name in ("train", "validation", "held_out")}
    say(_story(parts.counts | sizes, ready))
    run = ClassifyRun(
        data=str(data),
        begin=str(begin) if isinstance(begin, Path) else begin,
        how=how,
        train=train,
        lora=lora if how.method == "lora" else None,
    )
    known = hashlib.sha256(json.dumps(texts).encode("utf-8")).hexdigest()[:16]
    settings = {"texts": known, **run.to_dict()}

    def make(folder: RunFolder) -> Trainer:
        return Trainer(
            ready.model,
            batches,
            train,
            folder,
            tokenizer=ready.tokenizer,
            held_out=HeldOut(lambda: ready.scored(ready.validation), measure=ready.measure),
            objective=weighted_loss(ready.weights),
            store=TrainedPart(),
            report=lambda line: report(line, train.steps),
        )

    done = tune(out, settings, make, resume)
    with RunFolder(out, resume=True) as folder:
        best = folder.checkpoint(done.best_step)
        TrainedPart().read(best, ready.model)
        if how.method == "lora":
            merge(ready.model)
        logits, classes = all_logits(ready.model, ready.scored(ready.validation))
        temperature = fit_temperature(logits, classes, ready.weights)
        model = folder.path / "model"
        if model.exists():  # of fewer steps
            shutil.rmtree(model)
        classifier = Classifier(
            ready.model.eval(), ready.tokenizer, parts.labels, temperature, ready.seq_len
        )
        classifier.save(model)
        logits, classes = all_logits(ready.model, ready.scored(ready.held_out))
        common = Counter(label for _, label in parts.train).most_common(1)[0][0]
        result = Result(
            folder=Path(out),
            labels=parts.labels,
            scores=score(logits, classes, temperature),
            ece_before=score(logits, classes).ece,
            temperature=temperature,
            majority=(classes == parts.labels.index(common)).double().mean().item(),
            majority_label=common,
            texts=parts.counts | sizes,
            cut=ready.cut,
            step=done.step,
            best_step=done.best_step,
            seconds=round(done.seconds, 1),
        )
        folder.write_text("result.json", json.dumps(result.to_dict(), indent=2) + "\n")
    return result


def _story(counts: dict[str, int], ready: Prepared) -> str:
    left = {
        "duplicates": ("copy", "copies"),
        "contradicting": ("text with several labels", "texts with several labels"),
        "near_copies": ("near copy of a text held out", "near copies of texts held out"),
    }
    gone = [counted(counts[name], *words) for name, words in left.items() if counts[name]]
    without = f" without {', '.join(gone)}" if gone else ""
    cut = f"; {ready.cut:,} cut to {ready.seq_len:,} tokens" if ready.cut else ""
    return (
        f"{counted(counts['read'], 'text')}{without}: {counts['train']:,} to learn from, "
        f"{counts['validation']:,} to choose by, {counts['held_out']:,} held out{cut}"
    )
