"""Speculative decoding: somebody guesses some tokens, and one pass of the model checks them all.

Leviathan et al. 2023 and Chen et al. 2023: a guess x of probability q(x) is accepted with
min(1, p(x) / q(x)), and else replaced by a draw from the positive part of p - q, which together
give exactly p: the model's distribution after penalty, temperature and filters. Greedy, p is the
likeliest token alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from .engine import last_logits, new_cache, one_thread, run
from .generation import Generation
from .prefix import PrefixCache, common_prefix
from .sampling import SamplingConfig, draw, filtered


class Drafter(Protocol):
    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor | None]:
        """At most n guesses of what follows `ids`, and the probabilities (n, V) that they were
        drawn with; None: they were not drawn, but are the only ones it would make."""
        ...


class PromptLookup:
    """Guesses that what followed the last few tokens before follows them again (Saxena 2023).

    Not by the last one alone: such guesses are so often wrong that prose becomes slower by them.
    """

    def __init__(self, shortest: int = 2, longest: int = 3, vocab_size: int | None = None) -> None:
        """vocab_size: no id from there on, which a prompt may hold, is guessed."""
        self.shortest, self.longest, self.vocab_size = shortest, longest, vocab_size
        self._after: dict[tuple[int, ...], int] = {}  # where the text went on, the last time
        self._read = 0

    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], None]:
        for end in range(self._read + 1, len(ids)):  # its own ending is not yet a precedent
            for size in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(ids[end - size : end])] = end
        self._read = max(self._read, len(ids) - 1)
        for size in range(min(self.longest, len(ids)), self.shortest - 1, -1):
            start = self._after.get(tuple(ids[-size:]))
            if start is not None:
                guesses = list(ids[start : start + n])
                if self.vocab_size is not None:
                    guesses = list(takewhile(self.vocab_size.__gt__, guesses))
                return guesses, None
        return [], None


class DraftModel:
    """A smaller model of the same vocabulary writes on; it samples as the model itself would."""

    def __init__(
        self,
        model: Transformer,
        sampling: SamplingConfig,
        generator: torch.Generator,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.sampling, self.generator = model, sampling, generator
        self.vocab_size = vocab_size
        self._cache: KVCache | None = None
        self._held: list[int] = []  # the ids in it

    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor | None]:
        n = min(n, self.model.config.max_seq_len - len(ids))
        if n < 1:  # the text is longer than its context
            return [], None
        text, guesses = list(ids), []
        probabilities: list[Tensor] = []
        cache = self._rewound(text, len(text) + n)
        new = text[len(self._held) :]
        while True:
            batch = torch.tensor([new], device=cache.keys.device)
            logits = last_logits(self.model, batch, cache).cpu()
            self._held += new
            with one_thread():
                p = distribution(logits[:, : self.vocab_size], self.sampling, text)
                guesses.append(int(draw(p, self.generator)))
            probabilities.append(p)
            if len(guesses) == n:
                break
            new = guesses[-1:]
            text += new
        return guesses, None if self.sampling.greedy else torch.cat(probabilities)

    def _rewound(self, ids: list[int], room: int) -> KVCache:
        """The cache, with what it shares with ids[:-1], and room for that many tokens."""
        if self._cache is None or self._cache.max_len < room:  # a larger one is filled anew
            self._held = []
            most = self.model.config.max_seq_len
            self._cache = new_cache(self.model, 1, min(max(2 * room, 1024), most))
        del self._held[common_prefix(self._held, ids[:-1]) :]
        self._cache.truncate(len(self._held))
        return self._cache


def distribution(logits: Tensor, sampling: SamplingConfig, ids: Sequence[int]) -> Tensor:
    """What the next token is drawn from after each of T texts, (T, V), fp64; `ids` ends with the
    T - 1 tokens by which they differ. Greedy: 1 for the likeliest."""
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, marks in enumerate(seen):
            before = ids[: len(ids) - len(seen) + 1 + row]
            marks[[id for id in before if id < len(marks)]] = True
    logits = filtered(logits, sampling, seen)
    if sampling.greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return logits.double().softmax(-1)


def verify(
    p: Tensor, guesses: Sequence[int], q: Tensor | None, generator: torch.Generator | None
) -> list[int]:
    """The guesses up to the first that is rejected, and one token more: p (n + 1, V), q (n, V)."""
    for i, guess in enumerate(guesses):
        chance = p[i, guess] / (1 if q is None else q[i, guess])
        if torch.rand((), generator=generator, dtype=torch.double) < chance:
            continue
        return [
            *guesses[:i],
            int(draw(leftover(p[i], guess, None if q is None else q[i])[None], generator)),
        ]
    return [*guesses, int(draw(p[-1:], generator))]


def leftover(p: Tensor, guess: int, q: Tensor | None) -> Tensor:
    """The positive part of p - q, (V,); q None: all of it on the guess."""
    if q is None:
        left = p.clone()
        left[guess] = 0
    else:
        left = (p - q).clamp(min=0)
    return left if left.sum() > 0 else p  # rounding alone can have rejected where p is q


@torch.inference_mode()
def speculative_steps(
    model: Transformer,
    row: Generation,
    drafter: Drafter,
    *,
    draft_tokens: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: SamplingConfig,
    generator: torch.Generator,
    vocab_size: int | None,
    kv_dtype: str,
    prefix: PrefixCache | None,
) -> Iterator[None]:
    """Generates into the row until it has its finish_reason; yields at every token."""
    context = model.config.max_seq_len
    room = min(len(row.prompt) + max_new_tokens, context)
    text, guesses, q = list(row.prompt), [], None  # type: list[int], list[int], Tensor | None
    with (
        nullcontext(new_cache(model, 1, room, kv_dtype))
        if prefix is None
        else prefix.lend(model, row, room)
    ) as cache:
        while True:
            ids = torch.tensor([[*text[cache.end :], *guesses]], device=cache.keys.device)
            logits = run(model, ids, cache, keep=len(guesses) + 1)[0].cpu()
            with one_thread():
                p = distribution(logits[:, :vocab_size], sampling, [*text, *guesses])
                tokens = verify(p, guesses, q, generator)
                logprobs = logits.log_softmax(-1)
            row.passes += 1
            row.proposed += len(guesses)
            row.accepted += len(tokens) - 1
            text += tokens
            cache.truncate(len(text) - 1)  # the last is not in it, nor what was rejected
            for token, logprob in zip(tokens, logprobs, strict=False):
                row.append(token, float(logprob[token]), stop_ids, max_new_tokens, context)
                yield
                if row.finish_reason is not None:
                    return
            n = min(draft_tokens, room - len(text) - 1)  # a token more comes with the guesses
            guesses, q = drafter.propose(text, n) if n > 0 else ([], None)


def make_drafter(
    speculate: str | Transformer,
    model: Transformer,
    sampling: SamplingConfig,
    generator: torch.Generator,
    vocab_size: int | None,
) -> Drafter:
    """ "lookup", or a draft model; InputError for another vocabulary."""
    if isinstance(speculate, Transformer):
        ours, theirs = model.config.vocab_size, speculate.config.vocab_size
        if ours != theirs:
            raise InputError(
                f"the draft model has a vocabulary of {theirs} and the model one of {ours}; take "
                "one with the same tokenizer"
            )
        return DraftModel(speculate, sampling, generator, vocab_size)
    if speculate != "lookup":
        raise InputError(f"speculate must be 'lookup' or a draft model (got {speculate!r})")
    return PromptLookup(vocab_size=vocab_size)
