"""From a config and tensors to a model, and back to tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InputError, WeightsError
from ..model.config import ModelConfig
from ..model.transformer import Transformer

State = dict[str, Tensor]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    cfg: ModelConfig,
    state: State,
    where: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    to_file: Callable[[State], State] = dict,
    from_file: Callable[[State], State] = dict,
) -> Transformer:
    """The model of `cfg` holding the file's tensors: nothing is initialised, little is copied.

    `to_file` and `from_file` translate tensors (and so names and shapes) from ours to the file's
    and back. dtype None: the file's, the widest if there are several. Raises WeightsError for a
    tensor that is missing, left over, or of a wrong shape or kind.
    """
    if dtype not in (None, *_FLOATS):
        raise InputError(f"dtype must be a torch float of 16, 32 or 64 bits (got {dtype})")
    _check_sizes(cfg, state, where)
    with torch.device("meta"), _NoInit():
        model = Transformer(cfg)
    _check_tensors(to_file(state_of(model)), state, where)
    dtype = dtype or reduce(torch.promote_types, {t.dtype for t in state.values()})
    own = {name: t.to(device, dtype).contiguous() for name, t in from_file(state).items()}
    model.load_state_dict(own, strict=False, assign=True)
    if cfg.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


class _NoInit(TorchFunctionMode):
    """Makes torch.nn.init do nothing: on meta tensors it has no effect, yet imports torch._dynamo,
    which takes longer than loading most models."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _check_sizes(cfg: ModelConfig, state: State, where: str) -> None:
    """A config cannot ask for more than the file could hold: checked before anything is built."""
    largest = max((t.numel() for t in state.values()), default=0)
    sizes = {"vocab_size": cfg.vocab_size, "d_model": cfg.d_model, "d_ff": cfg.d_ff}
    sizes["n_heads * head_dim"] = cfg.n_heads * cfg.head_size
    if cfg.position == "learned":
        sizes["max_seq_len"] = cfg.max_seq_len
    for name, size in sizes.items():
        if size > largest:
            raise WeightsError(f"{where} has no tensor as large as its config's {name}={size}")
    if cfg.n_layers > len(state):
        raise WeightsError(f"{where} has {len(state)} tensors for n_layers={cfg.n_layers}")


def _check_tensors(expected: State, state: State, where: str) -> None:
    for name, want in expected.items():
        if name not in state:
            raise WeightsError(f"{where} lacks the tensor {name}, which its config asks for")
        got = state[name]
        if got.shape != want.shape:
            raise WeightsError(
                f"{where}: {name} has the shape {tuple(got.shape)}, "
                f"but its config asks for {tuple(want.shape)}"
            )
        if got.dtype not in _FLOATS:
            raise WeightsError(f"{where}: {name} is {got.dtype}, not a float of 16 to 64 bits")
    extra = sorted(state.keys() - expected.keys())
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise WeightsError(
            f"{where} has tensors its config has no place for: {', '.join(extra[:5])}{more}"
        )
