"""A sweep's runs: addressed by content, paired, resumed to the bit, never done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2llama.data.batches import TokenData
from gpt2llama.errors import DataError, FileError, InputError
from gpt2llama.evolve import run as runs
from gpt2llama.evolve import sweep
from gpt2llama.evolve.design import Rung
from gpt2llama.evolve.results import summarise
from gpt2llama.evolve.sweep import Plan, Question, best_rates, make_plan, run_jobs
from gpt2llama.model.config import ModelConfig
from gpt2llama.train.config import RunConfig, TrainConfig
from gpt2llama.train.run_folder import RunFolder

PLAIN = ModelConfig(
    vocab_size=300, max_seq_len=16, n_layers=1, n_heads=2, d_model=16, d_ff=16, position="learned"
)
ROPE = PLAIN.replace(position="rope")
TRAIN = TrainConfig(
    steps=5, batch_size=2, seq_len=16, eval_every=2, checkpoint_every=1, compile="off",
    warmup_steps=2,
)  # fmt: skip
QUESTION = Question(tokens=1000, seeds=2)


def plan_of(folder: Path, data: Path, **changes: Any) -> Plan:
    """Two tiny rungs on the tests' data."""
    folder.mkdir(exist_ok=True)
    if not (folder / "data").exists():
        (folder / "data").symlink_to(data)
    rungs = [Rung("learned", PLAIN), Rung("rope", ROPE, "position: learned → rope", "learned")]
    values: dict[str, Any] = {"question": QUESTION, "train": TRAIN, "rungs": rungs}
    digest = runs.digest_of(TokenData.open(data))
    values |= {"corpus": "tiny", "digest": digest, "seconds": None, "command": "x"}
    return Plan(**values | changes)


def no_news(*_: Any) -> None:
    pass


