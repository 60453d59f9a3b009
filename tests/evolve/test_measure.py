"""What is read off a trained model, against the same by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2llama.data.batches import IGNORED, Batch, TokenData
from gpt2llama.errors import ConfigError
from gpt2llama.evolve.measure import (
    BUCKETS,
    bits_of_tokens,
    loss_by_position,
    measure,
    positions,
    rescaled,
    round_weights,
    rounded_to,
    windows_of,
)
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer

CFG = ModelConfig(vocab_size=300, max_seq_len=32, n_layers=2, n_heads=2, d_model=64, d_ff=48)


def make(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(CFG.replace(**switches)).eval()
    for p in model.parameters():
        p.data.mul_(5)
    return model


def test_loss_by_position() -> None:
    model, ids = make(), torch.randint(300, (3, 64))
    targets = torch.randint(300, (3, 64))
    targets[1, 5] = IGNORED
    got = loss_by_position(model, [Batch(ids[:2], targets[:2]), Batch(ids[2:], targets[2:])])
    assert got is not None
    assert len(got) == BUCKETS
    with torch.no_grad():
        scores = model(ids).log_softmax(-1)
    for part in range(BUCKETS):
        places = range(4 * part, 4 * part + 4)
        each = [
            -scores[row, at, targets[row, at]].item()
            for row in range(3)
            for at in places
            if targets[row, at] != IGNORED
        ]
        assert got[part] == pytest.approx(sum(each) / len(each), rel=1e-5)
    learned = make(position="learned")
    assert loss_by_position(learned, [Batch(ids[:, :32], targets[:, :32])]) is not None
    assert loss_by_position(learned, [Batch(ids, targets)]) is None


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("linear", {}),
        ("ntk", {}),
        ("dynamic", {}),
        ("yarn", {"original_max_seq_len": 32}),
        (
            "llama3",
            {"original_max_seq_len": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
    ],
)
def test_another_rope_scaling_without_training(kind: str, more: dict[str, Any]) -> None:
    model, ids = make(), torch.randint(300, (1, 100))
    want = Transformer(CFG.replace(rope_scaling={"type": kind, "factor": 4.0, **more})).eval()
    want.load_state_dict(model.state_dict())
    got = rescaled(model, kind, 4.0)
    with torch.no_grad():
        torch.testing.assert_close(got(ids), want(ids))
        assert not torch.allclose(got(ids), model(ids), atol=1e-3)
    assert model.config == CFG
    with pytest.raises(ConfigError, match="rope_scaling"):
        rescaled(make(position="learned"), kind, 4.0)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32), (4, 20)])
def test_rounding_is_to_the_nearest_step_of_each_group(bits: int, group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64)
    weight[2] = 0
    rounded = rounded_to(weight, bits, group)
    largest = 2 ** (bits - 1) - 1
    for row in range(5):
        for start in range(0, 64, group):
            part, got = weight[row, start : start + group], rounded[row, start : start + group]
            step = part.abs().max() / largest
            assert ((got - part).abs() <= step / 2 * 1.0001).all()
            assert torch.allclose(got / step.clamp(min=1e-9), (got / step.clamp(min=1e-9)).round())
    assert torch.equal(rounded_to(rounded, bits, group), rounded)


@pytest.mark.parametrize("tied", [True, False])
def test_rounded_models(tied: bool) -> None:
    model = make(tie_embeddings=tied)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids = torch.randint(300, (2, 16))
    with torch.no_grad():
        plain, eight, four = (
            m(ids) for m in (model, round_weights(model, 8), round_weights(model, 4))
        )
    assert 0 < (eight - plain).norm() < (four - plain).norm() < plain.norm()
    small = round_weights(model, 4)
    assert (small.lm_head.weight is small.embed_tokens.weight) == tied
    assert not tied or not torch.equal(small.embed_tokens.weight, model.embed_tokens.weight)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_all_of_it(data: Path) -> None:
    tokens = TokenData.open(data)
    texts = windows_of(tokens, (8, 16, 32), 0)
    read = [torch.cat([batch.targets.flatten() for batch in text]) for text in texts.values()]
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])
    assert len(read[0]) == len(tokens.held_out) // 32 * 32
    model = make(max_seq_len=8)
    assert list(positions(model, texts)) == ["8", "16", "32"]
    found = measure(model, texts[8])
    assert found["decode_tokens_per_s"] > 0
    assert abs(found["int8_nats_per_token_more"]) < abs(found["int4_nats_per_token_more"])
    assert bits_of_tokens(1.0, tokens) == pytest.approx(
        len(tokens.held_out) / tokens.held_out_bytes / 0.6931471805599453
    )
