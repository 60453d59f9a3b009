"""Quantised copies of a model, and the way back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import InputError
from ..model.transformer import Transformer
from .linear import QuantEmbedding, QuantLinear
from .scheme import QuantScheme

METHODS = ("rtn", "gptq", "awq")  # each a module with `quantise`, as below
Calibration = list[Tensor]  # texts as ids, int64 (B, T) each
Watch = Callable[[Iterable[Any], int], Iterable[Any]]  # the work to do, and how much it is


def quantise(
    model: Transformer,
    scheme: QuantScheme,
    calibration: Calibration | None = None,
    watch: Watch = lambda work, count: work,
) -> Transformer:
    """A new model in eval mode, the old one untouched. Norms, biases and positions become fp32.

    A matrix whose inputs the group does not divide stays as it is, in fp32; `report` says which.
    calibration: of GPTQ and AWQ, which choose integers by what flows through the model.
    watch: sees the matrices, or blocks, as they are done, and how many there are.
    Raises WeightsError for weights that are not finite; InputError for a model that is quantised
    already, has adapters or no matrix that fits, and for a lacking calibration.
    """
    refuse_adapters(model)
    if schemes_of(model):
        raise InputError("the model is quantised already; quantise the one it was made from")
    if scheme.method not in METHODS:
        raise InputError(f"method {scheme.method!r} is none of {', '.join(METHODS)}")
    if not targets(model, scheme):
        raise InputError(f"no matrix of the model has inputs that {scheme.divisor} divides")
    method = importlib.import_module(f".{scheme.method}", __package__)
    quantised: Transformer = method.quantise(model, scheme, calibration, watch)
    return quantised


def refuse_adapters(model: nn.Module) -> None:
    """InputError for a model with LoRA modules: what they add would be left out, or rounded."""
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        raise InputError("the model has LoRA adapters; merge them first (finetune.lora.merge)")


def targets(model: Transformer, scheme: QuantScheme) -> dict[str, nn.Linear | nn.Embedding]:
    """The matrices that the scheme quantises, by module name in the model's order.

    A tied table is named once, as lm_head; an untied one is there as embed_tokens as well.
    """
    return {
        name: module
        for name, module in matrices(model).items()
        if module.weight.shape[1] % scheme.divisor == 0
        and (scheme.head or name not in ("embed_tokens", "lm_head"))
    }


def matrices(model: Transformer) -> dict[str, nn.Linear | nn.Embedding]:
    """All that a scheme could quantise, named as `targets` does."""
    left = {"embed_positions", "embed_tokens" if model.config.tie_embeddings else ""}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and name not in left
    }


def swapped(model: Transformer, layers: Mapping[str, QuantLinear]) -> Transformer:
    """A copy of the model with these modules, named as `targets` does, in place of its own."""
    # What deepcopy finds in its memo it takes as the copy: the old matrices are never copied.
    memo = {id(model.get_submodule(name)): module for name, module in _places(model, layers)}
    return deepcopy(model, memo).float().eval().requires_grad_(False)


def insert(model: Transformer, layers: Mapping[str, QuantLinear]) -> None:
    """Puts these modules, named as `targets` does, into the model itself."""
    for name, module in _places(model, layers):
        model.set_submodule(name, module)


def _places(
    model: Transformer, layers: Mapping[str, QuantLinear]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules by their names in the model, where a tied table has two."""
    for name, layer in layers.items():
        yield name, QuantEmbedding(layer) if name == "embed_tokens" else layer
        if name == "lm_head" and model.config.tie_embeddings:
            yield "embed_tokens", QuantEmbedding(layer)


def quantised_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """By module name, as `targets` names them: a tied table once, as lm_head."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantLinear):
            found[name.replace("_orig_mod.", "").removesuffix(".table")] = module
    if found.get("embed_tokens") is found.get("lm_head"):
        found.pop("embed_tokens", None)
    return found


def schemes_of(model: nn.Module) -> dict[str, QuantScheme]:
    """The scheme of each quantised matrix, named as `targets` does; empty for a plain model."""
    return {name: layer.scheme for name, layer in quantised_layers(model).items()}


def set_activations(model: nn.Module, activations: Literal["int8", "float"]) -> None:
    """Whether the quantised layers round their inputs, whatever their weights are."""
    for layer in quantised_layers(model).values():
        layer.scheme = replace(layer.scheme, activations=activations)


def dequantised(model: Transformer) -> Transformer:
    """A plain fp32 copy, with the weights that the integers stand for. A plain model: itself."""
    layers = quantised_layers(model)
    if not layers:
        return model
    memo: dict[int, nn.Module] = {id(layer): _plain(layer) for layer in layers.values()}
    if isinstance(model.embed_tokens, QuantEmbedding):
        table = model.embed_tokens.table
        memo[id(model.embed_tokens)] = nn.Embedding(
            table.out_features, table.in_features, _weight=table.dequantise()
        )
    plain = deepcopy(model, memo)
    if model.config.tie_embeddings:
        plain.lm_head.weight = plain.embed_tokens.weight
    return plain.requires_grad_(False)


def _plain(layer: QuantLinear) -> nn.Linear:
    sizes = layer.in_features, layer.out_features, layer.bias is not None
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, *sizes)  # type: ignore[no-untyped-call]  # torch's
    linear.weight = nn.Parameter(layer.dequantise())
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.clone())
    return linear
