"""Distillation: the divergences against PyTorch's and by hand, the gradient's scale, whole runs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import config, metrics
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close
from typer.testing import CliRunner

import gpt2llama as g
from gpt2llama.cli._finetune_distill import distill as command
from gpt2llama.data.batches import IGNORED, Batch, TokenData
from gpt2llama.errors import ConfigError, FileError, TokenizerError, WeightsError
from gpt2llama.finetune import top_k as top_k_module
from gpt2llama.finetune.distill import (
    Distillation,
    DistillConfig,
    DistillRun,
    LiveTeacher,
    StoredTeacher,
    distill,
    divergence,
    make_distiller,
)
from gpt2llama.finetune.top_k import TaughtBatches, TopK, bucket_divergence
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.config import RunConfig
from gpt2llama.train.run import train
from gpt2llama.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "run"
    train(config(data, steps=8, d_model=24, n_layers=2, lr=0.01), out)
    return out


def a_run(
    data: Path, teacher: Path, how: dict[str, Any] | None = None, **changes: Any
) -> DistillRun:
    run = config(data, **changes)
    distilled = DistillConfig(teacher=str(teacher), **how or {})
    return DistillRun(model=run.model, train=run.train, data=run.data, distill=distilled)


def logits(seed: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64) * 3


def test_by_hand() -> None:
    """(1/2, 1/4, 1/4) and (1/4, 1/4, 1/2) at T = 1; at T = 2 their square roots, normalised."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert_close(divergence(q, p, 1.0), torch.tensor([0.25 * math.log(2)]))
    a, b = math.sqrt(0.5), 0.5  # of 1/2 and of 1/4, over their sum a + 2 b
    by_hand = (a - b) / (a + 2 * b) * math.log(a / b)
    assert_close(divergence(q, p, 2.0), torch.tensor([by_hand]))
    # One token and a bucket: (1/2, 1/2) against (1/4, 3/4).
    bucket = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert_close(bucket_divergence(q, TopK.of(p, 1, 1.0), 1.0), torch.tensor([bucket]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_against_pytorch(temperature: float) -> None:
    student, teacher = logits(0, 5, 11), logits(1, 5, 11)
    wanted = kl_divergence(
        Categorical(logits=teacher / temperature), Categorical(logits=student / temperature)
    )
    assert_close(divergence(student, teacher, temperature), wanted)
    everything = TopK.of(teacher, 11, temperature)
    assert_close(bucket_divergence(student, everything, temperature), wanted)


@given(st.integers(0, 10**6), st.sampled_from([0.7, 1.0, 3.0]))
def test_a_bucket_hides_but_never_adds(seed: int, temperature: float) -> None:
    """Each token out of the bucket can only tell the two further apart."""
    student, teacher = logits(seed, 3, 9), logits(seed + 1, 3, 9)
    kls = [
        bucket_divergence(student, TopK.of(teacher, k, temperature), temperature)
        for k in range(1, 10)
    ]
    whole = divergence(student, teacher, temperature)
    for fewer, more in zip(kls, [*kls[1:], whole], strict=True):
        assert (fewer <= more + 1e-12).all()
    assert (kls[0] >= -1e-12).all()
    top = TopK.of(teacher, 3, temperature)
    assert_close(top.logprobs.exp().sum(-1) + top.rest.exp(), torch.ones(3, dtype=torch.float64))


def test_the_gradient_keeps_its_size() -> None:
    """T² times: T (q - p) in general, and at a high temperature the difference of the centred
    logits over their number (Hinton et al. 2015, equations 2 to 4)."""
    teacher = logits(1, 4, 7)
    for t in (1.0, 3.0, 1e5):
        student = logits(0, 4, 7).requires_grad_()
        (t**2 * divergence(student, teacher, t)).sum().backward()
        q, p = ((x / t).softmax(-1) for x in (student.detach(), teacher))
        assert student.grad is not None
        assert_close(student.grad, t * (q - p))
    centred = [x - x.mean(-1, keepdim=True) for x in (student.detach(), teacher)]
    assert_close(student.grad, (centred[0] - centred[1]) / 7, rtol=1e-3, atol=1e-4)  # T is finite


def tiny(seed: int, vocab_size: int = 29, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "max_seq_len": 8,
        "n_layers": 1,
        "n_heads": 2,
        "d_model": 8,
        "d_ff": 12,
    }
    model = Transformer(g.ModelConfig(vocab_size=vocab_size, **sizes | changes)).eval()
    with torch.no_grad():
        model.embed_tokens.weight.normal_()
    return model


def test_the_objective_is_the_mixture() -> None:
    student, teacher = tiny(0), tiny(1)
    ids, targets = torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6)
    batch = Batch(ids, targets)
    nats = torch.nn.functional.cross_entropy(student(ids).flatten(0, 1), targets.flatten())
    kl = divergence(student(ids).flatten(0, 1), teacher(ids).flatten(0, 1), 3.0).mean()
    for alpha in (0.0, 0.3, 1.0):
        how = DistillConfig(teacher="x", temperature=3.0, alpha=alpha)
        loss = Distillation(how, LiveTeacher(teacher, 3.0))(student, batch) / batch.count
        assert_close(loss, alpha * 9 * kl + (1 - alpha) * nats)
    itself = Distillation(DistillConfig(teacher="x", alpha=1.0), LiveTeacher(student, 2.0))
    loss = itself(student, batch)
    loss.backward()
    assert_close(loss, torch.zeros(()), rtol=0, atol=1e-5)  # of 12 places in fp32
    assert all(
        p.grad is not None and p.grad.abs().max() < 1e-5 for p in student.parameters()
    )  # the teacher is the student: nothing pulls


def test_masked_places_and_other_documents_do_not_count() -> None:
    student, teacher = tiny(0), tiny(1)
    how = DistillConfig(teacher="x", alpha=0.7)
    objective = Distillation(how, LiveTeacher(teacher, how.temperature))
    first, second = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 8, 7]])
    alone = sum(objective(student, Batch(ids, ids)) for ids in (first, second))
    packed = Batch(
        torch.cat([first, second, first], 1),
        torch.cat([first, second, torch.full((1, 3), IGNORED)], 1),
        documents=torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2]]),
        positions=torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]]),
    )
    assert_close(objective(student, packed), alone)


