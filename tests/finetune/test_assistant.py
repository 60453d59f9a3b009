"""The data set that ships: its facts, its split, and that nothing leaks."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from gpt2llama.finetune.assistant import Question, assistant, normalised, worked_sum


def of(questions: list[Question], *kinds: str) -> list[Question]:
    return [q for q in questions if q.kind in kinds]


def test_sizes() -> None:
    data = assistant()
    facts = {q.about for q in of(data.train, "fact")}
    assert len(facts) >= 300
    wordings = Counter(q.about for q in of(data.train + data.held_out, "fact") if not q.english)
    assert min(wordings.values()) >= 8
    assert len(data.train) >= 3000
    assert len(of(data.held_out, "unknown")) >= 200
    assert len(of(data.held_out, "sum")) >= 200
    english = sum(q.english for q in data.train) / len(data.train)
    assert 0.1 < english < 0.25


def test_nothing_held_out_is_in_training() -> None:
    data = assistant()
    seen = {normalised(q.ask) for q in data.train}
    assert not [q.ask for q in data.held_out if normalised(q.ask) in seen]
    sums = {frozenset(q.about.split("+")) for q in of(data.train, "sum")}
    assert not [q for q in of(data.held_out, "sum") if frozenset(q.about.split("+")) in sums]
    held = of(data.held_out, "sum")
    assert all(10 <= int(n) <= 99 for q in held for n in q.about.split("+"))


def test_no_question_has_two_answers() -> None:
    answers = defaultdict(set)
    for q in assistant().train + assistant().held_out:
        if q.kind != "unknown":
            answers[normalised(q.ask)].add(q.answer)
    assert not {ask: found for ask, found in answers.items() if len(found) > 1}


def test_keywords_are_in_their_answers_and_tell_facts_apart() -> None:
    data = assistant()
    by_answer = {(q.answer, q.keywords, q.english) for q in of(data.train, "fact", "talk")}

    def right(answer: str, keywords: tuple[str, ...]) -> bool:
        return all(any(w in answer.lower() for w in k.lower().split("|")) for k in keywords)

    assert all(right(answer, keywords) for answer, keywords, _ in by_answer)
    answers = {(answer, english) for answer, _, english in by_answer}
    loose = [
        (answer, other)
        for answer, keywords, english in by_answer
        for other, its in answers
        if other != answer and its == english and right(other, keywords)
    ]
    assert not loose


def test_the_split_is_always_the_same() -> None:
    assert assistant() == assistant()


@pytest.mark.parametrize(("a", "b"), [(0, 99), (99, 99), (10, 10), (47, 58), (5, 5)])
def test_worked_sums_are_right(a: int, b: int) -> None:
    """Each equation in the text, read back."""
    for english in (False, True):
        text = worked_sum(a, b, english)
        for part in text.replace("，", ",").replace("。", "").rstrip(".").split(","):
            left, _, value = part.strip(" soabcdefghijklmnpqrtuvwxyz个位十所以").partition("=")
            assert sum(map(int, left.split("+"))) == int(value)
        assert text.rstrip("。.").endswith(f"={a + b}")
