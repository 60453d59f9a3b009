"""Speculative decoding says what the model alone would: greedy to the token, sampled in law."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import sharp
import torch
from byte_model import ByteTokenizer, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import gpt2llama as g
from gpt2llama.errors import InputError
from gpt2llama.generate import SamplingConfig, complete, decode
from gpt2llama.generate.generation import Generation
from gpt2llama.generate.speculative import PromptLookup, distribution, leftover, verify

BYTES = ByteTokenizer()
few = settings(max_examples=25, deadline=None)
MODEL = random_model(vocab_size=12, max_seq_len=48)
NEAR = random_model(vocab_size=12, max_seq_len=48)  # a draft that is often right
with torch.no_grad():
    for p in NEAR.parameters():
        p += 0.15 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
prompts = st.lists(st.integers(0, 11), min_size=1, max_size=30)
drafters = st.sampled_from(["lookup", MODEL, NEAR, random_model(seed=3, vocab_size=12)])


@few
@given(
    prompts, drafters, st.integers(1, 48), st.integers(1, 7), st.sampled_from([(), (3,), (5, 7)])
)
def test_greedy_text_is_the_models_own(
    prompt: list[int], drafter: Any, new: int, guesses: int, stop_ids: tuple[int, ...]
) -> None:
    """Ends by length, by a stop id and by the context, wherever in a run of guesses."""
    how: dict[str, Any] = {
        "max_new_tokens": new,
        "stop_ids": stop_ids,
        "sampling": SamplingConfig(),
    }
    alone, guessed = Generation(prompt), Generation(prompt)
    for _ in decode(MODEL, [alone], **how):
        pass
    steps = decode(MODEL, [guessed], speculate=drafter, draft_tokens=guesses, **how)
    seen = [len(guessed.ids) for _ in steps]
    assert guessed.ids == alone.ids
    assert guessed.finish_reason == alone.finish_reason
    assert seen[: len(alone.ids)] == [*range(1, len(alone.ids) + 1)]  # yielded one by one
    torch.testing.assert_close(guessed.logprobs, alone.logprobs, rtol=1e-4, atol=1e-5)
    assert 0 <= guessed.accepted <= guessed.proposed


@settings(max_examples=15, deadline=None)
@given(sharp.configs(), st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 6))
def test_greedy_for_every_switch(cfg: g.ModelConfig, prompt: list[int], guesses: int) -> None:
    """A window that drops keys while others are rejected; tied heads, which repeat themselves."""
    model, near = sharp.make(cfg), sharp.make(cfg)
    rng = torch.Generator().manual_seed(1)
    for p in near.parameters():
        p += 0.1 * torch.randn(p.shape, generator=rng, dtype=p.dtype)
    alone = g.generate_ids(model, [prompt], max_new_tokens=9)
    for drafter in ("lookup", near):
        how: dict[str, Any] = {"speculate": drafter, "draft_tokens": guesses}
        assert g.generate_ids(model, [prompt], max_new_tokens=9, **how) == alone


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_stop_strings_and_penalties(drafter: str) -> None:
    """A stop within a run of right guesses: nothing of what follows it is shown."""
    model = random_model(max_seq_len=60)
    whole = g.generate(model, BYTES, "hello", max_new_tokens=40, stop_ids=())
    settings: list[dict[str, Any]] = [{"repetition_penalty": 1.7}]
    settings += [{"stop": whole[at : at + size]} for at in range(20) for size in (1, 3)]
    for how in settings:
        how |= {"max_new_tokens": 40, "stop_ids": ()}
        (alone,), steps = complete(model, BYTES, "hello", **how)
        list(steps)
        speculate: Any = model if drafter == "itself" else drafter
        (guessed,), steps = complete(model, BYTES, "hello", speculate=speculate, **how)
        list(steps)
        assert (guessed.text, guessed.ids) == (alone.text, alone.ids)
        assert guessed.finish_reason == alone.finish_reason


def test_a_draft_model_with_a_shorter_context() -> None:
    """Where it cannot follow, the model goes on alone; and a draft's cache that has to grow."""
    short = random_model(vocab_size=12, max_seq_len=10)
    alone = g.generate_ids(MODEL, [[1, 2, 3]], max_new_tokens=30)
    assert g.generate_ids(MODEL, [[1, 2, 3]], max_new_tokens=30, speculate=short) == alone
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 8, "d_ff": 8}
    long = random_model(vocab_size=12, max_seq_len=2100, tie_embeddings=True, **sizes)
    (row,), new = [Generation([1] * 505)], 530
    how: dict[str, Any] = {"max_new_tokens": new, "stop_ids": (), "sampling": SamplingConfig()}
    for _ in decode(long, [row], speculate=long, draft_tokens=60, **how):
        pass
    assert row.accepted == row.proposed
    assert [row.ids] == g.generate_ids(long, [[1] * 505], max_new_tokens=new)


def test_a_model_that_guesses_itself_is_always_right() -> None:
    row = Generation([1, 2, 3])
    how: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": (), "sampling": SamplingConfig()}
    for _ in decode(MODEL, [row], speculate=MODEL, draft_tokens=3, **how):
        pass
    assert row.accepted == row.proposed > 0
    assert row.passes == 1 + 5  # one token of the prompt's pass, then four each, the last three


