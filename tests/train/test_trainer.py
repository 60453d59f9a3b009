"""The loop: stopped, killed, diverged and out of space, and what is left of it then."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import arguments, config, metrics

import gpt2llama as g
from gpt2llama.cli._progress import TrainingProgress
from gpt2llama.cli.main import main
from gpt2llama.data.batches import IGNORED, Batch
from gpt2llama.errors import FileError, TrainingError
from gpt2llama.model.transformer import Transformer
from gpt2llama.train.run import make_trainer, train
from gpt2llama.train.run_folder import RunFolder
from gpt2llama.train.trainer import HeldOut, Interrupted, Trainer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")

# Everything that a resumed run could lose: dropout's noise, the place in the data and in the
# schedule, both optimisers' state, the best evaluation.
LONG: dict[str, Any] = {
    "steps": 40, "accumulate": 2, "dropout": 0.1, "schedule": "wsd", "warmup_steps": 5,
    "checkpoint_every": 4, "eval_every": 7,
}  # fmt: skip


class Undisturbed(dict[str, Path]):
    """By optimiser, trained when first asked for."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder

    def __missing__(self, optimizer: str) -> Path:
        self[optimizer] = self.folder / optimizer
        train(config(self.data, optimizer=optimizer, **LONG), self[optimizer])
        return self[optimizer]


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(data, tmp_path_factory.mktemp("undisturbed"))


def check_same(run: Path, other: Path) -> None:
    """To the bit: losses, weights, optimisers, random numbers, and what is latest and best."""
    assert metrics(run) == metrics(other)
    for name in ("latest", "best"):
        text = (run / name).read_text(encoding="utf-8")
        assert text == (other / name).read_text(encoding="utf-8")
        for file in ("model.safetensors", "trainer.safetensors"):
            path = Path("checkpoints", text.strip(), file)
            assert (run / path).read_bytes() == (other / path).read_bytes(), path


def last_step(run: Path) -> int:
    return int((metrics(run) or [{"step": 0}])[-1]["step"])


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpt2llama", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@contextmanager
def stopped_between_checkpoints(arguments: list[str], out: Path, err: Path) -> Iterator[Any]:
    """A process of its own, halted behind a step that has no checkpoint but follows one."""
    every = LONG["checkpoint_every"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gpt2llama", *arguments]
    with err.open("wb") as file, subprocess.Popen(command, stderr=file, env=environment) as process:
        try:
            while True:
                time.sleep(0.005)
                os.kill(process.pid, signal.SIGSTOP)
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), err.read_text(encoding="utf-8")
                if last_step(out) > every and last_step(out) % every:  # asked while it is halted
                    break
                os.kill(process.pid, signal.SIGCONT)
            yield process
        finally:
            process.kill()


