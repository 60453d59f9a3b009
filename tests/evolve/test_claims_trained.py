"""The comparisons that decide claims by training: each is a fair one-change pair."""

from __future__ import annotations

import pytest

from gpt2llama import preset
from gpt2llama.evolve.claims import CLAIMS
from gpt2llama.evolve.claims.trained import COMPARISONS, Comparison, comparisons_of
from gpt2llama.evolve.design import TOLERANCE
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import ladder
from gpt2llama.plan import flops_per_token, parameters

by_number = pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: str(c.number))


def test_every_trained_claim_is_decided() -> None:
    trained = {claim.number for claim in CLAIMS if claim.trained}
    assert {comparison.number for comparison in COMPARISONS} == trained
    for number in trained:
        claim = CLAIMS[number - 1]
        assert claim.check().verdict == "not-measured"
        assert claim.command == f"gpt2llama claims --train --number {number}"


@by_number
def test_variants_differ_in_what_they_name(comparison: Comparison) -> None:
    configs = comparison.configs()
    base = configs.pop(comparison.baseline)
    assert list(configs) == list(comparison.variants)
    for name, cfg in configs.items():
        changed = {field for field, to in vars(cfg).items() if to != getattr(base, field)}
        assert changed == set(comparison.variants[name])
        assert (cfg.vocab_size, cfg.max_seq_len) == (base.vocab_size, base.max_seq_len)


@by_number
def test_what_is_trained_is_matched(comparison: Comparison) -> None:
    def size(cfg: ModelConfig) -> int:
        return flops_per_token(cfg) if comparison.match == "flops" else parameters(cfg)["total"]

    trained = comparison.trained()
    assert list(trained) == list(comparison.configs())[: 1 if comparison.without_training else None]
    goal = size(trained[comparison.baseline])
    assert all(size(cfg) == pytest.approx(goal, rel=TOLERANCE) for cfg in trained.values())


def test_the_comparisons_share_their_models() -> None:
    """The ladder's top is zh-3m, which most others are compared with: it is trained once."""
    trained = [cfg for c in COMPARISONS for cfg in c.trained().values()]
    assert len(set(map(str, trained))) == 22 < len(trained) == 36


def test_sizes_stand_near_zh_3m() -> None:
    """Matching moves d_ff; a start within 15% leaves it little to do."""
    size = parameters(preset("zh-3m"))["total"]
    for comparison in COMPARISONS:
        if comparison.base == "zh-3m" and comparison.number != 39:
            for cfg in comparison.configs().values():
                assert parameters(cfg)["total"] == pytest.approx(size, rel=0.15)


def test_the_plain_mlp_has_the_gated_ones_size() -> None:
    (comparison, *_) = comparisons_of(28)
    plain, gated = (parameters(cfg)["mlp"] for cfg in comparison.configs().values())
    assert plain == gated


def test_the_ladder_is_the_ladder() -> None:
    (comparison,) = comparisons_of(46)
    assert list(comparison.configs().values()) == list(ladder().values())
    assert list(comparison.configs()) == list(ladder())


def test_thin_models_are_deep_and_small() -> None:
    shallow, deep = (next(iter(c.configs().values())) for c in comparisons_of(9))
    assert (shallow.n_layers, deep.n_layers) == (4, 24)
    assert parameters(deep)["total"] < 3e6