def numbers(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What must be equal: no times, no memory."""
    keys = ("rung", "seed", "bits_per_byte", "by_position", "held_out_curve")
    found = {k: {key: r[key] for key in keys} for k, r in results.items()}
    for key, result in results.items():
        found[key]["losses"] = [point[3] for point in result["curve"]]
    return found


@pytest.fixture(scope="module")
def undisturbed(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sweep")
    plan = plan_of(folder, data)
    return plan, folder, run_jobs(folder, plan.jobs(folder), 1, no_news)


def test_every_job_has_its_result(undisturbed: Any) -> None:
    plan, folder, results = undisturbed
    jobs = plan.jobs(folder)
    assert [(job.rung, job.seed) for job in jobs] == [
        ("learned", 0), ("rope", 0), ("learned", 1), ("rope", 1),
    ]  # fmt: skip
    assert results.keys() == {job.key for job in jobs}
    assert len({result["bits_per_byte"] for result in results.values()}) == 4
    for job in jobs:
        found = results[job.key]["by_position"]
        beyond = job.rung == "learned"  # a table of 16 has no 17th position
        assert [part is None for part in found.values()] == [False, beyond, beyond]
        assert not (folder / "runs" / job.key / "checkpoints").exists()


def test_finished_runs_are_never_repeated(
    undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder, results = undisturbed

    def train(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "_train", train)
    assert run_jobs(folder, plan.jobs(folder), 1, no_news) == results


def test_the_key_is_what_the_numbers_depend_on(undisturbed: Any, data: Path) -> None:
    plan, folder, _ = undisturbed
    (first, *_) = plan.jobs(folder)
    changes = {"seed": 5, "lr": 1e-4, "steps": 6, "batch_size": 3, "optimizer": "muon"}
    keys = {first.key}
    for name, value in changes.items():
        other = RunConfig(
            model=first.run.model, train=first.run.train.replace(**{name: value}), data="x"
        )
        keys.add(runs.Job("learned", other, first.digest).key)
    keys.add(runs.Job("learned", first.run, "other data").key)
    keys.add(plan.jobs(folder)[1].key)
    assert len(keys) == 8
    same = RunConfig(
        model=first.run.model, train=first.run.train.replace(checkpoint_every=7), data="elsewhere"
    )
    assert runs.Job("another name", same, first.digest).key == first.key


def test_what_has_the_same_shape_begins_the_same(data: Path) -> None:
    def weights(cfg: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
        train = TRAIN.replace(seed=seed)
        return runs.new_model(RunConfig(model=cfg, train=train, data="")).state_dict()

    one, other, wide = (weights(cfg, 3) for cfg in (PLAIN, ROPE, ROPE.replace(d_ff=24)))
    assert one.keys() - other.keys() == {"embed_positions.weight"}
    for name, tensor in other.items():
        assert torch.equal(tensor, one[name])
        assert tensor.shape != wide[name].shape or torch.equal(tensor, wide[name])
    again, third = weights(PLAIN, 3), weights(PLAIN, 4)
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        assert tensor.dim() < 2 or not torch.equal(tensor, third[name])
    big = weights(PLAIN.replace(d_model=128, d_ff=256), 0)
    for name, std in (("embed_tokens", 0.02), ("layers.0.mlp.down_proj", 0.02 / 2**0.5)):
        assert big[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.03)


# Forked, so that torch is loaded once and not ten times. What a kill leaves on disk is settled by
# the file operation before it; so a child kills itself at a random one, whatever its pace.
KILLED_TEN_TIMES = """
import os, random, signal, sys
from pathlib import Path
import torch
import torch._dynamo  # the first step of each child would
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from test_sweep import no_news, plan_of, run_jobs
folder, chance = Path(sys.argv[1]), random.Random(7)
plan = plan_of(folder, Path(sys.argv[2]))

def count_down(event, args):
    global left
    if args and str(args[0]).startswith(str(folder)):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

for _ in range(10):
    left = chance.randint(1, 120)
    child = os.fork()
    if child == 0:
        sys.addaudithook(count_down)
        run_jobs(folder, plan.jobs(folder), 1, no_news)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is POSIX")
def test_killed_ten_times_in_a_row_it_ends_with_the_same_numbers(
    undisturbed: Any, data: Path, tmp_path: Path
) -> None:
    _, _, want = undisturbed
    folder, here = tmp_path / "sweep", Path(__file__).parent
    command = [sys.executable, "-c", KILLED_TEN_TIMES, *map(str, (folder, data, here))]
    subprocess.run(command, check=True)
    assert [*folder.glob("runs/*/checkpoints/step-*")]  # there is something to take up
    plan = plan_of(folder, data)
    assert numbers(run_jobs(folder, plan.jobs(folder), 1, no_news)) == numbers(want)


def test_processes_give_the_same_numbers(undisturbed: Any, data: Path, tmp_path: Path) -> None:
    _, _, want = undisturbed
    plan = plan_of(tmp_path / "sweep", data)
    got = run_jobs(tmp_path / "sweep", plan.jobs(tmp_path / "sweep"), 2, no_news)
    assert numbers(got) == numbers(want)


STOPPED = """
import sys
from contextlib import suppress
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_sweep import TRAIN, no_news, plan_of, run_jobs
if __name__ == "__main__":
    folder, train = Path(sys.argv[1]), TRAIN.replace(steps=100_000, checkpoint_every=None)
    plan = plan_of(folder, Path(sys.argv[2]), train=train)
    with suppress(KeyboardInterrupt):
        run_jobs(folder, plan.jobs(folder), 2, no_news)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")
def test_ctrl_c_is_answered_once_whatever_the_processes(data: Path, tmp_path: Path) -> None:
    """By the command's own; each of the two saves the step it is in, and no third begins."""
    (tmp_path / "ask.py").write_text(STOPPED, encoding="utf-8")
    here = Path(__file__).parent
    command = [sys.executable, tmp_path / "ask.py", tmp_path / "sweep", data, here]
    logs, saved = "sweep/runs/*/metrics.jsonl", "sweep/runs/*/latest"
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        try:
            while len([path for path in tmp_path.glob(logs) if path.read_bytes()]) < 2:
                assert script.poll() is None
                time.sleep(0.05)
            os.killpg(script.pid, signal.SIGINT)
            said = script.communicate(timeout=300)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert said.startswith("stopping after this step, which is saved")
    assert said.count("\n") == 1
    assert len([*tmp_path.glob("sweep/runs/*")]) == len([*tmp_path.glob(saved)]) == 2


def test_a_run_that_another_holds_comes_last(
    undisturbed: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    plan = plan_of(folder, data)
    jobs = plan.jobs(folder)
    other = RunFolder(folder / "runs" / jobs[0].key, resume=True)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: other.close())
    order: list[tuple[str, int]] = []
    run_jobs(folder, jobs, 1, lambda job, result: order.append((job.rung, job.seed)))
    assert order == [("rope", 0), ("learned", 1), ("rope", 1), ("learned", 0)]


def test_a_run_that_diverges_is_a_result(data: Path, tmp_path: Path) -> None:
    train = TRAIN.replace(lr=1e30, optimizer="adamw", clip=None)
    plan = plan_of(tmp_path / "sweep", data, train=train, question=Question(tokens=1, seeds=1))
    jobs = plan.jobs(tmp_path / "sweep")
    found = run_jobs(tmp_path / "sweep", jobs, 1, no_news)
    assert all(result["diverged"] for result in found.values())
    results = summarise(tmp_path / "sweep", plan, {job.rung: [found[job.key]] for job in jobs})
    assert [rung["bits_per_byte"] for rung in results["rungs"]] == [None, None]
    assert [rung["verdict"] for rung in results["rungs"]] == [None, "not comparable"]
    assert "not finite" in results["rungs"][0]["runs"][0]["why"]


def test_the_plan_is_kept_as_it_is(undisturbed: Any, tmp_path: Path) -> None:
    plan, _, _ = undisturbed
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan
    for text in ("{", "{}", '{"rungs": [{}]}', "[]"):
        (tmp_path / "plan.json").write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=r"plan\.json cannot be read .* name another --out"):
            Plan.read(tmp_path)


