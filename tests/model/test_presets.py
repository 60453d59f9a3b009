"""Presets: the published sizes and switches, the family by depth, and the ladder."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest

from gpt2llama.errors import ConfigError
from gpt2llama.model.config import Llama3Scaling, ModelConfig
from gpt2llama.model.presets import depth, ladder, preset, presets
from gpt2llama.plan import parameters

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-30b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "zh-3m": 3_410_176,
}


def changed(a: ModelConfig, b: ModelConfig) -> set[str]:
    return {f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)}


def count(cfg: ModelConfig) -> int:
    return parameters(cfg)["total"]


@pytest.mark.parametrize("name", COUNTS)
def test_published_number_of_parameters(name: str) -> None:
    assert count(preset(name)) == COUNTS[name]


def test_every_preset_is_counted_or_ours_or_of_2017() -> None:
    assert set(presets()) - set(COUNTS) == {"transformer-2017", "zh-3m-gpt2", "zh-3m-2017"}
    assert len(presets()) == len(set(presets())) == 30


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'llama-3\.2-1B'; did you mean 'llama-3\.2-1b'"):
        preset("llama-3.2-1B")


# What a count cannot see: context, eps, theta, tying, bias, and the switches without weights.
@pytest.mark.parametrize(
    ("name", "max_seq_len", "norm_eps", "rope_theta", "tied"),
    [
        ("gpt2-xl", 1024, 1e-5, 10000, True),
        ("llama-1-7b", 2048, 1e-6, 10000, False),
        ("llama-1-30b", 2048, 1e-6, 10000, False),
        ("llama-1-65b", 2048, 1e-5, 10000, False),
        ("llama-2-7b", 4096, 1e-5, 10000, False),
        ("llama-2-13b", 4096, 1e-5, 10000, False),
        ("llama-2-70b", 4096, 1e-5, 10000, False),
        ("mistral-7b", 32768, 1e-5, 10000, False),
        ("tinyllama-1.1b", 2048, 1e-5, 10000, False),
        ("llama-3-8b", 8192, 1e-5, 500000, False),
        ("llama-3-70b", 8192, 1e-5, 500000, False),
        ("llama-3.1-405b", 131072, 1e-5, 500000, False),
        ("llama-3.2-1b", 131072, 1e-5, 500000, True),
        ("llama-3.2-3b", 131072, 1e-5, 500000, True),
        ("llama-3.3-70b", 131072, 1e-5, 500000, False),
        ("smollm2-135m", 8192, 1e-5, 100000, True),
        ("smollm2-360m", 8192, 1e-5, 100000, True),
        ("smollm2-1.7b", 8192, 1e-5, 130000, True),
        ("qwen2.5-0.5b", 32768, 1e-6, 1000000, True),
        ("qwen3-0.6b", 40960, 1e-6, 1000000, True),
    ],
)
def test_published_numbers(
    name: str, max_seq_len: int, norm_eps: float, rope_theta: float, tied: bool
) -> None:
    cfg = preset(name)
    assert (cfg.max_seq_len, cfg.norm_eps) == (max_seq_len, norm_eps)
    assert (cfg.rope_theta, cfg.tie_embeddings) == (rope_theta, tied)


def test_rope_scaling_came_with_llama_3_1_and_only_mistral_has_a_window() -> None:
    factors = {n: s.factor for n in presets() if (s := preset(n).rope_scaling)}
    new = ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.3-70b"]
    assert factors == dict.fromkeys(new, 8.0) | {"llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0}
    assert preset("llama-3.2-1b").rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert {n: w for n in presets() if (w := preset(n).sliding_window)} == {"mistral-7b": 4096}


def test_heads() -> None:
    sizes = {n: (preset(n).n_heads, preset(n).kv_heads, preset(n).head_size) for n in presets()}
    assert sizes["gpt2-xl"] == (25, 25, 64)
    assert sizes["llama-2-70b"] == sizes["llama-3-70b"] == (64, 8, 128)
    assert sizes["llama-3.1-405b"] == (128, 8, 128)
    assert sizes["llama-3.2-1b"] == (32, 8, 64)
    assert sizes["llama-3.2-3b"] == (24, 8, 128)
    assert sizes["smollm2-135m"] == (9, 3, 64)
    assert sizes["smollm2-1.7b"] == (32, 32, 64)
    assert sizes["qwen2.5-0.5b"] == (14, 2, 64)
    assert sizes["qwen3-0.6b"] == (16, 8, 128)
    assert sizes["zh-3m"] == (4, 2, 64)


def test_what_changed_from_model_to_model() -> None:
    size = {"vocab_size", "max_seq_len", "n_layers", "n_heads", "d_model", "d_ff"}
    switches = {"norm_placement", "activation", "position", "embed_scale"}
    paper = preset("transformer-2017")
    assert changed(paper, preset("gpt2")) == size | switches | {"norm_eps", "dropout"}
    assert changed(preset("gpt2"), preset("llama-2-7b")) - size == {
        *("norm", "position", "activation", "gated_mlp"),
        *("qkv_bias", "out_bias", "mlp_bias", "tie_embeddings"),
    }
    assert changed(preset("llama-3-8b"), preset("llama-3.1-8b")) == {"max_seq_len", "rope_scaling"}
    assert preset("llama-3.3-70b") == preset("llama-3.1-70b")
    assert preset("qwen2.5-0.5b").qkv_bias
    assert not preset("qwen2.5-0.5b").out_bias
    assert preset("qwen3-0.6b").qk_norm


def test_ours_are_of_one_size() -> None:
    ours = [preset(n) for n in ("zh-3m-2017", "zh-3m-gpt2", "zh-3m")]
    for cfg in ours:
        assert (cfg.vocab_size, cfg.max_seq_len, cfg.n_layers, cfg.d_model) == (4096, 128, 4, 256)
        assert cfg.tie_embeddings
        assert count(cfg) == pytest.approx(3_410_176, rel=0.01)


def test_ladder_changes_one_switch_a_rung() -> None:
    rungs = ladder()
    steps = list(rungs.values())
    assert [changed(a, b) - {"d_ff"} for a, b in pairwise(steps)] == [
        {"norm_placement"},
        {"activation"},
        {"position", "embed_scale"},
        {"norm"},
        {"position"},
        {"activation", "gated_mlp"},
        {"n_kv_heads"},
        {"qkv_bias", "out_bias", "mlp_bias"},
        {"tie_embeddings"},
    ]
    assert next(iter(rungs)) == "2017"
    assert rungs["2017"] == preset("zh-3m-2017")
    assert rungs["learned"] == preset("zh-3m-gpt2")
    assert rungs["no-bias"] == preset("zh-3m")
    assert rungs["untied"] == preset("zh-3m").replace(tie_embeddings=False)
    for cfg in steps[:-1]:
        assert count(cfg) == pytest.approx(3_410_176, rel=0.01)


def test_ladder_switches_follow_the_presets_of_gpt2_and_llama() -> None:
    size = {"vocab_size", "max_seq_len", "n_layers", "n_heads", "d_model", "d_ff"}
    assert changed(ladder()["learned"], preset("gpt2")) <= size
    assert changed(ladder()["untied"], preset("llama-2-7b")) <= size | {"n_kv_heads"}


@pytest.mark.parametrize("n", [1, 3, 12, 32])
def test_depth_is_the_one_dial(n: int) -> None:
    cfg = depth(n)
    assert (cfg.n_layers, cfg.d_model, cfg.head_size) == (n, 64 * n, 64)
    assert 8 * cfg.d_model <= 3 * cfg.d_ff < 8 * cfg.d_model + 3 * 64
    assert cfg.d_ff % 64 == 0
    assert changed(cfg, depth(n + 1)) == {"n_layers", "n_heads", "d_model", "d_ff"}


def test_depth_matches_its_docstring_and_refuses_nonsense() -> None:
    assert [round(count(depth(n)) / 1e6) for n in (4, 12, 20)] == [12, 110, 438]
    for wrong in (0, -2, 2.5):
        with pytest.raises(ConfigError, match="n_layers"):
            depth(wrong)  # type: ignore[arg-type]  # meant to be wrong
