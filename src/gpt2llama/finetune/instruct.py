"""Supervised fine-tuning: conversations in, a model that answers out (Ouyang et al. 2022 §3.1)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CheckedFields, ConfigError, DataError, InputError, counted
from ..train.config import TrainConfig, to_toml
from ..train.run import pick_device, should_compile
from ..train.run_folder import RunFolder
from ..train.trainer import HeldOut, Progress, Store, Trainer
from .examples import Example, Message, read_conversations, to_examples
from .lora import LoraConfig, adapt
from .packing import PackedExamples, in_order, mixed, pack
from .run import read_settings, table, tune
from .settings import check_begun, digest, load_to_tune

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

SHORTEST_ROWS = 512  # tokens, unless the context is shorter
# For minutes of tuning: the learning rates are those of full tuning of small models.
SHORT_TUNE = TrainConfig(
    lr=1e-3, schedule="cosine", warmup_steps=20, weight_decay=0.0, batch_size=8, min_lr=0.05,
    eval_every=None, checkpoint_every=None,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InstructConfig(CheckedFields):
    """epochs: passes over the data, from which the steps follow unless train.steps is set apart.
    held_out: the share of the conversations that is only scored, whole ones, drawn by the seed,
    where no file of them is given. neftune: alpha of noise on the embeddings while it trains (Jain
    et al. 2023), none unless given.
    """

    ZERO_ALLOWED: ClassVar = ("held_out",)

    epochs: float = 3.0
    held_out: float = 0.05
    neftune: float | None = None


@dataclass(frozen=True, kw_only=True)
class InstructRun:
    """Everything that decides a run's numbers; `config.toml` in its folder.

    data: JSONL files with their weights. held_out: a file of conversations that are only scored;
    without it a share of the data. train: with the steps of all epochs.
    """

    begin: str
    data: list[tuple[str, float]]
    held_out: str = ""
    how: InstructConfig = InstructConfig()
    train: TrainConfig = SHORT_TUNE
    lora: LoraConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "stage": "instruct",
            "begin": self.begin,
            "data": [f"{path}:{str(weight).removesuffix('.0')}" for path, weight in self.data],
            "held_out_file": self.held_out,
            "tune": self.how.to_dict(),
            "train": self.train.to_dict(),
        }
        return settings | ({"lora": self.lora.to_dict()} if self.lora else {})

    @classmethod
    def read(cls, path: Path) -> InstructRun:
        """What `to_dict` gave; raises FileError and ConfigError."""
        found = read_settings(path, "instruct")
        try:
            weighted = [text.rpartition(":") for text in found["data"]]
            data = [(name, float(weight)) for name, _, weight in weighted]
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ConfigError(f"{path}: data must be a list of FILE:WEIGHT") from None
        return cls(
            begin=str(found.get("begin", "")),
            data=data,
            held_out=str(found.get("held_out_file", "")),
            how=table(path, found, "tune", InstructConfig),
            train=table(path, found, "train", TrainConfig),
            lora=table(path, found, "lora", LoraConfig) if "lora" in found else None,
        )


@dataclass(frozen=True)
class Prepared:
    """What a run learns from, and what it makes of it."""

    seq_len: int  # of a row
    rows: list[list[Example]]
    held_out: list[list[Example]]
    examples: int
    skipped: int  # too long for seq_len
    learned_tokens: int  # targets of an epoch

    def in_short_rows(self) -> Prepared:
        """The same in rows as long as the longest example, at least SHORTEST_ROWS: attention over a
        long context is slow, and a batch of long rows would hold a small set several times."""
        rows, held_out = (list(chain.from_iterable(part)) for part in (self.rows, self.held_out))
        longest = max(len(example.ids) - 1 for example in rows + held_out)
        seq_len = max(longest, SHORTEST_ROWS)
        if seq_len >= self.seq_len:
            return self
        return packed(rows, seq_len, held_out, self.skipped)

    def digest(self) -> str:
        """sha256 of all tokens and of which of them are learned."""
        found = hashlib.sha256()
        for example in chain.from_iterable(self.rows + self.held_out):
            found.update(np.asarray(example.ids, np.int64).data)
            found.update(np.asarray(example.learned, np.bool_).data)
        return found.hexdigest()


def prepare(
    tokenizer: Tokenizer,
    sets: Sequence[Sequence[tuple[str, list[Message]]]],
    weights: Sequence[float],
    seq_len: int,
    seed: int,
    held_out: Sequence[tuple[str, list[Message]]] | float,
) -> Prepared:
    """sets: of (place, messages), each as often in an epoch as its weight says.

    held_out: conversations, or a share of each set's. Raises DataError where nothing is left to
    learn, InputError for a weight that is not above 0.
    """
    for weight in weights:
        if not 0 < weight < 1000:
            raise InputError(f"a weight must be above 0 and below 1000 (got {weight:g})")
    scored: list[tuple[str, list[Message]]] = []
    taught = [list(conversations) for conversations in sets]
    if isinstance(held_out, float):
        for number, conversations in enumerate(taught):
            order = np.random.default_rng((seed, number, 1)).permutation(len(conversations))
            first = order[: round(held_out * len(conversations))].tolist()
            scored += [conversations[i] for i in sorted(first)]
            for i in sorted(first, reverse=True):
                del conversations[i]
    else:
        scored = list(held_out)
    found = [
        to_examples(tokenizer, conversations, seq_len) for conversations in taught if conversations
    ]
    chosen = mixed([examples for examples, _ in found], list(weights)[: len(found)], seed)
    if not chosen:
        raise DataError("there is no conversation to learn from; give some, or hold out fewer")
    score, too_long = to_examples(tokenizer, scored, seq_len) if scored else ([], 0)
    return packed(chosen, seq_len, score, too_long + sum(skipped for _, skipped in found))


def packed(
    examples: Sequence[Example], seq_len: int, held_out: Sequence[Example] = (), skipped: int = 0
) -> Prepared:
    return Prepared(
        seq_len=seq_len,
        rows=pack(examples, seq_len),
        held_out=pack(held_out, seq_len),
        examples=len(examples),
        skipped=skipped,
        learned_tokens=sum(sum(example.learned[1:]) for example in examples),
    )


def make_trainer(
    model: Transformer,
    tokenizer: Tokenizer,
    data: Prepared,
    train: TrainConfig,
    folder: RunFolder,
    *,
    neftune: float | None = None,
    compiled: bool = False,
    store: Store | None = None,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Trainer:
    """A trainer of the answers' cross entropy; store: what of the model a checkpoint holds."""
    seq_len = data.seq_len
    if neftune is not None:
        model.embed_tokens.register_forward_hook(partial(_add_noise, neftune))
    scored = HeldOut(partial(in_order, data.held_out, max(1, 4096 // seq_len), seq_len))
    return Trainer(
        model,
        PackedExamples(data.rows, train.batch_size, seq_len, train.seed),
        train,
        folder,
        tokenizer=tokenizer,
        held_out=scored if data.held_out else None,
        compiled=compiled,
        store=store,
        report=report,
    )


def _add_noise(alpha: float, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
    """Uniform, of size alpha / sqrt(T D) at most, in training only; a packed row's T is its own."""
    if not module.training:
        return embedded
    most = alpha / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
    return embedded + torch.empty_like(embedded).uniform_(-most, most)


def instruct(
    begin: str | Path,
    data: Sequence[tuple[str | Path, float]],
    out: str | Path,
    train: TrainConfig = SHORT_TUNE,
    how: InstructConfig | None = None,
    *,
    held_out: str | Path | None = None,
    lora: LoraConfig | None = None,
    steps: int | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: None,
    report: Callable[[dict[str, Any], int], None] = lambda line, steps: None,
) -> Progress:
    """Tunes the model at `begin` on JSONL files, each with its weight, in the run folder `out`.

    lora: only adapters learn, and the run's checkpoints are adapters; without it the whole model.
    train: without seq_len, rows are as long as the longest conversation, at least SHORTEST_ROWS.
    steps: instead of how.epochs. report: a line of metrics.jsonl, and the steps in all. Raises
    what `load`, `read_conversations` and training raise; TokenizerError for a tokenizer without a
    chat template, ConfigError for other settings, data or weights than a resumed run was begun
    with.
    """
    how = how or InstructConfig()
    model, tokenizer = load_to_tune(str(begin), train.seq_len)
    most = train.seq_len or model.config.max_seq_len
    prepared = prepare(
        tokenizer,
        [list(read_conversations(path)) for path, _ in data],
        [weight for _, weight in data],
        most,
        train.seed,
        how.held_out if held_out is None else list(read_conversations(held_out)),
    )
    if train.seq_len is None:
        prepared = prepared.in_short_rows()
    an_epoch = len(prepared.rows) / (train.batch_size * train.accumulate)
    train = train.replace(steps=steps or max(1, math.ceil(how.epochs * an_epoch)))
    held = sum(map(len, prepared.held_out))
    say(
        f"{counted(prepared.examples, 'conversation')} an epoch in "
        f"{counted(len(prepared.rows), 'row')} of {prepared.seq_len} tokens, "
        f"{prepared.learned_tokens:,} of them learned; {held:,} held out; "
        f"{prepared.skipped:,} longer than {most} tokens left out"
    )
    settings = InstructRun(
        begin=str(begin),
        data=[(str(path), weight) for path, weight in data],
        held_out="" if held_out is None else str(held_out),
        how=how,
        train=train,
        lora=lora,
    )

    def make(folder: RunFolder) -> Trainer:
        files = [*(path for path, _ in settings.data), *filter(None, [settings.held_out])]
        name = digest(model, prepared.digest())
        check_begun(folder, [settings.begin, *files], to_toml(settings.to_dict()), name)
        store = adapt(model, begin, lora, train.seed)
        return make_trainer(
            model.to(pick_device(train.device)).train(),
            tokenizer,
            prepared,
            train,
            folder,
            neftune=how.neftune,
            compiled=should_compile(train, model.config, prepared.seq_len),
            report=lambda line: report(line, train.steps),
            store=store,
        )

    return tune(out, settings.to_dict(), make, resume)
