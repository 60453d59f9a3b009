"""Dropout whose random numbers cost next to nothing on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HashedDropout(nn.Dropout):
    """nn.Dropout, with a hash of each element's index and one drawn number for its coin.

    A step of zh-3m drops out of 9 million numbers; drawing them takes longer than Muon does, and
    in bf16 as long as all the rest. The hash is C. Wellons' `lowbias32` (2018), in int32,
    compiled and eager to the bit the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        drawn = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=x.device)
        dropped: Tensor = _Drop.apply(x, drawn, self.p)  # type: ignore[no-untyped-call]  # torch
        return dropped


class _Drop(torch.autograd.Function):
    """Keeps the drawn number for its backward, not a coin for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(drawn)
        ctx.p = p
        return _drop(x, drawn, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (drawn,) = ctx.saved_tensors
        # ~~ hides that these are forward's own coins: the compiler would store those instead of
        # making them again, which takes ten times as long.
        return _drop(grad, ~~drawn, ctx.p), None, None


def _drop(x: Tensor, drawn: Tensor, p: float) -> Tensor:
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device) ^ drawn
    bits = _shifted_in(bits, 16) * 0x7FEB352D
    bits = _shifted_in(bits, 15) * (0x846CA68B - 2**32)
    keep = _shifted_in(bits, 16) >= round(p * 2**32) - 2**31
    return torch.where(keep.view(x.shape), x / (1 - p), 0)


def _shifted_in(bits: Tensor, by: int) -> Tensor:
    """bits ^ bits >> by, filled with zeros: int32's own shift would fill with the sign."""
    return bits ^ (bits >> by & (1 << 32 - by) - 1)


def hash_dropout(model: nn.Module) -> None:
    """Puts a HashedDropout in the place of every nn.Dropout of the model."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, HashedDropout(child.p).train(child.training))
