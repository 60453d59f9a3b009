"""Prompts that begin alike: the same text as without the cache, and only what is new is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from byte_model import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt2llama as g
from gpt2llama.errors import InputError
from gpt2llama.generate import SamplingConfig, decode, engine
from gpt2llama.generate.generation import Generation
from gpt2llama.generate.prefix import PrefixCache

SWITCHES = [{}, {"sliding_window": 5}, {"position": "learned"}]
MODELS = [random_model(vocab_size=6, max_seq_len=40, **how) for how in SWITCHES]
prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=2, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(MODELS), prompts, st.sampled_from([None, "lookup"]), st.integers(1, 12))
def test_the_same_text_as_without(
    model: Any, texts: list[list[int]], speculate: str | None, new: int
) -> None:
    """Few ids, so that prompts share beginnings; caches that must grow; some thrown out."""
    prefix = PrefixCache(model, max_bytes=20_000)
    for text in texts:
        alone = g.generate_ids(model, [text], max_new_tokens=new)
        got = g.generate_ids(model, [text], max_new_tokens=new, prefix=prefix, speculate=speculate)
        assert got == alone
        assert prefix.nbytes <= 20_000


def test_only_what_is_new_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = MODELS[0], []
    through = engine.NativeDecoder.step

    def counted(self: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(ids.shape[1])
        return through(self, ids, *rest)

    monkeypatch.setattr(engine.NativeDecoder, "step", counted)
    prefix = PrefixCache(model)
    g.generate_ids(model, [[1, 2, 3, 4, 5]], max_new_tokens=1, prefix=prefix)
    if not passes:
        pytest.skip("no C compiler")
    g.generate_ids(model, [[1, 2, 3, 4, 5]], max_new_tokens=1, prefix=prefix)
    g.generate_ids(model, [[1, 2, 3, 0, 0, 0]], max_new_tokens=1, prefix=prefix)
    assert passes == [5, 1, 3]


def test_int8_and_an_interrupted_text() -> None:
    model = MODELS[0]
    prefix = PrefixCache(model, kv_dtype="int8")
    text = [1, 2, 3, 1, 2]
    alone = g.generate_ids(model, [text], max_new_tokens=9, kv_dtype="int8")
    rows = [Generation(text)]
    steps = decode(
        model, rows, max_new_tokens=9, stop_ids=(), sampling=SamplingConfig(), prefix=prefix
    )
    next(steps)
    steps.close()  # as when the reader of a stream goes away
    assert g.generate_ids(model, [text], max_new_tokens=9, prefix=prefix) == alone


def test_what_it_is_not_for() -> None:
    with pytest.raises(InputError, match="another model"):
        g.generate_ids(MODELS[1], [[1]], prefix=PrefixCache(MODELS[0]))
    with pytest.raises(InputError, match="one text"):
        g.generate_ids(MODELS[0], [[1], [2]], prefix=PrefixCache(MODELS[0]))
    with pytest.raises(InputError, match="kv_dtype"):
        g.generate_ids(MODELS[0], [[1]], kv_dtype="fp8")
