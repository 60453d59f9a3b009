"""From an opened file to a model, and back to tensors."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InputError, WeightsError
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from .opened import Opened

State = dict[str, Tensor]
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def state_of(model: Transformer) -> State:
    """The model's tensors by name, a tied head once; no trace of torch.compile in the names."""
    state = {name.replace("_orig_mod.", ""): t for name, t in model.state_dict().items()}
    if model.config.tie_embeddings:
        head, table = state.pop("lm_head.weight"), state["embed_tokens.weight"]
        if head.data_ptr() != table.data_ptr():
            raise WeightsError(
                "lm_head.weight is no longer embed_tokens.weight, but the config ties them; "
                "set model.config = model.config.replace(tie_embeddings=False) to keep both"
            )
    return state


def assemble(
    opened: Opened, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """The model holding the file's tensors: nothing is initialised, little is copied, and no more
    than one tensor at a time is held twice, by each of the readers.

    dtype None: the file's. Raises WeightsError for a tensor that is missing, left over, or of a
    wrong shape or kind.
    """
    if dtype is not None and _name(dtype) not in _FLOATS:
        raise InputError(f"dtype must be a torch float of 16, 32 or 64 bits (got {dtype})")
    opened = settle_head(opened)
    model, cfg, dtype = check(opened), opened.config, dtype or widest(opened)

    def take(name: str) -> State:
        found = opened.from_file({name: opened.read(name)})
        taken = {name: t.to(device, dtype).contiguous() for name, t in found.items()}
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
    model.load_state_dict(own, strict=False, assign=True)
    if cfg.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def widest(opened: Opened) -> torch.dtype:
    """The dtype that holds every number of the file."""
    found = {getattr(torch, info.dtype) for info in opened.headers.values()}
    return reduce(torch.promote_types, found)


def on_meta(cfg: ModelConfig) -> Transformer:
    """The model without its numbers."""
    with torch.device("meta"), _NoInit():
        return Transformer(cfg)


def check(opened: Opened) -> Transformer:
    """The file has the tensors that its config asks for, in their shapes, and no others.

    Returns the model without its numbers.
    """
    _check_sizes(opened.config, opened)
    model = on_meta(opened.config)
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
        if got.dtype not in _FLOATS:
            raise WeightsError(f"{where} is {got.dtype}, not a float of 16 to 64 bits")
    if extra:
        file = opened.file_of(min(extra))
        names = sorted(opened.own_name(name) for name in extra if opened.file_of(name) == file)[:5]
        more = f" and {len(extra) - len(names)} more" if len(extra) > len(names) else ""
        raise WeightsError(
            f"{file} has tensors its config has no place for: {', '.join(names)}{more}"
        )
