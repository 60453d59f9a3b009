"""AWQ (Lin et al. 2023): weights that large inputs meet are made larger before they are rounded.

An input's weights are multiplied by s = (mean |x|)^alpha, and what makes the input is divided by
it, which changes nothing until the weights are rounded (§3.2): a norm's weight and bias, v_proj's
rows for o_proj, up_proj's rows for a gated down_proj. Then each group gets the scale with the
least error of its output (their search for a clipping range).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..model.config import ModelConfig
from ..model.transformer import Transformer
from .apply import Calibration, Watch
from .calibration import Inputs, quantise_in_order
from .rtn import Parts, dequantise, round_fitted, round_to_nearest
from .scheme import QuantScheme

ALPHAS = tuple(step / 20 for step in range(20))
_LEAST = 1e-4  # of the mean of |x| over the inputs: s of an input that is hardly ever there


def quantise(
    model: Transformer, scheme: QuantScheme, calibration: Calibration | None, watch: Watch
) -> Transformer:
    """As `apply.quantise`. A table that is the head too is only clipped, for the head's inputs."""
    cfg = model.config

    def round_block(module: Any, inputs: dict[str, Inputs]) -> dict[str, Parts]:
        found = {}
        for names in readers(inputs):
            matrices = [module.get_submodule(name) for name in names]
            source, seen = source_of(module, names[0], cfg), inputs[names[0]]
            if source is not None:
                magnitude = shared_by_heads(seen.magnitude, names[0], cfg)
                s = channel_scales([m.weight for m in matrices], seen.gram, magnitude, scheme)
                fold(source, matrices, s, names[0], cfg)
                seen = Inputs(gram=seen.gram / torch.outer(s, s), magnitude=seen.magnitude / s)
            found[names] = seen
        # Only now: a fold changes rows of matrices that come before.
        return {
            name: round_clipped(module.get_submodule(name).weight, seen.gram, scheme)
            for names, seen in found.items()
            for name in names
        }

    return quantise_in_order(model, scheme, calibration, watch, round_block)


def readers(inputs: dict[str, Inputs]) -> list[tuple[str, ...]]:
    """The names, those that read the same inputs together."""
    by_inputs: dict[int, list[str]] = {}
    for name, seen in inputs.items():
        by_inputs.setdefault(id(seen), []).append(name)
    return [tuple(names) for names in by_inputs.values()]


def source_of(module: Any, name: str, cfg: ModelConfig) -> nn.Module | None:
    """The norm or matrix whose outputs are, channel by channel, the inputs of the matrix `name`
    of a block (or of the model: lm_head) up to a factor; None where a sum or a nonlinearity
    stands between, or another reader (a tied table is looked up as well).
    """
    pre = cfg.norm_placement == "pre"
    if name in ("lm_head", "embed_tokens"):
        return module.norm if pre and name == "lm_head" and not cfg.tie_embeddings else None
    if name == "self_attn.o_proj":
        return module.self_attn.v_proj
    if name == "mlp.down_proj":
        return module.mlp.up_proj if cfg.gated_mlp else None
    norm = module.attn_norm if name.startswith("self_attn.") else module.mlp_norm
    return norm if pre else None


def unscaled(model: Transformer, names: Sequence[str]) -> list[str]:
    """Those of the matrices, named as in the model, that AWQ cannot scale but only clip."""
    found = []
    for name in names:
        at, inside = (".".join(part) for part in (name.split(".")[:2], name.split(".")[2:]))
        block = model.get_submodule(at) if inside else model
        if source_of(block, inside or name, model.config) is None:
            found.append(name)
    return found


def shared_by_heads(magnitude: Tensor, name: str, cfg: ModelConfig) -> Tensor:
    """o_proj's (H·E,), averaged over the heads that share a v_proj row; others as they are."""
    if not name.endswith("o_proj"):
        return magnitude
    heads = magnitude.view(cfg.kv_heads, -1, cfg.head_size)
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def channel_scales(
    weights: Sequence[Tensor], gram: Tensor, magnitude: Tensor, scheme: QuantScheme
) -> Tensor:
    """s (K,), fp64, for matrices (N, K) that share inputs: the alpha with the least sum of their
    relative output errors, tr(D G D^T) / tr(W G W^T) with D = round(W s) / s - W.
    """
    gram = gram.float()
    floor = magnitude.clamp(min=_LEAST * float(magnitude.mean()) or 1.0)
    energies = [output_error(w.float(), gram).clamp(min=1e-30) for w in weights]
    least, best = math.inf, torch.ones_like(magnitude)
    for alpha in ALPHAS:
        s = floor**alpha
        s = s / (s.max() * s.min()).sqrt()
        narrow = s.float()
        error = 0.0
        for w, energy in zip(weights, energies, strict=True):
            w = w.detach().float()
            rounded = dequantise(round_to_nearest(w * narrow, scheme), scheme)
            change = rounded / narrow - w
            error += float(output_error(change, gram) / energy)
        if error < least:
            least, best = error, s
    return best


def fold(
    source: nn.Module, matrices: Sequence[Any], s: Tensor, name: str, cfg: ModelConfig
) -> None:
    """Multiplies the matrices' input channels by s (K,), and divides the source's outputs."""
    outputs = s.view(cfg.kv_heads, -1, cfg.head_size)[:, 0].flatten() if "o_proj" in name else s
    with torch.no_grad():
        for parameter in source.parameters():  # a weight, (N,) or (N, K), and a bias (N,)
            parameter.div_(outputs.view(-1, *[1] * (parameter.dim() - 1)))
        for matrix in matrices:
            matrix.weight.mul_(s)


def round_clipped(weight: Tensor, gram: Tensor, scheme: QuantScheme) -> Parts:
    """weight (N, K) -> as rtn.round_to_nearest; a group's scale is the one, of a few, with the
    least tr(D G D^T), D what it changes in the group and G the Gram matrix of the group's inputs.
    """
    groups = scheme.groups(weight.shape[1])
    size = weight.shape[1] // groups
    own = gram.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).float()

    def error(change: Tensor) -> Tensor:
        moved = (change.transpose(0, 1) @ own).transpose(0, 1)
        return (moved * change).sum(-1, keepdim=True)

    return round_fitted(weight, scheme, error)


def output_error(change: Tensor, gram: Tensor) -> Tensor:
    """tr(D G D^T): the squared change of the outputs, summed over the inputs that G was made of."""
    return ((change @ gram) * change).sum()
