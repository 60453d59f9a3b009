"""Documents side by side in a row: each as if it were alone."""

from __future__ import annotations

import pytest
import torch
from sharp import make, tokens
from torch.testing import assert_close

from gpt2llama.errors import InputError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.kv_cache import KVCache

CFG = ModelConfig(
    vocab_size=61, max_seq_len=24, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=48
)
LENGTHS = [[5, 9, 4], [1, 12, 5]]  # and padding up to 20


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, documents, positions = tokens(2, 20), torch.zeros(2, 20).long(), torch.zeros(2, 20).long()
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(lengths):
            documents[row, at : at + length] = number + 1
            positions[row, at : at + length] = torch.arange(length)
            at += length
    return ids, documents, positions


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"position": "learned"},
        {"position": "sinusoidal"},
        {"position": "none"},
        {"sliding_window": 3},
        {"norm_placement": "post", "n_kv_heads": None},
    ],
)
@pytest.mark.parametrize("grad", [True, False])  # attention's two ways
def test_as_if_alone(switches: dict[str, object], grad: bool) -> None:
    model = make(CFG.replace(**switches), dtype=torch.float64)
    ids, documents, positions = rows()
    with torch.set_grad_enabled(grad):
        logits = model(ids, attention_mask=documents, positions=positions)
        for row, lengths in enumerate(LENGTHS):
            at = 0
            for length in lengths:
                alone = model(ids[row : row + 1, at : at + length])
                assert_close(logits[row, at : at + length], alone[0])
                at += length
    assert logits.isfinite().all()


def test_gradients_do_not_cross() -> None:
    model = make(CFG, dtype=torch.float64)
    ids, documents, positions = rows()
    table = model.embed_tokens.weight
    table.requires_grad_(True)
    model.lm_head.weight = torch.nn.Parameter(table.detach().clone())  # untied: only the inputs
    logits = model(ids, attention_mask=documents, positions=positions)
    logits[0, 5:14].square().sum().backward()
    assert table.grad is not None
    own, others = set(ids[0, 5:14].tolist()), set(range(61))
    assert {i for i in others if table.grad[i].abs().sum() > 0} == own


def test_refused() -> None:
    model = make(CFG)
    ids, documents, positions = rows()
    with pytest.raises(InputError, match="attention_mask must be bool"):
        model(ids, attention_mask=documents)
    with pytest.raises(InputError, match="attention_mask must be bool"):
        model(ids, attention_mask=documents, positions=positions, cache=KVCache(CFG, 2, 24))
