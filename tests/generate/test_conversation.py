"""Chat: with its cache it says what it would say without, and runs only what is new."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from typing import Any

import pytest
import torch
from byte_model import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import InputError, TokenizerError
from gpt2llama.generate import SamplingConfig, decode
from gpt2llama.generate.chat import Chat
from gpt2llama.generate.generation import Generation
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import BPETokenizer, train_bpe

DECODE = importlib.import_module("gpt2llama.generate.decode")  # the package's is the function
TEXT = "却说曹操引军追赶玄德。Then the story goes on, user and assistant and system.\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe([TEXT], vocab_size=300)


def tiny(context: int = 160, **switches: Any) -> Transformer:
    return random_model(vocab_size=304, max_seq_len=context, **switches)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny(position="rope", n_kv_heads=1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass, or greedy call of the kernel, ran."""
    passes: list[int] = []

    def counted(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        passes.append(ids.shape[1])
        return last_logits(model, ids, cache)

    last_logits = DECODE.last_logits
    monkeypatch.setattr(DECODE, "last_logits", counted)

    def ahead(*arguments: Any) -> list[tuple[int, float]]:
        found = greedy(*arguments)
        passes.append(len(found))
        return found

    greedy = DECODE.greedy
    monkeypatch.setattr(DECODE, "greedy", ahead)
    return passes


def anew(chat: Chat) -> list[int]:
    """What the model says to the last message when it reads the whole chat anew."""
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    prompt = chat.tokenizer.apply_chat([*system, *chat.turns[chat.dropped : -1]])
    row = Generation(prompt)
    for _ in decode(
        chat.model,
        [row],
        max_new_tokens=chat.max_new_tokens,
        stop_ids=chat.tokenizer.stop_ids,
        sampling=SamplingConfig(),
        vocab_size=chat.tokenizer.vocab_size,
    ):
        pass
    return row.ids


words = st.text(st.sampled_from("却说曹 abc,\n<|end|>"), min_size=1, max_size=12)
actions = st.one_of(
    st.tuples(st.just("say"), words),
    st.tuples(st.just("say"), words),
    st.tuples(st.just("stop"), words),
    st.tuples(st.just("system"), st.none() | words),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=30)
@given(st.lists(actions, max_size=6), st.sampled_from([None, "lookup"]))
def test_equal_to_reading_the_whole_chat_anew(
    model: Transformer,
    tokenizer: BPETokenizer,
    actions: list[tuple[str, Any]],
    speculate: str | None,
) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=9, speculate=speculate)
    for action, text in actions:
        if action == "say":
            said = "".join(chat.say(text))
            assert chat.answer is not None
            assert chat.answer.ids == anew(chat)
            assert said == tokenizer.decode(chat.answer.ids) == chat.messages[-1]["content"]
        elif action == "stop":
            answer = chat.say(text)
            said = "".join(itertools.islice(answer, 2))
            answer.close()  # type: ignore[attr-defined]  # a generator
            assert chat.turns[-2:] == [
                {"role": "user", "content": text},
                {"role": "assistant", "content": said},
            ]
        elif action == "system":
            chat.system = text
        else:
            chat.reset()
            assert chat.turns == []


def test_only_what_is_new_is_run(
    model: Transformer, tokenizer: BPETokenizer, runs: list[int]
) -> None:
    chat, seen = Chat(model, tokenizer, system="abc", max_new_tokens=4), 0
    for text in ("却说", "曹操", "玄德"):
        runs.clear()
        "".join(chat.say(text))
        assert chat.answer is not None
        prompt = len(chat.answer.prompt)
        assert runs[0] <= prompt - seen
        assert sum(runs[1:]) == 3
        seen = prompt  # all of it is still in the cache
    runs.clear()
    chat.reset()
    "".join(chat.say("却说"))
    start = tokenizer.encode("system\nabc")
    assert runs[0] <= len(chat.answer.prompt) - len(start)  # type: ignore[union-attr]  # it answered


def test_sampled_answers_follow_the_seed(model: Transformer, tokenizer: BPETokenizer) -> None:
    how: dict[str, Any] = {"temperature": 2.0, "seed": 5, "top_k": 40, "repetition_penalty": 1.3}
    chat = Chat(model, tokenizer, max_new_tokens=12, **how)
    first = ["".join(chat.say("却说")), "".join(chat.say("却说"))]
    chat.reset()
    assert first == ["".join(chat.say("却说")), "".join(chat.say("却说"))]
    assert first[0] != first[1]


