"""LoRA adapters in PEFT's format: a folder of adapter_config.json and adapter_model.safetensors.

Beside a matrix stand A (rank, inputs) and B (outputs, rank), and scale · B A is added to it (Hu et
al. 2021, §4.1). GPT-2's q, k and v are one matrix to transformers, c_attn: up to three adapters of
rank r are one of rank 3r there, the A's above each other, the B's as blocks that nothing joins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError, FileError, WeightsError
from ..model.config import ModelConfig
from .families import FAMILIES
from .files import read_headers, read_json, read_tensor, read_tensors, write_json, write_tensors
from .hf import family_of, renamed
from .keys import refuse
from .opened import FLOATS, Opened, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from .opened import State

    Pairs = Mapping[str, tuple[Tensor, Tensor]]  # A and B by the name of our module

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DEEPEST = 8  # adapters on top of each other

_PREFIX = "base_model.model."
_KEY = re.compile(r"base_model\.model\.(.+)\.(lora_[AB]|base_layer)\.weight")
_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
_LITERAL = re.compile(r"\^?[\w.]+")  # of the patterns, which PEFT takes as regular expressions

# Where PEFT's LoRA adds more than scale · B A, or elsewhere: off, or refused by name.
_MUST_BE_OFF = frozenset(
    (
        *("alora_invocation_tokens", "arrow_config", "bias", "kasa_config", "layer_replication"),
        *("lora_bias", "lora_ga_config", "modules_to_save", "monteclora_config", "revision"),
        *("target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
        "velora_config",
    )
)
_INERT = {  # why it does not change what is merged
    "the tensors say which": "target_modules exclude_modules layers_to_transform layers_pattern",
    "training": "inference_mode lora_dropout ensure_weight_tying",
    "of a beginning that init_lora_weights names": "loftq_config eva_config corda_config",
    "where it comes from": "auto_mapping peft_version",
    "how PEFT computes or stores the same": "fan_in_fan_out megatron_config megatron_core "
    "qalora_group_size runtime_config",
}
_INERT_KEYS = frozenset(" ".join(_INERT.values()).split())
# Other ways to begin change the base model as well.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


class Place(NamedTuple):
    """Where an adapter's file has what is added to one of our matrices.

    theirs: its module there; rows: of that module's B; whole: the file has the matrix itself, too,
    as PEFT writes it for a head.
    """

    file: Path
    theirs: str
    rows: slice
    scale: float
    whole: bool

    def added_to(self, weight: Tensor) -> Tensor:
        a, b = (read_tensor(self.file, f"{self.theirs}.lora_{x}.weight") for x in "AB")
        if self.whole:
            weight = read_tensor(self.file, f"{self.theirs}.base_layer.weight")
        return add(weight, a, b[self.rows], self.scale)


@dataclass(frozen=True)
class Adapter:
    """What adapter_config.json says, and the headers of the tensors.

    base: its model, as the config spells it; ignored: keys of the config left out when asked.
    """

    folder: Path
    base: str
    rank: int
    alpha: float
    ranks: dict[str, int]  # by the ends of modules' names, where they differ
    alphas: dict[str, float]
    stabilised: bool  # scale = alpha / √rank (Kalajdzievski 2023)
    headers: dict[str, TensorInfo]
    ignored: frozenset[str]

    def fit(self, cfg: ModelConfig, where: str) -> dict[str, Place]:
        """By our modules, where each has its part. WeightsError names the first tensor that has no
        place in the model that lies at `where`, or another shape."""
        file, places = self.folder / WEIGHTS, dict[str, Place]()
        for theirs, parts in self._modules().items():
            names, (outputs, inputs) = _matrices(theirs, cfg)
            rank = _of(self.ranks, theirs, self.rank)
            shapes = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
            whole = "base_layer" in parts
            if whole:
                shapes["base_layer"] = (outputs, inputs)
            for what, wanted in shapes.items():
                name = f"{_PREFIX}{theirs}.{what}.weight"
                if not names:
                    raise _misfit(file, f"{name} has no place in {where}")
                if what not in parts:
                    raise WeightsError(f"{file} lacks {name}")
                if (has := parts[what].shape) != wanted:
                    why = f"has the shape {has}, but rank {rank} in {where} asks for {wanted}"
                    raise _misfit(file, f"{name} {why}")
            scale = _of(self.alphas, theirs, self.alpha)
            scale /= math.sqrt(rank) if self.stabilised else rank
            for name in names:
                if name in places:
                    raise WeightsError(f"{file}: {places[name].theirs} is there twice")
                rows = _rows(name, theirs, outputs)
                places[name] = Place(file, _PREFIX + theirs, rows, scale, whole)
        return places

    def _modules(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors by transformers' modules and what they are of them."""
        file, found = self.folder / WEIGHTS, dict[str, dict[str, TensorInfo]]()
        for name, info in self.headers.items():
            key = _KEY.fullmatch(name)
            if key is None:
                raise WeightsError(
                    f"{file}: {name} is no A or B of a matrix; merge this adapter with peft and "
                    "load the whole model"
                )
            if info.dtype not in FLOATS:
                raise WeightsError(f"{file}: {name} is {info.dtype}, not a float of 16 to 64 bits")
            found.setdefault(key[1], {})[key[2]] = info
        if not found:
            raise WeightsError(f"{file} holds no tensors")
        return found


