"""QuantLinear and QuantEmbedding: integers in the order in which the decode kernel reads them.

N outputs, K inputs, G = K / group scales a row (1 where a row is one group). The rows lie in tiles
of 16, a vector's 32-bit lanes: `words` (tiles, K·bits/32, 16), int32, holds of each row

    8 bits: byte j of word w is input 4w + j, signed
    4 bits: byte j of word w has input 8w + j in its low half, input 8w + 4 + j in its high half

and `scale`, `minimum` (tiles, G, 16), fp16. Rows past N are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import WeightsError
from .scheme import BLOCK, QuantScheme

TILE = 16


def round_activations(x: Tensor) -> Tensor:
    """x (…, K), K a multiple of 32, as the kernel sees it: rounded to 8 bits in blocks of 32.

    s = amax / 127 of a block in fp32, q = x / s to the nearest (ties to even); q · s in x's dtype.
    """
    blocks = x.float().view(*x.shape[:-1], -1, BLOCK)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    q = (blocks / step).round().where(step > 0, 0)
    return (q * step).flatten(-2).to(x.dtype)


def pack(q: Tensor, bits: int) -> Tensor:
    """Integers (N, K), int8 for 8 bits and uint8 0..15 for 4, to words (N, K·bits/32), int32."""
    if bits == 4:
        low, high = q.view(len(q), -1, 2, 4).unbind(2)
        q = (low | high << 4).flatten(1)
    return q.contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The way back from `pack`."""
    if bits == 8:
        return words.contiguous().view(torch.int8)
    bytes_ = words.contiguous().view(torch.uint8).view(len(words), -1, 1, 4)
    return torch.cat([bytes_ & 15, bytes_ >> 4], 2).flatten(1)


def tile(rows: Tensor) -> Tensor:
    """(N, C) -> (tiles, C, 16); zeros past N."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    return padded.view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()


def untile(tiles: Tensor, rows: int) -> Tensor:
    """The way back from `tile`."""
    return tiles.transpose(1, 2).flatten(0, 1)[:rows]


class QuantLinear(nn.Module):
    """A linear layer (…, K) -> (…, N) over integers; no parameter, nothing to train.

        weight = scale · q                 8 bits, q in -127..127
        weight = scale · (q - 8)           4 bits, q in 0..15
        weight = scale · q + minimum       4 bits with a minimum

    Computes in the dtype of its input, from the dequantised weights: what the kernel computes, but
    for the order of its sums. `.to(dtype)` leaves the buffers as they are.
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor | None
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, scheme: QuantScheme, bias: bool = False
    ) -> None:
        """All zeros, to be loaded. Raises WeightsError where the group does not divide K."""
        super().__init__()
        if in_features % scheme.divisor:
            raise WeightsError(
                f"a matrix of {in_features} inputs cannot be quantised in groups: "
                f"{scheme.divisor} must divide them"
            )
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        tiles = -(-out_features // TILE)
        scales = torch.zeros(tiles, scheme.groups(in_features), TILE, dtype=torch.float16)
        words = torch.zeros(tiles, in_features * scheme.bits // 32, TILE, dtype=torch.int32)
        self.register_buffer("words", words)
        self.register_buffer("scale", scales)
        self.register_buffer("minimum", torch.zeros_like(scales) if scheme.zero else None)
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    @classmethod
    def from_parts(
        cls,
        q: Tensor,
        scale: Tensor,
        minimum: Tensor | None,
        bias: Tensor | None,
        scheme: QuantScheme,
    ) -> Self:
        """q (N, K) int8 or uint8, scale and minimum (N, G), bias (N,) or None.

        Raises WeightsError for parts that do not fit each other or the scheme.
        """
        rows, inputs = q.shape
        groups = (rows, scheme.groups(inputs))
        wanted = torch.int8 if scheme.bits == 8 else torch.uint8
        if q.dtype != wanted or scale.shape != groups or (minimum is not None) != scheme.zero:
            raise WeightsError(
                f"integers {q.dtype} {tuple(q.shape)} and scales {tuple(scale.shape)} do not fit "
                f"{scheme}: it needs {wanted} and {groups}"
            )
        with torch.device("meta"):
            made = cls(inputs, rows, scheme, bias is not None)
        made.words, made.scale = tile(pack(q, scheme.bits)), tile(scale.half())
        made.minimum = None if minimum is None else tile(minimum.half())
        made.bias = None if bias is None else bias.detach().float().clone()
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = round_activations(x) if self.scheme.activations == "int8" else x
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantise().to(x.dtype), bias)

    def integers(self) -> Tensor:
        """(N, K): int8, or uint8 0..15 for 4 bits."""
        return unpack(untile(self.words, self.out_features), self.scheme.bits)

    def dequantise(self) -> Tensor:
        """The weights, fp32 (N, K)."""
        rows = self.out_features
        minimum = None if self.minimum is None else untile(self.minimum, rows)
        return self._weights(untile(self.words, rows), untile(self.scale, rows), minimum)

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of these rows alone: ids (…) -> fp32 (…, K)."""
        at = ids.flatten() // TILE, slice(None), ids.flatten() % TILE
        minimum = None if self.minimum is None else self.minimum[at]
        return self._weights(self.words[at], self.scale[at], minimum).view(*ids.shape, -1)

    def _weights(self, words: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
        q = unpack(words, self.scheme.bits).view(*scale.shape, -1).float()
        scale = scale.float()[..., None]
        if minimum is not None:
            return (scale * q + minimum.float()[..., None]).flatten(1)
        return (scale * (q - 8 if self.scheme.bits == 4 else q)).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves between devices; scales rounded to another dtype would be other weights."""

        def move(buffer: Tensor) -> Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]  # torch's

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"


class QuantEmbedding(nn.Module):
    """ids (…) -> fp32 rows (…, D) of `table`, a QuantLinear of its own or, if tied, the head."""

    def __init__(self, table: QuantLinear) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.rows(ids)
