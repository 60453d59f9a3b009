"""A run that begins with the weights of another model: a short tune at a longer context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import VOCAB, config, metrics

import gpt2llama as g
from gpt2llama.data.batches import PackedBatches, TokenData
from gpt2llama.data.prepare import prepare
from gpt2llama.errors import ConfigError, TokenizerError
from gpt2llama.model.config import LinearScaling
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.config import RunConfig
from gpt2llama.train.run import make_trainer, train
from gpt2llama.train.run_folder import RunFolder

LONGER = LinearScaling(2.0)


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begin") / "base"
    train(config(data), out)
    return out


def longer(data: Path, base: Path, **changes: Any) -> RunConfig:
    run = config(data, max_seq_len=32, **changes)
    return replace(run, model=run.model.replace(rope_scaling=LONGER), begin=str(base))


def test_it_goes_on_from_the_weights_under_its_own_config(
    data: Path, base: Path, tmp_path: Path
) -> None:
    run = longer(data, base, dropout=0.0)
    train(run, tmp_path / "run")
    assert RunConfig.read(tmp_path / "run" / "config.toml") == run
    before, _ = g.load(base)
    scaled = g.Transformer(run.model)
    scaled.load_state_dict(before.state_dict())
    batch = PackedBatches(TokenData.open(data), 2, 32, run.train.seed).batch(0)
    logits = scaled(batch.ids).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    after, _ = g.load(tmp_path / "run")
    assert after.config == run.model
    assert not torch.equal(after.embed_tokens.weight, before.embed_tokens.weight)


def test_it_resumes_to_the_bit(data: Path, base: Path, tmp_path: Path) -> None:
    train(longer(data, base), tmp_path / "whole")
    with RunFolder(tmp_path / "parts") as folder:
        folder.write_text("config.toml", longer(data, base).to_toml())
        make_trainer(longer(data, base), folder, lambda line: None).run(until=3)
    train(longer(data, base), tmp_path / "parts", resume=True)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    whole, parts = (g.load(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="begun with begin"):
        train(replace(longer(data, base), begin=""), tmp_path / "parts", resume=True)


@pytest.mark.parametrize("changes", [{"n_layers": 2}, {"d_ff": 32}, {"norm": "layernorm"}])
def test_weights_of_other_shapes_are_refused(
    data: Path, base: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=r"of shape .* the run's config wants"):
        train(replace(config(data, **changes), begin=str(base)), tmp_path / "run")


@pytest.mark.parametrize(
    ("begun", "now"),
    [
        ({}, {"n_heads": 4, "n_kv_heads": 2}),
        ({"tie_embeddings": "false"}, {"tie_embeddings": "true"}),
    ],
)
def test_weights_that_would_mean_something_else_are_refused(
    data: Path, tmp_path: Path, begun: dict[str, Any], now: dict[str, Any]
) -> None:
    """Of the same shapes, or with a head that would go into the tied table."""
    train(config(data, steps=1, **begun), tmp_path / "base")
    with pytest.raises(ConfigError, match=r"has \S+=\S+ and the run's config"):
        train(replace(config(data, **now), begin=str(tmp_path / "base")), tmp_path / "run")


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    text = "\n\n".join(f"other words {i} {i * i}" for i in range(400))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    other = prepare([tmp_path / "text.txt"], train_bpe([text], VOCAB), tmp_path / "data")
    with pytest.raises(TokenizerError, match="another tokenizer"):
        train(replace(config(other.folder), begin=str(base)), tmp_path / "run")
