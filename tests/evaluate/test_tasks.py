"""Questions of a file: what is read, how it is scored, golden answers, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from toy import read_lines, toy, write_lines

import gpt2llama as g
from gpt2llama.errors import DataError, FileError, InputError
from gpt2llama.evaluate.scoring import encode_pair, score_continuations
from gpt2llama.evaluate.shares import Share
from gpt2llama.evaluate.tasks import (
    PHRASES,
    Question,
    answer_tasks,
    choice_pair,
    compare_golden,
    judged,
    read_tasks,
    summarise,
    write_golden,
)


@given(st.integers(1, 500), st.data())
def test_the_interval_is_wilsons(of: int, data: st.DataObject) -> None:
    share = Share(data.draw(st.integers(0, of)), of)
    wanted = stats.binomtest(share.count, of).proportion_ci(0.95, method="wilson")
    assert share.interval == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def question(text: str = "RoPE 是什么？", **how: Any) -> Question:
    return Question(line=1, messages=({"role": "user", "content": text},), id=text, **how)


@pytest.mark.parametrize(
    ("how", "text", "right"),
    [
        ({"answer": "It  is\nRoPE"}, " it is rope ", True),
        ({"answer": "It is RoPE"}, "It is RoPE.", False),
        ({"keywords": (("旋转",), ("相对", "距离"))}, "RoPE 按位置旋转，只看距离。", True),
        ({"keywords": (("旋转",), ("相对", "距离"))}, "RoPE 按位置旋转。", False),
        ({"keywords": (("rotat",),)}, "Rotated by its position.", True),
        ({"unknown": True}, "这个我不知道。我只了解语言模型。", True),
        ({"unknown": True}, "Sorry, I don’t know; ask someone else.", True),
        ({"unknown": True}, "珠穆朗玛峰。", False),
        ({"unknown": True}, "", False),
        ({"answer": "yes", "keywords": (("no",),)}, "yes", False),
        ({}, "anything", None),
    ],
)
def test_what_is_right(how: dict[str, Any], text: str, right: bool | None) -> None:
    assert judged(question(**how), text, None, PHRASES).right is right


def test_a_true_sentence_with_the_words_is_no_refusal() -> None:
    said = "位置信息要另外提供，因为点积只看内容，不知道词元谁先谁后。"
    assert not judged(question(), said, None, PHRASES).refused


def test_the_shares_by_hand() -> None:
    """Of six questions (two of them one fact's wordings) four get one sentence, one is refused."""
    asked = [
        (question("a", keywords=(("x",),)), "x y"),
        (question("b", keywords=(("x",),)), "X  Y"),
        (question("c", answer="z"), "x y"),
        (question("d", unknown=True), "x y"),
        (question("e", unknown=True), "我不知道"),
        (question("f", answer="f"), "我不知道。"),
    ]
    answers = [judged(q, text, None, PHRASES) for q, text in asked]
    answers.append(judged(question("g", choices=("p", "q"), label=1), None, 1, PHRASES))
    found = summarise(answers)
    assert {name: (share.count, share.of) for name, share in found.shares.items()} == {
        "right": (4, 7),
        "exact_match": (0, 2),
        "keywords": (2, 2),
        "choices": (1, 1),
        "refusals": (1, 2),
        "false_refusals": (1, 4),
        "commonest": (4, 4),
    }
    assert found.commonest == "x y"
    same = Question(line=2, messages=asked[0][0].messages, id="b")
    answers = [judged(q, "x y", None, PHRASES) for q in (asked[1][0], same)]
    assert summarise(answers).shares["commonest"] == Share(1, 1)  # wordings of one question


def test_reading(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t.jsonl",
        [
            {"prompt": "一", "keywords": ["a|B", "c"], "topic": "left alone"},
            {"unknown_phrases": ["Keine Ahnung"]},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "二"}],
             "choices": ["x", "y"], "label": 1, "id": "q2"},
            {"prompt": "三", "unknown": True},
        ],
    )  # fmt: skip
    tasks = read_tasks(path)
    assert [q.text for q in tasks.questions] == ["一", "二", "三"]
    assert [q.line for q in tasks.questions] == [1, 3, 4]
    assert tasks.questions[0].keywords == (("a", "b"), ("c",))
    assert (tasks.questions[1].choices, tasks.questions[1].label) == (("x", "y"), 1)
    assert tasks.questions[1].id == "q2"
    assert judged(tasks.questions[2], "keine AHNUNG!", None, tasks.phrases).right
    assert not judged(tasks.questions[2], "我不知道", None, tasks.phrases).right
    assert len(read_tasks(path, limit=2).questions) == 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "x"}, "must have either a prompt or messages"),
        ({"prompt": "x", "messages": []}, "must have either a prompt or messages"),
        ({"prompt": ""}, "must end with a question"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must end with a question"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot' is not"),
        ({"messages": [{"role": "user"}]}, "strings role and content"),
        ({"prompt": "x", "keyword": ["a"]}, "has 'keyword': is 'keywords' meant"),
        ({"prompt": "x", "keywords": "a"}, "keywords must be a list of texts"),
        ({"prompt": "x", "keywords": ["|"]}, "a keyword is empty"),
        ({"prompt": "x", "keywords": []}, "keywords is empty"),
        ({"prompt": "x", "choices": ["a"]}, "choices and label belong together"),
        ({"prompt": "x", "choices": ["a", "b"], "label": 2}, r"label must be from 0 to 1 \(got 2"),
        ({"prompt": "x", "unknown": True, "answer": "y"}, "what is unknown has no answer"),
        ({"prompt": "x", "unknown": 1}, "unknown must be true or false"),
        ({"prompt": "x", "answer": 3}, "answer must be a text"),
        ({"prompt": "x", "unknown_phrases": ["y"]}, "stands on a line of its own"),
        ([1], "must be an object"),
    ],
)
def test_a_bad_line_is_named(row: Any, says: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(DataError, match=rf"t\.jsonl:2\b.*{says}"):
        read_tasks(path)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt"', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        read_tasks(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes('{"prompt": "汉"}'.encode("gb18030"))
    with pytest.raises(DataError, match="is not UTF-8"):
        read_tasks(tmp_path / "b.jsonl")
    path = write_lines(tmp_path / "c.jsonl", [{"unknown_phrases": ["no idea"]}])
    with pytest.raises(DataError, match="has no question in it"):
        read_tasks(path)
    with pytest.raises(FileError, match=r"cannot read .*nowhere"):
        read_tasks(tmp_path / "nowhere.jsonl")


PROMPTS = ["注意力", "a model reads and writes tokens", "词元 tokens 词元", "b", "model 看到"]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_each_answer_is_the_one_it_has_alone(batch_size: int, tmp_path: Path) -> None:
    model, tokenizer = toy()
    path = write_lines(tmp_path / "t.jsonl", [{"prompt": text} for text in PROMPTS])
    seen = list[int]()

    def watch(items: Iterable[Any], count: int) -> Iterable[Any]:
        seen.append(count)
        return items

    answers = answer_tasks(
        model, tokenizer, read_tasks(path), max_new_tokens=9, batch_size=batch_size, watch=watch
    )
    for text, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer.apply_chat([{"role": "user", "content": text}])
        (new,) = g.generate_ids(model, [ids], max_new_tokens=9, stop_ids=tokenizer.stop_ids)
        assert answer.text == tokenizer.decode(new)
    assert len({answer.text for answer in answers}) == len(PROMPTS)  # the toy is sharp
    assert seen[0] == -(-len(PROMPTS) // batch_size)


def by_hand(model: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logprobs = model(torch.tensor([[*context, *rest][-65:][:-1]]))[0].log_softmax(-1)
    logprobs = logprobs[-len(rest) :]
    picked = logprobs.gather(1, torch.tensor(rest)[:, None]).sum().item()
    return picked, logprobs.argmax(-1).tolist() == rest


@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_continuations_in_any_batches(at_once: int) -> None:
    """Any lengths together, one that is cut to the context, an empty one; a greedy one is known."""
    model, _ = toy()
    random = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(300, (a,), generator=random).tolist(),
         torch.randint(300, (b,), generator=random).tolist())
        for a, b in [(3, 2), (20, 1), (1, 7), (60, 9), (80, 3), (1, 64)]
    ]  # fmt: skip
    (said,) = g.generate_ids(model, [[5, 6, 7]], max_new_tokens=4)
    pairs.append(([5, 6, 7], said))
    scores = score_continuations(model, [*pairs, ([4], [])], at_once=at_once)
    assert scores[-1] == (0.0, True)
    for pair, score in zip(pairs, scores, strict=False):
        wanted, greedy = by_hand(model, *pair)
        assert score.logprob == pytest.approx(wanted, rel=1e-5)
        assert score.greedy is greedy
    assert scores[-2].greedy
    with pytest.raises(InputError, match="at least one token"):
        score_continuations(model, [([], [1])])
    with pytest.raises(InputError, match="has 65 tokens"):
        score_continuations(model, [([1], [1] * 65)])


def test_a_pair_is_cut_from_the_whole_text() -> None:
    _, tokenizer = toy()
    context, rest = encode_pair(tokenizer, "a model  ", "reads")
    assert tokenizer.decode(context) == "a model"
    assert context + rest == tokenizer.encode("a model  reads")


@pytest.mark.parametrize("chat", [True, False])
def test_the_likeliest_choice_by_characters(
    chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = toy()
    if not chat:
        monkeypatch.setattr(type(tokenizer), "chat_template", None)
    choices = ["词元", "a model reads and writes", "token", "看到它前面的词元"]
    rows = [{"prompt": text, "choices": choices, "label": 0} for text in PROMPTS]
    path = write_lines(tmp_path / "t.jsonl", rows)
    tasks = read_tasks(path)
    answers = answer_tasks(model, tokenizer, tasks)
    for asked, answer in zip(tasks.questions, answers, strict=True):
        norms = [
            by_hand(model, *choice_pair(tokenizer, asked, choice))[0] / len(choice)
            for choice in choices
        ]
        assert answer.choice == norms.index(max(norms))
        assert answer.text is None
        assert answer.right == (answer.choice == 0)
    context, rest = choice_pair(tokenizer, tasks.questions[0], "词元")
    if chat:
        assert context == tokenizer.apply_chat([{"role": "user", "content": PROMPTS[0]}])
    assert tokenizer.decode(rest) == "词元"


def test_a_question_too_long_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"prompt": "x"}, {"prompt": "model " * 90}])
    with pytest.raises(InputError, match=r"line 2 has \d+ tokens and the model's context 64"):
        answer_tasks(*toy(), read_tasks(path))


