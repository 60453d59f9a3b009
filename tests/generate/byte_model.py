"""A tiny sharp model over bytes, and their tokenizer: 256 bytes, BOS 256, EOS 257."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer

BOS, EOS = 256, 257


class ByteTokenizer:
    vocab_size, bos_id, eos_id = 258, BOS, EOS
    stop_ids, special_ids = frozenset({EOS}), frozenset({BOS, EOS})
    fingerprint = "bytes"

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos
        self.pieces = {i: bytes([i]) for i in range(256)} | {BOS: b"<bos>", EOS: b"<eos>"}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)

    def apply_chat(
        self, messages: Sequence[dict[str, str]], generation_prompt: bool = True
    ) -> list[int]:
        raise NotImplementedError  # no test asks for it

    def save(self, folder: Path) -> None:
        raise NotImplementedError  # no test asks for it


def random_model(seed: int = 0, vocab_size: int = 258, **switches: Any) -> Transformer:
    """Unit-variance embeddings, fan-in weights and an untied head, so that greedy text wanders."""
    sizes = {"max_seq_len": 24, "n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24}
    base: dict[str, Any] = {"tie_embeddings": False, **sizes}
    model = Transformer(ModelConfig(vocab_size=vocab_size, **base | switches))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                std = 1.0 if "embed" in name else p.shape[1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=rng) * std)
    return model


class Script(Transformer):
    """Says `ids`, one after the other, after any prompt of `prompt` tokens."""

    def __init__(self, ids: Sequence[int], prompt: int, max_seq_len: int = 64) -> None:
        sizes = {"n_layers": 1, "n_heads": 1, "d_model": 2, "d_ff": 1}
        super().__init__(ModelConfig(vocab_size=258, max_seq_len=max_seq_len, **sizes))
        self.script, self.prompt = [*ids], prompt

    def forward(self, ids: Tensor, *, logits_to_keep: int = 0, **how: Any) -> Any:
        said = how["cache"].length + ids.shape[1] - self.prompt
        super().forward(ids, **how)
        logits = torch.zeros(len(ids), 1, 258)
        for row, n in enumerate(said.tolist()):
            logits[row, 0, self.script[n]] = 9.0
        return logits
