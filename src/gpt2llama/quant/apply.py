"""A quantised copy of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

from torch import Tensor, nn

from ..errors import WeightsError
from ..model.transformer import Transformer
from .linear import QuantEmbedding, QuantLinear
from .rtn import round_to_nearest
from .scheme import QuantScheme

Calibration = list[Tensor]  # texts as ids, int64 (B, T) each


def quantise(
    model: Transformer, scheme: QuantScheme, calibration: Calibration | None = None
) -> Transformer:
    """A new model in eval mode, the old one untouched. Norms, biases and positions become fp32.

    A matrix whose inputs the group does not divide stays as it is, in fp32; `report` says which.
    calibration: of GPTQ and AWQ, which choose integers by what flows through the model.
    Raises WeightsError for weights that are not finite, InputError for a lacking calibration.
    """
    return METHODS[scheme.method](model, scheme, calibration)


def targets(model: Transformer, scheme: QuantScheme) -> dict[str, nn.Linear | nn.Embedding]:
    """The matrices that the scheme quantises, by module name in the model's order.

    A tied table is named once, as lm_head; an untied one is there as embed_tokens as well.
    """
    tied = model.config.tie_embeddings
    found: dict[str, nn.Linear | nn.Embedding] = {}
    for name, module in model.named_modules():
        whole = name in ("embed_tokens", "lm_head")
        if not isinstance(module, nn.Linear | nn.Embedding) or name == "embed_positions":
            continue
        if (whole and not scheme.head) or (name == "embed_tokens" and tied):
            continue
        if module.weight.shape[1] % scheme.divisor == 0:
            found[name] = module
    return found


def swapped(model: Transformer, layers: Mapping[str, QuantLinear]) -> Transformer:
    """A copy of the model with these modules, named as `targets` does, in place of its own."""
    new: dict[str, nn.Module] = dict(layers)
    table = layers.get("lm_head" if model.config.tie_embeddings else "embed_tokens")
    if table is not None:
        new["embed_tokens"] = QuantEmbedding(table)
    # What deepcopy finds in its memo it takes as the copy: the old matrices are never copied.
    copy = deepcopy(model, {id(model.get_submodule(name)): module for name, module in new.items()})
    return copy.float().eval().requires_grad_(False)


def _round_all(
    model: Transformer, scheme: QuantScheme, calibration: Calibration | None
) -> Transformer:
    layers = {}
    for name, module in targets(model, scheme).items():
        try:
            parts = round_to_nearest(module.weight, scheme)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from error
        layers[name] = QuantLinear.from_parts(*parts, getattr(module, "bias", None), scheme)
    return swapped(model, layers)


METHODS: dict[str, Callable[[Transformer, QuantScheme, Calibration | None], Transformer]] = {
    "rtn": _round_all,
}
