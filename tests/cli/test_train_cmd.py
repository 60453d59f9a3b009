"""`gpt2llama train` in this process: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpt2llama as g
from gpt2llama.errors import counted

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from tiny_run import arguments, config, make_data, metrics

Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text"))


def test_json(run: Run, data: Path, tmp_path: Path) -> None:
    out, err = run(*arguments(data, tmp_path / "run", "--json"))
    answer, last = json.loads(out), metrics(tmp_path / "run")[-1]
    assert answer["run"] == str(tmp_path / "run")
    assert answer.items() >= last.items()
    assert (answer["step"], answer["tokens"]) == (6, 6 * 2 * 16)
    assert {"loss", "held_out_loss", "bits_per_byte", "tokens_per_s", "seconds"} <= set(answer)
    assert [line.split(":")[0] for line in err.splitlines()] == ["step 3", "step 6"]
    assert f"{last['bits_per_byte']:.3f} bits per byte" in err
    again, err = run(*arguments(data, tmp_path / "run", "--json", "--resume"))  # nothing is left
    assert json.loads(again).items() >= {"step": 6, "tokens": 6 * 2 * 16}.items()
    assert err == ""


def test_words(run: Run, data: Path, tmp_path: Path) -> None:
    out, err = run(*arguments(data, tmp_path / "run"))
    assert out == ""
    assert "6 steps, 192 tokens" in err
    model, tokenizer = g.load(tmp_path / "run")
    assert model.config == config(data).model
    assert tokenizer is not None


def test_one_is_no_plural(run: Run, data: Path, tmp_path: Path) -> None:
    how = {"steps": 1, "batch_size": 1, "seq_len": 1, "warmup_steps": 0}
    _, err = run(*arguments(data, tmp_path / "run", **how))
    assert "\n1 step, 1 token in " in err
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [counted(n, "reply", "replies") for n in (1, 2)] == ["1 reply", "2 replies"]


def test_a_config_file_is_a_preset_with_settings(run: Run, data: Path, tmp_path: Path) -> None:
    run(*arguments(data, tmp_path / "a", seed=3))
    (tmp_path / "run.toml").write_text(config(data, lr=1).to_toml(), encoding="utf-8")
    settings = ("--set", "seed=3", "--set", "lr=0.003")
    run("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "b", *settings)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_bytes() == (
        tmp_path / "b" / "config.toml"
    ).read_bytes()


def test_resume_needs_no_more_than_the_folder(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)  # the data may be named from here and resumed from elsewhere
    run(*arguments(Path(data.name), tmp_path / "run", steps=4, clip="none"))
    monkeypatch.chdir(tmp_path)
    run("train", "--out", "run", "--resume", "--set", "steps=6")
    run(*arguments(data, tmp_path / "whole", steps=6, clip="none"))
    first, second = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert [line["step"] for line in first] == [line["step"] for line in second]
    assert first[0] == second[0]
    assert config(data, clip="none", steps=6).to_toml() == (
        tmp_path / "run" / "config.toml"
    ).read_text(encoding="utf-8")


def test_a_finished_run_says_so(run: Run, data: Path, tmp_path: Path) -> None:
    run(*arguments(data, tmp_path / "run"))
    _, err = run("train", "--out", tmp_path / "run", "--resume")
    assert err == (
        "nothing was left to do: step 6 was the last; to go on, resume it with more, such as "
        "--set steps=12\n"
    )
    run(*arguments(data, tmp_path / "bad", lr=3.0, warmup_steps=0, eval_every=1, patience=2,
                    steps=50))  # fmt: skip
    last = metrics(tmp_path / "bad")[-1]["step"]
    _, err = run("train", "--out", tmp_path / "bad", "--resume")
    assert f"stopped early at step {last}, out of patience" in err
    assert "--set patience=none" in err
    _, err = run("train", "--out", tmp_path / "bad", "--resume", "--set", "patience=none",
                 "--set", f"steps={last + 1}")  # fmt: skip
    assert f"{last + 1} steps, " in err


def test_the_learning_rate_of_a_resumed_run_is_the_same(
    run: Run, data: Path, tmp_path: Path
) -> None:
    run(*arguments(data, tmp_path / "run"))
    _, err = run(*arguments(data, tmp_path / "run", "--resume", lr=0.5), code=1)
    assert "was begun with lr=0.003, not 0.5" in err
    assert err.count("\n") == 1


def test_early_stopping_says_the_best_step(run: Run, data: Path, tmp_path: Path) -> None:
    how = {"lr": 3.0, "warmup_steps": 0, "eval_every": 1, "patience": 2, "steps": 50}
    _, err = run(*arguments(data, tmp_path / "run", **how))
    best = int((tmp_path / "run" / "best").read_text(encoding="utf-8").removeprefix("step-"))
    lines = [line for line in err.splitlines() if not re.match(r"step [\d,]+: held out", line)]
    summary = " ".join(lines)
    assert "best" in summary
    assert f"step {best:,}" in summary


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "name what to train: --preset zh-3m, --from MODEL or --config run.toml"),
        (["--preset", "zh-3m"], "--data is missing"),
        (["--preset", "zh-3m", "--config", "x.toml"], "exclude each other"),
        (["--preset", "zh-3m", "--from", "x"], "exclude each other"),
        (["--config", "x.toml"], "cannot read x.toml"),
        (["--resume"], "run holds no run to resume, for it has no config.toml; mend --out, or"),
        (["--preset", "zh-3m", "--data", "nowhere"], "there is no folder"),
    ],
)
def test_refusals(run: Run, tmp_path: Path, options: list[str], says: str) -> None:
    out, err = run("train", "--out", tmp_path / "deep" / "run", *options, code=1)
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_usage(run: Run, tmp_path: Path) -> None:
    assert "--out" in run("train", "--preset", "zh-3m", code=2)[1]
    assert "--steps" in run("train", "--out", tmp_path, "--steps", 3, code=2)[1]
