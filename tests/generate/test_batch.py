"""Many prompts in batches: each row is what it is alone, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import BOS, EOS, ByteTokenizer, random_model

import gpt2llama as g
from gpt2llama.errors import InputError
from gpt2llama.generate.batch import chat_prompt, complete_all
from gpt2llama.generate.sampling import SamplingConfig

PROMPTS = [list(text.encode()) for text in ("a", "bcd", "efghij", "k", "lmnopqrs", "tu")]


class Bare(ByteTokenizer):
    chat_template: str | None = None


class Chatty(Bare):
    chat_template = "{{ … }}"

    def apply_chat(self, messages: Any, generation_prompt: bool = True) -> list[int]:
        return [EOS, *self.encode(messages[-1]["content"])]


def test_prompts() -> None:
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert chat_prompt(Chatty(), messages) == [EOS, 99]
    assert chat_prompt(Bare(), messages) == [97, 98, 10, 99]
    assert chat_prompt(Bare(adds_bos=True), messages) == [BOS, 97, 98, 10, 99]


@pytest.mark.parametrize("batch_size", [1, 2, 6, 50])
def test_each_alone(batch_size: int) -> None:
    model, tokenizer = random_model(), Bare()
    batches = list(complete_all(model, tokenizer, PROMPTS, max_new_tokens=9, batch_size=batch_size))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    found = {number: row.ids for batch in batches for number, row in batch}
    for number, prompt in enumerate(PROMPTS):
        (alone,) = g.generate_ids(model, [prompt], max_new_tokens=9, stop_ids={EOS})
        assert found.pop(number) == alone
    assert not found
    lengths = [len(PROMPTS[number]) for batch in batches for number, _ in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_stops_and_settings() -> None:
    model, tokenizer = random_model(), Bare()
    ((_, whole),) = next(complete_all(model, tokenizer, [[1, 2]], max_new_tokens=6))
    stop = tokenizer.decode(whole.ids[2:3])
    ((_, cut),) = next(complete_all(model, tokenizer, [[1, 2]], max_new_tokens=6, stop=[stop]))
    assert cut.text == whole.text[: whole.text.find(stop)]
    how = SamplingConfig(temperature=3.0, seed=1)
    warm = [next(complete_all(model, tokenizer, [[1]], sampling=how))[0][1].ids for _ in range(2)]
    assert warm[0] == warm[1]


def test_a_prompt_that_cannot_be_used_is_refused_before_any_runs() -> None:
    model = random_model()
    with pytest.raises(InputError, match="prompt 1 has no tokens"):
        complete_all(model, Bare(), [[1] * 5, []], batch_size=2)
    with pytest.raises(InputError, match="context 24"):
        complete_all(model, Bare(), [[1], [1] * 24], batch_size=1)