def test_kill_9(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And while the first process holds the folder, a second one may not have it."""
    out, err = tmp_path / "run", tmp_path / "err"
    command = arguments(data, out, optimizer="muon", **LONG)
    with stopped_between_checkpoints(command, out, err) as process:
        held = metrics(out)
        assert call(monkeypatch, *command, "--resume") == 1
        said = capfd.readouterr().err
        assert f"{out} is in use by another process" in said
        assert said.count("\n") == 1
        assert metrics(out) == held
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = last_step(out)
    latest = (out / "latest").read_text(encoding="utf-8").strip()
    assert int(latest.removeprefix("step-")) < done < LONG["steps"]
    assert g.load(out)[1] is not None
    assert call(monkeypatch, "train", "--out", str(out), "--resume") == 0
    check_same(out, undisturbed["muon"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_any_failure_between_checkpoints(
    data: Path, undisturbed: Undisturbed, optimizer: str, tmp_path: Path
) -> None:
    run = config(data, optimizer=optimizer, **LONG)
    for step in (3, 10, 30):  # the first before any checkpoint

        def fail(line: dict[str, Any], step: int = step) -> None:
            if line["step"] == step:
                raise RuntimeError

        with pytest.raises(RuntimeError):
            train(run, tmp_path / "run", resume=True, report=fail)
        assert last_step(tmp_path / "run") == step
    train(run, tmp_path / "run", resume=True)
    check_same(tmp_path / "run", undisturbed[optimizer])


@pytest.mark.parametrize(
    ("name", "optimizer"), [(signal.SIGTERM, "muon"), (signal.SIGINT, "adamw")]
)
def test_a_signal_finishes_the_step_and_saves_it(
    data: Path, undisturbed: Undisturbed, name: signal.Signals, optimizer: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Shown(TrainingProgress):
        def update(self, line: dict[str, Any], steps: int) -> None:
            super().update(line, steps)
            if line["step"] == 10:
                os.kill(os.getpid(), name)

    before, out = signal.getsignal(name), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("gpt2llama.cli.train.TrainingProgress", Shown)
        code = call(patch, *arguments(data, out, optimizer=optimizer, **LONG))
    said = capfd.readouterr()
    assert code == 130
    assert said.out == ""
    assert f"stopped after step 10; go on with: gpt2llama train --out {out} --resume\n" in said.err
    assert signal.getsignal(name) is before
    assert (out / "latest").read_text(encoding="utf-8") == "step-000010\n"
    assert last_step(out) == 10
    assert call(monkeypatch, "train", "--out", str(out), "--resume") == 0
    (out / "checkpoints" / "step-000010").rename(tmp_path / "extra")
    check_same(out, undisturbed[optimizer])


def test_until_is_a_pause(data: Path, tmp_path: Path) -> None:
    run = config(data, dropout=0.1, steps=5, checkpoint_every="none")
    train(run, tmp_path / "whole")
    with RunFolder(tmp_path / "parts") as folder:
        trainer = make_trainer(run, folder, lambda line: None)
        assert trainer.run(until=2).step == 2
        assert folder.latest() is None
        assert trainer.run(until=99).step == 5
    check_same(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_at_the_last_step_is_no_interruption(data: Path, tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 6:
            signal.raise_signal(signal.SIGTERM)

    assert train(config(data), tmp_path / "run", report=stop).step == 6


STOPPING = "stopping after this step, which is saved; a second Ctrl-C stops within it, unsaved\n"


def test_a_second_ctrl_c_does_not_wait(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does it save; what was saved before stays."""

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        train(config(data), tmp_path / "run", report=stop)
    assert not isinstance(raised.value, Interrupted)
    assert capfd.readouterr().err == STOPPING
    assert (tmp_path / "run" / "latest").read_text(encoding="utf-8") == "step-000002\n"


def test_ctrl_c_is_answered_within_a_long_call(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a backward pass, in which no handler runs: here a read that ends with the answer."""
    said: list[str] = []
    reader, writer = os.pipe()

    def press() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the read goes on
        for _ in range(1000):
            if text := capfd.readouterr().err:
                said.append(text)
                break
            time.sleep(0.01)
        os.close(writer)

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            thread = threading.Thread(target=press)
            thread.start()
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
            thread.join()

    with pytest.raises(Interrupted, match="after step 3"):
        train(config(data), tmp_path / "run", report=stop)
    os.close(reader)
    assert said == [STOPPING]
    assert (tmp_path / "run" / "latest").read_text(encoding="utf-8") == "step-000003\n"


def test_early_stopping(data: Path, tmp_path: Path) -> None:
    settings = {"lr": 3.0, "warmup_steps": 0, "eval_every": 1, "patience": 2, "steps": 50}
    run, out = config(data, **settings, checkpoint_every="none"), tmp_path / "run"
    done = train(run, out)
    held = [line["held_out_loss"] for line in metrics(out)]
    assert len(held) == done.step < 50
    assert done.best == min(held) == held[done.best_step - 1]
    assert (done.worse, done.step) == (2, done.best_step + 2)
    assert min(held[-2:]) >= min(held)
    assert (out / "best").read_text(encoding="utf-8") == f"step-{done.best_step:06d}\n"
    assert (out / "latest").read_text(encoding="utf-8") == f"step-{done.step:06d}\n"
    assert train(run, out, resume=True).step == done.step  # patience is not renewed


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rate_far_too_high(
    data: Path, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wild = {"lr": 1e30, "warmup_steps": 0, "accumulate": 2, "checkpoint_every": 1}
    out = tmp_path / "run"
    assert call(monkeypatch, *arguments(data, out, optimizer=optimizer, **wild)) == 1
    said = capfd.readouterr().err
    assert "step 2 (batches 2 to 3): gradient of embed_tokens.weight is not finite" in said
    assert "the last good checkpoint is step-000001" in said
    assert "Traceback" not in said
    assert last_step(out) == 1
    assert g.load(out)[0].config.vocab_size == 290


class OneBatch:
    def __init__(self, content: Batch) -> None:
        self.content = content

    def batch(self, index: int) -> Batch:
        return self.content


def small_trainer(data: Path, folder: RunFolder, held_out: Any = None, **settings: Any) -> Trainer:
    run = config(data, **{"tie_embeddings": "false", **settings})
    ids = torch.arange(16).view(2, 8) % 7
    torch.manual_seed(0)
    source = OneBatch(Batch(ids, ids))
    return Trainer(Transformer(run.model), source, run.train, folder, held_out=held_out)


def test_a_bad_weight_is_named(data: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        trainer = small_trainer(data, folder)
        weight = trainer.model.get_parameter("layers.0.self_attn.k_proj.weight").data
        trainer.report = lambda line: line["step"] == 3 and weight.fill_(torch.nan)  # type: ignore  # a trap
        with pytest.raises(TrainingError) as raised:
            trainer.run()
    assert str(raised.value) == (
        "step 4 (batches 3 to 3): weight layers.0.self_attn.k_proj.weight is not finite; "
        "the last good checkpoint is step-000002; try a lower lr"
    )
    state = g.load(tmp_path / "run")[0].state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_held_out_loss_that_is_not_finite(data: Path, tmp_path: Path) -> None:
    """Token 9 is in no training batch: only the evaluation meets it."""
    ids = torch.full((1, 8), 9)
    held_out = HeldOut(lambda: [Batch(ids, ids)], bytes=8)
    with RunFolder(tmp_path / "run") as folder:
        trainer = small_trainer(data, folder, held_out, checkpoint_every=1)
        trainer.model.embed_tokens.weight.data[9] = torch.nan
        with pytest.raises(TrainingError, match=r"step 3\b.*(held|evaluat)"):
            trainer.run()
    assert not (tmp_path / "run" / "best").exists()
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_nothing_to_learn_at_all(data: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        trainer = small_trainer(data, folder)
        ids = torch.zeros(1, 8, dtype=torch.long)
        trainer.batches = OneBatch(Batch(ids, ids + IGNORED))
        with (
            pytest.warns(UserWarning, match="nothing to learn"),
            pytest.raises(TrainingError, match=r"no batch had a target.*every label is masked"),
        ):
            trainer.run()


def test_a_batch_with_nothing_to_learn_is_skipped_and_counted(data: Path, tmp_path: Path) -> None:
    """The weights stay, and so do the other steps' losses."""

    class Some:
        def __init__(self, inner: Any, empty: tuple[int, ...]) -> None:
            self.inner, self.empty = inner, empty

        def batch(self, index: int) -> Batch:
            found: Batch = self.inner.batch(index)
            if index in self.empty:
                return Batch(found.ids, torch.full_like(found.targets, IGNORED))
            return found

    with RunFolder(tmp_path / "run") as folder:
        trainer = small_trainer(data, folder, schedule="constant", warmup_steps=0)
        trainer.batches = Some(trainer.batches, (1,))
        trainer.run(until=1)
        before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        with pytest.warns(UserWarning, match=r"step 2 has nothing to learn.*1 so far"):
            trainer.run(until=2)
        assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
        progress = trainer.run()
    assert progress.skipped == 1
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" not in line] == [2]
    assert lines[-1]["step"] == progress.step


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes meanwhile: to a program this is a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.safetensors", "tokenizer.json"])
def test_a_full_disk_keeps_the_last_checkpoint(
    data: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    train(config(data), out)
    size = (out / "checkpoints" / "step-000006" / file).stat().st_size
    with file_limit(size - 1):
        assert call(monkeypatch, *arguments(data, out, "--resume", steps=9)) == 1
    said = capfd.readouterr().err
    assert "gpt2llama: cannot write" in said
    assert "checkpoints/step-000008" in said
    assert said.count("\n") == 1
    assert (out / "latest").read_text(encoding="utf-8") == "step-000006\n"
    assert not [*(out / "checkpoints").glob(".*")]
    assert g.load(out)[1] is not None
    assert call(monkeypatch, *arguments(data, out, "--resume", steps=9)) == 0  # space was made


def test_a_full_disk_while_writing_metrics(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = arguments(data, out, steps=30, checkpoint_every="none", eval_every="none")
    with file_limit(2000):
        assert call(monkeypatch, *command) == 1
    said = capfd.readouterr().err
    assert f"gpt2llama: cannot write {out}/metrics.jsonl" in said
    assert said.count("\n") == 1
    assert json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[0])


def test_what_cannot_be_a_run_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot use"):
        train(config(data), tmp_path / "file")
