"""Texts for the methods that look at what flows through a model, and the looking."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, InputError, WeightsError
from ..model.transformer import Transformer
from .apply import Calibration, Watch, insert, swapped, targets
from .linear import QuantLinear, round_activations
from .rtn import Parts, round_to_nearest
from .scheme import BLOCK, QuantScheme

SHARED = (  # matrices of a block that read the same inputs
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_AT_ONCE = 4096  # tokens of a batch


def windows(ids: Sequence[int], seq_len: int, count: int = 128, seed: int = 0) -> list[Tensor]:
    """`count` stretches of seq_len tokens of a text, at places drawn by `seed`, in batches (B, T).

    A text that holds fewer is cut side by side, without its last part. Raises DataError for one
    shorter than a window.
    """
    if len(ids) < seq_len:
        raise DataError(
            f"the calibration text has {len(ids)} tokens and a window {seq_len}; give a longer one"
        )
    whole = torch.tensor(ids)
    starts = torch.arange(0, len(ids) - seq_len + 1, seq_len)
    if len(starts) > count:
        rng = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(ids) - seq_len + 1, (count,), generator=rng)
    rows = torch.stack([whole[start : start + seq_len] for start in starts.tolist()])
    return list(torch.split(rows, max(1, _AT_ONCE // seq_len)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What calibration saw of the inputs x (K,) of a matrix, rounded where the scheme rounds them.

    gram: the sum of x x^T, fp64 (K, K). magnitude: the mean of |x|, fp64 (K,).
    """

    gram: Tensor
    magnitude: Tensor


def quantise_in_order(
    model: Transformer,
    scheme: QuantScheme,
    calibration: Calibration | None,
    watch: Watch,
    round_block: Callable[[nn.Module, dict[str, Inputs]], dict[str, Parts]],
) -> Transformer:
    """A copy whose matrices `round_block` rounds, block by block, in the order of `blocks`.

    An embedding table of its own is rounded to nearest: a lookup weighs all its columns alike.
    Raises as `apply.quantise` does.
    """
    work = swapped(model, {})
    wanted = targets(work, scheme).keys()
    if "embed_tokens" in wanted:
        parts = round_to_nearest(work.embed_tokens.weight, scheme)
        insert(work, {"embed_tokens": QuantLinear.from_parts(*parts, None, scheme)})
    for at, module, seen in watch(blocks(work, calibration, scheme), len(work.layers) + 1):
        path = f"{at}." if at else ""
        seen = {name: inputs for name, inputs in seen.items() if path + name in wanted}
        try:
            rounded = round_block(module, seen)
        except WeightsError as error:
            raise WeightsError(f"{at or 'lm_head'}: {error}") from error
        for name, parts in rounded.items():
            bias: Any = module.get_submodule(name).bias
            insert(work, {path + name: QuantLinear.from_parts(*parts, bias, scheme)})
    return work


class Gatherer:
    """Sums up the inputs of one matrix, a batch (…, K) at a time."""

    def __init__(self, scheme: QuantScheme) -> None:
        self._rounded = scheme.activations == "int8"
        self._gram: Any = 0.0
        self._total: Any = 0.0
        self._count = 0

    def add(self, x: Tensor) -> None:
        x = x.detach().flatten(0, -2)
        if self._rounded and x.shape[-1] % BLOCK == 0:
            x = round_activations(x)
        self._gram = self._gram + (x.T @ x).double()
        self._total = self._total + x.abs().sum(0, dtype=torch.float64)
        self._count += len(x)

    def hook(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """A forward pre-hook of the matrix."""
        self.add(arguments[0])

    def inputs(self) -> Inputs:
        """Raises WeightsError for inputs that are not finite."""
        if not self._gram.isfinite().all():
            raise WeightsError(
                "the activations of the calibration are not finite: the weights hold NaN or "
                "infinity, or are too large"
            )
        return Inputs(gram=self._gram, magnitude=self._total / self._count)


def blocks(
    model: Transformer, calibration: Sequence[Tensor] | None, scheme: QuantScheme
) -> Iterator[tuple[str, nn.Module, dict[str, Inputs]]]:
    """Each block in turn: its name in the model, itself, the inputs of its matrices (named within
    the block); and, named "", the model itself with those of lm_head: at the end, or at the
    beginning where it is the embedding table too.

    A block that is changed before the next is asked for makes the next one's inputs: later blocks
    see, and can make up for, the rounding of earlier ones (as in Frantar et al.'s code).
    Raises InputError for lacking texts or ids that the model does not have; WeightsError for
    activations that are not finite.
    """
    texts, tied = _checked(model, calibration), model.config.tie_embeddings
    if tied:
        yield "", model, {"lm_head": _head_inputs(model, texts, scheme)}
    with torch.no_grad():
        reached = [_arguments(model.layers[0], model.hidden, ids) for ids in texts]
    for i, block in enumerate(model.layers):
        yield f"layers.{i}", block, _block_inputs(block, reached, scheme)
        if i + 1 < len(model.layers):
            with torch.no_grad():
                reached = [(block(*arguments), *arguments[1:]) for arguments in reached]
    if not tied:
        yield "", model, {"lm_head": _head_inputs(model, texts, scheme)}


class _Reached(Exception):
    """Ends a forward pass at the module that was looked for."""


def _arguments(module: nn.Module, call: Callable[[Tensor], Any], ids: Tensor) -> tuple[Any, ...]:
    """What call(ids) hands to the module; nothing after it is computed."""
    found: list[tuple[Any, ...]] = []

    def stop(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments)
        raise _Reached

    with module.register_forward_pre_hook(stop), contextlib.suppress(_Reached):
        call(ids)
    return found[0]


def _head_inputs(model: Transformer, texts: Sequence[Tensor], scheme: QuantScheme) -> Inputs:
    gatherer = Gatherer(scheme)
    with torch.no_grad():
        for ids in texts:
            gatherer.add(model.hidden(ids))
    return gatherer.inputs()


def _block_inputs(
    block: nn.Module, reached: list[tuple[Any, ...]], scheme: QuantScheme
) -> dict[str, Inputs]:
    """By name within the block; matrices that read the same inputs have the same Inputs."""
    inside = dict(block.named_modules())
    sites = [[name for name in names if name in inside] for names in SHARED]
    gatherers = [Gatherer(scheme) for _ in sites]
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for names, gatherer in zip(sites, gatherers, strict=True):
            first = inside[names[0]]
            hooks.enter_context(first.register_forward_pre_hook(gatherer.hook))
        for arguments in reached:
            block(*arguments)
    seen = [gatherer.inputs() for gatherer in gatherers]
    return {name: inputs for names, inputs in zip(sites, seen, strict=True) for name in names}


def _checked(model: Transformer, calibration: Sequence[Tensor] | None) -> Sequence[Tensor]:
    if not calibration:
        raise InputError("the method needs calibration: texts as ids, see quant.calibration")
    size = model.config.vocab_size
    for ids in calibration:
        if not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise InputError(f"calibration has ids outside the model's vocabulary of {size}")
    return calibration
