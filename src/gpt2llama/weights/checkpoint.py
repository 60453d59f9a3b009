"""Our own format: config.json, model.safetensors under the names of the state_dict, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, WeightsError
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from .build import State, assemble, state_of
from .files import read_json, read_tensors, write_json, write_tensors

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

FORMAT, VERSION = "gpt2llama", 1


def write_model(folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
    """Into an existing folder; `files.new_folder` gives one that appears whole."""
    config = {
        "format": FORMAT,
        "version": VERSION,
        "model": model.config.to_dict(),
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", state_of(model))
    if tokenizer is not None:
        tokenizer.save(folder)


def read_config(folder: Path) -> tuple[ModelConfig, str | None]:
    """The config and the fingerprint of the tokenizer it was saved with, if any."""
    path = folder / "config.json"
    values = read_json(path)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise WeightsError(
            f"{path} is {values.get('format')!r} version {values.get('version')!r}; "
            f"this release reads {FORMAT!r} version {VERSION}"
        )
    model, fingerprint = values.get("model"), values.get("tokenizer_fingerprint")
    if not isinstance(model, dict) or not isinstance(fingerprint, str | None):
        raise WeightsError(f"{path} must have an object 'model' and a 'tokenizer_fingerprint'")
    try:
        return ModelConfig.from_dict(model), fingerprint
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_state(folder: Path) -> State:
    """The tensors as `load_state_dict` takes them, but a tied head only as embed_tokens."""
    return read_tensors(folder / "model.safetensors")


def read_model(
    folder: Path, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[Transformer, str | None]:
    """The model, and the fingerprint of its tokenizer."""
    cfg, fingerprint = read_config(folder)
    where = str(folder / "model.safetensors")
    return assemble(cfg, read_state(folder), where, dtype, device), fingerprint
