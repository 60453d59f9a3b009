"""TrainConfig, and a run as TOML plus typed `key=value`."""

from __future__ import annotations

import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import (
    CheckedFields,
    ConfigError,
    FileError,
    check_names,
    did_you_mean,
    field_names,
)
from ..model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckedFields):
    """How one run learns. `steps` are optimiser steps, `warmup_steps` among them.

    `optimizer`: adamw, or muon for the hidden matrices with adamw for the rest; `momentum` is
    muon's, `beta1` and `beta2` adamw's. `schedule`: after the warm-up cosine, wsd (constant, then
    linear over the last `decay` of the steps) or constant, down to `min_lr` times `lr`.
    `patience`: evaluations without progress before stopping early.
    `dtype` auto is bf16 where the device multiplies it natively; weights are fp32 throughout.
    `compile` auto compiles where the run is long enough to earn it and a C++ compiler exists.
    """

    ZERO_ALLOWED: ClassVar = (
        "warmup_steps", "weight_decay", "min_lr", "seed", "beta1", "beta2", "momentum",
    )  # fmt: skip

    steps: int = 1000
    batch_size: int = 16
    seq_len: int | None = None  # None: the model's max_seq_len, or what a tuning needs of it
    accumulate: int = 1
    lr: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 50
    decay: float = 0.3
    min_lr: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    clip: float | None = 1.0
    eval_every: int | None = 250
    checkpoint_every: int | None = 250
    patience: int | None = None
    seed: int = 0
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    compile: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay > 1 or self.min_lr > 1:
            raise ConfigError(
                "decay and min_lr are shares, at most 1 "
                f"(got decay={self.decay}, min_lr={self.min_lr})"
            )
        for name in ("beta1", "beta2", "momentum"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be below 1 (got {getattr(self, name)})")

    def eager(self) -> TrainConfig:
        """For a loss of one's own, which nothing compiles; ConfigError where that was asked for."""
        if self.compile == "on":
            raise ConfigError("compile=on is for train and finetune instruct; leave it out here")
        return self.replace(compile="off")


# For minutes of training. Muon learns a small corpus in about half of AdamW's tokens.
SHORT_RUN = TrainConfig(
    optimizer="muon",
    lr=3e-3,
    schedule="wsd",
    decay=0.7,
    min_lr=0.02,
    warmup_steps=20,
    batch_size=16,
    eval_every=None,
    checkpoint_every=None,
)


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """The rate of step `step` (counted from 0): warm-up, then `cfg.schedule`."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    if cfg.schedule == "constant":
        share = 1.0
    elif cfg.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        share = min(1.0, max(0.0, (1 - done) / cfg.decay))
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * share)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run's numbers; `config.toml` in its folder.

    begin: the model whose weights are trained on, as `load` takes it; new ones if empty.
    """

    model: ModelConfig
    train: TrainConfig
    data: str
    begin: str = ""

    @property
    def seq_len(self) -> int:
        return self.train.seq_len or self.model.max_seq_len

    def to_toml(self) -> str:
        named = {"data": self.data} | ({"begin": self.begin} if self.begin else {})
        return to_toml(named | {"model": self.model.to_dict(), "train": self.train.to_dict()})

    def set(self, pairs: list[str]) -> RunConfig:
        """Applies `key=value` strings; the key may be a field of the model or of the training."""
        train, model = parse_settings(pairs, TrainConfig, ModelConfig)
        model_now, train_now = self.model.replace(**model), self.train.replace(**train)
        return replace(self, model=model_now, train=train_now).checked()

    def checked(self) -> RunConfig:
        if self.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"seq_len {self.seq_len} is above the model's max_seq_len "
                f"{self.model.max_seq_len}; raise max_seq_len or lower seq_len"
            )
        return self

    @classmethod
    def read(cls, path: str | Path) -> RunConfig:
        """From a TOML file with `data`, perhaps `begin`, [model] and [train]."""
        values = read_toml(path)
        train, model = values.get("train", {}), values.get("model", {})
        if not isinstance(train, dict) or not isinstance(model, dict):
            raise ConfigError(f"{path}: model and train must be tables, [model] and [train]")
        try:
            check_names("a run", cls, values)
            run = cls(
                train=TrainConfig.from_dict(with_none(TrainConfig, train)),
                model=ModelConfig.from_dict(with_none(ModelConfig, model)),
                data=str(values.get("data", "")),
                begin=str(values.get("begin", "")),
            )
            return run.checked()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def parse_settings(pairs: list[str], *kinds: type) -> list[dict[str, Any]]:
    """`key=value` strings as the changes that each of the config dataclasses gets.

    Raises ConfigError for one without =, and for a key that is no field of any, with the nearest.
    """
    owners = {name: kind for kind in kinds for name in field_names(kind)}
    changes: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} must have the form key=value")
        if key not in owners:
            raise ConfigError(f"--set: there is no field {key!r}{did_you_mean(key, owners)}")
        changes[owners[key]][key] = _value(text)
    return [with_none(kind, changes[kind]) for kind in kinds]


def with_none(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """TOML has no None: the word none is one, where the field may be None."""
    hints = typing.get_type_hints(cls)
    optional = {name for name in values if type(None) in typing.get_args(hints.get(name))}
    return {k: None if v == "none" and k in optional else v for k, v in values.items()}


def read_toml(path: str | Path) -> dict[str, Any]:
    """Raises FileError, and ConfigError for what is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def to_toml(settings: Mapping[str, Any]) -> str:
    """Plain values first, then a table for each mapping; None becomes the word none."""
    lines = [f"{k} = {_toml(v)}" for k, v in settings.items() if not isinstance(v, dict)]
    for section, values in settings.items():
        if isinstance(values, dict):
            lines += ["", f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
        return f"{{{inner}}}"
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def _value(text: str) -> Any:
    """A TOML value (1e-3, true, {type = "linear", factor = 2}), or else a bare word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
