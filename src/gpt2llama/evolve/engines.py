"""Who makes a sweep's runs: processes of this machine, or a Ray cluster.

An engine takes (folder, jobs, how many at a time) and yields each job with its result as it comes,
or with None where another process holds the run.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import platform
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError, InputError, MissingExtraError, TrainingError
from ..train.run_folder import InUseError
from ..train.trainer import said_at_once
from .run import Job, finish

Result = dict[str, Any]
Engine = Callable[[Path, list[Job], int], Iterator[tuple[Job, Result | None]]]


def engine_named(name: str) -> Engine:
    """Raises InputError for an unknown one, MissingExtraError where Ray is not installed."""
    if name not in ENGINES:
        raise InputError(f"--engine must be one of {', '.join(ENGINES)} (got {name!r})")
    if name == "ray":
        _import_ray()
    return ENGINES[name]


def on_processes(
    folder: Path, jobs: list[Job], at_once: int
) -> Iterator[tuple[Job, Result | None]]:
    """This machine's threads are shared out; one at a time needs no other process."""
    if at_once == 1:
        for job in jobs:
            yield job, _unless_held(folder, job)
        return
    threads = max(1, (os.cpu_count() or 1) // at_once)
    pool = ProcessPoolExecutor(
        at_once, get_context("spawn"), initializer=_be_ready, initargs=(threads,)
    )
    waiting, running = iter(jobs), dict[Future[Result | None], Job]()
    with pool, said_at_once((signal.SIGINT,)):
        while True:
            # No more than are run: what the pool has queued would begin after a Ctrl-C.
            for job in islice(waiting, at_once - len(running)):
                running[pool.submit(_in_a_process, folder, job)] = job
            if not running:
                return
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                yield running.pop(future), future.result()


def _be_ready(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an idle one has nothing to stop


def _in_a_process(folder: Path, job: Job) -> Result | None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _unless_held(folder, job)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def on_ray(folder: Path, jobs: list[Job], at_once: int) -> Iterator[tuple[Job, Result | None]]:
    """Ray's default holds: a run whose node dies is taken up by another, from its checkpoint.

    Raises InputError without a cluster, FileError where a node does not see the folder,
    TrainingError for a run that Ray has given up.
    """
    ray = connected()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = shares(nodes, at_once)
    run = ray.remote(_on_a_node).options(num_cpus=cpus, num_gpus=gpus)
    waiting = iter(jobs)
    running: dict[Any, Job] = {}  # by Ray's reference
    try:
        while True:
            for job in islice(waiting, at_once - len(running)):
                running[run.remote(folder.resolve(), job, cpus)] = job
            if not running:
                return
            (ready,), _ = ray.wait(list(running))
            result = _fetched(ray, ready, running[ready])
            yield running.pop(ready), result
    finally:  # on Ctrl-C a run stops behind a step, with a checkpoint, which takes a moment
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=60)


ENGINES: dict[str, Engine] = {"local": on_processes, "ray": on_ray}


def shares(nodes: list[dict[str, float]], at_once: int) -> tuple[int, float]:
    """(CPUs, GPUs) of each run, from what the nodes have, so that `at_once` fit where they can.

    A run stays on one node and has whole CPUs, the most that leave room for the others. Where
    there are GPUs all runs are made on them, one each or several on one.
    """
    nodes = [node for node in nodes if node.get("GPU")] or nodes
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    each = max(cpus, default=1)
    while each > 1 and sum(count // each for count in cpus) < at_once:
        each -= 1
    gpus = sum(node.get("GPU", 0) for node in nodes)
    return max(each, 1), 1 / math.ceil(at_once / gpus) if gpus else 0


def _on_a_node(folder: Path, job: Job, threads: int) -> Result | None:
    if not Path(job.run.data).is_dir():
        raise FileError(
            f"{job.run.data} is not there on {platform.node()}; with --engine ray, --out must be "
            "on a disk that all nodes share, under one path"
        )
    torch.set_num_threads(threads)
    return _unless_held(folder, job)


def _unless_held(folder: Path, job: Job) -> Result | None:
    try:
        return finish(folder, job)
    except InUseError:
        return None


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "sweep") from None


def connected() -> Any:
    """Ray, to the end of the process on RAY_ADDRESS, this machine's cluster, or a new one here."""
    ray = _import_ray()
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:  # Ray raises bare ones here
            raise InputError(
                f"no Ray cluster can be used ({_first_line(error)}); look at RAY_ADDRESS "
                f"({os.environ.get('RAY_ADDRESS', 'not set')}), without it one is started here"
            ) from error
    return ray


def _fetched(ray: Any, reference: Any, job: Job) -> Result | None:
    try:
        result: Result | None = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # as the run raised it, without Ray's page of traceback
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"Ray has given up {job.rung}, seed {job.seed} ({_first_line(error)}); "
            "go on with --resume"
        ) from error
    return result


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