def read_adapter(folder: Path, ignore_keys: Collection[str] = ()) -> Adapter:
    """Headers only. Raises FileError, WeightsError, ConfigError for what PEFT can and we cannot.

    ignore_keys: of them those that are in adapter_config.json are treated as not there.
    """
    path = folder / CONFIG
    values = read_json(path)
    ignored = frozenset(ignore_keys) & values.keys()
    left = {key: value for key, value in values.items() if key not in ignored}
    try:
        kind, task = left.pop("peft_type", None), left.pop("task_type", None)
        if kind != "LORA" or task not in (None, "CAUSAL_LM"):
            raise ConfigError(f"it is {kind!r} for {task!r}, and only 'LORA' for 'CAUSAL_LM' loads")
        base = left.pop("base_model_name_or_path", None)
        if not isinstance(base, str) or not base:
            raise ConfigError("base_model_name_or_path must say where its base model lies")
        rank = _positive("r", left.pop("r", 8))
        alpha = _number("lora_alpha", left.pop("lora_alpha", 8))
        ranks = {k: _positive("rank_pattern", v) for k, v in _patterns(left, "rank_pattern")}
        alphas = {k: _number("alpha_pattern", v) for k, v in _patterns(left, "alpha_pattern")}
        stabilised = left.pop("use_rslora", False)
        if type(stabilised) is not bool:
            raise ConfigError(f"use_rslora must be true or false (got {stabilised!r})")
        if (beginning := left.pop("init_lora_weights", True)) not in _BEGINNINGS:
            refuse("init_lora_weights", beginning, "changes the base model as well")
        for key, value in left.items():
            if key in _MUST_BE_OFF and value not in (None, False, "none", [], {}):
                refuse(key, value, "is beyond what can be merged here; merge it with peft")
            if key not in _MUST_BE_OFF | _INERT_KEYS:
                refuse(key, value, "is not known here")
    except (ConfigError, TypeError) as error:  # TypeError: a key's value is of a wrong type
        raise ConfigError(f"{path}: {error}") from error
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise FileError(
            f"{folder} has only a pickle, adapter_model.bin, which is not read; load and save it "
            f"once with peft to get {WEIGHTS}"
        )
    headers = read_headers(folder / WEIGHTS)
    return Adapter(folder, base, rank, alpha, ranks, alphas, stabilised, headers, ignored)


