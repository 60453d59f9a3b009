"""Quantised models on disk: the same integers come back, and damage is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sharp import make
from torch import Tensor

from gpt2llama.assets import fetch
from gpt2llama.errors import AssetError, ConfigError, Gpt2LlamaError, InputError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.quant.apply import (
    dequantised,
    quantise,
    quantised_layers,
    schemes_of,
    set_activations,
    swapped,
)
from gpt2llama.quant.linear import QuantEmbedding
from gpt2llama.quant.scheme import QuantScheme, scheme
from gpt2llama.weights import load, open_model, save

CFG = ModelConfig(
    vocab_size=40, max_seq_len=16, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=96
)
GPT2 = CFG.replace(
    norm="layernorm", position="learned", gated_mlp=False, activation="gelu_tanh", n_kv_heads=None,
    qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
IDS = torch.arange(24).view(2, 12)
INT4 = scheme("int4")


def model_of(cfg: ModelConfig = CFG) -> Transformer:
    return make(cfg, dtype=torch.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(quantise(model_of(), INT4), None, tmp_path / "int4")
    return tmp_path / "int4"


@pytest.mark.parametrize("how", [INT4, QuantScheme(bits=4, group=64, zero=True), scheme("int8")])
@pytest.mark.parametrize("cfg", [CFG, GPT2, CFG.replace(tie_embeddings=False)])
def test_round_trip(cfg: ModelConfig, how: QuantScheme, tmp_path: Path) -> None:
    small = quantise(model_of(cfg), how)
    save(small, None, tmp_path / "out")
    back, _ = load(tmp_path / "out")
    assert back.state_dict().keys() == small.state_dict().keys()
    for name, tensor in small.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
        assert back.state_dict()[name].dtype == tensor.dtype
    assert schemes_of(back) == schemes_of(small)
    assert torch.equal(back(IDS), small(IDS))
    assert (back.embed_tokens.table is back.lm_head) == cfg.tie_embeddings
    assert not back.training


def test_layers_of_several_schemes(tmp_path: Path) -> None:
    """The head in 8 bits, the rest in 4, down_proj (K = 96) left alone by a group of 64."""
    model = model_of()
    layers = quantised_layers(quantise(model, QuantScheme(bits=4, group=64)))
    layers["lm_head"] = quantised_layers(quantise(model, scheme("int8")))["lm_head"]
    mixed = swapped(model, layers)
    save(mixed, None, tmp_path / "out")
    values = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert values["quantization"]["bits"] == 4
    assert values["quantization"]["exceptions"]["lm_head"]["bits"] == 8
    back, _ = load(tmp_path / "out")
    assert schemes_of(back) == schemes_of(mixed)
    assert not any("down_proj" in name for name in schemes_of(back))
    assert torch.equal(back(IDS), mixed(IDS))


def test_quantised_when_loaded(tmp_path: Path) -> None:
    save(model_of().bfloat16(), None, tmp_path / "out")
    for name in ("int8", "int4"):
        small, _ = load(tmp_path / "out", quant=name)
        want = quantise(model_of().bfloat16(), scheme(name))
        assert torch.equal(small(IDS), want(IDS))
        with pytest.raises(InputError, match="computes in float32"):
            load(tmp_path / "out", quant=name, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="no blocks to keep"):
        load(tmp_path / "out", quant="keep")


def test_a_quantised_model_is_not_quantised_again(saved: Path) -> None:
    with pytest.raises(InputError, match="quantised already"):
        load(saved, quant="int8")
    with pytest.raises(InputError, match="computes in float32"):
        load(saved, dtype=torch.bfloat16)
    assert torch.equal(load(saved, quant="keep")[0](IDS), load(saved)[0](IDS))


@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_other_formats_are_given_the_dequantised(format: str, tmp_path: Path) -> None:
    small = quantise(model_of(), replace(INT4, activations="float"))
    save(small, None, tmp_path / "out.gguf", format=format)
    back, _ = load(tmp_path / "out.gguf")
    assert schemes_of(back) == {}
    torch.testing.assert_close(back(IDS), small(IDS))
    plain = dequantised(small)
    assert plain.lm_head.weight is plain.embed_tokens.weight
    assert torch.equal(plain.lm_head.weight, small.lm_head.dequantise())


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        values["quantization"] |= fields
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")

    return change


def change_tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        new = change(state.pop(name)) if name in state else change(torch.zeros(1))
        save_file(state if new is None else {**state, name: new}, folder / "model.safetensors")

    return write


WORDS = "layers.0.mlp.down_proj.words"


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (change_config(colour=3), ConfigError, "no field 'colour'"),
        (change_config(bits=3), ConfigError, "bits must be one of 8, 4"),
        (change_config(group=7), ConfigError, "group must be 32"),
        (change_config(group=64), WeightsError, "96 inputs.*64 must divide"),
        (change_config(bits=8), WeightsError, "shape"),
        (change_config(zero=True), WeightsError, r"lacks the tensor .*\.minimum"),
        (change_config(exceptions=[]), ConfigError, "must be objects"),
        (
            change_config(exceptions={"norm": {"bits": 8}}),
            ConfigError,
            "exception 'norm' is no",
        ),
        (change_tensor(WORDS, lambda t: t[:-1].clone()), WeightsError, "down_proj.words.*shape"),
        (change_tensor(WORDS, lambda t: t.float()), WeightsError, "float32, not int32"),
        (change_tensor(WORDS, lambda t: None), WeightsError, "lacks the tensor .*down_proj.weight"),
        (change_tensor("norm.weight", lambda t: t.int()), WeightsError, "int32, not a float"),
        (
            change_tensor("lm_head.scale", lambda t: t.bfloat16()),
            WeightsError,
            "bfloat16, not float16",
        ),
        (
            change_tensor("norm.words", lambda t: t.int()),
            WeightsError,
            "no place for: norm.words",
        ),
    ],
)
def test_damage(
    damage: Callable[[Path], None], error: type[Gpt2LlamaError], said: str, saved: Path
) -> None:
    damage(saved)
    with pytest.raises(error, match=said) as caught:
        load(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_without_a_scheme(saved: Path) -> None:
    values = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    del values["quantization"]
    (saved / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"lacks the tensor .*weight"):
        load(saved)


# GGUF blocks that stay as they are


def write_q4_1(path: Path, source: Path) -> None:
    """The file with random Q4_1 blocks in place of its Q4_0 ones, of which each has two bytes
    less: the sizes change, and so the offsets of what follows."""
    from gpt2llama.weights.gguf_blocks import BY_NAME
    from gpt2llama.weights.gguf_file import Stored, read_header, write_file

    metadata, tensors = read_header(source)
    rng, raw, table = np.random.default_rng(0), source.read_bytes(), {}
    data = []
    for name, stored in tensors.items():
        part = np.frombuffer(raw, np.uint8, stored.size, stored.offset)
        kind = stored.kind
        if kind.name == "Q4_0":
            kind = BY_NAME["Q4_1"]
            blocks = part.reshape(-1, 18)
            least = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
            part = np.hstack([blocks[:, :2], least, blocks[:, 2:]]).reshape(-1)
        table[name] = Stored(kind, stored.shape)
        data.append((name, np.ascontiguousarray(part)))
    write_file(path, metadata, table, data)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("cfg", [CFG, GPT2, CFG.replace(tie_embeddings=False)])
def test_blocks_are_kept(cfg: ModelConfig, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save(model_of(cfg), None, path, format="gguf", dtype=kind if kind != "Q4_1" else "Q4_0")
    if kind == "Q4_1":
        write_q4_1(tmp_path / "q4_1.gguf", path)
        path = tmp_path / "q4_1.gguf"
    expanded, kept = load(path)[0], load(path, quant="keep")[0]
    (how,) = set(schemes_of(kept).values())
    assert (how.bits, how.group, how.zero) == (8 if kind == "Q8_0" else 4, 32, kind == "Q4_1")
    weights = dict(dequantised(kept).named_parameters())
    for name, want in expanded.named_parameters():
        assert torch.equal(weights[name], want), name
    assert isinstance(kept.embed_tokens, QuantEmbedding)
    assert (kept.embed_tokens.table is kept.lm_head) == cfg.tie_embeddings
    set_activations(kept, "float")
    assert torch.equal(kept(IDS), expanded(IDS))
    save(kept, None, tmp_path / "ours")
    assert torch.equal(load(tmp_path / "ours")[0](IDS), expanded(IDS))


@pytest.mark.network
def test_a_real_file_that_mixes_types() -> None:
    """SmolLM2-135M: Q4_1, and a head of another kind."""
    try:
        path = fetch("smollm2-135m")
    except AssetError as error:
        pytest.skip(f"{error}: gpt2llama fetch smollm2-135m")
    expanded, kept = load(path)[0], load(path, quant="keep")[0]
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 260, 1187]])
    with torch.inference_mode():
        want = expanded(ids)
        rounded = kept(ids)
        set_activations(kept, "float")
        assert torch.equal(kept(ids), want)
    difference = (rounded - want).norm() / want.norm()
    assert 0 < difference < 0.05  # activations in 8 bits
    layers, opened = quantised_layers(kept), open_model(path)
    assert {how.zero for how in schemes_of(kept).values()} >= {True}
    kinds = [info.kind for info in opened.headers.values()]
    assert len(layers) == sum(kind in ("Q4_1", "Q8_0", "Q4_0") for kind in kinds)


def test_a_file_that_ends_inside_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save(model_of(), None, path, format="gguf", dtype="Q8_0")
    how = open_model(path).blocks("blk.0.ffn_down.weight")
    assert how is not None
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(WeightsError, match=r"ends inside the tensor blk\.0\.ffn_down\.weight"):
        how[1]()
