"""Named models. Each is a small `replace()` of an earlier one: read down, this is the history.

Sizes and switches are those of the papers and of the published config.json and params.json files.
`max_seq_len` is the longest text the file states. Dropout is off but for the 2017 model. No torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..errors import ConfigError, did_you_mean
from .config import Llama3Scaling, ModelConfig

_Changes = dict[str, Any]


def _after(base: str | None, **changes: Any) -> tuple[str | None, _Changes]:
    return base, changes


_PRESETS: dict[str, tuple[str | None, _Changes]] = {
    # 2017, Vaswani et al., "Attention is all you need": the base model's decoder alone, one
    # vocabulary table for input and output (§3.4), eps from its code (tensor2tensor).
    "transformer-2017": _after(
        None,
        vocab_size=37000,
        max_seq_len=512,
        n_layers=6,
        n_heads=8,
        d_model=512,
        d_ff=2048,
        norm="layernorm",
        norm_eps=1e-6,
        norm_placement="post",
        position="sinusoidal",
        activation="relu",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        embed_scale=True,
        dropout=0.1,
    ),
    # 2019, GPT-2: norms moved before each sublayer, one more at the end; GELU; learned positions,
    # and so no √d on the embeddings.
    "gpt2": _after(
        "transformer-2017",
        vocab_size=50257,
        max_seq_len=1024,
        n_layers=12,
        n_heads=12,
        d_model=768,
        d_ff=3072,
        norm_eps=1e-5,
        norm_placement="pre",
        position="learned",
        activation="gelu_tanh",
        embed_scale=False,
        dropout=0.0,
    ),
    "gpt2-medium": _after("gpt2", n_layers=24, n_heads=16, d_model=1024, d_ff=4096),
    "gpt2-large": _after("gpt2-medium", n_layers=36, n_heads=20, d_model=1280, d_ff=5120),
    "gpt2-xl": _after("gpt2-large", n_layers=48, n_heads=25, d_model=1600, d_ff=6400),
    # February 2023, Llama: RMSNorm, RoPE, SwiGLU, no biases, an output table of its own.
    "llama-1-7b": _after(
        "gpt2-xl",
        vocab_size=32000,
        max_seq_len=2048,
        n_layers=32,
        n_heads=32,
        d_model=4096,
        d_ff=11008,
        norm="rmsnorm",
        norm_eps=1e-6,
        position="rope",
        activation="silu",
        gated_mlp=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
    ),
    "llama-1-13b": _after("llama-1-7b", n_layers=40, n_heads=40, d_model=5120, d_ff=13824),
    "llama-1-30b": _after("llama-1-13b", n_layers=60, n_heads=52, d_model=6656, d_ff=17920),
    "llama-1-65b": _after(
        "llama-1-30b", n_layers=80, n_heads=64, d_model=8192, d_ff=22016, norm_eps=1e-5
    ),
    # July 2023, Llama 2: twice the context; the 70B shares each key/value head among 8 (GQA) and
    # spends what that saves on the MLP.
    "llama-2-7b": _after("llama-1-7b", max_seq_len=4096, norm_eps=1e-5),
    "llama-2-13b": _after("llama-1-13b", max_seq_len=4096, norm_eps=1e-5),
    "llama-2-70b": _after("llama-1-65b", max_seq_len=4096, n_kv_heads=8, d_ff=28672),
    # September 2023, Mistral (v0.1): GQA at 7B, and attention to the last 4096 tokens only.
    "mistral-7b": _after(
        "llama-2-7b", max_seq_len=32768, n_kv_heads=8, d_ff=14336, sliding_window=4096
    ),
    # January 2024, TinyLlama: Llama 2 in small, with GQA.
    "tinyllama-1.1b": _after(
        "llama-2-7b", max_seq_len=2048, n_layers=22, n_kv_heads=4, d_model=2048, d_ff=5632
    ),
    # April 2024, Llama 3: four times the vocabulary, GQA at every size, theta 500000.
    "llama-3-8b": _after(
        "llama-2-7b",
        vocab_size=128256,
        max_seq_len=8192,
        n_kv_heads=8,
        d_ff=14336,
        rope_theta=500000.0,
    ),
    "llama-3-70b": _after("llama-3-8b", n_layers=80, n_heads=64, d_model=8192, d_ff=28672),
    # July 2024, Llama 3.1: 128k tokens, by stretching RoPE's low frequencies.
    "llama-3.1-8b": _after(
        "llama-3-8b",
        max_seq_len=131072,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, original_max_seq_len=8192),
    ),
    "llama-3.1-70b": _after("llama-3.1-8b", n_layers=80, n_heads=64, d_model=8192, d_ff=28672),
    "llama-3.1-405b": _after("llama-3.1-70b", n_layers=126, n_heads=128, d_model=16384, d_ff=53248),
    # September 2024, Llama 3.2: small again, and so tied again.
    "llama-3.2-1b": _after(
        "llama-3.1-8b",
        n_layers=16,
        d_model=2048,
        d_ff=8192,
        tie_embeddings=True,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, original_max_seq_len=8192),
    ),
    "llama-3.2-3b": _after("llama-3.2-1b", n_layers=28, n_heads=24, d_model=3072),
    # September 2024, Qwen2.5: biases on Q, K and V alone.
    "qwen2.5-0.5b": _after(
        "llama-3.2-1b",
        vocab_size=151936,
        max_seq_len=32768,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        d_model=896,
        d_ff=4864,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=True,
    ),
    # November 2024, SmolLM2: Llama 3.2's switches down to a tenth of its size; no GQA in the 1.7B.
    "smollm2-135m": _after(
        "llama-3.2-1b",
        vocab_size=49152,
        max_seq_len=8192,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        d_model=576,
        d_ff=1536,
        rope_theta=100000.0,
        rope_scaling=None,
    ),
    "smollm2-360m": _after(
        "smollm2-135m", n_layers=32, n_heads=15, n_kv_heads=5, d_model=960, d_ff=2560
    ),
    "smollm2-1.7b": _after(
        "smollm2-360m",
        n_layers=24,
        n_heads=32,
        n_kv_heads=None,
        d_model=2048,
        d_ff=8192,
        rope_theta=130000.0,
    ),
    # December 2024, Llama 3.3: Llama 3.1's architecture to the letter; the training changed.
    "llama-3.3-70b": _after("llama-3.1-70b"),
    # April 2025, Qwen3: the biases gave way to norms on Q and K; heads wider than d / n.
    "qwen3-0.6b": _after(
        "qwen2.5-0.5b",
        max_seq_len=40960,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        d_model=1024,
        d_ff=3072,
        qkv_bias=False,
        qk_norm=True,
    ),
    # Ours, for a laptop and Chinese text: the same history at 3.4M parameters.
    "zh-3m-2017": _after(
        "transformer-2017",
        vocab_size=4096,
        max_seq_len=128,
        n_layers=4,
        n_heads=4,
        d_model=256,
        d_ff=624,
        norm_eps=1e-5,
        dropout=0.0,
    ),
    "zh-3m-gpt2": _after(
        "zh-3m-2017",
        norm_placement="pre",
        activation="gelu_tanh",
        position="learned",
        embed_scale=False,
    ),
    "zh-3m": _after(
        "zh-3m-gpt2",
        norm="rmsnorm",
        position="rope",
        activation="silu",
        gated_mlp=True,
        d_ff=512,
        n_kv_heads=2,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    ),
}

# One switch a rung, from zh-3m-2017 over zh-3m-gpt2 ("learned") to zh-3m ("no-bias") and beyond.
# √d leaves with the sinusoids it was there to match; d_ff keeps the number of parameters within 1%
# of zh-3m's until it unties (SwiGLU: 2 · 624 = 3 · 416; the K and V rows GQA saves go to the MLP).
_LADDER: dict[str, _Changes] = {
    "2017": {},
    "pre-norm": {"norm_placement": "pre"},
    "gelu": {"activation": "gelu_tanh"},
    "learned": {"position": "learned", "embed_scale": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "rope": {"position": "rope"},
    "swiglu": {"activation": "silu", "gated_mlp": True, "d_ff": 416},
    "gqa": {"n_kv_heads": 2, "d_ff": 512},
    "no-bias": {"qkv_bias": False, "out_bias": False, "mlp_bias": False},
    "untied": {"tie_embeddings": False},
}


@cache
def preset(name: str) -> ModelConfig:
    """The config of a named model; ConfigError, with the nearest name or all, if there is none."""
    if name not in _PRESETS:
        near = did_you_mean(name, _PRESETS) or f"; known: {', '.join(_PRESETS)}"
        raise ConfigError(f"no preset is called {name!r}{near}")
    base, changes = _PRESETS[name]
    return ModelConfig(**changes) if base is None else preset(base).replace(**changes)


def presets() -> list[str]:
    """The names, oldest first, ours last."""
    return list(_PRESETS)


def depth(n: int) -> ModelConfig:
    """A Llama scaled by one number, after nanochat's depth: n layers of n heads of 64.

    So d_model = 64n and the MLP 8/3 of that, up to a multiple of 64; tied, a vocabulary of 32768,
    2048 tokens. depth(4), depth(12), depth(20) have 12M, 110M and 438M parameters.
    """
    return preset("llama-2-7b").replace(
        vocab_size=32768,
        max_seq_len=2048,
        n_layers=n,
        n_heads=n,
        d_model=64 * n,
        d_ff=64 * -(-8 * n // 3),
        tie_embeddings=True,
    )


def ladder() -> dict[str, ModelConfig]:
    """The ten rungs from `zh-3m-2017` to `zh-3m` untied, each the one before with one change."""
    rungs, cfg = {}, preset("zh-3m-2017")
    for name, changes in _LADDER.items():
        rungs[name] = cfg = cfg.replace(**changes)
    return rungs