def merged(opened: Opened, adapter: Adapter) -> Opened:
    """The opened base model with the adapter in its matrices, each added when it is read.

    Raises WeightsError for a quantised base, and for tensors that do not fit it. A tied head that
    is adapted becomes a matrix of its own.
    """
    if opened.schemes:
        raise WeightsError(
            f"{adapter.folder}: its base {opened.where} is quantised, and a sum would not be; let "
            "base_model_name_or_path name the model that it was made from"
        )
    places = adapter.fit(opened.config, opened.where)
    notes = [*opened.notes, f"{adapter.folder}: its adapter is added to {len(places)} matrices"]
    if "lm_head" in places and opened.config.tie_embeddings:
        opened = _untied(opened)
        notes.append("the head is adapted and the embedding is not: they are no longer tied")
    before = opened.from_file

    def from_file(state: State) -> State:
        own = before(state)
        for name, weight in own.items():
            place = places.get(name.removesuffix(".weight"))
            if place is not None and not name.endswith(".bias") and not weight.is_meta:
                own[name] = place.added_to(weight)
        return own

    return replace(opened, from_file=from_file, blocks=lambda name: None, notes=notes)


def _untied(opened: Opened) -> Opened:
    """The same model, whose head is a second copy of its table where the file has but one."""
    import torch

    untied, any_size = opened.config.replace(tie_embeddings=False), torch.empty(1, 1)
    (head,), (table,) = (
        opened.to_file({name: any_size}) for name in ("lm_head.weight", "embed_tokens.weight")
    )
    if head in opened.headers or table not in opened.headers:
        return replace(opened, config=untied, repeats=None)
    return replace(
        opened,
        config=untied,
        headers=opened.headers | {head: opened.headers[table]},
        read=lambda name: opened.read(table if name == head else name),
    )


