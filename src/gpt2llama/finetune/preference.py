"""Learning from pairs of answers, of which one is preferred: DPO, IPO, SimPO.

Every loss here is a function of one number a pair, its margin: how much more likely the policy
finds the chosen answer than the rejected one, beside the reference (not for SimPO), in all or per
token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..atomic import new_file
from ..data.batches import IGNORED, Batch
from ..errors import CheckedFields, ConfigError, DataError
from ..train.config import TrainConfig
from ..train.run import pick_device
from ..train.run_folder import RunFolder
from ..train.step import computing_dtype
from ..train.trainer import HeldOut, Progress, Trainer
from ..weights.files import read_tensors
from .answers import Line, Parts, Writer, at, padded, read_parts, shuffled, token_logprobs
from .lora import adapt
from .run import tune
from .settings import Tuning, check_begun, digest, load_to_tune, measure_first

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

T = TypeVar("T")
Watch = Callable[[Iterable[T], int], Iterable[T]]
SAVE_EVERY = 20.0  # seconds of reference log-probabilities that a kill may cost


@dataclass(frozen=True)
class Kind:
    """reference: margins are beside a reference's. per_token: an answer counts by its mean.
    squared: IPO's regression instead of the logistic loss. beta: the papers' usual one.
    """

    reference: bool
    per_token: bool
    squared: bool
    beta: float
    margin: float = 0.0


KINDS = {
    "dpo": Kind(reference=True, per_token=False, squared=False, beta=0.1),
    "dpo-norm": Kind(reference=True, per_token=True, squared=False, beta=5.0),
    "ipo": Kind(reference=True, per_token=False, squared=True, beta=0.1),
    "ipo-norm": Kind(reference=True, per_token=True, squared=True, beta=0.1),
    "simpo": Kind(reference=False, per_token=True, squared=False, beta=2.0, margin=1.0),
}


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(CheckedFields):
    """How preferences are learned.

    loss: dpo (Rafailov et al. 2023, eq. 7), dpo-norm (per token: Lambert et al. 2024, §5.1.2),
    ipo (Azar et al. 2023, eq. 17, with beta for its tau), ipo-norm (per token, as its authors'
    experiments and `trl` have it), simpo (Meng et al. 2024, eq. 6). beta: that of the loss's paper
    unless given. margin: SimPO's gamma. label_smoothing: the share of pairs taken to be the wrong
    way round (Mitchell 2023). chat: see `Writer`.
    """

    ZERO_ALLOWED: ClassVar = ("label_smoothing", "margin")
    KIND: ClassVar = "preference"

    loss: Literal["dpo", "dpo-norm", "ipo", "ipo-norm", "simpo"] = "dpo"
    beta: float | None = None
    margin: float | None = None
    label_smoothing: float = 0.0
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for wrong, rule in (
            (self.label_smoothing >= 0.5, "label_smoothing must be below 0.5: half is all noise"),
            (self.label_smoothing and self.kind.squared, f"{self.loss} has no label_smoothing"),
            (self.margin and self.loss != "simpo", f"margin is simpo's alone, not {self.loss}'s"),
        ):
            if wrong:
                raise ConfigError(f"{rule}; leave it out")

    @property
    def kind(self) -> Kind:
        return KINDS[self.loss]


# For a model of some 100 million parameters; ten times the rate suits one of a few million.
DEFAULTS = TrainConfig(
    steps=200, batch_size=8, lr=1e-5, warmup_steps=10, weight_decay=0.0, eval_every=50,
    checkpoint_every=50,
)  # fmt: skip


class PreferenceLoss:
    """Margins in nats (P,) -> losses (P,)."""

    def __init__(self, cfg: PreferenceConfig) -> None:
        self.kind = kind = cfg.kind
        self.beta = kind.beta if cfg.beta is None else cfg.beta
        self.gamma = kind.margin if cfg.margin is None else cfg.margin
        self.smoothing = cfg.label_smoothing
        self.of = self.squared if kind.squared else self.logistic

    def logistic(self, margins: Tensor) -> Tensor:
        z = self.beta * margins - self.gamma
        losses = -(1 - self.smoothing) * F.logsigmoid(z)
        return losses - self.smoothing * F.logsigmoid(-z) if self.smoothing else losses

    def squared(self, margins: Tensor) -> Tensor:
        return (margins - 1 / (2 * self.beta)) ** 2

    def margins(self, model: Transformer, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """(P,) margins and the log-probabilities (2P,), of the chosen, then the rejected answers.

        Prompts and padding are no targets: they count for nothing.
        """
        logprobs = token_logprobs(model, batch.ids, batch.targets).sum(1)
        scores = logprobs
        if self.kind.reference:
            assert batch.reference is not None
            scores = scores - batch.reference
        if self.kind.per_token:
            scores = scores / (batch.targets != IGNORED).sum(1)
        chosen, rejected = scores.chunk(2)
        return chosen - rejected, logprobs

    def __call__(self, model: Transformer, batch: Batch) -> Tensor:
        """The objective: summed over the batch's pairs."""
        assert isinstance(batch, PairBatch)
        return self.of(self.margins(model, batch)[0]).sum()


