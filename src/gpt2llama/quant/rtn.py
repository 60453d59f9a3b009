"""Rounding to nearest: each group's scale is the one, of a few, with the least squared error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import WeightsError
from ..model.transformer import Transformer
from .apply import Calibration, Watch, swapped, targets
from .linear import QuantLinear
from .scheme import QuantScheme

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the range: clipping the largest can fit the rest better
_AT_ONCE = 1 << 18  # weights: what is in hand fits a cache

Parts = tuple[Tensor, Tensor, Tensor | None]
Error = Callable[[Tensor], Tensor]  # W' - W of groups (N, G, group) -> what it costs, (N, G, 1)


def quantise(
    model: Transformer, scheme: QuantScheme, calibration: Calibration | None, watch: Watch
) -> Transformer:
    """As `apply.quantise`; needs no calibration."""
    layers = {}
    matrices = targets(model, scheme)
    for name, module in watch(matrices.items(), len(matrices)):
        try:
            parts = round_to_nearest(module.weight, scheme)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from error
        layers[name] = QuantLinear.from_parts(*parts, getattr(module, "bias", None), scheme)
    return swapped(model, layers)


def round_to_nearest(weight: Tensor, scheme: QuantScheme) -> Parts:
    """weight (N, K) -> q (N, K), int8 or uint8; scale (N, G), fp16; minimum (N, G), fp16 or None.

    Raises WeightsError for a weight that is not finite or whose scale fp16 cannot hold.
    """
    return round_fitted(weight, scheme, squared)


def round_fitted(weight: Tensor, scheme: QuantScheme, error: Error) -> Parts:
    """As round_to_nearest, with the scales that `fit` finds for another error."""
    blocks = torch.split(weight.detach(), max(1, _AT_ONCE // weight.shape[1]))
    parts = [_round(rows, scheme, error) for rows in blocks]
    q, scale, minimum = zip(*parts, strict=True)
    return torch.cat(q), torch.cat(scale), torch.cat(minimum) if scheme.zero else None


def _round(rows: Tensor, scheme: QuantScheme, error: Error) -> Parts:
    w = rows.float().view(len(rows), scheme.groups(rows.shape[1]), -1)
    scale, minimum = fit(w, scheme, error)
    q = encode(w, scale, minimum, scheme.bits).to(torch.int8 if scheme.bits == 8 else torch.uint8)
    halves = None if minimum is None else minimum.squeeze(-1).half()
    return q.flatten(1), scale.squeeze(-1).half(), halves


def encode(w: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """The nearest integers for given scales: w (…, group), scale and minimum (…, 1), fp32.

    A scale of 0 has the integer whose weight is nearest 0.
    """
    steps = ((w if minimum is None else w - minimum) / scale).where(scale != 0, 0).round()
    if bits == 8:
        return steps.clamp(-127, 127)
    return steps.clamp(0, 15) if minimum is not None else (steps + 8).clamp(0, 15)


def decode(q: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """The weights of `encode`'s integers, in fp32."""
    if minimum is not None:
        return q * scale + minimum
    return (q - 8 if bits == 4 else q) * scale


def dequantise(parts: Parts, scheme: QuantScheme) -> Tensor:
    """The weights, fp32 (N, K), that the parts stand for."""
    q, scale, minimum = parts
    least = None if minimum is None else minimum.float().unsqueeze(-1)
    integers = q.float().view(*scale.shape, -1)
    return decode(integers, scale.float().unsqueeze(-1), least, scheme.bits).flatten(1)


def fit(w: Tensor, scheme: QuantScheme, error: Error) -> tuple[Tensor, Tensor | None]:
    """The scale and minimum, each (N, G, 1), of the groups w (N, G, group): of a few, those with
    the least error. All fp32.
    """
    (scale, minimum), *others = _candidates(w, scheme)
    least = error(_change(w, scale, minimum, scheme.bits))
    for other, other_minimum in others:
        found = error(_change(w, other, other_minimum, scheme.bits))
        better = found < least
        least, scale = found.where(better, least), other.where(better, scale)
        if minimum is not None and other_minimum is not None:
            minimum = other_minimum.where(better, minimum)
    return scale, minimum


def squared(change: Tensor) -> Tensor:
    """The error for want of knowing the inputs."""
    return change.square().sum(-1, keepdim=True)


def _change(w: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    return decode(encode(w, scale, minimum, bits), scale, minimum, bits).sub_(w)


def _candidates(w: Tensor, scheme: QuantScheme) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales and minimums worth a try for the groups (N, G, group), each (N, G, 1)."""
    low, high = w.aminmax(dim=-1, keepdim=True)
    if scheme.bits == 8:
        yield _fp16(torch.maximum(-low, high) / 127), None
    elif scheme.zero:
        for shrink in _SHRINK:
            scale = _fp16(shrink * (high - low) / 15)
            yield scale, _fp16((low + high - 15 * scale) / 2)
    else:
        largest = torch.where(-low > high, low, high)
        for shrink in _SHRINK:
            yield _fp16(shrink * largest / -8), None  # llama.cpp's Q4_0: all 16 levels
            yield _fp16(shrink * largest / 7), None


def _fp16(scale: Tensor) -> Tensor:
    """Rounded to fp16, kept in fp32: integers are chosen for the scale that is stored."""
    rounded = scale.half().float()
    if not rounded.isfinite().all():
        raise WeightsError("a weight is not finite, or too large for a scale in fp16")
    return rounded
