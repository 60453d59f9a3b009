"""The decode loop, which knows only token ids, and the text around it.

One prefill pass takes prompts of any lengths, left-padded, into one cache; each step after it adds
a token to every row that is still running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from ..tokenizer.stream import StreamDecoder
from .engine import greedy, last_logits, new_cache, one_thread, runs_ahead
from .generation import FinishReason, Generation
from .prefix import PrefixCache
from .sampling import SamplingConfig, sample
from .speculative import make_drafter, speculative_steps


def prefill(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_len: int,
    kv_dtype: str = "auto",
) -> tuple[KVCache, Tensor]:
    """A cache that holds the prompts, with room for max_len tokens, and logits (B, V) after them.

    Equal prompts (several samples of one) are run once and copied.
    """
    unique = list(dict.fromkeys(map(tuple, prompts)))
    cache = new_cache(model, len(unique), max_len, kv_dtype)
    device = cache.keys.device
    pads = [max(map(len, unique)) - len(prompt) for prompt in unique]
    padded = [(0,) * n + prompt for n, prompt in zip(pads, unique, strict=True)]
    ids, real = torch.tensor(padded, device=device), None
    if any(pads):
        real = torch.arange(ids.shape[1])[None] >= torch.tensor(pads)[:, None]
        real = real.to(device)
    logits = last_logits(model, ids, cache, real)
    if len(unique) < len(prompts):
        rows = torch.tensor([unique.index(tuple(p)) for p in prompts], device=device)
        cache.select(rows)
        logits = logits[rows]
    return cache, logits


def decode(
    model: Transformer,
    rows: Sequence[Generation],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: SamplingConfig,
    vocab_size: int | None = None,
    kv_dtype: str = "auto",
    speculate: str | Transformer | None = None,
    draft_tokens: int = 3,
    prefix: PrefixCache | None = None,
) -> Iterator[None]:
    """Generates into `rows` until each has its finish_reason; yields at every token of theirs.

    vocab_size: ids from there on (padding of the embedding table) are never chosen.
    kv_dtype: of the keys and values, as `new_cache` takes it.
    speculate: "lookup" or a draft model guesses draft_tokens at a time (see speculative.py); one
    row only. Four suits fp32, where the kernel checks five tokens in about the time of one; int8
    takes up to twice, int4 two and a half times as long.
    prefix: keeps this text's keys and values for the next call; one row, with its own kv_dtype.
    Raises InputError, at once, for a prompt that is empty, unknown to the model or too long for it.
    """
    cfg = model.config
    if prefix is not None and len(rows) != 1:
        raise InputError("prefix= is for one text at a time; several samples share theirs anyway")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1 (got {max_new_tokens})")
    for i, row in enumerate(rows):
        name, length = f"prompt {i}" if len(rows) > 1 else "the prompt", len(row.prompt)
        if length == 0:
            raise InputError(f"{name} has no tokens; give some text to continue")
        if length >= cfg.max_seq_len:
            raise InputError(
                f"{name} has {length} tokens and the model's context {cfg.max_seq_len}; "
                f"shorten it to {cfg.max_seq_len - 1} at most"
            )
        if not all(0 <= token < cfg.vocab_size for token in row.prompt):
            raise InputError(
                f"{name} has ids outside the model's vocabulary of {cfg.vocab_size}; is the "
                "tokenizer another model's?"
            )
    if speculate is None:
        how = (max_new_tokens, stop_ids, sampling, vocab_size, kv_dtype, prefix)
        return _steps(model, rows, *how)
    if len(rows) != 1 or draft_tokens < 1:
        raise InputError("speculative decoding is for one text, and draft_tokens at least 1")
    generator = sampling.generator(torch.device("cpu"))
    return speculative_steps(
        model,
        rows[0],
        make_drafter(speculate, model, sampling, generator, vocab_size),
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        generator=generator,
        vocab_size=vocab_size,
        kv_dtype=kv_dtype,
        prefix=prefix,
    )


@torch.inference_mode()
def _steps(
    model: Transformer,
    rows: Sequence[Generation],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: SamplingConfig,
    vocab_size: int | None,
    kv_dtype: str,
    prefix: PrefixCache | None,
) -> Iterator[None]:
    if not rows:
        return
    context, live = model.config.max_seq_len, list(rows)
    room = min(max(len(row.prompt) for row in rows) + max_new_tokens, context)
    with nullcontext() if prefix is None else prefix.lend(model, rows[0], room) as lent:
        if lent is None:
            cache, logits = prefill(model, [row.prompt for row in rows], room, kv_dtype)
        else:
            cache, new = lent, rows[0].prompt[lent.end :]
            logits = last_logits(model, torch.tensor([new], device=cache.keys.device), cache)
        generator, seen = sampling.generator(logits.device), None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros_like(logits[:, :vocab_size], dtype=torch.bool)
            for marks, row in zip(seen, rows, strict=True):
                marks[[token for token in row.prompt if token < len(marks)]] = True
        while True:
            with one_thread():
                ids = sample(logits[:, :vocab_size], sampling, generator, seen)[:, None]  # (B, 1)
                logprobs = logits.log_softmax(-1).gather(1, ids)
            for row, token, logprob in zip(live, ids.tolist(), logprobs.tolist(), strict=True):
                row.append(token[0], logprob[0], stop_ids, max_new_tokens, context)
            yield
            running = [i for i, row in enumerate(live) if row.finish_reason is None]
            if not running:
                return
            if sampling.greedy and seen is None and runs_ahead(cache):
                below = logits[:, :vocab_size].shape[-1]
                yield from _ahead(live[0], cache, max_new_tokens, stop_ids, below, context)
                return
            if seen is not None:
                seen = seen.scatter(1, ids, True)[running]
            if len(running) < len(live):
                cache.select(running)
                live, ids = [live[i] for i in running], ids[running]
            logits = last_logits(model, ids, cache)


def _ahead(
    row: Generation,
    cache: KVCache,
    max_new_tokens: int,
    stop_ids: Collection[int],
    vocab_size: int,
    context: int,
) -> Iterator[None]:
    """The likeliest tokens of one row, several at a time, without Python between them. Those after
    its end, which a stop string may set, are dropped."""
    while row.finish_reason is None:
        length = len(row.prompt) + len(row.ids)
        most = min(max_new_tokens - len(row.ids), context - length)
        for token, logprob in greedy(row.ids[-1], cache, most, stop_ids, vocab_size):
            row.append(token, logprob, stop_ids, max_new_tokens, context)
            yield
            if row.finish_reason is not None:
                return


class Completion(Generation):
    """A generation and its text, which holds whole characters only, and nothing of a stop string.

    What may yet become either is held back until the next tokens decide.
    """

    def __init__(self, prompt: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        super().__init__(prompt)
        self.text = ""
        self._decoder, self._stop = StreamDecoder(tokenizer, after=prompt), stop
        self._held, self._taken = "", 0

    def add(self, token: int, logprob: float) -> None:
        super().add(token, logprob)
        self._push(self._decoder.push(token))

    def finish(self, reason: FinishReason) -> None:
        self._push(self._decoder.flush())
        if self.finish_reason is None:  # no stop string in what was left
            self.text += self._held
            super().finish(reason)

    def take(self) -> str:
        """The text that came since the last call."""
        start, self._taken = self._taken, len(self.text)
        return self.text[start:]

    def _push(self, piece: str) -> None:
        self._held += piece
        # The stop string that ends first counts, so that the borders of pieces make no difference.
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.text += self._held[: min(found)[1]]
            super().finish("stop")
            return
        begun = max((_begun(self._held, s) for s in self._stop), default=0)
        certain = len(self._held) - begun
        self.text, self._held = self.text + self._held[:certain], self._held[certain:]


def _begun(text: str, stop: str) -> int:
    """How many of the last characters of `text` may be the beginning of `stop`."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


