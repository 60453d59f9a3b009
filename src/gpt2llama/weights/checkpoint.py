"""Our own format: config.json, model.safetensors under the names of the state_dict, a tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, WeightsError
from ..model.config import ModelConfig
from ..quant.scheme import from_dict, to_dict
from .files import (
    read_headers,
    read_json,
    read_tensor,
    read_tensors,
    write_json,
    write_tensors,
    write_tokenizer,
)
from .opened import Opened

if TYPE_CHECKING:
    from torch import Tensor

    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

FORMAT, VERSION = "gpt2llama", 1
_WORDS = ".words"


def write_model(folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
    """Into an existing folder; `atomic.new_folder` gives one that appears whole."""
    from ..quant.apply import schemes_of
    from .build import state_of

    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": model.config.to_dict(),
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    if schemes := schemes_of(model):
        config["quantization"] = to_dict(schemes)
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", state_of(model))
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)


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


def read_state(folder: Path) -> dict[str, Tensor]:
    """The tensors as `load_state_dict` takes them, but a tied head only as embed_tokens."""
    return read_tensors(folder / "model.safetensors")


def open_model(folder: Path) -> tuple[Opened, str | None]:
    """The model, and the fingerprint of its tokenizer."""
    cfg, fingerprint = read_config(folder)
    path = folder / "model.safetensors"
    read = partial(read_tensor, path)
    headers = read_headers(path)
    words = [name for name in headers if name.endswith(_WORDS)]
    try:
        quantization = read_json(folder / "config.json").get("quantization")
        schemes = from_dict(quantization, [name.removesuffix(_WORDS) for name in words])
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: quantization: {error}") from error
    for name, how in zip(words, schemes.values(), strict=False):  # without a scheme, there is none
        headers[name] = headers[name]._replace(kind=f"int{how.bits}")
    opened = Opened(
        where=str(path), format=FORMAT, config=cfg, headers=headers, read=read, schemes=schemes
    )
    return opened, fingerprint
