"""From JSONL to ids of which only answers are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpt2llama.errors import DataError, FileError
from gpt2llama.finetune.examples import read_conversations, to_example, to_examples
from gpt2llama.tokenizer import train_bpe
from gpt2llama.tokenizer.bpe import BPETokenizer

TALK = [
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "您好，请说"},
    {"role": "user", "content": "RoPE?"},
    {"role": "assistant", "content": "它旋转"},
]
SHAPES: list[dict[str, Any]] = [
    {"messages": TALK},
    {
        "conversations": [
            {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in TALK
        ]
    },
    {
        "instruction": "RoPE?",
        "input": "",
        "output": "它旋转",
        "history": [["你好", "您好，请说"]],
    },
]


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe(["你好您好请说它旋转 the model " * 40], 300)


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_three_shapes_of_one_talk(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SHAPES[0], "", SHAPES[1], SHAPES[2])
    found = list(read_conversations(path))
    assert [messages for _, messages in found] == [TALK] * 3
    assert [place for place, _ in found] == [f"{path}:{n}" for n in (1, 3, 4)]


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    line = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be short"}
    ((_, messages),) = read_conversations(write(tmp_path / "a.jsonl", line))
    assert [m["content"] for m in messages] == ["Be short", "Add\n1 2", "3"]
    assert messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'a': 1}", "is not JSON"),
        ("[1]", "must be an object"),
        ({"text": "x"}, "must be an object with"),
        ({"messages": []}, "must end with the assistant's answer"),
        ({"messages": TALK[:1]}, "must end with the assistant's answer"),
        ({"messages": TALK[1:]}, "message 1 is the assistant's, where the user's must stand"),
        ({"messages": [TALK[0], TALK[0]]}, "message 2 is the user's"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " "}]}, "2 is an empty answer"),
        ({"messages": [{"role": "user", "content": ""}, TALK[1]]}, "1 is an empty question"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object of strings"),
        ({"messages": [{"role": "tool", "content": "x"}, TALK[1]]}, "message 1 is the tool's"),
        ({"instruction": "x", "output": 3}, "output must be a string"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "history must be"),
    ],
)
def test_what_is_refused_names_the_line(line: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SHAPES[0], line)
    with pytest.raises(DataError) as raised:
        list(read_conversations(path))
    assert str(raised.value).startswith(f"{path}:2")
    assert said in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        list(read_conversations(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match='is empty; a line of it is an object with "mess'):
        list(read_conversations(write(tmp_path / "a.jsonl", "")))


def test_only_answers_and_their_ends_are_learned(tokenizer: BPETokenizer) -> None:
    """Read off the template by hand: <|role|>content<|end|>."""
    example = to_example(tokenizer, TALK)
    ids, learned = list[int](), list[bool]()
    for message in TALK:
        ours = message["role"] == "assistant"
        said = [*tokenizer.encode(message["content"]), tokenizer._specials["<|end|>"]]
        ids += [tokenizer._specials[f"<|{message['role']}|>"], *said]
        learned += [False, *[ours] * len(said)]
    assert example.ids == ids
    assert example.learned == learned


def test_a_prompt_is_what_chat_asks_with(tokenizer: BPETokenizer) -> None:
    """What generation gives the model, and then what it was taught to say."""
    example = to_example(tokenizer, TALK)
    for turns in (1, 3):
        prompt = tokenizer.apply_chat(TALK[:turns])
        assert example.ids[: len(prompt)] == prompt
        assert example.learned[len(prompt)]
        assert not example.learned[len(prompt) - 1]


def test_a_template_that_fails_names_the_message(tokenizer: BPETokenizer) -> None:
    parts = tokenizer._backend, dict(tokenizer._config)
    refusing = "{% if messages|length > 2 %}{{ raise_exception('two only') }}{% endif %}x"
    odd = BPETokenizer(parts[0], parts[1] | {"chat_template": refusing})
    with pytest.raises(DataError, match=r"a\.jsonl:7: message 3: .*two only"):
        to_example(odd, TALK, "a.jsonl:7")
    # The number of messages stands at the front: what was there before is written otherwise.
    counted = BPETokenizer(
        parts[0],
        parts[1] | {"chat_template": "{{ messages|length }}{{ messages[-1].content }}"},
    )
    with pytest.raises(DataError, match=r"message 2 so that its tokens cannot be told"):
        to_example(counted, TALK, "a.jsonl:7")


def test_too_long_ones_are_left_out_whole_and_counted(tokenizer: BPETokenizer) -> None:
    size = len(to_example(tokenizer, TALK[:2]).ids) - 1
    both = [("a", TALK), ("b", TALK[:2])]
    kept, skipped = to_examples(tokenizer, both, size)
    assert (len(kept), skipped) == (1, 1)
    with pytest.raises(DataError, match="all 2 conversations have more than"):
        to_examples(tokenizer, both, size - 1)
