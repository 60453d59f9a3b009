"""Runs of instruction tuning: what is learned, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.errors import ConfigError, DataError, InputError
from gpt2llama.finetune.instruct import SHORT_TUNE, InstructConfig, instruct
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.generate.chat import Chat
from gpt2llama.model.presets import preset
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.run_folder import read_metrics
from gpt2llama.train.trainer import Interrupted

PAIRS = [("甲是什么", "它是一"), ("乙是什么", "它是二"), ("丙呢", "三个"), ("What is D?", "four")]
TRAIN = SHORT_TUNE.replace(
    steps=1, lr=5e-3, batch_size=2, seq_len=40, warmup_steps=2, dtype="fp32", device="cpu"
)
ALL = InstructConfig(epochs=3, held_out=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_bpe(["".join(a + b for a, b in PAIRS) * 20], 320)
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 32, "d_ff": 48, "n_heads": 2}
    cfg = preset("zh-3m").replace(vocab_size=tokenizer.vocab_size, max_seq_len=64, **sizes)
    torch.manual_seed(0)
    g.save(g.Transformer(cfg.replace(dropout=0.1)), tokenizer, folder / "model")
    lines = [json.dumps({"instruction": a, "output": b}, ensure_ascii=False) for a, b in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines * 6) + "\n", encoding="utf-8")
    return folder


def figures(run: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(run)]


def test_it_learns_to_answer(base: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = [(base / "pairs.jsonl", 1.0)]
    train = TRAIN.replace(lr=1e-2, batch_size=4)
    done = instruct(base / "model", data, tmp_path / "run", train, ALL, steps=250, say=said.append)
    assert done.step == 250
    assert "24 conversations an epoch" in said[0]
    model, tokenizer = g.load(tmp_path / "run")
    assert tokenizer is not None
    for question, answer in PAIRS:
        assert "".join(Chat(model, tokenizer).say(question)) == answer


@pytest.mark.parametrize(
    ("neftune", "lora"), [(None, None), (5.0, None), (5.0, LoraConfig(rank=4, dropout=0.1))]
)
def test_resumed_is_undisturbed(
    base: Path, neftune: float | None, lora: LoraConfig | None, tmp_path: Path
) -> None:
    """To the bit: dropout's and the noise's random numbers, the order of rows, the best score."""
    train = TRAIN.replace(eval_every=4, checkpoint_every=5)
    how = ALL.replace(held_out=0.25, neftune=neftune)
    data: Any = [(base / "pairs.jsonl", 1.5)]
    settings: Any = {"steps": 16, "lora": lora}
    instruct(base / "model", data, tmp_path / "whole", train, how, **settings)

    def stop(line: dict[str, Any], steps: int) -> None:
        if line["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instruct(base / "model", data, tmp_path / "run", train, how, report=stop, **settings)
    other = how.replace(neftune=1.0)
    with pytest.raises(ConfigError, match="was begun with neftune"):
        instruct(base / "model", data, tmp_path / "run", train, other, resume=True, **settings)
    instruct(base / "model", data, tmp_path / "run", train, how, resume=True, **settings)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert "held_out_loss" in figures(tmp_path / "run")[-1]
    assert "bits_per_byte" not in figures(tmp_path / "run")[-1]  # answers alone have no bytes
    weights = [g.load(tmp_path / name)[0].state_dict() for name in ("run", "whole")]
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())


def test_an_adapters_run_loads_as_the_tuned_model(base: Path, tmp_path: Path) -> None:
    """Only adapters are stored; loaded, it is the base with them merged."""
    data: Any = [(base / "pairs.jsonl", 1.0)]
    train = TRAIN.replace(lr=2e-2, batch_size=4)
    lora = LoraConfig(rank=8, alpha=16)
    instruct(base / "model", data, tmp_path / "run", train, ALL, steps=40, lora=lora)
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-000040").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    model, before = g.load(tmp_path / "run")[0], g.load(base / "model")[0].state_dict()
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {n for n in before if n.endswith("_proj.weight")}
    losses = [line["loss"] for line in figures(tmp_path / "run")]
    assert sum(losses[-8:]) < sum(losses[:8]) - 0.5  # a random base learns little by adapters


def test_noise_is_for_training_alone(base: Path, tmp_path: Path) -> None:
    data: Any = [(base / "pairs.jsonl", 1.0)]
    how = ALL.replace(held_out=0.25)
    runs = {}
    for neftune in (None, 5.0):
        train = TRAIN.replace(eval_every=1, lr=1e-12, warmup_steps=0)
        out = tmp_path / str(neftune)
        instruct(base / "model", data, out, train, how.replace(neftune=neftune), steps=2)
        runs[neftune] = figures(out)
    assert runs[None][0]["loss"] != runs[5.0][0]["loss"]
    assert runs[None][0]["held_out_loss"] == pytest.approx(runs[5.0][0]["held_out_loss"], abs=1e-6)


def test_refused(base: Path, tmp_path: Path) -> None:
    data: Any = [(base / "pairs.jsonl", 1.0)]
    with pytest.raises(InputError, match="a weight must be above 0"):
        instruct(base / "model", [(base / "pairs.jsonl", 0.0)], tmp_path / "a", TRAIN)
    with pytest.raises(DataError, match="have more than 4 tokens"):
        instruct(base / "model", data, tmp_path / "b", TRAIN.replace(seq_len=4))
    with pytest.raises(ConfigError, match="seq_len 65 is above"):
        instruct(base / "model", data, tmp_path / "c", TRAIN.replace(seq_len=65))


def test_command(run: Any, base: Path, tmp_path: Path) -> None:
    pairs, out = base / "pairs.jsonl", tmp_path / "run"
    settings = [f"--set={key}" for key in ("batch_size=2", "seq_len=40", "device=cpu")]
    begin = ("finetune", "instruct", base / "model")
    command = [*begin, "--data", f"{pairs}:0.5", "--out", out, "--epochs", "2", *settings]
    result = json.loads(run(*command, "--json")[0])
    assert result["run"] == str(out)
    assert result["step"] == len(read_metrics(out)) > 1
    assert "already used" in run(*command, code=1)[1]
    bad = [*begin, "--data", f"{pairs}:much", "--out", tmp_path / "b"]
    assert "the weight 'much' is no number" in run(*bad, code=1)[1]
    odd = [*begin, "--data", pairs, "--out", tmp_path / "c", "--set", "lrr=1"]
    assert "did you mean 'lr'" in run(*odd, code=1)[1]
    alone = [*begin, "--data", pairs, "--out", tmp_path / "d", "--lora-alpha", "4"]
    assert "--lora-alpha is of adapters; add --lora RANK" in run(*alone, code=1)[1]


def test_ctrl_c_keeps_a_checkpoint(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpt2llama.finetune.instruct as module

    def interrupted(*_: Any, **__: Any) -> None:
        raise Interrupted("stopped after step 3")

    monkeypatch.setattr(module, "instruct", interrupted)
    what = (base / "model", "--data", base / "pairs.jsonl", "--out", tmp_path / "run")
    assert "--resume" in run("finetune", "instruct", *what, code=130)[1]
