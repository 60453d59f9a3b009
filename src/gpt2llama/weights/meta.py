"""Meta's own folders of Llama 1 to 3.3: params.json, and consolidated.NN.pth, one for each of the
GPUs that the model was cut for."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckedFields, ConfigError, FileError, WeightsError
from ..model.config import Llama3Scaling, ModelConfig
from .files import read_json
from .keys import read_keys
from .opened import PAIRS, Opened, TensorInfo
from .pickles import Stored, read_pickle, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..tokenizer import Facts, Tokenizer
    from .opened import State

_NAMES = {
    "embed_tokens": "tok_embeddings",
    "attn_norm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "norm": "norm",
    "lm_head": "output",
}
_TABLE, _HEAD = "tok_embeddings.weight", "output.weight"
_BUFFERS = re.compile(r"rope\.freqs$")  # once, or in Llama 1 for every layer


@dataclass(frozen=True, kw_only=True)
class Params(CheckedFields):
    """params.json; what a file leaves out has the value of Meta's code for Llama 1 and 2."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    vocab_size: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False
    max_seq_len: int | None = None


def config_from_meta(
    params: Params, vocab_size: int, tied: bool, rope_factor: float | None = None
) -> ModelConfig:
    """vocab_size: the rows of the table, for a params.json that does not say.

    ConfigError for scaled RoPE without its factor, which params.json never has.
    """
    if params.use_scaled_rope != (rope_factor is not None):
        raise ConfigError(
            "use_scaled_rope is true, but the factor is not written there; give it: "
            "--rope-factor 8 (Llama 3.1, 3.3) or 32 (Llama 3.2)"
            if params.use_scaled_rope
            else f"rope_factor={rope_factor} is only for a model with use_scaled_rope"
        )
    return ModelConfig(
        vocab_size=params.vocab_size or vocab_size,
        max_seq_len=params.max_seq_len or _context(params),
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        n_kv_heads=None if params.n_kv_heads == params.n_heads else params.n_kv_heads,
        d_model=params.dim,
        d_ff=_mlp_width(params),
        norm_eps=params.norm_eps,
        rope_theta=params.rope_theta,
        rope_scaling=None if rope_factor is None else Llama3Scaling(rope_factor, 1.0, 4.0, 8192),
        tie_embeddings=tied,
    )


