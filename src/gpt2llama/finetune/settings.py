"""A fine-tuning run as TOML plus typed `key=value`; the model that it begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ..errors import (
    CheckedFields,
    ConfigError,
    TokenizerError,
    WeightsError,
    check_names,
)
from ..train.config import TrainConfig, parse_settings, read_toml, to_toml, with_none
from .lora import LoraConfig

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer
    from ..train.run_folder import RunFolder
    from ..train.trainer import Trainer

M = TypeVar("M", bound=CheckedFields)


@dataclass(frozen=True, kw_only=True)
class Tuning(Generic[M]):
    """Everything that decides a run's numbers; `config.toml` in its folder.

    begin: the model to adapt, as `load` takes it. data, held_out: JSONL files; without the latter
    a tenth of the prompts is held out. method: the settings of this kind of tuning. lora: only
    adapters learn; without it the whole model.
    """

    begin: str
    data: str
    held_out: str = ""
    method: M
    train: TrainConfig
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        self.train.eager()

    def set(self, pairs: list[str]) -> Self:
        """Applies `key=value` strings; the key may be a field of the method or of the training."""
        train, method = parse_settings(pairs, TrainConfig, type(self.method))
        method_now, train_now = self.method.replace(**method), self.train.replace(**train)
        return replace(self, method=method_now, train=train_now)

    def to_dict(self) -> dict[str, Any]:
        named: dict[str, Any] = {"begin": self.begin, "data": self.data}
        named |= {"held_out": self.held_out} if self.held_out else {}
        named |= {self.method.KIND: self.method.to_dict(), "train": self.train.to_dict()}
        return named | ({"lora": self.lora.to_dict()} if self.lora else {})

    def to_toml(self) -> str:
        return to_toml(self.to_dict())

    @property
    def sources(self) -> list[str]:
        """What the numbers come from, by name."""
        return [self.begin, self.data, *([self.held_out] if self.held_out else [])]

    @classmethod
    def read(cls, path: str | Path, kind: type[M]) -> Self:
        """What `to_toml` wrote of a run of this kind; raises FileError and ConfigError."""
        values = read_toml(path)
        train, method = values.pop("train", {}), values.pop(kind.KIND, None)
        lora = values.pop("lora", None)
        if not all(isinstance(table, dict) for table in (train, method, lora or {})):
            raise ConfigError(f"{path} is not the config of a {kind.KIND} run")
        try:
            parts = {
                "method": kind.from_dict(with_none(kind, method)),
                "train": TrainConfig.from_dict(with_none(TrainConfig, train)),
                "lora": LoraConfig.from_dict(lora) if lora else None,
            }
            values = {key: str(value) for key, value in values.items()} | parts
            check_names("a run", cls, values, complete=True)
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def digest(model: Transformer, *what: object) -> str:
    """sha256 of the model's weights and of what is given beside it."""
    import torch

    from ..weights.build import state_of

    found = hashlib.sha256(repr((model.config, what)).encode())
    for name, tensor in sorted(state_of(model).items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_begun(folder: RunFolder, what: Sequence[str], toml: str, name: str) -> None:
    """Refuses to resume where `what`, the model and the files of the data, is other than `name`,
    its digest, says; leaves the settings in the folder, by which alone it can be resumed from now
    on.
    """
    path = folder.path / "begun.sha256"
    known = path.read_text(encoding="utf-8").strip() if path.exists() else None
    if folder.latest() is not None and known != name:
        raise ConfigError(
            f"{', '.join(what[:-1])} or {what[-1]} is no longer what {folder.path} was begun "
            "with; put it back or train in another --out"
        )
    folder.write_text(path.name, name + "\n")
    folder.write_text("config.toml", toml)


def measure_first(trainer: Trainer) -> None:
    """Line 0 of a new run's metrics.jsonl: the held-out figures of the model as it was."""
    held_out, folder = trainer.held_out, trainer.folder
    if folder.latest() is None and held_out is not None and held_out.measure is not None:
        line = {"step": 0, **held_out.measure(trainer.step.compute)}
        with folder.log(-1) as log:
            log.write(line)
        trainer.report(line)


def load_to_tune(path: str, seq_len: int | None) -> tuple[Transformer, Tokenizer]:
    """In fp32, its weights mapped to the file. Raises what `load` raises; WeightsError for a
    quantised model, TokenizerError without a tokenizer, ConfigError for a seq_len it has not.
    """
    import torch

    from ..weights import load, open_model

    opened = open_model(path)
    if opened.schemes:
        raise WeightsError(f"{path} is quantised and cannot train; begin with its original")
    context = opened.config.max_seq_len
    if seq_len is not None and seq_len > context:
        raise ConfigError(
            f"seq_len {seq_len} is above the model's max_seq_len {context}; lower seq_len"
        )
    model, tokenizer = load(path, dtype=torch.float32)
    if tokenizer is None:
        raise TokenizerError(f"{path} has no tokenizer; put its tokenizer.json beside the weights")
    return model, tokenizer
