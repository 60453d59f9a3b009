"""Hugging Face folders whose tensors are not the config's: refused, naming file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2llama.errors import WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.weights import load, open_model, save

CFG = ModelConfig(
    vocab_size=40, max_seq_len=16, n_layers=2, n_heads=2, n_kv_heads=1, d_model=8, d_ff=12
)
State = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj"
K = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(Transformer(CFG), None, tmp_path / "out", format="hf")
    return tmp_path / "out"


def edit(folder: Path, change: Callable[[State], Any]) -> State:
    state = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors")
    return state


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(f"{Q}.weight"), f"lacks the tensor {Q}.weight, which its config asks for"),
        (lambda s: s.update({f"{Q}.bias": torch.ones(8)}), f"no place for: {Q}.bias"),
        (lambda s: s.update({f"{Q}.scale": torch.ones(1)}), f"no place for: {Q}.scale"),
        (
            lambda s: s.update({"model.layers.2.input_layernorm.weight": torch.ones(8)}),
            "no place for: model.layers.2.input_layernorm.weight",
        ),
        (
            lambda s: s.update({f"{K}.weight": torch.ones(8, 8)}),
            rf"{K}.weight has the shape \(8, 8\), but its config asks for \(4, 8\)",
        ),
        (lambda s: s.update({f"{Q}.weight": torch.ones(64)}), rf"{Q}.weight has the shape \(64,\)"),
        (
            lambda s: s.update({f"{Q}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}),
            rf"{Q}\.weight is F8_E4M3, not a float",
        ),
        (
            lambda s: s.update({"model.x": torch.ones(1), "model.y": torch.ones(1)}),
            "for: model.x, model.y",
        ),
    ],
)
def test_tensors_that_the_config_does_not_ask_for(
    change: Callable[[State], Any], message: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(WeightsError, match=rf"{folder}.*{message}"):
        load(folder)


def test_the_whole_list_of_extra_tensors_is_not_printed(folder: Path) -> None:
    edit(folder, lambda s: s.update({f"model.x{i}": torch.ones(1) for i in range(9)}))
    with pytest.raises(WeightsError, match=r"model\.x3, model\.x4 and 4 more$"):
        load(folder)


def test_an_untied_model_without_a_head(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"lacks the tensor lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 3, r"lacks the tensor model\.layers\.2\."),
        ("num_hidden_layers", 1, r"no place for: model\.layers\.1\."),
        ("num_key_value_heads", 2, r"k_proj\.weight has the shape \(4, 8\).*\(8, 8\)"),
        ("vocab_size", 39, r"embed_tokens\.weight has the shape \(40, 8\).*\(39, 8\)"),
        ("attention_bias", True, r"lacks the tensor .*q_proj\.bias"),
    ],
)
def test_a_config_of_another_model(key: str, value: Any, message: str, folder: Path) -> None:
    set_config(folder, **{key: value})
    with pytest.raises(WeightsError, match=message):
        load(folder)


def shard(folder: Path, state: State) -> dict[str, Path]:
    """Into a and b, tensor by tensor in turn. Returns the file of each."""
    place = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(state))}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({k: v for k, v in state.items() if place[k] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}), encoding="utf-8")
    return {name: folder / file for name, file in place.items()}


def test_sharded_tensors_are_checked_as_whole_ones(folder: Path) -> None:
    state = edit(folder, lambda s: s.update({f"{K}.weight": torch.ones(8, 8)}))
    file = shard(folder, state)[f"{K}.weight"]
    message = rf"^{file}: {K}\.weight has the shape \(8, 8\).*\(4, 8\)"
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_extra_tensors_are_named_as_their_shard_has_them(folder: Path) -> None:
    extra = {name: torch.ones(1) for name in ("x", "y", "z")}
    place = shard(folder, edit(folder, lambda s: s.update(extra)))
    assert place["x"] == place["z"] != place["y"]
    message = rf"^{place['x']} has tensors .* no place for: x, z and 1 more$"
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_a_shard_that_is_truncated(folder: Path) -> None:
    shard(folder, edit(folder, dict))
    load(folder)
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=r"b\.safetensors is truncated"):
        open_model(folder)


def test_an_index_that_lists_a_tensor_that_is_not_there(folder: Path) -> None:
    name = f"{Q}.weight"
    file = shard(folder, edit(folder, dict))[name]
    save_file({k: v for k, v in load_file(file).items() if k != name}, file)
    with pytest.raises(WeightsError, match=f"{folder} lacks the tensor {name}"):
        load(folder)
