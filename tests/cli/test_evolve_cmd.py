"""`gpt2llama evolve` from a text to a report, on models of a few thousand parameters."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gpt2llama.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=280, max_seq_len=16, n_layers=1, n_heads=2, d_model=16, d_ff=32, norm="layernorm",
    position="learned", activation="gelu_tanh", gated_mlp=False,
)  # fmt: skip
PRESETS = {
    "tiny-gpt": TINY,
    "tiny-llama": TINY.replace(norm="rmsnorm", position="rope"),
    "other-words": TINY.replace(vocab_size=300),
}


@pytest.fixture
def ask(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("gpt2llama.evolve.design.preset", PRESETS.__getitem__)
    words, chance = ["曹操", "玄德", "引军", "the model", "reads"], random.Random(0)
    text = "".join(chance.choice(words) + chance.choice("。\n， ") for _ in range(3000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    how = ["--base", "tiny-gpt", "--to", "tiny-llama", "--seeds", 2, "--out", tmp_path / "out"]
    how += ["--data", tmp_path / "text.txt"]

    def ask(*more: object, code: int = 0) -> tuple[str, str]:
        found: tuple[str, str] = run("evolve", *how, *more, code=code)
        return found

    return ask


def test_from_a_text_to_a_report(ask: Any, tmp_path: Path) -> None:
    out, err = ask("--tokens", 30 * 256, "--json")
    results = json.loads(out)
    assert [rung["name"] for rung in results["rungs"]] == ["tiny-gpt", "rmsnorm", "rope"]
    assert [rung["previous"] for rung in results["rungs"]] == [None, "tiny-gpt", "rmsnorm"]
    assert (results["steps"], results["tokens"], results["seeds"]) == (30, 7680, [0, 1])
    for rung in results["rungs"][1:]:
        assert rung["low"] < rung["difference"] < rung["high"]
        assert rung["verdict"] in ("helps", "hurts", "no difference shown")
    assert "6/6 rope, seed 1" in err
    folder = tmp_path / "out"
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == results
    with (folder / "report.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 3
    for name in ("report.md", "report.zh.md", "report.html", "ladder.svg"):
        assert "rmsnorm" in (folder / name).read_text(encoding="utf-8")
    again = json.loads(ask("--resume", "--json")[0])
    assert again["rungs"] == results["rungs"]
    assert again["command"] == results["command"]
    assert "holds a sweep; go on with --resume" in ask("--tokens", 7680, code=1)[1]


def test_what_was_not_begun_is_not_resumed(ask: Any) -> None:
    assert "holds no sweep to resume" in ask("--resume", code=1)[1]


def test_a_factorial_with_tuned_rates(ask: Any) -> None:
    how = ["--design", "factorial", "--tokens", 7680, "--tune-lr", "--json"]
    results = json.loads(ask(*how)[0])
    assert [rung["levels"] for rung in results["rungs"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    names = [effect["name"] for effect in results["effects"]]
    assert names == ["rmsnorm", "rope", "rmsnorm × rope"]
    rates = [{run["lr"] for run in rung["runs"]} for rung in results["rungs"]]
    assert all(len(found) == 1 and found <= {1.5e-3, 3e-3, 6e-3} for found in rates)


def test_a_dry_run_trains_nothing(ask: Any, tmp_path: Path) -> None:
    out, err = ask("--minutes", 5, "--dry-run", "--json")
    planned = json.loads(out)
    assert planned["rungs"] == ["tiny-gpt", "rmsnorm", "rope"]
    assert planned["steps"] >= 30
    assert 0.5 * 300 < planned["seconds"] < 300
    assert "layernorm" in err
    assert not (tmp_path / "out" / "plan.json").exists()
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--tokens", 100], "a run of 1 step is too short"),
        (["--tokens", 1, "--minutes", 1], "give either --tokens or --minutes"),
        (["--seeds", 0], "--seeds must be at least 1"),
        (["--to", "other-words"], "has a vocabulary of 280 and other-words one of 300"),
        (["--to", "tiny-gpt"], "differ in nothing"),
        (["--design", "stairs"], "the design must be one of"),
        (["--match", "size"], "--match must be one of"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input(ask: Any, more: list[Any], says: str) -> None:
    _, err = ask(*more, code=1)
    assert says in err.splitlines()[-1]
