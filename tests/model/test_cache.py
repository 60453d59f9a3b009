"""The cache gives the one-shot logits: for any split, rows of any length, any switch setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharp import CONTEXT, SIZES, configs, make, reference, tokens
from torch import Tensor
from torch.testing import assert_close

from gpt2llama.errors import InputError
from gpt2llama.model.config import DynamicScaling, ModelConfig
from gpt2llama.model.kv_cache import KVCache
from gpt2llama.model.position import rope_frequencies

few = settings(max_examples=25, deadline=None)
splits = st.lists(st.integers(1, 5), min_size=1, max_size=CONTEXT)


def config(**switches: Any) -> ModelConfig:
    return ModelConfig(**SIZES | switches)


def new_cache(cfg: ModelConfig, rows: int, max_len: int = CONTEXT) -> KVCache:
    return KVCache(cfg, batch_size=rows, max_len=max_len, dtype=torch.float64)


def pad(rows: list[list[int]], width: int, left: bool) -> tuple[Tensor, Tensor]:
    """ids (B, width), with 7 for padding, and the mask of what is real."""
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    ids = torch.full((len(rows), width), 7)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, at], real[i, at] = torch.tensor(row, dtype=torch.long), True
    return ids, real


def cut(ids: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """ids (B, T) in pieces of these sizes, as far as they go, and the rest."""
    for size in [*sizes, ids.shape[1]]:
        piece, ids = ids[:, :size], ids[:, size:]
        if piece.numel():
            yield piece


@few
@given(configs(), splits)
def test_any_split_is_the_one_shot_answer(cfg: ModelConfig, sizes: list[int]) -> None:
    model, ids = make(cfg), tokens(2, CONTEXT)
    cache = new_cache(cfg, 2)
    logits = torch.cat([model(piece, cache=cache) for piece in cut(ids, sizes)], dim=1)
    assert_close(logits, model(ids))
    assert cache.length.tolist() == [CONTEXT, CONTEXT]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6), splits, st.booleans())
def test_window_equals_a_brute_force_mask(window: int, sizes: list[int], padded: bool) -> None:
    """Far past the window and the config's context, as a whole and beside a shorter row."""
    cfg = config(sliding_window=window, n_kv_heads=2)
    model, ids = make(cfg), tokens(2, 30)
    cache, logits = new_cache(cfg, 2, 30), []
    if padded:  # the other row begins with 3 tokens of padding
        real = torch.ones(2, 5).bool()
        real[1, :3] = False
        logits.append(model(ids[:, :5], cache=cache, attention_mask=real))
    rest = ids[:, 5:] if padded else ids
    logits += [model(piece, cache=cache) for piece in cut(rest, sizes)]
    for row, start in ((0, 0), (1, 3 if padded else 0)):
        expected = reference(model, ids[row, start:].tolist(), *rope_frequencies(cfg))
        assert_close(torch.cat(logits, 1)[row, start:], expected)


@few
@given(configs(), st.integers(0, CONTEXT), st.integers(1, 4))
def test_truncated_is_as_if_it_had_never_been_longer(cfg: ModelConfig, n: int, step: int) -> None:
    model, ids, others = make(cfg), tokens(2, CONTEXT), tokens(2, CONTEXT, seed=9)
    cache = new_cache(cfg, 2)
    model(torch.cat([ids[:, :n], others[:, n:]], 1), cache=cache)
    cache.truncate(n)
    assert cache.length.tolist() == [n, n]
    text = ids[:, : n + step]
    if n < text.shape[1]:
        assert_close(model(text[:, n:], cache=cache), model(text)[:, n:])


@few
@given(
    configs(),
    st.lists(st.integers(0, 5), min_size=2, max_size=4),
    st.booleans(),
    st.integers(0, 5),
    st.data(),
)
def test_unequal_rows_are_what_each_is_alone(
    cfg: ModelConfig, lengths: list[int], left: bool, keep: int, data: st.DataObject
) -> None:
    """Padded prefill, decode, truncate, a second padded chunk, other rows, decode again."""
    model, cache = make(cfg), new_cache(cfg, len(lengths))
    texts: list[list[int]] = [[] for _ in lengths]

    def push(chunks: list[list[int]], left: bool | None) -> None:
        width = max(1, *map(len, chunks))
        ids, real = pad(chunks, width, bool(left))
        logits = model(ids, cache=cache, attention_mask=None if left is None else real)
        assert logits.isfinite().all()
        for i, chunk in enumerate(chunks):
            texts[i] += chunk
            if chunk:
                alone = model(torch.tensor([texts[i]]))[0, -len(chunk) :]
                assert_close(logits[i, real[i]], alone)
        assert cache.length.tolist() == [len(text) for text in texts]

    def chunks(sizes: list[int], seed: int) -> list[list[int]]:
        return [tokens(n, seed=seed + i).tolist() for i, n in enumerate(sizes)]

    push(chunks(lengths, 0), left)
    push(chunks([1] * len(lengths), 10), None)
    cache.truncate(keep)
    texts = [text[:keep] for text in texts]
    push(chunks([data.draw(st.integers(0, 3)) for _ in lengths], 20), not left)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=4))
    cache.select(rows)
    texts = [list(texts[row]) for row in rows]
    push(chunks([2] * len(rows), 30), None)


