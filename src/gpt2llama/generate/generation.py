"""A row of token ids that is being generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "context"]


@dataclass
class Generation:
    """One row: its prompt, and what has been generated so far.

    logprobs: the model's own log-softmax of each id, before penalty, temperature and filters.
    finish_reason: None while it runs; then "stop" (a stop id, which `ids` leaves out, or a stop
    string), "length" (max_new_tokens), or "context" (the model's max_seq_len).
    passes, proposed, accepted: of speculative decoding; the model's passes, and the guesses that
    they checked and found right.
    """

    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    passes: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
