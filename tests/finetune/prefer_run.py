"""A tiny sharp model over bytes, pairs and sums in JSONL, and the smallest runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import gpt2llama as g
from gpt2llama.finetune import preference, reward
from gpt2llama.finetune.grpo import RewardConfig
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.finetune.preference import Pair, PreferenceConfig
from gpt2llama.finetune.settings import Tuning
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import train_bpe

VOCAB, CONTEXT = 264, 48
SMALL: dict[str, Any] = {
    "batch_size": 3, "steps": 6, "lr": 0.01, "warmup_steps": 1, "eval_every": 2,
    "checkpoint_every": 3, "dtype": "fp32", "device": "cpu",
}  # fmt: skip
PAIRS = [
    {"prompt": f"Is {i} even?", "chosen": " yes"[: 3 + i % 2], "rejected": " no, " + "x" * (i % 4)}
    for i in range(12)
]
SUMS = [{"prompt": f"{i}+{i % 3}=", "answer": i + i % 3} for i in range(8)]


def sharp_model(seed: int = 0, **switches: Any) -> Transformer:
    """Unit-variance embeddings, fan-in weights: what it says depends on all it has read."""
    sizes = {"max_seq_len": CONTEXT, "n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24}
    base: dict[str, Any] = {"vocab_size": VOCAB, "tie_embeddings": False, **sizes}
    model = Transformer(ModelConfig(**base | switches)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                std = 1.0 if "embed" in name else p.shape[1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=rng) * std)
    return model


def tokenizer() -> Any:
    """Ids are bytes and eight special ones; ChatML."""
    return train_bpe(["bytes"], VOCAB)


def write_lines(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def make_model(folder: Path, **switches: Any) -> Path:
    g.save(sharp_model(**switches), tokenizer(), folder / "model")
    return folder / "model"


def preference_run(
    model: Path,
    data: Path,
    cfg: PreferenceConfig | None = None,
    lora: LoraConfig | None = None,
    **changes: Any,
) -> Tuning[PreferenceConfig]:
    train = preference.DEFAULTS.replace(**SMALL | changes)
    method = cfg or PreferenceConfig(chat=False)
    return Tuning(begin=str(model), data=str(data), method=method, train=train, lora=lora)


def reward_run(
    model: Path,
    data: Path,
    cfg: RewardConfig | None = None,
    lora: LoraConfig | None = None,
    **changes: Any,
) -> Tuning[RewardConfig]:
    train = reward.DEFAULTS.replace(**SMALL | changes)
    method = cfg or small_reward()
    return Tuning(begin=str(model), data=str(data), method=method, train=train, lora=lora)


def small_reward(**changes: Any) -> RewardConfig:
    small: dict[str, Any] = {"reward": "format:[0-9a-f]", "group_size": 4, "max_new_tokens": 5}
    return RewardConfig(**small | {"chat": False} | changes)


def check_adapters(run: Path, model: Path, lora: LoraConfig) -> Transformer:
    """The run stores adapters alone, and loaded it is the model with them in their matrices."""
    latest = run / "checkpoints" / (run / "latest").read_text(encoding="utf-8").strip()
    assert (latest / "adapter_model.safetensors").exists()
    assert not (latest / "model.safetensors").exists()
    tuned, before = g.load(run)[0], g.load(model)[0].state_dict()
    changed = {n for n, t in tuned.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {n for n in before if n.split(".")[-2] in lora.names}
    return tuned


def random_pairs(count: int = 4, seed: int = 0) -> list[Pair]:
    """Prompts and answers of many lengths."""
    rng = torch.Generator().manual_seed(seed)

    def draw(least: int) -> list[int]:
        size = int(torch.randint(least, least + 7, (), generator=rng))
        return torch.randint(256, (size,), generator=rng).tolist()

    return [Pair(draw(2), draw(1), draw(2)) for _ in range(count)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl but for what a clock wrote."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def check_same(run: Path, other: Path) -> None:
    """To the bit: losses, weights, optimiser, random numbers, and what is latest and best."""
    assert metrics(run) == metrics(other)
    for name in ("latest", "best"):
        text = (run / name).read_text(encoding="utf-8")
        assert text == (other / name).read_text(encoding="utf-8")
        place = Path("checkpoints", text.strip())
        files = sorted(path.name for path in (other / place).glob("*.safetensors"))
        assert len(files) >= 2
        for file in files:
            mine, theirs = ((folder / place / file).read_bytes() for folder in (run, other))
            assert mine == theirs, (name, file)
