"""Bad input gets one sentence on stderr, and exit 1; bad usage exit 2. Never a traceback.

A full disk, a killed process and two processes on one run folder: train/test_trainer.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import gpt2llama as g
from gpt2llama.cli.main import main
from gpt2llama.tokenizer import load_tokenizer, train_bpe

sys.path.insert(0, str(Path(__file__).parent / "train"))
from tiny_run import SETTINGS, VOCAB, arguments, config, make_data

Say = Callable[..., str]


@dataclass(frozen=True)
class Files:
    """What is bad, and what is good beside it."""

    folder: Path
    data: Path

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("bad")
    data = make_data(folder)
    (folder / "empty.txt").touch()
    (folder / "broken.txt").write_bytes("曹操".encode() + b"\xff\xfe")
    shutil.copytree(data, folder / "other-data")
    shutil.rmtree(folder / "other-data" / "tokenizer")
    train_bpe(["Another text, with other pieces. " * 20], VOCAB - 10).save(
        folder / "other-data" / "tokenizer"
    )
    shutil.copytree(data, folder / "cut-data")
    shard = folder / "cut-data" / "train-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])

    torch.manual_seed(0)
    model = g.Transformer(config(data).model)
    tokenizer = load_tokenizer(data / "tokenizer")
    g.save(model, tokenizer, folder / "model")
    for name, size in (("model.safetensors", 999), ("config.json", 30), ("tokenizer.json", 30)):
        copy = folder / f"cut-{name}"
        shutil.copytree(folder / "model", copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:size])
    shutil.copytree(folder / "model", folder / "swapped")
    load_tokenizer(folder / "other-data" / "tokenizer").save(folder / "swapped")
    return Files(folder, data)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """Runs a command that must fail; returns its one sentence."""

    def say(*arguments: object, code: int = 1) -> str:
        monkeypatch.setattr(sys, "argv", ["gpt2llama", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        assert stop.value.code == code, err
        assert out == ""
        assert "Traceback" not in err
        if code == 1:
            *talk, sentence = err.splitlines()
            assert not [line for line in talk if line.startswith("gpt2llama")]
            assert sentence.startswith("gpt2llama: ")
            assert 20 < len(sentence) < 500
            return sentence
        return err

    return say


def test_an_empty_file(say: Say, files: Files, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    prepare = ("data", "prepare", files / "empty.txt", "--tokenizer", files.data / "tokenizer")
    assert "empty.txt has no text in it" in say(*prepare, *out)
    train = ("tokenizer", "train", files / "empty.txt", "--vocab-size", 300)
    assert "empty.txt has no text in it" in say(*train, *out)
    assert "empty.txt is empty" in say("eval", files / "model", "--text", files / "empty.txt")
    assert not (tmp_path / "out").exists()


def test_invalid_utf8(say: Say, files: Files, tmp_path: Path) -> None:
    out, wrong = ("--out", tmp_path / "out"), "broken.txt is not UTF-8 at byte 6"
    prepare = ("data", "prepare", files / "broken.txt", "--tokenizer", files.data / "tokenizer")
    assert wrong in say(*prepare, *out)
    assert wrong in say("tokenizer", "train", files / "broken.txt", "--vocab-size", 300, *out)
    assert wrong in say("eval", files / "model", "--text", files / "broken.txt")
    assert not (tmp_path / "out").exists()


def test_a_text_shorter_than_the_context(say: Say, files: Files, tmp_path: Path) -> None:
    long = {"max_seq_len": 4096, "position": "rope"}
    said = say(*arguments(files.data, tmp_path / "run", **long))
    assert "fewer than seq_len + 1 = 4,097; give more text or a smaller seq_len" in said


def test_a_shard_of_another_vocabulary(say: Say, files: Files, tmp_path: Path) -> None:
    said = say(*arguments(files / "other-data", tmp_path / "run"))
    assert "its tokenizer is not the one its shards were made with" in said
    said = say(*arguments(files.data, tmp_path / "run", vocab_size=100))
    assert "add --set vocab_size=290" in said


def test_a_truncated_shard(say: Say, files: Files, tmp_path: Path) -> None:
    said = say(*arguments(files / "cut-data", tmp_path / "run"))
    assert "train-00000.safetensors is no whole token shard" in said
    assert "make it again with gpt2llama data prepare" in said


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_truncated_checkpoint(say: Say, files: Files, name: str) -> None:
    folder = files / f"cut-{name}"
    for command in (["generate", folder, "曹操"], ["eval", folder, "--text", files / "text.txt"]):
        assert f"{folder}/{name}" in say(*command)


def test_a_truncated_checkpoint_of_a_run(say: Say, files: Files, tmp_path: Path) -> None:
    from gpt2llama.train.run import train

    run = tmp_path / "run"
    train(config(files.data, steps=2, eval_every="none"), run)
    weights = run / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for command in (["train", "--out", run, "--resume"], ["generate", run, "曹操"]):
        assert f"{weights} is truncated" in say(*command)
    used = say(*arguments(files.data, run))
    assert "already used; continue it with --resume or name another --out" in used


def test_weights_and_tokenizer_that_do_not_belong_together(say: Say, files: Files) -> None:
    assert "put back the one it was trained with" in say("generate", files / "swapped", "曹操")


def test_a_model_that_is_not_there(say: Say, files: Files) -> None:
    assert "is not there" in say("generate", files / "nowhere", "曹操")
    text = files / "text.txt"
    assert "text.txt is no GGUF file" in say("eval", text, "--text", text)
    assert "config.json" in say("generate", files.data, "曹操")
    for missing in (files / "nowhere.txt", files.folder):
        assert f"cannot read {missing}" in say("eval", files / "model", "--text", missing)


def test_an_unknown_setting(say: Say, files: Files, tmp_path: Path) -> None:
    said = say(*arguments(files.data, tmp_path / "run", n_layer=3))
    assert "there is no field 'n_layer'; did you mean 'n_layers'?" in said
    assert "key=value" in say(*arguments(files.data, tmp_path / "run", "--set", "lr"))
    assert "'learnt'" in say(*arguments(files.data, tmp_path / "run", position="learnt"))
    assert not (tmp_path / "run").exists()
    assert "device 'tpu'" in say(*arguments(files.data, tmp_path / "run", device="tpu"))


def test_a_preset_that_does_not_exist(say: Say, tmp_path: Path) -> None:
    wrong = "no preset is called 'zh-3n'; did you mean 'zh-3m'?"
    assert wrong in say("train", "--preset", "zh-3n", "--out", tmp_path / "run")
    assert "'zh-3n' is no preset and no path; did you mean 'zh-3m'?" in say("plan", "zh-3n")
    assert wrong in say("bench", "train", "--preset", "zh-3n")
    assert "known: transformer-2017, gpt2" in say("bench", "train", "--preset", "neither")
    assert "presets: transformer-2017, gpt2" in say("plan", "neither")


def test_prompts(say: Say, files: Files) -> None:
    assert "the prompt is empty" in say("generate", files / "model", "")
    said = say("generate", files / "model", "麤" * 20)
    assert f"the model's context {SETTINGS['max_seq_len']}" in said
    assert "shorten it" in said


def test_a_loss_that_is_not_finite(say: Say, files: Files, tmp_path: Path) -> None:
    said = say(*arguments(files.data, tmp_path / "run", lr=1e30, warmup_steps=0))
    assert "step 2 (batches 1 to 1): " in said
    assert "try a lower lr" in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["trian"], "No such command"),
        (["train"], "Missing option"),
        (["generate"], "Missing argument"),
        (["generate", "x", "y", "-n", "none"], "-n"),
        (["eval", "x", "--txt", "y"], "--txt"),
    ],
)
def test_bad_usage(say: Say, command: list[str], says: str) -> None:
    assert says in say(*command, code=2)