def state_from_meta(state: State, head_size: int) -> State:
    """Their tensors under our names, the rows of Q and K from pairs to halves."""
    back = {theirs: ours for ours, theirs in _NAMES.items()}
    own = {_rename(name, back): tensor for name, tensor in state.items()}
    return _turn_rows(own, r"[qk]_proj", head_size // 2, 2)


def state_to_meta(state: State, head_size: int) -> State:
    """The way back."""
    theirs = {_rename(name, _NAMES): tensor for name, tensor in state.items()}
    return _turn_rows(theirs, r"attention\.w[qk]", 2, head_size // 2)


def open_model(
    folder: Path, ignore_keys: Collection[str] = (), rope_factor: float | None = None
) -> Opened:
    """The model of a folder with params.json and all its consolidated.NN.pth."""
    path = folder / "params.json"
    values = read_json(path)
    if values.get("vocab_size") == -1:  # Llama 1 and 2: as many as the tokenizer has
        del values["vocab_size"]
    try:
        params = read_keys(Params, values, ignore_keys, inert={"max_batch_size"})
        joined, shards = _joined(folder, params.dim)
        if _TABLE not in joined or joined[_TABLE].dim is None:
            raise WeightsError(f"{folder} lacks the tensor {_TABLE}")
        tied = _HEAD in joined and joined[_HEAD].begins_like(joined[_TABLE])  # as in Llama 3.2
        rows = joined[_TABLE].header().shape[0]
        query = joined.get("layers.0.attention.wq.weight")
        if query and 0 < (found := query.header().shape[0]) < params.dim and not params.dim % found:
            wanted = shards * params.dim // found
            raise FileError(f"{folder} has {shards} shards (consolidated.NN.pth) of {wanted}")
        cfg = config_from_meta(params, rows, tied, rope_factor)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    place = _tokenizer_file(folder)
    notes = [f"{shards} shards joined"] if shards > 1 else []
    if params.max_seq_len is None:
        notes.append(f"max_seq_len={cfg.max_seq_len} by the other keys: params.json has none")
    return Opened(
        where=str(folder),
        format="meta",
        config=cfg,
        headers={name: tensor.header() for name, tensor in joined.items()},
        read=lambda name: joined[name].read(),
        to_file=partial(state_to_meta, head_size=cfg.head_size),
        from_file=partial(state_from_meta, head_size=cfg.head_size),
        change=lambda name: joined[name].change(),
        repeats=(_HEAD, _TABLE) if tied else None,
        notes=notes,
        tokenizer=partial(_read_tokenizer, place) if place else lambda: None,
        facts=partial(_read_facts, place) if place else lambda: None,
    )


@dataclass(frozen=True)
class _Joined:
    """A tensor in parts of one shape; dim: along which it was cut, None if all have it whole."""

    name: str
    parts: list[Stored]
    dim: int | None

    def header(self) -> TensorInfo:
        shape = list(self.parts[0].shape)
        if self.dim is not None:
            shape[self.dim] *= len(self.parts)
        return TensorInfo(tuple(shape), self.parts[0].dtype)

    def read(self) -> Tensor:
        import torch

        first, *others = (part.read() for part in self.parts)
        if self.dim is not None and others:
            return torch.cat([first, *others], self.dim)
        for part, other in zip(self.parts[1:], others, strict=True):
            if not torch.equal(first, other):
                names = f"{self.parts[0].path} and {part.path.name}"
                raise WeightsError(f"{names} differ in {self.name}, which is not cut")
        return first

    def change(self) -> str:
        """What loading does to it but rename it."""
        side = {0: "rows", 1: "columns"}.get(-1 if self.dim is None else self.dim)
        steps = [f"{side} of {len(self.parts)} shards joined"] if len(self.parts) > 1 else []
        if side is None and steps:
            steps = [f"the same in all {len(self.parts)} shards"]
        return ", ".join([*steps, PAIRS] if re.search(r"\.w[qk]\.", self.name) else steps)

    def begins_like(self, other: _Joined) -> bool:
        """Whether the first numbers of every part are; the rest is compared when it is read."""
        return all(_begin_alike(a, b) for a, b in zip(self.parts, other.parts, strict=True))


def _begin_alike(a: Stored, b: Stored) -> bool:
    if a == b or (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
        return a == b
    with a.path.open("rb") as one, b.path.open("rb") as two:
        one.seek(a.offset)
        two.seek(b.offset)
        size = min(a.span * a.width, 1 << 20)
        return one.read(size) == two.read(size)


def _joined(folder: Path, d_model: int) -> tuple[dict[str, _Joined], int]:
    """The tensors by name, and the number of shards."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    for i in range(max(len(paths), 1)):
        if folder / f"consolidated.{i:02d}.pth" not in paths:
            raise FileError(f"{folder} lacks consolidated.{i:02d}.pth")
    shards = [tensors_of(read_pickle(path), str(path)) for path in paths]
    joined = {}
    for name in sorted(set().union(*shards)):
        if _BUFFERS.search(name):
            continue
        for path, shard in zip(paths, shards, strict=True):
            if name not in shard:
                raise WeightsError(f"{path} lacks the tensor {name}, which other shards have")
        parts = [shard[name] for shard in shards]
        for part in parts:
            if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                raise WeightsError(
                    f"{part.path}: {name} is {part.dtype} of shape {part.shape}, "
                    f"in {paths[0].name} {parts[0].dtype} of {parts[0].shape}"
                )
        joined[name] = _Joined(name, parts, _cut(name, parts[0].shape, d_model))
    return joined, len(paths)


def _cut(name: str, shape: tuple[int, ...], d_model: int) -> int | None:
    """Along which dimension, by the shape of a part. Most matrices are cut by rows; wo, w2 and the
    table of Llama 1 and 2 by columns. Vectors are not cut."""
    if len(shape) < 2:
        return None
    return int(shape[1] != d_model or name.endswith(".w2.weight"))  # a part of w2 can be square


def _context(params: Params) -> int:
    """params.json never says how long the texts of the training were; its other keys do."""
    if params.use_scaled_rope:  # Llama 3.1 to 3.3
        return 131072
    if params.rope_theta > 10000:  # Code Llama has 1e6, Llama 3 5e5
        return 16384 if params.rope_theta >= 1e6 else 8192
    # Llama 1 has eps 1e-6, but for its 65B, which differs from Llama 2's 70B by having no GQA.
    first = params.norm_eps < 1e-5 or (params.dim == 8192 and params.n_kv_heads is None)
    return 2048 if first else 4096


def _mlp_width(params: Params) -> int:
    """2/3 of 4·dim, as a gated MLP has three matrices for two; by the factor; rounded up."""
    try:
        width = int(2 * (4 * params.dim) / 3)
        if params.ffn_dim_multiplier is not None:
            width = int(params.ffn_dim_multiplier * width)
    except OverflowError as error:
        raise ConfigError(f"dim={params.dim} and ffn_dim_multiplier are too large") from error
    return params.multiple_of * -(-width // params.multiple_of)


def _rename(name: str, names: dict[str, str]) -> str:
    def module(match: re.Match[str]) -> str:
        return match[1] + names.get(match[2], match[2])

    return re.sub(r"^(layers\.\d+\.|)(.+)(?=\.\w+$)", module, name)


def _turn_rows(state: State, names: str, outer: int, inner: int) -> State:
    """The rows of each head, (outer, inner), as (inner, outer)."""
    for name, tensor in state.items():
        if re.search(names, name):
            rows = tensor.reshape(-1, outer, inner, tensor.shape[-1])
            state[name] = rows.transpose(1, 2).reshape(tensor.shape)
    return state


def _tokenizer_file(folder: Path) -> Path | None:
    """Llama 1 and 2 have one for all sizes, in the folder above."""
    places = (place / "tokenizer.model" for place in (folder, folder.parent))
    return next((place for place in places if place.is_file()), None)


def _read_tokenizer(file: Path) -> Tokenizer:
    from ..tokenizer import load_tokenizer

    return load_tokenizer(file)


def _read_facts(file: Path) -> Facts:
    from ..tokenizer import read_facts

    return read_facts(file)
