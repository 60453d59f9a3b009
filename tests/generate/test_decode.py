"""Ids and text out of a model: batches equal single rows, text is whole, every end has a name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from byte_model import BOS, EOS, ByteTokenizer, Script, random_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gpt2llama as g
from gpt2llama.errors import InputError, WeightsError
from gpt2llama.generate import SamplingConfig, complete, decode
from gpt2llama.generate.generation import Generation

few = settings(max_examples=15, deadline=None)
BYTES = ByteTokenizer()


def greedy_by_hand(model: g.Transformer, prompt: list[int], n: int) -> list[int]:
    """The whole text once more for each token, without a cache."""
    ids = [*prompt]
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def say(text: str | bytes, **settings: Any) -> str:
    """What is made of a model that says this after "go"."""
    ids = [*(text if isinstance(text, bytes) else text.encode()), *[ord("~")] * 20]
    return g.generate(Script(ids, 2), BYTES, "go", **{"max_new_tokens": len(ids) - 20} | settings)


# --- ids


@few
@given(
    st.integers(0, 99),
    st.lists(st.lists(st.integers(0, 257), min_size=1, max_size=23), min_size=1, max_size=4),
    st.sampled_from([{"position": "learned"}, {"sliding_window": 3}, {"n_kv_heads": 1}]),
    st.integers(1, 12),
)
def test_a_batch_is_what_each_prompt_gives_alone(
    seed: int, prompts: list[list[int]], switch: dict[str, Any], n: int
) -> None:
    """Prompts of 1 to 23 tokens in a context of 24: rows end at different steps."""
    model = random_model(seed, **switch).eval()
    alone = [greedy_by_hand(model, p, min(n, 24 - len(p))) for p in prompts]
    assert g.generate_ids(model, prompts, max_new_tokens=n) == alone
    stops = {ids[len(ids) // 2] for ids in alone}
    until = [next((i for i, t in enumerate(ids) if t in stops), len(ids)) for ids in alone]
    stopped = g.generate_ids(model, prompts, max_new_tokens=n, stop_ids=stops)
    assert stopped == [ids[:end] for ids, end in zip(alone, until, strict=True)]


def test_equal_prompts_share_one_prefill_and_finished_rows_are_dropped() -> None:
    model, shapes = random_model(), []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    rows = [Generation(p) for p in ([1, 2, 3], [4], [1, 2, 3], [9] * 22)]
    how = SamplingConfig(temperature=1.0, seed=3)
    for _ in decode(model, rows, max_new_tokens=4, stop_ids=(), sampling=how):
        pass
    assert shapes == [(3, 22), (4, 1), (3, 1), (3, 1)]
    assert [row.finish_reason for row in rows] == ["length", "length", "length", "context"]
    assert rows[0].ids != rows[2].ids


def test_logprobs_are_the_models_own() -> None:
    model = random_model().eval()
    rows = [Generation([1, 2, 3]), Generation([4])]
    how = SamplingConfig(temperature=2.0, top_k=9, repetition_penalty=1.5, seed=0)
    for _ in decode(model, rows, max_new_tokens=5, stop_ids=(), sampling=how):
        pass
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.ids]])
        expected = model(ids).log_softmax(-1)[0, -6:-1].gather(1, ids[0, -5:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected)


def test_the_penalty_is_for_prompt_and_answer() -> None:
    model = random_model(tie_embeddings=True)  # tied, it says the same again and again
    assert g.generate_ids(model, [[79], [1, 2, 3, 79]], max_new_tokens=3) == [[79] * 3] * 2
    rows = [Generation([79]), Generation([1, 2, 3, 79])]
    how = SamplingConfig(repetition_penalty=1e9)
    for _ in decode(model, rows, max_new_tokens=15, stop_ids=(), sampling=how):
        pass
    for row in rows:
        assert len({*row.prompt, *row.ids}) == len(row.prompt) + 15


@pytest.mark.parametrize(("n", "reason"), [(5, "context"), (4, "length"), (3, "length")])
def test_the_end_of_the_context_is_named(n: int, reason: str) -> None:
    (row,), steps = complete(random_model(), BYTES, "x" * 20, max_new_tokens=n, stop_ids=())
    assert len(list(steps)) == len(row.ids) == min(n, 4)
    assert row.finish_reason == reason


def test_a_stop_id_is_named_and_left_out() -> None:
    (row,), steps = complete(Script([*b"ab", EOS, *b"cd"], 2), BYTES, "go")
    assert len(list(steps)) == 3
    assert (row.ids, row.text, row.finish_reason) == ([*b"ab"], "ab", "stop")
    assert len(row.logprobs) == 2


def test_padded_embedding_rows_are_never_sampled() -> None:
    model = random_model(vocab_size=300)
    with torch.no_grad():
        model.lm_head.weight[258:] = 50 * model.lm_head.weight[:42]
    (row,), steps = complete(model, BYTES, "hello", temperature=9.0, seed=0, stop_ids=())
    list(steps)
    assert max(row.ids) < 258 <= max(g.generate_ids(model, [[104]], max_new_tokens=20)[0])


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    model = random_model(vocab_size=200)
    (ids,) = g.generate_ids(model, [list(b"hello")], max_new_tokens=5, stop_ids=())
    (row,), steps = complete(model, BYTES, "hello", max_new_tokens=5, stop_ids=())
    list(steps)
    assert row.ids == ids


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_comes_first_exactly_once(adds_bos: bool) -> None:
    (row,), _ = complete(random_model(), ByteTokenizer(adds_bos), "hi")
    assert row.prompt == [BOS] * adds_bos + [*b"hi"]


# --- text


@few
@given(st.integers(0, 9), st.integers(1, 15), st.sampled_from([0.0, 1.0]))
def test_pieces_add_up_to_the_decoded_ids(seed: int, n: int, temperature: float) -> None:
    how = {"max_new_tokens": n, "temperature": temperature, "seed": seed}
    model = random_model(seed)
    pieces = list(g.stream(model, BYTES, "héllo", **how))
    (ids,) = g.generate_ids(model, [list("héllo".encode())], stop_ids={EOS}, **how)
    assert "".join(pieces) == BYTES.decode(ids) == g.generate(model, BYTES, "héllo", **how)
    assert all(pieces)


def test_a_piece_never_splits_a_character() -> None:
    text = "却说曹操 é 👩‍🚀!"
    pieces = list(g.stream(Script([*text.encode(), EOS], 2), BYTES, "go"))
    assert pieces == list(text)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert say("好".encode()[:2]) == "\ufffd"
    assert say(b"a\xffb") == "a\ufffdb"


@settings(max_examples=60, deadline=None)
@example(["abß"], ["abß", "b"])
@example(["abß"], ["abß", "bß"])
@given(
    st.lists(st.text("abß", min_size=1, max_size=4), max_size=6),
    st.lists(st.text("abß", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_end_the_text_before_them(pieces: list[str], stop: list[str]) -> None:
    """The one that is complete first ends it, wherever the pieces' borders are; nothing of it
    was shown before."""
    tokenizer, text, shown = ByteTokenizer(), "".join(pieces), ""
    tokenizer.pieces |= {i: piece.encode() for i, piece in enumerate(pieces)}
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop))]
    expected = text
    if ends:
        expected = min((text[: ends[0]].removesuffix(s) for s in stop), key=len)
    script = Script([*range(len(pieces)), EOS], 2)
    for piece in g.stream(script, tokenizer, "go", stop=stop):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


def test_a_lone_stop_string_and_what_the_row_says_of_it() -> None:
    script = Script([*b"one\n\ntwo", EOS], 2)
    (row,), steps = complete(script, BYTES, "go", stop="\n\n")
    list(steps)
    assert (row.text, row.finish_reason, len(row.ids)) == ("one", "stop", 5)
    assert say("one\n", stop="\n\n") == "one\n"  # held back, and shown at the end


def test_samples_of_one_prompt() -> None:
    """They differ, and each ends at a stop of its own while the others go on."""
    model = random_model()
    how = {"temperature": 1.0, "seed": 1, "max_new_tokens": 12, "stop_ids": ()}
    rows, steps = complete(model, BYTES, "x", num_samples=8, **how)
    list(steps)
    assert len({row.text for row in rows}) > 1
    letter = next(c for c in rows[0].text if c.isascii())
    cut, steps = complete(model, BYTES, "x", num_samples=8, stop=letter, **how)
    list(steps)
    assert {row.finish_reason for row in cut} == {"stop", "length"}
    for row in cut:
        assert letter not in row.text
        assert (row.finish_reason == "stop") == (row.ids[-1] == ord(letter))
        assert row.text == BYTES.decode(row.ids).removesuffix(letter)


# --- what generation leaves as it was


def test_seeds() -> None:
    model = random_model()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()

    def text(**how: Any) -> str:
        return g.generate(model, BYTES, "x", temperature=3.0, max_new_tokens=20, **how)

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text() != text()
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = random_model(dropout=0.5)
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    steps = g.stream(model, BYTES, "x", max_new_tokens=20)
    first = next(steps)  # restored between pieces, so that a stream may be left unfinished
    assert [module.training for module in model.modules()] == modes
    assert not torch.is_inference_mode_enabled()
    assert first + "".join(steps) == g.generate(model.eval(), BYTES, "x", max_new_tokens=20)


# --- refusals


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("", {}, "the prompt is empty; give some text"),
        ("x" * 24, {}, "the prompt has 24 tokens and the model's context 24; .* 23"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("x", {"stop": ["a", ""]}, "a stop string is empty"),
        ("x", {"temperature": -1.0}, "temperature"),
    ],
)
def test_refused_before_the_first_piece(prompt: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        g.stream(random_model(), ByteTokenizer(), prompt, **settings)
    with pytest.raises(InputError, match=says):
        g.generate(random_model(), ByteTokenizer(adds_bos=True), prompt[:23], **settings)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[]], "the prompt has no tokens"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[1], [1] * 30], "prompt 1 has 30 tokens and the model's context 24"),
        ([[258]], "ids outside the model's vocabulary of 258"),
        ([[-1]], "outside"),
    ],
)
def test_refused_ids(prompts: list[list[int]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        g.generate_ids(random_model(), prompts)


def test_no_prompts_give_no_answers() -> None:
    assert g.generate_ids(random_model(), []) == []


def test_samples_and_keywords() -> None:
    with pytest.raises(InputError, match="num_samples must be at least 1"):
        complete(random_model(), BYTES, "x", num_samples=0)
    with pytest.raises(TypeError, match="temprature"):
        g.generate(random_model(), BYTES, "x", temprature=1.0)


def test_weights_that_are_not_finite_are_said_to_be() -> None:
    model = random_model()
    torch.nn.init.constant_(model.norm.weight, torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(WeightsError, match="not finite"):
            g.generate_ids(model, [[1]], temperature=temperature)


# --- the name


@pytest.mark.parametrize(
    "lines",
    [
        "import gpt2llama as g; f = g.generate; from gpt2llama.generate import stream, generate",
        "from gpt2llama.generate import stream, generate; import gpt2llama as g; f = g.generate",
    ],
)
def test_the_package_is_the_function_too(lines: str) -> None:
    check = """
import types
try: f("model", "tokenizer", "")
except g.errors.InputError as error: assert "the prompt is empty" in str(error)
else: raise SystemExit("not called")
assert isinstance(g.generate, types.ModuleType) and g.generate.decode and g.generate is f
"""
    subprocess.run([sys.executable, "-c", lines + check], check=True, timeout=60)
