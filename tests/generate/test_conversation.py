"""A chat that keeps its cache answers as one that has none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from byte_model import EOS, ByteTokenizer, random_model

from gpt2llama.errors import InputError
from gpt2llama.generate import generate_ids
from gpt2llama.generate.chat import Chat


class Talker(ByteTokenizer):
    chat_template = "as apply_chat"

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        turns = [[*self.encode(m["role"][0] + m["content"]), EOS] for m in messages]
        return [id for turn in turns for id in turn] + self.encode("a")


TOKENIZER = Talker()
WORDS = ["你好", "how?", "x", "再见"]


@pytest.mark.parametrize("window", [None, 5])
def test_answers_are_those_of_a_fresh_run(window: int | None) -> None:
    model = random_model(seed=3, max_seq_len=160, sliding_window=window)
    chat = Chat(model, TOKENIZER, "be", max_new_tokens=9)
    for word in WORDS:
        got = "".join(chat.say(word))
        prompt = TOKENIZER.apply_chat(chat.messages[:-1])
        how = {"max_new_tokens": 9, "temperature": 0.0, "stop_ids": TOKENIZER.stop_ids}
        (want,) = generate_ids(model, [prompt], **how)
        assert got == TOKENIZER.decode(want)
        assert chat.messages[-1] == {"role": "assistant", "content": got}
        assert chat.prompt_tokens == len(prompt)


def test_only_what_is_new_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = random_model(seed=3, max_seq_len=160), []
    forward = type(model).forward

    def counting(self, ids, **how):  # type: ignore[no-untyped-def]
        ran.append(ids.shape[1])
        return forward(self, ids, **how)

    monkeypatch.setattr(type(model), "forward", counting)
    chat = Chat(model, TOKENIZER, max_new_tokens=4)
    list(chat.say("one"))
    held = len(chat._held)
    ran.clear()
    list(chat.say("two"))
    assert ran[0] < chat.prompt_tokens - len("uone") - 1
    assert held > 0


def test_an_answer_left_early_stays_as_far_as_it_came() -> None:
    model = random_model(seed=3, max_seq_len=160)
    chat = Chat(model, TOKENIZER, max_new_tokens=9)
    answer = chat.say("你好")
    said = next(answer)
    answer.close()
    assert chat.messages[-1]["role"] == "assistant"
    assert chat.messages[-1]["content"].startswith(said)
    assert "".join(chat.say("go on"))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_the_oldest_turns_are_dropped_when_the_context_is_full() -> None:
    model = random_model(seed=3, max_seq_len=64)
    chat = Chat(model, TOKENIZER, "be", max_new_tokens=8)
    for i in range(9):
        list(chat.say(f"question {i}"))
        assert chat.prompt_tokens + chat.new_tokens <= 64
    assert chat.messages[0] == {"role": "system", "content": "be"}
    assert chat.messages[-2]["content"] == "question 8"
    assert chat.dropped > 0
    with pytest.raises(InputError, match="context is 64, 8 of them for the answer"):
        chat.say("x" * 60)
    assert chat.messages[-2]["content"] == "question 8"


def test_reset() -> None:
    model = random_model(seed=3, max_seq_len=160)
    chat = Chat(model, TOKENIZER, max_new_tokens=9)
    first = "".join(chat.say("one"))
    list(chat.say("two"))
    chat.reset()
    assert chat.messages == []
    assert "".join(chat.say("one")) == first
