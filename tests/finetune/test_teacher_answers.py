"""A teacher's answers as data: what is read, what is left out, and going on after a stop."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from toy import toy
from typer.testing import CliRunner

import gpt2llama as g
from gpt2llama.cli._finetune_distill import distill as command
from gpt2llama.errors import DataError, FileError, InputError
from gpt2llama.finetune.teacher_answers import read_prompts, write_answers
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import BPETokenizer

Teacher = tuple[Transformer, BPETokenizer]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return toy()


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"{'注意力 tokens'[i % 5 :]} {i}" * (1 + i % 2)}]
        for i in range(count)
    ]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_answer_is_the_greedy_one(teacher: Teacher, tmp_path: Path) -> None:
    model, tokenizer = teacher
    asked = prompts(20)
    done = write_answers(*teacher, asked, tmp_path / "a.jsonl", max_new_tokens=12, batch_size=3)
    kept, empty, cut_off = list[Any](), 0, 0
    for messages in asked:
        ids = tokenizer.apply_chat(messages)
        (new,) = g.generate_ids(model, [ids], max_new_tokens=12, stop_ids=tokenizer.stop_ids)
        text = tokenizer.decode(new)
        if not text.strip():
            empty += 1
        elif len(new) == 12 or len(ids) + len(new) == 64:
            cut_off += 1
        else:
            kept.append({"messages": [*messages, {"role": "assistant", "content": text}]})
    assert lines(tmp_path / "a.jsonl") == kept
    assert (done.written, done.empty, done.cut_off) == (len(kept), empty, cut_off)
    assert min(len(kept), cut_off) > 0  # the toy teacher shows both
    assert not [*tmp_path.glob("*.partial")]


def test_it_goes_on_where_it_stopped(teacher: Teacher, tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 2}
    asked, out = prompts(40), tmp_path / "parts.jsonl"
    write_answers(*teacher, asked, tmp_path / "whole.jsonl", **how)

    def stop(done: int, count: int) -> None:
        if done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(*teacher, asked, out, watch=stop, **how)
    partial = tmp_path / "parts.jsonl.partial"
    with partial.open("ab") as file:
        file.write(b'{"messages": [{"ro')  # as a kill would leave it
    with pytest.raises(FileError, match="go on with --resume, or delete it"):
        write_answers(*teacher, asked, out, **how)
    with pytest.raises(InputError, match="begun with another teacher, prompts or settings"):
        write_answers(*teacher, asked[1:], out, resume=True, **how)
    begun = list[int]()
    write_answers(*teacher, asked, out, resume=True, watch=lambda n, _: begun.append(n), **how)
    assert begun[0] == 32
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    with pytest.raises(FileError, match="exists already"):
        write_answers(*teacher, asked, out, **how)


def test_the_shapes_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows: list[Any] = [
        {"prompt": "一"},
        {"instruction": "二", "input": "三", "output": "x"},
        {"instruction": "四"},
        {"messages": [{"role": "user", "content": "五"}, {"role": "assistant", "content": "y"}]},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    assert [m[-1]["content"] for m in read_prompts(file)] == ["一", "二\n三", "四", "五"]
    assert all(m[-1]["role"] == "user" for m in read_prompts(file))
    (tmp_path / "p.txt").write_text("一\n\n 二 \n", encoding="utf-8")
    assert [m[0]["content"] for m in read_prompts(tmp_path / "p.txt")] == ["一", "二"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"p\.jsonl:2 is not JSON"),
        ("[]", r"p\.jsonl:2 must be an object"),
        ('{"text": "x"}', r"p\.jsonl:2 must be an object.*'instruction'"),
        ('{"prompt": 3}', r"p\.jsonl:2 must be an object"),
        ('{"prompt": " "}', r"p\.jsonl:2 has no question"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"p\.jsonl:2 has no question"),
    ],
)
def test_a_bad_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=says):
        read_prompts(tmp_path / "p.jsonl")


def test_a_prompt_too_long(teacher: Teacher, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "model " * 80}]
    with pytest.raises(InputError, match=r"prompt 2 has \d+ tokens and the teacher's context 64"):
        write_answers(*teacher, [*prompts(1), long], tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]


def test_no_answer_is_an_error(teacher: Teacher, tmp_path: Path) -> None:
    """What is wrong with them is said, and nothing is left lying there."""
    model, tokenizer = teacher
    cut = r"from: 3 cut off at max_new_tokens=1 or the context; raise max_new_tokens \(-n\)"
    with pytest.raises(DataError, match=cut):
        write_answers(*teacher, prompts(3), tmp_path / "a.jsonl", max_new_tokens=1)
    silent = copy.deepcopy(model)
    torch.nn.init.zeros_(silent.lm_head.weight)
    assert tokenizer.eos_id == 0  # the likeliest where all are alike
    with pytest.raises(DataError, match=r"from: 1 empty; take a teacher that was tuned"):
        write_answers(silent, tokenizer, prompts(1), tmp_path / "b.jsonl", max_new_tokens=3)
    with pytest.raises(InputError, match="there is no prompt"):
        write_answers(*teacher, [], tmp_path / "c.jsonl")
    assert not [*tmp_path.iterdir()]


def test_the_command(teacher: Teacher, tmp_path: Path) -> None:
    g.save(*teacher, tmp_path / "teacher")
    (tmp_path / "p.txt").write_text("\n".join(m[0]["content"] for m in prompts(9)), "utf-8")
    app = typer.Typer()
    app.command()(command)
    said = CliRunner().invoke(
        app,
        ["--teacher", str(tmp_path / "teacher"), "--prompts", str(tmp_path / "p.txt"), "--out",
         str(tmp_path / "a.jsonl"), "-n", "12", "--json"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    written = json.loads(said.stdout)
    assert written["written"] == len(lines(tmp_path / "a.jsonl")) > 0
    assert written["written"] + written["empty"] + written["cut_off"] == 9
