"""GPTQ (Frantar et al. 2022): what rounding one input's weights costs, the inputs after it repay.

Inputs are rounded in order. With H = X X^T of the inputs not yet rounded, rounding w_i to q costs
(w_i - q)² / [H^-1]_ii at best, when the rest moves by -(w_i - q) [H^-1]_i: / [H^-1]_ii (eq. 2, 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..model.transformer import Transformer
from .apply import Calibration, Watch
from .calibration import Inputs, quantise_in_order
from .rtn import Parts, decode, encode, fit
from .scheme import QuantScheme

DAMPENING = 0.01  # of the mean diagonal of H, added to it (§3.3, step 3)
_COLUMNS = 128  # rounded before the rest is brought up to date (§3.3, step 2)

Scales = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]


def quantise(
    model: Transformer, scheme: QuantScheme, calibration: Calibration | None, watch: Watch
) -> Transformer:
    """As `apply.quantise`. A table that is the head too is rounded for the head's inputs."""

    def round_block(block: nn.Module, inputs: dict[str, Inputs]) -> dict[str, Parts]:
        factors = {id(seen): inverse_factor(seen.gram) for seen in {*inputs.values()}}
        weights: dict[str, Any] = {name: block.get_submodule(name).weight for name in inputs}
        return {
            name: round_matrix(weights[name], factors[id(seen)], scheme)
            for name, seen in inputs.items()
        }

    return quantise_in_order(model, scheme, calibration, watch, round_block)


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper triangular U of (H + dampening)^-1 = U^T U, fp64 (K, K).

    Row i of U over U_ii is what eq. 3 takes from the inverse of H without the inputs before i, and
    U_ii² that inverse's [i, i]. An input that was never seen gets the mean diagonal: its weights
    are rounded to nearest and repay nothing.
    """
    h, diagonal = gram.clone(), gram.diagonal()
    mean = diagonal.mean().clamp(min=1e-30)
    h.diagonal().copy_(torch.where(diagonal > 0, diagonal, mean) + DAMPENING * mean)
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
        return torch.linalg.cholesky(inverse, upper=True)
    except RuntimeError as error:  # torch.linalg.LinAlgError
        reason = "the inputs' Gram matrix has no inverse in fp64; give more calibration text"
        raise WeightsError(reason) from error


def round_in_order(weight: Tensor, factor: Tensor, scheme: QuantScheme, scales: Scales) -> Parts:
    """weight (N, K) -> as rtn.round_to_nearest gives them.

    scales(first, w): scale and minimum, each (N, 1, 1), of the group of inputs w (N, 1, group) that
    begins at input `first`, asked for when all inputs before it are rounded.
    """
    rows, inputs = weight.shape
    size, bits = inputs // scheme.groups(inputs), scheme.bits
    u, w = factor.float(), weight.detach().float().T.contiguous()  # an input's weights: one row
    kept: list[tuple[Tensor, Tensor | None]] = []
    q = torch.empty_like(w)
    for first in range(0, inputs, _COLUMNS):
        last = min(first + _COLUMNS, inputs)
        errors = torch.empty(last - first, rows, device=w.device)
        for i in range(first, last):
            if i % size == 0:
                kept.append(scales(i, w[i : i + size].T.unsqueeze(1)))
                scale, minimum = kept[-1]
                scale = scale.view(rows)
                minimum = None if minimum is None else minimum.view(rows)
            q[i] = encode(w[i], scale, minimum, bits)
            errors[i - first] = (w[i] - decode(q[i], scale, minimum, bits)) / u[i, i]
            w[i + 1 : last] -= torch.outer(u[i, i + 1 : last], errors[i - first])
        w[last:] -= u[first:last, last:].T @ errors
    steps = torch.cat([scale for scale, _ in kept], 1).squeeze(-1).half()
    least = [minimum for _, minimum in kept if minimum is not None]
    integers = q.T.to(torch.int8 if bits == 8 else torch.uint8).contiguous()
    return integers, steps, torch.cat(least, 1).squeeze(-1).half() if least else None


def round_matrix(weight: Tensor, factor: Tensor, scheme: QuantScheme) -> Parts:
    """weight (N, K) -> as rtn.round_to_nearest gives it; `factor`: inverse_factor of its inputs.

    A group's scale is the one, of a few, with the least cost at the group's first input.
    """
    worth = factor.diagonal().float() ** -2

    def scales(first: int, w: Tensor) -> tuple[Tensor, Tensor | None]:
        of_group = worth[first : first + w.shape[-1]]
        return fit(w, scheme, lambda change: (change.square() * of_group).sum(-1, keepdim=True))

    return round_in_order(weight, factor, scheme, scales)
