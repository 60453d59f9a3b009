"""`finetune preference` and `finetune reward` as commands."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from prefer_run import PAIRS, SMALL, SUMS, check_same, make_model, metrics, write_lines
from typer.testing import CliRunner

import gpt2llama as g
from gpt2llama.cli._finetune_preference import preference
from gpt2llama.cli._finetune_reward import reward
from gpt2llama.cli._tuning import TuningProgress, lora_of, run_of
from gpt2llama.errors import ConfigError
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.finetune.preference import DEFAULTS, PreferenceConfig

app = typer.Typer()
app.command()(preference)
app.command()(reward)

SMALL_SETS = [f"--set={key}={value}" for key, value in SMALL.items()]
REWARD_SETS = [*SMALL_SETS, "--set=group_size=4", "--set=max_new_tokens=5", "--set=chat=false"]


def call(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = {"prompt": "p" * 99, "chosen": "a", "rejected": "b"}
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", [*PAIRS, long])


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", SUMS)


def test_preference(model: Path, pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = call("preference", model, "--data", pairs, "--out", out, *SMALL_SETS, "--json",
                "--loss", "ipo", "--set", "chat=false")  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer.items() >= metrics(out)[-1].items()
    assert (answer["pairs"], answer["held_out_pairs"], answer["skipped_pairs"]) == (11, 1, 1)
    assert "step 0: held out margin 0.000, accuracy 0.0%" in done.stderr
    assert g.load(out)[1] is not None
    other = write_lines(tmp_path / "held-out.jsonl", PAIRS[:3])
    done = call("preference", model, "--data", pairs, "--held-out", other, "--out",
                tmp_path / "other", *SMALL_SETS, "--set", "chat=false")  # fmt: skip
    assert "6 steps on 12 pairs (3 held out; 1 longer than the context left out)" in done.stderr


@pytest.mark.parametrize("command", ["preference", "reward"])
def test_ctrl_c(
    command: str, model: Path, pairs: Path, sums: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    class Shown(TuningProgress):
        def update(self, line: dict[str, Any], steps: int) -> None:
            super().update(line, steps)
            if line["step"] == 2:
                signal.raise_signal(signal.SIGINT)

    out, whole = tmp_path / "run", tmp_path / "whole"
    how = [*SMALL_SETS, "--set=chat=false"] if command == "preference" else REWARD_SETS
    how = [command, model, "--data", pairs if command == "preference" else sums, *how]
    how += ["--reward", "format:[a-z]"] if command == "reward" else ["--lora", "4"]
    call(*how, "--out", whole)
    with monkeypatch.context() as patch:
        patch.setattr(f"gpt2llama.cli._finetune_{command}.TuningProgress", Shown)
        done = call(*how, "--out", out, code=130)
    line = f"stopped after step 2; go on with: gpt2llama finetune {command} --out {out} --resume\n"
    assert line in done.stderr
    call(command, "--out", out, "--resume")
    check_same(out, whole)
    assert "nothing was left to do: step 6 " in call(command, "--out", out, "--resume").stderr
    check_same(out, whole)


@pytest.mark.parametrize("command", ["preference", "reward"])
def test_what_is_named_again_must_agree(
    command: str, model: Path, pairs: Path, sums: Path, tmp_path: Path
) -> None:
    """What is not named is as the run was begun, whatever else is."""
    data, out = pairs if command == "preference" else sums, tmp_path / "run"
    how = [*SMALL_SETS, "--set=chat=false"] if command == "preference" else REWARD_SETS
    how += ["--loss", "ipo"] if command == "preference" else ["--reward", "format:[a-z]"]
    call(command, model, "--data", data, "--out", out, *how, "--lora", "4", "--lora-alpha", "4")
    config, again = (out / "config.toml").read_bytes(), [command, "--out", out, "--resume"]
    for more in (
        [model],
        ["--data", data],
        [model, "--lora", "4"],
        ["--lora-alpha", "4"],
        [model, "--data", data, *how, "--lora", "4", "--lora-alpha", "4"],
    ):
        done = call(*again, *more)
        assert "nothing was left to do: step 6 " in done.stderr
        assert (out / "config.toml").read_bytes() == config
    other = write_lines(tmp_path / "other.jsonl", [])
    for more, says in (
        ([tmp_path], "was begun with begin="),
        (["--data", other], "was begun with data="),
        (["--held-out", other], "was begun without held_out, not with it"),
        ([model, "--lora", "8"], "was begun with rank=4, not 8"),
        (["--lora-alpha", "8"], "was begun with alpha=4.0, not 8.0"),
        ([model, "--set", "lr=1"], "was begun with lr=0.01, not 1"),
        (["--set", "temperature=2"] if command == "reward" else ["--loss", "dpo"],
         "was begun with temperature=1.0, not 2"
         if command == "reward" else "was begun with loss='ipo', not 'dpo'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{says}.*; resume it with the same settings"):
            call(*again, *more)


def test_reward(model: Path, sums: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def letters(answer, line):\n    return sum(c.isalpha() for c in answer) / 5\n",
        encoding="utf-8",
    )
    how = ["reward", model, "--data", sums, "--out", tmp_path / "run", *REWARD_SETS]
    done = call(*how, "--reward", f"{file}:letters", "--json")
    answer, lines = json.loads(done.stdout), metrics(tmp_path / "run")
    assert answer.items() >= lines[-1].items()
    assert answer["groups"] == 18
    assert answer["all_equal_groups"] == sum(line.get("equal_groups", 0) for line in lines)
    assert answer["start_reward"] == lines[0]["held_out_reward"]
    with pytest.raises(ConfigError, match=r"the reward is code, .*; name it again to run it"):
        call("reward", "--out", tmp_path / "run", "--resume")
    call("reward", "--out", tmp_path / "run", "--resume", "--reward", f"{file}:letters")


def test_what_is_missing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="name the model to tune: gpt2llama finetune reward MODEL"
    ):
        call("reward", "--out", tmp_path)
    for command in ("preference", "reward"):
        with pytest.raises(ConfigError, match="compile=on is for train and finetune instruct"):
            call(command, model, "--data", "d", "--out", tmp_path, "--set", "compile=on")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        call("preference", "--out", tmp_path, "--resume")
    with pytest.raises(ConfigError, match="--data is missing"):
        call("preference", model, "--out", tmp_path)
    with pytest.raises(ConfigError, match="--lora-dropout is of adapters; add --lora RANK"):
        call("preference", model, "--out", tmp_path, "--lora-dropout", "0")


def test_adapters_want_a_higher_rate(tmp_path: Path) -> None:
    adapters = partial(lora_of, 4, None, 0.1, None)
    lora = adapters(None)
    assert lora == LoraConfig(rank=4, alpha=8, dropout=0.1)
    for settings, rate in (([], 1e-4), (["lr=3e-5"], 3e-5)):
        run = run_of(
            PreferenceConfig, DEFAULTS, "m", tmp_path, Path("d"), None, settings, False, adapters
        )
        assert (run.train.lr, run.lora) == (rate, lora)
