"""GPTQ against optimal brain quantisation with explicit inverses, and against plain rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharp import configs, make, tokens
from torch import Tensor

from gpt2llama.model.config import ModelConfig
from gpt2llama.quant.apply import quantise, quantised_layers, targets
from gpt2llama.quant.gptq import (
    DAMPENING,
    Scales,
    inverse_factor,
    round_in_order,
    round_matrix,
)
from gpt2llama.quant.linear import QuantLinear
from gpt2llama.quant.rtn import decode, encode, round_to_nearest
from gpt2llama.quant.scheme import QuantScheme

SCHEMES = [
    QuantScheme(bits=8),
    QuantScheme(bits=8, group=32),
    QuantScheme(bits=4, group=32),
    QuantScheme(bits=4, group=64, zero=True),
]
any_scheme = pytest.mark.parametrize("how", SCHEMES, ids=str)


def problem(rows: int, inputs: int, seed: int, dead: int | None = None) -> tuple[Tensor, Tensor]:
    """Weights, and the Gram matrix of inputs that are correlated and of unequal size."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=rng, dtype=torch.float64)
    sizes = torch.randn(inputs, generator=rng, dtype=torch.float64).exp()
    x = torch.randn(3 * inputs, inputs, generator=rng, dtype=torch.float64)
    x = (x + x @ mixed / 4) * sizes
    if dead is not None:
        x[:, dead] = 0
    return torch.randn(rows, inputs, generator=rng), x.T @ x


def fixed(scale: Tensor, minimum: Tensor | None, size: int) -> Scales:
    """The scales (N, G) of another rounding, whatever the weights have become."""

    def scales(first: int, w: Tensor) -> tuple[Tensor, Tensor | None]:
        at = slice(first // size, first // size + 1)
        wide = None if minimum is None else minimum[:, at, None].float()
        return scale[:, at, None].float(), wide

    return scales


def obq(w: Tensor, gram: Tensor, step: Tensor, least: Tensor | None, bits: int) -> Tensor:
    """Frantar et al.'s eq. 2 and 3 in fp64, the inverse taken anew for every input."""
    w, h = w.double().clone(), gram.clone()
    h += DAMPENING * h.diagonal().mean() * torch.eye(len(h))
    q = torch.empty_like(w)
    for i in range(len(h)):
        inverse = torch.linalg.inv(h[i:, i:])
        minimum = None if least is None else least[:, i]
        q[:, i] = encode(w[:, i], step[:, i], minimum, bits)
        error = w[:, i] - decode(q[:, i], step[:, i], minimum, bits)
        w[:, i:] -= torch.outer(error / inverse[0, 0], inverse[0])
    return q


@any_scheme
@pytest.mark.parametrize("seed", range(3))
def test_integers_of_obq(how: QuantScheme, seed: int) -> None:
    weight, gram = problem(6, 192, seed)  # more than the inputs that are rounded at a time
    _, scale, minimum = round_to_nearest(weight, how)
    size = 192 // scale.shape[1]
    q, *kept = round_in_order(weight, inverse_factor(gram), how, fixed(scale, minimum, size))
    wide = [None if t is None else t.double().repeat_interleave(size, 1) for t in (scale, minimum)]
    assert wide[0] is not None
    want = obq(weight, gram, wide[0], wide[1], how.bits)
    assert torch.equal(q.double(), want)
    assert torch.equal(kept[0], scale)
    assert (kept[1] is None) == (minimum is None)


def output_error(parts: Any, weight: Tensor, gram: Tensor, how: QuantScheme) -> float:
    change = QuantLinear.from_parts(*parts, None, how).dequantise().double() - weight
    return float(((change @ gram) * change).sum())


@any_scheme
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_outputs_are_no_further_off_than_rounded_to_nearest(how: QuantScheme, seed: int) -> None:
    weight, gram = problem(16, 64, seed)
    nearest = round_to_nearest(weight, how)
    size = 64 // nearest[1].shape[1]
    same_scales = fixed(nearest[1], nearest[2], size)
    for parts in (
        round_in_order(weight, inverse_factor(gram), how, same_scales),
        round_matrix(weight, inverse_factor(gram), how),
    ):
        found, limit = (output_error(p, weight, gram, how) for p in (parts, nearest))
        assert found <= limit


@any_scheme
def test_an_input_that_was_never_seen_is_rounded_to_nearest(how: QuantScheme) -> None:
    weight, gram = problem(8, 64, 0, dead=5)
    nearest = round_to_nearest(weight, how)
    same_scales = fixed(nearest[1], nearest[2], 64 // nearest[1].shape[1])
    q, *_ = round_in_order(weight, inverse_factor(gram), how, same_scales)
    assert torch.equal(q[:, 5], nearest[0][:, 5])
    without = torch.zeros(64, 64, dtype=torch.float64)
    parts = round_in_order(weight, inverse_factor(without), how, same_scales)
    assert torch.equal(parts[0], nearest[0])


def test_a_text_shorter_than_the_inputs() -> None:
    """A Gram matrix without an inverse has one once it is dampened."""
    weight, _ = problem(8, 64, 0)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    how, gram = SCHEMES[2], x.T @ x
    parts = round_matrix(weight, inverse_factor(gram), how)
    nearest = output_error(round_to_nearest(weight, how), weight, gram, how)
    assert output_error(parts, weight, gram, how) < nearest / 4


@settings(max_examples=10)
@given(cfg=configs(d_model=64, d_ff=96), method=st.sampled_from(["gptq", "awq"]))
def test_every_switch(cfg: ModelConfig, method: Any) -> None:
    """Every matrix that fits is quantised, in its place and with its bias: in 8 bits the logits
    stay where they were."""
    model = make(cfg, dtype=torch.float32)
    for block in model.layers:
        block.self_attn.q_proj.weight /= 6  # as sharp as it is, rounding alone moves attention
    how = QuantScheme(bits=8, group=32, activations="float", method=method)
    ids = tokens(8, 12)
    small = quantise(model, how, [ids[:4], ids[4:, :7]])
    assert quantised_layers(small).keys() == targets(model, how).keys()
    assert {layer.scheme for layer in quantised_layers(small).values()} == {how}
    before, after = model(ids), small(ids)
    assert (after - before).norm() < 0.2 * before.norm()
