"""A run of `finetune classify`: what learns, what is kept, stopped and resumed, and said."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from tiny_texts import SETTINGS, TOY, make_texts, run, write_texts

import gpt2llama as g
from gpt2llama.cli._finetune_classify import classify as command
from gpt2llama.cli._progress import TrainingProgress
from gpt2llama.cli.classify import classify as use
from gpt2llama.data.batches import Batch
from gpt2llama.errors import ConfigError, DataError, WeightsError
from gpt2llama.finetune.classifier import load_classifier
from gpt2llama.finetune.classify import (
    ClassifyConfig,
    TextBatches,
    to_example,
    weighted_loss,
)
from gpt2llama.finetune.labelled import read_labelled, split
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.run_folder import read_metrics

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model to begin with."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tokenizer = train_bpe([text for text, _ in make_texts(40, seed=1)], TOY.vocab_size)
    torch.manual_seed(1)
    g.save(g.Transformer(TOY.replace(vocab_size=tokenizer.vocab_size)), tokenizer, folder)
    return folder


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Exit code, stdout, stderr of a command that is mounted elsewhere."""

    def call(function: Callable[..., None], *arguments: object) -> tuple[int, str, str]:
        app = typer.Typer()
        app.command()(function)
        code = 0
        try:
            code = app([*map(str, arguments)], standalone_mode=False) or 0
        except typer.Exit as stop:
            code = stop.exit_code
        out, err = capfd.readouterr()
        return code, out, err

    return call


def options(**changes: Any) -> list[str]:
    """tiny_texts' run on the command line."""
    fields = {**TOY.to_dict(), **SETTINGS, "steps": 8, **changes}
    pairs = [f"--set={k}={'none' if v is None else str(v).lower()}" for k, v in fields.items()]
    return ["--preset", "zh-3m", *pairs]


def metrics(out: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(out)]


