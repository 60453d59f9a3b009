"""config.json of transformers <-> ModelConfig: real files, both spellings, every refusal."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import ConfigError
from gpt2llama.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    YarnScaling,
)
from gpt2llama.model.presets import preset, presets
from gpt2llama.weights.families import FAMILIES, INERT_KEYS, MUST_BE
from gpt2llama.weights.hf import config_from_hf, config_to_hf, family_of

# The keys and values of the published files.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
LLAMA, QWEN2, GPT2 = PUBLISHED["llama-2-7b"], PUBLISHED["qwen2.5-0.5b"], PUBLISHED["gpt2"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name: str) -> None:
    # our presets have dropout off: it is the trainer's choice, and GPT-2's file says 0.1
    assert config_from_hf(PUBLISHED[name]).replace(dropout=0.0) == preset(name)


def test_every_preset_survives_the_way_out_and_back() -> None:
    beyond = []
    for name in presets():
        try:
            values = config_to_hf(preset(name))
        except ConfigError:
            beyond.append(name)
        else:
            assert config_from_hf(values) == preset(name), name
    assert beyond == ["transformer-2017", "zh-3m-2017"]


SCALED = [
    ({"type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    ({"rope_type": "dynamic", "factor": 2}, DynamicScaling(2)),
    ({"type": "yarn", "rope_type": "yarn", "factor": 4.0}, YarnScaling(4.0, 4096)),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "truncate": True,
            "mscale": None,
        },
        YarnScaling(4.0, 1024, 16, 2, 1.5),
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 2048),
    ),
    ({"rope_type": "default"}, None),
]


@pytest.mark.parametrize(("rope", "scaling"), SCALED)
def test_both_spellings_of_rope(rope: dict[str, Any], scaling: Any) -> None:
    old = config_from_hf({**LLAMA, "rope_theta": 7.0, "rope_scaling": rope})
    values = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}
    new = config_from_hf({**values, "rope_parameters": {"rope_theta": 7.0, **rope}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (7.0, scaling)
    assert config_from_hf(config_to_hf(old)) == old


def test_absent_keys_mean_what_transformers_takes() -> None:
    sizes = {"vocab_size": 9, "max_position_embeddings": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 32, "hidden_size": 64, "intermediate_size": 4}
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        cfg = config_from_hf({"model_type": model_type, **sizes})
        assert (cfg.norm_eps, cfg.rope_theta, cfg.tie_embeddings) == (1e-6, 1e4, False)
        assert cfg.kv_heads == (8 if model_type == "mistral" else 32)
        assert cfg.head_size == (128 if model_type == "qwen3" else 2)
        assert cfg.sliding_window == (4096 if model_type == "mistral" else None)
    gpt2 = {"vocab_size": 9, "n_positions": 8, "n_layer": 1, "n_head": 2, "n_embd": 4}
    cfg = config_from_hf({"model_type": "gpt2", **gpt2})
    assert (cfg.d_ff, cfg.norm_eps, cfg.tie_embeddings, cfg.dropout) == (16, 1e-5, True, 0.1)


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, 32768),
        ({"use_sliding_window": True, "max_window_layers": 24}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}, 32768),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 24}, None),
        ({"use_sliding_window": False, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
    ],
)
def test_qwen_windows(values: dict[str, Any], window: int | None) -> None:
    assert config_from_hf({**QWEN2, **values}).sliding_window == window


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mixtral"}, "mixtral"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"sliding_window": 512}, "sliding_window"),
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ("llama", {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "ntk"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1}}, "mscale"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"num_key_value_heads": 5}, "n_kv_heads"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("llama", {"rope_theta": 10**400}, "rope_theta"),
    ("gpt2", {"rope_theta": 1e4}, "rope_theta"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, "use_sliding_window"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("qwen2", {"attention_bias": True}, "attention_bias"),
]


def published(model_type: str) -> dict[str, Any]:
    return next(dict(v) for v in PUBLISHED.values() if v["model_type"] == model_type)


@pytest.mark.parametrize(("family", "change", "named"), REFUSED)
def test_refusals_name_the_key(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf({**published(family), **change})


def test_missing_size_is_named() -> None:
    values = published("llama")
    del values["intermediate_size"]
    with pytest.raises(ConfigError, match="intermediate_size"):
        config_from_hf(values)


def test_ignore_keys_overrules() -> None:
    expected = config_from_hf(LLAMA)
    for key, value in {"sparsity": 1, "mlp_bias": 3, "rope_scaling": {"x": 1}}.items():
        with pytest.raises(ConfigError, match=key if key != "rope_scaling" else "'x'"):
            config_from_hf({**LLAMA, key: value})
        assert config_from_hf({**LLAMA, key: value}, ignore_keys=(key,)) == expected
    with pytest.raises(ConfigError, match=r"no key 'rope_scal' to ignore; did you mean 'rope_sc"):
        config_from_hf({**LLAMA, "rope_scaling": None}, ignore_keys=["rope_scal"])
    unbounded = config_from_hf(PUBLISHED["mistral-7b"], ignore_keys=["sliding_window"])
    assert unbounded.sliding_window is None


def test_what_is_only_for_training_need_not_agree() -> None:
    assert config_from_hf({**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.2}).dropout == 0.2
    assert config_from_hf({**LLAMA, "attention_dropout": 0.1}) == config_from_hf(LLAMA)


def test_yarn_reaches_as_far_as_its_factor() -> None:
    """Qwen2.5's card: the context stays the original's in the file."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = {**QWEN2, "max_position_embeddings": 32768}
    assert config_from_hf({**qwen, "rope_scaling": yarn}).max_seq_len == 131072
    long = {**qwen, "max_position_embeddings": 131072, "rope_scaling": yarn}
    assert config_from_hf(long).max_seq_len == 131072


