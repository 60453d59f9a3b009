"""Files of torch.save (.pt, .pth): what they hold, found without torch and without running a thing.

Such a file is a zip of plain records: one of them a pickle, the others the numbers it refers to.
A pickle is a program; here its few harmless instructions are followed and any other is refused.
"""

from __future__ import annotations

import mmap
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FileError, WeightsError
from .opened import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_LIMIT = 2 << 20  # bytes; that of Llama 3.1 405B has 0.3 MB
_DTYPES = {
    "torch DoubleStorage": ("float64", 8), "torch FloatStorage": ("float32", 4),
    "torch HalfStorage": ("float16", 2), "torch BFloat16Storage": ("bfloat16", 2),
    "torch LongStorage": ("int64", 8), "torch IntStorage": ("int32", 4),
    "torch ShortStorage": ("int16", 2), "torch CharStorage": ("int8", 1),
    "torch ByteStorage": ("uint8", 1), "torch BoolStorage": ("bool", 1),
}  # fmt: skip
_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_KNOWN = {_DICT, _TENSOR, _PARAMETER, *_DTYPES}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `offset` of its first number, in bytes, and the strides to the others."""

    path: Path
    offset: int
    dtype: str
    width: int  # bytes a number
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """From the first number to behind the last, in numbers."""
        if not prod(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def header(self) -> TensorInfo:
        return TensorInfo(self.shape, self.dtype)

    def read(self) -> Tensor:
        """Mapped from the file, which stays as it is when the tensor changes."""
        import torch

        dtype, skipped = getattr(torch, self.dtype), self.offset % mmap.ALLOCATIONGRANULARITY
        if not self.span:
            return torch.empty(self.shape, dtype=dtype)
        size, start = skipped + self.span * self.width, self.offset - skipped
        try:
            with self.path.open("rb") as file:
                part = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError) as error:  # the latter: it was cut since
            raise FileError(f"cannot read {self.path}: {error}") from error
        flat = torch.frombuffer(part, dtype=dtype, count=self.span, offset=skipped)
        return flat.as_strided(self.shape, self.stride)


def read_pickle(path: Path) -> Any:
    """What was saved: dicts, lists and plain values, with a `Stored` for each tensor.

    FileError if there is no such file; WeightsError if it is damaged, large beyond reason, or
    holds anything else.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            program = _program(archive, path)
            return _follow(program, _records(archive, file), path)
    except WeightsError:
        raise
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # damaged bytes make zipfile and the steps below raise all kinds
        reason = f"{type(error).__name__} {error}".strip()
        raise WeightsError(f"{path} is truncated or not written by torch.save: {reason}") from error


def tensors_of(found: Any, where: str) -> dict[str, Stored]:
    """`found`, if it is a dict of tensors and nothing else."""
    if not isinstance(found, dict):
        raise WeightsError(f"{where} holds a {type(found).__name__}, not a dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Stored):
            raise WeightsError(f"{where} holds a {type(value).__name__} as {name!r}, not a tensor")
    return found


def _program(archive: zipfile.ZipFile, path: Path) -> bytes:
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise WeightsError(f"{path} is compressed; unpack it and zip it again without compression")
    programs = [record for record in records if record.filename.endswith("/data.pkl")]
    if len(programs) != 1:
        raise WeightsError(f"{path} is a zip, but not one written by torch.save")
    if programs[0].file_size > PICKLE_LIMIT:
        raise WeightsError(f"{path} holds more than {PICKLE_LIMIT >> 20} MB beside its tensors")
    order = programs[0].filename.removesuffix("data.pkl") + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise WeightsError(f"{path} has its bytes in big-endian order; save it on another machine")
    return archive.read(programs[0])


def _records(archive: zipfile.ZipFile, file: Any) -> dict[str, tuple[int, int]]:
    """Name -> offset and size of each record, in bytes."""
    places = {}
    for record in archive.infolist():
        file.seek(record.header_offset + 26)
        lengths = struct.unpack("<HH", file.read(4))  # of the name, and of what follows it
        start = record.header_offset + 30 + sum(lengths)
        places[record.filename.rpartition("/data/")[2]] = (start, record.file_size)
    return places


def _follow(program: bytes, records: dict[str, tuple[int, int]], path: Path) -> Any:
    """The instructions are those of pickle's protocol 2, which torch.save writes."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        first = marks.pop()
        taken = stack[first:]
        del stack[first:]
        return taken

    for step, value, _ in pickletools.genops(program):
        match step.name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(value)
            case "GLOBAL" if value in _KNOWN:  # its name; nothing is imported
                stack.append(value)
            case "GLOBAL":
                what = str(value).replace(" ", ".")
                raise WeightsError(
                    f"{path} holds a {what}, which is not read; save its tensors in a plain dict"
                )
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[step.name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[step.name])
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(step.name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "APPEND" | "APPENDS":
                items = since_mark() if step.name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = since_mark() if step.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                if not all(type(key) in (str, int) for key in items[::2]):
                    raise TypeError("a key")  # to hash tuples of tuples can take forever
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "BUILD":  # what an OrderedDict carries beside its items
                stack.pop()
            case "BINPERSID":
                match stack.pop():
                    case ("storage", str(kind), str(key), _, _):
                        stack.append((*_DTYPES[kind], *records[key]))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_call(stack.pop(), arguments, path))
            case "STOP":
                return stack.pop()
            case _:
                raise WeightsError(f"{path} has {step.name} in its pickle, unlike torch.save's own")
    raise EOFError


def _call(function: Any, arguments: tuple[Any, ...], path: Path) -> Any:
    if function == _DICT:
        return {}
    if function == _PARAMETER:
        return arguments[0]
    if function != _TENSOR:
        raise TypeError("a call")
    (dtype, width, offset, size), start, shape, stride, *_ = arguments
    if not all(type(n) is int and n >= 0 for n in (start, *shape, *stride)) or len(shape) > 8:
        raise TypeError("a shape")
    tensor = Stored(path, offset + start * width, dtype, width, shape, stride)
    if max(start + tensor.span, prod(shape)) * width > size:
        raise WeightsError(f"{path}: a tensor of shape {shape} reaches beyond its own numbers")
    return tensor
