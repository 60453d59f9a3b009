"""Prompts and answers: read from JSONL, as ids, in padded rows, and how likely a model finds them.

Padding stands on the right, where no real token sees it; targets are the answers' tokens alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import IGNORED
from ..errors import DataError, InputError, TokenizerError
from ..jsonl import read_jsonl
from .examples import Message

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer
    from .settings import Tuning

Prompt = str | list[Message]


class Line(NamedTuple):
    place: str  # FILE:NUMBER
    values: dict[str, Any]

    @property
    def prompt(self) -> Prompt:
        """Raises DataError, naming the line."""
        prompt = self.values.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
            if prompt[-1].get("role") == "assistant":
                raise DataError(f"{self.place}: the last message of prompt is the assistant's; "
                                "end it with the one to answer")  # fmt: skip
            return prompt
        if isinstance(prompt, str) or prompt is None:
            return self.text("prompt")
        raise DataError(f"{self.place}: prompt must be a text or a list of messages")

    def text(self, name: str) -> str:
        """A field that must hold some text."""
        text = self.values.get(name)
        if not isinstance(text, str):
            has = f"must be a text (got {text!r:.40})" if name in self.values else "is missing"
            raise DataError(f"{self.place}: {name} {has}")
        if not text.strip():
            raise DataError(f"{self.place}: {name} is empty; fill it or take the line out")
        return text


def read_lines(path: str | Path) -> list[Line]:
    """Of a JSONL file; raises what `read_jsonl` does."""
    found = read_jsonl(path, "an object with a prompt")
    return [Line(f"{path}:{number}", values) for number, values in found]


def hold_out(lines: list[Line], share: float = 0.1) -> tuple[list[Line], list[Line]]:
    """Lines to train on and lines to hold out: a share of the prompts, drawn by their hashes, so
    that none stands on both sides. Raises DataError for fewer than two prompts.
    """
    keys = [hashlib.sha256(json.dumps(line.prompt).encode()).hexdigest() for line in lines]
    drawn = sorted(set(keys))
    if len(drawn) < 2:
        raise DataError("one prompt alone cannot be held out; give more, or --held-out FILE")
    held = set(drawn[: max(1, round(share * len(drawn)))])
    split: tuple[list[Line], list[Line]] = ([], [])
    for line, key in zip(lines, keys, strict=True):
        split[key in held].append(line)
    return split


class Encoded(Protocol):
    @property
    def tokens(self) -> int: ...


E = TypeVar("E", bound=Encoded)


@dataclass(frozen=True)
class Parts(Generic[E]):
    """skipped: how many take more than seq_len tokens."""

    train: list[E]
    held_out: list[E]
    skipped: int


def read_parts(run: Tuning[Any], encode: Callable[[Line], E], seq_len: int, what: str) -> Parts[E]:
    """The lines of a run's files, encoded. Raises DataError where none is left on either side."""
    lines = read_lines(run.data)
    split = (lines, read_lines(run.held_out)) if run.held_out else hold_out(lines)
    found = [[encode(line) for line in part] for part in split]
    train, held_out = ([each for each in part if each.tokens <= seq_len] for part in found)
    for name, part in (("train on", train), ("hold out", held_out)):
        if not part:
            raise DataError(
                f"{run.data} leaves no {what} to {name}: none fits into {seq_len} tokens; shorten "
                "them or raise seq_len"
            )
    return Parts(train, held_out, sum(map(len, found)) - len(train) - len(held_out))


class Writer:
    """Writes prompts and answers as the model reads them.

    chat: a prompt that is text is a user's message where the tokenizer has a chat template; else
    it is text that the answer continues. Messages always go through the template.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        self.tokenizer = tokenizer
        self.chat = chat and tokenizer.chat_template is not None

    def prompt(self, prompt: Prompt) -> list[int]:
        """At least a token; InputError for a prompt that makes none."""
        if messages := self._messages(prompt):
            ids = self.tokenizer.apply_chat(messages)
        else:
            ids = [*self._begin(), *self.tokenizer.encode(str(prompt))]
        if not ids:
            raise InputError("the prompt makes no token; give it some text")
        return ids

    def answer(self, prompt: Prompt, text: str) -> list[int]:
        """The ids after the prompt's, up to the one that ends the answer."""
        before, tokenizer = self.prompt(prompt), self.tokenizer
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        if messages := self._messages(prompt):
            said = [*messages, {"role": "assistant", "content": text}]
            whole = tokenizer.apply_chat(said, generation_prompt=False)
            if whole[: len(before)] != before:
                raise TokenizerError(
                    "the chat template writes the prompt differently when this answer follows it; "
                    "take line breaks from the answer's beginning or use another template"
                )
            ids = whole[len(before) :]
            ends = [i for i, id in enumerate(ids) if id in tokenizer.stop_ids]
            return ids[: ends[-1] + 1] if ends else ids + end  # after it a template may go on
        whole = [*self._begin(), *tokenizer.encode(f"{prompt}{text}")]
        continues = whole[: len(before)] == before
        return (whole[len(before) :] if continues else tokenizer.encode(text)) + end

    def _messages(self, prompt: Prompt) -> list[Message] | None:
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}] if self.chat else None
        return prompt

    def _begin(self) -> list[int]:
        bos = self.tokenizer.bos_id
        return [bos] if self.tokenizer.adds_bos and bos is not None else []


@contextmanager
def at(place: str) -> Iterator[None]:
    """Names the line in what a message or a template of it raises."""
    try:
        yield
    except (InputError, TokenizerError) as error:
        raise type(error)(f"{place}: {error}") from error


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """ids and targets, int64 (B, T), of prompts (at least a token each) and their answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer) - 1
        ids[row, :end] = torch.tensor([*prompt, *answer][:-1])
        targets[row, len(prompt) - 1 : end] = torch.tensor(answer)
    return ids, targets


def token_logprobs(
    model: Transformer,
    ids: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """(B, T): the log-probability of each target in nats, 0 where it is IGNORED.

    Only the targets go through the head. temperature, vocab_size: as an answer was sampled with.
    """
    counted = targets != IGNORED
    hidden = model.hidden(ids, places=counted.flatten().nonzero()[:, 0])
    logits = model.logits(hidden)[:, :vocab_size].float() / temperature
    found = -F.cross_entropy(logits, targets[counted], reduction="none")
    return found.new_zeros(targets.shape).masked_scatter(counted, found)


def shuffled(count: int, batch_size: int, seed: int, index: int) -> list[int]:
    """The members of batch `index`: of `count`, in an order of its own in each epoch.

    Epochs are laid end to end, so that every batch is full.
    """
    places = range(index * batch_size, (index + 1) * batch_size)
    return [int(_order(count, seed, place // count)[place % count]) for place in places]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Any:
    return np.random.default_rng((seed, epoch)).permutation(count)