def test_the_repetition_penalty_counts_the_whole_chat(
    model: Transformer, tokenizer: BPETokenizer
) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=12, repetition_penalty=1e6)
    for _ in range(2):
        "".join(chat.say("却说"))
        assert chat.answer is not None
        said = [*chat.answer.prompt, *chat.answer.ids]
        likeliest = set(range(300)) - set(said)
        assert len(set(chat.answer.ids)) == len(chat.answer.ids) or not likeliest
        assert not set(chat.answer.ids) & set(chat.answer.prompt)


def test_an_interrupted_answer(
    model: Transformer, tokenizer: BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between tokens, or within a forward pass."""
    chat = Chat(model, tokenizer, max_new_tokens=20)

    def interrupted(name: str, when: int) -> None:
        real, count = getattr(DECODE, name), 0

        def once(*args: Any) -> Any:
            nonlocal count
            count += 1
            made = real(*args)
            if count == when:
                raise KeyboardInterrupt
            return made

        monkeypatch.setattr(DECODE, name, once)

    interrupted("last_logits", 1)
    interrupted("greedy", 2)
    for text in ("却说", "曹操"):
        said = ""
        answer = chat.say(text)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                said += next(answer)
        assert chat.turns[-1] == {"role": "assistant", "content": said}
    monkeypatch.undo()
    "".join(chat.say("玄德"))
    assert chat.answer is not None
    assert chat.answer.ids == anew(chat)
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 3


def test_an_answer_that_another_follows(model: Transformer, tokenizer: BPETokenizer) -> None:
    chat = Chat(model, tokenizer, max_new_tokens=20)
    first, second = chat.say("却说"), chat.say("曹操")
    next(first)
    next(second)
    assert list(first) == []
    "".join(second)
    assert chat.answer is not None
    assert "却说" not in tokenizer.decode(chat.answer.prompt)


def test_a_full_context(tokenizer: BPETokenizer) -> None:
    """The oldest turns go, the system message and the last stay, and answers are still equal."""
    model = tiny(context=100, position="rope")
    chat = Chat(model, tokenizer, system="abc", max_new_tokens=10)
    for turn in range(12):
        before = chat.dropped
        "".join(chat.say(f"{turn} 却说曹操"))
        assert chat.answer is not None
        assert chat.answer.ids == anew(chat)
        assert len(chat.answer.prompt) <= (75 if chat.dropped == before else 50)
        assert chat.turns[chat.dropped]["role"] == "user"
        assert tokenizer.decode(chat.answer.prompt).startswith("<|system|>abc<|end|>")
    assert 0 < chat.dropped < 24
    assert len(chat.messages) == 25  # all that was said
    chat.max_new_tokens = 100
    "".join(chat.say("却" * 20))
    assert chat.answer.finish_reason in ("context", "stop")
    with pytest.raises(InputError, match=r"alone makes \d+ tokens and .* context has 100"):
        chat.say("却" * 120)
    assert chat.turns[-1]["role"] == "assistant"


def test_the_end_of_the_context_ends_an_answer(tokenizer: BPETokenizer) -> None:
    for seed in range(4):
        model = random_model(seed, vocab_size=304, max_seq_len=40)
        chat = Chat(model, tokenizer, max_new_tokens=100)
        "".join(chat.say("却说"))
        assert chat.answer is not None
        if chat.answer.finish_reason == "context":
            assert len(chat.answer.prompt) + len(chat.answer.ids) == 40
            return
    pytest.fail("no model talked so long")


def test_a_cache_that_grows(tokenizer: BPETokenizer) -> None:
    chat = Chat(tiny(context=4000), tokenizer, max_new_tokens=3)
    for length in (1, 400, 5, 300):
        "".join(chat.say("却" * length))
        assert chat.answer is not None
        assert chat.answer.ids == anew(chat)


def test_refusals(model: Transformer, tokenizer: BPETokenizer) -> None:
    with pytest.raises(InputError, match="max_new_tokens must be at least 1"):
        Chat(model, tokenizer, max_new_tokens=0)
    with pytest.raises(InputError, match="another model's"):
        Chat(random_model(vocab_size=200), tokenizer)
    with pytest.raises(InputError, match="the message is empty"):
        Chat(model, tokenizer).say("")
    with pytest.raises(InputError, match="temperature"):
        Chat(model, tokenizer, temperature=-1)
    silent = train_bpe([TEXT], vocab_size=300)
    silent.config["chat_template"] = "{{ raise_exception('I do not talk.') }}"
    with pytest.raises(TokenizerError, match=r"I do not talk\."):
        Chat(model, silent)
