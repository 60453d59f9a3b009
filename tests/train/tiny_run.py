"""A generated text in shards, and the smallest run on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gpt2llama.data.prepare import prepare
from gpt2llama.model.presets import preset
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.config import RunConfig, TrainConfig

VOCAB = 290
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB, "max_seq_len": 16, "n_layers": 1, "d_model": 16, "d_ff": 24, "n_heads": 2,
    "n_kv_heads": 1, "batch_size": 2, "steps": 6, "warmup_steps": 2, "eval_every": 3,
    "checkpoint_every": 2, "lr": 0.003, "dtype": "fp32", "device": "cpu", "compile": "off",
}  # fmt: skip


def make_data(folder: Path) -> Path:
    """About 1,600 tokens to train on and 180 held out, of the tokenizer in its folder."""
    words, ends = ["曹操", "玄德", "引军", "大喜", "the model", "reads", "bytes"], "。\n， "
    rng = random.Random(0)
    text = "".join(rng.choice(words) + rng.choice(ends) for _ in range(500))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return prepare([folder / "text.txt"], train_bpe([text], VOCAB), folder / "data").folder


def config(data: Path, **changes: Any) -> RunConfig:
    run = RunConfig(model=preset("zh-3m"), train=TrainConfig(), data=str(data))
    return run.set([f"{key}={value}" for key, value in {**SETTINGS, **changes}.items()])


def arguments(data: Path, out: Path, *more: str, **changes: Any) -> list[str]:
    """`config(data, **changes)` on the command line."""
    pairs = [f"--set={key}={value}" for key, value in {**SETTINGS, **changes}.items()]
    return ["train", "--preset", "zh-3m", "--data", str(data), "--out", str(out), *pairs, *more]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl but for what a clock wrote."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
