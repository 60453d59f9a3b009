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
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sweep import TRAIN, no_news, numbers, plan_of

from gpt2llama.cli.main import main
from gpt2llama.errors import FileError, InputError, MissingExtraError
from gpt2llama.evolve import sweep
from gpt2llama.evolve.engines import connected, engine_named, on_ray, shares
from gpt2llama.evolve.run import Job
from gpt2llama.evolve.sweep import run_jobs
from gpt2llama.train.run_folder import RunFolder, read_metrics

Call = Callable[..., Any]

ENDLESS = 100_000  # steps
CORES = os.cpu_count() or 1  # as many runs at a time: a thread each


def test_without_ray_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def in_driver() -> Iterator[Call]:
    """Calls a function in a process that is Ray's driver, not in pytest's: Ray's own threads may
    end a driver without a word, behind the last test, too, while it is shut down."""
    pytest.importorskip("ray", reason="pip install 'gpt2llama[sweep]'")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            pool.submit(begin).result()
        except InputError as error:  # its daemons give up on a starved machine
            pytest.skip(str(error))
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def begin() -> None:
    torch.set_num_threads(1)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop("RAY_USAGE_STATS_ENABLED", None)
    connected()


def by_ray(folder: Path, jobs: list[Job]) -> tuple[list[dict[str, Any]], list[Job]]:
    """Their results in order, and the jobs in the order in which these were told."""
    told: list[Job] = []
    results = run_jobs(folder, jobs, CORES, lambda job, result: told.append(job), on_ray)
    return results, told


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


def test_the_numbers_are_those_of_processes(in_driver: Call, data: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    plan = plan_of(here, data)
    want = run_jobs(here, plan.jobs(here), 1, no_news)
    plan_of(there, data)
    jobs = plan.jobs(there)
    got, told = in_driver(by_ray, there, jobs)
    assert numbers(got) == numbers(want)
    assert sorted(job.key for job in told) == sorted(job.key for job in jobs)
    assert in_driver(os.getenv, "RAY_USAGE_STATS_ENABLED") == "0"
    written = [there / "runs" / job.key / "result.json" for job in jobs]
    before = [path.stat().st_mtime_ns for path in written]
    assert in_driver(by_ray, there, jobs)[0] == got
    assert [path.stat().st_mtime_ns for path in written] == before


def test_a_run_that_another_holds_comes_last(in_driver: Call, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    jobs = plan_of(folder, data).jobs(folder)[:2]
    assert [job.rung for job in in_driver(while_another_holds_the_first, folder, jobs)] == [
        "rope",
        "learned",
    ]


def while_another_holds_the_first(folder: Path, jobs: list[Job]) -> list[Job]:
    other = RunFolder(folder / "runs" / jobs[0].key, resume=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.time, "sleep", lambda seconds: other.close())
        return by_ray(folder, jobs)[1]


def test_ctrl_c_leaves_whole_checkpoints(in_driver: Call, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = one_run(folder, data, ENDLESS)
    assert in_driver(is_interrupted, folder, job)
    place = folder / "runs" / job.key
    with RunFolder(place, resume=True) as left:  # which no worker holds any more
        checkpoint = left.latest()
    assert checkpoint is not None
    assert int(checkpoint.name[5:]) == read_metrics(place)[-1]["step"] < ENDLESS
    assert not (place / "result.json").exists()


def is_interrupted(folder: Path, job: Job) -> bool:
    at_the_first_checkpoint(folder, job, _thread.interrupt_main)
    try:
        by_ray(folder, [job])
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks")
def test_a_worker_that_dies_is_replaced(in_driver: Call, data: Path, tmp_path: Path) -> None:
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
    got, _ = in_driver(by_ray, there, [job])
    killing.join()
    assert numbers(got) == numbers(want)


def test_a_folder_that_a_node_does_not_see(in_driver: Call, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = one_run(folder, data, 5)
    (folder / "data").unlink()
    with pytest.raises(FileError, match=r"^\S+data is not there on \S+; with .* one path$"):
        in_driver(by_ray, folder, [job])
    assert not (folder / "runs").exists()


def test_no_cluster_at_the_address(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'gpt2llama[sweep]'")

    def refuse(**_: Any) -> None:  # Ray itself tries for minutes
        raise ConnectionError("nobody answers.\nA page of advice")

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
