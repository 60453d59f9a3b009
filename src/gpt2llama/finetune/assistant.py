"""The data set of the small assistant: facts about language models, small talk, sums, and what it
does not know. Written for this project; the texts lie in data/assistant/*.toml.

Each fact has over a hundred wordings, written one by one (`ask`), and names that fit into the
templates of its intent (what, why, how …). Other wordings, questions outside the subject (both
`held`) and sums are held out: no model has seen them, nor had who wrote most of `ask`.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from ..generate import generate_ids
from .examples import Example, to_example

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

FACTS = ("architecture", "training", "inference", "tuning", "smalltalk")
TEMPLATED = 6  # wordings of a fact by template, in each language
SUMS, HELD_SUMS = 2800, 200
WHOLE = 9  # wordings of each answer that teach all of it
TURNS, GO_ON = 3, 0.6  # of a conversation, at most; how often a whole answer is followed by another
MAX_ANSWER = 64  # tokens; the longest has 50
SEED = 2024  # of what is drawn by lot: templates, sums, refusals
REFUSALS = {"": "我不知道", "_en": "do not know"}  # no fact's answer has these
_SUM_ZH = (
    "{a}+{b}等于多少？", "{a}加{b}是多少", "请算一下{a}+{b}", "{a}+{b}=?", "{a}加上{b}得几？",
    "帮我算{a}+{b}",
)  # fmt: skip
_SUM_EN = ("What is {a}+{b}?", "{a} plus {b} is what?")


@dataclass(frozen=True)
class Question:
    """keywords: each must be in a right answer; `a|b`: either. Of a sum the whole last number.
    earlier: the messages before it, if it is not a chat's first."""

    kind: Literal["fact", "talk", "sum", "unknown"]
    about: str  # the fact's id, the group's topic, or the sum
    ask: str
    answer: str
    keywords: tuple[str, ...] = ()
    english: bool = False
    earlier: tuple[dict[str, str], ...] = ()

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [*self.earlier, {"role": "user", "content": self.ask}]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self.prompt, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Assistant:
    train: list[Question] = field(default_factory=list)
    held_out: list[Question] = field(default_factory=list)


def assistant() -> Assistant:
    """The same split at every call. No question of `held_out` is in `train`, whatever its marks.

    Nor is a question that has two answers, as a name may make one by a template.
    """
    data, rng = Assistant(), random.Random(SEED)
    _facts(data, rng)
    _unknown(data, rng)
    _sums(data, rng)
    answers: dict[str, str] = {}
    seen = {normalised(question.ask) for question in data.train}
    double = set()
    for question in data.train + data.held_out:
        ask = normalised(question.ask)
        if answers.setdefault(ask, question.answer) != question.answer:
            double.add(ask)
    unique = {normalised(q.ask): q for q in data.train if normalised(q.ask) not in double}
    held_out = [q for q in data.held_out if normalised(q.ask) not in seen | double]
    return Assistant(list(unique.values()), held_out)


def to_learn(tokenizer: Tokenizer, questions: Sequence[Question], seq_len: int) -> list[Example]:
    """An epoch, none of its examples longer than a context of seq_len. A few wordings of an answer
    (of a sum's, the one) teach all of it, and follow each other in conversations; the others only
    its first tokens until no other answer begins so: a wording decides no more, and they cost a
    third. Refusals begin alike: which one it is cannot be learned."""
    rng, examples = random.Random(SEED), list[Example]()
    asked = defaultdict[str, list[Question]](list)
    known = {question.answer for question in questions if question.kind != "unknown"}
    refusals = {question.answer for question in questions if question.kind == "unknown"}
    ends = _telling(tokenizer, known)
    ends |= {answer: _telling(tokenizer, known | {answer})[answer] for answer in refusals}
    for question in questions:
        asked[question.answer].append(question)
    for answer, wordings in asked.items():
        rng.shuffle(wordings)
        for question in wordings[WHOLE:]:
            example = to_example(tokenizer, question.messages)
            end = example.learned.index(True) + ends[answer]
            examples.append(Example(example.ids[:end], example.learned[:end]))
    whole = [question for wordings in asked.values() for question in wordings[:WHOLE]]
    rng.shuffle(whole)
    talk, turns = list[dict[str, str]](), 0
    for said in [*(question.messages for question in whole), []]:
        if said and turns in range(1, TURNS) and rng.random() < GO_ON:
            longer = talk + said
            if len(to_example(tokenizer, longer).ids) <= seq_len:
                talk, turns = longer, turns + 1
                continue
        if talk:
            examples.append(to_example(tokenizer, talk))
        talk, turns = said, 1
    return [example for example in examples if len(example.ids) - 1 <= seq_len]


def _telling(tokenizer: Tokenizer, answers: Collection[str]) -> dict[str, int]:
    """Of each answer, how many tokens tell it from all others."""
    ids = sorted((tokenizer.encode(answer), answer) for answer in answers)
    tell = dict.fromkeys(answers, 1)
    for (a, first), (b, second) in itertools.pairwise(ids):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        tell[first], tell[second] = max(tell[first], same + 1), max(tell[second], same + 1)
    return tell


def texts() -> str:
    """What a tokenizer should know: each answer once, and the training part's questions."""
    known = [question for question in assistant().train if question.kind != "sum"]
    return "\n".join([*dict.fromkeys(q.answer for q in known), *(q.ask for q in known)])


def normalised(ask: str) -> str:
    """Without white space, marks and case: what makes two questions one."""
    return "".join(c for c in ask.lower() if c.isalnum() or c in "+-*/=")


