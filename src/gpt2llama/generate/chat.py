"""A chat that keeps its KV cache: a turn runs only the tokens that the last one did not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..errors import InputError, TokenizerError
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from .decode import Completion, decode
from .prefix import PrefixCache
from .sampling import SamplingConfig


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
        speculate: str | Transformer | None = None,
        draft_tokens: int = 3,
        **sampling: Any,
    ) -> None:
        """kv_dtype, speculate, draft_tokens: as of `decode`. sampling: fields of SamplingConfig.

        TokenizerError where there is no chat format.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1 (got {max_new_tokens})")
        if tokenizer.vocab_size > model.config.vocab_size:
            raise InputError("the tokenizer has more ids than the model; is it another model's?")
        tokenizer.apply_chat([_message("user", "")])
        self.model, self.tokenizer = model, tokenizer
        self.system, self.max_new_tokens = system, max_new_tokens
        self.speculate, self.draft_tokens = speculate, draft_tokens
        self.sampling = SamplingConfig(**sampling)
        self._prefix = PrefixCache(model, max_bytes=0, kv_dtype=kv_dtype)  # the last text alone
        self.reset()

    def reset(self) -> None:
        """Forgets the turns, but not the system message; the seed begins again."""
        self.turns: list[dict[str, str]] = []
        self.dropped = 0
        self.answer: Completion | None = None  # the last one, with its prompt and finish_reason
        self._seeds = self.sampling.generator(torch.device("cpu"))  # one for each answer

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

    def _answer(self, text: str, ids: list[int]) -> Iterator[str]:
        message = _message("assistant", "")
        self.turns += [_message("user", text), message]
        answer = self.answer = Completion(ids, self.tokenizer, stop=())
        seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        for _ in decode(
            self.model,
            [answer],
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
            sampling=replace(self.sampling, seed=seed),
            vocab_size=self.tokenizer.vocab_size,
            speculate=self.speculate,
            draft_tokens=self.draft_tokens,
            prefix=self._prefix,
        ):
            if piece := answer.take():
                message["content"] += piece
                yield piece
            if self.answer is not answer:  # another began
                return


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
