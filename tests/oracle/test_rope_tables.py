"""RoPE's frequency tables equal transformers' at the sizes of real models.

At 40 tokens the llama3 factors 8 and 32 change logits by 5e-5; the tables differ by the factor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpt2llama.model.position import rope_frequencies
from gpt2llama.weights.hf import config_from_hf

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **LLAMA3},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 3.0,
        "attention_factor": 1.5,
    },
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
]


def llama(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32 * head_dim, max_position_embeddings=131072, rope_parameters=dict(rope)
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: f"{rope['rope_type']}")
def test_scaled_tables(rope: dict[str, Any], head_dim: int) -> None:
    theirs = llama(rope, head_dim)
    cfg = config_from_hf(theirs.to_dict())
    assert cfg.rope_theta == rope["rope_theta"]
    for seq_len in (10, 131072, 150001, 524288):
        inv_freq, magnitude = rope_frequencies(cfg, seq_len)
        table, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu", seq_len=seq_len)
        assert_close(inv_freq.float(), table)
        assert magnitude == pytest.approx(factor, rel=1e-12)
        if rope["rope_type"] == "dynamic" and seq_len > 131072:
            unscaled = 1.0 / 1e4 ** (torch.arange(0, head_dim, 2) / head_dim)
            assert not torch.allclose(table, unscaled, rtol=0.05)


def test_plain_table() -> None:
    theirs = llama({"rope_type": "default", "rope_theta": 5e5}, 128)
    inv_freq, magnitude = rope_frequencies(config_from_hf(theirs.to_dict()))
    assert_close(inv_freq.float(), LlamaRotaryEmbedding(theirs).inv_freq)
    assert magnitude == 1.0
