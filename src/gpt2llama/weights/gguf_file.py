"""GGUF files (ggml's docs/gguf.md), versions 2 and 3, little-endian.

    magic, version, counts · metadata: key, type, value · tensors: name, sizes, type, offset · data

Every length is checked against the file before anything of that length is made.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from ..atomic import new_file
from ..errors import FileError, MissingExtraError, WeightsError
from .gguf_blocks import KINDS, Bytes, Kind, decode, read_bytes, split_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from .opened import Parts

Metadata = dict[str, Any]

_HEADER_LIMIT = 32 << 20  # bytes; a vocabulary of 262,144 with its merges takes 16 MB
_ENTRY_LIMIT = 1 << 22  # of all lists; it has 1.3 million
_COUNT_LIMIT = 1 << 16  # keys, tensors; a 405B model has 1,138 tensors
_ALIGNMENT = 32
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies; `shape` is torch's (a file has it backwards)."""

    kind: Kind
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:  # bytes
        return math.prod(self.shape) // self.kind.block * self.kind.size


def read_header(path: Path) -> tuple[Metadata, dict[str, Stored]]:
    """The metadata, fp32 numbers as their shortest decimals, and the tensors by name.

    Raises FileError if it cannot be read, WeightsError if it is no such file or damaged.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != b"GGUF":
                raise WeightsError(f"{path} is no GGUF file: it does not begin with GGUF")
            length = min(size, _HEADER_LIMIT)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read(size)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def read_tensor(path: Path, name: str, stored: Stored) -> Tensor:
    """As it is stored if that is a plain type, else fp32. Keeps no page of the file.

    Raises FileError, WeightsError, or MissingExtraError where the type needs the `gguf` package.
    """
    import torch

    kind, count = stored.kind, math.prod(stored.shape)
    flat: Any
    with _opened(path, stored) as file:
        flat = decode(kind, file, count) if kind.dtype is None else read_bytes(file, stored.size)
    if flat is None:
        raise WeightsError(f"{path} is truncated: it ends inside the tensor {name}")
    tensor = torch.from_numpy(flat)
    return (tensor.view(getattr(torch, kind.dtype)) if kind.dtype else tensor).view(stored.shape)


def read_blocks(path: Path, name: str, stored: Stored) -> Parts:
    """A Q8_0, Q4_0 or Q4_1 matrix (N, K) as it is stored: integers (N, K), int8 or uint8 0..15,
    and scales and least weights (N, K / 32), fp16. The same errors.
    """
    import torch

    with _opened(path, stored) as file:
        raw = read_bytes(file, stored.size)
    if raw is None:
        raise WeightsError(f"{path} is truncated: it ends inside the tensor {name}")
    blocks, rows = raw.reshape(-1, stored.kind.size), stored.shape[0]
    q, scale, *least = (
        torch.from_numpy(part).view(rows, -1) for part in split_blocks(stored.kind.name, blocks)
    )
    return q, scale, least[0] if least else None


def read_start(path: Path, stored: Stored, limit: int) -> bytes:
    """The first bytes of a tensor, at most `limit`."""
    with _opened(path, stored) as file:
        return file.read(min(stored.size, limit))


@contextmanager
def _opened(path: Path, stored: Stored) -> Iterator[BinaryIO]:
    """The file, at the tensor."""
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            yield file
    except MissingExtraError:  # an OSError too
        raise
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def shortest(number: float) -> float:
    """The shortest decimal that rounds to this fp32 number: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(number)))


def write_file(
    path: Path, metadata: Metadata, tensors: dict[str, Stored], data: Iterable[tuple[str, Bytes]]
) -> None:
    """A new file, whole or not at all. data: each tensor's bytes, in pieces, in the same order.

    A whole number is written as uint32, in a list as int32; any other number as float32.
    """
    header, end = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)), 0
    for key, value in metadata.items():
        try:
            header += _pack_string(key) + _pack_value(value)
        except (struct.error, OverflowError) as error:
            raise WeightsError(f"{key}={value!r} does not fit a GGUF file: {error}") from error
    for name, stored in tensors.items():
        sizes = stored.shape[::-1]
        header += _pack_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        header += struct.pack("<IQ", stored.kind.id, end)
        end += stored.size + -stored.size % _ALIGNMENT
    with new_file(path) as file:
        file.write(header)
        last = ""
        for name, piece in data:
            if name != last:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                last = name
            file.write(piece.data)
        file.write(bytes(-file.tell() % _ALIGNMENT))


