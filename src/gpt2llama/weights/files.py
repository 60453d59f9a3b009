"""Bounded JSON, memory-mapped safetensors, and folders that appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ..errors import FileError, WeightsError
from .opened import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ..tokenizer import Tokenizer

JSON_LIMIT = 16 << 20  # bytes; the index of a 405B model has 0.1 MB


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FileError if there is none such, WeightsError if it is no JSON."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise WeightsError(f"{path} is larger than {JSON_LIMIT >> 20} MB: not a config file")
        values = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """And, where transformers' `generate` looks for them, the ids that end an answer."""
    tokenizer.save(folder)
    ends = sorted(tokenizer.stop_ids)
    if ends:
        values = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends}
        write_json(folder / "generation_config.json", values)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Name -> tensor, mapped from the file: nothing is read until it is used."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{path} is truncated or no safetensors file: {error}") from error


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Name -> shape and dtype, without torch."""
    with _opened(path, "numpy") as file:
        parts = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  # no dict
        return {
            name: TensorInfo(tuple(part.get_shape()), _dtype(part.get_dtype()))
            for name, part in parts
        }


def read_tensor(path: Path, name: str) -> Tensor:
    """One of them, mapped from the file."""
    with _opened(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework) as file:
            yield file
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{path} is truncated or no safetensors file: {error}") from error


def _dtype(name: str) -> str:
    """F32 -> float32, BF16 -> bfloat16, I8 -> int8; others keep their name, to be refused."""
    kinds = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint"}
    kind = name.rstrip("0123456789")
    return kinds.get(kind, kind) + name.removeprefix(kind)


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise FileError(f"cannot write {path}: {error}; free some space") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # save_file lets only the owner read it