@dataclass(frozen=True, eq=False)
class PairBatch(Batch):
    """Rows of chosen answers, then of the rejected ones in the same order.

    reference: (2P,) fp32, their log-probabilities under the reference.
    """

    reference: Tensor | None = None

    @property
    def count(self) -> int:
        """Pairs."""
        return len(self.ids) // 2


@dataclass(frozen=True)
class Pair:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def tokens(self) -> int:
        """Of the longer row, which has no target after its last token."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected)) - 1


def encode_pair(line: Line, writer: Writer) -> Pair:
    """Raises DataError, naming the line, for answers that are empty or equal."""
    prompt, chosen, rejected = line.prompt, line.text("chosen"), line.text("rejected")
    if chosen == rejected:
        raise DataError(f"{line.place}: chosen and rejected are equal; nothing is preferred")
    with at(line.place):
        answers = [writer.answer(prompt, text) for text in (chosen, rejected)]
        pair = Pair(writer.prompt(prompt), *answers)
    if pair.chosen == pair.rejected:
        raise DataError(f"{line.place}: chosen and rejected make the same tokens")
    return pair


def pair_batch(pairs: list[Pair], reference: Tensor | None = None) -> PairBatch:
    """reference: (P, 2), of the chosen and the rejected answers."""
    rows = [(p.prompt, p.chosen) for p in pairs] + [(p.prompt, p.rejected) for p in pairs]
    return PairBatch(*padded(rows), reference=None if reference is None else reference.T.flatten())


class PairBatches:
    """Batch i: a function of (seed, i)."""

    def __init__(
        self, pairs: list[Pair], reference: Tensor | None, batch_size: int, seed: int
    ) -> None:
        self.pairs, self.reference = pairs, reference
        self.batch_size, self.seed = batch_size, seed

    def batch(self, index: int) -> PairBatch:
        chosen = shuffled(len(self.pairs), self.batch_size, self.seed, index)
        reference = None if self.reference is None else self.reference[chosen]
        return pair_batch([self.pairs[i] for i in chosen], reference)

    def in_order(self) -> Iterator[PairBatch]:
        for start in range(0, len(self.pairs), self.batch_size):
            part = slice(start, start + self.batch_size)
            reference = None if self.reference is None else self.reference[part]
            yield pair_batch(self.pairs[part], reference)


@torch.no_grad()
def measure(
    loss: PreferenceLoss, batches: Iterable[PairBatch], model: Transformer
) -> dict[str, float]:
    """Means over pairs: the loss, the margin, the share of margins above 0, the answers' nats."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        found = [loss.margins(model, batch.to(device)) for batch in batches]
    finally:
        model.train(was_training)
    margins = torch.cat([margins for margins, _ in found]).double()
    halves = [logprobs.view(2, -1) for _, logprobs in found]
    chosen, rejected = torch.cat(halves, 1).double().mean(1).tolist()
    return {
        "held_out_loss": loss.of(margins).mean().item(),
        "held_out_margin": margins.mean().item(),
        "held_out_accuracy": (margins > 0).double().mean().item(),
        "held_out_chosen": chosen,
        "held_out_rejected": rejected,
    }


