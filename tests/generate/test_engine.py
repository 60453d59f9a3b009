"""Where a model is run: any cut of a text gives the logits of one pass, and so does any batch."""

from __future__ import annotations

from typing import Any

import pytest
import sharp
import torch
from byte_model import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt2llama as g
from gpt2llama.generate import engine
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.scheme import scheme

few = settings(max_examples=18, deadline=None)
texts = st.lists(st.integers(0, sharp.VOCAB - 1), min_size=1, max_size=sharp.CONTEXT)


@few
@given(sharp.configs(), texts, st.integers(1, 5), st.integers(1, 12))
def test_a_text_in_chunks_for_every_switch(
    cfg: g.ModelConfig, text: list[int], chunk: int, keep: int
) -> None:
    model, ids = sharp.make(cfg), torch.tensor([text])
    keep = min(keep, len(text))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(engine, "CHUNK", chunk)
        cache = engine.new_cache(model, 1, len(text))
        got = engine.run(model, ids, cache, keep=keep)
        torch.testing.assert_close(got, model(ids)[:, -keep:].float())


@few
@given(
    sharp.configs(),
    st.lists(texts.map(lambda text: text[:-1] or [0]), min_size=2, max_size=4),
    st.sampled_from([4, 9, 512]),
)
def test_rows_of_a_batch_for_every_switch(
    cfg: g.ModelConfig, prompts: list[list[int]], chunk: int
) -> None:
    """Left-padded, prefilled in chunks of which some are padding alone for some rows."""
    model = sharp.make(cfg)
    alone = [g.generate_ids(model, [prompt], max_new_tokens=5)[0] for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CHUNK", chunk)
        assert g.generate_ids(model, prompts, max_new_tokens=5) == alone


@pytest.mark.parametrize("bits", [None, "int8"])
def test_more_than_the_kernel_takes_at_once(bits: str | None) -> None:
    """Rows, and tokens whose logits are all wanted."""
    model = random_model(vocab_size=64, max_seq_len=200, d_model=32, d_ff=32, position="rope")
    if bits is not None:
        model = quantise(model, scheme(bits))
    (alone,) = g.generate_ids(model, [[1, 2, 3]], max_new_tokens=4)
    assert g.generate_ids(model, [[1, 2, 3]] * 70, max_new_tokens=4) == [alone] * 70
    ids = torch.randint(64, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = engine.new_cache(model, 1, 150, "fp32")
        got = engine.run(model, ids, cache, keep=100)
        torch.testing.assert_close(got, model(ids)[:, -100:], rtol=1e-3, atol=1e-3)


class Halting(g.Transformer):
    """Interrupted within its second pass."""

    passes = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 2:
            raise KeyboardInterrupt
        return super().logits(hidden)


def test_an_interrupted_prefill_leaves_a_cache_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = sharp.make(g.ModelConfig(**sharp.SIZES, position="rope", n_kv_heads=2)).config
    model = Halting(cfg).eval()
    model.load_state_dict(sharp.make(cfg).state_dict())
    model.double()
    ids: Any = torch.arange(10)[None]
    monkeypatch.setattr(engine, "CHUNK", 4)
    with torch.inference_mode():
        cache = engine.new_cache(model, 1, 12)
        with pytest.raises(KeyboardInterrupt):
            engine.run(model, ids, cache)
        assert cache.end in (2, 6)  # the first chunk, or what was run of the second
        got = engine.run(model, ids[:, cache.end :], cache)
        torch.testing.assert_close(got, model(ids)[:, -1:].float())