def generate_ids(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_ids: Collection[int] = (),
    kv_dtype: str = "auto",
    speculate: str | Transformer | None = None,
    draft_tokens: int = 3,
    prefix: PrefixCache | None = None,
    **sampling: Any,
) -> list[list[int]]:
    """The new ids of each prompt, the stop id left out; `sampling`: fields of SamplingConfig.

    Greedy, a row's ids are those it would have alone. The other settings are those of `decode`.
    """
    rows = [Generation(prompt) for prompt in prompts]
    for _ in decode(
        model,
        rows,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=SamplingConfig(**sampling),
        kv_dtype=kv_dtype,
        speculate=speculate,
        draft_tokens=draft_tokens,
        prefix=prefix,
    ):
        pass
    return [row.ids for row in rows]


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_samples: int = 1,
    max_new_tokens: int = 64,
    stop: str | Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    kv_dtype: str = "auto",
    speculate: str | Transformer | None = None,
    draft_tokens: int = 3,
    prefix: PrefixCache | None = None,
    **sampling: Any,
) -> tuple[list[Completion], Iterator[None]]:
    """Samples of one prompt, and the loop that fills them a token at each step.

    stop: text that ends a sample and is left out. stop_ids: the tokenizer's unless given. The
    other settings are those of `decode`.
    """
    if not prompt:
        raise InputError("the prompt is empty; give some text to continue")
    stop = [stop] if isinstance(stop, str) else list(stop)
    if "" in stop:
        raise InputError("a stop string is empty; leave it out")
    if num_samples < 1:
        raise InputError(f"num_samples must be at least 1 (got {num_samples})")
    ids = tokenizer.encode(prompt)
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    samples = [Completion(ids, tokenizer, stop) for _ in range(num_samples)]
    steps = decode(
        model,
        samples,
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizer.stop_ids if stop_ids is None else stop_ids,
        sampling=SamplingConfig(**sampling),
        vocab_size=tokenizer.vocab_size,
        kv_dtype=kv_dtype,
        speculate=speculate,
        draft_tokens=draft_tokens,
        prefix=prefix,
    )
    return samples, steps


def stream(model: Transformer, tokenizer: Tokenizer, prompt: str, **settings: Any) -> Iterator[str]:
    """The continuation of the prompt, piece by piece; a piece never splits a character.

    Settings: max_new_tokens=64, stop (strings), stop_ids, temperature=0.0 (greedy), top_k, top_p,
    min_p, repetition_penalty, seed; kv_dtype, speculate, draft_tokens, prefix (see `decode`).
    It ends at max_new_tokens, a stop, or the model's context.
    Raises InputError, before the first piece, for a prompt that is empty or fills the context.
    """
    (sample,), steps = complete(model, tokenizer, prompt, num_samples=1, **settings)
    return (piece for _ in steps if (piece := sample.take()))


def generate(model: Transformer, tokenizer: Tokenizer, prompt: str, **settings: Any) -> str:
    """The pieces of `stream`, with the same settings, as one text: only what is new."""
    return "".join(stream(model, tokenizer, prompt, **settings))
