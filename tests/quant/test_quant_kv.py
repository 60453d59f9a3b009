"""The 8-bit cache against one in fp32 that is given rounded keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from sharp import CONTEXT, configs, make, tokens
from torch import Tensor

from gpt2llama.errors import InputError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.kv_cache import KVCache
from gpt2llama.model.presets import preset
from gpt2llama.plan import kv_bytes
from gpt2llama.quant.kv import Int8KVCache


def rounded(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


class Rounding(KVCache):
    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(layer, rounded(k), rounded(v))


@settings(max_examples=20)
@given(configs())
def test_equal_to_a_cache_of_rounded_numbers(cfg: ModelConfig) -> None:
    """A prompt of unequal rows, a row chosen twice, tokens taken back and others in their place."""
    model, real = make(cfg, dtype=torch.float32), torch.ones(2, 5, dtype=torch.bool)
    real[0, :2] = False
    caches = [Int8KVCache(cfg, 2, CONTEXT), Rounding(cfg, 2, CONTEXT)]
    ours, want = (list[Tensor]() for _ in caches)
    for cache, found in zip(caches, (ours, want), strict=True):
        found.append(model(tokens(2, 5), cache=cache, attention_mask=real)[real])
        cache.select([1, 0, 1])
        found.append(model(tokens(3, 2, seed=1), cache=cache))
        cache.truncate(4)
        found.append(model(tokens(3, 1, seed=2), cache=cache))
    for got, expected in zip(ours, want, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert caches[0].length.tolist() == caches[1].length.tolist()


def test_near_the_exact_cache() -> None:
    cfg = preset("zh-3m").replace(vocab_size=23, max_seq_len=64)
    model, ids = make(cfg, dtype=torch.float32), tokens(1, 48)
    exact, cache = model(ids), Int8KVCache(cfg, 1, 48)
    got = torch.cat([model(part, cache=cache) for part in ids.split([30, *[1] * 18], 1)], 1)
    assert 0 < (got - exact).norm() / exact.norm() < 0.05
    at_once = model(ids, cache=Int8KVCache(cfg, 1, 48))
    torch.testing.assert_close(got, at_once, atol=2e-3, rtol=1e-3)  # sums in another order


def test_zeros_and_16_bits() -> None:
    cfg = preset("zh-3m").replace(n_layers=1)
    cache = Int8KVCache(cfg, 1, 4)
    k = torch.zeros(1, cfg.kv_heads, 2, cfg.head_size, dtype=torch.bfloat16)
    k[0, :, 1] = torch.randn(cfg.head_size)
    cache.place(torch.arange(2)[None], None, True)
    keys, values = cache.write(0, k, k)
    assert keys.dtype == torch.bfloat16
    torch.testing.assert_close(keys, k, atol=0.02, rtol=0.02)
    assert torch.equal(keys, values)
    assert not keys[0, :, 0].any()


@pytest.mark.parametrize("batch", [1, 3])
def test_bytes(batch: int) -> None:
    """`plan`'s, of one slot more, and a scale of 4 bytes for every head."""
    cfg = preset("zh-3m")
    cache = Int8KVCache(cfg, batch, 100)
    numbers = kv_bytes(cfg, 101, batch, "int8")
    assert cache.nbytes == numbers + numbers // cfg.head_size * 4


def test_no_room() -> None:
    cfg = preset("zh-3m").replace(vocab_size=23)
    with pytest.raises(InputError, match="the cache holds 4 tokens"):
        make(cfg, dtype=torch.float32)(tokens(1, 5), cache=Int8KVCache(cfg, 1, 4))
