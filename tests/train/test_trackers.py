"""Metrics in another program: the same lines, each once, and never at the run's cost."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_run import arguments, config, metrics

from gpt2llama.cli._options import TrackerName
from gpt2llama.cli.main import main
from gpt2llama.errors import MissingExtraError
from gpt2llama.train.run import train
from gpt2llama.train.run_folder import read_metrics
from gpt2llama.train.trackers import TRACKERS, Tracking


class Fake(ModuleType):
    """wandb and trackio, as far as they are used: `runs` by id or name, each [(step, values)]."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.begun: list[dict[str, Any]] = []
        self.finished, self.fail_at = 0, -1

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def init(self, **how: Any) -> Fake:
        print("a tracker talks")
        self.begun.append(how)
        self.now = self.runs.setdefault(how.get("id", how["name"]), [])
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        print("on every line")
        if step == self.fail_at:
            raise ConnectionError("no route to host")
        self.now.append((step, values))

    def finish(self) -> None:
        print("and at the end")
        self.finished += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    made = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpt2llama", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def lines(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line.pop("step"), line) for line in read_metrics(run)]


def without_clock(run: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    clock = ("seconds", "tokens_per_s")
    return [(step, {k: v for k, v in one.items() if k not in clock}) for step, one in run]


def test_each_gets_what_metrics_jsonl_has(
    data: Path, tmp_path: Path, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    both = ("--track", "wandb", "--track", "trackio", "--json")
    assert call(monkeypatch, *arguments(data, out, *both)) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 6  # what they print is not the command's
    for fake in fakes.values():
        assert list(fake.runs.values()) == [lines(out)]
        assert fake.finished == 1
    offline, local = fakes["wandb"].begun[0], fakes["trackio"].begun[0]
    assert offline["mode"] == "offline"
    assert local["config"] == tomllib.loads((out / "config.toml").read_text(encoding="utf-8"))
    assert not {"space_id", "server_url", "dataset_id"} & local.keys()
    train(config(data), tmp_path / "alone")
    assert metrics(out) == metrics(tmp_path / "alone")  # it changes no number


def test_stopped_anywhere_no_step_is_there_twice(
    data: Path, tmp_path: Path, fakes: dict[str, Fake]
) -> None:
    """Stopped between checkpoints, metrics.jsonl goes back to the last and the tracker cannot."""
    run, whole, out = config(data, steps=12, checkpoint_every=4), tmp_path / "whole", tmp_path / "r"
    train(run, whole)
    for step in (3, 6, 7):

        def fail(line: dict[str, Any], step: int = step) -> None:
            if line["step"] == step:
                raise RuntimeError

        asked = ["wandb"] if step == 6 else []  # later than it began, and remembered after that
        with pytest.raises(RuntimeError), Tracking(out, asked) as tracked:
            train(run, out, resume=True, report=tracked(fail))
        assert fakes["wandb"].runs == {} or step > 3
    with Tracking(out) as tracked:
        train(run, out, resume=True, report=tracked(lambda line: None))
    (found,) = fakes["wandb"].runs.values()
    assert [step for step, _ in found] == list(range(1, 13))
    assert without_clock(found) == without_clock(lines(whole))
    assert fakes["trackio"].begun == []


def test_a_failing_tracker_costs_a_warning(
    data: Path, tmp_path: Path, fakes: dict[str, Fake]
) -> None:
    fakes["wandb"].fail_at = 3
    words = r"wandb is left out from here on \(no route to host\); metrics.jsonl has everything"
    with (
        pytest.warns(UserWarning, match=words) as warned,
        Tracking(tmp_path / "run", ["wandb", "trackio"]) as tracked,
    ):
        train(config(data), tmp_path / "run", report=tracked(lambda line: None))
    assert len(warned) == 1
    assert [step for step, _ in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    (left,), (other,) = fakes["wandb"].runs.values(), fakes["trackio"].runs.values()
    assert [step for step, _ in left] == [1, 2]
    assert other == lines(tmp_path / "run")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_sentence(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, TRACKERS[name], None)
    assert call(monkeypatch, *arguments(data, tmp_path / "run", "--track", name)) == 1
    said = capfd.readouterr().err
    assert said == f"gpt2llama: {MissingExtraError(name, name)}\n"
    assert not (tmp_path / "run").exists()
    command = re.findall(r"pip install 'gpt2llama\[(.*)\]'", said)
    root = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(root.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert command == [name]
    assert name in extras[name][0]


def test_the_option_names_them_and_nothing_is_imported_unasked(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(TrackerName) == list(TRACKERS)
    for module in TRACKERS.values():
        monkeypatch.setitem(sys.modules, module, None)  # to import it would fail
    assert call(monkeypatch, *arguments(data, tmp_path / "run")) == 0
    assert call(monkeypatch, *arguments(data, tmp_path / "x", "--track", "mlflow")) == 2


# ---- the packages themselves, where they are installed ----


@pytest.fixture
def stopped(data: Path, tmp_path: Path) -> Any:
    """A run under `name`, stopped behind step 3 of 6, whose last checkpoint is step 2's, and
    finished."""

    def run(name: str) -> Path:
        def fail(line: dict[str, Any]) -> None:
            if line["step"] == 4:
                raise RuntimeError

        out = tmp_path / "run"
        with pytest.raises(RuntimeError), Tracking(out, [name]) as tracked:
            train(config(data, checkpoint_every=2, eval_every=5), out, report=tracked(fail))
        with Tracking(out) as tracked:
            train(
                config(data, checkpoint_every=2, eval_every=5), out, resume=True,
                report=tracked(lambda line: None),
            )  # fmt: skip
        return out

    return run


@pytest.mark.filterwarnings("default")  # theirs
def test_tensorboard_reads_it_back(stopped: Any) -> None:
    pytest.importorskip("tensorboard")
    out = stopped("tensorboard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    wanted = lines(out)
    for name in ("loss", "held_out_loss", "lr"):
        found = [(event.step, event.value) for event in read.Scalars(name)]
        assert found == [
            (step, pytest.approx(one[name], rel=1e-6)) for step, one in wanted if name in one
        ]  # fp32 in its files


@pytest.mark.filterwarnings("default")
def test_trackio_reads_it_back(
    stopped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    out = stopped("trackio")
    (run,) = trackio.Api().runs("gpt2llama")
    stored = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    found = stored.get_logs(run.project, run.name, run_id=run.id)
    got = [(one.pop("step"), {k: v for k, v in one.items() if k != "timestamp"}) for one in found]
    assert without_clock(got) == without_clock(lines(out))  # step 3's clock is the first session's
    assert run.config["train"]["steps"] == 6


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_one_run(stopped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline it makes a folder a session; by the id `wandb sync --append` puts them together."""
    pytest.importorskip("wandb")
    out = stopped("wandb")
    found = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(found) == 2
    run_id = json.loads((out / "tracked.json").read_text(encoding="utf-8"))["id"]
    assert {path.stem for path in found} == {f"run-{run_id}"}
