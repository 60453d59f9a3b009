"""Questions of a JSONL file: answered greedily, scored, kept as golden answers.

A line is an object with `prompt` (a string) or `messages` (OpenAI's: role, content; the last is
the user's), and any of

    answer      the right text; white space and case do not count
    keywords    a list of strings that a right answer has, all of them; "a|b" is either
    choices     a list of strings, and `label`, the place of the right one from 0: the likeliest by
                log-probability divided by characters, lm-eval's acc_norm
    unknown     true: out of scope; right is to say that one does not know
    id          questions of one id are wordings of one question

A line with `unknown_phrases` alone, a list of strings, says by which an answer is known to say
that; else PHRASES do. Other fields are left alone.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..atomic import write_text
from ..errors import DataError, InputError
from ..jsonl import read_jsonl
from .shares import Share

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

PHRASES: tuple[str, ...] = (
    "我不知道", "不知道。", "不知道，", "不知道答案", "我也不知道", "我不清楚", "我不了解",
    "没有学过", "没学过", "我的范围", "我无法回答", "我不会回答", "回答不了", "答不上来",
    "i do not know", "i don't know", "don't know that", "do not know the", "i am not sure",
    "i'm not sure", "i cannot answer", "i can't answer", "i have no idea", "outside what i",
)  # fmt: skip
_KNOWN = ("prompt", "messages", "answer", "keywords", "choices", "label", "unknown", "id",
          "unknown_phrases")  # fmt: skip

Message = dict[str, str]
Item = TypeVar("Item")
Watch = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One line; keywords: of each several, any of which will do."""

    line: int
    messages: tuple[Message, ...]
    answer: str | None = None
    keywords: tuple[tuple[str, ...], ...] = ()
    choices: tuple[str, ...] = ()
    label: int = 0
    unknown: bool = False
    id: str = ""

    @property
    def text(self) -> str:
        """What is asked last."""
        return self.messages[-1]["content"]

    @property
    def conversation(self) -> str:
        """All that was said, for a judge."""
        if len(self.messages) == 1:
            return self.text
        return "\n\n".join(f"{m['role']}: {m['content']}" for m in self.messages)

    @property
    def only_chooses(self) -> bool:
        return bool(self.choices) and self.answer is None and not self.keywords

    @property
    def key(self) -> str:
        """What makes it the same question for a golden file."""
        return json.dumps([self.messages, self.choices], ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Tasks:
    questions: list[Question]
    phrases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model made of a question; None where that was not asked.

    text: the greedy answer. choice: the place of the likeliest. refused: it says that it does not
    know. right: by all that the question asks for; None if it asks for nothing.
    """

    question: Question
    text: str | None = None
    choice: int | None = None
    refused: bool = False
    exact: bool | None = None
    keywords: bool | None = None
    chosen: bool | None = None
    right: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "line": self.question.line,
            "messages": list(self.question.messages),
            "text": self.text,
            "choice": self.choice,
            "right": self.right,
            "exact_match": self.exact,
            "keywords": self.keywords,
            "choices": self.chosen,
            "refused": None if self.text is None else self.refused,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Summary:
    """shares: by name, those that the questions ask for. commonest: the answer most often given."""

    shares: dict[str, Share]
    commonest: str


@dataclass(frozen=True)
class Difference:
    """before, after: an answer, or a choice's place; None: the golden file has no such question."""

    question: Question
    before: str | int | None
    after: str | int | None


def normalised(text: str) -> str:
    """White space and case do not count, nor which apostrophe."""
    return " ".join(text.replace("’", "'").split()).casefold()


def read_tasks(path: str | Path, limit: int | None = None) -> Tasks:
    """The first `limit` questions, or all. FileError; DataError, naming the line."""
    path = Path(path)
    questions, phrases = list[Question](), PHRASES
    for number, values in read_jsonl(path, "an object with a prompt or messages"):
        place = f"{path}:{number}"
        if "unknown_phrases" in values:
            if values.keys() != {"unknown_phrases"}:
                raise DataError(f"{place}: unknown_phrases stands on a line of its own; move it")
            phrases = tuple(map(normalised, _strings(place, values, "unknown_phrases")))
        else:
            questions.append(_question(place, number, values))
    if not questions:
        raise DataError(f"{path} has no question in it; a line is an object with a prompt")
    return Tasks(questions[:limit], phrases)


def _question(place: str, number: int, values: dict[str, Any]) -> Question:
    for name in values.keys() - set(_KNOWN):
        if near := difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.75):
            raise DataError(f"{place} has {name!r}: is {near[0]!r} meant? rename one or the other")
    answer, unknown = values.get("answer"), values.get("unknown", False)
    if not isinstance(answer, str | None) or (answer is not None and not answer.strip()):
        raise DataError(f"{place}: answer must be a text (got {answer!r})")
    if not isinstance(unknown, bool):
        raise DataError(f"{place}: unknown must be true or false (got {unknown!r})")
    keywords = tuple(
        tuple(normalised(part) for part in each.split("|") if part.strip())
        for each in _strings(place, values, "keywords")
    )
    if not all(keywords):
        raise DataError(f"{place}: a keyword is empty; fill it or leave it out")
    choices, label = _strings(place, values, "choices"), values.get("label")
    if ("choices" in values) != ("label" in values):
        raise DataError(f"{place}: choices and label belong together; give both or neither")
    if choices and (type(label) is not int or not 0 <= label < len(choices)):
        raise DataError(f"{place}: label must be from 0 to {len(choices) - 1} (got {label!r})")
    if unknown and (answer is not None or keywords or choices):
        raise DataError(f"{place}: what is unknown has no answer, keywords or choices; leave one")
    messages = _messages(place, values)
    return Question(
        line=number,
        messages=messages,
        answer=answer,
        keywords=keywords,
        choices=choices,
        label=label if isinstance(label, int) else 0,
        unknown=unknown,
        id=str(values.get("id", json.dumps(messages))),
    )


