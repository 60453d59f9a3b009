"""Learning from rewards that can be checked: GRPO (Shao et al. 2024, §4.1; DeepSeekMath).

For each prompt the policy samples a group of answers, through the fast decode path; an answer's
advantage is its reward beside its group's. A group of equal rewards teaches nothing: it is left
out, and counted.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.batches import IGNORED, Batch
from ..errors import CheckedFields, ConfigError, DataError, FileError, TrainingError, WeightsError
from ..generate import SamplingConfig, decode
from ..generate.generation import Generation
from ..train.config import TrainConfig
from ..train.run import pick_device
from ..train.run_folder import RunFolder
from ..train.step import NothingToLearn
from ..train.trainer import HeldOut, Progress, Trainer, WholeModel
from ..weights.files import read_json, read_tensors, write_json, write_tensors
from .answers import Line, Writer, at, hold_out, padded, read_lines, shuffled, token_logprobs
from .run import tune
from .settings import Tuning, check_begun, digest, load_to_tune, measure_first

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

Reward = Callable[[str, dict[str, Any]], float]  # of an answer, and the line that its prompt is in
# A minus after a digit is a subtraction's.
_NUMBER = re.compile(r"(?:(?<!\d)[-−])?\d+(?:[,_]\d{3})*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedFields):
    """How rewards are learned.

    reward: see `make_reward`. variant: grpo, or dr-grpo (Liu et al. 2025), which divides neither
    an advantage by its group's standard deviation nor an answer's terms by its length.
    group_size: answers to a prompt. max_new_tokens, temperature: of the samples. clip_ratio: how
    far from 1 the ratio of new to old probability counts. kl: the weight of the divergence from
    the model as it was, by the estimator k3 (Schulman 2020); 0 needs no second model. updates:
    optimiser steps on the same samples. chat: see `Writer`. TrainConfig's batch_size are prompts.
    """

    ZERO_ALLOWED: ClassVar = ("kl",)
    KIND: ClassVar = "reward"

    reward: str = "arithmetic"
    variant: Literal["grpo", "dr-grpo"] = "grpo"
    group_size: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    clip_ratio: float = 0.2
    kl: float = 0.04
    updates: int = 1
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ConfigError(
                f"group_size must be at least 2 (got {self.group_size}): answers are compared"
            )


# For a model of some 100 million parameters; ten times the rate suits one of a few million.
DEFAULTS = TrainConfig(
    steps=100, batch_size=4, lr=1e-5, schedule="constant", warmup_steps=5, weight_decay=0.0,
    eval_every=20, checkpoint_every=20,
)  # fmt: skip


def make_reward(name: str) -> Reward:
    """arithmetic, format:REGEX, or file.py:function, whose file is run.

    A function takes the answer and the line of its prompt, as a dict, and returns a number.
    Raises ConfigError for a name that is none of these, FileError for a file without the function.
    """
    if name == "arithmetic":
        return arithmetic
    kind, _, rest = name.partition(":")
    if kind == "format" and rest:
        try:
            return matches(rest)
        except re.error as error:
            raise ConfigError(
                f"reward format: {rest!r} is no regular expression: {error}"
            ) from None
    if is_function(name):
        path, _, function = name.rpartition(":")
        return _from_file(Path(path), function)
    raise ConfigError(f"reward {name!r} must be arithmetic, format:REGEX or file.py:function")


def is_function(name: str) -> bool:
    """Whether the reward is code in a file."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def arithmetic(answer: str, line: dict[str, Any]) -> float:
    """1 if the last number of the answer is the line's `answer`, else 0."""
    found = _NUMBER.findall(answer)
    return float(bool(found) and _number(found[-1]) == _number(str(line["answer"])))


def matches(pattern: str) -> Reward:
    """1 if the regular expression is found in the answer, else 0; `.` is any character."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda answer, line: float(compiled.search(answer) is not None)


def _number(text: str) -> float:
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(text)
    return float(text.replace("−", "-").replace(",", "").replace("_", ""))


def _from_file(path: Path, name: str) -> Reward:
    spec = importlib.util.spec_from_file_location("gpt2llama_reward", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileError(f"there is no file {path} to take the reward {name} from")
    module = importlib.util.module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for what is asked of us
            spec.loader.exec_module(module)
    except Exception as error:
        raise FileError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise FileError(f"{path} has no function {name}; write def {name}(answer, line)")

    def reward(answer: str, line: dict[str, Any]) -> float:
        try:
            with redirect_stdout(sys.stderr):
                value = float(function(answer, line))
        except Exception as error:
            raise TrainingError(
                f"the reward {path}:{name} failed on the answer {answer!r:.60}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise TrainingError(f"the reward {path}:{name} gave {value} for {answer!r:.60}")
        return value

    return reward


def advantages(rewards: Tensor, variant: str) -> Tensor:
    """(P, G) rewards -> (P, G): less the group's mean, in grpo over its standard deviation (of a
    sample: G - 1). Groups of equal rewards must have been left out.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred if variant == "dr-grpo" else centred / rewards.std(1, keepdim=True)