class _Header:
    """Reads from the front of `data`, the file's first bytes; `item` is what is being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.item = path, data, 4, "the header"
        self.entries = 0  # of all lists

    def read(self, file_size: int) -> tuple[Metadata, dict[str, Stored]]:
        (version,) = self.numbers("I")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            kind = "big-endian" if swapped else f"GGUF version {version}"
            raise WeightsError(f"{self.path} is {kind}; versions 2 and 3, little-endian, are read")
        n_tensors, n_keys = self.numbers("Q", 2)
        if max(n_tensors, n_keys) > _COUNT_LIMIT:
            self.fail(f"claims {n_tensors} tensors and {n_keys} keys")
        metadata: Metadata = {}
        for _ in range(n_keys):
            self.item = "the next key"
            (key,) = self.strings(1)
            self.item = f"the key {key!r}"
            if key in metadata:
                self.fail(f"has {self.item} twice")
            metadata[key] = self.value(*self.numbers("I"))
        tensors: dict[str, Stored] = {}
        for _ in range(n_tensors):
            self.item = "the next tensor"
            (name,) = self.strings(1)
            self.item = f"the tensor {name!r}"
            if name in tensors:
                self.fail(f"has {self.item} twice")
            tensors[name] = self.tensor()
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"has a general.alignment of {alignment!r}, not a power of two")
        return metadata, self.placed(tensors, alignment, file_size)

    def tensor(self) -> Stored:
        (n_sizes,) = self.numbers("I")
        if not 1 <= n_sizes <= 4:
            self.fail(f"has {self.item} with {n_sizes} dimensions, not 1 to 4")
        sizes = self.numbers("Q", n_sizes)
        (kind_id,), (offset,) = self.numbers("I"), self.numbers("Q")
        if kind_id not in KINDS:
            self.fail(f"has {self.item} in ggml's type {kind_id}, which is not read here")
        kind = KINDS[kind_id]
        if 0 in sizes or sizes[0] % kind.block:
            self.fail(f"has {self.item} of {sizes} weights in {kind.name} blocks of {kind.block}")
        return Stored(kind, sizes[::-1], offset)

    def placed(
        self, tensors: dict[str, Stored], alignment: int, file_size: int
    ) -> dict[str, Stored]:
        """Offsets from the start of the file; each tensor within it, none on another."""
        start, end = self.at + -self.at % alignment, 0
        for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
            if stored.offset % alignment or stored.offset < end:
                self.fail(f"has the tensor {name!r} at {stored.offset}, where none can begin")
            end = stored.offset + stored.size
            if start + end > file_size:
                self.fail(f"is {start + end - file_size} bytes short of the tensor {name!r}")
        return {n: Stored(s.kind, s.shape, start + s.offset) for n, s in tensors.items()}

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            (kind,), (count,) = self.numbers("I"), self.numbers("Q")
            self.entries += count
            if self.entries > _ENTRY_LIMIT:
                self.fail(f"is damaged: {self.item} claims {count} values")
            if kind == _STRING:
                return self.strings(count)
            return list(self.numbers(self.code(kind), count))
        if kind == _STRING:
            return self.strings(1)[0]
        (value,) = self.numbers(self.code(kind))
        return shortest(value) if kind == _F32 else value

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            self.fail(f"has {self.item} with a value of type {kind}, which is not read here")
        return _SCALARS[kind]

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{code}")
        if size > len(self.data) - self.at:
            self.fail_short()
        numbers = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return numbers

    def strings(self, count: int) -> list[str]:
        data, at, end, unpack = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > end:
                self.fail_short()
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                self.fail_short()
            try:
                strings.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                self.fail(f"has {self.item} with text that is not UTF-8")
        self.at = at
        return strings

    def fail_short(self) -> NoReturn:
        limit = "" if len(self.data) < _HEADER_LIMIT else f" of {_HEADER_LIMIT >> 20} MB at most"
        self.fail(f"is damaged or truncated: {self.item} reaches beyond the header{limit}")

    def fail(self, what: str) -> NoReturn:
        raise WeightsError(f"{self.path} {what}")


def _pack_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _kind_of(value[0]) if value else _STRING
        kind = _I32 if kind == _U32 else kind
        packed = struct.pack("<IIQ", _ARRAY, kind, len(value))
        if kind == _STRING:
            return packed + b"".join(map(_pack_string, value))
        return packed + struct.pack(f"<{len(value)}{_SCALARS[kind]}", *value)
    kind = _kind_of(value)
    packed = struct.pack("<I", kind)
    if kind == _STRING:
        return packed + _pack_string(value)
    return packed + struct.pack(f"<{_SCALARS[kind]}", value)


def _kind_of(value: Any) -> int:
    return {bool: _BOOL, int: _U32, float: _F32, str: _STRING}[type(value)]
