from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt2llama.data.batches import IGNORED, Batch
from gpt2llama.errors import DataError, TokenizerError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import Tokenizer, load_tokenizer
from gpt2llama.train.metrics import TextScore, evaluate, evaluate_text

TEXT = "却说曹操大喜，引军而走。the model reads 😀 one byte at a time.\r\n" * 3


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data / "tokenizer")


def make_model(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = {"max_seq_len": 12, "n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 16}
    model = Transformer(ModelConfig(vocab_size=300, **sizes | switches))
    torch.nn.init.normal_(model.embed_tokens.weight)
    return model


def test_a_uniform_model_needs_log2_v_bits_a_token(tokenizer: Tokenizer) -> None:
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    score, tokens = evaluate_text(model, tokenizer, TEXT), len(tokenizer.encode(TEXT))
    assert (score.tokens, score.bytes) == (tokens, len(TEXT.encode()))
    assert score.bits_per_byte == pytest.approx(math.log2(300) * tokens / score.bytes, rel=1e-6)
    assert score.perplexity == pytest.approx(300, rel=1e-5)


@pytest.mark.parametrize("starts", [True, False])
def test_every_token_once(tokenizer: Tokenizer, starts: bool) -> None:
    """Against windows written out here; without a BOS the first token is not scored."""
    model, ids, nats, count = make_model(), tokenizer.encode(TEXT), 0.0, 0
    first = 0 if starts else 1
    for at in range(first, len(ids), 12):
        window = [*ids[at - 1 : at], *ids[at : at + 12]]
        if at == 0:
            window = [int(tokenizer.bos_id or 0), *ids[:12]]
        with torch.no_grad():
            logits = model(torch.tensor([window[:-1]]))[0].log_softmax(-1)
        nats -= logits.gather(1, torch.tensor(window[1:])[:, None]).sum().item()
        count += len(window) - 1
    bos = tokenizer.bos_id if starts else None
    used: Any = SimpleNamespace(encode=tokenizer.encode, bos_id=bos)
    score = evaluate_text(model, used, TEXT)
    assert score.tokens == count == len(ids) - first
    assert score.nats == pytest.approx(nats, rel=1e-5)
    for batch_size in (1, 2, 3, 100):
        other = evaluate_text(model, used, TEXT, batch_size)
        assert (other.tokens, other.bytes) == (score.tokens, score.bytes)
        assert other.bits_per_byte == pytest.approx(score.bits_per_byte, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 5, 11])
def test_a_sliding_window_gives_each_token_its_context(tokenizer: Tokenizer, stride: int) -> None:
    """Against each token predicted by itself from what its window holds before it."""
    model, ids, nats = make_model(), tokenizer.encode(TEXT), 0.0
    stream = [int(tokenizer.bos_id or 0), *ids]
    for at in range(len(ids)):
        window = 0 if at < 12 else 1 + (at - 12) // stride
        with torch.no_grad():
            logits = model(torch.tensor([stream[window * stride : at + 1]]))[0, -1]
        nats -= logits.log_softmax(-1)[ids[at]].item()
    score = evaluate_text(model, tokenizer, TEXT, stride=stride)
    assert score.tokens == len(ids)
    assert score.nats == pytest.approx(nats, rel=1e-5)


def test_the_head_in_parts_gives_the_same(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(logit_softcap=5.0)
    whole = evaluate_text(model, tokenizer, TEXT)
    monkeypatch.setattr("gpt2llama.train.metrics._AT_ONCE", 7 * 300)
    assert evaluate_text(model, tokenizer, TEXT).nats == pytest.approx(whole.nats, rel=1e-6)


def test_batches_are_watched(tokenizer: Tokenizer) -> None:
    seen: list[int] = []
    watched: list[int] = []

    def watch(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
        seen.append(count)
        for batch in batches:
            watched.append(len(batch.ids))
            yield batch

    evaluate_text(make_model(), tokenizer, TEXT, batch_size=2, stride=4, watch=watch)
    assert seen == [len(watched)]


def test_dropout_is_off(tokenizer: Tokenizer) -> None:
    model = make_model(dropout=0.5).train()
    first, second = (evaluate_text(model, tokenizer, TEXT) for _ in range(2))
    assert first == second
    assert model.training
    assert evaluate_text(model.eval(), tokenizer, TEXT) == first
    assert not model.training


def test_masked_targets_do_not_count() -> None:
    model, ids = make_model(), torch.arange(12)[None]
    nats, tokens = evaluate(model, [Batch(ids, ids)])
    with torch.no_grad():
        each = -model(ids)[0].log_softmax(-1).diagonal()
    assert nats == pytest.approx(each.sum().item(), rel=1e-5)
    assert tokens == 12
    some = ids.masked_fill(ids % 3 == 0, IGNORED)
    nats, tokens = evaluate(model, [Batch(ids, some), Batch(ids, some)])
    assert nats == pytest.approx(2 * each[ids[0] % 3 > 0].sum().item(), rel=1e-5)
    assert tokens == 16


def test_units() -> None:
    score = TextScore(nats=math.log(2) * 24, tokens=6, bytes=12)
    assert score.bits_per_byte == pytest.approx(2)
    assert score.nats_per_token == pytest.approx(4 * math.log(2))
    assert score.perplexity == pytest.approx(16)


def test_refusals(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no token to score"):
        evaluate_text(make_model(), tokenizer, "")
    small = Transformer(make_model().config.replace(vocab_size=200))
    with pytest.raises(TokenizerError, match="vocab_size is 200"):
        evaluate_text(small, tokenizer, TEXT)
