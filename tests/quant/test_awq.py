"""AWQ: folded scales change nothing, and scaling and clipping each lower what they minimise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from sharp import configs, make, tokens
from torch import Tensor

from gpt2llama.model.config import ModelConfig
from gpt2llama.quant.apply import matrices, quantise
from gpt2llama.quant.awq import (
    channel_scales,
    fold,
    output_error,
    round_clipped,
    shared_by_heads,
    source_of,
    unscaled,
)
from gpt2llama.quant.calibration import SHARED
from gpt2llama.quant.linear import QuantLinear
from gpt2llama.quant.report import report
from gpt2llama.quant.rtn import dequantise, round_to_nearest
from gpt2llama.quant.scheme import QuantScheme

INT4 = QuantScheme(bits=4, group=32)
GROUPED = ModelConfig(
    vocab_size=23, max_seq_len=12, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=96
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


@settings(max_examples=10)
@given(cfg=configs())
def test_a_fold_changes_nothing(cfg: ModelConfig) -> None:
    """Every site that has a source, with scales of any size, for every switch."""
    model, ids = make(cfg), tokens(2, 8)
    before = model(ids)
    places: list[tuple[Any, tuple[str, ...]]] = [(model, ("lm_head",))]
    places += [(block, names) for block in model.layers for names in SHARED]
    folded = 0
    for i, (module, shared) in enumerate(places):
        inside = dict(module.named_modules())
        matrices: list[Any] = [inside[name] for name in shared if name in inside]
        source = source_of(module, shared[-1], cfg)
        if source is not None:
            s = draw(matrices[0].in_features, seed=i).exp()
            s = shared_by_heads(s, shared[-1], cfg)
            weight = matrices[0].weight.clone()
            fold(source, matrices, s, shared[-1], cfg)
            assert not torch.equal(matrices[0].weight, weight)
            folded += 1
    assert folded >= cfg.n_layers  # o_proj's always folds
    torch.testing.assert_close(model(ids), before, rtol=1e-9, atol=1e-9)


def test_what_is_not_scaled_is_said() -> None:
    model = make(GROUPED, dtype=torch.float32)
    made = report(model, quantise(model, INT4.replace(method="awq"), [tokens(4, 12)]))
    assert made.unscaled == ["lm_head"]
    assert made.errors == {}

    def leaves(**switches: Any) -> set[str]:
        other = make(GROUPED.replace(**switches))
        return {name.rpartition(".")[2] for name in unscaled(other, list(matrices(other)))}

    assert leaves(tie_embeddings=False) == {"embed_tokens"}
    assert leaves(gated_mlp=False) == {"lm_head", "down_proj"}
    post = leaves(norm_placement="post", tie_embeddings=False)
    assert post == {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def correlated(inputs: int, outliers: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gram matrix and mean |x| of inputs of which some are 30 times larger."""
    x = draw(256, inputs, seed=seed) + draw(256, 1, seed=seed + 1)
    x[:, :outliers] *= 30
    return x.T @ x, x.abs().mean(0)


@pytest.mark.parametrize("seed", range(3))
def test_large_inputs_keep_their_weights(seed: int) -> None:
    gram, magnitude = correlated(64, 3, seed)
    weights = [draw(24, 64, seed=seed + 7).float(), draw(8, 64, seed=seed + 8).float()]
    s = channel_scales(weights, gram, magnitude, INT4)
    assert s[:3].min() > 1.5 * s[3:].max()

    def change(w: Tensor, narrow: Tensor) -> Tensor:
        return dequantise(round_to_nearest(w * narrow, INT4), INT4) / narrow - w

    scaled = [change(w, s.float()) for w in weights]
    plain = [change(w, torch.ones(64)) for w in weights]

    def total(changes: list[Tensor]) -> float:
        narrow = gram.float()
        pairs = zip(changes, weights, strict=True)
        return float(sum(output_error(c, narrow) / output_error(w, narrow) for c, w in pairs))

    assert total(scaled) < 0.7 * total(plain)


@pytest.mark.parametrize("seed", range(3))
def test_inputs_that_are_never_there(seed: int) -> None:
    gram, magnitude = correlated(64, 0, seed)
    gram[:, 5], gram[5], magnitude[5] = 0, 0, 0
    s = channel_scales([draw(8, 64).float()], gram, magnitude, INT4)
    assert s.isfinite().all()
    assert s.min() > 0
    nothing = channel_scales([draw(8, 64).float()], 0 * gram, 0 * magnitude, INT4)
    assert torch.equal(nothing, torch.ones(64, dtype=torch.float64))


@pytest.mark.parametrize(
    "how", [INT4, QuantScheme(bits=4, group=64, zero=True), QuantScheme(bits=8)], ids=str
)
def test_clipping_lowers_the_error_of_every_group(how: QuantScheme) -> None:
    gram, _ = correlated(128, 3, 0)
    weight = draw(24, 128, seed=5).float()
    groups = how.groups(128)
    errors = []
    for parts in (round_clipped(weight, gram, how), round_to_nearest(weight, how)):
        change = QuantLinear.from_parts(*parts, None, how).dequantise().double() - weight
        change = change.view(24, groups, -1)
        own = [gram[i : i + 128 // groups, i : i + 128 // groups]
               for i in range(0, 128, 128 // groups)]  # fmt: skip
        errors.append(torch.einsum("ngi,gij,ngj->ng", change, torch.stack(own), change))
    clipped, plain = errors
    assert (clipped <= plain * (1 + 1e-5)).all()
    assert how.bits == 8 or clipped.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_logits_are_nearer_than_rounded_to_nearest(method: Any) -> None:
    """A model some of whose channels are large, as those of trained models are."""
    model = make(GROUPED, dtype=torch.float32)
    for block in model.layers:
        block.self_attn.q_proj.weight /= 6
        for norm in (block.attn_norm, block.mlp_norm):
            norm.weight[::13] *= 12
    how, seen = INT4.replace(head=False), [tokens(64, 12, seed=1)]
    ids = tokens(64, 12, seed=2)
    want = model(ids).log_softmax(-1)

    def divergence(chosen: Any) -> float:
        small = quantise(model, how.replace(method=chosen), seen)
        return float((want.exp() * (want - small(ids).log_softmax(-1))).sum(-1).mean())

    assert divergence(method) < 0.8 * divergence("rtn")