def test_it_learns_and_says_how_well(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    result = run(data, tmp_path / "run", steps=120, say=said.append)
    assert result.scores.accuracy >= 0.9
    assert result.majority == 0.5
    assert result.texts.items() >= {"read": 120, "held_out": 24, "duplicates": 0}.items()
    assert "120 texts: " in said[0]
    assert "24 held out" in said[0]
    written = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert written == result.to_dict()
    # The figures are those of the saved model on texts that it has not seen.
    parts = split(read_labelled(data), 0)
    classifier = load_classifier(tmp_path / "run")
    shares = classifier.probabilities([text for text, _ in parts.held_out])
    likeliest = [max(share, key=lambda label: share[label]) for share in shares]
    right = [said == label for said, (_, label) in zip(likeliest, parts.held_out, strict=True)]
    assert sum(right) / len(right) == result.scores.accuracy
    sure = torch.tensor([max(share.values()) for share in shares], dtype=torch.float64)
    gap = torch.zeros(10, dtype=torch.float64)
    gap.index_add_(0, (sure * 10).ceil().long() - 1, torch.tensor(right).double() - sure)
    assert gap.abs().sum().item() / len(right) == pytest.approx(result.scores.ece, abs=1e-6)


def test_the_best_step_is_kept(data: Path, tmp_path: Path) -> None:
    """At a rate that ruins it the last is not the best."""
    result = run(data, tmp_path / "run", steps=24, lr=0.3, warmup_steps=0, schedule="constant")
    losses = {line["step"]: line.get("held_out_loss") for line in metrics(tmp_path / "run")}
    scored = {step: loss for step, loss in losses.items() if loss is not None}
    assert list(scored) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert result.best_step == min(scored, key=lambda step: scored[step])
    parts = split(read_labelled(data), 0)
    shares = load_classifier(tmp_path / "run").probabilities([t for t, _ in parts.validation])
    # Undo the temperature: the loss of the metrics is that of the model alone.
    logits = torch.tensor([[*share.values()] for share in shares]).log() * result.temperature
    classes = torch.tensor([parts.labels.index(label) for _, label in parts.validation])
    count = [sum(label == x for _, label in parts.train) for x in parts.labels]
    weights = torch.tensor([len(parts.train) / (2 * n) for n in count])
    loss = F.cross_entropy(logits, classes, weights).item()
    assert loss == pytest.approx(scored[result.best_step], rel=1e-3)


@pytest.mark.parametrize("method", ["last-layer", "lora", "full"])
def test_what_learns(method: Any, data: Path, base: Path, tmp_path: Path) -> None:
    before, _ = g.load(base)
    run(data, tmp_path / "run", begin=base, how=ClassifyConfig(method=method), weight_decay=0.1)
    after = load_classifier(tmp_path / "run").model
    assert after.lm_head.weight.abs().sum() > 0
    changed = {
        name.split(".")[-2]
        for name, p in before.named_parameters()
        if not torch.equal(p, after.get_parameter(name))
    }
    matrices = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    norms = {"attn_norm", "mlp_norm", "norm"}
    wanted: dict[str, set[str]] = {
        "last-layer": set(),
        "lora": matrices,
        "full": matrices | norms | {"embed_tokens"},
    }
    assert changed == wanted[method]
    step = (tmp_path / "run" / "latest").read_text(encoding="utf-8").strip()
    kept = tmp_path / "run" / "checkpoints" / step / "trained.safetensors"
    whole = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert (kept.stat().st_size < whole / 2) == (method != "full")


@pytest.mark.parametrize("method", ["new", "last-layer", "lora", "full"])
def test_stopped_and_resumed_is_undisturbed(
    method: Any, data: Path, base: Path, tmp_path: Path
) -> None:
    """To the bit: dropout's noise, the texts' order, the optimiser, what is best and its figures.

    Stopped where there is no checkpoint, so that steps are made again.
    """
    begin: Any = TOY.replace(dropout=0.1) if method == "new" else base
    how = ClassifyConfig(method="full" if method == "new" else method)
    settings = {"steps": 13, "begin": begin, "how": how, "accumulate": 2}

    def fail(line: dict[str, Any], steps: int) -> None:
        if line["step"] in (1, 7) and line["step"] not in seen:
            seen.add(line["step"])
            raise RuntimeError

    seen = set[int]()
    whole = run(data, tmp_path / "whole", **settings)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(data, tmp_path / "parts", **settings, resume=True, report=fail)
    parts = run(data, tmp_path / "parts", **settings, resume=True, report=fail)
    assert seen == {1, 7}
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    place = ("run", "seconds")
    assert {k: v for k, v in whole.to_dict().items() if k not in place} == {
        k: v for k, v in parts.to_dict().items() if k not in place
    }
    last = f"checkpoints/step-{13:06d}"
    for name in (f"{last}/trained.safetensors", f"{last}/trainer.safetensors",
                 "model/model.safetensors", "model/classifier.json"):  # fmt: skip
        one, other = ((tmp_path / x / name).read_bytes() for x in ("whole", "parts"))
        assert one == other, name


def test_a_finished_run_goes_on_with_more_steps(data: Path, tmp_path: Path) -> None:
    how = {"schedule": "constant", "begin": TOY}
    run(data, tmp_path / "parts", steps=6, **how)
    again = run(data, tmp_path / "parts", steps=12, **how, resume=True)
    whole = run(data, tmp_path / "whole", steps=12, **how)
    assert again.scores == whole.scores
    one, other = (tmp_path / x / "model" / "model.safetensors" for x in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ConfigError, match=r"was begun with lr=0\.01"):
        run(data, tmp_path / "parts", steps=12, **how, resume=True, lr=0.5)
    other_texts = write_texts(tmp_path, 50)
    with pytest.raises(ConfigError, match="was begun with data="):
        run(other_texts, tmp_path / "parts", steps=12, **how, resume=True)
    with pytest.raises(WeightsError, match="is a classifier and no language model"):
        g.load(tmp_path / "parts")


def test_balanced_weights_count_classes_alike() -> None:
    """The summed gradient of 3 texts of one class equals that of 1 of the other."""
    model = g.Transformer(TOY)
    model.lm_head = torch.nn.Linear(TOY.d_model, 2, bias=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    examples = [to_example([5, 9, 7], number) for number in (0, 0, 0, 1)]
    batches = TextBatches(examples, 4, seed=0)
    batch = batches.batch(0)
    plain = weighted_loss(None)(model, batch)
    assert plain.item() == pytest.approx(4 * 0.6931472)
    weights = torch.tensor([4 / (2 * 3), 4 / (2 * 1)])
    balanced = weighted_loss(weights)(model, batch)
    assert balanced.item() == pytest.approx(4 * 0.6931472)  # weights are 1 on average
    (gradient,) = torch.autograd.grad(balanced, model.lm_head.weight)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


def test_batches_are_each_text_once_an_epoch() -> None:
    examples = [to_example([i] * (1 + i % 5), i) for i in range(23)]
    batches = TextBatches(examples, 5, seed=0)

    def classes(batch: Batch) -> list[int]:
        return sorted(batch.targets[batch.targets >= 0].tolist())

    epochs = [[classes(batches.batch(e * 5 + i)) for i in range(5)] for e in range(2)]
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(23))
        assert [len(batch) for batch in epoch] == [5, 5, 5, 5, 3]
    assert epochs[0] != epochs[1]
    assert classes(batches.batch(3)) == epochs[0][3]
    other = TextBatches(examples, 5, seed=1)
    assert [classes(other.batch(i)) for i in range(5)] != epochs[0]


def test_long_texts_are_cut_and_counted(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    result = run(data, tmp_path / "run", steps=3, seq_len=4, say=said.append)
    assert 0 < result.cut <= 120
    assert f"{result.cut} cut to 4 tokens" in said[0]
    assert load_classifier(tmp_path / "run").seq_len == 4
    with pytest.raises(ConfigError, match="seq_len 25 is above the model's max_seq_len 24"):
        run(data, tmp_path / "other", seq_len=25)


def test_too_few_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text labelled 'ham', 'spam' is left to learn from"):
        run(write_texts(tmp_path, 1), tmp_path / "run")
    with pytest.raises(DataError, match="too few texts"):
        run(write_texts(tmp_path, 3), tmp_path / "run")


def test_the_command(data: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    code, printed, err = call(command, "--data", data, "--out", out, *options())
    assert code == 0
    assert "held-out texts" in printed
    assert "confusion" in printed
    assert "calibration error" in printed
    assert "always saying" in printed
    assert "step 6: validation loss" in err
    assert f'gpt2llama classify {out} "a text"' in err
    code, printed, _ = call(command, "--data", data, "--out", out, *options(), "--resume", "--json")
    answer = json.loads(printed)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert answer == result
    library = run(data, tmp_path / "library")
    assert library.to_dict() | {"run": "", "seconds": 0} == answer | {"run": "", "seconds": 0}

    code, printed, err = call(use, out, "a free prize", "--json")
    found = json.loads(printed)
    assert found["probabilities"] == load_classifier(out).probabilities(["a free prize"])[0]
    assert found["label"] == max(found["probabilities"], key=found["probabilities"].get)
    assert (found["cut"], err) == (False, "")
    _, printed, err = call(use, out, "a free prize " * 20)
    assert sorted(line.split()[1] for line in printed.splitlines()) == ["ham", "spam"]
    assert "only the first 24 tokens are looked at" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name what to tune"),
        (["--preset", "zh-3m", "BASE"], "name what to tune"),
        (["--preset", "zh-3m", "--method", "lora"], "--method lora leaves the weights"),
        (["--preset", "zh-3m", "--lora", "4"], "--method lora leaves the weights"),
        (["BASE", "--lora-alpha", "4"], "--lora-alpha is of adapters; add --lora RANK"),
        (["BASE", "--method", "full", "--lora", "4"], "--lora is for --method lora, not full"),
        (["BASE", "--set", "n_layers=3"], "--set n_layers: the model's fields come"),
        (["--preset", "zh-3m", "--set", "steeps=3"], "did you mean 'steps'"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str], says: str, data: Path, base: Path, tmp_path: Path, call: Call
) -> None:
    stated = [str(base) if argument == "BASE" else argument for argument in arguments]
    with pytest.raises(ConfigError, match=says):
        call(command, "--data", data, "--out", tmp_path / "run", *stated)
    assert not (tmp_path / "run").exists()


def test_the_folder_is_enough_to_go_on(
    data: Path, base: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, too, with the adapters that it was begun with."""
    monkeypatch.chdir(base.parent)
    adapters = ["--lora", "2", "--lora-alpha", "2", "--class-weights", "none"]
    how = ["--set=batch_size=8", "--set=dtype=fp32", "--set=device=cpu", "--set=steps=3"]
    call(command, base.name, "--data", data, "--out", tmp_path / "run", *adapters, *how)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"was begun with alpha=2.*not 3"):
        call(command, "--out", "run", "--resume", "--lora-alpha", "3")
    with pytest.raises(ConfigError, match="was begun with begin="):
        call(command, "--out", "run", "--resume", "--preset", "zh-3m")
    with pytest.raises(ConfigError, match="--set n_layers: the model's fields come"):
        call(command, "--out", "run", "--resume", "--set", "n_layers=1")
    call(command, "--out", "run", "--resume", "--set", "steps=5", "--lora", "2")
    call(command, base, "--data", data, "--out", "whole", *adapters, *how, "--set=steps=5")
    assert [line["step"] for line in metrics(Path("run"))] == [1, 2, 3, 4, 5]
    assert metrics(Path("run"))[0] == metrics(Path("whole"))[0]
    configs = [(tmp_path / name / "config.toml").read_bytes() for name in ("run", "whole")]
    assert configs[0] == configs[1]


def test_what_is_missing(tmp_path: Path, call: Call) -> None:
    with pytest.raises(ConfigError, match="name what to tune, MODEL, or what to make"):
        call(command, "--out", tmp_path)
    with pytest.raises(ConfigError, match=r"holds no run to resume.*: name what to tune, MODEL"):
        call(command, "--out", tmp_path, "--resume")
    with pytest.raises(ConfigError, match="--data is missing"):
        call(command, "--preset", "zh-3m", "--out", tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c(data: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(TrainingProgress):
        def update(self, line: dict[str, Any], steps: int) -> None:
            super().update(line, steps)
            if line["step"] == 5:
                os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("gpt2llama.cli._finetune_classify.TrainingProgress", Shown)
        code, printed, err = call(command, "--data", data, "--out", out, *options())
    assert (code, printed) == (130, "")
    line = f"stopped after step 5; go on with: gpt2llama finetune classify --out {out} --resume"
    assert line in err
    for wrong, says in (
        (["--set", "lr=1"], "was begun with lr=0.01, not 1"),
        (["--set", "n_layers=1"], "was begun with n_layers=2, not 1"),
        (["--method", "lora"], "was begun with method='full', not 'lora'"),
        (["--lora", "4"], "--lora is for --method lora, not full"),
        (["--split-seed", "1"], "was begun with split_seed=0, not 1"),
        (["--class-weights", "none"], "was begun with class_weights='balanced', not 'none'"),
    ):
        with pytest.raises(ConfigError, match=says):
            call(command, "--out", out, "--resume", *wrong)
    assert call(command, "--out", out, "--resume")[0] == 0
    run(data, tmp_path / "whole")
    name = Path("model") / "model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
