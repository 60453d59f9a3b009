"""Models in and out: `load` and `save`. One module a format, each a dict -> dict both ways.

Opening (`open_model`) reads headers only and imports no torch; `build.assemble` makes the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic import new_folder
from ..errors import FileError, InputError, TokenizerError, WeightsError
from ..quant.scheme import SCHEMES
from .files import read_json
from .opened import Opened

if TYPE_CHECKING:
    import torch

    from ..model.transformer import Transformer
    from ..tokenizer import Facts, Tokenizer
    from . import peft

__all__ = ["check_target", "lasting_name", "load", "open_model", "save"]

FORMATS = ("gpt2llama", "hf", "gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load(
    path: str | PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quant: str | None = None,
    ignore_keys: Collection[str] = (),
    rope_factor: float | None = None,
) -> tuple[Transformer, Tokenizer | None]:
    """A model in eval mode and its tokenizer, or None where there is none.

    path: our folder, a run folder (its latest checkpoint), a Hugging Face folder (GPT-2, Llama,
    Mistral, Qwen2, Qwen3), a LoRA adapter in PEFT's format (adapter_config.json: its base model
    with the adapter merged), Meta's (params.json), a .gguf file, nanoGPT's ckpt.pt, OpenAI's GPT-2
    checkpoint (hparams.json), an asset's name or a hub id. dtype: the file's unless given; fp32
    for a quantised GGUF. ignore_keys: config keys to treat as not there. rope_factor: of a Meta
    folder with use_scaled_rope, which does not say it. quant: "int8" or "int4" rounds the weights
    to nearest; "keep" leaves a GGUF's Q8_0, Q4_0 and Q4_1 in their blocks instead of expanding
    them. Weights on the CPU are copied into large pages if half of the free memory takes them, else
    they stay mapped to a safetensors file until they change. Raises FileError, ConfigError,
    WeightsError, TokenizerError, AssetError, MissingExtraError or InputError.
    """
    if quant not in (None, "keep", *SCHEMES):
        raise InputError(f"quant must be {', '.join(SCHEMES)} or keep (got {quant!r})")
    from ..memory import gather
    from ..quant.apply import quantise, schemes_of
    from .build import assemble

    opened = open_model(path, ignore_keys, rope_factor)
    if quant is not None and str(dtype) not in ("None", "torch.float32"):
        raise InputError(f"a quantised model computes in float32; leave out dtype (here {dtype})")
    model = assemble(opened, dtype, device, keep=quant == "keep")
    if quant == "keep" and not schemes_of(model):
        raise InputError(f"{path} has no blocks to keep (Q8_0, Q4_0 or Q4_1); leave out quant")
    if quant in SCHEMES:
        model = quantise(model, SCHEMES[quant])
    if quant is not None:
        gather(model)
    tokenizer = opened.tokenizer()
    _check_vocabulary(tokenizer, model.config.vocab_size)
    return model, tokenizer


def open_model(
    path: str | PathLike[str],
    ignore_keys: Collection[str] = (),
    rope_factor: float | None = None,
) -> Opened:
    """What the headers say of it; the same errors as `load`."""
    from . import peft

    place, adapters = _checkpoint_folder(_locate(path)), list[peft.Adapter]()
    while (place / peft.CONFIG).is_file():
        if len(adapters) == peft.DEEPEST:
            raise WeightsError(f"{path} is more than {peft.DEEPEST} adapters on top of each other")
        adapters.append(peft.read_adapter(place, ignore_keys))
        place = _base_of(adapters[-1])
    used = frozenset[str]().union(*(adapter.ignored for adapter in adapters))
    opened = _open_whole(place, [key for key in ignore_keys if key not in used], rope_factor)
    for adapter in reversed(adapters):
        opened = _with_tokenizer(peft.merged(opened, adapter), adapter.folder)
    return opened


def _base_of(adapter: peft.Adapter) -> Path:
    """Beside the adapter, or wherever `load` finds it."""
    try:
        beside = (adapter.folder / adapter.base).resolve()
        return _checkpoint_folder(beside if beside.exists() else _locate(adapter.base))
    except (OSError, ValueError) as error:
        raise FileError(
            f"{adapter.folder / 'adapter_config.json'}: base_model_name_or_path: {error}"
        ) from error


def _open_whole(place: Path, ignore_keys: Collection[str], rope_factor: float | None) -> Opened:
    if (place / "classifier.json").is_file():
        raise WeightsError(
            f"{place} is a classifier and no language model: its head scores labels; use it with "
            "gpt2llama classify"
        )
    if not (place / "config.json").exists():
        if (place / "params.json").is_file():
            from . import meta

            return meta.open_model(place, ignore_keys, rope_factor)
        if place.suffix == ".pt" or (place / "ckpt.pt").is_file():
            from . import nanogpt

            ckpt = place if place.is_file() else place / "ckpt.pt"
            return nanogpt.open_model(ckpt, ignore_keys)
        if (place / "hparams.json").is_file():
            from . import openai

            return openai.open_model(place, ignore_keys)
        if (place / "metrics.jsonl").is_file():
            raise FileError(
                f"{place} is a run that names no checkpoint yet; let its own command go on"
            )
        if place.is_dir():
            raise FileError(f"{place} has no config.json, params.json, hparams.json or ckpt.pt")
        if place.name == "params.json" or place.suffix in (".safetensors", ".json", ".pth"):
            raise FileError(f"{place} is a part of a model; give its folder, {place.parent}")
        if place.is_file():
            from . import gguf

            return gguf.open_model(place, ignore_keys)
    from . import checkpoint, hf

    config, fingerprint = read_json(place / "config.json"), None
    if config.get("format") == checkpoint.FORMAT:
        opened, fingerprint = checkpoint.open_model(place)
    elif "model_type" in config:
        opened = hf.open_model(place, ignore_keys)
    else:
        raise WeightsError(f"{place / 'config.json'} has neither a 'format' nor a 'model_type'")
    return _with_tokenizer(opened, place, fingerprint)


def _with_tokenizer(opened: Opened, folder: Path, fingerprint: str | None = None) -> Opened:
    """The folder's, if it has one."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return opened
    read = partial(_read_tokenizer, folder, fingerprint)
    return replace(opened, tokenizer=read, facts=partial(_read_facts, folder))


