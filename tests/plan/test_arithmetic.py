"""The arithmetic against the model itself (built on the meta device) and hand-worked figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import InputError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import ladder, preset, presets
from gpt2llama.plan import (
    flops_per_token,
    kv_bytes,
    kv_bytes_per_token,
    matmul_parameters,
    parameters,
    weight_bytes,
)


def built(cfg: ModelConfig) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by name, a tied table once; shapes only, whatever the size."""
    from gpt2llama import Transformer

    with torch.device("meta"):
        return dict(Transformer(cfg).named_parameters())


def part_of(name: str) -> str:
    for key, part in {
        "embed_tokens": "embedding",
        "embed_positions": "positions",
        "norm": "norms",
        "self_attn": "attention",
        "mlp": "mlp",
        "lm_head": "head",
    }.items():
        if key in name:
            return part
    raise AssertionError(name)


def assert_same_count(cfg: ModelConfig) -> None:
    counted = dict.fromkeys(parameters(cfg), 0)
    matrices = cfg.vocab_size * cfg.d_model if cfg.tie_embeddings else 0
    for name, p in built(cfg).items():
        counted[part_of(name)] += p.numel()
        counted["total"] += p.numel()
        matrices += p.numel() if p.dim() == 2 and "embed" not in name else 0
    assert parameters(cfg) == counted
    assert matmul_parameters(cfg) == matrices


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    switch = {
        name: draw(st.booleans())
        for name in (
            *("norm_bias", "gated_mlp", "qkv_bias", "out_bias", "mlp_bias"),
            *("tie_embeddings", "embed_scale", "qk_norm"),
        )
    }
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    own_head_dim = draw(st.booleans())
    head_size = 2 * draw(st.integers(1, 8))
    values: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 60)),
        "max_seq_len": draw(st.integers(1, 40)),
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": kv_heads * group,
        "n_kv_heads": None if group == 1 else kv_heads,
        "head_dim": head_size if own_head_dim else None,
        "d_model": 2 * draw(st.integers(1, 30)) if own_head_dim else kv_heads * group * head_size,
        "d_ff": draw(st.integers(1, 70)),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "norm_placement": draw(st.sampled_from(["pre", "post"])),
        "position": draw(st.sampled_from(["learned", "sinusoidal", "rope", "none"])),
        "activation": draw(st.sampled_from(["relu", "relu2", "gelu", "gelu_tanh", "silu"])),
    }
    return ModelConfig(**values, **switch)


@settings(max_examples=30, deadline=None)
@given(configs())
def test_every_part_equals_the_model_for_any_switches(cfg: ModelConfig) -> None:
    assert_same_count(cfg)


@pytest.mark.parametrize("name", presets())
def test_presets_equal_the_model(name: str) -> None:
    assert_same_count(preset(name))


