"""GGUF files of tiny models of transformers, written by gguf: logits in, the same file out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, RopeScalingType
from hf_toys import TEXT, VOCAB, logits, sharpen
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

import gpt2llama as g
from gpt2llama.weights import load, open_model, save

_NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 96, "vocab_size": VOCAB}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NARROW = {"hidden_size": 36, "head_dim": 8}
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama-tied-eps": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    "llama-mha-theta": (
        "llama",
        {"num_key_value_heads": 6, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ),
    "llama-narrow": ("llama", NARROW),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", NARROW),
}


def toy(name: str) -> PreTrainedModel:
    return make(*TOYS[name])


def make(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    sizes = GPT2 if model_type == "gpt2" else LLAMA
    config = transformers.CONFIG_MAPPING[model_type](**{**sizes, **_NO_IDS, **changes})
    return sharpen(AutoModelForCausalLM.from_config(config))


def write(path: Path, theirs: PreTrainedModel, **rope: Any) -> None:
    """By gguf's writer and its map of names, and the row order of llama.cpp's converter.

    rope: names of the writer's methods and their values; `factors` is a tensor.
    """
    config, kind = theirs.config, theirs.config.model_type
    writer = GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if kind == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if (size := getattr(config, "head_dim", None)) is not None:
            writer.add_key_length(size)
            writer.add_value_length(size)
            writer.add_rope_dimension_count(size)
    if (factors := rope.pop("factors", None)) is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    for method, value in rope.items():
        getattr(writer, f"add_rope_scaling_{method}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.T if ".c_" in name and tensor.dim() == 2 else tensor
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        theirs_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs_name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(rows: Tensor, heads: int) -> Tensor:
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", TOYS)
def test_logits_equal_both_ways(name: str, tmp_path: Path) -> None:
    theirs = toy(name)
    write(tmp_path / "in.gguf", theirs)
    ours, tokenizer = load(tmp_path / "in.gguf")
    assert tokenizer is None
    assert_close(logits(ours), logits(theirs))
    assert ours.config.tie_embeddings == theirs.config.tie_word_embeddings

    save(ours, None, tmp_path / "out.gguf", format="gguf")
    same_files(tmp_path / "in.gguf", tmp_path / "out.gguf")


def same_files(a: Path, b: Path) -> None:
    """Every tensor the same, and every key of `a` in `b` with the same value and type."""
    one, other = GGUFReader(a), GGUFReader(b)
    tensors = [{t.name: t for t in reader.tensors} for reader in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        np.testing.assert_array_equal(tensors[1][name].data, tensor.data)
        assert tensors[1][name].tensor_type == tensor.tensor_type
    for key, field in one.fields.items():
        if not key.startswith("GGUF."):
            assert other.fields[key].contents() == field.contents()
            assert other.fields[key].types == field.types


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_of_a_llama(biases: dict[str, bool], tmp_path: Path) -> None:
    """Q's and K's are permuted as their rows are."""
    theirs = make("llama", biases)
    write(tmp_path / "in.gguf", theirs)
    ours, _ = load(tmp_path / "in.gguf")
    assert_close(logits(ours), logits(theirs))
    save(ours, None, tmp_path / "out.gguf", format="gguf")
    same_files(tmp_path / "in.gguf", tmp_path / "out.gguf")


def scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 2e5, "rope_type": rope_type, **values}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {"type": RopeScalingType.YARN, "factor": 4.0, "orig_ctx_len": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
USUAL = 0.1 * np.log(4.0) + 1


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        (scaled("linear", factor=4.0), {"type": RopeScalingType.LINEAR, "factor": 4.0}),
        (scaled("linear", factor=4.0), {"factor": 4.0}),
        (scaled("default"), {"type": RopeScalingType.NONE, "factor": 4.0}),
        (scaled("yarn", **YARN), YARN_KEYS),
        (
            scaled("yarn", **YARN, attention_factor=1.25),
            {**YARN_KEYS, "attn_factors": 1.25 / USUAL},
        ),
        (scaled("yarn", **YARN, attention_factor=1.25), {**YARN_KEYS, "yarn_attn_factor": 1.25}),
        (
            scaled("yarn", **YARN, beta_fast=16.0, beta_slow=2.0),
            {**YARN_KEYS, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        ),
        (scaled("llama3", factor=8.0, original_max_position_embeddings=8192, **LLAMA3), {}),
        (scaled("llama3", factor=32.0, original_max_position_embeddings=8192, **LLAMA3), {}),
        (
            scaled("llama3", factor=8.0, original_max_position_embeddings=32, **LLAMA3),
            {"orig_ctx_len": 32},
        ),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_rope_scaling(
    model_type: str, parameters: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make(model_type, {"hidden_size": 96, **parameters})  # 8 pairs, 3 of llama3's between
    inv_freq, magnitude = (
        theirs.model.rotary_emb.inv_freq,
        theirs.model.rotary_emb.attention_scaling,
    )
    if parameters["rope_parameters"]["rope_type"] == "llama3":
        plain = 2e5 ** (-torch.arange(8) / 8)
        keys = {**keys, "factors": plain / inv_freq}
    write(tmp_path / "in.gguf", theirs, **keys)
    ours, _ = load(tmp_path / "in.gguf")
    got, factor = g.rope_frequencies(ours.config)
    assert_close(got.float(), inv_freq)
    assert factor == pytest.approx(magnitude, rel=1e-6)
    assert_close(logits(ours), logits(theirs))
    if "yarn_beta_fast" in keys:
        with pytest.raises(g.errors.ConfigError, match=r"rope_scaling=.*beta_fast"):
            save(ours, None, tmp_path / "out.gguf", format="gguf")
        return
    save(ours, None, tmp_path / "out.gguf", format="gguf")
    assert open_model(tmp_path / "out.gguf").config == ours.config


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_types_out(name: str, dtype: str, tmp_path: Path) -> None:
    """Read back by gguf: the types, and the numbers that gguf's own quantiser gives."""
    theirs = make(TOYS[name][0], {"hidden_size": 96})
    write(tmp_path / "in.gguf", theirs)
    ours, _ = load(tmp_path / "in.gguf")
    save(ours, None, tmp_path / "out.gguf", format="gguf", dtype=dtype)
    exact = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "in.gguf").tensors}
    opened = open_model(tmp_path / "out.gguf")
    for tensor in GGUFReader(tmp_path / "out.gguf").tensors:
        small = len(tensor.shape) == 1 or tensor.name == "position_embd.weight"
        kind = GGMLQuantizationType["F32" if small else dtype]
        assert tensor.tensor_type == kind
        want = gguf.quants.quantize(exact[tensor.name], kind)
        np.testing.assert_array_equal(tensor.data.view(np.uint8), want.view(np.uint8))
        read = opened.read(tensor.name).float().numpy()
        np.testing.assert_array_equal(read, gguf.quants.dequantize(tensor.data, kind))
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert load(tmp_path / "out.gguf")[0].embed_tokens.weight.dtype == plain.get(
        dtype, torch.float32
    )


def test_a_copy_of_the_table_is_no_head(tmp_path: Path) -> None:
    """As old conversions of GPT-2 have it; one that differs unties the model, without a word."""
    theirs = make("gpt2", {"tie_word_embeddings": False})
    theirs.lm_head.weight.data.copy_(theirs.transformer.wte.weight)
    write(tmp_path / "copy.gguf", theirs)
    ours, _ = load(tmp_path / "copy.gguf")
    assert ours.config.tie_embeddings
    assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-4)  # sums of 48 unit variances
    theirs.lm_head.weight.data[-1, -1] += 9
    write(tmp_path / "near.gguf", theirs)
    with pytest.warns(UserWarning, match=r"output\.weight.*kept, untied"):
        ours, _ = load(tmp_path / "near.gguf")
    assert_close(logits(ours, TEXT), logits(theirs), rtol=1e-5, atol=1e-4)
