"""The decode loop, which knows only token ids, and the text around it.

One prefill pass takes prompts of any lengths, left-padded, into one cache; each step after it adds
a token to every row that is still running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from ..tokenizer.stream import StreamDecoder
from .engine import KVDtype, last_logits, new_cache, one_thread
from .sampling import SamplingConfig, sample

FinishReason = Literal["stop", "length", "context"]


@dataclass
class Generation:
    """One row: its prompt, and what has been generated so far.

    logprobs: the model's own log-softmax of each id, before penalty, temperature and filters.
    finish_reason: None while it runs; then "stop" (a stop id, which `ids` leaves out, or a stop
    string), "length" (max_new_tokens), or "context" (the model's max_seq_len).
    """

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason


def prefill(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_len: int,
    kv_dtype: KVDtype = "auto",
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
) -> Iterator[None]:
    """Generates into `rows` until each has its finish_reason; yields at every token of theirs.

    vocab_size: ids from there on (padding of the embedding table) are never chosen.
    Raises InputError, at once, for a prompt that is empty, unknown to the model or too long for it.
    """
    cfg = model.config
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
    return _steps(model, rows, max_new_tokens, stop_ids, sampling, vocab_size)


@torch.inference_mode()
def _steps(
    model: Transformer,
    rows: Sequence[Generation],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: SamplingConfig,
    vocab_size: int | None,
) -> Iterator[None]:
    if not rows:
        return
    context, live = model.config.max_seq_len, list(rows)
    room = min(max(len(row.prompt) for row in rows) + max_new_tokens, context)
    cache, logits = prefill(model, [row.prompt for row in rows], room)
    generator, seen = sampling.generator(logits.device), None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros_like(logits[:, :vocab_size], dtype=torch.bool)
        for marks, row in zip(seen, rows, strict=True):
            marks[list(row.prompt)] = True
    while True:
        with one_thread():
            ids = sample(logits[:, :vocab_size], sampling, generator, seen)[:, None]  # (B, 1)
            logprobs = logits.log_softmax(-1).gather(1, ids)
        for row, token, logprob in zip(live, ids.tolist(), logprobs.tolist(), strict=True):
            if token[0] in stop_ids:
                row.finish("stop")
                continue
            row.add(token[0], logprob[0])
            if row.finish_reason is None and len(row.ids) == max_new_tokens:
                row.finish("length")
            elif row.finish_reason is None and len(row.prompt) + len(row.ids) == context:
                row.finish("context")
        yield
        running = [i for i, row in enumerate(live) if row.finish_reason is None]
        if not running:
            return
        if seen is not None:
            seen = seen.scatter(1, ids, True)[running]
        if len(running) < len(live):
            cache.select(running)
            live, ids = [live[i] for i in running], ids[running]
        logits = last_logits(model, ids, cache)


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
    **sampling: Any,
) -> list[list[int]]:
    """The new ids of each prompt, the stop id left out; `sampling`: fields of SamplingConfig.

    Greedy, a row's ids are those it would have alone.
    """
    rows = [Generation(prompt) for prompt in prompts]
    how = SamplingConfig(**sampling)
    for _ in decode(model, rows, max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampling=how):
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
    **sampling: Any,
) -> tuple[list[Completion], Iterator[None]]:
    """Samples of one prompt, and the loop that fills them a token at each step.

    stop: text that ends a sample and is left out. stop_ids: the tokenizer's unless given.
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
    )
    return samples, steps


def stream(model: Transformer, tokenizer: Tokenizer, prompt: str, **settings: Any) -> Iterator[str]:
    """The continuation of the prompt, piece by piece; a piece never splits a character.

    Settings: max_new_tokens=64, stop (strings), stop_ids, temperature=0.0 (greedy), top_k, top_p,
    min_p, repetition_penalty, seed. It ends at max_new_tokens, a stop, or the model's context.
    Raises InputError, before the first piece, for a prompt that is empty or fills the context.
    """
    (sample,), steps = complete(model, tokenizer, prompt, num_samples=1, **settings)
    return (piece for _ in steps if (piece := sample.take()))


def generate(model: Transformer, tokenizer: Tokenizer, prompt: str, **settings: Any) -> str:
    """The pieces of `stream`, with the same settings, as one text: only what is new."""
    return "".join(stream(model, tokenizer, prompt, **settings))
