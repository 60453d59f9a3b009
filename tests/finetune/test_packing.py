"""Rows of examples: none is lost, none sees another."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from sharp import make
from torch.testing import assert_close

from gpt2llama.data.batches import IGNORED
from gpt2llama.errors import InputError
from gpt2llama.finetune.examples import Example
from gpt2llama.finetune.packing import PackedExamples, in_order, mixed, pack, to_batch
from gpt2llama.model.config import ModelConfig
from gpt2llama.train.step import summed_loss

CFG = ModelConfig(
    vocab_size=50, max_seq_len=32, n_layers=2, n_heads=2, n_kv_heads=1, d_model=16, d_ff=24
)


def examples(count: int, longest: int = 32, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        n = rng.randint(3, longest)
        asked = rng.randint(1, n - 1)
        ids = [rng.randrange(50) for _ in range(n)]
        made.append(Example(ids, [False] * asked + [True] * (n - asked)))
    return made


def test_every_example_once_in_rows_that_are_nearly_full() -> None:
    given = examples(400, longest=20)
    rows = pack(given, 32)
    assert sorted(e.ids for row in rows for e in row) == sorted(e.ids for e in given)
    sizes = [sum(len(e.ids) - 1 for e in row) for row in rows]
    assert max(sizes) <= 32
    assert sum(sizes) > 0.95 * 32 * len(rows)


def test_neighbours_of_one_length_go_to_different_rows() -> None:
    """As files are often written: all about one thing, then all about the next."""
    topics = [[topic] * 8 for topic in range(40) for _ in range(25)]
    rows = pack([Example(ids, [False] + [True] * 7) for ids in topics], 43)  # six a row
    assert sum(len({e.ids[0] for e in row}) for row in rows) > 5 * len(rows)


def test_one_that_fits_no_row_is_refused() -> None:
    with pytest.raises(InputError, match="takes 40 places and a row has 32"):
        pack([*examples(3), Example([1] * 41, [True] * 41)], 32)


def test_the_loss_is_that_of_each_alone() -> None:
    """With and without neighbours, in fp64; and of the learned tokens only."""
    model, given = make(CFG, dtype=torch.float64).requires_grad_(True), examples(12, longest=20)
    batch = to_batch(pack(given, 32), 32)
    alone = torch.zeros((), dtype=torch.float64)
    for example in given:
        logits = model(torch.tensor([example.ids[:-1]]))[0]
        nats = F.cross_entropy(logits, torch.tensor(example.ids[1:]), reduction="none")
        alone += nats[torch.tensor(example.learned[1:])].sum()
    alone.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    parts = batch.ids, batch.targets, batch.documents, batch.positions
    for learned in (None, batch.learned):  # logits of all, and of those that are learned
        model.zero_grad()
        found = summed_loss(model, *parts, learned)
        found.backward()
        assert_close(found, alone.float(), check_dtype=False)
        for name, p in model.named_parameters():
            assert_close(p.grad, want[name], rtol=1e-5, atol=1e-6)  # the loss is summed in fp32
    assert batch.count == sum(sum(e.learned[1:]) for e in given)


def test_no_gradient_at_a_prompt() -> None:
    """Of the loss to the logits: exactly zero wherever no answer's token is the target."""
    model, batch = make(CFG), to_batch(pack(examples(6), 32), 32)
    logits = model(batch.ids, attention_mask=batch.documents, positions=batch.positions)
    logits = logits.detach().requires_grad_(True)
    F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    ).backward()
    assert logits.grad is not None
    taught = logits.grad.abs().sum(-1) > 0
    assert torch.equal(taught, batch.targets != IGNORED)


def test_batches_depend_on_their_index_alone() -> None:
    rows = pack(examples(60), 32)
    source = PackedExamples(rows, 4, 32, seed=1)
    first = [source.batch(i).ids for i in range(20)]
    again = PackedExamples(rows, 4, 32, seed=1)
    for i in (17, 3, 11):
        assert torch.equal(again.batch(i).ids, first[i])
    # An epoch has every row once; the next one another order.
    per_epoch = len(rows)
    stream = torch.cat(first)
    epochs = [sorted(map(tuple, stream[e * per_epoch :][:per_epoch].tolist())) for e in (0, 1)]
    assert epochs[0] == epochs[1]
    assert not torch.equal(stream[:per_epoch], stream[per_epoch : 2 * per_epoch])


def test_held_out_rows_come_once_in_order() -> None:
    rows = pack(examples(30), 32)
    found = torch.cat([batch.ids for batch in in_order(rows, 7, 32)])
    assert torch.equal(found, to_batch(rows, 32).ids)


def test_mixtures_by_weight() -> None:
    one, other = examples(40, seed=1), examples(30, seed=2)
    chosen = mixed([one, other], [2.5, 0.4], seed=0)
    counts = [sum(e is x for x in chosen) for e in one]
    assert sum(counts) == 100
    assert set(counts) == {2, 3}
    assert sum(any(e is x for x in chosen) for e in other) == 12
