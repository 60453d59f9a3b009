"""The kernel held to the PyTorch model: every switch, kind of weight and cache, any split.

test_builds.py runs this file again for other compilations of it, sanitised ones among them.
"""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharp import CONTEXT, SIZES, VOCAB, configs, make, tokens
from torch import Tensor, nn

from gpt2llama.errors import InputError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.kv_cache import KVCache
from gpt2llama.model.transformer import Transformer
from gpt2llama.native import NativeDecoder, binding, decoder
from gpt2llama.native.binding import MAX_TOKENS
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.kv import Int8KVCache
from gpt2llama.quant.linear import QuantLinear
from gpt2llama.quant.scheme import QuantScheme

BASE = ModelConfig(**SIZES)
AGAIN = "CFLAGS" in os.environ  # test_builds.py's: fewer examples


@pytest.fixture(autouse=True, params=[3] if AGAIN else [1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def kernel(model: Transformer) -> NativeDecoder:
    found = decoder(model)
    if found is None:
        pytest.skip("the kernel cannot be built here")
    return found


def close(got: Tensor, model: Transformer, ids: Tensor) -> None:
    """As near to the fp64 model as PyTorch's fp32 one is, but for a factor: sums in another order,
    through sharp layers that make both errors larger. Narrow vectors, as test_builds.py has them,
    add in four long chains, torch in sixteen or more."""
    exact = Transformer(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    want, keep = exact(ids), got.shape[1]
    error = (model.float()(ids) - want).abs().max()
    assert (got - want[:, -keep:]).abs().max() <= (8 if AGAIN else 4) * error + 1e-5


@settings(max_examples=15 if AGAIN else 40)
@given(configs(), st.data())
def test_any_switches_and_split(cfg: ModelConfig, data: st.DataObject) -> None:
    model, ids = make(cfg, dtype=torch.float32), tokens(2, CONTEXT)
    fast, cache = kernel(model), KVCache(cfg, 2, CONTEXT)
    assert fast.fits(cache)
    parts: list[Tensor] = []
    at = 0
    while at < CONTEXT:
        steps = data.draw(st.integers(1, CONTEXT - at))
        parts.append(fast.step(ids[:, at : at + steps], cache, keep=steps))
        at += steps
    close(torch.cat(parts, 1), model, ids)
    assert cache.length.tolist() == [CONTEXT] * 2


@settings(max_examples=15)
@given(configs(), st.data())
def test_the_two_paths_share_a_cache(cfg: ModelConfig, data: st.DataObject) -> None:
    """PyTorch's prefill of unequal prompts, the kernel's steps, truncation, PyTorch's again."""
    model, ids = make(cfg, dtype=torch.float32), tokens(2, CONTEXT)
    cache = KVCache(cfg, 2, CONTEXT)
    pad = data.draw(st.integers(0, 3))
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, :pad] = False
    model(ids[:, :5], cache=cache, attention_mask=real)
    fast = kernel(model)
    assert fast.fits(cache)
    fast.step(ids[:, 5:9], cache)
    cache.truncate(cache.end - data.draw(st.integers(0, 3)))
    begin = cache.end
    more = ids[:, 5 + begin - 5 : begin + 2]
    got = torch.cat([fast.step(more[:, :1], cache), model(more[:, 1:], cache=cache)], 1)
    whole = ids[1:, pad : begin + 2] if begin == 9 else None
    first = torch.cat([ids[:1, :begin], more[:1]], 1)
    close(got[:1], model, first)
    if whole is not None:  # untruncated: the padded row holds its tokens without the padding
        close(got[1:], model, whole)


def test_bf16_weights_and_cache() -> None:
    """fp32 sums of exact bf16 weights: the twin is the fp32 model with the same weights."""
    model = make(BASE.replace(d_model=48, head_dim=12), dtype=torch.bfloat16)
    twin = make(model.config, dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    ids = tokens(1, CONTEXT)
    fast, cache = kernel(model), KVCache(model.config, 1, CONTEXT)
    parts = [fast.step(part, cache, keep=part.shape[1]) for part in ids.split([3, 1, 3, 2, 3], 1)]
    close(torch.cat(parts, 1), twin, ids)
    halved = KVCache(model.config, 1, CONTEXT, dtype=torch.bfloat16)
    twin_cache = KVCache(model.config, 1, CONTEXT, dtype=torch.bfloat16)
    for t in range(CONTEXT):
        got = fast.step(ids[:, t : t + 1], halved)
        want = twin(ids[:, t : t + 1], cache=twin_cache)
    # A key near the middle of two bf16 numbers may be rounded to the other one.
    torch.testing.assert_close(halved.keys.float(), twin_cache.keys.float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("size", [48, 70])  # whole vectors of pairs, and what is left over
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_inputs_of_a_plain_matrix(dtype: torch.dtype, size: int) -> None:
    """Bands of rows, of which the last is not full, groups of inputs and what is left over. Where
    pairs of bf16 are multiplied the inputs are rounded to bf16 as well, as PyTorch's are."""
    cfg = BASE.replace(d_model=size, n_heads=2, vocab_size=101, n_layers=1, position="none")
    cfg = cfg.replace(tie_embeddings=False)
    model, ids = make(cfg, dtype=dtype), torch.arange(37)[None]
    for module in (model.layers[0].self_attn.o_proj, model.layers[0].mlp.down_proj):
        module.weight.zero_()
        if module.bias is not None:
            module.bias.zero_()
    twin = make(cfg, dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    exact, rounded = (
        torch.nn.functional.linear(hidden, twin.lm_head.weight)
        for hidden in (twin.hidden(ids), twin.hidden(ids).bfloat16().float())
    )
    for n in (1, 3, 4, 7, 8, 13, 37):
        got = kernel(model).step(ids[:, :n], KVCache(cfg, 1, 37), keep=n)
        near = [(got - want[:, :n]).abs().amax(-1) < 1e-4 for want in (exact, rounded)]
        assert near[0].all() if dtype == torch.float32 or n < 4 else (near[0] | near[1]).all()


@pytest.mark.parametrize("size", [70, 71])
def test_bf16_weights_begin_at_any_even_address(size: int) -> None:
    """As a file's tensors do, and the rows of a matrix with an odd number of inputs."""
    cfg = BASE.replace(d_model=size, d_ff=size, n_heads=1, head_dim=6, position="none")
    model, twin = (make(cfg, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    twin.load_state_dict(model.state_dict())
    for parameter in model.parameters():
        room = torch.empty(parameter.numel() + 1, dtype=torch.bfloat16)
        parameter.data = room[1:].view_as(parameter).copy_(parameter)
    ids = tokens(1, CONTEXT)
    fast, cache = kernel(model), KVCache(cfg, 1, CONTEXT)
    close(torch.cat([fast.step(ids[:, t : t + 1], cache) for t in range(CONTEXT)], 1), twin, ids)
    many, want = fast.step(ids, KVCache(cfg, 1, CONTEXT), keep=CONTEXT), twin(ids)
    assert (many - want).norm() < 0.05 * want.norm()  # pairs of bf16


def test_many_tokens_of_bf16_are_as_exact_as_pytorchs() -> None:
    cfg = BASE.replace(max_seq_len=64, d_model=64, d_ff=128, n_layers=4)
    model, ids = make(cfg, dtype=torch.bfloat16), tokens(1, 64)
    exact = Transformer(cfg).double().eval()
    exact.load_state_dict(model.state_dict())
    want = exact(ids)
    got = kernel(model).step(ids, KVCache(cfg, 1, 64, dtype=torch.bfloat16), keep=64)
    assert (got - want).norm() <= (model(ids) - want).norm()


SCHEMES = [
    QuantScheme(bits=8),
    QuantScheme(bits=8, group=32),
    QuantScheme(bits=8, group=64, activations="float"),
    QuantScheme(bits=4, group=32),
    QuantScheme(bits=4, group=64, zero=True),
    QuantScheme(bits=4, group=32, zero=True, activations="float", head=False),
    QuantScheme(bits=4, group=64, activations="float"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_quantised_matrix_equals_its_twin(scheme: QuantScheme) -> None:
    """Blocks that add nothing leave embedding, norm and head: the integers are the same, so that
    only fp32 sums differ. Rows that fill no tile of 16; any number of tokens."""
    cfg = BASE.replace(d_model=192, n_heads=2, vocab_size=37, n_layers=1, position="none")
    model = make(cfg, dtype=torch.float32)
    for module in (model.layers[0].self_attn.o_proj, model.layers[0].mlp.down_proj):
        module.weight.zero_()
    model, ids = quantise(model, scheme), torch.arange(37)[None]
    fast, want = kernel(model), model(ids)
    for n in (1, 3, 4, 9, 37):
        got = fast.step(ids[:, :n], KVCache(cfg, 1, CONTEXT + 37), keep=n)
        torch.testing.assert_close(got, want[:, :n], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantised_inputs_that_are_not_finite_or_next_to_nothing(scheme: QuantScheme) -> None:
    cfg = BASE.replace(d_model=64)
    model = quantise(make(cfg, dtype=torch.float32), scheme)
    fast, ids = kernel(model), tokens(1, 3)
    model.norm.weight.mul_(1e-44)
    assert fast.step(ids, KVCache(cfg, 1, CONTEXT)).isfinite().all()
    for bad in (torch.nan, torch.inf):
        model.norm.weight.fill_(1)[17] = bad
        with pytest.raises(WeightsError, match="not finite"):
            fast.step(ids, KVCache(cfg, 1, CONTEXT))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@given(data=st.data())
@settings(max_examples=2 if AGAIN else 4)
def test_a_quantised_model_equals_its_twin(scheme: QuantScheme, data: st.DataObject) -> None:
    """Every switch. An input near the middle of two integers may be rounded to the other one, which
    sharp layers make visible: a percent or two then, where another rounding makes 30."""
    cfg = data.draw(configs(d_model=64, d_ff=64, head_dim=16))
    model, ids = quantise(make(cfg, dtype=torch.float32), scheme), tokens(2, CONTEXT)
    got = kernel(model).step(ids, KVCache(cfg, 2, CONTEXT), keep=CONTEXT)
    want = model(ids)
    if scheme.activations == "float":
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    else:
        assert (got - want).norm() < 0.05 * want.norm()


def test_int8_cache() -> None:
    """The same integers and scales as PyTorch writes, but where it stands between two of them."""
    cfg = BASE.replace(d_model=64, head_dim=40, max_seq_len=200)
    model, ids = make(cfg, dtype=torch.float32), tokens(1, 200)
    fast, cache, twin_cache = kernel(model), Int8KVCache(cfg, 1, 200), Int8KVCache(cfg, 1, 200)
    assert fast.fits(cache)
    want = [model(part, cache=twin_cache) for part in ids.split(13, 1)]
    got = [fast.step(part, cache, keep=part.shape[1]) for part in ids.split(13, 1)]
    torch.testing.assert_close(cache.key_scales, twin_cache.key_scales, rtol=1e-2, atol=1e-3)
    assert (cache.keys != twin_cache.keys).float().mean() < 0.05
    assert (torch.cat(got, 1) - torch.cat(want, 1)).norm() < 0.05 * torch.cat(want, 1).norm()


@pytest.mark.parametrize("at", range(4))
def test_int8_cache_with_a_key_of_zero(at: int) -> None:
    """Its scale is 0, also where a token before it does not see it."""
    cfg = BASE.replace(position="rope", norm="rmsnorm", qkv_bias=False)
    model, ids = make(cfg, dtype=torch.float32), torch.tensor([[1, 2, 3, 4]])
    ids[0, at] = 5
    model.embed_tokens.weight[5] = 0
    got = kernel(model).step(ids, Int8KVCache(cfg, 1, CONTEXT), keep=4)
    want = model(ids, cache=Int8KVCache(cfg, 1, CONTEXT))
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("cache", [KVCache, Int8KVCache])
@pytest.mark.parametrize(
    ("where", "switches"),
    [
        *((f"layers.0.self_attn.{name}_proj", {}) for name in "qkv"),
        ("layers.0.mlp.up_proj", {"activation": "relu", "gated_mlp": False}),
        ("layers.1.mlp.up_proj", {"activation": "relu2", "gated_mlp": False}),
    ],
)
def test_one_row_that_is_not_finite_is_not_lost(
    where: str, switches: dict[str, Any], cache: Any, bad: float
) -> None:
    model = make(BASE.replace(**switches), dtype=torch.float32)
    model.get_submodule(where).weight[3] = bad
    with pytest.raises(WeightsError, match="not finite"):
        kernel(model).step(tokens(1, 3), cache(model.config, 1, CONTEXT))


@pytest.mark.parametrize("steps", [1, 3, 131])
def test_keys_of_a_windows_beginning_that_are_not_finite_are_not_lost(steps: int) -> None:
    """They are all that the last token sees of its first span."""
    cfg = BASE.replace(max_seq_len=131, sliding_window=5, n_layers=1, tie_embeddings=False)
    model, ids = make(cfg, dtype=torch.float32), torch.full((1, 131), 3)
    ids[:, 126:128] = 7
    model.embed_tokens.weight[7] = torch.nan
    fast, cache = kernel(model), KVCache(cfg, 1, 131)
    if steps < 131:
        model(ids[:, :-steps], cache=cache)
    with pytest.raises(WeightsError, match="not finite"):
        fast.step(ids[:, -steps:], cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_nan_is_kept_whatever_its_bits(dtype: torch.dtype) -> None:
    model = make(BASE, dtype=torch.float32)
    ones = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    model.layers[0].self_attn.v_proj.weight[3] = ones
    with pytest.raises(WeightsError, match="not finite"):
        kernel(model).step(tokens(1, 3), KVCache(BASE, 1, CONTEXT, dtype))


def test_long_context_in_pieces() -> None:
    """Beyond one span of keys, with and without a window, greedy text is the model's own."""
    for window in (None, 150):
        cfg = BASE.replace(max_seq_len=400, sliding_window=window)
        model, ids = make(cfg, dtype=torch.float32), tokens(1, 400)
        fast, cache = kernel(model), KVCache(cfg, 1, 400)
        for sizes in ([30] * 13 + [10], [250, 1, 3, 146]):
            cache.truncate(0)
            parts = [fast.step(part, cache, keep=part.shape[1]) for part in ids.split(sizes, 1)]
            close(torch.cat(parts, 1), model, ids)


@pytest.mark.parametrize("head_dim", [64, 88])  # four vectors at once, and what is left over
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_wide_heads_over_a_span(head_dim: int, kind: str) -> None:
    cfg = BASE.replace(max_seq_len=150, head_dim=head_dim)
    model, ids = make(cfg, dtype=torch.float32), tokens(1, 150)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    cache = Int8KVCache(cfg, 1, 150) if kind == "int8" else KVCache(cfg, 1, 150, dtype)
    fast, sizes = kernel(model), [30, 30, 30, 30, 10, *[1] * 8, 12]
    parts = [fast.step(part, cache, keep=part.shape[1]) for part in ids.split(sizes, 1)]
    if kind == "fp32":
        close(torch.cat(parts, 1), model, ids)
        return
    want = model(ids)  # rounded keys and values, through sharp layers
    assert (torch.cat(parts, 1) - want).norm() < 0.06 * want.norm()


def test_greedy_text_of_256_steps() -> None:
    cfg = BASE.replace(max_seq_len=257, vocab_size=300, d_model=64, n_layers=3)
    model = Transformer(cfg).eval()
    fast, cache, slow = kernel(model), KVCache(cfg, 1, 257), KVCache(cfg, 1, 257)
    ours = theirs = torch.tensor([[7]])
    with torch.inference_mode():
        for _ in range(256):
            got, want = fast.step(ours, cache), model(theirs, cache=slow)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            ours, theirs = got[:, -1:].argmax(-1), want[:, -1:].argmax(-1)
            assert ours.item() == theirs.item()


@settings(max_examples=10 if AGAIN else 25)
@given(configs(), st.data())
def test_greedy_is_step_by_step(cfg: ModelConfig, data: st.DataObject) -> None:
    model, few = make(cfg, dtype=torch.float32), data.draw(st.integers(1, VOCAB))
    fast, caches = kernel(model), [KVCache(cfg, 1, CONTEXT) for _ in range(2)]
    prompt = tokens(1, data.draw(st.integers(1, CONTEXT - 2)))
    first = [fast.step(prompt, cache)[0, -1, :few].argmax().item() for cache in caches]
    want, logprobs, token = [], [], first[0]
    for _ in range(CONTEXT - prompt.shape[1]):
        logits = fast.step(torch.tensor([[token]]), caches[0])[0, -1]
        token = int(logits[:few].argmax())
        want.append(token)
        logprobs.append(logits.log_softmax(-1)[token])
    stop = data.draw(st.sampled_from([None, *want]))
    many = data.draw(st.integers(1, len(want)))
    ids, shares = fast.greedy(int(first[1]), caches[1], many, [] if stop is None else [stop], few)
    end = min(many, want.index(stop) + 1 if stop in want else many)
    assert ids == want[:end]
    torch.testing.assert_close(torch.tensor(shares), torch.stack(logprobs[:end]))
    caches[0].truncate(caches[1].end)
    assert caches[1].length.tolist() == caches[0].length.tolist() == [prompt.shape[1] + end]
    torch.testing.assert_close(
        *(c.keys[:, :, :, : c.end] for c in caches), msg="its keys are not those of single steps"
    )


def test_greedy_takes_the_first_of_equal_ones_and_no_nonsense() -> None:
    cfg = BASE.replace(tie_embeddings=False)
    model, cache = make(cfg, dtype=torch.float32), KVCache(cfg, 1, CONTEXT)
    model.lm_head.weight.zero_()
    ids, shares = kernel(model).greedy(3, cache, 2, [], VOCAB)
    assert ids == [0, 0]
    torch.testing.assert_close(torch.tensor(shares), -torch.tensor([VOCAB, VOCAB]).log())
    cache.truncate(0)
    for count, few, named in (
        (CONTEXT + 1, VOCAB, "cache holds"),
        (0, VOCAB, "count must be at least 1"),
        (1, 0, f"vocab_size must be from 1 to {VOCAB}"),
        (1, VOCAB + 1, f"vocab_size must be from 1 to {VOCAB}"),
    ):
        with pytest.raises(InputError, match=named):
            kernel(model).greedy(3, cache, count, [], few)
    model.lm_head.weight[5] = torch.nan
    with pytest.raises(WeightsError, match="not finite"):
        kernel(model).greedy(3, cache, 4, [], VOCAB)
    assert cache.length.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "keep", "named"),
    [
        (torch.zeros(2, MAX_TOKENS, dtype=torch.long), 1, f"1 to {MAX_TOKENS} ids"),
        (torch.zeros(1, 2, dtype=torch.long), 1, "of the cache's rows"),
        (torch.zeros(2, 0, dtype=torch.long), 1, f"1 to {MAX_TOKENS} ids"),
        (torch.zeros(2, 2, dtype=torch.long), 3, f"1 to {MAX_TOKENS} ids"),
        (torch.zeros(2, 8, dtype=torch.long), 1, "cache holds 7 tokens"),
        (torch.full((2, 1), VOCAB), 1, f"from 0 to {VOCAB - 1}"),
        (torch.full((2, 1), -1), 1, f"from 0 to {VOCAB - 1}"),
    ],
)
def test_sizes_out_of_range_are_refused(ids: Tensor, keep: int, named: str) -> None:
    model, cache = make(BASE, dtype=torch.float32), KVCache(BASE, 2, 7)
    before = cache.keys.clone()
    with pytest.raises(InputError, match=named):
        kernel(model).step(ids, cache, keep)
    assert torch.equal(cache.keys, before)
    assert cache.length.tolist() == [0, 0]


def test_what_it_declines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2llama.native.binding._SAID", set())
    model = make(BASE, dtype=torch.float32)
    kernel(model)
    assert decoder(make(BASE)) is None  # fp64
    assert decoder(make(BASE)) is None
    assert caplog.text.count("float64") == 1  # said once
    model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert decoder(model) is None

    class Adapted(nn.Linear):
        pass

    other = make(BASE, dtype=torch.float32)
    other.layers[1].self_attn.q_proj = Adapted(16, 16, bias=False)
    assert decoder(other) is None
    patched = make(BASE, dtype=torch.float32)
    patched.layers[0].mlp.forward = lambda x: x
    assert decoder(patched) is None


@pytest.mark.parametrize(
    ("where", "put"),
    [
        ("lm_head", nn.Linear(16, VOCAB - 1, bias=False)),
        ("layers.1.mlp.down_proj", nn.Linear(19, 16, bias=False)),
        ("layers.0.self_attn.k_proj", nn.Linear(16, 15, bias=False)),
        ("norm", nn.RMSNorm(15)),
        ("embed_positions", nn.Embedding(CONTEXT - 1, 16)),
        ("layers.0.self_attn.o_proj", QuantLinear(32, 16, QuantScheme(bits=8))),
    ],
    ids=str,
)
def test_what_is_smaller_than_the_config_says_is_not_read(where: str, put: nn.Module) -> None:
    model = make(BASE.replace(position="learned"), dtype=torch.float32)
    kernel(model)
    model.set_submodule(where, put)
    assert decoder(model) is None


def test_room_for_many_tokens_is_not_each_threads_nor_each_keys() -> None:
    fast = kernel(make(BASE, dtype=torch.float32))

    def grown(threads: int, slots: int) -> int:
        few, many = (
            fast._library.scratch_bytes(fast._struct, threads, n, slots) for n in (8, MAX_TOKENS)
        )
        return many - few

    assert grown(64, 9999) == grown(1, 256)


def test_many_rows_of_a_token_and_few_of_many() -> None:
    """Groups of inputs that reach over rows of different lengths."""
    cfg = BASE.replace(max_seq_len=140)
    model, ids = make(cfg, dtype=torch.float32), tokens(11, 140)
    fast, cache = kernel(model), KVCache(cfg, 11, 140)
    lengths = [1 + 12 * row for row in range(11)]
    for row, length in enumerate(lengths):
        alone = KVCache(cfg, 1, 140)
        fast.step(ids[row : row + 1, :length], alone)
        cache.keys[:, row], cache.values[:, row] = alone.keys[:, 0], alone.values[:, 0]
    cache.length, cache.end = torch.tensor(lengths), max(lengths)
    cache.positions.copy_(torch.arange(141))
    parts = torch.stack([ids[row, n : n + 10] for row, n in enumerate(lengths)])
    assert fast.fits(cache)
    got = [fast.step(part, cache, keep=part.shape[1]) for part in parts.split([1, 9], 1)]
    for row, n in enumerate(lengths):
        close(torch.cat(got, 1)[row : row + 1], model, ids[row : row + 1, : n + 10])


def test_caches_it_does_not_fit() -> None:
    fast = kernel(make(BASE, dtype=torch.float32))
    assert not fast.fits(KVCache(BASE, 1, 8, dtype=torch.float64))
    for changes in ({"n_layers": 1}, {"n_kv_heads": 2}, {"head_dim": 6}):
        other = KVCache(BASE.replace(**changes), 1, 8)
        assert not fast.fits(other)
        with pytest.raises(InputError, match="cannot read this cache"):
            fast.step(tokens(1, 2), other)
    assert not fast.fits(KVCache(BASE, 1, 8, dtype=torch.int8))  # without scales
    learned = kernel(make(BASE.replace(position="learned"), dtype=torch.float32))
    longer = KVCache(BASE, 1, CONTEXT + 1)  # than the table of positions
    assert not learned.fits(longer)
    with pytest.raises(InputError, match="cannot read this cache"):
        learned.step(tokens(1, CONTEXT + 1), longer)
    moved = KVCache(BASE, 1, 8)
    make(BASE, dtype=torch.float32)(tokens(1, 3), cache=moved, positions=torch.tensor([[0, 2, 5]]))
    assert not fast.fits(moved)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_cache_with_other_tensors_is_read_anew(name: str) -> None:
    model, cache, ids = make(BASE, dtype=torch.float32), KVCache(BASE, 1, CONTEXT), tokens(1, 6)
    fast = kernel(model)
    assert fast.fits(cache)
    fast.step(ids[:, :5], cache)
    old = getattr(cache, name)
    setattr(cache, name, old.clone())
    old.fill_(torch.nan)
    close(fast.step(ids[:, 5:], cache), model, ids)


def test_weights_are_read_in_place() -> None:
    model, cache = make(BASE, dtype=torch.float32), KVCache(BASE, 1, CONTEXT)
    fast, ids = kernel(model), tokens(1, CONTEXT)
    model.layers[0].mlp.down_proj.weight.mul_(0.5)
    close(fast.step(ids, cache, keep=CONTEXT), model, ids)


def test_an_interrupted_call_leaves_the_cache_usable() -> None:
    cfg = BASE.replace(max_seq_len=4096, n_layers=8)
    model = make(cfg, dtype=torch.float32)
    fast, cache, ids = kernel(model), KVCache(cfg, 1, 4096), tokens(1, 4096)

    def forever() -> None:
        while True:
            cache.truncate(0)
            for part in ids.split(8, 1):
                fast.step(part, cache)

    threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        forever()
    n = cache.end
    assert cache.length.tolist() == [n]
    if n < 4096:
        got = fast.step(ids[:, n : n + 1], cache)
        torch.testing.assert_close(got, model(ids[:, : n + 1])[:, -1:], rtol=1e-3, atol=1e-3)


def test_interrupted_at_any_line_nothing_is_left_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is free again, the cache's lengths agree, and no team is kept that was freed."""
    fast, cache = kernel(make(BASE, dtype=torch.float32)), KVCache(BASE, 1, CONTEXT)
    library, freed = binding._bind(), False

    def seen(name: str, frees: bool) -> None:
        call = getattr(library, name)

        def wrapped(argument: int) -> Any:
            nonlocal freed
            freed = frees
            return call(argument)

        wrapped.restype = call.restype  # type: ignore[attr-defined]
        monkeypatch.setattr(library, name, wrapped)

    seen("team_new", False)
    seen("team_free", True)
    for lines in range(1000):
        left, done = lines, False

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != binding.__file__:
                return None
            # Leaving a `with` is a line to a tracer; no signal comes between it and the exit.
            text = linecache.getline(binding.__file__, frame.f_lineno)
            left -= event == "line" and not text.lstrip().startswith("with ")
            if left < 0:
                raise KeyboardInterrupt
            return trace

        torch.set_num_threads(2)
        cache.truncate(0)
        fast.step(tokens(1, 3), cache)
        torch.set_num_threads(1)  # so that the next call frees a team and makes one
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            fast.step(tokens(1, 3), cache)
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not binding._TEAM.lock.locked()
        assert cache.length.tolist() == [cache.end]
        assert binding._TEAM.pointer is None or not freed
        if done:
            break
    assert done


def test_two_python_threads_take_turns() -> None:
    model, ids = make(BASE, dtype=torch.float32), tokens(1, CONTEXT)
    want, wrong = model(ids), []

    def work() -> None:
        fast = kernel(model)
        for _ in range(50):
            got = fast.step(ids, KVCache(BASE, 1, CONTEXT), keep=CONTEXT)
            wrong.append(float((got - want).abs().max()))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(wrong) == 150
    assert max(wrong) < 1e-3
