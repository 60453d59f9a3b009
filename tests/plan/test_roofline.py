"""Rooflines against hand-worked figures and against what torch counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import InputError
from gpt2llama.model.presets import preset
from gpt2llama.plan import (
    HARDWARE,
    Hardware,
    decode_step,
    hardware,
    kv_bytes,
    parse_bytes,
    parse_count,
    prefill_step,
    training_hours,
    weight_bytes,
    weights_alone,
)


def test_decode_by_hand() -> None:
    """llama-3-8b, 4 texts of 1,000 tokens, int8 weights, bf16 cache, on an H100."""
    step = decode_step(preset("llama-3-8b"), 1000, 4, "int8", "bf16")
    # All 8,030,261,248 weights but 128,255 rows of 4,096; 4 · 1,000 · 32 · 2 · 8 · 128 · 2 bytes.
    assert step.bytes == 8_030_261_248 - 525_332_480 + 524_288_000
    # 32 layers of 4,096² · 2.5 and 3 · 4,096 · 14,336, the head; 4 · 32 · 4,096 per key.
    matrices = 32 * (41_943_040 + 176_160_768) + 525_336_576
    assert step.flops == 4 * (2 * matrices + 524_288 * 1000)
    bound = step.on(hardware("h100"))
    assert bound.by_bandwidth == pytest.approx(4 * 3.35e12 / step.bytes)
    assert bound.by_compute == pytest.approx(4 * 989.4e12 / step.flops)
    assert (bound.tokens_per_second, bound.limit) == (bound.by_bandwidth, "bandwidth")


def test_prefill_by_hand() -> None:
    step = prefill_step(preset("zh-3m"), 3, 2, "fp32", "fp32")
    layers = 4 * (4 * 256 * 64 * 3 + 3 * 256 * 512)  # H 4, K 2: 2 · 256 · (4 + 2) · 64
    assert step.tokens == 6
    assert step.flops == 2 * (2 * 3 * layers + 2 * 4096 * 256 + 4 * 4 * 256 * 6)  # 6 = 1 + 2 + 3
    assert step.bytes == 4 * 3_410_176 + 2 * kv_bytes(preset("zh-3m"), 3, 1, "fp32")


@pytest.mark.parametrize("name", ["zh-3m", "zh-3m-gpt2"])
def test_flops_are_what_torch_counts(name: str) -> None:
    """Torch counts every score of a prefill, 4 · L · H · E · T²; ours the T (T + 1) / 2 needed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from gpt2llama import KVCache, Transformer

    cfg, steps = preset(name), 16
    model = Transformer(cfg).eval()
    cache = KVCache(cfg, batch_size=2, max_len=steps + 1)
    ids = torch.zeros(2, steps, dtype=torch.long)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as prefill:
            model(ids, cache=cache, logits_to_keep=1)
        with FlopCounterMode(display=False) as decode:
            model(ids[:, :1], cache=cache)
    masked = 4 * cfg.n_layers * cfg.n_heads * cfg.head_size * steps * (steps - 1) // 2
    counted = prefill_step(cfg, steps, 2).flops + 2 * masked
    assert prefill.get_total_flops() == counted
    assert decode.get_total_flops() == decode_step(cfg, steps + 1, 2).flops


def test_only_the_rows_looked_up_are_read() -> None:
    """A tied table is the head's and read whole; an untied one and positions give a row each."""
    gpt2 = preset("gpt2")
    nothing = kv_bytes(gpt2, 1)
    assert decode_step(gpt2, 1).bytes == weight_bytes(gpt2) - 2 * 1023 * 768 + nothing
    untied = gpt2.replace(tie_embeddings=False)
    assert decode_step(untied, 1).bytes == decode_step(gpt2, 1).bytes + 2 * 768


def test_a_window_bounds_what_is_read() -> None:
    cfg = preset("mistral-7b")
    assert decode_step(cfg, 4096) == decode_step(cfg, 30000)
    small = cfg.replace(sliding_window=3)
    pairs = (prefill_step(small, 6).flops - prefill_step(small, 5).flops) - (
        prefill_step(cfg, 2).flops - prefill_step(cfg, 1).flops
    )
    assert pairs == 4 * 32 * 4096  # the sixth token sees three keys, the second two


def test_weights_alone_of_8b() -> None:
    cfg = preset("llama-3-8b")
    speeds = [weights_alone(cfg, hardware(n)) for n in ("dgx-spark", "h100", "mi300x")]
    assert [round(speed) for speed in speeds] == [17, 209, 330]


@settings(max_examples=60)
@given(
    name=st.sampled_from(["zh-3m", "llama-3-8b", "mistral-7b", "llama-3.1-405b"]),
    device=st.sampled_from(list(HARDWARE)),
    context=st.integers(1, 10**6),
    batch=st.integers(1, 10**4),
)
def test_bounds_move_the_right_way(name: str, device: str, context: int, batch: int) -> None:
    cfg, on = preset(name), HARDWARE[device]
    speed = decode_step(cfg, context, batch).on(on).tokens_per_second
    assert decode_step(cfg, context + 1, batch).on(on).tokens_per_second <= speed
    assert decode_step(cfg, context, batch + 1).on(on).tokens_per_second >= speed * (1 - 1e-12)
    assert decode_step(cfg, context, batch, "fp32", "fp32").on(on).tokens_per_second <= speed
    twice = Hardware(name="", bandwidth=2 * on.bandwidth, flops=2 * on.flops, memory=None)
    doubled = decode_step(cfg, context, batch).on(twice).tokens_per_second
    assert doubled == pytest.approx(2 * speed)
    first = prefill_step(cfg, context, batch).on(on)
    assert first.tokens_per_second == min(first.by_bandwidth, first.by_compute)
    # One token is as dear as a prompt of one.
    assert prefill_step(cfg, 1, batch) == decode_step(cfg, 1, batch)


def test_training_hours() -> None:
    device = Hardware(name="one", bandwidth=1.0, flops=1e12, memory=None)
    assert training_hours(36 * 10**14, device, 0.5) == 2.0
    for wrong in (0.0, -0.1, 1.01, math.nan):
        with pytest.raises(InputError, match="mfu"):
            training_hours(1, device, wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        (" 1.5 tib ", 3 * 2**39),
        ("100b", 100),
        ("0.3kB", 300),
    ],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "24", "GB", "24G", "24iB", "-1GB", "1e9B", "nan GB", "infGB", "１GB"),
        *("0GB", "0.1B", "9" * 99 + "B"),
    ],
)
def test_no_memory_sizes(text: str) -> None:
    with pytest.raises(InputError, match="memory"):
        parse_bytes(text)


def test_counts() -> None:
    assert [parse_count(t) for t in ("7", "2m", "1.5B", "15T")] == [
        7,
        2_000_000,
        1_500_000_000,
        15 * 10**12,
    ]
    for wrong in ("", "0", "-3", "1e9", "2G", "0.0001"):
        with pytest.raises(InputError, match="number of tokens"):
            parse_count(wrong)


def test_names_of_hardware() -> None:
    assert hardware("H100").name == "h100"
    assert all(name == device.name for name, device in HARDWARE.items())
    with pytest.raises(InputError, match="did you mean 'mi300x'"):
        hardware("mi300")
    # An H100 has neither more compute nor more bandwidth than an MI300X.
    h100, mi300x = hardware("h100"), hardware("mi300x")
    assert (h100.flops, h100.bandwidth) < (mi300x.flops, mi300x.bandwidth)
