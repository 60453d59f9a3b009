"""Tiny models in which a mistake shows, a strategy for every switch, and a second implementation.

At init's std of 0.02 attention is all but uniform and a wrong mask or rotation hides below 1e-3;
here embeddings have unit variance, weights fan-in variance, and Q is six times larger.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from gpt2llama.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    YarnScaling,
)
from gpt2llama.model.transformer import Transformer

VOCAB, CONTEXT = 23, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_seq_len": CONTEXT,
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 16,
    "d_ff": 20,
}
SCALINGS = [
    None,
    LinearScaling(4.0),
    NTKScaling(2.0),
    DynamicScaling(2.0),
    YarnScaling(4.0, original_max_seq_len=8),
    Llama3Scaling(8.0, 1.0, 4.0, original_max_seq_len=8),
]
_TURNED = [{"position": "rope", "rope_scaling": scaling} for scaling in SCALINGS]
_PLACED = [{"position": kind} for kind in ("learned", "sinusoidal", "none")]
SWITCHES: dict[str, list[Any]] = {
    "n_kv_heads": [None, 1, 2],
    "head_dim": [None, 6],
    "norm": ["layernorm", "rmsnorm"],
    "norm_eps": [1e-5, 0.1],
    "norm_placement": ["pre", "post"],
    "norm_bias": [True, False],
    "activation": ["relu", "relu2", "gelu", "gelu_tanh", "silu"],
    "gated_mlp": [True, False],
    "qkv_bias": [True, False],
    "out_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_embeddings": [True, False],
    "embed_scale": [True, False],
    "qk_norm": [True, False],
    "sliding_window": [None, 1, 3],
    "logit_softcap": [None, 5.0],
}


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> ModelConfig:
    """Any combination of the switches; `fixed` ones stay as given."""
    switches = {name: draw(st.sampled_from(values)) for name, values in SWITCHES.items()}
    placed = draw(st.sampled_from(_TURNED + _PLACED))
    return ModelConfig(**SIZES | switches | placed | fixed)


def make(cfg: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """A sharp model in eval mode, fp64 unless told."""
    model = Transformer(cfg).to(dtype).eval().requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng, dtype=torch.float64)
        if name.endswith("bias"):
            noise *= 0.5
        elif p.dim() == 1:
            noise = 1 + 0.3 * noise
        elif "embed" not in name and name != "lm_head.weight":
            noise /= math.sqrt(p.shape[1])
        p.copy_(noise * 6 if "q_norm" in name or "q_proj.weight" in name else noise)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def reference(model: Transformer, ids: list[int], inv_freq: Tensor, magnitude: float) -> Tensor:
    """Logits (T, V) of one text, uncached: the model once more, a query at a time.

    RoPE turns complex numbers by the table that is handed in (its values are tested against
    transformers); the mask is the two bounds of a loop.
    """
    cfg, w = model.config, dict(model.named_parameters())
    shared = cfg.n_heads // cfg.kv_heads
    acts = {
        "relu": lambda x: x * (x > 0),
        "relu2": lambda x: x * x * (x > 0),
        "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu_tanh": lambda x: (
            x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
        ),
        "silu": lambda x: x / (1 + torch.exp(-x)),
    }

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str, kind: str = cfg.norm) -> Tensor:
        weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        if kind == "layernorm":
            return F.layer_norm(x, weight.shape, weight, bias, cfg.norm_eps)
        return F.rms_norm(x, weight.shape, weight, cfg.norm_eps)

    def heads(x: Tensor, name: str, qk: bool = True) -> Tensor:  # (T, heads, E)
        x = x.view(len(ids), -1, cfg.head_size)
        x = norm(x, name, "rmsnorm") if cfg.qk_norm and qk else x
        if cfg.position != "rope" or not qk:
            return x
        angle = torch.arange(len(ids))[:, None, None] * inv_freq
        half = cfg.head_size // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.full_like(angle, magnitude), angle
        )
        return torch.cat([turned.real, turned.imag], -1)

    def attention(x: Tensor, at: str) -> Tensor:
        q = heads(linear(x, f"{at}.q_proj"), f"{at}.q_norm")
        k = heads(linear(x, f"{at}.k_proj"), f"{at}.k_norm")
        v = heads(linear(x, f"{at}.v_proj"), "", qk=False)
        kv_head = [h // shared for h in range(cfg.n_heads)]
        out = []
        for t in range(len(ids)):
            first = 0 if cfg.sliding_window is None else max(0, t - cfg.sliding_window + 1)
            k_seen, v_seen = k[first : t + 1, kv_head], v[first : t + 1, kv_head]
            weights = ((k_seen * q[t]).sum(-1, keepdim=True) / cfg.head_size**0.5).softmax(0)
            out.append((weights * v_seen).sum(0).flatten())
        return linear(torch.stack(out), f"{at}.o_proj")

    def mlp(x: Tensor, at: str) -> Tensor:
        up, act = linear(x, f"{at}.up_proj"), acts[cfg.activation]
        inner = act(linear(x, f"{at}.gate_proj")) * up if cfg.gated_mlp else act(up)
        return linear(inner, f"{at}.down_proj")

    x = w["embed_tokens.weight"][ids]
    if cfg.embed_scale:
        x = x * cfg.d_model**0.5
    if cfg.position == "learned":
        x = x + w["embed_positions.weight"][: len(ids)]
    elif cfg.position == "sinusoidal":
        table = [
            [(math.cos if i % 2 else math.sin)(t / 10000 ** (2 * (i // 2) / cfg.d_model))
             for i in range(cfg.d_model)] for t in range(len(ids))
        ]  # fmt: skip
        x = x + torch.tensor(table, dtype=x.dtype)
    for i in range(cfg.n_layers):
        at = f"layers.{i}"
        if cfg.norm_placement == "pre":
            x = x + attention(norm(x, f"{at}.attn_norm"), f"{at}.self_attn")
            x = x + mlp(norm(x, f"{at}.mlp_norm"), f"{at}.mlp")
        else:
            x = norm(x + attention(x, f"{at}.self_attn"), f"{at}.attn_norm")
            x = norm(x + mlp(x, f"{at}.mlp"), f"{at}.mlp_norm")
    x = x if cfg.norm_placement == "post" else norm(x, "norm")
    logits = x @ (w["embed_tokens.weight"] if cfg.tie_embeddings else w["lm_head.weight"]).T
    cap = cfg.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
