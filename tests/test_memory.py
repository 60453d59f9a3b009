"""Weights in large pages are the same weights."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path

import pytest
import torch
from sharp import tokens

import gpt2llama as g
from gpt2llama.memory import gather, huge_pages
from gpt2llama.model.config import ModelConfig
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.scheme import SCHEMES

CFG = ModelConfig(
    vocab_size=4096, max_seq_len=32, n_layers=4, n_heads=4, n_kv_heads=2, d_model=256, d_ff=512,
    tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_the_same_numbers_and_ties(quant: str | None) -> None:
    model = g.Transformer(CFG).eval()
    if quant is not None:
        model = quantise(model, SCHEMES[quant])
    twin = copy.deepcopy(model)
    gather(model)
    state = twin.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids), twin(ids))
    if quant is None:
        assert model.lm_head.weight is model.embed_tokens.weight
        assert model.embed_tokens.weight.requires_grad
        # In their order, one behind the other, as a step reads them.
        places = [p.data_ptr() for p in model.parameters()]
        assert places == sorted(places)
        assert places[-1] - places[0] < 1.01 * sum(p.nbytes for p in model.parameters())


def test_each_tensor_is_a_storage_of_its_own(tmp_path: Path) -> None:
    """Else saving one of them would write all."""
    model = g.Transformer(CFG)
    gather(model)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    g.save(model, None, tmp_path)
    again = g.load(tmp_path)[0].state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items())


def test_a_system_that_refuses_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert huge_pages(1 << 22)[:4] == bytes(4)


def test_memory_is_zeroed_and_private() -> None:
    one, other = huge_pages(1 << 22), huge_pages(1 << 22)
    one[:4] = b"mine"
    assert other[:4] == bytes(4)
    assert one[4:8] == bytes(4)
