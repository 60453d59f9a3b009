"""A run of learning from rewards that can be checked, by GRPO: prompts in, a better model out.

For each prompt the policy samples a group of answers, through the fast decode path, and learns
from how each does beside its group.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import TrainingError
from ..train.config import TrainConfig
from ..train.run import pick_device
from ..train.run_folder import RunFolder
from ..train.step import NothingToLearn
from ..train.trainer import HeldOut, Progress, Store, Trainer
from ..weights.files import read_json, read_tensors, write_json, write_tensors
from .answers import Parts, Writer, read_parts
from .grpo import GroupBatch, PolicyLoss, RewardConfig
from .lora import adapt, without
from .rewards import Reward, make_reward
from .rollouts import Sampler, Task, encode_task
from .run import tune
from .settings import Tuning, check_begun, digest, load_to_tune, measure_first

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

# For a model of some 100 million parameters; ten times the rate suits one of a few million.
DEFAULTS = TrainConfig(
    steps=100, batch_size=4, lr=1e-5, schedule="constant", warmup_steps=5, weight_decay=0.0,
    eval_every=20, checkpoint_every=20,
)  # fmt: skip


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


class WithSamples:
    """A checkpoint that also holds the samples of which more steps are to learn."""

    def __init__(self, store: Store, sampler: Sampler) -> None:
        self.store, self.sampler = store, sampler

    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
        self.store.write(folder, model, tokenizer)
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
        self.store.read(folder, model)
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
    tasks: Parts[Task]


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
    reward, found = make_reward(run.method.reward), list[Parts[Task]]()

    def make(folder: RunFolder) -> Trainer:
        model, tokenizer = load_to_tune(run.begin, run.train.seq_len)
        writer = Writer(tokenizer, run.method.chat)
        encode = partial(encode_task, writer=writer, reward=run.method.reward)
        tasks = read_parts(run, encode, run.train.seq_len or model.config.max_seq_len, "prompt")
        found.append(tasks)
        lines = [task.line.values for task in tasks.train + tasks.held_out]
        check_begun(folder, run.sources, run.to_toml(), digest(model, lines))
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
    tasks: Parts[Task],
    reward: Reward,
    folder: RunFolder,
    report: Callable[[dict[str, Any]], None],
) -> RewardTrainer:
    """`model`, as it is now, is the reference; adapters stand beside it, all else is a copy."""
    cfg, device = run.method, pick_device(run.train.device)
    policy = copy.deepcopy(model) if cfg.kl and run.lora is None else model
    store = adapt(policy, run.begin, run.lora, run.train.seed)
    policy.to(device)
    sampler = Sampler(tasks.train, run, tokenizer, reward, policy, None)
    loss = PolicyLoss(cfg, sampler.logprobs)
    trainer = RewardTrainer(
        policy,
        sampler,
        run.train,
        folder,
        tokenizer=tokenizer,
        held_out=HeldOut(lambda: (), measure=lambda model: sampler.measure(tasks.held_out)),
        objective=loss,
        store=WithSamples(store, sampler),
        report=report,
    )
    trainer.loss, compute = loss, trainer.step.compute
    sampler.policy = compute
    if cfg.kl and run.lora is None:
        sampler.reference = model.to(device, next(compute.parameters()).dtype).eval()
    elif cfg.kl:
        sampler.reference = without(compute)
    return trainer
