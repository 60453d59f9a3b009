"""A chat that keeps its KV cache: a turn runs only the tokens that the last one did not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import InputError, TokenizerError
from ..model.kv_cache import KVCache
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from .decode import Completion
from .engine import last_logits, new_cache
from .prefix import common_prefix
from .sampling import SamplingConfig, sample


class Chat:
    """Turns of one conversation, with greedy answers equal to those without a cache.

    A prompt of more than three quarters of the model's context loses its oldest turns, until it
    takes half; the system message stays. `messages` has them all, `dropped` counts those left out.
    An answer that is interrupted, or whose iterator is closed, counts as what it said so far.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        kv_dtype: str = "auto",
        **sampling: Any,
    ) -> None:
        """sampling: fields of SamplingConfig. TokenizerError where there is no chat format."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1 (got {max_new_tokens})")
        if tokenizer.vocab_size > model.config.vocab_size:
            raise InputError("the tokenizer has more ids than the model; is it another model's?")
        tokenizer.apply_chat([_message("user", "")])
        self.model, self.tokenizer = model, tokenizer
        self.system, self.max_new_tokens, self.kv_dtype = system, max_new_tokens, kv_dtype
        self.sampling = SamplingConfig(**sampling)
        self._cache: KVCache | None = None
        self._held: list[int] = []  # the ids in the cache, or the first of them
        self.reset()

    def reset(self) -> None:
        """Forgets the turns, but not the system message; the seed begins again."""
        self.turns: list[dict[str, str]] = []
        self.dropped = 0
        self.answer: Completion | None = None  # the last one, with its prompt and finish_reason
        self._generator = self.sampling.generator(next(self.model.parameters()).device)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self._system(), *self.turns]

    def say(self, text: str) -> Iterator[str]:
        """The answer, piece by piece; a piece never splits a character.

        It ends at a stop id of the tokenizer's, max_new_tokens, or the model's context. Raises
        InputError, and leaves the chat as it was, for a text that is empty or too long.
        """
        if not text:
            raise InputError("the message is empty; say something")
        return self._answer(text, self._prompt([*self.turns, _message("user", text)]))

    def _system(self) -> list[dict[str, str]]:
        return [] if self.system is None else [_message("system", self.system)]

    def _prompt(self, turns: list[dict[str, str]]) -> list[int]:
        context, dropped = self.model.config.max_seq_len, self.dropped
        most = context * 3 // 4
        while True:
            ids = self.tokenizer.apply_chat([*self._system(), *turns[dropped:]])
            if len(ids) <= most or dropped == len(turns) - 1:
                break
            most = context // 2
            dropped = next(i for i in range(dropped + 1, len(turns)) if turns[i]["role"] == "user")
        if not ids:
            raise TokenizerError("the chat template makes nothing of these messages; mend it")
        if len(ids) >= context:
            raise InputError(
                f"this message alone makes {len(ids)} tokens and the model's context has "
                f"{context}; shorten it or the system message"
            )
        self.dropped = dropped
        return ids

    @torch.inference_mode()
    def _answer(self, text: str, ids: list[int]) -> Iterator[str]:
        message = _message("assistant", "")
        self.turns += [_message("user", text), message]
        answer = self.answer = Completion(ids, self.tokenizer, stop=())
        logits = self._run(ids[self._rewind(ids) :])
        vocab_size, seen = self.tokenizer.vocab_size, None
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros_like(logits[:, :vocab_size], dtype=torch.bool)
            seen[0, ids] = True
        while True:
            id = int(sample(logits[:, :vocab_size], self.sampling, self._generator, seen))
            if id in self.tokenizer.stop_ids:
                answer.finish("stop")
            else:
                answer.add(id, float(logits.log_softmax(-1)[0, id]))
                if len(answer.ids) == self.max_new_tokens:
                    answer.finish("length")
                elif len(ids) + len(answer.ids) == self.model.config.max_seq_len:
                    answer.finish("context")
            if piece := answer.take():
                message["content"] += piece
                yield piece
            if answer.finish_reason is not None or self.answer is not answer:  # another began
                return
            if seen is not None:
                seen[0, id] = True
            logits = self._run([id])

    def _rewind(self, ids: list[int]) -> int:
        """Takes the cache back to what it shares with `ids`, but for the last; says how many."""
        context = self.model.config.max_seq_len
        room = min(len(ids) + self.max_new_tokens, context)
        if self._cache is None or self._cache.max_len < room:  # a larger one is filled anew
            room = min(max(2 * room, 1024), context)
            self._held = []
            self._cache = new_cache(self.model, 1, room, self.kv_dtype)
        shared = common_prefix(self._held, ids[:-1])
        del self._held[shared:]
        self._cache.truncate(shared)
        return shared

    def _run(self, ids: list[int]) -> torch.Tensor:
        """Appends to the cache; logits (1, V) after the last id."""
        assert self._cache is not None
        batch = torch.tensor([ids], device=next(self.model.parameters()).device)
        logits = last_logits(self.model, batch, self._cache)
        self._held += ids
        return logits


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