def add(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale · B A, summed and returned in fp32, or fp64 if the weight is."""
    import torch

    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)


def write_adapter(
    folder: Path,
    pairs: Pairs,
    cfg: ModelConfig,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base: str,
) -> None:
    """Into an existing folder, pairs that all have this rank; base: where their model lies.

    `peft` takes it beside what `save(…, format="hf")` makes of that model. One that transformers
    has no family for is written under Llama's names.
    """
    family = _family(cfg)
    joined = {_end(theirs, family): len(group) for theirs, group in _grouped(pairs, family).items()}
    several = {end: count for end, count in joined.items() if count > 1}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(joined),
        "rank_pattern": {end: count * rank for end, count in several.items()},
        "alpha_pattern": {end: count * alpha for end, count in several.items()},
        "fan_in_fan_out": family == "gpt2",  # its matrices are stored (in, out)
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / CONFIG, values)
    write_tensors(folder / WEIGHTS, to_peft(pairs, family))


def read_pairs(folder: Path, like: Pairs, cfg: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """What `write_adapter` wrote for pairs of these names and shapes; WeightsError for others."""
    import torch

    file, family = folder / WEIGHTS, _family(cfg)
    found, expected = read_tensors(file), to_peft(like, family)
    for name in sorted(found.keys() | expected.keys()):
        has, wants = (tuple(s[name].shape) if name in s else "none" for s in (found, expected))
        if has != wants:
            raise WeightsError(f"{file}: {name} has the shape {has}, the run's LoRA {wants}")
    pairs = from_peft(found, like, family)
    for name, tensor in to_peft(pairs, family).items():
        if not torch.equal(tensor, found[name]):
            raise WeightsError(f"{file}: {name} joins q, k and v, which are apart here")
    return pairs


def to_peft(pairs: Pairs, family: str) -> State:
    """A and B under PEFT's names."""
    state: State = {}
    for theirs, group in _grouped(pairs, family).items():
        tensors = [pairs[name] for name in group]
        outputs, rank = tensors[0][1].shape
        outputs *= 3 if _is_fused(theirs) else 1
        b = tensors[0][1].new_zeros(outputs, rank * len(group))
        for i, (name, (_, part)) in enumerate(zip(group, tensors, strict=True)):
            b[_rows(name, theirs, outputs), i * rank : (i + 1) * rank] = part
        a = b.new_empty(b.shape[1], tensors[0][0].shape[1])
        for rows, (part, _) in zip(a.chunk(len(group)), tensors, strict=True):
            rows.copy_(part)
        state[f"{_PREFIX}{theirs}.lora_A.weight"] = a
        state[f"{_PREFIX}{theirs}.lora_B.weight"] = b
    return state


def from_peft(state: State, names: Iterable[str], family: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The way back, for our matrices of these names."""
    pairs = {}
    for theirs, group in _grouped(names, family).items():
        a, b = (state[f"{_PREFIX}{theirs}.lora_{x}.weight"] for x in "AB")
        parts = zip(group, a.chunk(len(group)), b.chunk(len(group), 1), strict=True)
        for name, own_a, own_b in parts:
            pairs[name] = own_a, own_b[_rows(name, theirs, len(b))]
    return pairs


def _misfit(file: Path, why: str) -> WeightsError:
    return WeightsError(f"{file}: {why}: the adapter is another model's")


def _family(cfg: ModelConfig) -> str:
    """Whose names a model's matrices have: all families but GPT-2 share Llama's."""
    try:
        return "gpt2" if family_of(cfg) == "gpt2" else "llama"
    except ConfigError:
        return "llama"


def _grouped(names: Iterable[str], family: str) -> dict[str, list[str]]:
    """transformers' modules, and our matrices that are in each."""
    groups: dict[str, list[str]] = {}
    for name in names:
        first = re.sub(r"\b[kv]_proj$", "q_proj", name) if family == "gpt2" else name
        prefix = "" if name == "lm_head" else FAMILIES[family].prefix
        groups.setdefault(prefix + renamed(first, FAMILIES[family].names), []).append(name)
    return groups


def _matrices(theirs: str, cfg: ModelConfig) -> tuple[list[str], tuple[int, int]]:
    """Our matrices in a module of transformers, and its (outputs, inputs); none: has no place."""
    width, head, heads = cfg.d_model, cfg.head_size, cfg.n_heads
    if theirs == "lm_head":
        return ["lm_head"], (cfg.vocab_size, width)
    family = "gpt2" if re.match(r"(transformer\.)?h\.", theirs) else "llama"
    back = {their: our for our, their in FAMILIES[family].names.items()}
    name = renamed(theirs.removeprefix(FAMILIES[family].prefix), back)
    layer = _LAYER.fullmatch(name)
    if family != _family(cfg) or layer is None or int(layer[1]) >= cfg.n_layers:
        return [], (0, 0)
    sizes = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (cfg.kv_heads * head, width),
        "self_attn.v_proj": (cfg.kv_heads * head, width),
        "self_attn.o_proj": (width, heads * head),
        "mlp.up_proj": (cfg.d_ff, width),
        "mlp.down_proj": (width, cfg.d_ff),
    }
    if cfg.gated_mlp:
        sizes["mlp.gate_proj"] = (cfg.d_ff, width)
    if layer[2] not in sizes:
        return [], (0, 0)
    outputs, inputs = sizes[layer[2]]
    if not _is_fused(theirs):
        return [name], (outputs, inputs)
    return [name.replace("q_proj", f"{part}_proj") for part in "qkv"], (3 * outputs, inputs)


def _is_fused(theirs: str) -> bool:
    return theirs.endswith(".c_attn")


def _rows(name: str, theirs: str, outputs: int) -> slice:
    """Of a module's outputs those of our matrix."""
    if not _is_fused(theirs):
        return slice(None)
    part = "qkv".index(name.rpartition(".")[2][0])
    return slice(part * outputs // 3, (part + 1) * outputs // 3)


def _end(theirs: str, family: str) -> str:
    """As much of a module's name as tells it apart: GPT-2 has two `c_proj`."""
    return ".".join(theirs.split(".")[-2 if family == "gpt2" else -1 :])


def _of(patterns: Mapping[str, Any], theirs: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, or that is the whole name."""
    for pattern, value in patterns.items():
        end = pattern.removeprefix("^")
        if theirs == end or (end == pattern and theirs.endswith(f".{end}")):
            return value
    return default


def _patterns(left: dict[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    found = left.pop(key, None) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{key} must be an object (got {found!r})")
    for pattern, value in found.items():
        literal = pattern.replace("\\.", ".")
        if not _LITERAL.fullmatch(literal):
            refuse(key, pattern, "is a regular expression; only names of modules are read")
        yield literal, value


def _positive(key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ConfigError(f"{key} must be a whole number above 0 (got {value!r})")
    return value


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not -1e9 < value < 1e9:
        raise ConfigError(f"{key} must be a number (got {value!r})")
    return float(value)
