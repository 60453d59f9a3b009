"""What fits: the answer does, the next larger does not; and what one field changes alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import InputError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import ladder, preset, presets
from gpt2llama.plan import (
    changes,
    flops_per_token,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    largest_context,
    parameters,
    weight_bytes,
)

DTYPES = ["fp32", "bf16", "fp16", "int8", "int4"]
names = st.sampled_from(["gpt2", "zh-3m", "zh-3m-2017", "llama-3-8b", "mistral-7b", "qwen3-0.6b"])


@settings(max_examples=60)
@given(
    name=names,
    share=st.fractions(0, 20),
    context=st.integers(1, 5000),
    batch=st.integers(1, 99),
    dtype=st.sampled_from(DTYPES),
    kv=st.sampled_from(DTYPES),
)
def test_the_answer_fits_and_the_next_does_not(
    name: str, share: float, context: int, batch: int, dtype: str, kv: str
) -> None:
    cfg = preset(name)
    if cfg.position == "learned":
        context = min(context, cfg.max_seq_len)
    weights = weight_bytes(cfg, dtype)
    memory = int(share * weights)
    texts = largest_batch(cfg, memory, context, dtype, kv)
    tokens = largest_context(cfg, memory, batch, dtype, kv)
    if texts:
        assert weights + kv_bytes(cfg, context, texts, kv) <= memory
    assert weights + kv_bytes(cfg, context, texts + 1, kv) > memory
    if tokens:
        assert weights + kv_bytes(cfg, tokens, batch, kv) <= memory
    if cfg.position != "learned" or tokens < cfg.max_seq_len:
        assert weights + kv_bytes(cfg, tokens + 1, batch, kv) > memory
    else:
        assert tokens == cfg.max_seq_len
    # More of what is scarce never makes less fit, more asked never makes more fit.
    assert largest_batch(cfg, memory + 10**9, context, dtype, kv) >= texts
    assert largest_context(cfg, memory, batch + 1, dtype, kv) <= tokens


def test_dynamic_scaling_ends_at_its_first_context() -> None:
    cfg = preset("zh-3m").replace(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert largest_context(cfg, 10**12) == cfg.max_seq_len


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.int8, "int8"),
    ],
)
def test_kv_bytes_equal_a_real_cache(name: str, dtype: torch.dtype, ours: str) -> None:
    """A row of 6 slots: 5 tokens and one for padding."""
    from gpt2llama import KVCache

    cache = KVCache(preset(name), batch_size=3, max_len=5, dtype=dtype, device="meta")
    assert kv_bytes(preset(name), 6, 3, ours) == cache.keys.nbytes + cache.values.nbytes


def test_a_lone_change_is_the_whole_difference() -> None:
    checked = 0
    for before, after in pairwise(ladder().values()):
        lines = changes(before, after)
        if len(lines) > 1:
            continue  # swiglu, gqa and others change d_ff too
        checked += 1
        difference = parameters(after)["total"] - parameters(before)["total"]
        assert lines[0].parameters == difference
        assert lines[0].flops_per_token == flops_per_token(after) - flops_per_token(before)
        kv = kv_bytes_per_token(after) - kv_bytes_per_token(before)
        assert lines[0].kv_bytes_per_token == kv
    assert checked >= 5


def test_changes_equal_two_models() -> None:
    """Each field put into GPT-2 alone, counted in models on the meta device."""
    from gpt2llama import Transformer

    def count(cfg: ModelConfig) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Transformer(cfg).parameters())

    base, cfg = preset("zh-3m-gpt2"), preset("zh-3m")
    lines = changes(base, cfg)
    fields = [name for name, value in base.to_dict().items() if cfg.to_dict()[name] != value]
    assert [line.field for line in lines] == fields
    for line in lines:
        one = base.replace(**{line.field: getattr(cfg, line.field)})
        assert line.parameters == count(one) - count(base)
        assert line.refused == ""


def test_what_cannot_change_alone_says_why() -> None:
    line = next(c for c in changes(preset("gpt2"), preset("llama-3-8b")) if c.field == "n_kv_heads")
    assert line.parameters is None
    assert "must divide n_heads" in line.refused


def test_refusals() -> None:
    with pytest.raises(InputError, match="max_seq_len=1024"):
        largest_batch(preset("gpt2"), 10**10, 2000)
    with pytest.raises(InputError, match="batch must be at least 1"):
        largest_context(preset("gpt2"), 10**10, 0)
    with pytest.raises(InputError, match="dtype must be one of"):
        largest_batch(preset("gpt2"), 10**10, dtype="fp8")
