"""`gpt2llama claims`: JSON, one line a claim, a table of 80 columns, and the committed pages."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from gpt2llama.cli._claims_page import Row, Training, page, table
from gpt2llama.evolve.claims import CLAIMS, IN_CHINESE, Finding, trained, training

DOCS = Path(__file__).parents[2] / "docs"
Run = Callable[..., tuple[str, str]]


def test_json_has_every_row_in_order(run: Run) -> None:
    out, _ = run("claims", "--quick", "--json")
    rows = json.loads(out)["claims"]
    assert [row["number"] for row in rows] == list(range(1, 56))
    assert all(list(row) == ["number", "claim", "verdict", "figure", "command"] for row in rows)
    unmeasured = {row["number"] for row in rows if row["verdict"] == "not-measured"}
    assert unmeasured == {8, 9, 13, 14, 23, 28, 29, 32, 39, 44, 46}


def test_picked_rows_are_a_line_each_when_piped(run: Run) -> None:
    out, _ = run("claims", "--number", 18, "--number", 16)
    lines = [line.split("\t") for line in out.splitlines()]
    assert [(line[0], line[2]) for line in lines] == [("18", "true"), ("16", "true")]
    assert "10,737,418,240" in lines[0][3]
    assert lines[0][4] == "gpt2llama claims --quick --number 18"


def test_the_command_of_a_row_makes_that_row(run: Run) -> None:
    _, *arguments = CLAIMS[52].command.split()
    out, _ = run(*arguments, "--json")
    (row,) = json.loads(out)["claims"]
    assert (row["number"], row["verdict"]) == (53, "both")
    assert "3,147,520" in row["figure"]


def test_the_table_keeps_to_80_columns() -> None:
    rows = [Row(claim, claim.check()) for claim in CLAIMS if not claim.times_machine]
    console = Console(width=80, file=io.StringIO())
    console.print(table(rows))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for claim in ("10,737,418,240 and 1,342,177,280", "not-measurable-here", "--number 55"):
        assert claim in text


def test_refusals(run: Run) -> None:
    assert "numbered 1 to 55" in run("claims", "--number", 56, code=1)[1]
    assert "use --quick" in run("claims", "--train", "--number", 18, code=1)[1]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Claims 13 and 14 with models of a few thousand parameters; returns a text for them."""
    sizes = {"n_layers": 1, "n_heads": 2, "n_kv_heads": None, "d_model": 16, "d_ff": 16}
    left_out = {"no positions", "NTK", "llama3"}
    small = [
        dataclasses.replace(
            c, setup=sizes, match="none",
            variants={name: to for name, to in c.variants.items() if name not in left_out},
        )
        for number in (13, 14)
        for c in trained.comparisons_of(number)
    ]  # fmt: skip
    monkeypatch.setattr(trained, "COMPARISONS", tuple(small))
    monkeypatch.setattr(training, "COMPARISONS", tuple(small))
    recipe = training.SHORT_RUN.replace(batch_size=4)
    monkeypatch.setattr(training, "SHORT_RUN", recipe)
    words = [chr(0x4E00 + i) + chr(0x4E00 + 7 * i % 1000) for i in range(1000)]
    rng = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("".join(rng.choice(words) for _ in range(30_000)), encoding="utf-8")
    return text


def test_training_decides_and_goes_on(run: Run, tiny: Path, tmp_path: Path) -> None:
    command = ("claims", "--train", "--number", 13, "--number", 14, "--data", tiny, "--seeds", 2,
               "--tokens", 16_000, "--out", tmp_path / "runs")  # fmt: skip
    out, err = run(*command, "--dry-run")
    assert out == ""
    assert json.loads(run(*command, "--dry-run", "--json")[0])["left"] == 14
    assert "14 different runs of 15,872 tokens, 14 of them left, about" in err
    assert not (tmp_path / "runs" / "runs").exists()
    out, err = run(*command, "--json")
    values = json.loads(out)
    assert [row["number"] for row in values["claims"]] == [13, 14]
    assert all(row["verdict"] in IN_CHINESE for row in values["claims"])
    assert "learned undefined" in values["claims"][0]["figure"]
    assert values["training"]["steps"] == 31
    assert "14/14" in err
    assert "holds work on another text than sanguo" in run(*command, "--data", "sanguo", code=1)[1]
    again, err = run(*command, "--json")
    assert json.loads(again) == values
    assert "0 of them left" in err
    for language, chart in (("en", "long-context.svg"), ("zh", "long-context.zh.svg")):
        text, _ = run(*command, "--markdown", language)
        flags = f"--data {tiny} --tokens 16000 --seeds 2"
        assert f"\ngpt2llama claims --train {flags} --markdown {language}\n" in text
        assert f"`gpt2llama claims --train --number 13 {flags}`" in text
        assert "15,872" in text
        assert f"({chart})" in text
        assert ">YaRN</text>" in (tmp_path / "runs" / chart).read_text(encoding="utf-8")


def test_too_little_to_train_on(run: Run, tmp_path: Path) -> None:
    command = ("claims", "--train", "--number", 8, "--out", tmp_path / "runs")
    assert "61,440 at least" in run(*command, "--tokens", 1000, code=1)[1]
    assert "an interval needs 2" in run(*command, "--seeds", 1, code=1)[1]


def test_arithmetic_needs_no_torch() -> None:
    script = (
        "import sys; from gpt2llama.evolve.claims import CLAIMS; "
        "print(CLAIMS[17].check().verdict, CLAIMS[52].check().verdict, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["true", "both", "False"]


@pytest.mark.parametrize(("language", "name"), [("en", "claims.md"), ("zh", "claims.zh.md")])
def test_the_committed_page_is_what_the_code_gives(
    language: Literal["en", "zh"], name: str
) -> None:
    """But for the machine's speeds, and the trained rows, which all have a result."""
    committed = (DOCS / name).read_text(encoding="utf-8")
    training = Training(tokens=0, steps=0, seeds=5, corpus="", cpu="", chart=True)
    moving = {claim.number for claim in CLAIMS if claim.times_machine or claim.trained}
    found = [Finding("true", "", "") if c.number in moving else c.check() for c in CLAIMS]
    now = page(list(map(Row, CLAIMS, found)), language, training)
    assert len(committed.splitlines()) == len(now.splitlines())
    for there, here in zip(committed.splitlines(), now.splitlines(), strict=True):
        row = re.match(r"\| (\d+) \|", here)
        if row and int(row[1]) in moving:
            cells, empty = there.split(" | "), here.split(" | ")
            assert (cells[0], cells[1], cells[-1]) == (empty[0], empty[1], empty[-1])
            assert cells[2] not in ("not-measured", IN_CHINESE["not-measured"])
        elif not here.startswith(("Rows 8, 9", "第 8、9")):  # says when and where
            assert there == here
    drawn = re.findall(r"\((long-context[.\w]*svg)\)", committed)
    assert drawn
    assert ">YaRN</text>" in (DOCS / drawn[0]).read_text(encoding="utf-8")
