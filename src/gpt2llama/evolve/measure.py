"""What is measured of a trained model besides its held-out loss."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import Batch, TokenData, held_out_windows
from ..errors import DataError, counted
from ..generate import generate_ids
from ..machine import peak_rss
from ..model.position import Rope
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from ..train.metrics import evaluate

BUCKETS = 16  # of a window's positions
AT_ONCE = 1024  # tokens: their logits stay in a CPU's cache
TOKENS = 16384  # held-out tokens that each of these reads, the first ones


def measure(model: Transformer, text: list[Batch]) -> dict[str, Any]:
    """What rounding to int8 and int4 costs; decoding speed; the process's peak memory."""
    model.eval()
    plain = _nats_per_token(model, text)
    rounded = {}
    for bits in (8, 4):
        worse = _nats_per_token(round_weights(model, bits), text) - plain
        rounded[f"int{bits}_nats_per_token_more"] = worse
    return {
        **rounded,
        "decode_tokens_per_s": decode_speed(model),
        "peak_rss_bytes": peak_rss(),
    }


def positions(model: Transformer, texts: dict[int, list[Batch]]) -> dict[str, list[float] | None]:
    """The loss by position in windows of each length."""
    was_training = model.training
    model.eval()
    found = {str(length): loss_by_position(model, text) for length, text in texts.items()}
    model.train(was_training)
    return found


@torch.inference_mode()
def loss_by_position(model: Transformer, batches: list[Batch]) -> list[float] | None:
    """Mean nats per token in BUCKETS equal parts of the window; None where a learned table ends."""
    length = batches[0].ids.shape[1]
    if length > model.position_limit:
        return None
    sums, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length)
    for batch in batches:
        logits = model(batch.ids).float().flatten(0, 1)
        nats = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        sums += nats.view_as(batch.targets).sum(0).double()
        counts += (batch.targets >= 0).sum(0)
    parts = zip(sums.chunk(BUCKETS), counts.chunk(BUCKETS), strict=True)
    return [float(total.sum() / count.sum().clamp(min=1)) for total, count in parts]


def text_by_position(
    model: Transformer, tokenizer: Tokenizer, text: str, length: int | None = None
) -> list[float]:
    """The same of a text's whole windows; DataError if it has none."""
    ids, length = tokenizer.encode(text), length or model.config.max_seq_len
    whole = len(ids) // length * length
    if whole == 0:
        raise DataError(
            f"the text has {counted(len(ids), 'token')}, fewer than one window of {length:,}; give "
            "a longer one or a smaller --length"
        )
    rows = max(1, 4096 // length)
    windows = held_out_windows(ids[:whole], length, tokenizer.bos_id, rows)
    return loss_by_position(model, list(windows)) or []


def rescaled(model: Transformer, kind: str, factor: float) -> Transformer:
    """The same weights read with another RoPE scaling; the context they were trained on is the
    config's. ConfigError for a model without RoPE or an unknown kind.
    """
    cfg = model.config
    values: dict[str, Any] = {"type": kind, "factor": factor}
    if kind in ("yarn", "llama3"):
        values["original_max_seq_len"] = cfg.max_seq_len
    if kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changed = copy.copy(model)
    changed.config = cfg.replace(rope_scaling=values)
    changed.rope = Rope(changed.config)
    return changed


def round_weights(model: Transformer, bits: int, group: int = 32) -> Transformer:
    """A copy whose matrices are rounded to nearest: int8 a scale a row, int4 a scale a group."""
    rounded = copy.deepcopy(model)
    seen: set[int] = set()
    for module in rounded.modules():
        if isinstance(module, nn.Linear) and module.weight.data_ptr() not in seen:
            seen.add(module.weight.data_ptr())  # a tied table once
            size = module.weight.shape[1] if bits == 8 else group
            module.weight.data = rounded_to(module.weight.data, bits, size)
            if model.config.tie_embeddings and module is rounded.lm_head:
                rounded.embed_tokens.weight = module.weight
    return rounded


def rounded_to(weight: Tensor, bits: int, group: int) -> Tensor:
    """(R, C) symmetrically to `bits` with a scale for every `group` columns, the last part less."""
    largest = 2 ** (bits - 1) - 1
    parts = []
    for part in torch.split(weight, group, dim=1):
        scale = part.abs().amax(1, keepdim=True) / largest
        parts.append((part / scale.clamp(min=1e-12)).round().clamp(-largest, largest) * scale)
    return torch.cat(parts, dim=1)


def decode_speed(model: Transformer) -> float:
    """Tokens a second, batch 1, greedy, half the context after a quarter of it."""
    prompt = [list(range(1, 1 + model.config.max_seq_len // 4))]
    count = model.config.max_seq_len // 2
    generate_ids(model, prompt, max_new_tokens=4, temperature=0.0)  # warms up
    begun = time.perf_counter()
    generate_ids(model, prompt, max_new_tokens=count, temperature=0.0)
    return count / (time.perf_counter() - begun)


def reset_peak() -> None:
    """Linux counts the peak memory anew from here; elsewhere it stays the process's."""
    if sys.platform == "linux":
        try:
            with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
                file.write("5")
        except OSError:
            pass


def bits_of_tokens(nats_per_token: float, data: TokenData) -> float:
    """Nats per held-out token as bits per held-out byte."""
    return nats_per_token / math.log(2) * len(data.held_out) / data.held_out_bytes


def windows_of(
    data: TokenData, lengths: Sequence[int], start_id: int | None
) -> dict[int, list[Batch]]:
    """The first TOKENS held-out tokens in windows of each length: the same tokens for each, if
    the longest is a multiple of the others."""
    longest = max(lengths)
    tokens = data.held_out[: min(TOKENS, len(data.held_out)) // longest * longest]
    found = {}
    for length in lengths:
        batches = held_out_windows(tokens, length, start_id, max(1, AT_ONCE // length))
        found[length] = [batch for batch in batches if batch.ids.shape[1] == length]  # whole ones
    return found


def _nats_per_token(model: Transformer, batches: list[Batch]) -> float:
    nats, tokens = evaluate(model, batches)
    return nats / tokens
