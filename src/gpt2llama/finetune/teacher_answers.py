"""A teacher's answers to prompts, written as conversations: data for instruction tuning.

Kim and Rush 2016, "Sequence-Level Knowledge Distillation": the student learns what the teacher
says, so that the two may have different tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import write_text
from ..errors import DataError, FileError, InputError
from ..generate.batch import chat_prompt, complete_all
from ..jsonl import read_jsonl, read_text_lines
from .examples import Message

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

AT_ONCE = 8  # batches sorted by length together, and written together
Watch = Callable[[int, int], None]  # done, of how many


@dataclass(frozen=True)
class Written:
    """Conversations in the file, and those left out: an answer that is empty or breaks off would
    teach that."""

    written: int
    empty: int
    cut_off: int


def read_prompts(path: str | Path) -> list[list[Message]]:
    """Messages that end with the user's: of a .jsonl file the `prompt`, the `instruction` and
    `input`, or the `messages` (without a last answer) of each line; of any other each line itself.

    Raises FileError; DataError, naming the line.
    """
    path = Path(path)
    prompts = []
    for place, messages in _asked(path):
        if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise DataError(f"{place} has no question for the teacher; fill it or leave it out")
        prompts.append(messages)
    if not prompts:
        raise DataError(f"{path} has no prompt in it")
    return prompts


def write_answers(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[list[Message]],
    out: str | Path,
    *,
    name: str = "",
    max_new_tokens: int = 128,
    batch_size: int = 16,
    resume: bool = False,
    watch: Watch = lambda done, count: None,
) -> Written:
    """Writes `out`, a line {"messages": […]} for each prompt, with the teacher's greedy answer.

    What is answered so far stands in `out`.partial, from which `resume` goes on; name: the
    teacher's, by which it is known to be the same. Raises FileError for a place in use; InputError
    for a prompt that fills the context, or a file begun with other settings; DataError where no
    answer is left.
    """
    if not prompts:
        raise InputError("there is no prompt for the teacher; give one")
    out = Path(out)
    partial = out.with_name(f"{out.name}.partial")
    if out.exists():
        raise FileError(f"{out} exists already; name another --out or delete it")
    if partial.exists() and not resume:
        raise FileError(f"{partial} is there: go on with --resume, or delete it")
    ids = [chat_prompt(tokenizer, messages) for messages in prompts]
    for number, prompt in enumerate(ids, 1):
        if len(prompt) >= model.config.max_seq_len:
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens and the teacher's context "
                f"{model.config.max_seq_len}; shorten it or leave it out"
            )
    digest = hashlib.sha256(json.dumps([*prompts]).encode("utf-8")).hexdigest()
    settings = {"teacher": name, "prompts": digest, "max_new_tokens": max_new_tokens,
                "batch_size": batch_size}  # fmt: skip
    chunk = AT_ONCE * batch_size
    lines = _begin(partial, settings, chunk)
    try:
        with partial.open("ab") as file:
            for begin in range(len(lines), len(prompts), chunk):
                watch(begin, len(prompts))
                found = [""] * len(ids[begin : begin + chunk])
                for batch in complete_all(
                    model,
                    tokenizer,
                    ids[begin : begin + chunk],
                    max_new_tokens=max_new_tokens,
                    batch_size=batch_size,
                ):
                    for number, row in batch:
                        found[number] = json.dumps(
                            {
                                "messages": [
                                    *prompts[begin + number],
                                    {"role": "assistant", "content": row.text},
                                ],
                                "finish_reason": row.finish_reason,
                            },
                            ensure_ascii=False,
                        )
                file.write("".join(line + "\n" for line in found).encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
                lines += found
    except OSError as error:
        raise FileError(f"cannot write {partial}: {error.strerror or error}") from error
    watch(len(prompts), len(prompts))
    kept, empty, cut_off = list[str](), 0, 0
    for line in lines:
        values = json.loads(line)
        if not values["messages"][-1]["content"].strip():
            empty += 1
        elif values["finish_reason"] != "stop":
            cut_off += 1
        else:
            kept.append(json.dumps({"messages": values["messages"]}, ensure_ascii=False) + "\n")
    if not kept:
        partial.unlink()  # the same settings would give the same again
        raise DataError(_why_none(empty, cut_off, max_new_tokens))
    write_text(out, "".join(kept))
    partial.unlink()
    return Written(len(kept), empty, cut_off)


def _why_none(empty: int, cut_off: int, most: int) -> str:
    why = [f"{cut_off} cut off at max_new_tokens={most} or the context"] * (cut_off > 0)
    how = ["raise max_new_tokens (-n) or shorten the prompts"] * (cut_off > 0)
    if empty:
        why.append(f"{empty} empty")
        how.append("take a teacher that was tuned to answer")
    return f"no answer can be learned from: {' and '.join(why)}; {', or '.join(how)}"


def _begin(partial: Path, settings: dict[str, Any], chunk: int) -> list[str]:
    """The answers of whole chunks, to which the file is cut back; a new file has a first line."""
    head, found = json.dumps(settings), list[str]()
    if partial.exists():
        first, *rest = partial.read_text(encoding="utf-8").split("\n")
        if rest and first != head:
            raise InputError(
                f"{partial} was begun with another teacher, prompts or settings; delete it or "
                "give those"
            )
        found = rest[: max(0, len(rest) - 1) // chunk * chunk]
    write_text(partial, "".join(line + "\n" for line in [head, *found]), overwrite=True)
    return found


def _asked(path: Path) -> Iterator[tuple[str, list[Message]]]:
    """(place, messages)."""
    if path.suffix != ".jsonl":
        lines = ((f"{path}:{number}", line.strip()) for number, line in read_text_lines(path))
        yield from ((place, [_user(line)]) for place, line in lines if line)
        return
    shape = "an object with a prompt, an instruction or messages"
    for number, values in read_jsonl(path, shape):
        place = f"{path}:{number}"
        try:
            yield place, _messages(values)
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{place} must be {shape} ({error})") from None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _messages(values: Any) -> list[Message]:
    """Raises whatever comes of other shapes."""
    if "messages" in values:
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in values["messages"]]
        messages = (
            messages[:-1] if messages[-1:] and messages[-1]["role"] == "assistant" else messages
        )
    elif "prompt" in values:
        messages = [_user(values["prompt"])]
    else:
        parts = [values["instruction"], values.get("input") or ""]
        messages = [_user("\n".join(part for part in parts if part))]
    if not all(isinstance(message["content"], str) for message in messages):
        raise TypeError("a text is no string")
    return messages
