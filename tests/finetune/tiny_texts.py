"""Texts whose label shows in a word, and the smallest run on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gpt2llama.finetune.classify import ClassifyConfig, Result, classify
from gpt2llama.model.presets import preset
from gpt2llama.train.config import TrainConfig

TOY = preset("zh-3m").replace(
    vocab_size=300, max_seq_len=24, n_layers=2, n_heads=2, n_kv_heads=1, d_model=16, d_ff=24
)
SETTINGS: dict[str, Any] = {
    "batch_size": 8, "lr": 0.01, "warmup_steps": 2, "dtype": "fp32", "device": "cpu",
    "eval_every": 3, "checkpoint_every": 2,
}  # fmt: skip
_WORDS = ["the", "a", "of", "to", "and", "for", "you", "me", "at", "on", "see", "call", "now"]
_MARKS = {"ham": ["lunch", "sorry", "哈哈"], "spam": ["prize", "free", "中奖"]}


def make_texts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` of each label, no two alike."""
    rng, found = random.Random(seed), dict[str, str]()
    for label, marks in _MARKS.items():
        until = len(found) + count
        while len(found) < until:
            words = rng.choices(_WORDS, k=rng.randint(1, 6))
            words.insert(rng.randint(0, len(words)), rng.choice(marks))
            found[" ".join(words)] = label
    return list(found.items())


def write_texts(folder: Path, count: int = 60) -> Path:
    path = folder / "texts.jsonl"
    lines = [json.dumps({"text": text, "label": label}) for text, label in make_texts(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(
    data: Path, out: Path, steps: int = 8, begin: Any = TOY, how: Any = None, **options: Any
) -> Result:
    names = ("resume", "say", "report")
    train = TrainConfig(**SETTINGS | {k: v for k, v in options.items() if k not in names})
    rest = {k: v for k, v in options.items() if k in names}
    return classify(data, out, begin, how or ClassifyConfig(), train, steps=steps, **rest)