def test_no_key_is_in_two_tables() -> None:
    assert not INERT_KEYS & MUST_BE.keys()
    for family in FAMILIES.values():
        assert not INERT_KEYS & family.keys.keys()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
EXTRA_KEYS = ["rope_scaling", "rope_parameters", "layer_types", "max_window_layers", "n_inner"]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_any_value_gives_a_config_or_a_sentence(name: str, data: st.DataObject) -> None:
    values = dict(PUBLISHED[name])
    for key in data.draw(st.lists(st.sampled_from([*values, *EXTRA_KEYS]), max_size=3)):
        values[key] = data.draw(JSON)
    if isinstance(values.get("rope_scaling"), dict) and data.draw(st.booleans()):
        values["rope_scaling"]["rope_type"] = data.draw(st.sampled_from(["yarn", "llama3"]) | JSON)
    with contextlib.suppress(ConfigError):
        assert isinstance(config_from_hf(values), ModelConfig)


SWITCHES: dict[str, list[Any]] = {
    "norm": ["rmsnorm", "layernorm"],
    "norm_placement": ["pre", "post"],
    "norm_bias": [True, False],
    "position": ["rope", "learned", "none"],
    "n_kv_heads": [None, 2, 4],
    "head_dim": [None, 6],
    "activation": ["silu", "gelu_tanh", "relu2"],
    "gated_mlp": [True, False],
    "qkv_bias": [False, True],
    "out_bias": [False, True],
    "mlp_bias": [False, True],
    "tie_embeddings": [True, False],
    "embed_scale": [False, True],
    "qk_norm": [False, True],
    "sliding_window": [None, 3],
    "logit_softcap": [None, 5.0],
}
SIZES = {"vocab_size": 9, "max_seq_len": 8, "n_layers": 2, "n_heads": 4, "d_model": 16, "d_ff": 12}
GPT2_LIKE = {"norm": "layernorm", "position": "learned", "gated_mlp": False}
GPT2_LIKE |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([{}, GPT2_LIKE]), st.data())
def test_out_and_back_or_a_refusal_that_helps(base: dict[str, Any], data: st.DataObject) -> None:
    """Where no family has the switches, undoing those the error names makes it work."""
    changed = data.draw(st.lists(st.sampled_from(sorted(SWITCHES)), max_size=4, unique=True))
    switches = {name: data.draw(st.sampled_from(SWITCHES[name])) for name in changed}
    cfg = ModelConfig(**SIZES | base | switches)
    try:
        values = config_to_hf(cfg)
    except ConfigError as error:
        named = [name for name in SWITCHES if f"{name}=" in str(error)]
        assert named
        cures = {name: FAMILIES[nearest(error)].fixed.get(name, False) for name in named}
        config_to_hf(cfg.replace(**cures))
    else:
        plain = cfg.replace(n_kv_heads=None if cfg.kv_heads == cfg.n_heads else cfg.n_kv_heads)
        if cfg.norm == "rmsnorm":
            plain = plain.replace(norm_bias=True)  # without effect
        assert config_from_hf(values) == plain
        assert values["model_type"] == family_of(cfg)


def nearest(error: ConfigError) -> str:
    return str(error).split("the nearest, ")[1].split(",")[0]


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "llama"),
        ({"sliding_window": 4}, "mistral"),
        ({"head_dim": 6, "d_model": 18}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "sliding_window": 4}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "qkv_bias": True, "out_bias": True}, "qwen3"),
        (GPT2_LIKE, "gpt2"),
    ],
)
def test_family_of(changes: dict[str, Any], family: str) -> None:
    assert family_of(ModelConfig(**SIZES | changes)) == family


def test_static_ntk_is_written_as_another_theta() -> None:
    cfg = ModelConfig(**SIZES, rope_scaling=NTKScaling(4.0))
    back = config_from_hf(config_to_hf(cfg))
    assert back.rope_scaling is None
    assert back.rope_theta == pytest.approx(1e4 * 4.0 ** (4 / 2))
