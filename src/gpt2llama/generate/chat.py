"""A conversation whose KV cache stays: each turn runs only what the last one did not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import InputError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from .decode import Completion, FinishReason, last_logits
from .sampling import SamplingConfig, sample


class Chat:
    """`for piece in chat.say("…")` streams the answer and adds both to `messages`.

    Greedy answers are those of a fresh run of the whole chat. When `messages` and `max_new_tokens`
    do not fit `context` (None: the model's, at most 8,192), the oldest questions are dropped with
    their answers, but not the system message; `dropped` counts the messages. sampling: fields of
    SamplingConfig.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        system: str | None = None,
        *,
        max_new_tokens: int = 512,
        context: int | None = None,
        **sampling: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        longest = model.config.max_seq_len
        self.context = min(longest, context or min(longest, 8192))
        self.max_new_tokens = min(max_new_tokens, max(1, self.context // 2))
        self.sampling = SamplingConfig(**sampling)
        weight = model.embed_tokens.weight
        self._cache = KVCache(model.config, 1, self.context, weight.dtype, weight.device)
        self._generator = self.sampling.generator(weight.device)
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """An empty chat, with this system message if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []
        self.dropped = 0
        self.finish_reason: FinishReason | None = None
        self.prompt_tokens = self.new_tokens = 0
        self._held: list[int] = []  # what the cache holds

    def say(self, text: str) -> Iterator[str]:
        """The answer, piece by piece. Left early, it stays in `messages` as far as it came.

        Raises InputError for a text too long for the context, which is then not added.
        """
        if not text:
            raise InputError("the message is empty; say something")
        messages = [*self.messages, {"role": "user", "content": text}]
        messages, ids = self._fitting(messages)
        self.dropped += len(self.messages) + 1 - len(messages)
        self.messages = messages
        return self._answer(ids)

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """The messages without the oldest turns, as many as must go, and their ids."""
        first = 1 if messages[0]["role"] == "system" else 0
        while True:
            ids = self.tokenizer.apply_chat(messages)
            if len(ids) + self.max_new_tokens <= self.context:
                return messages, ids
            if len(messages) == first + 1:
                raise InputError(
                    f"the message makes a prompt of {len(ids)} tokens and the context is "
                    f"{self.context}, {self.max_new_tokens} of them for the answer; shorten it"
                )
            messages = messages[:first] + messages[first + 2 :]

    def _answer(self, ids: list[int]) -> Iterator[str]:
        answer = Completion(ids, self.tokenizer, stop=())
        self.prompt_tokens, self.new_tokens, self.finish_reason = len(ids), 0, None
        try:
            for _ in self._tokens(ids, answer):
                if piece := answer.take():
                    yield piece
        finally:
            self.new_tokens, self.finish_reason = len(answer.ids), answer.finish_reason
            if answer.finish_reason is None:
                answer.finish("stop")
            self.messages.append({"role": "assistant", "content": answer.text})

    def _tokens(self, ids: list[int], answer: Completion) -> Iterator[None]:
        device = self.model.embed_tokens.weight.device
        pairs = zip(self._held, ids[:-1], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        vocab, seen = self.tokenizer.vocab_size, None
        self._cache.truncate(same)
        del self._held[same:]
        new = ids[same:]
        while answer.finish_reason is None:
            with torch.inference_mode():
                logits = last_logits(
                    self.model, torch.tensor([new], device=device), self._cache
                )[:, :vocab]  # fmt: skip
                self._held += new
                if self.sampling.repetition_penalty != 1:
                    seen = torch.zeros_like(logits, dtype=torch.bool)
                    seen[0, self._held] = True
                token = int(sample(logits, self.sampling, self._generator, seen)[0])
                logprob = logits.log_softmax(-1)[0, token].item()
            if token in self.tokenizer.stop_ids:
                answer.finish("stop")
            else:
                answer.add(token, logprob)
                if len(answer.ids) == self.max_new_tokens:
                    answer.finish("length")
            new = [token]
            yield
