"""AdamW, and Muon for the hidden matrices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..machine import bf16_if_native
from .config import TrainConfig


def make_optimizers(model: nn.Module, cfg: TrainConfig) -> list[Optimizer]:
    """Decay on matrices only; the embeddings and the head always go to AdamW."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in params.items() if p.dim() >= 2}
    hidden = {name: p for name, p in matrices.items() if name.startswith("layers.")}
    optimizers: list[Optimizer] = []
    if cfg.optimizer == "muon" and hidden:
        optimizers.append(Muon(list(hidden.values()), cfg.lr, cfg.weight_decay, cfg.momentum))
        matrices = {name: p for name, p in matrices.items() if name not in hidden}
    groups = [
        {"params": list(matrices.values()), "weight_decay": cfg.weight_decay},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        betas = (cfg.beta1, cfg.beta2)
        optimizers.append(AdamW(groups, lr=cfg.lr, betas=betas, fused=True))
    return optimizers


class Muon(Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz steps (Jordan et al. 2024).

    Equal to `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, whose updates have AdamW's size so
    that one learning rate serves both, but for two things that make it usable on a CPU: matrices
    of one shape are multiplied as a batch, and in bf16 only where that is fast.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closure is unused
        for group in self.param_groups:
            momentum, params = group["momentum"], [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov
            by_shape = defaultdict(list)
            for p, update in zip(params, updates, strict=True):
                wide = update if update.shape[0] <= update.shape[1] else update.T
                by_shape[wide.shape].append((p, wide))
            for shape, members in by_shape.items():
                rate = 0.2 * max(shape) ** 0.5 * group["lr"]
                dtype = self.dtype or bf16_if_native(members[0][0].device)
                stacked = torch.stack([wide for _, wide in members]).to(dtype)
                for (p, _), turned in zip(members, orthogonalise(stacked), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(turned if turned.shape == p.shape else turned.T, alpha=-rate)


def orthogonalise(x: Tensor) -> Tensor:
    """(N, r, c) with r <= c -> about the nearest matrices with orthonormal rows."""
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x,
                          beta=3.4445)  # fmt: skip
    return x