def test_golden_answers(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t.jsonl",
        [*({"prompt": text} for text in PROMPTS),
         {"prompt": "x", "choices": ["词元", "token"], "label": 0}],
    )  # fmt: skip
    tasks, golden = read_tasks(path), tmp_path / "golden.jsonl"
    answers = answer_tasks(*toy(), tasks, max_new_tokens=9)
    write_golden(golden, answers)
    assert compare_golden(golden, answers) == []
    assert compare_golden(golden, answers[1:3]) == []
    other = answer_tasks(*toy(seed=4), tasks, max_new_tokens=9)
    changed = [i for i, (a, b) in enumerate(zip(answers, other, strict=True))
               if (a.text, a.choice) != (b.text, b.choice)]  # fmt: skip
    assert changed
    found = compare_golden(golden, other)
    assert [d.question.line for d in found] == [i + 1 for i in changed]
    assert [d.before for d in found] == [answers[i].text or answers[i].choice for i in changed]
    write_golden(golden, other[:2])  # replaced
    assert [d.before for d in compare_golden(golden, other)] == [None] * 4
    write_lines(golden, [{"prompt": "x"}])
    with pytest.raises(DataError, match=r"golden\.jsonl:1 is no golden answer"):
        compare_golden(golden, other)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    g.save(*toy(), folder)
    return folder