def test_the_summary_is_of_the_runs(undisturbed: Any) -> None:
    plan, folder, found = undisturbed
    by_rung: dict[str, list[dict[str, Any]]] = {}
    for job in plan.jobs(folder):
        by_rung.setdefault(job.rung, []).append(found[job.key])
    results = summarise(folder, plan, by_rung)
    learned, rope = results["rungs"]
    score = {name: [r["bits_per_byte"] for r in by_rung[name]] for name in by_rung}
    assert learned["bits_per_byte"] == pytest.approx(sum(score["learned"]) / 2)
    pairs = zip(score["rope"], score["learned"], strict=True)
    assert rope["difference"] == pytest.approx(sum(a - b for a, b in pairs) / 2)
    assert (learned["difference"], learned["verdict"]) == (None, None)
    assert rope["by_position"]["32"] is not None
    assert learned["by_position"]["32"] is None
    assert results["tokens"] == 5 * 2 * 16
    json.dumps(results)


def test_the_best_rate_of_each_rung(undisturbed: Any) -> None:
    plan, folder, _ = undisturbed
    tuning = plan_of(folder, folder / "data", question=Question(tokens=1, tune_lr=True)).tuning(
        folder
    )
    assert [job.run.train.lr for job in tuning[:3]] == [5e-4, 1e-3, 2e-3]
    scores = [3.0, 2.0, None, 1.0, None, 0.5]
    tuned = [(job, {"bits_per_byte": s}) for job, s in zip(tuning, scores, strict=True)]
    assert best_rates(tuned) == {"learned": 1e-3, "rope": 2e-3}
    assert plan.jobs(folder, best_rates(tuned))[1].run.train.lr == 2e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 0, "tokens": 1}, "--seeds must be at least 1"),
        ({}, "either --tokens or --minutes"),
        ({"tokens": 1, "minutes": 1.0}, "either --tokens or --minutes"),
        ({"tokens": 0}, "--tokens must be at least 1"),
        ({"minutes": -1.0}, "--minutes -1 must be above 0"),
    ],
)
def test_questions_that_are_none(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Question(**values)


def test_a_text_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("却说曹操引军至赤壁。" * 20, encoding="utf-8")
    question = Question(data=str(tmp_path / "a.txt"), tokens=100_000)
    with pytest.raises(DataError, match=r"a\.txt is too small: .* give more text"):
        make_plan(tmp_path / "out", question)
    with pytest.raises(InputError, match=r"has a vocabulary of"):
        make_plan(tmp_path / "out2", Question(base="gpt2", tokens=1))
    with pytest.raises(FileError, match="nowhere"):
        make_plan(tmp_path / "out3", Question(data="nowhere", tokens=1))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
