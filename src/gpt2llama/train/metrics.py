"""What a model makes of held-out text: nats per token, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..data.batches import IGNORED, Batch, held_out_windows
from ..errors import DataError, TokenizerError

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class TextScore:
    """Of a text of `bytes` bytes in `tokens` scored tokens."""

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


@torch.inference_mode()
def evaluate(model: Transformer, batches: Iterable[Batch]) -> tuple[float, int]:
    """Summed nats and the number of targets; dropout is off meanwhile."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    try:
        for batch in batches:
            logits = model(batch.ids.to(device)).flatten(0, 1).float()
            targets = batch.targets.flatten().to(device)
            nats += F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            tokens += int((batch.targets != IGNORED).sum())
    finally:
        model.train(was_training)
    return nats.item(), tokens


def evaluate_text(
    model: Transformer, tokenizer: Tokenizer, text: str, batch_size: int = 16
) -> TextScore:
    """Scores every token of `text` once, in windows of max_seq_len side by side.

    The first token follows the tokenizer's BOS; without one it cannot be scored.
    Raises DataError for a text without a scored token, TokenizerError for ids the model lacks.
    """
    ids = tokenizer.encode(text)
    size = model.config.vocab_size
    if ids and max(ids) >= size:
        raise TokenizerError(
            f"the tokenizer gives id {max(ids)} and the model's vocab_size is {size}; "
            "use the tokenizer the model was trained with"
        )
    windows = held_out_windows(ids, model.config.max_seq_len, tokenizer.bos_id, batch_size)
    nats, tokens = evaluate(model, windows)
    if tokens == 0:
        raise DataError("the text holds no token to score; give a longer one")
    return TextScore(nats, tokens, len(text.encode("utf-8")))