@pytest.mark.parametrize("name", ["zh-3m", "zh-3m-2017"])
def test_flops_are_what_torch_counts_in_a_training_step(name: str) -> None:
    """With attention as plain products: the fused kernel's backward does one of them again."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from gpt2llama import Transformer

    cfg, steps = preset(name), 32
    model = Transformer(cfg)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, steps, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == steps * flops_per_token(cfg, steps)


def test_flops_by_hand() -> None:
    # gpt2: 12 layers of 4·768² + 2·768·3072, a head of 50257·768; T 1024.
    assert matmul_parameters(preset("gpt2")) == 84_934_656 + 38_597_376
    assert flops_per_token(preset("gpt2")) == 741_192_192 + 113_246_208
    assert flops_per_token(preset("gpt2"), 512) == 741_192_192 + 56_623_104
    # zh-3m: 6 · (4 · (196,608 + 393,216) + 4096 · 256) + 12 · 4 · 4 · 64 · 128
    assert flops_per_token(preset("zh-3m")) == 20_447_232 + 1_572_864


def test_head_width_not_d_model_sets_the_attention_flops() -> None:
    cfg = preset("qwen3-0.6b")  # 16 heads of 128 in a model of 1024
    assert flops_per_token(cfg, 2) - flops_per_token(cfg, 1) == 12 * 28 * 16 * 128


def test_kv_bytes_by_hand() -> None:
    cfg = preset("llama-3-70b")
    assert kv_bytes(cfg, 4096, dtype="fp16") == 1_342_177_280
    assert kv_bytes(cfg.replace(n_kv_heads=None), 4096, dtype="fp16") == 10_737_418_240
    assert kv_bytes(cfg, 4096, batch=3, dtype="int8") == 3 * 671_088_640
    assert kv_bytes_per_token(cfg, "int4") == 80 * 8 * 128
    ratios = {n: preset(n).n_heads // preset(n).kv_heads for n in presets() if "llama-3" in n}
    assert ratios["llama-3-70b"] == 8
    assert ratios["llama-3-8b"] == ratios["llama-3.2-1b"] == 4
    assert ratios["llama-3.2-3b"] == 3


@pytest.mark.parametrize("name", ["zh-3m", "zh-3m-2017", "qwen3-0.6b", "smollm2-135m"])
def test_kv_bytes_equal_the_cache(name: str) -> None:
    from gpt2llama import KVCache

    cfg = preset(name)
    cache = KVCache(cfg, batch_size=3, max_len=9, dtype=torch.bfloat16, device="meta")
    slots = cache.keys.numel() // (3 * cfg.n_layers * cfg.kv_heads * cfg.head_size)
    assert kv_bytes(cfg, slots, batch=3) == cache.keys.nbytes + cache.values.nbytes
    assert slots in (9, 10)  # our cache may keep one for padding


def test_weight_bytes() -> None:
    cfg = preset("llama-3-8b")
    assert weight_bytes(cfg) == 2 * 8_030_261_248
    assert weight_bytes(cfg, "fp32") == 4 * 8_030_261_248
    assert weight_bytes(cfg, "int4") == 8_030_261_248 // 2
    # Bytes a second over bytes a token: the bound on decoding at batch 1.
    bounds = [rate / weight_bytes(cfg) for rate in (273e9, 3.35e12, 5.3e12)]
    assert [round(b) for b in bounds] == [17, 209, 330]
    odd = cfg.replace(n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, d_model=3, d_ff=1)
    assert parameters(odd.replace(vocab_size=1, tie_embeddings=True))["total"] == 45
    assert weight_bytes(odd.replace(vocab_size=1, tie_embeddings=True), "int4") == 23


def test_mlp_sizes() -> None:
    cfg = preset("zh-3m").replace(n_layers=1)

    def mlp(gated: bool, d_ff: int) -> int:
        return parameters(cfg.replace(gated_mlp=gated, d_ff=d_ff))["mlp"]

    assert [mlp(False, 1024), mlp(True, 1024), mlp(True, 682)] == [524_288, 786_432, 523_776]


def test_small_chinese_gpt_depends_on_its_vocabulary() -> None:
    cfg = preset("zh-3m").replace(d_ff=704)
    totals = [parameters(cfg.replace(vocab_size=v))["total"] for v in (1, 751, 766)]
    assert totals == [2_951_424 + 256, 3_143_680, 3_147_520]


def test_what_the_biases_and_the_tie_are_worth() -> None:
    gpt2 = preset("gpt2")
    bare = gpt2.replace(qkv_bias=False, out_bias=False, mlp_bias=False)
    assert parameters(gpt2)["total"] - parameters(bare)["total"] == 82_944
    for name, saved in {"llama-3.2-1b": 262_668_288, "llama-3.2-3b": 394_002_432}.items():
        tied = preset(name)
        untied = parameters(tied.replace(tie_embeddings=False))
        assert untied["total"] - parameters(tied)["total"] == untied["head"] == saved


def test_post_norm_has_no_final_norm() -> None:
    rungs = ladder()
    assert parameters(rungs["pre-norm"])["norms"] - parameters(rungs["2017"])["norms"] == 512


def test_bad_requests_say_what_is_wrong() -> None:
    cfg = preset("gpt2")
    with pytest.raises(InputError, match=r"one of fp32, bf16, fp16, int8, int4 \(got 'fp8'\)"):
        weight_bytes(cfg, "fp8")
    with pytest.raises(InputError, match="at least 1 token"):
        kv_bytes(cfg, 0)
    with pytest.raises(InputError, match="batch"):
        kv_bytes(cfg, 8, batch=0)
    with pytest.raises(InputError, match="max_seq_len=1024"):
        flops_per_token(cfg, 1025)
    assert kv_bytes(preset("llama-2-7b"), 5000) > kv_bytes(preset("llama-2-7b"))