@dataclass
class Sample(Generation):
    """With the stop id among its `tokens`: it is the policy's choice like any other."""

    tokens: list[int] = field(default_factory=list)

    def append(
        self,
        token: int,
        logprob: float,
        stop_ids: Collection[int],
        max_new_tokens: int,
        context: int,
    ) -> None:
        self.tokens.append(token)
        super().append(token, logprob, stop_ids, max_new_tokens, context)


@dataclass(frozen=True)
class Task:
    prompt: list[int]
    line: Line


@dataclass(frozen=True)
class Tasks:
    """skipped: prompts that leave no room for an answer."""

    train: list[Task]
    held_out: list[Task]
    skipped: int

    @classmethod
    def read(cls, run: Tuning[RewardConfig], tokenizer: Tokenizer, seq_len: int) -> Tasks:
        """Raises DataError where no prompt is left on either side."""
        lines = read_lines(run.data)
        split = (lines, read_lines(run.held_out)) if run.held_out else hold_out(lines)
        writer = Writer(tokenizer, run.method.chat)
        (train, few), (held_out, fewer) = (
            encode_tasks(lines, writer, seq_len, run.method.reward) for lines in split
        )
        for name, left, out in (("train on", train, few), ("hold out", held_out, fewer)):
            if not left:
                raise DataError(
                    f"{run.data} leaves no prompt to {name}: {out} have {seq_len} tokens or more; "
                    "shorten them or raise seq_len"
                )
        return cls(train, held_out, few + fewer)


def encode_tasks(
    lines: list[Line], writer: Writer, seq_len: int, reward: str
) -> tuple[list[Task], int]:
    """The prompts as ids, and how many were left out since they fill seq_len tokens.

    Raises DataError, naming the line, for one that the arithmetic reward cannot check.
    """
    tasks = []
    for line in lines:
        if reward == "arithmetic":
            try:
                _number(str(line.values["answer"]))
            except (KeyError, ValueError):
                raise DataError(
                    f"{line.place}: answer must be the number that the reward arithmetic expects"
                ) from None
        with at(line.place):
            task = Task(writer.prompt(line.prompt), line)
        if not task.prompt:
            raise DataError(f"{line.place}: the prompt makes no token; give it some text")
        tasks.append(task)
    fitting = [task for task in tasks if len(task.prompt) < seq_len]
    return fitting, len(tasks) - len(fitting)