@few
@given(st.integers(0, 10**6), st.booleans())
def test_the_rule_gives_exactly_p(seed: int, certain: bool) -> None:
    """Over all guesses and both outcomes, by enumeration."""
    rng = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(6, generator=rng, dtype=torch.double) ** 3 for _ in range(2))
    p[torch.randint(6, (2,), generator=rng)] = 0  # filtered out
    p, q = p / p.sum(), q / q.sum()
    if certain:
        q = torch.zeros(6, dtype=torch.double)
        q[seed % 6] = 1
    total = torch.zeros(6, dtype=torch.double)
    for guess in range(6):
        if q[guess] == 0:
            continue
        accepted = min(1.0, float(p[guess] / q[guess]))
        left = leftover(p, guess, None if certain else q)
        total[guess] += q[guess] * accepted
        total += q[guess] * (1 - accepted) * left / left.sum()
    torch.testing.assert_close(total, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("drafter", ["lookup", NEAR], ids=["lookup", "draft"])
def test_samples_follow_the_models_distribution(drafter: Any) -> None:
    """Pairs of tokens, all filters on, against the exact probabilities of every pair."""
    how: dict[str, Any] = {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02}
    how |= {"repetition_penalty": 1.2}
    prompt, sampling = [4, 1, 4, 1, 4], SamplingConfig(**how)

    @torch.inference_mode()
    def next_token(ids: list[int]) -> torch.Tensor:
        return distribution(MODEL(torch.tensor([ids]))[:, -1].float(), sampling, ids)[0]

    exact = {
        (a, b): float(pa * pb)
        for a, pa in enumerate(next_token(prompt))
        if pa > 0
        for b, pb in enumerate(next_token([*prompt, a]))
        if pb > 0
    }
    many = 600
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(many):
        (ids,) = g.generate_ids(
            MODEL, [prompt], max_new_tokens=2, speculate=drafter, draft_tokens=2, seed=seed, **how
        )
        found[tuple(ids)] += 1
    assert found.keys() <= exact.keys()
    common = [pair for pair, p in exact.items() if many * p >= 5]
    counts = [found[pair] for pair in common]
    rest = many - sum(counts)
    expected = [many * exact[pair] for pair in common]
    assert chisquare([*counts, rest], [*expected, many - sum(expected)]).pvalue > 1e-3


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_verified_texts_follow_the_model(certain: bool) -> None:
    """Three tokens of a little Markov chain, guessed by another one: each text as often as the
    chain says it, wherever guesses were rejected."""
    rng, many, size = torch.Generator().manual_seed(5), 4_000, 3
    chain, guesser = torch.rand(2, size, size, generator=rng, dtype=torch.double)
    chain, guesser = (t / t.sum(-1, keepdim=True) for t in (chain, guesser))
    likeliest = guesser.argmax(-1)
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(many):
        text = [0]
        while len(text) < 4:
            guesses: list[int] = []
            for _ in range(3 - len(text)):
                last = [*text, *guesses][-1]
                q = guesser[last]
                guesses.append(
                    int(likeliest[last]) if certain else int(q.multinomial(1, generator=rng))
                )
            rows = [*text[-1:], *guesses]
            given = None if certain else guesser[rows[:-1]]
            text += verify(chain[rows], guesses, given, rng)
        found[tuple(text[1:])] += 1
    exact = {
        (a, b, c): float(chain[0, a] * chain[a, b] * chain[b, c])
        for a, b, c in itertools.product(range(size), repeat=3)
    }
    expected = [many * p for p in exact.values()]
    assert min(expected) > 5
    assert chisquare([found[text] for text in exact], expected).pvalue > 1e-3


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_ids_beyond_the_tokenizers(drafter: str, penalty: float) -> None:
    """A prompt may hold ids of the table's padding: the text is what it is without guesses, none
    of which is such an id; ids beyond the table are refused."""
    model = random_model(vocab_size=270, max_seq_len=1024)
    speculate: Any = random_model(1, 270, max_seq_len=1024) if drafter == "model" else drafter

    def text(prompt: list[int], **how: Any) -> list[int]:
        row, sampling = Generation(prompt), SamplingConfig(repetition_penalty=penalty)
        settings: Any = {"max_new_tokens": 12, "stop_ids": (), "sampling": sampling}
        for _ in decode(model, [row], vocab_size=258, **settings, **how):
            pass
        return row.ids

    # Whatever the model says after the 2, what followed both before cannot be said.
    prompt = [id for said in range(258) for id in (2, said, 265)] + [2]
    assert text(prompt, speculate=speculate) == text(prompt)
    with pytest.raises(InputError, match="ids outside the model's vocabulary of 270"):
        text([1, 270], speculate=speculate)


def test_lookup_goes_on_as_the_text_did() -> None:
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 9, 1, 2], 2) == ([3, 9], None)
    assert lookup.propose([1, 2, 3, 9, 1, 2, 5, 8], 3) == ([], None)
    assert PromptLookup().propose([8, 5, 3, 9, 5], 3) == ([], None)  # 5 alone is too little
    assert lookup.propose([1, 2, 3, 9, 1, 2, 5, 8, 1, 2], 9) == (
        [5, 8, 1, 2],
        None,
    )  # the last time


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculate": "magic"}, "'lookup' or a draft model"),
        ({"speculate": random_model(vocab_size=13)}, "vocabulary of 13"),
        ({"speculate": "lookup", "draft_tokens": 0}, "at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        g.generate_ids(MODEL, [[1]], **settings)


def test_several_rows_are_refused() -> None:
    with pytest.raises(InputError, match="one text"):
        complete(random_model(), BYTES, "hi", num_samples=2, speculate="lookup")
