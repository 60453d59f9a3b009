"""What quantising did to a model, matrix by matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..model.transformer import Transformer
from . import awq
from .apply import matrices, quantised_layers
from .linear import QuantLinear


@dataclass(frozen=True, kw_only=True)
class QuantReport:
    """parameters: of the model, a tied table once. bits_per_weight: of all of them, scales, norms
    and the head included. quantised_share: of the parameters. left: the matrices that are not
    quantised, and their inputs. errors: of each quantised one |W' - W| / |W| (Frobenius); not of
    AWQ's, which has other weights than W before it rounds. unscaled: matrices that AWQ only clips,
    as nothing before them can take up their scales.
    """

    parameters: int
    bits_per_weight: float
    quantised_share: float
    left: dict[str, int]
    errors: dict[str, float]
    unscaled: list[str]


def report(model: Transformer, small: Transformer) -> QuantReport:
    """`small`: made of `model` by `quantise`."""
    layers, plain = quantised_layers(small), matrices(model)
    by_awq = [name for name, layer in layers.items() if layer.scheme.method == "awq"]
    measured = {name: layer for name, layer in layers.items() if name not in by_awq}
    parameters = sum(p.numel() for p in model.parameters())
    held: list[Tensor] = list(small.parameters())
    held += [buffer for layer in layers.values() for buffer in layer.buffers()]
    return QuantReport(
        parameters=parameters,
        bits_per_weight=8 * sum(t.nbytes for t in held) / parameters,
        quantised_share=sum(plain[name].weight.numel() for name in layers) / parameters,
        left={name: m.weight.shape[1] for name, m in plain.items() if name not in layers},
        errors={name: _error(plain[name].weight, layer) for name, layer in measured.items()},
        unscaled=awq.unscaled(small, by_awq),
    )


def _error(weight: Tensor, layer: QuantLinear) -> float:
    weight = weight.detach().float()
    return float((layer.dequantise() - weight).norm() / weight.norm().clamp(min=1e-30))