@dataclass(frozen=True, eq=False)
class GroupBatch(Batch):
    """Answers (R, T) of the groups that differ, or one row without a target if none does.

    advantages: (R,). old, reference: (R, T) log-probabilities of the targets when they were
    sampled (None: they are those of this step) and under the reference. figures: of all groups.
    """

    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    old: Tensor | None = None
    reference: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Answers."""
        return int((self.targets != IGNORED).any(1).sum())


class Sampler:
    """Batch i: groups of answers by the policy as it is when the batch is first asked for.

    The samples depend on (seed, i) and the weights. `policy` is set once the trainer has it.
    With several updates a batch serves that many steps; `pending` holds those in use, by index.
    """

    def __init__(
        self,
        tasks: list[Task],
        run: Tuning[RewardConfig],
        tokenizer: Tokenizer,
        reward: Reward,
        policy: Transformer,
        reference: Transformer | None,
    ) -> None:
        self.tasks, self.train, self.cfg = tasks, run.train, run.method
        self.tokenizer, self.reward = tokenizer, reward
        self.policy, self.reference = policy, reference
        self.pending: dict[int, GroupBatch] = {}

    def batch(self, index: int) -> GroupBatch:
        accumulate = self.train.accumulate
        step, place = divmod(index, accumulate)
        index = step // self.cfg.updates * accumulate + place
        if index not in self.pending:
            if place == 0:
                self.pending = {}
            self.pending[index] = self.make(index)
        return self.pending[index]

    def make(self, index: int) -> GroupBatch:
        cfg, size, seed = self.cfg, self.train.batch_size, self.train.seed
        tasks = [self.tasks[i] for i in shuffled(len(self.tasks), size, seed, index)]
        drawn = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
        sampling = SamplingConfig(temperature=cfg.temperature, seed=int(drawn >> 1))
        samples = self.answer([task for task in tasks for _ in range(cfg.group_size)], sampling)
        rewards = self.rewards(tasks, samples).view(size, -1)
        differ = (rewards != rewards[:, :1]).any(1)
        figures = {
            "reward": rewards.mean().item(),
            "equal_groups": int((~differ).sum()),
            "answer_tokens": sum(len(s.tokens) for s in samples) / len(samples),
        }
        if not differ.any():
            none = torch.full((1, 1), IGNORED)
            return GroupBatch(torch.zeros_like(none), none, advantages=torch.zeros(1),
                              figures=figures)  # fmt: skip
        kept = differ.repeat_interleave(cfg.group_size).nonzero()[:, 0].tolist()
        reference = self.reference
        ids, targets = padded([(samples[i].prompt, samples[i].tokens) for i in kept])
        return GroupBatch(
            ids,
            targets,
            advantages=advantages(rewards[differ], cfg.variant).flatten().float(),
            old=self.score(self.policy, ids, targets) if cfg.updates > 1 else None,
            reference=None if reference is None else self.score(reference, ids, targets),
            figures=figures,
        )

    def answer(self, tasks: Sequence[Task], sampling: SamplingConfig) -> list[Sample]:
        samples = [Sample(task.prompt) for task in tasks]
        steps = decode(
            self.policy,
            samples,
            max_new_tokens=self.cfg.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
            sampling=sampling,
            vocab_size=self.tokenizer.vocab_size,
        )
        try:
            for _ in steps:
                pass
        except WeightsError as error:
            raise TrainingError(f"the policy cannot answer any more: {error}") from error
        return samples

    def rewards(self, tasks: Sequence[Task], samples: Sequence[Sample]) -> Tensor:
        """Of the samples, as many to each task, in order; fp64."""
        each = len(samples) // len(tasks)
        return torch.tensor(
            [
                self.reward(self.tokenizer.decode(sample.ids), tasks[i // each].line.values)
                for i, sample in enumerate(samples)
            ],
            dtype=torch.float64,
        )

    @torch.no_grad()
    def score(self, model: Transformer, ids: Tensor, targets: Tensor) -> Tensor:
        """The targets' log-probabilities without dropout."""
        device, was_training = next(model.parameters()).device, model.training
        model.eval()
        try:
            return self.logprobs(model, ids.to(device), targets.to(device)).cpu()
        finally:
            model.train(was_training)

    def logprobs(self, model: Transformer, ids: Tensor, targets: Tensor) -> Tensor:
        """Under the law that the samples are drawn by."""
        return token_logprobs(model, ids, targets, self.cfg.temperature, self.tokenizer.vocab_size)

    def measure(self, tasks: list[Task], rows: int = 64) -> dict[str, float]:
        """Mean rewards: of a group of sampled answers to each, which is what is learned, with the
        same seed each time; and of the greedy answers.
        """
        cfg = self.cfg
        sampled = SamplingConfig(temperature=cfg.temperature, seed=self.train.seed)
        found = []
        for sampling, each in ((sampled, cfg.group_size), (SamplingConfig(), 1)):
            size, total = max(1, rows // each), 0.0
            for start in range(0, len(tasks), size):
                part = tasks[start : start + size]
                samples = self.answer([task for task in part for _ in range(each)], sampling)
                total += self.rewards(part, samples).sum().item()
            found.append(total / len(tasks) / each)
        return {
            "held_out_loss": -found[0], "held_out_reward": found[0], "held_out_greedy": found[1]
        }  # fmt: skip


class PolicyLoss:
    """The objective: the clipped ratio times the advantage, less the divergence; summed over
    answers, each the mean of its tokens, or in dr-grpo their sum over max_new_tokens.

    Of a step it keeps the mean of k3 over tokens, and the share of tokens beyond the clip.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.cfg = sampler, sampler.cfg
        self.by_length = self.cfg.variant == "grpo"
        self.seen: list[tuple[int, Tensor, Tensor]] = []

    def __call__(self, model: Transformer, batch: Batch) -> Tensor:
        assert isinstance(batch, GroupBatch)
        logprobs = self.sampler.logprobs(model, batch.ids, batch.targets)
        return self.of(logprobs, batch)

    def of(self, logprobs: Tensor, batch: GroupBatch) -> Tensor:
        """Of (R, T) log-probabilities under the policy."""
        clip, counted = self.cfg.clip_ratio, batch.targets != IGNORED
        old = logprobs.detach() if batch.old is None else batch.old
        advantage, ratio = batch.advantages[:, None], (logprobs - old).exp()
        plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
        gain, k3 = torch.minimum(plain, clipped), torch.zeros_like(logprobs)
        if batch.reference is not None:
            gap = batch.reference - logprobs
            k3 = gap.exp() - gap - 1
            gain = gain - self.cfg.kl * k3
        tokens = counted.sum(1)
        beyond = (clipped < plain) & counted
        self.seen.append((int(tokens.sum()), (k3.detach() * counted).sum(), beyond.sum()))
        length = tokens.clamp(min=1) if self.by_length else self.cfg.max_new_tokens
        return -((gain * counted).sum(1) / length).sum()

    def take_figures(self) -> dict[str, float]:
        """Since the last call."""
        tokens = sum(n for n, _, _ in self.seen)
        kl, clipped = (sum(float(t[i]) for t in self.seen) / max(1, tokens) for i in (1, 2))
        self.seen = []
        named = {"clipped": clipped} | ({"kl": kl} if self.cfg.kl else {})
        return named if tokens else {}


class RewardTrainer(Trainer):
    """Adds the samples' figures to each line of metrics.jsonl; groups that are all equal are
    among them, a step without others is no cause for a warning."""

    batches: Sampler
    loss: PolicyLoss

    def _one_step(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"step \d+ has nothing to learn")
            line = super()._one_step()
        parts = [batch.figures for batch in self.batches.pending.values()]
        means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        means["equal_groups"] = sum(part["equal_groups"] for part in parts)
        return line | means | self.loss.take_figures()


class WithSamples(WholeModel):
    """A checkpoint that also holds the samples of which more steps are to learn."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
        super().write(folder, model, tokenizer)
        pending = self.sampler.pending
        tensors = {
            f"{index}.{name}": value
            for index, batch in pending.items()
            for name, value in vars(batch).items()
            if isinstance(value, Tensor)
        }
        write_tensors(folder / "samples.safetensors", tensors)
        write_json(folder / "samples.json", {str(i): b.figures for i, b in pending.items()})

    def read(self, folder: Path, model: Transformer) -> None:
        super().read(folder, model)
        batches: dict[int, dict[str, Any]] = {
            int(index): {"figures": figures}
            for index, figures in read_json(folder / "samples.json").items()
        }
        for key, value in read_tensors(folder / "samples.safetensors").items():
            index, _, name = key.partition(".")
            batches[int(index)][name] = value.clone()
        self.sampler.pending = {index: GroupBatch(**parts) for index, parts in batches.items()}


@dataclass(frozen=True)
class Tuned:
    progress: Progress
    tasks: Tasks


def tune_reward(
    run: Tuning[RewardConfig],
    out: str | Path,
    *,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Tuned:
    """Tunes in the folder `out`; with `resume`, goes on from its last checkpoint, if any.

    Line 0 of metrics.jsonl is the model as it was. Runs the file of a reward that is a function.
    Raises what Trainer raises, TrainingError for a reward that fails or is the same for every
    answer, ConfigError for a resumed run whose settings differ, DataError and FileError for the
    prompts.
    """
    reward, found = make_reward(run.method.reward), list[Tasks]()

    def make(folder: RunFolder) -> Trainer:
        model, tokenizer = load_to_tune(run.begin, run.train.seq_len)
        tasks = Tasks.read(run, tokenizer, run.train.seq_len or model.config.max_seq_len)
        found.append(tasks)
        lines = [task.line.values for task in tasks.train + tasks.held_out]
        check_begun(folder, run, digest(model, lines))
        trainer = make_trainer(run, model, tokenizer, tasks, reward, folder, report)
        measure_first(trainer)
        return trainer

    try:
        return Tuned(tune(out, run.to_dict(), make, resume), found[0])
    except NothingToLearn:
        raise TrainingError(
            f"all answers to a prompt had the same reward {run.method.reward}, in every group; "
            "begin with a model that is right now and then, or raise group_size"
        ) from None


def make_trainer(
    run: Tuning[RewardConfig],
    model: Transformer,
    tokenizer: Tokenizer,
    tasks: Tasks,
    reward: Reward,
    folder: RunFolder,
    report: Callable[[dict[str, Any]], None],
) -> RewardTrainer:
    """`model` is the reference, and stays as it is."""
    device = torch.device(pick_device(run.train.device))
    policy = copy.deepcopy(model).requires_grad_(True).to(device)
    sampler = Sampler(tasks.train, run, tokenizer, reward, policy, None)
    loss = PolicyLoss(sampler)
    trainer = RewardTrainer(
        policy,
        sampler,
        run.train,
        folder,
        tokenizer=tokenizer,
        held_out=HeldOut(lambda: (), measure=lambda model: sampler.measure(tasks.held_out)),
        objective=loss,
        store=WithSamples(sampler),
        report=report,
    )
    trainer.loss, compute = loss, trainer.step.compute
    sampler.policy = compute
    if run.method.kl:
        sampler.reference = model.to(device, next(compute.parameters()).dtype).eval()
    return trainer
