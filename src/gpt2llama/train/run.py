"""A run from its config to its folder: data, model, training, loss curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..data.batches import PackedBatches, TokenData, held_out_windows
from ..errors import ConfigError, DataError
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..tokenizer import load_tokenizer
from .config import RunConfig, TrainConfig
from .curve import loss_curve
from .run_folder import RunFolder, read_metrics
from .trainer import HeldOut, Progress, Trainer, can_compile

# What a resumed run may change: nothing that its numbers so far depend on.
_MAY_CHANGE = {"steps", "eval_every", "checkpoint_every", "patience"}


def train(
    run: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Progress:
    """Trains `run` in the folder `out`; with `resume`, goes on from its last checkpoint, if any.

    Raises what Trainer raises, ConfigError for a resumed run whose settings differ, DataError
    for shards that do not fit the model.
    """
    device = torch.device(pick_device(run.train.device))
    data = TokenData.open(run.data)
    tokenizer = load_tokenizer(Path(run.data) / "tokenizer")
    if tokenizer.fingerprint != data.fingerprint:
        raise DataError(f"{run.data}: its tokenizer is not the one its shards were made with")
    if data.vocab_size > run.model.vocab_size:
        raise DataError(
            f"the tokenizer of {run.data} has {data.vocab_size} tokens and the model's vocab_size "
            f"is {run.model.vocab_size}; add --set vocab_size={data.vocab_size}"
        )
    batches = PackedBatches(data, run.train.batch_size, run.seq_len, run.train.seed)

    def windows() -> Any:
        rows = max(1, 4096 // run.seq_len)
        return held_out_windows(data.held_out, run.seq_len, tokenizer.bos_id, rows)

    torch.manual_seed(run.train.seed)
    model = Transformer(run.model).to(device)
    with RunFolder(out, resume) as folder:
        written = folder.path / "config.toml"
        if written.exists():
            _check_same(RunConfig.read(written), run, folder.path)
        folder.write_text("config.toml", run.to_toml())
        trainer = Trainer(
            model,
            batches,
            run.train,
            folder,
            tokenizer=tokenizer,
            held_out=HeldOut(windows, data.held_out_bytes),
            compiled=should_compile(run.train, run),
            report=report,
        )
        progress = trainer.run()
        lines = read_metrics(folder.path)
        if lines:
            folder.write_text("loss.svg", loss_curve(lines, f"{folder.path.name}: loss"))
    return progress


def pick_device(name: str) -> str:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}") from error
    return name


def should_compile(cfg: TrainConfig, run: RunConfig) -> bool:
    """`auto`: when the whole run, whatever part of it is left, is worth the compiler's minute."""
    if cfg.compile != "auto":
        return cfg.compile == "on"
    from ..plan import flops_per_token

    tokens = cfg.steps * cfg.accumulate * cfg.batch_size * run.seq_len
    return tokens * flops_per_token(run.model, run.seq_len) > 3e13 and can_compile()


def _check_same(before: RunConfig, now: RunConfig, folder: Path) -> None:
    for part, cls in (("model", ModelConfig), ("train", TrainConfig)):
        for f in fields(cls):
            old, new = (getattr(getattr(c, part), f.name) for c in (before, now))
            if old != new and f.name not in _MAY_CHANGE:
                raise ConfigError(
                    f"{folder} was begun with {f.name}={old!r}, not {new!r}; resume it with the "
                    "same settings or train in another --out"
                )