def reference_logprobs(
    model: Transformer,
    pairs: list[Pair],
    batch_size: int,
    path: Path,
    watch: Watch[list[int]] = lambda items, count: items,
) -> Tensor:
    """(P, 2) fp32: the log-probabilities of each pair's answers, kept in the file `path`.

    What the file has already is not computed again; what is there when this is interrupted stays.
    Batches are those of `PairBatches.in_order` where the pairs are in the order of their lengths.
    """
    found = torch.full((len(pairs), 2), torch.nan)
    if path.exists():
        found.copy_(read_tensors(path)["logprobs"])
    by_length = sorted(range(len(pairs)), key=lambda i: pairs[i].tokens)  # little padding
    parts = [by_length[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
    missing = [part for part in parts if found[part].isnan().any()]
    if not missing:
        return found
    device, was_training, saved = next(model.parameters()).device, model.training, time.monotonic()
    model.eval()
    try:
        for part in watch(missing, len(missing)):
            batch = pair_batch([pairs[i] for i in part]).to(device)
            with torch.no_grad():
                logprobs = token_logprobs(model, batch.ids, batch.targets).sum(1)
            found[part] = logprobs.view(2, -1).T.cpu()
            if time.monotonic() - saved > SAVE_EVERY:
                _write(path, found)
                saved = time.monotonic()
    finally:
        model.train(was_training)
        _write(path, found)
    return found


def _write(path: Path, logprobs: Tensor) -> None:
    from safetensors.torch import save

    with new_file(path, overwrite=True) as file:
        file.write(save({"logprobs": logprobs}))


@dataclass(frozen=True)
class Tuned:
    progress: Progress
    pairs: Parts[Pair]


def tune_preference(
    run: Tuning[PreferenceConfig],
    out: str | Path,
    *,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
    watch: Watch[list[int]] = lambda items, count: items,
) -> Tuned:
    """Tunes in the folder `out`; with `resume`, goes on from its last checkpoint, if any.

    Line 0 of metrics.jsonl is the model as it was. watch: sees the batches of the reference's
    pass. Raises what Trainer raises, ConfigError for a resumed run whose settings, model or pairs
    differ, DataError and FileError for the pairs.
    """
    found: list[Parts[Pair]] = []

    def make(folder: RunFolder) -> Trainer:
        model, tokenizer = load_to_tune(run.begin, run.train.seq_len)
        encode = partial(encode_pair, writer=Writer(tokenizer, run.method.chat))
        pairs = read_parts(run, encode, run.train.seq_len or model.config.max_seq_len, "pair")
        pairs.held_out.sort(key=lambda pair: pair.tokens)  # little padding
        found.append(pairs)
        trainer = make_trainer(run, model, tokenizer, pairs, folder, report, watch)
        measure_first(trainer)
        return trainer

    return Tuned(tune(out, run.to_dict(), make, resume), found[0])


def make_trainer(
    run: Tuning[PreferenceConfig],
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Parts[Pair],
    folder: RunFolder,
    report: Callable[[dict[str, Any]], None],
    watch: Watch[list[int]],
) -> Trainer:
    """`model`, as it is now, is the reference; the same errors as tune_preference."""
    cfg, device = run.train, torch.device(pick_device(run.train.device))
    dtype = computing_dtype(cfg, device)
    name = digest(model, dtype, pairs.train, pairs.held_out)
    check_begun(folder, run.sources, run.to_toml(), name)
    loss, model = PreferenceLoss(run.method), model.to(device)
    rounded = loss.kind.reference and dtype != torch.float32
    reference_model = copy.deepcopy(model).to(dtype) if rounded else model

    def batches(split: str, pairs: list[Pair]) -> PairBatches:
        reference = None
        if loss.kind.reference:
            path = folder.path / f"reference-{split}-{name[:16]}.safetensors"
            reference = reference_logprobs(reference_model, pairs, cfg.batch_size, path, watch)
        return PairBatches(pairs, reference, cfg.batch_size, cfg.seed)

    held_out, train = batches("held-out", pairs.held_out), batches("train", pairs.train)
    store = adapt(model, run.begin, run.lora, cfg.seed)  # from here on it is no reference
    return Trainer(
        model,
        train,
        cfg,
        folder,
        tokenizer=tokenizer,
        held_out=HeldOut(
            lambda: (), measure=lambda model: measure(loss, held_out.in_order(), model)
        ),
        objective=loss,
        store=store,
        report=report,
    )
