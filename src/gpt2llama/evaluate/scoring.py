"""Log-probabilities of given continuations: multiple choice, and lm-eval's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..errors import InputError
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer

AT_ONCE = 4096  # tokens in a pass
Pair = tuple[Sequence[int], Sequence[int]]
Watch = Callable[[Iterable[list[int]], int], Iterable[list[int]]]


class Score(NamedTuple):
    """Natural log-probability of a continuation; greedy: each of its tokens is the likeliest."""

    logprob: float
    greedy: bool


@torch.inference_mode()
def score_continuations(
    model: Transformer,
    pairs: Sequence[Pair],
    *,
    at_once: int = AT_ONCE,
    watch: Watch = lambda batches, count: batches,
) -> list[Score]:
    """Of each (context ids, continuation ids), given the context; dropout is off.

    What is longer than the model's context loses the beginning. An empty continuation is certain.
    at_once: tokens in a pass. watch: sees the batches as they are taken, and how many there are.
    Raises InputError for an empty context, a continuation too long, ids outside the vocabulary.
    """
    cfg, device = model.config, next(model.parameters()).device
    most = cfg.max_seq_len + 1  # the last token is only a target
    rows: list[tuple[list[int], int]] = []
    for context, continuation in pairs:
        if not context:
            raise InputError("a continuation is scored after at least one token; give a context")
        if len(continuation) > cfg.max_seq_len:
            raise InputError(
                f"a continuation has {len(continuation)} tokens and the model's context is "
                f"{cfg.max_seq_len}; shorten it"
            )
        row = [*context, *continuation][-most:]
        if not all(0 <= token < cfg.vocab_size for token in row):
            raise InputError(f"an id is outside the model's vocabulary of {cfg.vocab_size}")
        rows.append((row, len(continuation)))
    found = [Score(0.0, True)] * len(rows)
    order = sorted((i for i, row in enumerate(rows) if row[1]), key=lambda i: -len(rows[i][0]))
    batches: list[list[int]] = []
    for i in order:  # the first of a batch is its longest
        full = batches and (len(batches[-1]) + 1) * len(rows[batches[-1][0]][0]) > at_once
        if not batches or full:
            batches.append([])
        batches[-1].append(i)
    training = model.training
    model.eval()
    try:
        for batch in watch(batches, len(batches)):
            steps = len(rows[batch[0]][0]) - 1
            # Padding stands on the right, where no real token sees it.
            ids = torch.zeros(len(batch), steps, dtype=torch.long)
            for at, i in enumerate(batch):
                ids[at, : len(rows[i][0]) - 1] = torch.tensor(rows[i][0][:-1])
            hidden = model.hidden(ids.to(device))  # (B, T, D)
            for at, i in enumerate(batch):
                row, count = rows[i]
                logits = model.logits(hidden[at, len(row) - 1 - count : len(row) - 1]).float()
                wanted = torch.tensor(row[-count:], device=device)
                logprobs = logits.log_softmax(-1).gather(1, wanted[:, None]).double().sum()
                greedy = bool((logits.argmax(-1) == wanted).all())
                found[i] = Score(logprobs.item(), greedy)
    finally:
        model.train(training)
    return found


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Both as ids, the continuation's cut from those of the whole text: tokens that would cross
    the border go to it, and so do the spaces that end the context."""
    bare = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    first = tokenizer.encode(bare)
    return first, whole[len(first) :]
