"""A shard: the tokens of many documents in one safetensors file, read through a memory map.

Tensors: `document_ends`, int64, one past the last token of each document that ends in this shard
(a long document may run on into the next one), and `tokens`, uint16 or uint32.
Metadata, all strings: see `Shard`, and `format`, `version`, `dtype`, `tokens`, `documents`.
"""

from __future__ import annotations

import bisect
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import DataError, FileError

FORMAT, VERSION = "gpt2llama-tokens", "1"
_SPELLING = {"uint16": "U16", "uint32": "U32"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """One shard, in memory or mapped. `bytes`: the UTF-8 length of the documents that end in it."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    document_ends: NDArray[np.int64]
    split: str  # "train" or "held-out"
    index: int  # its place among the shards of the split
    last: bool  # whether no other follows
    vocab_size: int
    fingerprint: str  # of the vocabulary
    bytes: int


class Tokens:
    """The tokens of several shards as one sequence: `len()`, and `[a:b]` as an int64 array."""

    def __init__(self, parts: Sequence[NDArray[Any]], vocab_size: int) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, span: slice) -> NDArray[np.int64]:
        start, stop, _ = span.indices(len(self))
        pieces = [np.empty(0, np.int64)]
        part = bisect.bisect_right(self._ends, start)
        while start < stop:
            tokens = self._parts[part]
            begin = self._ends[part] - len(tokens)
            pieces.append(tokens[start - begin : stop - begin])
            start, part = self._ends[part], part + 1
        found = np.concatenate(pieces, dtype=np.int64)
        if found.size and found.max() >= self._vocab_size:
            raise DataError(f"a token shard holds id {found.max()}, outside {self._vocab_size:,}")
        return found


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smaller type that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.safetensors"


def write_shard(folder: Path, shard: Shard) -> None:
    """Writes `folder`/split-index.safetensors through to the disk. Raises OSError.

    By hand: the safetensors library puts the metadata in another order each time.
    """
    tokens = np.ascontiguousarray(shard.tokens, token_dtype(shard.vocab_size))
    ends = np.ascontiguousarray(shard.document_ends, "<i8")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": tokens.dtype.name,
        "vocab_size": shard.vocab_size,
        "fingerprint": shard.fingerprint,
        "split": shard.split,
        "index": shard.index,
        "last": shard.last,
        "documents": ends.size,
        "tokens": tokens.size,
        "bytes": shard.bytes,
    }
    middle, stop = ends.nbytes, ends.nbytes + tokens.nbytes
    spelling = _SPELLING[tokens.dtype.name]
    header: dict[str, Any] = {
        "__metadata__": {key: str(value) for key, value in metadata.items()},
        "document_ends": {"dtype": "I64", "shape": [ends.size], "data_offsets": [0, middle]},
        "tokens": {"dtype": spelling, "shape": [tokens.size], "data_offsets": [middle, stop]},
    }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with (folder / shard_name(shard.split, shard.index)).open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(ends.data)
        file.write(tokens.data)
        file.flush()
        os.fsync(file.fileno())


def open_shard(path: Path) -> Shard:
    """The shard, its tokens mapped and not read. Raises DataError unless all of it fits."""
    try:
        with safe_open(path, framework="numpy") as file:  # header against the file's size
            ends = file.get_tensor("document_ends")
        with path.open("rb") as raw:
            (header_size,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(header_size))
        said, tensor = header["__metadata__"], header["tokens"]
        if said["format"] != FORMAT or said["version"] != VERSION:
            raise ValueError(f"format {said['format']} {said['version']}")
        vocab_size, (count,) = int(said["vocab_size"]), tensor["shape"]
        dtype = token_dtype(vocab_size)
        ordered = (np.diff(ends, prepend=0, append=count) >= 0).all()
        if (
            tensor["dtype"] != _SPELLING[dtype.name]
            or said["dtype"] != dtype.name
            or (ends.dtype, ends.ndim) != (np.dtype("<i8"), 1)
            or (int(said["tokens"]), int(said["documents"])) != (count, ends.size)
            or not ordered
        ):
            raise ValueError("metadata and tensors differ")
        offset = 8 + header_size + tensor["data_offsets"][0]
        mapped = np.memmap(path, dtype, mode="r", offset=offset, shape=(count,))
        return Shard(
            tokens=np.asarray(mapped),
            document_ends=ends,
            split=said["split"],
            index=int(said["index"]),
            last={"True": True, "False": False}[said["last"]],
            vocab_size=vocab_size,
            fingerprint=said["fingerprint"],
            bytes=int(said["bytes"]),
        )
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is no whole token shard ({error}); make it again with gpt2llama data prepare"
        ) from None
