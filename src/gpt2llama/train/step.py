"""One optimiser step: forward, backward, clip, update. Compiled and in bf16 where that pays."""

from __future__ import annotations

import copy
import ctypes
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import IGNORED, Batch
from ..errors import TrainingError
from ..machine import bf16_if_native
from .config import TrainConfig
from .dropout import hash_dropout
from .optim import make_optimizers

if TYPE_CHECKING:
    from ..model.transformer import Transformer

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


# The loss of a batch, summed over what its `count` counts.
Objective = Callable[["Transformer", Batch], Tensor]


def summed_loss(
    model: Transformer,
    ids: Tensor,
    targets: Tensor,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    learned: Tensor | None = None,
) -> Tensor:
    """Cross entropy in nats, summed over the targets that are not IGNORED.

    learned: where those are, counted through the flattened batch, so that no others get logits or
    the last MLP: in tuning most are masked, and the head is a third of a small model's work.
    """
    hidden = model.hidden(ids, attention_mask=documents, positions=positions, places=learned)
    targets = targets.flatten() if learned is None else targets.flatten()[learned]
    logits = model.logits(hidden.flatten(0, -2)).float()
    if not torch.compiler.is_compiling():
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    # The same in a form that compiles to faster code: its backward compares int32, not int64.
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=ids.device)
    picked = logits.where(vocabulary == targets.int()[:, None], 0).sum(1)
    nats = logits.logsumexp(1) - picked
    return nats.where(targets != IGNORED, 0).sum()


class NothingToLearn(TrainingError):
    """No batch of a step has a target."""


class Step:
    """`step(batches, lr)` learns from micro-batches together, weighted by their valid targets.

    objective: cross entropy of the targets unless given; only that is compiled.

    `model` keeps fp32 weights: the optimiser's, the checkpoint's. In bf16 a copy of it computes;
    its gradients are added up in fp32 and the new weights rounded into it after each update.
    """

    def __init__(
        self,
        model: Transformer,
        cfg: TrainConfig,
        compiled: bool,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.cfg = model, cfg
        self.device = next(model.parameters()).device
        self.params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(model, cfg)
        dtype = computing_dtype(cfg, self.device)
        if self.device.type == "cpu":
            hash_dropout(model)
            keep_freed_memory()
        self.compute = model
        if dtype != torch.float32:
            self.compute = copy.deepcopy(model).to(dtype)
        self.compute_params: list[Tensor] = [
            p for p in self.compute.parameters() if p.requires_grad
        ]
        # Dropout's one number from PyTorch's own generator, so that it is the same as eager's.
        random: dict[str, bool | str | int | Callable[..., Any]] = {"fallback_random": True}
        loss = torch.compile(summed_loss, options=random) if compiled else summed_loss

        def next_token(model: Transformer, batch: Batch) -> Tensor:
            if compiled and batch.learned is not None:  # else a recompilation for each number
                torch._dynamo.maybe_mark_dynamic(batch.learned, 0)
            parts = batch.documents, batch.positions, batch.learned
            return loss(model, batch.ids, batch.targets, *parts)

        self.objective = objective or next_token
        cpu = self.device.type == "cpu"
        self.summing = _in_order if compiled and cpu else nullcontext

    def __call__(self, batches: Sequence[Batch], lr: float) -> tuple[float, float]:
        """Mean nats per valid target and the gradient's norm before clipping.

        Raises TrainingError, with the weights as they were, if either is not finite;
        NothingToLearn if there is no target.
        """
        valid = sum(batch.count for batch in batches)
        if valid == 0:
            raise NothingToLearn("the batch has no target to learn: every label is masked")
        self.compute.train()
        total = torch.zeros((), device=self.device)
        with self.summing():
            for batch in batches:
                loss = self.objective(self.compute, batch.to(self.device)) / valid
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                total += loss.detach()
                if self.compute is not self.model:
                    self._collect_gradients()
        limit = self.cfg.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.params, limit, foreach=True).item()
        if not math.isfinite(total.item()) or not math.isfinite(norm):
            raise TrainingError(self._first_bad_tensor() or f"the loss is {total.item()}")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.refresh()
        return total.item(), norm

    def refresh(self) -> None:
        """Rounds the weights into the computing copy; call it after changing them from outside."""
        if self.compute is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(self.compute_params, self.params)

    def _collect_gradients(self) -> None:
        for p, c in zip(self.params, self.compute_params, strict=True):
            if c.grad is not None:
                p.grad = c.grad.float() if p.grad is None else p.grad.add_(c.grad)
                c.grad = None

    def _first_bad_tensor(self) -> str | None:
        named = list(self.model.named_parameters())
        suspects = [(f"weight {name}", p.data) for name, p in named]
        suspects += [(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None]
        bad = (what for what, tensor in suspects if not tensor.isfinite().all())
        return next((f"{what} is not finite" for what in bad), None)


@contextmanager
def _in_order() -> Iterator[None]:
    """The compiler's backward of an embedding adds a token's gradients up in whatever order the
    threads come: asked to be deterministic, it leaves that to PyTorch's own."""
    how: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), how.fill_uninitialized_memory
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    how.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        how.fill_uninitialized_memory = fill


def computing_dtype(cfg: TrainConfig, device: torch.device) -> torch.dtype:
    """Of the forward and backward pass; the weights are fp32 throughout."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return bf16_if_native(device) if cfg.dtype == "auto" else named[cfg.dtype]


def keep_freed_memory() -> None:
    """Asks glibc not to give freed memory back to the system, which a step wants again at once.

    Otherwise each step of zh-3m waits for the system to clear some 10,000 pages anew.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no mallopt
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler, which its CPU code needs."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
