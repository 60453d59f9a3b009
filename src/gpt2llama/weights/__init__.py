"""Models in and out of folders: `load` and `save`. One module a format, each dict -> dict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import FileError, InputError, TokenizerError, WeightsError
from ..model.transformer import Transformer
from . import checkpoint, hf
from .build import Opened, assemble
from .files import new_folder, read_json

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

__all__ = ["load", "open_model", "save"]

_WRITERS = {"gpt2llama": checkpoint.write_model, "hf": hf.write_model}


def load(
    path: str | PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quant: str | None = None,
    ignore_keys: Collection[str] = (),
) -> tuple[Transformer, Tokenizer | None]:
    """A model in eval mode and its tokenizer, or None where the folder has no tokenizer.json.

    path: our folder, a run folder (its latest checkpoint), or a Hugging Face folder of GPT-2,
    Llama, Mistral, Qwen2 or Qwen3. dtype: the file's unless given. ignore_keys: keys of a
    Hugging Face config.json to treat as not there. The weights stay mapped to the file until
    they change. Raises FileError, ConfigError, WeightsError or TokenizerError.
    """
    if quant is not None:
        raise InputError(f"quant={quant!r} is not available in this version; leave it out")
    opened = open_model(path, ignore_keys)
    model = assemble(opened, dtype, device)
    tokenizer = opened.tokenizer()
    _check_vocabulary(tokenizer, model.config.vocab_size)
    return model, tokenizer


def open_model(path: str | PathLike[str], ignore_keys: Collection[str] = ()) -> Opened:
    """What the headers say of it; the same errors as `load`."""
    folder = _checkpoint_folder(Path(path))
    config = read_json(folder / "config.json")
    fingerprint = None
    if config.get("format") == checkpoint.FORMAT:
        opened, fingerprint = checkpoint.open_model(folder)
    elif "model_type" in config:
        opened = hf.open_model(folder, ignore_keys)
    else:
        raise WeightsError(f"{folder / 'config.json'} has neither a 'format' nor a 'model_type'")
    return replace(opened, tokenizer=partial(_read_tokenizer, folder, fingerprint))


def save(
    model: Transformer,
    tokenizer: Tokenizer | None,
    folder: str | PathLike[str],
    format: str = "gpt2llama",
) -> None:
    """Writes a new folder, whole or not at all: ours, or one for `transformers` ("hf").

    Raises FileError if the folder is in use or cannot be written, ConfigError for a switch that
    the format cannot express.
    """
    if format not in _WRITERS:
        raise InputError(f"format {format!r} is not available; use one of {', '.join(_WRITERS)}")
    _check_vocabulary(tokenizer, model.config.vocab_size)
    with new_folder(Path(folder)) as partial:
        _WRITERS[format](partial, model, tokenizer)


def _checkpoint_folder(path: Path) -> Path:
    """The folder itself, or of a run folder the checkpoint that its file `latest` names."""
    if not path.is_dir():
        kind = "a file: this version reads folders" if path.exists() else "not there"
        raise FileError(f"{path} is {kind}; give the folder that holds config.json")
    latest = path / "latest"
    if latest.is_file():
        with latest.open(encoding="utf-8") as file:
            name = file.read(256).strip()
        if not name or Path(name).name != name:
            raise FileError(f"{latest} must hold the name of a folder in {path / 'checkpoints'}")
        return path / "checkpoints" / name
    return path


def _read_tokenizer(folder: Path, fingerprint: str | None) -> Tokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    from ..tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if fingerprint not in (None, tokenizer.fingerprint):
        raise TokenizerError(
            f"{folder}: the model was saved with tokenizer {fingerprint}, but tokenizer.json is "
            f"{tokenizer.fingerprint}; put back the one it was trained with"
        )
    return tokenizer


def _check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's table only "
            f"{vocab_size}: they do not belong together"
        )
