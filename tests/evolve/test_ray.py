"""`--engine ray`: the numbers of processes, from a real Ray on this machine."""

from __future__ import annotations

import _thread
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sweep import TRAIN, no_news, numbers, plan_of

from gpt2llama.cli.main import main
from gpt2llama.errors import FileError, InputError, MissingExtraError
from gpt2llama.evolve import engines, sweep
from gpt2llama.evolve.engines import engine_named, on_ray, shares
from gpt2llama.evolve.run import Job
from gpt2llama.evolve.sweep import run_jobs
from gpt2llama.train.run_folder import RunFolder, read_metrics

ENDLESS = 100_000  # steps
CORES = os.cpu_count() or 1  # as many runs at a time: a thread each


def test_without_ray_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any Ray is started: a running one imports from its own threads."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError):
        engine_named("ray")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["gpt2llama", "evolve", "--engine", "ray", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 1
    assert capsys.readouterr().err == (
        "gpt2llama: ray is not installed; it comes with: pip install 'gpt2llama[sweep]'\n"
    )
    assert not out.exists()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="pip install 'gpt2llama[sweep]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
        try:
            engines.connected()
        except InputError as error:  # its daemons give up on a starved machine
            pytest.skip(str(error))
        yield ray
        ray.shutdown()


def one_run(folder: Path, data: Path, steps: int) -> Job:
    plan = plan_of(folder, data, train=TRAIN.replace(steps=steps))
    return plan.jobs(folder)[0]


def at_the_first_checkpoint(folder: Path, job: Job, act: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        checkpoints = folder / "runs" / job.key / "checkpoints"
        while not list(checkpoints.glob("step-*")):
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_the_numbers_are_those_of_processes(ray: Any, data: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    plan = plan_of(here, data)
    want = run_jobs(here, plan.jobs(here), 1, no_news)
    plan_of(there, data)
    heard: list[str] = []
    jobs = plan.jobs(there)
    got = run_jobs(there, jobs, CORES, lambda job, result: heard.append(job.key), on_ray)
    assert numbers(got) == numbers(want)
    assert sorted(heard) == sorted(job.key for job in jobs)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    written = [there / "runs" / job.key / "result.json" for job in jobs]
    before = [path.stat().st_mtime_ns for path in written]
    assert run_jobs(there, jobs, CORES, no_news, on_ray) == got
    assert [path.stat().st_mtime_ns for path in written] == before


def test_a_run_that_another_holds_comes_last(
    ray: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    jobs = plan_of(folder, data).jobs(folder)[:2]
    other = RunFolder(folder / "runs" / jobs[0].key, resume=True)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: other.close())
    order: list[str] = []
    run_jobs(folder, jobs, CORES, lambda job, result: order.append(job.rung), on_ray)
    assert order == ["rope", "learned"]


def test_ctrl_c_leaves_whole_checkpoints(ray: Any, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = one_run(folder, data, ENDLESS)
    at_the_first_checkpoint(folder, job, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(folder, [job], CORES, no_news, on_ray)
    place = folder / "runs" / job.key
    with RunFolder(place, resume=True) as left:  # which no worker holds any more
        checkpoint = left.latest()
    assert checkpoint is not None
    assert int(checkpoint.name[5:]) == read_metrics(place)[-1]["step"] < ENDLESS
    assert not (place / "result.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks")
def test_a_worker_that_dies_is_replaced(ray: Any, data: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    job = one_run(here, data, 60)
    want = run_jobs(here, [job], 1, no_news)
    one_run(there, data, 60)
    lock = there / "runs" / job.key / ".lock"

    def kill() -> None:
        locks = Path("/proc/locks").read_text(encoding="utf-8")
        held = re.search(rf"(\d+) [0-9a-f:]+:{lock.stat().st_ino} ", locks)
        assert held is not None
        os.kill(int(held[1]), signal.SIGKILL)

    killing = at_the_first_checkpoint(there, job, kill)
    got = run_jobs(there, [job], CORES, no_news, on_ray)
    killing.join()
    assert numbers(got) == numbers(want)


def test_a_folder_that_a_node_does_not_see(ray: Any, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = one_run(folder, data, 5)
    (folder / "data").unlink()
    with pytest.raises(FileError, match=r"^\S+data is not there on \S+; with .* one path$"):
        run_jobs(folder, [job], CORES, no_news, on_ray)
    assert not (folder / "runs").exists()


def test_no_cluster_at_the_address(
    ray: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:  # Ray itself tries for minutes
        raise ConnectionError("nobody answers.\nA page of advice")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    folder = tmp_path / "sweep"
    with pytest.raises(InputError, match=r"can be used \(nobody answers\); .*127\.0\.0\.1:1"):
        run_jobs(folder, plan_of(folder, data).jobs(folder), 1, no_news, on_ray)


def test_an_engine_that_is_none() -> None:
    with pytest.raises(InputError, match="--engine must be one of local, ray"):
        engine_named("slurm")


@pytest.mark.parametrize(
    ("nodes", "at_once", "each"),
    [
        ([{"CPU": 2.0}], 1, (2, 0)),
        ([{"CPU": 2.0}], 3, (1, 0)),  # the third waits
        ([{"CPU": 8.0}, {"CPU": 8.0}], 3, (4, 0)),  # 5 would leave room for two
        ([{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}], 1, (8, 1)),  # the first has no GPU
        ([{"CPU": 8.0, "GPU": 2.0}], 3, (2, 0.5)),
        ([{}, {"CPU": 0.0}], 1, (1, 0)),  # nodes may come later
    ],
)
def test_shares(nodes: list[dict[str, float]], at_once: int, each: tuple[int, float]) -> None:
    assert shares(nodes, at_once) == each


@given(st.lists(st.integers(1, 64), min_size=1, max_size=5), st.integers(1, 40))
def test_all_runs_fit_with_the_most_cpus(cpus: list[int], at_once: int) -> None:
    def fit(each: int) -> int:
        return sum(c // each for c in cpus)

    each, _ = shares([{"CPU": float(c)} for c in cpus], at_once)
    assert fit(each) >= min(at_once, sum(cpus))
    assert fit(each + 1) < at_once
