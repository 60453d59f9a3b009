"""Logits of every family equal transformers', in through `load` and out through `save`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_toys import TEXT, TOYS, VOCAB, logits, toy
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2llama.model.config import DynamicScaling, ModelConfig, NTKScaling
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import train_bpe
from gpt2llama.weights import load, save


@pytest.mark.parametrize("name", TOYS)
def test_logits_equal_both_ways(name: str, tmp_path: Path) -> None:
    theirs = toy(name)
    theirs.save_pretrained(tmp_path / "in")
    ours, tokenizer = load(tmp_path / "in")
    assert tokenizer is None
    assert not ours.training
    assert_close(logits(ours), logits(theirs))

    save(ours, None, tmp_path / "out", format="hf")
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert type(back) is type(theirs)
    assert_close(logits(back), logits(theirs), rtol=0, atol=0)


def test_dynamic_within_its_context(tmp_path: Path) -> None:
    theirs = toy("llama-dynamic-beyond")
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    assert isinstance(ours.config.rope_scaling, DynamicScaling)
    within = TEXT[:, : ours.config.max_seq_len]
    assert_close(logits(ours, within), logits(theirs, within))


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "qwen3"])
def test_shards(name: str, tmp_path: Path) -> None:
    theirs = toy(name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_close(logits(load(tmp_path)[0]), logits(theirs))


def test_gpt2_as_openai_released_it(tmp_path: Path) -> None:
    """Names without `transformer.`, mask buffers among the weights, a sparse config."""
    theirs = toy("gpt2")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 80, 80).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file({k: v.clone() for k, v in state.items()}, file)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    kept = {"model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"}
    config = {k: v for k, v in config.items() if k in kept} | {"n_ctx": 80}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_close(logits(load(tmp_path)[0]), logits(theirs))


def test_llama_with_its_old_buffers_and_a_second_copy_of_the_head(tmp_path: Path) -> None:
    theirs = toy("llama-tied")
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    assert_close(logits(load(tmp_path)[0]), logits(theirs))


SIZES = {"vocab_size": VOCAB, "max_seq_len": 80, "n_layers": 2, "n_heads": 4, "d_model": 32}


@pytest.mark.parametrize(
    ("cfg", "family"),
    [
        (ModelConfig(**SIZES, d_ff=48, rope_scaling=NTKScaling(4.0)), "Llama"),
        (ModelConfig(**SIZES, d_ff=48, activation="relu2", n_kv_heads=1), "Llama"),
        (ModelConfig(**SIZES, d_ff=48, head_dim=6).replace(d_model=30), "Mistral"),
        (ModelConfig(**SIZES, d_ff=48, qkv_bias=True, rope_theta=500.0), "Qwen2"),
    ],
    ids=["ntk", "relu2", "head-dim", "qkv-bias"],
)
def test_export_of_ours(cfg: ModelConfig, family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Transformer(cfg).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    save(ours, None, tmp_path / "out", format="hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    assert_close(logits(theirs), logits(ours))


def test_exported_tokenizer(tmp_path: Path) -> None:
    text = "却说曹操引军至赤壁，周瑜笑曰：2017, then 2026! 😀"
    tokenizer = train_bpe([text * 9], 300)
    cfg = ModelConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size}, d_ff=48)
    save(Transformer(cfg), tokenizer, tmp_path / "out", format="hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    loaded = load(tmp_path / "out")[1]
    assert loaded is not None
    assert loaded.fingerprint == tokenizer.fingerprint