def _messages(place: str, values: dict[str, Any]) -> tuple[Message, ...]:
    if ("prompt" in values) == ("messages" in values):
        raise DataError(f"{place} must have either a prompt or messages")
    messages = values.get("messages", [{"role": "user", "content": values.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: messages must be a list of role and content")
    for message in messages:
        known = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not known or not all(isinstance(part, str) for part in message.values()):
            raise DataError(f"{place}: each message must have strings role and content, only those")
        if message["role"] not in ("system", "user", "assistant"):
            raise DataError(f"{place}: role {message['role']!r} is not system, user or assistant")
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise DataError(f"{place} must end with a question, the user's; fill it")
    return tuple(messages)


def _strings(place: str, values: dict[str, Any], name: str) -> tuple[str, ...]:
    found = values.get(name, [])
    if not isinstance(found, list) or not all(isinstance(t, str) and t.strip() for t in found):
        raise DataError(f"{place}: {name} must be a list of texts, none of them empty")
    if name in values and not found:
        raise DataError(f"{place}: {name} is empty; fill it or leave it out")
    return tuple(found)


def answer_tasks(
    model: Transformer,
    tokenizer: Tokenizer,
    tasks: Tasks,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    watch: Watch = lambda batches, count: batches,
) -> list[Answer]:
    """Each question's, in order: greedy, through the chat template where there is one.

    watch: sees the batches as they are done, and how many there are: first of answers, then of
    choices. Raises InputError, naming the line, for a question that fills the model's context.
    """
    from ..generate.batch import chat_prompt, complete_all
    from .scoring import AT_ONCE, score_continuations

    questions = tasks.questions
    prompts = [chat_prompt(tokenizer, question.messages) for question in questions]
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt) >= model.config.max_seq_len:
            raise InputError(
                f"the question in line {question.line} has {len(prompt)} tokens and the model's "
                f"context {model.config.max_seq_len}; shorten it or leave it out"
            )
    asked = [i for i, question in enumerate(questions) if not question.only_chooses]
    texts: dict[int, str] = {}
    batches = complete_all(
        model,
        tokenizer,
        [prompts[i] for i in asked],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    for batch in watch(batches, -(-len(asked) // batch_size)):
        texts |= {asked[number]: row.text for number, row in batch}

    scored = [(i, choice) for i, q in enumerate(questions) for choice in q.choices]
    pairs = [choice_pair(tokenizer, questions[i], choice) for i, choice in scored]
    norms: dict[int, list[float]] = {}
    scores = score_continuations(model, pairs, at_once=AT_ONCE, watch=watch)
    for (i, choice), score in zip(scored, scores, strict=True):
        norms.setdefault(i, []).append(score.logprob / len(choice))
    best = {i: each.index(max(each)) for i, each in norms.items()}
    return [
        judged(question, texts.get(i), best.get(i), tasks.phrases)
        for i, question in enumerate(questions)
    ]


def choice_pair(
    tokenizer: Tokenizer, question: Question, choice: str
) -> tuple[list[int], list[int]]:
    """The question's ids and the choice's after them."""
    from ..generate.batch import chat_prompt
    from .scoring import encode_pair

    if tokenizer.chat_template is not None:
        return chat_prompt(tokenizer, question.messages), tokenizer.encode(choice)
    text = "\n".join(message["content"] for message in question.messages)
    context, continuation = encode_pair(tokenizer, text, choice)
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return context if bos is None else [bos, *context], continuation


def judged(
    question: Question, text: str | None, choice: int | None, phrases: Sequence[str]
) -> Answer:
    """The answer and what is right about it."""
    said = normalised(text or "")
    refused = text is not None and any(phrase in said for phrase in phrases)
    exact = keywords = chosen = None
    if question.answer is not None:
        exact = said == normalised(question.answer)
    if question.keywords:
        keywords = all(any(part in said for part in each) for each in question.keywords)
    if question.choices:
        chosen = choice == question.label
    parts = [part for part in (exact, keywords, chosen) if part is not None]
    right = refused if question.unknown else all(parts) if parts else None
    return Answer(
        question=question,
        text=text,
        choice=choice,
        refused=refused,
        exact=exact,
        keywords=keywords,
        chosen=chosen,
        right=right,
    )


def summarise(answers: Sequence[Answer]) -> Summary:
    """Shares of the questions that ask for it:

    right           by all that a question asks for
    exact_match, keywords, choices
    refusals        out of scope, and said so
    false_refusals  not out of scope, and yet said to be
    commonest       one answer to different questions, refusals aside; of those answered. One
                    sentence for everything is a share of 1.
    """
    columns: dict[str, list[bool | None]] = {
        "right": [answer.right for answer in answers],
        "exact_match": [answer.exact for answer in answers],
        "keywords": [answer.keywords for answer in answers],
        "choices": [answer.chosen for answer in answers],
        "refusals": [answer.refused for answer in answers if answer.question.unknown],
        "false_refusals": [
            answer.refused
            for answer in answers
            if answer.text is not None and not answer.question.unknown
        ],
    }
    shares = {}
    for name, column in columns.items():
        known = [value for value in column if value is not None]
        if known:
            shares[name] = Share(sum(known), len(known))
    given: dict[str, set[str]] = {}
    for answer in answers:
        if answer.text is not None and not answer.refused:
            given.setdefault(normalised(answer.text), set()).add(answer.question.id)
    commonest = max(given, key=lambda text: len(given[text]), default="")
    if given:
        different = len(set[str]().union(*given.values()))
        shares["commonest"] = Share(len(given[commonest]), different)
    return Summary(shares, commonest)


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """A line each, in a new file. FileError."""
    lines = [json.dumps(answer.to_dict(), ensure_ascii=False) for answer in answers]
    write_text(path, "".join(line + "\n" for line in lines))


def write_golden(path: Path, answers: Sequence[Answer]) -> None:
    """What `compare_golden` compares with; an old file is replaced. FileError."""
    lines = [
        json.dumps(
            {"messages": list(a.question.messages), "choices": list(a.question.choices),
             "golden": _golden(a)},
            ensure_ascii=False,
        )
        for a in answers
    ]  # fmt: skip
    write_text(path, "".join(line + "\n" for line in lines), overwrite=True)


def compare_golden(path: Path, answers: Sequence[Answer]) -> list[Difference]:
    """The questions whose answers are no longer those stored, to the letter, or are not stored."""
    stored: dict[str, str | int] = {}
    for number, values in read_jsonl(path, "a golden answer"):
        messages, choices, golden = (values.get(k) for k in ("messages", "choices", "golden"))
        if not isinstance(golden, str | int) or messages is None:
            raise DataError(f"{path}:{number} is no golden answer; write it with --write-golden")
        stored[json.dumps([messages, choices], ensure_ascii=False, sort_keys=True)] = golden
    return [
        Difference(a.question, stored.get(a.question.key), _golden(a))
        for a in answers
        if stored.get(a.question.key) != _golden(a)
    ]


def _golden(answer: Answer) -> str | int | None:
    return answer.choice if answer.text is None else answer.text
