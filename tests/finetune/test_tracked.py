"""`--track` on every stage: what metrics.jsonl gets, the tracker gets, the line before the first
step included."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from prefer_run import PAIRS, SMALL, SUMS, make_model, write_lines
from tiny_run import SETTINGS, config
from tiny_texts import TOY, write_texts

import gpt2llama as g
from gpt2llama.cli.finetune import app
from gpt2llama.cli.main import main
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train import trackers
from gpt2llama.train.run import train
from gpt2llama.train.run_folder import read_metrics

STAGES = ["instruct", "classify", "preference", "reward", "distill"]


class Kept:
    """A tracker that keeps what it hears."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(stage: str, model: Path, data: Path, tmp_path: Path) -> list[object]:
    small = [f"--set={key}={value}" for key, value in SMALL.items()]
    if stage == "instruct":
        talks = [{"instruction": one["prompt"], "output": one["chosen"]} for one in PAIRS]
        path = write_lines(tmp_path / "talks.jsonl", talks)
        return [model, "--data", path, "--held-out", path, *small]
    if stage == "classify":
        tokenizer = train_bpe(["ham and spam"], 264)
        torch.manual_seed(0)
        g.save(g.Transformer(TOY.replace(vocab_size=264)), tokenizer, tmp_path / "base")
        return [tmp_path / "base", "--data", write_texts(tmp_path), *small]
    if stage == "distill":
        train(config(data, steps=2), tmp_path / "teacher")
        fields = [f"--set={key}={value}" for key, value in SETTINGS.items()]
        return ["zh-3m", "--teacher", tmp_path / "teacher", "--data", data, *fields]
    lines = PAIRS if stage == "preference" else SUMS
    path = write_lines(tmp_path / "lines.jsonl", lines)
    short = ["--set=max_new_tokens=5", "--reward=format:[0-9a-f]", "--set=group_size=4"]
    return [
        model,
        "--data",
        path,
        *small,
        *(short if stage == "reward" else []),
        "--set=chat=false",
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage(
    stage: str, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, out = Kept(), tmp_path / "run"
    monkeypatch.setattr(trackers, "load_tracker", lambda name: None)
    monkeypatch.setattr(trackers, "make_tracker", lambda *_: kept)
    words = ["gpt2llama", "finetune", stage, *arguments, "--out", out, "--track", "wandb"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    lines = read_metrics(out)
    assert kept.lines == lines
    assert lines[0]["step"] == (0 if stage in ("preference", "reward") else 1)
    assert any("held_out_loss" in line for line in lines)
    assert kept.closed == 1
    assert json.loads((out / "tracked.json").read_text(encoding="utf-8"))["steps"] == {"wandb": 6}


def test_these_are_all_stages() -> None:
    assert {command.name for command in app.registered_commands} == set(STAGES)
