"""A run from its config to its folder: data, model, training, loss curve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data.batches import PackedBatches, TokenData, held_out_windows
from ..errors import ConfigError, DataError, TokenizerError, WeightsError
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..plan import flops_per_token
from ..tokenizer import Tokenizer, load_tokenizer
from ..weights import load, open_model
from .config import RunConfig, TrainConfig
from .curve import loss_curve
from .run_folder import RunFolder, read_metrics
from .step import can_compile
from .trainer import HeldOut, Progress, Trainer

# FLOPs. Compiling takes 30 to 60 s on two cores and saves a fifth in fp32, where nearly all time
# goes to matrix products; more in bf16, where these are several times as fast.
WORTH_COMPILING = 2e13
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
    with RunFolder(out, resume) as folder:
        written = folder.path / "config.toml"
        if written.exists():
            _check_same(RunConfig.read(written), run, folder.path)
        trainer = make_trainer(run, folder, report)
        folder.write_text("config.toml", run.to_toml())
        progress = trainer.run()
        draw_curve(folder)
    return progress


def make_trainer(
    run: RunConfig, folder: RunFolder, report: Callable[[dict[str, Any]], None]
) -> Trainer:
    """Opens the run's data and tokenizer, draws the weights; the same errors as `train`."""
    data = TokenData.open(run.data)
    tokenizer = load_tokenizer(Path(run.data) / "tokenizer")
    if tokenizer.fingerprint != data.fingerprint:
        raise DataError(f"{run.data}: its tokenizer is not the one its shards were made with")
    if data.vocab_size > run.model.vocab_size:
        raise DataError(
            f"the tokenizer of {run.data} has {data.vocab_size} tokens and the model's vocab_size "
            f"is {run.model.vocab_size}; add --set vocab_size={data.vocab_size}"
        )
    rows = max(1, 4096 // run.seq_len)
    windows = partial(held_out_windows, data.held_out, run.seq_len, tokenizer.bos_id, rows)
    device = pick_device(run.train.device)
    torch.manual_seed(run.train.seed)
    model = Transformer(run.model)
    if run.begin and folder.latest() is None:
        begin_with(model, run.begin, tokenizer)
    return Trainer(
        model.to(device),
        PackedBatches(data, run.train.batch_size, run.seq_len, run.train.seed),
        run.train,
        folder,
        tokenizer=tokenizer,
        held_out=HeldOut(windows, data.held_out_bytes),
        compiled=should_compile(run.train, run.model, run.seq_len),
        report=report,
    )


def begin_with(model: Transformer, path: str, tokenizer: Tokenizer) -> None:
    """Copies the weights of the model at `path`, whose config may differ in what has none.

    Raises what `load` raises, ConfigError for weights of other shapes, TokenizerError for a
    tokenizer that is not the data's.
    """
    if open_model(path).schemes:
        raise WeightsError(f"{path} is quantised and cannot train; begin with its original")
    begun, its_tokenizer = load(path)
    if its_tokenizer is not None and its_tokenizer.fingerprint != tokenizer.fingerprint:
        raise TokenizerError(
            f"{path} was trained with another tokenizer than the data was prepared with; prepare "
            f"it with --tokenizer {path}"
        )
    ours, theirs = model.config, begun.config
    for field in ("n_heads", "kv_heads", "head_size", "tie_embeddings"):  # of one shape, read anew
        if (has := getattr(theirs, field)) != (wants := getattr(ours, field)):
            raise ConfigError(f"{path} has {field}={has} and the run's config {wants}; leave it")
    shapes = [
        {name: tuple(weight.shape) for name, weight in one.state_dict().items()}
        for one in (begun, model)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        has, wants = (str(found.get(name, "none")) for found in shapes)
        if has != wants:
            raise ConfigError(
                f"{path} has {name} of shape {has} and the run's config wants {wants}; --set only "
                "what needs no weights, such as rope_scaling or dropout"
            )
    model.load_state_dict(begun.state_dict())


def draw_curve(folder: RunFolder) -> None:
    """loss.svg from what metrics.jsonl holds so far."""
    if lines := read_metrics(folder.path):
        folder.write_text("loss.svg", loss_curve(lines, f"{folder.path.resolve().name}: loss"))


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


def should_compile(cfg: TrainConfig, model: ModelConfig, seq_len: int) -> bool:
    """`auto`: when the whole run, whatever part of it is left, is worth the compiler's time."""
    if cfg.compile == "on" and not can_compile():
        raise ConfigError("compile=on needs a C++ compiler; install g++ or set compile=auto")
    if cfg.compile != "auto":
        return cfg.compile == "on"
    tokens = cfg.steps * cfg.accumulate * cfg.batch_size * seq_len
    return tokens * flops_per_token(model, seq_len) > WORTH_COMPILING and can_compile()


def _check_same(before: RunConfig, now: RunConfig, folder: Path) -> None:
    old, new = (
        {"data": c.data, "begin": c.begin} | c.model.to_dict() | c.train.to_dict()
        for c in (before, now)
    )
    for name in old:
        if old[name] != new[name] and name not in _MAY_CHANGE:
            raise ConfigError(
                f"{folder} was begun with {name}={old[name]!r}, not {new[name]!r}; resume it with "
                "the same settings or train in another --out"
            )