def test_a_padded_table_is_cut_to_what_both_have() -> None:
    student, teacher = tiny(0, 29), tiny(1, 37)
    ids = torch.arange(6)[None]
    how = DistillConfig(teacher="x", alpha=1.0, temperature=2.0)
    loss = Distillation(how, LiveTeacher(teacher, 2.0))(student, Batch(ids, ids))
    wanted = 4 * divergence(student(ids)[0], teacher(ids)[0, :, :29], 2.0).sum()
    assert_close(loss, wanted)


def taught(data: Path, folder: Path, k: int, temperature: float = 2.0) -> TaughtBatches:
    return TaughtBatches(
        TokenData.open(data).train, folder, vocab_size=290, k=k, temperature=temperature,
        batch_size=3, seq_len=16, seed=5,
    )  # fmt: skip


def test_all_tokens_stored_are_the_teacher_itself(
    data: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several shards and epochs, whatever the order in which batches are asked for."""
    monkeypatch.setattr(top_k_module, "SHARD_BYTES", 16 * 290 * 6 * 20)
    model, student = g.load(teacher)[0].requires_grad_(False), tiny(0, 290, max_seq_len=16)
    batches = taught(data, tmp_path, 290)
    batches.fill(lambda: model, 10**6)
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    how = DistillConfig(teacher="x", temperature=2.0, alpha=1.0)
    live = Distillation(how, LiveTeacher(model, 2.0))
    stored = Distillation(how, StoredTeacher(290, 2.0))
    epoch = -(-batches.windows // 3)
    for index in (0, epoch + 2, 1, 3 * epoch):
        batch = batches.batch(index)
        assert_close(stored(student, batch), live(student, Batch(batch.ids, batch.targets)))
    rows = torch.cat([batches.batch(i).ids for i in range(batches.windows)])  # three epochs
    seen, counts = rows.unique(dim=0, return_counts=True)
    assert len(seen) <= batches.windows
    assert (counts % 3 == 0).all()


def test_a_few_tokens_say_nearly_all(data: Path, teacher: Path, tmp_path: Path) -> None:
    """And the shards hold no more than what the run reads, to the shard."""
    model, student = g.load(teacher)[0].requires_grad_(False), tiny(0, 290, max_seq_len=16)
    batches = taught(data, tmp_path, 40, temperature=1.0)
    batches.fill(lambda: model, 2)
    batch = batches.batch(1)
    real = batch.targets != IGNORED
    whole = LiveTeacher(model, 1.0)(student(batch.ids)[real], batch, real)
    part = StoredTeacher(290, 1.0)(student(batch.ids)[real], batch, real)
    assert (part <= whole + 1e-5).all()
    assert part.sum() > 0


class Stop(Exception):
    pass


def test_shards_are_written_once_and_go_on(
    data: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k_module, "SHARD_BYTES", 16 * 8 * 6 * 20)
    monkeypatch.setattr(top_k_module, "AT_ONCE", 16 * 4)
    model, loaded = g.load(teacher)[0].requires_grad_(False), list[int]()

    def load() -> Transformer:
        loaded.append(1)
        return model

    taught(data, tmp_path / "whole", 8).fill(load, 10**6)

    def stop(done: int, count: int) -> None:
        if done > 45:
            raise Stop

    with pytest.raises(Stop):
        taught(data, tmp_path / "parts", 8).fill(load, 10**6, stop)
    (tmp_path / "parts" / ".00002.safetensors.abc").touch()  # as a kill would leave it
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "parts").glob("0*")}
    assert before.keys() == {"00000.safetensors", "00001.safetensors"}
    taught(data, tmp_path / "parts", 8).fill(load, 10**6)
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == names
    for name in names:
        parts, whole = (tmp_path / folder / name for folder in ("parts", "whole"))
        assert parts.read_bytes() == whole.read_bytes()
        assert name not in before or parts.stat().st_mtime_ns == before[name]
    taught(data, tmp_path / "parts", 8).fill(load, 10**6)
    assert len(loaded) == 3  # the last time nothing was missing
    with pytest.raises(WeightsError, match=r"00000\.safetensors is another run's; delete it"):
        taught(data, tmp_path / "parts", 9).batch(0)


def check_same(run: Path, other: Path) -> None:
    assert metrics(run) == metrics(other)
    for file in ("model.safetensors", "trainer.safetensors"):
        path = Path("checkpoints", (run / "latest").read_text(encoding="utf-8").strip(), file)
        assert (run / path).read_bytes() == (other / path).read_bytes(), path


@pytest.mark.parametrize("how", [{}, {"top_k": 8, "temperature": 3.0}])
def test_resumed_equals_undisturbed(
    data: Path, teacher: Path, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k_module, "SHARD_BYTES", 16 * 8 * 6 * 20)
    settings: dict[str, Any] = {"steps": 12, "dropout": 0.1, "accumulate": 2}
    settings |= {"checkpoint_every": 4, "optimizer": "muon"}
    run = a_run(data, teacher, how, **settings)
    distill(run, tmp_path / "whole")

    def at_5(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise Stop

    def at_once(done: int, count: int) -> None:
        raise Stop

    if "top_k" in how:  # stopped before the first step, too
        with pytest.raises(Stop):
            distill(run, tmp_path / "parts", watch=at_once)
    with pytest.raises(Stop):
        distill(run, tmp_path / "parts", resume=True, report=at_5)
    assert DistillRun.read(tmp_path / "parts" / "config.toml") == run
    assert distill(run, tmp_path / "parts", resume=True).step == 12
    check_same(tmp_path / "parts", tmp_path / "whole")
    with pytest.raises(ConfigError, match="was begun with temperature="):
        distill(a_run(data, teacher, {**how, "temperature": 9.0}, **settings), tmp_path / "parts",
                resume=True)  # fmt: skip


def test_without_the_teacher_it_is_training(data: Path, teacher: Path, tmp_path: Path) -> None:
    settings = {"steps": 6, "dropout": 0.1}
    distill(a_run(data, teacher, {"alpha": 0}, **settings), tmp_path / "distilled")
    train(config(data, **settings), tmp_path / "trained")
    first, second = (metrics(tmp_path / name) for name in ("distilled", "trained"))
    assert [line["step"] for line in first] == [line["step"] for line in second]
    for ours, theirs in zip(first, second, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_student_comes_nearer_to_its_teacher(data: Path, teacher: Path, tmp_path: Path) -> None:
    """On held-out text, and nearer than by the data alone."""
    far = tmp_path / "data", tmp_path / "teacher"
    settings = {"steps": 60, "lr": 0.01, "eval_every": "none", "checkpoint_every": "none"}
    train(config(data, **settings), far[0])
    distill(a_run(data, teacher, {"alpha": 1.0, "temperature": 1.0}, **settings), far[1])
    tokens = torch.from_numpy(TokenData.open(data).held_out[:160]).view(10, 16)
    model = g.load(teacher)[0]
    with torch.no_grad():
        wanted = model(tokens).flatten(0, 1)
        kl = [divergence(g.load(run)[0](tokens).flatten(0, 1), wanted, 1.0).mean() for run in far]
    assert kl[1] < 0.7 * kl[0]


def test_refusals(data: Path, teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    g.save(tiny(0, 290), train_bpe(["another text " * 40], 290), other)
    with RunFolder(tmp_path / "run") as folder:
        with pytest.raises(TokenizerError, match=r"another tokenizer than the data.*--prompts"):
            make_distiller(a_run(data, other), folder)
        with pytest.raises(ConfigError, match=r"a context of 16 and seq_len is 32; add --set"):
            make_distiller(a_run(data, teacher, max_seq_len=32), folder)
        with pytest.raises(ConfigError, match="compile=on is for train and finetune instruct"):
            make_distiller(a_run(data, teacher, compile="on"), folder)
    with pytest.raises(ConfigError, match=r"alpha is a share, at most 1 \(got 1\.5\)"):
        DistillConfig(teacher="x", alpha=1.5)
    with pytest.raises(ConfigError, match="temperature must be a number above 0"):
        DistillConfig(teacher="x", temperature=0.0)
    nowhere = a_run(tmp_path / "nowhere", teacher)
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it with"):
        distill(nowhere, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def call(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command(
    data: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_run import SETTINGS

    pairs = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    out = tmp_path / "run"
    said = call(
        "zh-3m", "--teacher", teacher, "--data", data, "--out", out, "--top-k", 8, "--alpha", 0.9,
        *pairs, "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    assert re.search(r'"step": 6, "tokens": 192', said.stdout)
    run = DistillRun.read(out / "config.toml")
    assert (run.distill.alpha, run.distill.top_k, run.distill.temperature) == (0.9, 8, 2.0)
    assert run.distill.teacher == str(teacher / "checkpoints" / "step-000008")
    assert g.load(out)[1] is not None
    with pytest.raises(ConfigError, match="has no field 'distill'"):  # `train` will not go on
        RunConfig.read(out / "config.toml")
    again = call("--out", out, "--resume", "--set", "steps=8", "--json")
    assert again.exit_code == 0, again.output
    assert '"step": 8' in again.stdout
    assert isinstance(call("--out", tmp_path / "x").exception, ConfigError)
    whole = ["zh-3m", *pairs, "--set=steps=8"]
    for more in (["--teacher", teacher], ["--data", data], ["zh-3m"], whole):
        done = call("--out", out, "--resume", *more)
        assert "nothing was left to do: step 8 " in done.stderr, done.exception
    for more, says in (
        (["--teacher", data], "was begun with teacher="),
        (["--data", teacher], "was begun with data="),
        (["--alpha", 1], "was begun with alpha=0.9, not 1"),
        ([teacher], "was begun with d_model=16, not 24"),
        (["gpt2"], "was begun with "),
    ):
        assert says in str(call("--out", out, "--resume", *more).exception)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt2llama.finetune.distill.distill", interrupt)
    stopped = call("--out", out, "--resume")
    assert stopped.exit_code == 130
