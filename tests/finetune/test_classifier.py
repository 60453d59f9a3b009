"""The head on the last real token, whatever surrounds the text; and what is saved of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sharp import configs, make, tokens
from torch.testing import assert_close

import gpt2llama as g
from gpt2llama.data.batches import IGNORED
from gpt2llama.errors import FileError, Gpt2LlamaError, InputError, TokenizerError, WeightsError
from gpt2llama.finetune.classifier import (
    Classifier,
    label_logits,
    load_classifier,
    padded,
    put_head,
    text_ids,
)
from gpt2llama.finetune.classify import batch_logits, side_by_side, to_example
from gpt2llama.model.config import DynamicScaling, ModelConfig
from gpt2llama.tokenizer import BPETokenizer, train_bpe

LABELS = ["ham", "spam", "中性"]
TEXTS = ["you won a prize, call now", "see you at home", "中", "lunch?"]


def with_head(cfg: ModelConfig, labels: int = 3, seed: int = 0) -> g.Transformer:
    model = make(cfg, seed)
    put_head(model, labels)
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(seed))
    return model.requires_grad_(False)


@settings(max_examples=40)
@given(configs(), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_padding_changes_nothing(cfg: ModelConfig, lengths: list[int]) -> None:
    """0, 5 and 50 pads on either side, and rows of other lengths beside; for every switch."""
    model = with_head(cfg)
    rows = [tokens(n, seed=i).tolist() for i, n in enumerate(lengths)]
    alone = [label_logits(model, *padded([row])) for row in rows]
    wanted = torch.cat(alone)
    hidden = model.hidden(torch.tensor([rows[0]]))
    assert_close(alone[0], hidden[:, -1] @ model.lm_head.weight.T)
    assert_close(label_logits(model, *padded(rows)), wanted)
    for before, after in ((0, 5), (0, 50), (5, 0), (50, 0), (5, 50)):
        for pad in (0, rows[0][-1]):  # a token that is also a real one
            ids, real = padded(rows)
            ids = torch.nn.functional.pad(ids, (before, after), value=pad)
            real = torch.nn.functional.pad(real, (before, after), value=False)
            assert_close(label_logits(model, ids, real), wanted)


@given(configs(), st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_neighbours_in_a_row_change_nothing(cfg: ModelConfig, lengths: list[int]) -> None:
    """The batches that a run learns from give each text the logits it has alone."""
    if isinstance(cfg.rope_scaling, DynamicScaling):
        lengths = [min(n, cfg.max_seq_len) for n in lengths]
    model = with_head(cfg)
    rows = [tokens(n, seed=i).tolist() for i, n in enumerate(lengths)]
    classes = [i % 3 for i in range(len(rows))]
    batch = side_by_side([to_example(*pair) for pair in zip(rows, classes, strict=True)])
    assert batch.count == len(rows)
    assert batch.ids.shape[1] == max(lengths)
    logits, found = batch_logits(model, batch)
    alone = torch.cat([label_logits(model, *padded([row])) for row in rows])
    got = sorted(zip(found.tolist(), logits.tolist(), strict=True))
    assert_close(
        torch.tensor([row for _, row in got]),
        torch.tensor([row for _, row in sorted(zip(classes, alone.tolist(), strict=True))]),
        rtol=1e-5,  # batch_logits are fp32
        atol=1e-5,
    )
    assert [label for label, _ in got] == sorted(classes)
    assert (batch.targets != IGNORED).sum() == len(rows)


def test_a_row_of_padding_is_refused() -> None:
    ids, real = padded([[1, 2], [3]])
    real[1] = False
    with pytest.raises(InputError, match="padding alone"):
        label_logits(with_head(SMALL), ids, real)


SMALL = ModelConfig(
    vocab_size=300, max_seq_len=16, n_layers=1, n_heads=2, d_model=8, d_ff=12, logit_softcap=5.0
)


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe(TEXTS * 3, 290)


@pytest.fixture
def classifier(tokenizer: BPETokenizer) -> Classifier:
    return Classifier(with_head(SMALL).float(), tokenizer, LABELS, 1.5, 16)


def test_probabilities(classifier: Classifier) -> None:
    """Of texts together what each has alone; the softmax of its logits over the temperature."""
    found = classifier.probabilities(TEXTS, batch_size=3)
    for text, shares in zip(TEXTS, found, strict=True):
        assert list(shares) == LABELS
        bos = [classifier.tokenizer.bos_id or 0]
        ids = torch.tensor([bos + classifier.tokenizer.encode(text)])[:, :16]
        logits = classifier.model.hidden(ids)[0, -1] @ classifier.model.lm_head.weight.T
        assert_close(torch.tensor([*shares.values()]), (logits / 1.5).softmax(-1))
    with pytest.raises(InputError, match="the text is empty"):
        classifier.probabilities(["fine", ""])


def test_a_long_text_is_cut_at_its_end(tokenizer: BPETokenizer) -> None:
    long = "see you at home and call now"
    ids, cut = text_ids(tokenizer, long, 5)
    assert cut
    assert ids == [tokenizer.bos_id, *tokenizer.encode(long)][:5]
    assert text_ids(tokenizer, "a", 5) == ([tokenizer.bos_id, *tokenizer.encode("a")], False)


def test_saved_and_loaded_it_is_the_same(classifier: Classifier, tmp_path: Path) -> None:
    classifier.save(tmp_path / "it")
    back = load_classifier(tmp_path / "it")
    assert back.probabilities(TEXTS) == classifier.probabilities(TEXTS)
    assert (back.labels, back.temperature, back.seq_len) == (LABELS, 1.5, 16)
    assert not back.model.training
    (tmp_path / "run").mkdir()
    shutil.move(tmp_path / "it", tmp_path / "run" / "model")
    assert load_classifier(tmp_path / "run").probabilities(TEXTS) == back.probabilities(TEXTS)
    with pytest.raises(FileError, match="not empty"):
        classifier.save(tmp_path / "run" / "model")


def test_it_is_no_language_model(classifier: Classifier, tmp_path: Path) -> None:
    """Not even where someone took away the file that says so: the head does not fit."""
    classifier.save(tmp_path / "it")
    for use in (g.load, load_classifier):
        use_it: Any = use
        if use is g.load:
            with pytest.raises(WeightsError, match="is a classifier and no language model"):
                use_it(tmp_path / "it")
        (tmp_path / "it" / "classifier.json").unlink(missing_ok=True)
    with pytest.raises(WeightsError, match=r"lm_head\.weight has the shape \(3, 8\)"):
        g.load(tmp_path / "it")
    with pytest.raises(FileError, match="is no classifier"):
        load_classifier(tmp_path / "it")
    g.save(make(SMALL), None, tmp_path / "model")
    with pytest.raises(FileError, match="is no classifier"):
        load_classifier(tmp_path / "model")


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": None},
        {"labels": ["ham", "spam"]},
        {"labels": ["ham", "ham", "spam"]},
        {"labels": ["ham", "spam", 3]},
        {"pooling": "mean"},
        {"temperature": 0},
        {"temperature": None},
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"temperature": True},
        {"seq_len": 0},
        {"seq_len": 17},
        {"seq_len": "16"},
    ],
    ids=str,
)
def test_a_classifier_json_that_is_wrong(
    classifier: Classifier, changes: dict[str, Any], tmp_path: Path
) -> None:
    classifier.save(tmp_path / "it")
    path = tmp_path / "it" / "classifier.json"
    about = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(WeightsError, match=f"{next(iter(changes))}|lm_head"):
        load_classifier(tmp_path / "it")


def test_files_that_do_not_belong_together(classifier: Classifier, tmp_path: Path) -> None:
    classifier.save(tmp_path / "it")
    train_bpe(["another text altogether"] * 2, 280).save(tmp_path / "it")
    with pytest.raises(TokenizerError, match="its tokenizer is not the one"):
        load_classifier(tmp_path / "it")
    path = tmp_path / "it" / "model.safetensors"
    whole = load_file(path)
    for name in ("lm_head.weight", "layers.0.mlp.up_proj.weight"):
        save_file({k: v for k, v in whole.items() if k != name}, path)
        with pytest.raises(WeightsError, match=name):
            load_classifier(tmp_path / "it")
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(Gpt2LlamaError):
        load_classifier(tmp_path / "it")
