"""LoRA (Hu et al. 2021): beside a frozen matrix a product of two thin ones, which alone learns."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ..errors import CheckedFields, ConfigError, InputError, did_you_mean
from ..quant.apply import schemes_of
from ..train.trainer import Store, WholeModel
from ..weights import lasting_name, peft
from ..weights.files import write_tokenizer

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

ALL = "all-linear"
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedFields):
    """The adapted matrices compute W x + alpha / rank · B A dropout(x).

    modules: names such as "q_proj v_proj", with spaces or commas between, or "all-linear": every
    linear layer but the head.
    """

    KIND: ClassVar = "lora"
    ZERO_ALLOWED: ClassVar = ("dropout",)

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.0
    modules: str = ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout >= 1:
            raise ConfigError(f"dropout must be below 1 (got {self.dropout})")
        if not self.names:
            raise ConfigError(f"modules must name one of {', '.join(_LINEAR)}, or be {ALL}")
        for name in self.names:
            if name not in _LINEAR:
                known = ", ".join((*_LINEAR, ALL))
                raise ConfigError(
                    f"modules: {name!r} must be one of {known}{did_you_mean(name, (*_LINEAR, ALL))}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The leaf names, each once."""
        if self.modules == ALL:
            return _LINEAR[:-1]
        return tuple(dict.fromkeys(re.findall(r"[^\s,]+", self.modules)))


class LoraLinear(nn.Module):
    """x (…, inputs) -> base(x) + alpha / rank · B(A(dropout(x))), (…, outputs).

    A is drawn as PEFT does, uniformly within 1/√inputs, and B is zero: at first nothing changes.
    Both are at least fp32, whatever the base is.
    """

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, cfg.alpha / cfg.rank, nn.Dropout(cfg.dropout)
        device, dtype = base.weight.device, torch.promote_types(base.weight.dtype, torch.float32)
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.lora_A = linear(base.in_features, cfg.rank)
        self.lora_B = linear(cfg.rank, base.out_features)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype)))
        return (self.base(x) + self.lora_B(low * self.scale)).to(x.dtype)

    def merged(self) -> nn.Linear:
        """The base, which holds the sum now; its old weight, which others may share, stays."""
        weight = self.base.weight
        summed = peft.add(weight, self.lora_A.weight, self.lora_B.weight, self.scale)
        self.base.weight = nn.Parameter(summed.to(weight.dtype), requires_grad=False)
        return self.base


def add_lora(model: Transformer, cfg: LoraConfig) -> None:
    """Puts adapters beside the matrices that `cfg` names and freezes all else, in place.

    Their numbers depend on torch.manual_seed alone. Raises ConfigError for modules that the model
    lacks and a rank beyond all of its matrices; InputError for a model that is quantised or has
    adapters already.
    """
    if schemes_of(model):
        raise InputError(
            "the model is quantised and cannot be adapted; adapt the one that it was made from"
        )
    if adapters(model):
        raise InputError("the model has adapters already; merge them first")
    linear = {n: module for n, module in model.named_modules() if type(module) is nn.Linear}
    chosen = {n: module for n, module in linear.items() if _leaf(n) in cfg.names}
    lacking = [name for name in cfg.names if name not in map(_leaf, linear)]
    if cfg.modules != ALL and lacking:
        has = ", ".join(dict.fromkeys(map(_leaf, linear)))
        raise ConfigError(f"modules: the model has no {lacking[0]}; it has {has}")
    most = max(min(module.weight.shape) for module in chosen.values())
    if cfg.rank > most:
        raise ConfigError(f"rank {cfg.rank} is above {most}, the rank of the matrices themselves")
    model.requires_grad_(False)
    for name, module in chosen.items():
        model.set_submodule(name, LoraLinear(module, cfg).train(module.training))


def adapt(model: Transformer, base: str | Path, cfg: LoraConfig | None, seed: int) -> Store:
    """Makes the model ready to learn, in place: by adapters that the seed draws, or, without cfg,
    as a whole. Returns what a checkpoint then holds. base: the model, as `load` takes it.
    """
    if cfg is None:
        model.requires_grad_(True)
        return WholeModel()
    torch.manual_seed(seed)
    add_lora(model, cfg)
    return AdapterStore(base, cfg)


def adapters(model: nn.Module) -> dict[str, LoraLinear]:
    """By module name, in the model's order."""
    return {n: module for n, module in model.named_modules() if isinstance(module, LoraLinear)}


@torch.no_grad()
def merge(model: Transformer) -> list[str]:
    """Adds the adapters to their matrices, in place: a plain model again, to train as a whole.

    Sums are fp32, then rounded to the weight's dtype. An adapted head that was tied is so no
    longer. Returns what a user may want to know, a line each.
    """
    notes = _merge(model)
    model.requires_grad_(True)
    return notes


@torch.no_grad()
def merged(model: Transformer) -> Transformer:
    """A plain copy in eval mode for generating meanwhile; what is not adapted it shares."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    copy = deepcopy(model, shared).eval()
    _merge(copy)
    return copy


def without(model: Transformer) -> Transformer:
    """The model that the adapters stand beside, in eval mode: it shares all weights with it."""
    shared: dict[int, object] = {id(p): p for p in model.parameters()}
    plain = deepcopy(model, shared).eval()
    for name, layer in adapters(plain).items():
        plain.set_submodule(name, layer.base)
    return plain


def _merge(model: Transformer) -> list[str]:
    found = adapters(model)
    for name, layer in found.items():
        model.set_submodule(name, layer.merged())
    if "lm_head" not in found or not model.config.tie_embeddings:
        return []
    model.config = model.config.replace(tie_embeddings=False)
    return ["the head is adapted and the embedding is not: they are no longer tied"]


class AdapterStore:
    """A checkpoint of the adapters alone, a folder in PEFT's format; a train.trainer.Store.

    base: their model, as `load` takes it. `load` of the folder gives that with them merged.
    """

    def __init__(self, base: str | Path, cfg: LoraConfig) -> None:
        self.base, self.cfg = lasting_name(base), cfg

    def write(self, folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
        cfg = self.cfg
        peft.write_adapter(
            folder,
            _pairs(model),
            model.config,
            rank=cfg.rank,
            alpha=cfg.alpha,
            dropout=cfg.dropout,
            base=self.base,
        )
        if tokenizer is not None:
            write_tokenizer(folder, tokenizer)

    @torch.no_grad()
    def read(self, folder: Path, model: Transformer) -> None:
        """Raises WeightsError for adapters that are not the model's."""
        own = _pairs(model)
        for name, found in peft.read_pairs(folder, own, model.config).items():
            for mine, value in zip(own[name], found, strict=True):
                mine.copy_(value)


def _pairs(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (layer.lora_A.weight.detach(), layer.lora_B.weight.detach())
        for name, layer in adapters(model).items()
    }


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
