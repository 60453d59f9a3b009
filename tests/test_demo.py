"""The demo, made tiny: no network, a model of two small layers, a second of training."""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama import demo as room
from gpt2llama.errors import AssetError, FileError, InputError
from gpt2llama.finetune.assistant import Assistant, assistant
from gpt2llama.train.config import RunConfig, learning_rate
from gpt2llama.train.metrics import evaluate_text
from gpt2llama.train.run_folder import read_metrics


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str, **_: Any) -> Path:
        raise AssetError("no network here")

    small = g.preset("zh-3m").replace(
        n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, d_ff=48, vocab_size=600
    )
    monkeypatch.setattr(room, "MODEL", small)
    monkeypatch.setattr("gpt2llama.corpus.fetch", no_network)
    monkeypatch.setattr(room, "gemm_limit", lambda dtype: 1e12)  # enough for dropout to be on


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return g.load(folder)[0].state_dict()


def test_it_scores_what_it_trained_and_resumes_to_the_bit(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "demo"
    result = room.demo(out, 0.05, tune=False, say=said.append)

    assert result.corpus == "prose"
    assert any("small text that ships" in line for line in said)
    held_out = (out / "data" / "held-out.txt").read_bytes().decode("utf-8")
    assert result.held_out_bytes == len(held_out.encode("utf-8"))
    model, tokenizer = g.load(out)
    assert tokenizer is not None
    assert model.config.dropout > 0
    assert evaluate_text(model, tokenizer, held_out).bits_per_byte == result.bits_per_byte
    assert result.sample.startswith("却说曹操")
    assert len(result.sample) > len("却说曹操")
    settled = RunConfig.read(out / "config.toml").train.steps
    assert settled > room.PROBE
    # What compressors need for the held-out text, given the training text: between 1 and 8 bits.
    assert 1 < result.xz < 8
    assert 1 < result.bz2 < 8

    # The same plan, stopped after a checkpoint and taken up again.
    again = tmp_path / "again"
    again.mkdir()
    for name in ("corpus.jsonl", "config.toml"):
        shutil.copy(out / name, again / name)
    shutil.copytree(out / "data", again / "data")
    every = f"checkpoint_every = {room.PROBE + 1}\n"
    toml = (again / "config.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    lines = [every if line.startswith("checkpoint_every") else line for line in toml]
    (again / "config.toml").write_text("".join(lines), encoding="utf-8")

    def stop(line: dict[str, Any], steps: int) -> None:
        if line["step"] == room.PROBE + 3:
            raise KeyboardInterrupt

    if settled > room.PROBE + 3:
        with pytest.raises(KeyboardInterrupt):
            room.demo(again, 0.05, tune=False, report=stop)
    resumed = room.demo(again, 0.05, tune=False)
    assert resumed.tokens == result.tokens
    torch.testing.assert_close(weights(again), weights(out), rtol=0, atol=0)


def test_stopped_before_its_steps_are_settled_it_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, went_on = tmp_path / "demo", list[int]()

    def stop(line: dict[str, Any], steps: int) -> None:
        if line["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
        room.demo(out, 0.05, tune=False, report=stop)
    begun = RunConfig.read(out / "config.toml")
    monkeypatch.setattr(room, "gemm_limit", lambda dtype: 1.0)  # a new run would drop nothing out
    room.demo(out, 0.05, tune=False, report=lambda line, steps: went_on.append(line["step"]))
    settled = RunConfig.read(out / "config.toml")
    assert settled.model == begun.model
    assert settled.model.dropout > 0
    assert settled.train.compile == begun.train.compile
    assert went_on == list(range(4, settled.train.steps + 1))


def test_it_is_taught_to_answer_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder then loads as the tuned model; bits per byte are the pretrained one's."""
    asked = assistant()
    few = Assistant(asked.train[::200], asked.held_out[::40])
    monkeypatch.setattr(room, "assistant", lambda: few)
    monkeypatch.setattr(room, "TUNE_EPOCHS", 40)
    monkeypatch.setattr(room, "PROBE", 2)
    monkeypatch.setattr(room, "SAVE_EVERY", 0.3)
    out = tmp_path / "demo"
    result = room.demo(out, 0.05)
    assert result.tune_seconds > 0
    assert result.score is not None
    assert len(result.score.answers) == len(few.held_out)
    assert [question for question, _ in result.answers] == list(room.QUESTIONS)
    model, tokenizer = g.load(out)
    assert tokenizer is not None
    losses = [line["loss"] for line in read_metrics(out / "tune")]
    assert losses[-1] < losses[0]
    held_out = (out / "data" / "held-out.txt").read_bytes().decode("utf-8")
    assert evaluate_text(model, tokenizer, held_out).bits_per_byte != result.bits_per_byte
    assert (out / "latest").read_text(encoding="utf-8") == "tuned\n"

    # The same plans, stopped in the tuning and taken up again.
    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "tuned")
    kept = sorted((again / "tune" / "checkpoints").iterdir())
    assert len(kept) > 1
    for later in kept[1:]:
        shutil.rmtree(later)
    (again / "tune" / "latest").write_text(kept[0].name + "\n", encoding="utf-8")
    resumed = room.demo(again, 0.05)
    assert resumed.bits_per_byte == result.bits_per_byte
    assert resumed.answers == result.answers
    torch.testing.assert_close(weights(again), weights(out), rtol=0, atol=0)


def test_timed_steps_learn_alike_whatever_is_planned() -> None:
    """Those of a short plan and, of one above 10 PROBE, a quarter: killed, a run begins again with
    what was settled."""
    plans = [(room.PROBE, 1 + room.PROBE)]
    plans += [(steps // 4, room.shortest(steps // 4)) for steps in (1 + 10 * room.PROBE, 640, 2001)]
    for stage, (timed, least) in itertools.product((room.TRAIN, room.TUNE), plans):
        both = [stage.replace(steps=least), stage]  # as settled, and as timed
        rates = [[learning_rate(plan, step) for step in range(timed)] for plan in both]
        assert rates[0] == rates[1]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--minutes 0 must be above 0"):
        room.demo(tmp_path / "demo", 0)
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileError, match="not by a demo"):
        room.demo(tmp_path, 1)


def test_stopped_between_its_steps_it_says_how_to_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "demo", stopped)
    assert run("demo", "--out", tmp_path, code=130) == (
        "",
        "stopped; the same command goes on from there\n",
    )