def lasting_name(path: str | PathLike[str]) -> str:
    """A model's path from wherever one stands, and however long its run goes on; other names that
    `load` takes stay as they are."""
    place = Path(path)
    return str(_checkpoint_folder(place).resolve()) if place.exists() else str(path)


def save(
    model: Transformer,
    tokenizer: Tokenizer | None,
    folder: str | PathLike[str],
    format: str = "gpt2llama",
    dtype: str | None = None,
) -> list[str]:
    """Writes a new folder, ours or one for `transformers` ("hf"), or a .gguf file ("gguf"): whole
    or not at all. Returns what a user may want to know, a line each. Only our own format keeps a
    quantised model's integers; the others are given the weights these stand for.

    dtype: of a GGUF's matrices, F32, F16, BF16, Q8_0 or Q4_0; the model's own unless given.
    Raises FileError if the place is in use or cannot be written, ConfigError for a switch that
    the format cannot express.
    """
    from ..quant.apply import dequantised, refuse_adapters

    check_target(folder, format, dtype)
    _check_vocabulary(tokenizer, model.config.vocab_size)
    refuse_adapters(model)
    if format != "gpt2llama":
        model = dequantised(model)
    if format == "gguf":
        from . import gguf

        return gguf.write_model(Path(folder), model, tokenizer, dtype)
    from . import checkpoint, hf

    with new_folder(Path(folder)) as partial_folder:
        if format == "hf":
            return hf.write_model(partial_folder, model, tokenizer)
        checkpoint.write_model(partial_folder, model, tokenizer)
        return []


def check_target(folder: str | PathLike[str], format: str, dtype: str | None) -> None:
    """What `save` can refuse before there is a model; the same errors."""
    if format not in FORMATS:
        raise InputError(f"format {format!r} is not available; use one of {', '.join(FORMATS)}")
    place = Path(folder)
    if format == "gguf":
        from .gguf import FILE_TYPES

        if dtype not in (None, *FILE_TYPES):
            raise InputError(f"dtype must be one of {', '.join(FILE_TYPES)} (got {dtype!r})")
        if place.exists():
            raise FileError(f"{place} exists already; name another file or delete it")
        if place.suffix in (".json", ".pt", ".pth", ".safetensors"):
            raise InputError(f"{place} would not be taken for a GGUF file; call it NAME.gguf")
    elif dtype is not None:
        raise InputError(f"dtype={dtype!r} is GGUF's; convert the model with .to() for {format}")
    elif place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileError(f"{place} is in use; name a new folder or delete it")


def _locate(path: str | PathLike[str]) -> Path:
    """The path itself, an asset's file, or the folder of a hub id."""
    place, name = Path(path), str(path)
    if place.exists():
        return place
    from ..assets import ASSETS, fetch

    if name in ASSETS:
        return fetch(name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from .hub import resolve

        return resolve(name)
    raise FileError(
        f"{path} is not there; give a folder that holds config.json or params.json, a .gguf file, "
        "an asset's name or a hub id"
    )


def _checkpoint_folder(path: Path) -> Path:
    """The place itself, or of a run folder the checkpoint that its file `latest` names."""
    latest = path / "latest"
    if path.is_dir() and latest.is_file():
        with latest.open(encoding="utf-8") as file:
            name = file.read(256).strip()
        if not name or Path(name).name != name:
            raise FileError(f"{latest} must hold the name of a folder in {path / 'checkpoints'}")
        return path / "checkpoints" / name
    return path


def _read_facts(folder: Path) -> Facts:
    from ..tokenizer import read_facts

    return read_facts(folder)


def _read_tokenizer(folder: Path, fingerprint: str | None) -> Tokenizer:
    from ..tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if fingerprint is not None and fingerprint != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder}: the model was saved with tokenizer {fingerprint}, but tokenizer.json is "
            f"{tokenizer.fingerprint}; put back the one it was trained with"
        )
    for name in ("generation_config.json", "config.json"):  # the first that names any
        ends = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ends is not None:
            for id in ends if isinstance(ends, list) else [ends]:
                if type(id) not in (int, type(None)):
                    raise TokenizerError(f"{folder / name}: eos_token_id {id!r} must be a number")
                if id is not None and 0 <= id < tokenizer.vocab_size:
                    tokenizer.stop_ids |= {id}
            break
    return tokenizer


def _check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's table only "
            f"{vocab_size}: they do not belong together"
        )
