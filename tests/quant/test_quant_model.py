"""Quantised layers and models against plain arithmetic and against their dequantised twins."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from sharp import configs, make, tokens
from torch import Tensor, nn

from gpt2llama.errors import ConfigError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.linear import QuantEmbedding, QuantLinear, round_activations
from gpt2llama.quant.rtn import decode, encode, round_to_nearest
from gpt2llama.quant.scheme import QuantScheme, scheme

SCHEMES = [
    QuantScheme(bits=8),
    QuantScheme(bits=8, group=32),
    QuantScheme(bits=4, group=32),
    QuantScheme(bits=4, group=64, zero=True),
    QuantScheme(bits=4, group=128),
]
any_scheme = pytest.mark.parametrize("how", SCHEMES, ids=str)
ALIGNED: dict[str, Any] = {"d_model": 64, "d_ff": 96}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(how: QuantScheme, rows: int = 21, inputs: int = 256) -> tuple[Any, ...]:
    rng = torch.Generator().manual_seed(0)
    low, high = (-127, 128) if how.bits == 8 else (0, 16)
    kind = torch.int8 if how.bits == 8 else torch.uint8
    q = torch.randint(low, high, (rows, inputs), generator=rng).to(kind)
    scale = draw(rows, how.groups(inputs)).half()
    return q, scale, draw(rows, how.groups(inputs), seed=1).half() if how.zero else None


@any_scheme
def test_the_words_are_those_of_the_layout(how: QuantScheme) -> None:
    """Unpacked number by number with Python's integers, as linear.py's docstring describes it."""
    q, scale, minimum = parts(how)
    layer = QuantLinear.from_parts(q, scale, minimum, None, how)
    words, a_word = layer.words.tolist(), 32 // how.bits
    assert layer.words.shape == (2, 256 * how.bits // 32, 16)
    assert layer.words.dtype == torch.int32
    for row in range(32):
        for k in range(256):
            word = words[row // 16][k // a_word][row % 16] & 0xFFFFFFFF
            place = k % a_word
            if how.bits == 8:
                found = word >> 8 * place & 255
                found -= 256 * (found > 127)
            else:
                byte, half = place % 4, place // 4
                found = word >> (8 * byte + 4 * half) & 15
            assert found == (q[row, k].item() if row < 21 else 0)
    for stored, given_ in ((layer.scale, scale), (layer.minimum, minimum)):
        if stored is not None and given_ is not None:
            assert stored.dtype == torch.float16
            for row in range(21):
                assert torch.equal(stored[row // 16, :, row % 16], given_[row])
            assert not stored[1, :, 5:].any()


@any_scheme
def test_integers_and_rows_come_back(how: QuantScheme) -> None:
    q, scale, minimum = parts(how)
    layer = QuantLinear.from_parts(q, scale, minimum, None, how)
    assert torch.equal(layer.integers(), q)
    wide = scale.float().repeat_interleave(256 // scale.shape[1], 1)
    expected = wide * (q.float() - 8 * (how.bits == 4 and not how.zero))
    if minimum is not None:
        expected += minimum.float().repeat_interleave(256 // scale.shape[1], 1)
    assert torch.equal(layer.dequantise(), expected)
    ids = torch.tensor([[20, 3], [16, 0]])
    assert torch.equal(QuantEmbedding(layer)(ids), expected[ids])


@any_scheme
def test_rounding_the_rounded_changes_nothing(how: QuantScheme) -> None:
    q, scale, minimum = parts(how)
    wide = scale.float()[..., None]
    low = None if minimum is None else minimum.float()[..., None]
    numbers = q.view(21, scale.shape[1], -1).float()
    assert torch.equal(encode(decode(numbers, wide, low, how.bits), wide, low, how.bits), numbers)


@pytest.mark.parametrize("how", [QuantScheme(bits=8), QuantScheme(bits=8, group=64)], ids=str)
def test_8_bits_are_within_half_a_step(how: QuantScheme) -> None:
    weight = draw(40, 256)
    layer = QuantLinear.from_parts(*round_to_nearest(weight, how), None, how)
    groups = weight.view(40, how.groups(256), -1)
    step = groups.abs().amax(-1, keepdim=True) / 127
    error = (layer.dequantise().view_as(groups) - groups).abs()
    # fp16 rounds the step by 2^-11 at most: of 127 steps, 0.06.
    assert bool((error <= step * 0.5625).all())


@pytest.mark.parametrize("zero", [False, True])
def test_4_bits_fit_better_than_the_plain_rules(zero: bool) -> None:
    """Squared error below that of the full range in equal steps; at most a fifth clipped."""
    how, weight = QuantScheme(bits=4, group=32, zero=zero), draw(64, 128)
    layer = QuantLinear.from_parts(*round_to_nearest(weight, how), None, how)
    groups, found = weight.view(64, 4, 32), layer.dequantise().view(64, 4, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.maximum(-low, high)
    step = (high - low) / 15 if zero else largest / 7
    base = low if zero else torch.zeros_like(low)
    plain = ((groups - base) / step).round() * step + base
    assert (found - groups).square().sum() < 0.96 * (plain - groups).square().sum()
    assert bool(((found - groups).abs() <= 0.21 * (high - low if zero else largest)).all())


def test_constant_zero_and_broken_weights() -> None:
    for how in SCHEMES:
        weight = torch.zeros(3, 128)
        weight[1] = 0.3
        weight[2, 0] = -1.0
        layer = QuantLinear.from_parts(*round_to_nearest(weight, how), None, how)
        torch.testing.assert_close(layer.dequantise(), weight, atol=1e-3, rtol=0)
        for broken in (torch.nan, torch.inf, 3e7):
            with pytest.raises(WeightsError, match="fp16"):
                round_to_nearest(torch.full((1, 128), broken), how)


def rounded(x: Tensor) -> Tensor:
    """`round_activations`, block by block."""
    out = torch.empty_like(x)
    for row in range(len(x)):
        for at in range(0, x.shape[1], 32):
            block = x[row, at : at + 32]
            step = block.abs().max() / 127
            numbers = [round((v / step).item()) if step > 0 else 0 for v in block]
            out[row, at : at + 32] = torch.tensor(numbers) * step
    return out


@any_scheme
def test_forward_is_a_linear_layer_of_rounded_inputs(how: QuantScheme) -> None:
    weight, bias, x = draw(21, 256), draw(21, seed=1), draw(5, 256, seed=2) * 3
    x[1, :40] = 0
    layer = QuantLinear.from_parts(*round_to_nearest(weight, how), bias, how)
    torch.testing.assert_close(layer(x), F.linear(rounded(x), layer.dequantise(), bias))
    only = QuantLinear.from_parts(
        *round_to_nearest(weight, how), bias, replace(how, activations="float")
    )
    assert torch.equal(only(x), F.linear(x, layer.dequantise(), bias))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_another_dtype_leaves_the_numbers_alone() -> None:
    layer = QuantLinear.from_parts(
        *round_to_nearest(draw(16, 64), SCHEMES[3]), draw(16), SCHEMES[3]
    )
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    after = layer.to(torch.bfloat16).state_dict()
    assert before.keys() == after.keys() == {"words", "scale", "minimum", "bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)


def plain_twin(model: Transformer) -> Transformer:
    """The dequantised weights in an nn.Linear's place, by hand."""
    twin = Transformer(model.config).eval().requires_grad_(False)
    for name, p in twin.named_parameters():
        module, _, kind = name.rpartition(".")
        ours: Any = model.get_submodule(module)
        if isinstance(ours, QuantEmbedding):
            ours = ours.table
        if isinstance(ours, QuantLinear) and kind == "weight":
            p.copy_(ours.dequantise())
        else:
            p.copy_(getattr(ours, kind))
    return twin


