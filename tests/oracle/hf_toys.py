"""Tiny random models of `transformers`, one for every way of being built that we load."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 97
TEXT = torch.randint(VOCAB, (2, 80), generator=torch.Generator().manual_seed(1))

_NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 80,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    **_NO_IDS,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **_NO_IDS,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def _scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, "rope_type": rope_type, **values}}


# name -> (model_type, changes to its toy); at 80 tokens every scaling and window is at work
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inner-untied": ("gpt2", {"n_inner": 40, "tie_word_embeddings": False}),
    "gpt2-relu-eps": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 0.1}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu-eps": ("llama", {"hidden_act": "gelu_new", "rms_norm_eps": 0.1}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_theta": 500000.0}}),
    "llama-llama3": ("llama", _scaled("llama3", factor=8.0, **_LLAMA3)),
    "llama-yarn": ("llama", _scaled("yarn", **_YARN)),
    "llama-yarn-all": (
        "llama",
        _scaled("yarn", **_YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    ),
    "llama-linear": ("llama", _scaled("linear", factor=4.0)),
    "llama-dynamic": ("llama", _scaled("dynamic", factor=2.0)),
    "llama-dynamic-beyond": (
        "llama",
        {**_scaled("dynamic", factor=2.0), "max_position_embeddings": 48},
    ),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 16, "hidden_size": 30}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0},
    ),
    "qwen2-no-window-layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 0,
        },
    ),
}


def toy(name: str) -> PreTrainedModel:
    model_type, changes = TOYS[name]
    sizes = _GPT2 if model_type == "gpt2" else _LLAMA
    config: PretrainedConfig = transformers.CONFIG_MAPPING[model_type](**{**sizes, **changes})
    return sharpen(AutoModelForCausalLM.from_config(config))


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Unit-variance embeddings, fan-in weights, Q six times that, random biases and norms.

    At init's std of 0.02 attention is flat and a wrong RoPE layout hides below 1e-3. A tied head
    has the embedding's variance, so its final norm is made small: logits stay of order 1.
    """
    random = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(generator=random)
            if name.endswith("bias"):
                p *= 0.3
            elif p.dim() == 1:
                p.mul_(0.3).add_(1)
            elif ".c_" in name:  # GPT-2's Conv1D is (in, out), with q, k and v side by side
                p /= p.shape[0] ** 0.5
                if "c_attn" in name:
                    p[:, :width] *= 6
            elif "embed_tokens" not in name and "wte" not in name and "wpe" not in name:
                p /= p.shape[1] ** 0.5
                if "q_proj" in name:
                    p *= 6
            if model.config.tie_word_embeddings and name.startswith(
                ("model.norm.", "transformer.ln_f.")
            ):
                p /= width**0.5
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: Tensor = TEXT) -> Tensor:
    """Of ours or of theirs."""
    out = model(ids)
    return out if isinstance(out, Tensor) else out.logits
