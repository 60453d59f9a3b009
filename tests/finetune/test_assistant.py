"""The data set that ships: its facts, its split, and that nothing leaks."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest

from gpt2llama.finetune.assistant import (
    REFUSALS,
    WHOLE,
    Question,
    asked_second,
    assistant,
    normalised,
    score,
    texts,
    to_learn,
    worked_sum,
)
from gpt2llama.tokenizer import train_bpe


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
    assert 0.05 < english < 0.25


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
    refusals = set("|".join(REFUSALS.values()).split("|"))
    assert all(any(word in q.answer for word in refusals) for q in of(data.train, "unknown"))
    assert not [a for a, _, _ in by_answer if any(word in a.lower() for word in refusals)]


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


def test_what_is_learned_of_a_question() -> None:
    """Mostly how the answer begins, until no other does so; whole answers and sums are chats. Of
    refusals, which begin alike, only what tells one from an answer."""
    data = assistant()
    tokenizer = train_bpe([texts()], 600)
    some = [q for kind in ("fact", "sum", "unknown") for q in of(data.train, kind)[:200]]
    learned = to_learn(tokenizer, some, 200)
    end = tokenizer.apply_chat(some[0].messages[:1])[-2]
    asked = {normalised(q.ask): q for q in some}
    answers = {q.answer: tokenizer.encode(q.answer) for q in some}
    refusals = {q.ask: q.english for q in of(some, "unknown")}
    whole: Counter[str] = Counter()
    cut, turns = 0, Counter[int]()
    for example in learned:
        texts_ = [tokenizer.decode(part) for part in split(example.ids, end)]
        said = [text.removeprefix("<|user|>").removeprefix("<|assistant|>") for text in texts_]
        taught = [id for id, on in zip(example.ids, example.learned, strict=True) if on]
        if example.ids[-1] != end:
            cut += 1
            answer, refused = asked[normalised(said[0])].answer, said[0] in refusals
            assert taught == answers[answer][: len(taught)]
            others = [answers[q.answer] for q in some if q.answer != answer]
            if refused:
                alike = [q for q in some if refusals.get(q.ask) == refusals[said[0]]]
                assert all(answers[q.answer][: len(taught)] == taught for q in alike)
                others = [answers[q.answer] for q in some if q.ask not in refusals]
            assert all(ids[: len(taught)] != taught for ids in others)
            assert not taught[:-1] or any(ids[: len(taught) - 1] == taught[:-1] for ids in others)
            assert len(said) == 2
            assert len(taught) < 12
        else:
            turns[len(said) // 2] += 1
            whole.update(said[::2])
            assert taught == [id for text in said[1::2] for id in (*tokenizer.encode(text), end)]
            assert [asked[normalised(ask)].answer for ask in said[::2]] == said[1::2]
        assert len(example.ids) <= 201
    assert sum(whole.values()) + cut == 600
    assert set(whole.values()) == {1}
    of_each = Counter(asked[normalised(ask)].answer for ask in whole)
    assert of_each == {a: min(WHOLE, n) for a, n in Counter(q.answer for q in some).items()}
    assert set(turns) == {1, 2, 3}


def split(ids: list[int], end: int) -> list[list[int]]:
    return [list(part) for is_end, part in itertools.groupby(ids, end.__eq__) if not is_end]


def test_scores_count_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [
        Question("fact", "a", "A?", "旋转", ("旋转|转",)),
        Question("talk", "b", "B?", "您好", ("您好",)),
        Question("sum", "1+2", "1+2?", "1+2=3。", ("3",)),
        Question("sum", "1+3", "1+3?", "1+3=4。", ("4",)),
        Question("unknown", "c", "C?", "不知道", ("不知道",)),
        Question("fact", "d", "D?", "Q and K", ("q and k",), english=True),
    ]
    said = ["会转。", "我不知道。", "1+2=4，所以3。", "1+3=4，不对，5", "不知道", "会转。"]
    monkeypatch.setattr(
        "gpt2llama.finetune.assistant.generate_ids",
        lambda model, prompts, **_: [list(said[n].encode()) for (n,) in prompts],
    )

    class Echo:
        stop_ids = frozenset({0})
        asked = iter(range(len(said)))

        def apply_chat(self, messages: list[dict[str, str]]) -> list[int]:
            return [next(self.asked)]

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    found = score(None, Echo(), questions, at_once=4)  # type: ignore[arg-type]  # stand-ins
    assert found.answers == said
    assert (found.wordings, found.sums, found.unknown) == (1 / 3, 1 / 2, 1)
    assert found.refused == 1 / 5
    assert found.commonest == ("会转。", 2 / 6)


def test_second_questions_have_room_for_an_answer() -> None:
    tokenizer, held_out = train_bpe([texts()], 600), assistant().held_out
    seconds = asked_second(tokenizer, held_out, 160, every=40)
    assert 10 < len(seconds) <= len(of(held_out, "fact", "talk")) / 40 + 1
    for q in seconds:
        assert [message["role"] for message in q.messages] == ["user", "assistant"] * 2
        assert q.messages[2]["content"] == q.ask
        assert q.messages[1]["content"] != q.answer
        assert len(tokenizer.apply_chat(q.prompt)) <= 160 - 64
    assert seconds == asked_second(tokenizer, held_out, 160, every=40)
    assert not asked_second(tokenizer, held_out, 64)
