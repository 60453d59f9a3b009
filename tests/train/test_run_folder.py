from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import config, metrics

import gpt2llama as g
from gpt2llama.data.prepare import prepare
from gpt2llama.errors import ConfigError, DataError, FileError, WeightsError
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import load_tokenizer, train_bpe
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.optim import make_optimizers
from gpt2llama.train.run import train
from gpt2llama.train.run_folder import RunFolder, read_metrics, read_state, write_state


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 7 steps with checkpoints at 2, 4, 6 and evaluations at 3, 6."""
    out = tmp_path_factory.mktemp("run") / "finished"
    train(config(data, steps=7), out)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_names(finished: Path, data: Path) -> None:
    """A checkpoint where one is due, where the loss is the best so far, and at the end."""
    made = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert made == [f"step-{step:06d}" for step in (2, 3, 4, 6, 7)]
    assert (finished / "latest").read_text(encoding="utf-8") == "step-000007\n"
    held = {line["step"]: line.get("held_out_loss", 99.0) for line in metrics(finished)}
    best = min(held, key=lambda step: held[step])
    assert (finished / "best").read_text(encoding="utf-8") == f"step-{best:06d}\n"
    assert list(held) == [1, 2, 3, 4, 5, 6, 7]
    line = read_metrics(finished)[-1]
    assert line["tokens"] == 7 * 2 * 16
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "seconds", "bits_per_byte"} <= set(line)
    assert (finished / "loss.svg").read_text(encoding="utf-8").startswith("<svg")
    hidden = [path.name for path in finished.rglob(".*")]
    assert hidden == [".lock"]


def test_a_run_folder_loads_as_its_latest_checkpoint(finished: Path) -> None:
    model, tokenizer = g.load(finished)
    last, _ = g.load(finished / "checkpoints" / "step-000007")
    torch.testing.assert_close(dict(model.state_dict()), dict(last.state_dict()), rtol=0, atol=0)
    assert tokenizer is not None
    assert "".join(g.stream(model, tokenizer, "曹操", max_new_tokens=2))


def test_a_used_folder_is_refused_and_untouched(run: Path, data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    with pytest.raises(FileError, match="already used; continue it with --resume"):
        train(config(data, steps=7), run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"} == (
        before
    )
    (run.parent / "other").mkdir()
    (run.parent / "other" / "thesis.txt").touch()
    with pytest.raises(FileError, match="already used"):
        RunFolder(run.parent / "other")
    (run.parent / "file").touch()
    with pytest.raises(FileError, match="cannot use"):
        RunFolder(run.parent / "file")


def test_resume_in_a_new_folder_starts_at_the_beginning(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    train(config(data, steps=7), tmp_path / "new", resume=True)
    assert metrics(tmp_path / "new") == metrics(finished)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.004}, r"begun with lr=0\.003, not 0\.004"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"n_layers": 2}, "n_layers=1, not 2"),
        ({"batch_size": 4}, "batch_size=2, not 4"),
        ({"clip": "none"}, r"clip=1\.0, not None"),
    ],
)
def test_a_resumed_run_keeps_its_settings(run: Path, data: Path, changes: Any, says: str) -> None:
    written = (run / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=says):
        train(config(data, steps=7, **changes), run, resume=True)
    assert (run / "config.toml").read_bytes() == written


def test_a_resumed_run_keeps_its_data(run: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("the model reads 曹操。" * 200, encoding="utf-8")
    tokenizer = load_tokenizer(data / "tokenizer")
    other = prepare([tmp_path / "other.txt"], tokenizer, tmp_path / "other").folder
    with pytest.raises((ConfigError, DataError), match="data"):
        train(config(other, steps=8), run, resume=True)


def test_more_steps_go_on(run: Path, data: Path) -> None:
    before = metrics(run)
    done = train(config(data, steps=9, eval_every=1, checkpoint_every=50), run, resume=True)
    assert (done.step, done.tokens) == (9, 9 * 2 * 16)
    assert metrics(run)[:7] == before
    assert [line["step"] for line in metrics(run)] == [*range(1, 10)]
    assert (run / "latest").read_text(encoding="utf-8") == "step-000009\n"


def test_a_finished_run_stays_as_it_is(run: Path, data: Path) -> None:
    before = metrics(run)
    reported: list[Any] = []
    assert train(config(data, steps=7), run, resume=True, report=reported.append).step == 7
    assert metrics(run) == before
    assert reported == []


def test_what_a_kill_leaves_is_mended(run: Path, data: Path, finished: Path) -> None:
    """In the middle of writing step 7: a partial checkpoint, lines too many, one of them cut."""
    last = run / "checkpoints" / "step-000007"
    last.rename(run / "checkpoints" / ".step-000007.abcd")
    (run / "checkpoints" / ".step-000007.abcd" / "model.safetensors").write_bytes(b"half")
    (run / "latest").write_text("step-000006\n", encoding="utf-8")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "lo')
    assert len(read_metrics(run)) == 7
    train(config(data, steps=7), run, resume=True)
    assert metrics(run) == metrics(finished)
    assert not [*(run / "checkpoints").glob(".*")]
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (last / name).read_bytes() == (
            finished / "checkpoints" / last.name / name
        ).read_bytes()


def test_a_kill_before_latest_and_best_were_written(run: Path, data: Path) -> None:
    best = (run / "best").read_text(encoding="utf-8")
    (run / "latest").write_text("step-000006\n", encoding="utf-8")
    (run / "best").unlink()
    train(config(data, steps=7), run, resume=True)
    assert (run / "latest").read_text(encoding="utf-8") == "step-000007\n"
    assert (run / "best").read_text(encoding="utf-8") == best


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "trainer.json"])
@pytest.mark.parametrize("size", [0, 10, -3, None])
def test_a_truncated_checkpoint(run: Path, data: Path, name: str, size: int | None) -> None:
    path = run / "checkpoints" / "step-000007" / name
    content = path.read_bytes()
    path.unlink() if size is None else path.write_bytes(content[:size])
    with pytest.raises((FileError, WeightsError), match=rf"step-000007.{name}") as raised:
        train(config(data, steps=8), run, resume=True)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_that_lacks_a_tensor(run: Path, data: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = run / "checkpoints" / "step-000007" / "model.safetensors"
    state = load_file(path)
    del state["layers.0.mlp.up_proj.weight"]
    save_file(state, path)
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        train(config(data, steps=8), run, resume=True)


def test_the_data_must_be_the_tokenizers(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    shutil.rmtree(folder / "tokenizer")
    train_bpe(["Quite another text, with other pieces in it. " * 20], 280).save(
        folder / "tokenizer"
    )
    with pytest.raises(DataError, match="its tokenizer is not the one its shards were made with"):
        train(config(folder), tmp_path / "run")
    with pytest.raises(DataError, match="add --set vocab_size=290"):
        train(config(data, vocab_size=100), tmp_path / "run")
    train(config(data, steps=1), tmp_path / "run")  # the folder is not used up by that


def test_one_process_holds_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), pytest.raises(FileError, match="in use by another process"):
        RunFolder(tmp_path / "run", resume=True)
    RunFolder(tmp_path / "run", resume=True).close()


def begun(folder: RunFolder) -> None:
    folder.write_text("config.toml", "")
    folder.write_text("begun.sha256", "")


def fail(path: Path, before: Callable[[RunFolder], None], error: type[BaseException]) -> None:
    def session() -> None:
        with RunFolder(path, resume=True) as folder:
            before(folder)
            raise error

    with pytest.raises(error):
        session()


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    """Neither files nor the folders that lead to them, but those that were there."""
    for before in (lambda folder: None, begun):
        fail(tmp_path / "deep" / "run", before, DataError)
        assert not any(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    fail(tmp_path / "mine", begun, DataError)
    assert not any((tmp_path / "mine").iterdir())


def test_what_a_failing_run_made_or_found_stays(tmp_path: Path) -> None:
    def worked(folder: RunFolder) -> None:
        begun(folder)
        folder.write_text("reference.safetensors", "hours of work")

    fail(tmp_path / "worked", worked, DataError)
    assert (tmp_path / "worked" / "begun.sha256").exists()
    fail(tmp_path / "stopped", begun, KeyboardInterrupt)  # by which it can be resumed
    assert (tmp_path / "stopped" / "config.toml").exists()
    fail(tmp_path / "stopped", lambda folder: None, DataError)  # the resumed one
    assert (tmp_path / "stopped" / "config.toml").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no file that is open")
def test_a_lock_that_was_removed_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that never began removes the folder between another's opening of the lock and its
    taking it."""
    import fcntl

    first, take = RunFolder(tmp_path / "run"), fcntl.flock

    def late(*arguments: Any) -> None:
        first.close()
        take(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileError, match="in use by another process"):
        RunFolder(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", take)
    RunFolder(tmp_path / "run").close()


def test_write_text_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.write_text("latest", "却说\n")
        monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(FileError, match=r"cannot write .*latest: .*No space"):
            folder.write_text("latest", "new")
    assert (tmp_path / "run" / "latest").read_bytes() == "却说\n".encode()
    assert not [*(tmp_path / "run").glob(".latest*")]


def test_metrics_go_on_behind_a_step(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        with folder.log(0) as log:
            for step in (1, 2, 3):
                log.write({"step": step, "loss": 0.1})
        with folder.log(2) as log:
            log.write({"step": 3, "loss": 0.2})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [0.1, 0.1, 0.2]
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_comes_back(data: Path, optimizer: str, tmp_path: Path) -> None:
    run = config(data, optimizer=optimizer)
    models = [Transformer(run.model) for _ in range(2)]
    optimizers = [make_optimizers(model, run.train) for model in models]
    for p in models[0].parameters():
        p.grad = torch.randn_like(p)
    for o in optimizers[0]:
        o.step()
    rng = {"cpu": torch.get_rng_state()}
    write_state(tmp_path, models[0], optimizers[0], rng, {"step": 3})
    got, progress = read_state(tmp_path, models[1], optimizers[1])
    assert torch.equal(got["cpu"], rng["cpu"])
    assert progress == {"step": 3}
    for a, b in zip(*optimizers, strict=True):
        assert a.state_dict()["state"].keys() == b.state_dict()["state"].keys() != set()
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def test_state_of_another_run_is_refused(data: Path, tmp_path: Path) -> None:
    run = config(data, optimizer="muon")
    model = Transformer(run.model)
    optimizers = make_optimizers(model, run.train)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for o in optimizers:
        o.step()
    write_state(tmp_path, model, optimizers, {}, {})
    with pytest.raises(WeightsError, match="has no owner in this run"):
        read_state(tmp_path, model, make_optimizers(model, TrainConfig(optimizer="adamw")))
