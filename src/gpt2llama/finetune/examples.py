"""Conversations in the shapes people have them in, and as token ids of which some are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, InputError, TokenizerError
from ..jsonl import read_jsonl

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Message = dict[str, str]
_SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant",
             "assistant": "assistant"}  # fmt: skip
_SHAPES = (
    'an object with "messages" (role, content), "conversations" (from, value), or '
    '"instruction" and "output"'
)


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, whether it is learned: what the assistant says, and its end."""

    ids: list[int]
    learned: list[bool]


def read_conversations(path: str | Path) -> Iterator[tuple[str, list[Message]]]:
    """(place, messages) of each line of a JSONL file; empty lines are left out.

    A line is an object with `messages` (OpenAI: role, content), `conversations` (ShareGPT: from,
    value) or `instruction`, `input`, `output` (Alpaca; perhaps `system`, `history`). Raises
    FileError; DataError, naming the line, for one that is not JSON or has none of the shapes, for
    roles out of order, an empty answer, no answer at all.
    """
    for number, value in read_jsonl(path, _SHAPES):
        place = f"{path}:{number}"
        yield place, _conversation(place, value)


def _conversation(place: str, value: dict[str, Any]) -> list[Message]:
    if "messages" in value:
        messages = _turns(place, value["messages"], "role", "content", None)
    elif "conversations" in value:
        messages = _turns(place, value["conversations"], "from", "value", _SHAREGPT)
    elif "instruction" in value and "output" in value:
        messages = _alpaca(place, value)
    else:
        raise DataError(f"{place} must be {_SHAPES}")
    check_roles(place, messages)
    return messages


def _turns(
    place: str, turns: Any, who: str, what: str, names: dict[str, str] | None
) -> list[Message]:
    messages = []
    for i, turn in enumerate(turns if isinstance(turns, list) else [turns], 1):
        role, content = (turn.get(who), turn.get(what)) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{place}: message {i} must be an object of strings {who} and {what}")
        if names is not None:
            role = names.get(role, role)
        messages.append({"role": role, "content": content})
    return messages


def _alpaca(place: str, value: dict[str, Any]) -> list[Message]:
    texts = {key: value.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{place}: {key} must be a string (got {text!r})")
    messages = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    history = value.get("history") or []
    pairs = (
        [pair for pair in history if isinstance(pair, list)] if isinstance(history, list) else []
    )
    question = "\n".join(filter(None, [texts["instruction"], texts["input"]]))
    for pair in [*pairs, [question, texts["output"]]]:
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{place}: history must be a list of [question, answer]")
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    return messages


def check_roles(place: str, messages: Sequence[Message]) -> None:
    """A system message at most, first; then user and assistant in turn, ending with an answer."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    for i, message in enumerate(turns, 1 + len(messages) - len(turns)):
        wanted = ("user", "assistant")[(i - 1 - (len(messages) - len(turns))) % 2]
        if message["role"] != wanted:
            raise DataError(
                f"{place}: message {i} is the {message['role']}'s, where the {wanted}'s must "
                "stand: after a system message, if any, user and assistant take turns"
            )
        if not message["content"].strip():
            what = "an empty answer" if wanted == "assistant" else "an empty question"
            raise DataError(f"{place}: message {i} is {what}; fill it or leave the line out")
    if not turns or len(turns) % 2:
        raise DataError(f"{place} must end with the assistant's answer, from which it is learned")


def to_example(tokenizer: Tokenizer, messages: Sequence[Message], place: str = "") -> Example:
    """By the tokenizer's chat template: of every answer its tokens and the one that ends it.

    Raises DataError, naming the message, where the template refuses it, or writes what was said
    before it otherwise once it is there, so that its tokens cannot be told.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:i], True, place, i)
        after = _render(tokenizer, messages[: i + 1], False, place, i + 1)
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise DataError(
                f"{place}: the chat template writes message {i + 1} so that its tokens cannot be "
                "told from those before it; take another template"
            )
        answer = after[len(before) :]
        ends = [k for k, token in enumerate(answer, 1) if token in tokenizer.stop_ids]
        taught = ends[-1] if ends else len(answer)  # not the newline that a template puts behind
        learned += [False] * (len(before) - len(ids)) + [True] * taught
        learned += [False] * (len(answer) - taught)
        ids = after
    return Example(ids, learned)


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt: bool, place: str, count: int
) -> list[int]:
    try:
        return tokenizer.apply_chat(messages, generation_prompt=prompt)
    except (TokenizerError, InputError) as error:
        if tokenizer.chat_template is None:
            raise
        raise DataError(f"{place}: message {count}: {error}") from error


def to_examples(
    tokenizer: Tokenizer, conversations: Iterable[tuple[str, list[Message]]], longest: int
) -> tuple[list[Example], int]:
    """Those of at most `longest` tokens after the first, and how many are longer: left out whole,
    since an answer that breaks off teaches to break off. DataError where none is left."""
    found = [to_example(tokenizer, messages, place) for place, messages in conversations]
    kept = [example for example in found if len(example.ids) - 1 <= longest]
    if found and not kept:
        which = (
            f"all {len(found):,} conversations have" if found[1:] else "the only conversation has"
        )
        raise DataError(f"{which} more than {longest} tokens; give shorter ones or raise seq_len")
    return kept, len(found) - len(kept)
