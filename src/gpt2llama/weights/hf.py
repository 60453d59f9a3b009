"""Hugging Face folders of GPT-2, Llama, Mistral, Qwen2 and Qwen3; families.py has the tables.

Every key of a config.json is read (`Family.keys`), must have the one value the model can do
(`MUST_BE`), says nothing about the computation (`INERT_KEYS`), or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, FileError, WeightsError
from ..model.config import ModelConfig, NTKScaling, YarnScaling
from .families import ACTIVATIONS, FAMILIES, INERT_KEYS, MUST_BE, SCALINGS
from .files import read_headers, read_json, read_tensor, write_json, write_tensors, write_tokenizer
from .keys import plain, refuse, without
from .opened import SPLIT, TRANSPOSED, Opened, TensorInfo

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer
    from .opened import State

_QWEN2_TOKENIZER = (
    "transformers' AutoTokenizer splits text in Qwen's own way for every qwen2 model; for another "
    "tokenizer use PreTrainedTokenizerFast.from_pretrained"
)
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # computed, no weights


def config_from_hf(values: dict[str, Any], ignore_keys: Collection[str] = ()) -> ModelConfig:
    """A config.json as ours; ConfigError names the key that is missing, unknown or beyond us."""
    try:
        left = without(values, ignore_keys)
        if "sliding_window" in ignore_keys:  # without the key, Mistral would have one
            left["sliding_window"] = None
        read = _read(left)
    except TypeError as error:
        raise ConfigError(f"a key has a value of the wrong type: {error}") from error
    cfg = ModelConfig(**read)
    return plain(cfg.replace(max_seq_len=_context(cfg)))


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json of the first family that can express `cfg`.

    ConfigError names the switches in the way. `dropout` is written where the family has the same
    one (GPT-2) and left out elsewhere: it does not change what the model computes.
    """
    name = family_of(cfg)
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == cfg.activation)
    ours = {
        **vars(cfg),
        "n_kv_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
        "activation": activation,
    }
    values: dict[str, Any] = {"architectures": [FAMILIES[name].architecture], "model_type": name}
    for key, (fields, _) in FAMILIES[name].keys.items():
        values[key] = ours[fields.split()[0]]
    if cfg.position == "rope":
        values.update(_rope_to_hf(cfg))
    if name.startswith("qwen"):
        windowed = cfg.sliding_window is not None
        values["use_sliding_window"], values["sliding_window"] = windowed, cfg.sliding_window
        values["max_window_layers"] = 0 if windowed else cfg.n_layers
    return values


def family_of(cfg: ModelConfig) -> str:
    """The first family that can express every switch of `cfg`; ConfigError names what none can."""
    cfg = plain(cfg)
    in_the_way: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        wrong = [field for field, value in family.fixed.items() if getattr(cfg, field) != value]
        for fields, _ in family.keys.values():
            if len({getattr(cfg, field) for field in fields.split()}) > 1:
                wrong += fields.split()
        if name == "llama" and cfg.d_model % cfg.n_heads:
            wrong.append("head_dim")  # transformers' own rule, for Llama alone
        if not wrong:
            return name
        in_the_way[name] = wrong
    nearest = min(in_the_way, key=lambda name: len(in_the_way[name]))
    fields = ", ".join(f"{field}={getattr(cfg, field)!r}" for field in in_the_way[nearest])
    raise ConfigError(
        f"no Hugging Face model has these switches: the nearest, {nearest}, cannot have {fields}; "
        "format='gpt2llama' keeps every switch"
    )


def state_from_hf(state: State, family: str) -> State:
    """Their tensors under our names, as views; GPT-2's Conv1D weights (in, out) are turned."""
    prefix, names = FAMILIES[family].prefix, FAMILIES[family].names
    back = {theirs: ours for ours, theirs in names.items()}
    own: State = {}
    for full_name, tensor in state.items():
        name = renamed(full_name.removeprefix(prefix), back)
        if _is_conv1d(full_name):
            tensor = tensor.T
        if ".c_attn." in full_name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                own[name.replace("q_proj", f"{part}_proj")] = rows
        else:
            own[name] = tensor
    return own


