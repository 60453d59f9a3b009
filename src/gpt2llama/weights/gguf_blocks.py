"""ggml's ways of storing weights, and fp32 out of them and into them.

A quantised row is a run of blocks, each a few weights with a scale in fp16. The layouts are those
of ggml-common.h, the rounding that of ggml's reference quantisers. K-quants and their kin are left
to the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtraError, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]  # float32

_CHUNK = 1 << 18  # weights converted at a time: what is in hand fits a cache
_F16_LARGEST = 65504.0
_SIXTEEN = np.dtype("V16")  # bytes moved as one: rows this short cost NumPy more than their bytes


@dataclass(frozen=True)
class Kind:
    """One of ggml's types: `block` weights in `size` bytes; dtype: torch's name of a plain one."""

    id: int
    name: str
    block: int
    size: int
    dtype: str | None = None


_PLAIN = (
    Kind(0, "F32", 1, 4, "float32"),
    Kind(1, "F16", 1, 2, "float16"),
    Kind(24, "I8", 1, 1, "int8"),
    Kind(25, "I16", 1, 2, "int16"),
    Kind(26, "I32", 1, 4, "int32"),
    Kind(27, "I64", 1, 8, "int64"),
    Kind(28, "F64", 1, 8, "float64"),
    Kind(30, "BF16", 1, 2, "bfloat16"),
)
_OWN = (
    Kind(2, "Q4_0", 32, 18),
    Kind(3, "Q4_1", 32, 20),
    Kind(6, "Q5_0", 32, 22),
    Kind(7, "Q5_1", 32, 24),
    Kind(8, "Q8_0", 32, 34),
)
_OF_THE_PACKAGE = (
    Kind(10, "Q2_K", 256, 84),
    Kind(11, "Q3_K", 256, 110),
    Kind(12, "Q4_K", 256, 144),
    Kind(13, "Q5_K", 256, 176),
    Kind(14, "Q6_K", 256, 210),
    Kind(16, "IQ2_XXS", 256, 66),
    Kind(17, "IQ2_XS", 256, 74),
    Kind(18, "IQ3_XXS", 256, 98),
    Kind(19, "IQ1_S", 256, 50),
    Kind(20, "IQ4_NL", 32, 18),
    Kind(21, "IQ3_S", 256, 110),
    Kind(22, "IQ2_S", 256, 82),
    Kind(23, "IQ4_XS", 256, 136),
    Kind(29, "IQ1_M", 256, 56),
    Kind(34, "TQ1_0", 256, 54),
    Kind(35, "TQ2_0", 256, 66),
    Kind(39, "MXFP4", 32, 17),
)
KINDS = {kind.id: kind for kind in (*_PLAIN, *_OWN, *_OF_THE_PACKAGE)}
BY_NAME = {kind.name: kind for kind in KINDS.values()}


def decode(kind: Kind, file: BinaryIO, count: int) -> Floats | None:
    """The file's next `count` weights of a kind that is not plain, flat; None if it ends before.

    Raises MissingExtraError for a kind that needs the `gguf` package.
    """
    out = np.empty((count // kind.block, kind.block), np.float32)
    step = _CHUNK // kind.block
    for part in (out[i : i + step] for i in range(0, len(out), step)):
        raw = read_bytes(file, len(part) * kind.size)
        if raw is None:
            return None
        blocks = raw.reshape(-1, kind.size)
        if kind in _OWN:
            _decode_blocks(kind.name, blocks, part)
        else:
            part[:] = _quants().dequantize(blocks.reshape(1, -1), kind.id).reshape(part.shape)
    return out.reshape(-1)


def read_bytes(file: BinaryIO, size: int) -> Bytes | None:
    """The next `size`; None if the file ends before. (numpy.fromfile hides a Ctrl-C.)"""
    raw = np.empty(size, np.uint8)
    got = file.readinto(raw.data)  # type: ignore[attr-defined]  # BinaryIO's lacks it
    return raw if got == size else None


def encode(kind: Kind, tensor: Tensor, name: str) -> Iterator[Bytes]:
    """The bytes of a tensor, some rows at a time; `name` is for the error.

    Raises WeightsError for a weight that fp16, of which the scales are made too, cannot hold.
    """
    import torch

    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    for part in torch.split(rows, max(_CHUNK // rows.shape[1], 1)):
        if kind.name not in ("F32", "BF16") and not part.abs().max() <= _F16_LARGEST:
            raise WeightsError(
                f"{name} has a weight that is not a number or beyond {_F16_LARGEST:g}, the "
                f"largest of {kind.name}; write it as F32 or BF16"
            )
        if kind.dtype is not None:
            plain = part.to("cpu", getattr(torch, kind.dtype)).contiguous()
            yield plain.view(torch.uint8).numpy().reshape(-1)
        else:
            blocks = part.to("cpu", torch.float32).reshape(-1, kind.block).numpy()
            yield _ENCODERS[kind.name](blocks).reshape(-1)


def split_blocks(name: str, blocks: Bytes) -> list[NDArray[Any]]:
    """Of n blocks of Q8_0, Q4_0 or Q4_1 the codes (n, 32), int8 or uint8 0..15, and in fp16 the
    scales (n, 1) and, of Q4_1 alone, the least weights (n, 1)."""
    codes = blocks[:, -16:]
    q = blocks[:, 2:].view(np.int8) if name == "Q8_0" else np.hstack([codes & 15, codes >> 4])
    halves = (blocks[:, at : at + 2] for at in ((0, 2) if name == "Q4_1" else (0,)))
    return [np.ascontiguousarray(q), *(np.ascontiguousarray(h).view(np.float16) for h in halves)]


def _decode_blocks(name: str, blocks: Bytes, out: Floats) -> None:
    """A block: scale, [least weight (_1),] [fifth bits (Q5),] codes; weight = scale · code + least.

    Without a least weight half the range of the codes is subtracted. All in `out`, a cache's worth.
    """
    if name == "Q8_0":
        out[:] = blocks[:, 2:].view(np.int8)
    else:
        codes = np.ascontiguousarray(blocks[:, -16:].view(_SIXTEEN)).view(np.uint8)
        halves = np.empty((len(blocks), 2), _SIXTEEN)
        halves[:, :1], halves[:, 1:] = (codes & 15).view(_SIXTEEN), (codes >> 4).view(_SIXTEEN)
        out[:] = halves.view(np.uint8)
    if name.startswith("Q5"):
        fifth = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
        out += fifth << 4
    if name in ("Q4_0", "Q5_0"):
        out -= 8 if name == "Q4_0" else 16
    out *= _scale(blocks)
    if name.endswith("_1"):
        out += _scale(blocks[:, 2:])


def _scale(blocks: Bytes) -> Floats:
    """The fp16 number that the blocks begin with, (n, 1)."""
    return blocks[:, :2].view(np.float16).astype(np.float32)


def _encode_q8_0(weights: Floats) -> Bytes:
    """The largest weight becomes ±127; halves are rounded away from zero."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / 127
    sized = np.abs(weights * _inverse(scale))
    whole = np.floor(sized)
    codes = np.copysign(whole + (sized - whole >= 0.5), weights).astype(np.int8)
    return np.hstack([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)])


def _encode_q4_0(weights: Floats) -> Bytes:
    """The weight largest in size becomes -8, whatever its sign."""
    largest = np.abs(weights).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(weights, largest, axis=1) / -8
    codes = np.minimum(weights * _inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.hstack([scale.astype(np.float16).view(np.uint8), packed])


def _inverse(scale: Floats) -> Floats:
    """1 / scale, but 0 for a scale of nothing."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=np.abs(scale) > 1e-38)


_ENCODERS = {"Q8_0": _encode_q8_0, "Q4_0": _encode_q4_0}


def _quants() -> Any:
    try:
        import gguf.quants
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None
    return gguf.quants