def round_inputs(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return round_activations(args[0])


@settings(max_examples=15, deadline=None)
@given(configs(**ALIGNED))
def test_every_switch_survives(cfg: ModelConfig) -> None:
    model, ids = make(cfg, dtype=torch.float32), tokens(2, 7)
    before = deepcopy(model.state_dict())
    for how in (QuantScheme(bits=4, group=32, activations="float"), QuantScheme(bits=8)):
        small = quantise(model, how)
        twin = plain_twin(small)
        if how.activations == "int8":
            for module in twin.modules():
                if isinstance(module, nn.Linear) and module.in_features % 32 == 0:
                    module.register_forward_pre_hook(round_inputs)
        torch.testing.assert_close(small(ids), twin(ids), atol=2e-3, rtol=1e-3)
        tied = isinstance(small.embed_tokens, QuantEmbedding) and (
            small.embed_tokens.table is small.lm_head
        )
        assert tied == cfg.tie_embeddings
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_left_alone() -> None:
    cfg = ModelConfig(
        vocab_size=40, max_seq_len=8, n_layers=1, n_heads=2, d_model=64, d_ff=80, position="learned"
    )
    model = Transformer(cfg).bfloat16()
    small = quantise(model, QuantScheme(bits=4, group=64, head=False))
    left = {name for name, module in small.named_modules() if isinstance(module, nn.Linear)}
    assert left == {"layers.0.mlp.down_proj", "lm_head"}
    assert small.lm_head.weight is small.embed_tokens.weight
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    assert isinstance(small.embed_positions, nn.Embedding)
    assert small(tokens(1, 3)).dtype == torch.float32


def test_an_untied_table_is_quantised_on_its_own() -> None:
    cfg = ModelConfig(
        vocab_size=40, max_seq_len=8, n_layers=1, n_heads=2, d_model=64, d_ff=64,
        tie_embeddings=False,
    )  # fmt: skip
    model = Transformer(cfg)
    small = quantise(model, scheme("int8"))
    ids = torch.arange(40)
    torch.testing.assert_close(
        small.embed_tokens(ids), model.embed_tokens.weight, atol=5e-4, rtol=0
    )
    torch.testing.assert_close(small.lm_head.dequantise(), model.lm_head.weight, atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 4}, "4 bits need a group"),
        ({"bits": 4.0, "group": 32}, "bits must be a whole number"),
        ({"bits": 5, "group": 32}, "bits must be one of 8, 4"),
        ({"bits": 4, "group": 48}, "group must be 32, 64, 128"),
        ({"bits": 8, "zero": True}, "zero is for 4 bits"),
    ],
)
def test_a_scheme_that_is_none(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QuantScheme(**fields)


def test_parts_that_do_not_fit() -> None:
    q, scale, _ = parts(SCHEMES[2])
    for wrong in ((q.char(), scale, None), (q, scale[:, :1], None), (q, scale, scale)):
        with pytest.raises(WeightsError, match="do not fit"):
            QuantLinear.from_parts(*wrong, None, SCHEMES[2])
    with pytest.raises(WeightsError, match="must divide"):
        QuantLinear(48, 16, scheme("int8"))
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        scheme("int5")