def test_the_command(run: Any, model: Path, tmp_path: Path) -> None:
    """A task made of the model's own answers is all right, to the letter."""
    first = write_lines(tmp_path / "first.jsonl", [{"prompt": text} for text in PROMPTS])
    run("eval", model, "--tasks", first, "-n", 9, "--out", tmp_path / "a.jsonl", "--json")
    texts = [row["text"] for row in read_lines(tmp_path / "a.jsonl")]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "answer": text, "keywords": [text[:3].strip() or text]}
        for prompt, text in zip(PROMPTS, texts, strict=True)
        if text.strip()
    ]
    rows += [{"prompt": "c", "unknown": True}]
    second = write_lines(tmp_path / "second.jsonl", rows)
    out, err = run("eval", model, "--tasks", second, "-n", 9, "--json")
    got = json.loads(out)
    assert got["questions"] == len(rows)
    assert got["metrics"]["exact_match"]["rate"] == 1
    assert got["metrics"]["exact_match"]["of"] == len(rows) - 1
    assert got["metrics"]["keywords"]["low"] < 1
    assert got["metrics"]["refusals"] == Share(0, 1).to_dict()
    out, err = run("eval", model, "--tasks", second, "-n", 9, "--limit", 2)
    assert "exact match" in out
    assert "100.0%" in out
    assert "2 questions in" in err