def _read(name: str) -> dict[str, Any]:
    path = files("gpt2llama.data").joinpath("assistant", f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _facts(data: Assistant, rng: random.Random) -> None:
    templates = _read("templates")
    for name in FACTS:
        for fact in _read(name)["fact"]:
            for suffix, language in (("", "zh"), ("_en", "en")):
                if f"answer{suffix}" not in fact:
                    continue
                data.train.extend(_asked(name, fact, suffix, fact[f"ask{suffix}"]))
                data.held_out.extend(_asked(name, fact, suffix, fact[f"held{suffix}"]))
                ways = templates[fact["intent"]][language] if "intent" in fact else []
                made = [way.format(x=x) for x in fact.get(f"names{suffix}", []) for way in ways]
                chosen = rng.sample(made, min(TEMPLATED, len(made)))
                data.train.extend(_asked(name, fact, suffix, chosen))


def _asked(name: str, fact: dict[str, Any], suffix: str, wordings: Sequence[str]) -> list[Question]:
    kind: Literal["fact", "talk"] = "talk" if name == "smalltalk" else "fact"
    answer, keywords = fact[f"answer{suffix}"], tuple(fact[f"keywords{suffix}"])
    return [Question(kind, fact["id"], w, answer, keywords, suffix == "_en") for w in wordings]


def _unknown(data: Assistant, rng: random.Random) -> None:
    """One refusal for a question, in its language, drawn by lot: none is the answer to all."""
    found = _read("unknown")
    for group in found["group"]:
        for suffix, words in REFUSALS.items():
            for key, part in (("ask", data.train), ("held", data.held_out)):
                for ask in group.get(key + suffix, ()):
                    answer = rng.choice(found[f"answers{suffix}"])
                    english = suffix == "_en"
                    part.append(Question("unknown", group["topic"], ask, answer, (words,), english))


def _sums(data: Assistant, rng: random.Random) -> None:
    """Of two numbers below 100, most of two digits; the held-out pairs in neither order."""
    pairs = [(a, b) for a in range(100) for b in range(a, 100) if a + b > 9]
    rng.shuffle(pairs)
    two_digits = [pair for pair in pairs if min(pair) > 9]
    held = set(two_digits[:HELD_SUMS])
    taught = [pair for pair in pairs if pair not in held][:SUMS]
    for number, (a, b) in enumerate([*taught, *sorted(held)]):
        if rng.random() < 0.5:
            a, b = b, a
        english = number % 8 == 7
        ask = rng.choice(_SUM_EN if english else _SUM_ZH).format(a=a, b=b)
        answer = worked_sum(a, b, english)
        question = Question("sum", f"{a}+{b}", ask, answer, (str(a + b),), english)
        (data.train if number < len(taught) else data.held_out).append(question)


def worked_sum(a: int, b: int, english: bool = False) -> str:
    """The steps as one writes them: ones, carry, tens, and the sum at the end."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    if english:
        steps = f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}+{carry}={tens + carry}, "
        return f"{steps}so {a}+{b}={a + b}."
    steps = f"个位{a % 10}+{b % 10}={ones}，十位{a // 10}+{b // 10}+{carry}={tens + carry}，"
    return f"{steps}所以{a}+{b}={a + b}。"


# ---- how well it answers ----


def is_right(question: Question, answer: str) -> bool:
    """Every keyword is there; of a sum, the last number is the sum."""
    if question.kind == "sum":
        numbers = re.findall(r"[0-9]+", answer)
        return numbers[-1:] == list(question.keywords)
    answer = answer.lower()
    return all(any(word in answer for word in key.lower().split("|")) for key in question.keywords)


def asked_second(
    tokenizer: Tokenizer, questions: Sequence[Question], seq_len: int, every: int = 8
) -> list[Question]:
    """An eighth of those that have an answer, each behind another with its, if there is room."""
    known, rng = [q for q in questions if q.kind in ("fact", "talk")], random.Random(SEED)
    seconds = []
    for question in known[::every]:
        before = rng.choice([other for other in known if other.about != question.about])
        seconds.append(replace(question, earlier=tuple(before.messages)))
    room = seq_len - MAX_ANSWER
    return [q for q in seconds if len(tokenizer.apply_chat(q.prompt)) <= room]


@dataclass(frozen=True)
class Score:
    """Shares of the held-out questions. commonest: the answer given to most of the different
    questions, refusals aside, and its share of all; refused: of questions that have an answer,
    those it claimed not to know."""

    wordings: float
    sums: float
    unknown: float
    refused: float
    commonest: tuple[str, float]
    answers: list[str]  # in the order of the questions


def score(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    at_once: int = 64,
    watch: Callable[[int], None] = lambda done: None,
) -> Score:
    """Greedy answers through the chat template; `watch` is told how many there are so far."""
    answers: list[str] = []
    for at in range(0, len(questions), at_once):
        prompts = [tokenizer.apply_chat(q.prompt) for q in questions[at : at + at_once]]
        new = generate_ids(model, prompts, max_new_tokens=MAX_ANSWER, stop_ids=tokenizer.stop_ids)
        answers += map(tokenizer.decode, new)
        watch(len(answers))
    pairs = list(zip(questions, answers, strict=True))
    words = "|".join(REFUSALS.values()).split("|")
    refusals = [any(word in answer for word in words) for answer in answers]
    known = [no for (q, _), no in zip(pairs, refusals, strict=True) if q.kind != "unknown"]
    said = Counter(answer for answer, no in zip(answers, refusals, strict=True) if not no)
    top, count = said.most_common(1)[0] if said else ("", 0)

    def share(*kinds: str) -> float:
        right = [is_right(q, answer) for q, answer in pairs if q.kind in kinds]
        return sum(right) / max(1, len(right))

    return Score(
        wordings=share("fact", "talk"),
        sums=share("sum"),
        unknown=share("unknown"),
        refused=sum(known) / max(1, len(known)),
        commonest=(top, count / len(questions)),
        answers=answers,
    )