def state_to_hf(state: State, family: str) -> State:
    """Our tensors (a tied head once) under their names; on meta ones, no operation that imports
    torch._dynamo (torch.cat does)."""
    prefix, names = FAMILIES[family].prefix, FAMILIES[family].names
    theirs: State = {}
    for name, tensor in state.items():
        full_name = renamed(name, names)
        if ".c_attn." in full_name:
            tensor = tensor.new_empty(3 * len(tensor), *tensor.shape[1:])
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                rows.copy_(state[name.replace("q_proj", f"{part}_proj")])
        elif family == "gpt2" and re.search(r"\.[kv]_proj\.", name):
            continue
        if _is_conv1d(full_name):
            tensor = tensor.T
        theirs[full_name if name == "lm_head.weight" else prefix + full_name] = tensor
    return theirs


def change(name: str) -> str:
    """What state_from_hf does to a tensor but rename it."""
    steps = [TRANSPOSED] if _is_conv1d(name) else []
    return ", ".join([*steps, SPLIT] if ".c_attn." in name else steps)


def open_model(folder: Path, ignore_keys: Collection[str]) -> Opened:
    """The model of a folder with config.json and model.safetensors, whole or in shards."""
    values, (files, notes) = read_json(folder / "config.json"), _files(folder)
    try:
        cfg = config_from_hf(values, ignore_keys)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    family: str = values["model_type"]
    headers: dict[str, TensorInfo] = {}
    for path in files:
        for own_name, info in read_headers(path).items():
            name = _full_name(own_name, family)
            if name in headers:
                other = headers[name]
                raise WeightsError(
                    f"{path} has {own_name}, and {other.file} has {other.own_name}: one tensor"
                )
            if not _BUFFERS.search(own_name):
                headers[name] = info._replace(file=path.name, own_name=own_name)
    head = "lm_head.weight"
    table = _full_name(renamed("embed_tokens.weight", FAMILIES[family].names), family)
    return Opened(
        where=str(folder),
        format="hf",
        config=cfg,
        headers=headers,
        read=lambda name: read_tensor(folder / headers[name].file, headers[name].own_name),
        to_file=partial(state_to_hf, family=family),
        from_file=partial(state_from_hf, family=family),
        change=change,
        repeats=(head, table) if cfg.tie_embeddings and head in headers else None,
        notes=notes,
    )


