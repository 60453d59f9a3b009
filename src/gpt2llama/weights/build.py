"""From an opened file to a model, and back to tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InputError, WeightsError
from ..memory import LargePages
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..quant.apply import insert, matrices
from ..quant.linear import QuantLinear
from ..quant.scheme import QuantScheme
from .opened import FLOATS, Opened

State = dict[str, Tensor]
_TABLE, _OWN_TABLE = "embed_tokens.", "embed_tokens.table."  # without and with its module


def state_of(model: Transformer) -> State:
    """The model's tensors by name; no trace of torch.compile in the names.

    A tied table once: as embed_tokens.weight, or quantised as lm_head.words and so on.
    """
    state = {name.replace("_orig_mod.", ""): t for name, t in model.state_dict().items()}
    state = {name.replace(_OWN_TABLE, _TABLE): t for name, t in state.items()}
    if not model.config.tie_embeddings:
        return state
    quantised = "lm_head.words" in state
    kind, double = ("words", "embed_tokens.") if quantised else ("weight", "lm_head.")
    head, table = state[f"lm_head.{kind}"], state[f"embed_tokens.{kind}"]
    if head.data_ptr() != table.data_ptr():
        raise WeightsError(
            f"lm_head.{kind} is no longer embed_tokens.{kind}, but the config ties them; "
            "set model.config = model.config.replace(tie_embeddings=False) to keep both"
        )
    return {name: t for name, t in state.items() if not name.startswith(double)}


def assemble(
    opened: Opened,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    keep: bool = False,
) -> Transformer:
    """The model holding the file's tensors: nothing is initialised, little is copied, and no more
    than one tensor at a time is held twice, by each of the readers.

    dtype None: the file's; fp32 for a quantised model. keep: blocks of integers stay integers.
    Raises WeightsError for a tensor that is missing, left over, or of a wrong shape or kind.
    """
    if dtype is not None and _name(dtype) not in FLOATS:
        raise InputError(f"dtype must be a torch float of 16, 32 or 64 bits (got {dtype})")
    opened = settle_head(opened)
    model, cfg, quantised = check(opened), opened.config, keep or bool(opened.schemes)
    if quantised and dtype not in (None, torch.float32):
        raise InputError(f"a quantised model computes in float32; leave out dtype (here {dtype})")
    dtype = dtype or (torch.float32 if quantised else widest(opened))
    as_they_are = {name: t.dtype for name, t in state_of(model).items() if opened.schemes}
    kept: dict[str, QuantLinear] = {}
    on_cpu = torch.device(device).type == "cpu" and not keep
    pages = LargePages(
        {
            name: t.numel() * as_they_are.get(name, dtype).itemsize
            for name, t in state_of(model).items()
            if on_cpu
        }
    )

    def take(name: str) -> State:
        if keep and (layers := _in_blocks(opened, name, model)):
            kept.update(layers)
            return {}
        found = opened.from_file({name: opened.read(name)})
        taken = {
            name: pages.put(name, t.to(device), as_they_are.get(name, dtype)).contiguous()
            for name, t in found.items()
        }
        if dtype == torch.float16 and any(
            taken[name].isinf().any() and t.isfinite().all() for name, t in found.items()
        ):
            raise WeightsError(
                f"{opened.file_of(name)}: {opened.own_name(name)} has a weight beyond 65504, the "
                "largest of float16; take bfloat16 or float32"
            )
        return taken

    own: State = {}
    with ThreadPoolExecutor(opened.readers) as pool:
        for tensors in pool.map(take, opened.headers):
            own |= tensors
    for name, layer in kept.items():
        layer.to(device).bias = own.pop(f"{name}.bias", None)
    if "embed_tokens" in opened.schemes:
        own = {name.replace(_TABLE, _OWN_TABLE): t for name, t in own.items()}
    insert(model, kept)
    model.load_state_dict(own, strict=False, assign=True)
    if cfg.tie_embeddings and "embed_tokens.weight" in own:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def _in_blocks(opened: Opened, name: str, model: Transformer) -> dict[str, QuantLinear]:
    """The layers that a tensor of the file becomes if it stays in its blocks, else none."""
    if (how := opened.blocks(name)) is None:
        return {}
    scheme, read = how
    q, scale, minimum = ({} if p is None else opened.from_file({name: p}) for p in read())
    places, layers = matrices(model), {}
    for own in q:
        module = own.removesuffix(".weight")
        if module == "embed_tokens" and opened.config.tie_embeddings:
            module = "lm_head"
        if module in places:
            parts = q[own], scale[own], minimum.get(own)
            layers[module] = QuantLinear.from_parts(*parts, None, scheme)
    return layers


def widest(opened: Opened) -> torch.dtype:
    """The dtype that holds every number of the file."""
    found = {getattr(torch, info.dtype) for info in opened.headers.values()}
    return reduce(torch.promote_types, found)


def on_meta(cfg: ModelConfig, schemes: Mapping[str, QuantScheme] = {}) -> Transformer:
    """The model without its numbers; `schemes`: of the matrices that are quantised in it."""
    with torch.device("meta"), _NoInit():
        model = Transformer(cfg)
        layers = {}
        for name, module in matrices(model).items():
            if name in schemes:
                outputs, inputs = module.weight.shape
                bias = getattr(module, "bias", None) is not None
                layers[name] = QuantLinear(inputs, outputs, schemes[name], bias)
        insert(model, layers)
        return model


def check(opened: Opened) -> Transformer:
    """The file has the tensors that its config asks for, in their shapes, and no others.

    Returns the model without its numbers.
    """
    _check_sizes(opened.config, opened)
    try:
        model = on_meta(opened.config, opened.schemes)
    except WeightsError as error:
        raise WeightsError(f"{opened.where}: {error}") from error
    expected = opened.to_file(state_of(model))
    extra = opened.headers.keys() - expected.keys() - set(opened.repeats or ())
    _check_tensors(expected, opened, extra)
    return model


def settle_head(opened: Opened) -> Opened:
    """A head beside a tied embedding is left out if it repeats it, else it counts."""
    if opened.repeats is None:
        return opened
    head, table = opened.repeats
    if table in opened.headers and not torch.equal(opened.read(head), opened.read(table)):
        warnings.warn(
            f"{opened.where} has a head, {head}, that differs from the embedding though its "
            "config ties the two: kept, untied",
            stacklevel=4,
        )
        untied = opened.config.replace(tie_embeddings=False)
        return replace(opened, config=untied, repeats=None)
    headers = {name: t for name, t in opened.headers.items() if name != head}
    return replace(opened, headers=headers, repeats=None)


class _NoInit(TorchFunctionMode):
    """Makes torch.nn.init do nothing: on meta tensors it has no effect, yet imports torch._dynamo,
    which takes longer than loading most models."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_sizes(cfg: ModelConfig, opened: Opened) -> None:
    """A config cannot ask for more than the file could hold: checked before anything is built."""
    largest = max((info.numel for info in opened.headers.values()), default=0)
    sizes = {"vocab_size": cfg.vocab_size, "d_model": cfg.d_model, "d_ff": cfg.d_ff}
    sizes["n_heads * head_dim"] = cfg.n_heads * cfg.head_size
    if cfg.position == "learned":
        sizes["max_seq_len"] = cfg.max_seq_len
    for name, size in sizes.items():
        if size > largest:
            raise WeightsError(
                f"{opened.where} has no tensor as large as its config's {name}={size}"
            )
    if cfg.n_layers > len(opened.headers):
        raise WeightsError(
            f"{opened.where} has {len(opened.headers)} tensors for n_layers={cfg.n_layers}"
        )


def _check_tensors(expected: State, opened: Opened, extra: set[str]) -> None:
    """extra: of the file's tensors those without a place in the model."""
    for name, want in expected.items():
        if name not in opened.headers:
            raise WeightsError(f"{opened.where} lacks the tensor {name}, which its config asks for")
        got, where = opened.headers[name], f"{opened.file_of(name)}: {opened.own_name(name)}"
        if got.shape != tuple(want.shape):
            raise WeightsError(
                f"{where} has the shape {got.shape}, but its config asks for {tuple(want.shape)}"
            )
        if want.dtype in (torch.int32, torch.float16):  # a quantised layer's
            if got.dtype != _name(want.dtype):
                raise WeightsError(f"{where} is {got.dtype}, not {_name(want.dtype)}")
        elif got.dtype not in FLOATS:
            raise WeightsError(f"{where} is {got.dtype}, not a float of 16 to 64 bits")
    if extra:
        file = opened.file_of(min(extra))
        names = sorted(opened.own_name(name) for name in extra if opened.file_of(name) == file)[:5]
        more = f" and {len(extra) - len(names)} more" if len(extra) > len(names) else ""
        raise WeightsError(
            f"{file} has tensors its config has no place for: {', '.join(names)}{more}"
        )
