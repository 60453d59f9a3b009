"""nanoGPT's ckpt.pt: GPT-2 as `transformers` names it, but with plain Linears, biases or not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import CheckedFields, ConfigError, WeightsError
from ..model.config import ModelConfig
from .hf import state_from_hf, state_to_hf
from .keys import read_keys
from .opened import SPLIT, Opened
from .pickles import read_pickle, tensors_of

if TYPE_CHECKING:
    from .opened import State

_TABLE, _HEAD = "transformer.wte.weight", "lm_head.weight"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class ModelArgs(CheckedFields):
    """`model_args`; files from before there was a switch have biases."""

    ZERO_ALLOWED: ClassVar = ("dropout",)

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool = True
    dropout: float = 0.0


def config_from_nanogpt(args: ModelArgs) -> ModelConfig:
    return ModelConfig(
        vocab_size=args.vocab_size,
        max_seq_len=args.block_size,
        n_layers=args.n_layer,
        n_heads=args.n_head,
        d_model=args.n_embd,
        d_ff=4 * args.n_embd,
        norm="layernorm",
        norm_bias=args.bias,
        position="learned",
        activation="gelu",
        gated_mlp=False,
        qkv_bias=args.bias,
        out_bias=args.bias,
        mlp_bias=args.bias,
        dropout=args.dropout,
    )


def state_from_nanogpt(state: State) -> State:
    """Their tensors under our names, q, k and v apart; views."""
    return state_from_hf(_turned(state), "gpt2")


def state_to_nanogpt(state: State) -> State:
    """The way back."""
    return _turned(state_to_hf(state, "gpt2"))


def open_model(path: Path, ignore_keys: Collection[str] = ()) -> Opened:
    """The model of a ckpt.pt; `ignore_keys` are keys of its `model_args`."""
    found = read_pickle(path)
    args = found.get("model_args") if isinstance(found, dict) else None
    if not isinstance(args, dict) or not all(isinstance(v, _PLAIN) for v in args.values()):
        raise WeightsError(f"{path} must hold 'model' and plain 'model_args', as nanoGPT's do")
    try:
        cfg = config_from_nanogpt(read_keys(ModelArgs, args, ignore_keys))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    stored = tensors_of(found.get("model"), f"'model' in {path}")
    full = {name.removeprefix("_orig_mod."): tensor for name, tensor in stored.items()}
    kept = {name: tensor for name, tensor in full.items() if not name.endswith(".attn.bias")}
    return Opened(
        where=str(path),
        format="nanogpt",
        config=cfg,
        headers={name: tensor.header() for name, tensor in kept.items()},
        read=lambda name: kept[name].read(),
        to_file=state_to_nanogpt,
        from_file=state_from_nanogpt,
        change=lambda name: SPLIT if ".c_attn." in name else "",
        repeats=(_HEAD, _TABLE) if _HEAD in kept else None,
        notes=["activation: the exact GELU, nanoGPT's since June 2023 (the file does not say)"],
    )


def _turned(state: State) -> State:
    """(out, in) to the (in, out) of transformers' Conv1D, which is what it has in the blocks."""
    blocks = {name for name, t in state.items() if ".h." in name and t.dim() == 2}
    return {name: t.T if name in blocks else t for name, t in state.items()}