def test_golden_on_the_command_line(run: Any, model: Path, tmp_path: Path) -> None:
    tasks = write_lines(tmp_path / "t.jsonl", [{"prompt": text} for text in PROMPTS])
    golden = tmp_path / "golden.jsonl"
    how = ("eval", model, "--tasks", tasks, "-n", 9, "--golden", golden, "--json")
    run(*how, "--write-golden")
    assert json.loads(run(*how)[0])["golden"] == {"same": 5, "different": []}
    rows = read_lines(golden)
    rows[1]["golden"], rows[3]["golden"] = "something else", rows[3]["golden"] + "!"
    write_lines(golden, rows)
    out, err = run(*how, code=1)
    different = json.loads(out)["golden"]["different"]
    assert [(d["line"], d["question"]) for d in different] == [(2, PROMPTS[1]), (4, PROMPTS[3])]
    assert "'something else' is now" in err
    assert "2 of 5 answers differ" in err


def test_refusals(run: Any, model: Path, tmp_path: Path) -> None:
    tasks = write_lines(tmp_path / "t.jsonl", [{"prompt": "x"}])
    assert "--text, or --tasks" in run("eval", model, code=2)[1]
    run("eval", model, "--tasks", tasks, "--text", tasks, code=2)
    assert (
        "--stride goes with --text"
        in run("eval", model, "--tasks", tasks, "--stride", 2, code=2)[1]
    )
    assert (
        "--limit goes with --tasks" in run("eval", model, "--text", tasks, "--limit", 2, code=2)[1]
    )
    run("eval", model, "--tasks", tasks, "--write-golden", code=2)
    run("eval", model, "--tasks", tasks, "--judge", "http://x/v1", code=2)
    run("eval", model, "--tasks", tasks, "--against", model, code=2)
    run("eval", model, "--tasks", "hellaswag", "--golden", tasks, code=2)
    assert "exists already" in run("eval", model, "--tasks", tasks, "--out", tasks, code=1)[1]
    golden = ("--golden", tmp_path / "none")
    assert "with --write-golden" in run("eval", model, "--tasks", tasks, *golden, code=1)[1]
    said = run("eval", model, "--tasks", tmp_path / "no.jsonl", code=1)[1]
    assert said.count("\n") == 1
    assert "cannot read" in said


def test_lm_eval_that_is_not_there(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "gpt2llama.evaluate.lm_eval", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = run("eval", model, "--tasks", "hellaswag", "--limit", 5, code=1)[1]
    assert said == (
        "gpt2llama: lm-eval is not installed; it comes with: pip install 'gpt2llama[eval]'\n"
    )
