"""What a model makes of held-out text: nats per token, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..data.batches import IGNORED, Batch, held_out_windows, window_starts
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


_AT_ONCE = 1 << 26  # logits: a long context times a large vocabulary is beyond memory


@torch.inference_mode()
def evaluate(model: Transformer, batches: Iterable[Batch]) -> tuple[float, int]:
    """Summed nats and the number of targets; dropout is off meanwhile."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    try:
        for batch in batches:
            batch = batch.to(device)
            hidden = model.hidden(
                batch.ids, attention_mask=batch.documents, positions=batch.positions
            ).flatten(0, 1)
            targets, rows = batch.targets.flatten(), _AT_ONCE // model.config.vocab_size
            parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
            for part, wanted in parts:
                logits = model.logits(part).float()
                nats += F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
            tokens += batch.count
    finally:
        model.train(was_training)
    return nats.item(), tokens


def evaluate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    batch_size: int | None = None,
    stride: int | None = None,
    watch: Callable[[Iterable[Batch], int], Iterable[Batch]] = lambda batches, count: batches,
    seq_len: int | None = None,
) -> TextScore:
    """Scores every token of `text` once, in windows of `seq_len`, max_seq_len unless given.

    stride: from one window's start to the next; side by side unless given. A smaller one is
    slower and gives every token at least seq_len - stride tokens of context (the first
    window's apart). batch_size: windows at a time, 4,096 tokens unless given. watch: sees the
    batches as they are taken, and how many there are.
    The first token follows the tokenizer's BOS; without one it cannot be scored.
    Raises InputError for a stride that leaves tokens out or a window beyond a learned table,
    DataError for a text without a scored token, TokenizerError for ids the model lacks.
    """
    ids = tokenizer.encode(text)
    size = model.config.vocab_size
    if ids and max(ids) >= size:
        raise TokenizerError(
            f"the tokenizer gives id {max(ids)} and the model's vocab_size is {size}; "
            "use the tokenizer the model was trained with"
        )
    seq_len, start = seq_len or model.config.max_seq_len, tokenizer.bos_id
    batch_size = batch_size or max(1, 4096 // seq_len)
    count = -(-len(window_starts(len(ids), seq_len, start, stride)) // batch_size)
    windows = held_out_windows(ids, seq_len, start, batch_size, stride)
    nats, tokens = evaluate(model, watch(windows, count))
    if tokens == 0:
        raise DataError("the text holds no token to score; give a longer one")
    return TextScore(nats, tokens, len(text.encode("utf-8")))
