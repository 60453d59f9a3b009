"""A tiny sharp model that says different things, with a tokenizer that has a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import gpt2llama as g
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import BPETokenizer, train_bpe

TEXT = "注意力让每个词元看到它前面的词元。a model reads and writes tokens. " * 9


def toy(seed: int = 3, ends: float = 2.0, **changes: Any) -> tuple[Transformer, BPETokenizer]:
    """ends: makes it end its answers often, or seldom."""
    tokenizer = train_bpe([TEXT], 300)
    sizes: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24}
    cfg = g.ModelConfig(
        vocab_size=300, tie_embeddings=False, **{"max_seq_len": 64} | sizes | changes
    )
    torch.manual_seed(seed)
    model = Transformer(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(0, 1 if p.shape[0] == 300 else p.shape[1] ** -0.5)
            if "q_proj" in name:  # attention that tells places apart
                p *= 6
        for stop in tokenizer.stop_ids:
            model.lm_head.weight[stop] *= ends
    return model.eval(), tokenizer


def write_lines(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