def write_model(folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> list[str]:
    """A folder that transformers loads, into an existing one; returns notes, a line each."""
    from .build import state_of

    family = family_of(model.config)
    state = state_to_hf(state_of(model), family)
    config = {
        **config_to_hf(model.config),
        "bos_token_id": tokenizer.bos_id if tokenizer else None,
        "eos_token_id": tokenizer.eos_id if tokenizer else None,
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
    }
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", state)
    if tokenizer is None:
        return ["no tokenizer is written: the model has none"]
    write_tokenizer(folder, tokenizer)
    return [_QWEN2_TOKENIZER] if family == "qwen2" else []


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """model.safetensors, or the shards that its index names; and a note on what is ignored."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        if not single.exists() and (folder / "pytorch_model.bin").exists():
            raise FileError(
                f"{folder} has only a pickle, pytorch_model.bin, which is not read; "
                "load and save it once with transformers to get model.safetensors"
            )
        others = {path.name for path in folder.glob("*.safetensors")} - {single.name}
        return [single], [f"{name} ignored: {single.name} is whole" for name in sorted(others)]
    shards = read_json(index).get("weight_map")
    names = set(map(str, shards.values())) if isinstance(shards, dict) else {"/"}
    if any(Path(name).name != name for name in names):
        raise WeightsError(f"{index} must map tensors to files beside it in 'weight_map'")
    for name in sorted(names):
        if not (folder / name).exists():
            raise FileError(f"{folder / name} is missing, which {index.name} lists")
    ignored = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    notes = [f"{name} ignored: {index.name} does not list it" for name in ignored]
    return [folder / name for name in sorted(names)], notes


def _read(left: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; takes every key out of `left` that is read."""
    model_type = left.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    read = dict(family.fixed)
    given = left.keys() & family.keys
    for key in sorted(family.keys, key=lambda key: key not in given):  # the given ones first
        fields, default = family.keys[key]
        value = left.pop(key, default)
        if value is ...:
            raise ConfigError(f"the key {key!r} is missing")
        if fields == "activation":
            if value not in ACTIVATIONS:
                refuse(key, value, f"is none of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        for field in fields.split():
            if field == "dropout":  # ours is one, GPT-2's three, and all of them only in training
                read[field] = max(value, read.get(field, value))
            elif read.setdefault(field, value) != value and key in given:
                refuse(key, value, f"disagrees with {field}={read[field]!r}")
    if read["d_ff"] is None:
        read["d_ff"] = 4 * read["d_model"]
    if read["position"] == "rope":
        read["rope_theta"], read["rope_scaling"] = _read_rope(left, read["max_seq_len"])
    if model_type.startswith("qwen"):
        read["sliding_window"] = _read_qwen_window(left, read["n_layers"])
    for key, value in left.items():
        if key in MUST_BE and value != MUST_BE[key]:
            refuse(key, value, f"is beyond this model, which has {MUST_BE[key]!r}")
        if key not in MUST_BE and key not in INERT_KEYS:
            refuse(key, value, "is not known here")
    return read


def _read_rope(left: dict[str, Any], max_seq_len: int) -> tuple[Any, dict[str, Any] | None]:
    """theta and scaling: `rope_theta` and `rope_scaling`, or (transformers 5) `rope_parameters`."""
    theta = left.pop("rope_theta", 10000.0)
    old, new = left.pop("rope_scaling", None), left.pop("rope_parameters", None)
    if old and new:
        refuse("rope_scaling", old, "stands beside rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, dict):
        refuse("rope_scaling", rope, "is no object")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", theta)
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    for key in ("partial_rotary_factor", "truncate"):
        if rope.pop(key, 1) != 1:
            raise ConfigError(f"{key} in the RoPE settings must be 1: the model has no other")
    if kind == "default" and not rope:
        return theta, None
    if kind not in SCALINGS:
        names = ", ".join(("default", *SCALINGS))
        raise ConfigError(f"rope_type {kind!r} with {sorted(rope)} must be one of {names}")
    if kind in ("yarn", "llama3"):
        original = rope.pop("original_max_position_embeddings", max_seq_len)
        rope["original_max_seq_len"] = original
    return theta, {"type": kind, **rope}


def _context(cfg: ModelConfig) -> int:
    """What YaRN reaches: a config may keep the original length, as Qwen2.5's card has it."""
    scaling = cfg.rope_scaling
    if isinstance(scaling, YarnScaling):
        reach = min(scaling.factor * scaling.original_max_seq_len, 2**31)
        return max(cfg.max_seq_len, round(reach))
    return cfg.max_seq_len


def _rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    scaling, size = cfg.rope_scaling, cfg.head_size
    if scaling is None:
        return {"rope_theta": cfg.rope_theta, "rope_scaling": None}
    if isinstance(scaling, NTKScaling):  # not a type of theirs, but no more than another theta
        theta = cfg.rope_theta * scaling.factor ** (size / (size - 2))
        return {"rope_theta": theta, "rope_scaling": None}
    spelling = {"type": "rope_type", "original_max_seq_len": "original_max_position_embeddings"}
    values = cfg.to_dict()["rope_scaling"]
    rope = {spelling.get(key, key): value for key, value in values.items() if value is not None}
    return {"rope_theta": cfg.rope_theta, "rope_scaling": rope}


def _read_qwen_window(left: dict[str, Any], n_layers: int) -> Any:
    """Qwen's layers from `max_window_layers` on have the window; ours have it all or none."""
    used, width = left.pop("use_sliding_window", False), left.pop("sliding_window", 4096)
    first, kinds = left.pop("max_window_layers", 28), left.pop("layer_types", None)
    if not used or width is None:
        return None
    windowed = {layer >= first for layer in (0, n_layers - 1)}
    if kinds is not None:
        windowed = {kind == "sliding_attention" for kind in kinds}
    if len(windowed) > 1:
        refuse("use_sliding_window", used, "is for some layers only, ours all have it or none")
    return width if windowed == {True} else None


def _full_name(name: str, family: str) -> str:
    """As in the whole model: GPT-2's own files lack the prefix."""
    prefix = FAMILIES[family].prefix
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _is_conv1d(name: str) -> bool:
    """transformers' Conv1D, in GPT-2 only, stores (in, out) where a Linear stores (out, in)."""
    return re.search(r"\.c_(attn|proj|fc)\.weight$", name) is not None


def renamed(name: str, names: dict[str, str]) -> str:
    """With the dotted parts that are keys of `names` replaced."""
    for old, new in names.items():
        name = re.sub(rf"\b{re.escape(old)}\b", new, name)
    return name
