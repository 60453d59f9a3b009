"""OpenAI's release of GPT-2: hparams.json and a TensorFlow checkpoint, read without TensorFlow.

model.ckpt.index is a table in LevelDB's format, from a tensor's name to a protocol buffer that
says where its numbers lie in model.ckpt.data-00000-of-00001.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckedFields, ConfigError, FileError, WeightsError
from ..model.config import ModelConfig
from ..model.presets import preset
from .files import read_json
from .hf import change, state_from_hf, state_to_hf
from .keys import read_keys
from .opened import Opened
from .pickles import Stored

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .opened import State

KEY_LIMIT = 256
INDEX_LIMIT = 1 << 20  # bytes; the 580 tensors of the 1.5B take some 30 kB
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")


@dataclass(frozen=True, kw_only=True)
class HParams(CheckedFields):
    """hparams.json."""

    n_vocab: int
    n_ctx: int
    n_embd: int
    n_head: int
    n_layer: int


def config_from_openai(params: HParams) -> ModelConfig:
    return preset("gpt2").replace(
        vocab_size=params.n_vocab,
        max_seq_len=params.n_ctx,
        n_layers=params.n_layer,
        n_heads=params.n_head,
        d_model=params.n_embd,
        d_ff=4 * params.n_embd,
    )


def state_from_openai(state: State) -> State:
    """Their tensors under our names; a Conv1D weight is (1, in, out), transformers' (in, out)."""
    named = {_hf_name(name): t[0] if t.dim() == 3 else t for name, t in state.items()}
    return state_from_hf(named, "gpt2")


def state_to_openai(state: State) -> State:
    """The way back."""
    conv1d = re.compile(r"\.h\..*\.c_\w+\.weight$")
    named = state_to_hf(state, "gpt2")
    return {_openai_name(n): t[None] if conv1d.search(n) else t for n, t in named.items()}


def open_model(folder: Path, ignore_keys: Collection[str] = ()) -> Opened:
    """The model of a folder with hparams.json and model.ckpt.*."""
    path = folder / "hparams.json"
    try:
        cfg = config_from_openai(read_keys(HParams, read_json(path), ignore_keys))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    stored = read_index(folder / "model.ckpt.index")
    return Opened(
        where=str(folder),
        format="openai",
        config=cfg,
        headers={name: tensor.header() for name, tensor in stored.items()},
        read=lambda name: stored[name].read(),
        to_file=state_to_openai,
        from_file=state_from_openai,
        change=lambda name: change(_hf_name(name)),
        tokenizer=partial(_tokenizer, folder),
    )


def read_index(path: Path) -> dict[str, Stored]:
    """Name -> where the tensor is, for those of fp32; FileError without the two files, WeightsError
    for damaged ones."""
    data = path.with_suffix(".data-00000-of-00001")
    try:
        if path.stat().st_size > INDEX_LIMIT:
            raise WeightsError(f"{path} is larger than {INDEX_LIMIT >> 20} MB: not GPT-2's index")
        index, size = path.read_bytes(), data.stat().st_size
    except OSError as error:
        raise FileError(f"cannot read {error.filename}: {error.strerror}") from error
    if index[-8:] != _MAGIC:
        raise WeightsError(f"{path} is truncated or not the index of a TensorFlow checkpoint")
    try:
        _, _, at = _place(index, len(index) - 48)  # of the filters, of which there are none
        start, length, _ = _place(index, at)
        blocks = [_place(value) for _, value in _entries(index, start, length)]
        if sum(length for _, length, _ in blocks) > len(index):
            raise ValueError("its blocks overlap")
        found = dict(entry for block in blocks for entry in _entries(index, *block[:2]))
        found.pop(b"", None)  # says that there is one data file, little-endian
        stored = {name.decode(): _stored(data, size, entry) for name, entry in found.items()}
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is damaged: {type(error).__name__} {error}") from error
    return {name: tensor for name, tensor in stored.items() if tensor is not None}


def _entries(index: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Of one block of the table: each key says how much of the one before it starts with."""
    block, at, key = index[start : start + size], 0, b""
    if index[start + size]:
        raise ValueError("it is compressed")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # the restart points
    while at < end:
        shared, at = _varint(block, at)
        new, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + new]
        if len(key) > KEY_LIMIT:
            raise ValueError(f"a name has more than {KEY_LIMIT} bytes")
        at += new + length
        yield key, block[at - length : at]


def _place(data: bytes, at: int = 0) -> tuple[int, int, int]:
    """Offset and size of a block, and where to read on."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return offset, size, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where to read on): 7 bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 64, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer by number: whole numbers, or bytes of any other kind."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7  # 0: a number; 2: that many bytes; 5: four of them
        size, at = (4, at) if kind == 5 else _varint(data, at)
        yield tag >> 3, size if kind == 0 else data[at : at + size]
        at += size if kind else 0


def _stored(data: Path, size: int, entry: bytes) -> Stored | None:
    """Of a BundleEntryProto: 1 dtype, 2 shape, 3 data file, 4 offset, 5 size; 0 is left out."""
    fields = dict(_message(entry))
    if fields[1] != 1:  # not fp32
        return None
    shape = tuple(dict(_message(dim)).get(1, 0) for _, dim in _message(fields.get(2, b"")))
    offset, length = fields.get(4, 0), fields.get(5, 0)
    if len(shape) > 8:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    if fields.get(3) or length != 4 * prod(shape) or offset + length > size:
        raise ValueError(f"a tensor of shape {shape} is not in {data.name}")
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Stored(data, offset, "float32", 4, shape, stride)


def _hf_name(name: str) -> str:
    """model/h0/attn/c_attn/w -> transformer.h.0.attn.c_attn.weight, model/wte -> ….wte.weight"""
    module, _, kind = name.removeprefix("model/").rpartition("/")
    module = re.sub(r"^h(\d+)/", r"h.\1.", module or kind).replace("/", ".")
    return f"transformer.{module}.{'bias' if kind == 'b' else 'weight'}"


def _openai_name(name: str) -> str:
    module, kind = name.removeprefix("transformer.").rsplit(".", 1)
    letter = "b" if kind == "bias" else "g" if "ln_" in module else "w"
    path = re.sub(r"^h\.(\d+)", r"h\1", module).replace(".", "/")
    return f"model/{path}" if path in ("wte", "wpe") else f"model/{path}/{letter}"


def _tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "encoder.json").is_file():
        return None
    from ..tokenizer import load_tokenizer

    return load_tokenizer(folder / "encoder.json")