def test_a_row_of_padding_is_finite_and_leaves_its_row_alone() -> None:
    cfg = config(sliding_window=2)
    model, cache, ids = make(cfg), new_cache(cfg, 2), tokens(2, 3)
    real = torch.tensor([[False] * 3, [True] * 3])
    for _ in range(2):
        logits = model(ids, cache=cache, attention_mask=real)
        assert logits.isfinite().all()
    assert cache.length.tolist() == [0, 6]
    assert_close(logits[1], model(ids[1:].repeat(1, 2))[0, 3:])
    assert_close(model(ids, cache=cache)[0], model(ids[:1])[0])


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_explicit_positions_with_a_cache(position: str) -> None:
    """Two chunks with a hole between them, each row its own."""
    cfg = config(position=position)
    model, cache, ids = make(cfg), new_cache(cfg, 2), tokens(2, 5)
    at = torch.tensor([[0, 1, 2, 6, 7], [1, 2, 4, 5, 9]])
    parts = [model(ids[:, s], cache=cache, positions=at[:, s]) for s in (slice(0, 3), slice(3, 5))]
    assert_close(torch.cat(parts, 1), model(ids, positions=at))
    assert not torch.allclose(parts[1], model(ids)[:, 3:], atol=1e-2)


def test_keys_are_kept_once_for_each_kv_head() -> None:
    cache = KVCache(config(n_kv_heads=2, head_dim=6), 3, 9)
    assert cache.keys[0].shape[:2] == (3, 2)
    assert cache.keys.nelement() <= 2 * 3 * 2 * (9 + 1) * 6


def test_a_cache_in_16_bits() -> None:
    cfg = config(n_kv_heads=2)
    model, ids = make(cfg, dtype=torch.float32), tokens(2, 8)
    cache = KVCache(cfg, 2, CONTEXT, dtype=torch.bfloat16)
    logits = torch.cat([model(ids[:, :5], cache=cache), model(ids[:, 5:], cache=cache)], 1)
    assert logits.dtype == torch.float32
    off = (logits.softmax(-1) - model(ids).softmax(-1)).abs().max()
    assert 0 < off < 0.1  # bf16 has 8 bits, and these toys are sharp


def test_asking_for_attention_over_a_cache() -> None:
    cfg = config(sliding_window=4)
    model, ids = make(cfg), tokens(1, 9)
    _, whole = model(ids, return_attention=True)
    cache = new_cache(cfg, 1)
    model(ids[:, :6], cache=cache)
    _, rest = model(ids[:, 6:], cache=cache, return_attention=True)
    assert_close(rest, [w[:, :, 6:] for w in whole])


def test_an_interrupted_pass_leaves_the_cache_as_it_was() -> None:
    model, ids = make(config()), tokens(2, 8)
    cache = new_cache(model.config, 2)
    model(ids[:, :4], cache=cache)
    hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, :3], cache=cache)
    hook.remove()
    assert cache.length.tolist() == [4, 4]
    assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:])


@pytest.mark.parametrize("padded", [False, True])
def test_the_ends_of_the_cache_and_of_a_learned_table(padded: bool) -> None:
    model = make(config(position="learned"))
    small, table = new_cache(model.config, 2, 5), new_cache(model.config, 2, 99)
    real = torch.tensor([[not padded, True], [True, True]])
    for cache, end in ((small, 5), (table, CONTEXT)):
        model(tokens(2, 2), cache=cache, attention_mask=real)
        model(tokens(2, end - 2), cache=cache)
    before = table.length.tolist()
    with pytest.raises(InputError, match=r"holds 5 tokens.* 6 are needed"):
        model(tokens(2, 1), cache=small)
    with pytest.raises(InputError, match=f"{CONTEXT + 1} positions are needed"):
        model(tokens(2, 1), cache=table)
    assert table.length.tolist() == before == [CONTEXT - padded, CONTEXT]
    if padded:  # the shorter row has room for one more, where the full one has padding
        alone = model(tokens(2, 1), cache=table, attention_mask=torch.tensor([[True], [False]]))
        assert alone.isfinite().all()


def test_dynamic_ntk_past_the_context_is_refused() -> None:
    cfg = config(rope_scaling=DynamicScaling(2.0))
    new_cache(cfg, 1, CONTEXT)
    with pytest.raises(InputError, match=f"max_len {CONTEXT + 1} .* dynamic"):
        new_cache(cfg, 1, CONTEXT + 1)


def test_truncate_refuses_a_negative_length() -> None:
    with pytest.raises(InputError, match=r"truncate\(-1\)"):
        new_cache(config(), 1).truncate(-1)
