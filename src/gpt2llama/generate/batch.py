"""Many prompts: a batch of like lengths at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from .decode import Completion, decode
from .sampling import SamplingConfig


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """By the tokenizer's chat template; without one the texts, joined by newlines, after its BOS
    where it adds one. Raises as `apply_chat` does."""
    if tokenizer.chat_template is not None:
        return tokenizer.apply_chat(messages)
    ids = tokenizer.encode("\n".join(message["content"] for message in messages))
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids


def complete_all(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    batch_size: int = 16,
    sampling: SamplingConfig | None = None,
) -> Iterator[list[tuple[int, Completion]]]:
    """Greedy answers, each batch as it is done with the numbers of its prompts; the longest first.

    Prompts of like length stand in one batch, so that little is padding. stop_ids: the
    tokenizer's unless given. Raises what `decode` raises, before the first batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    rows = [Completion(prompts[i], tokenizer, stop) for i in order]
    ends = tokenizer.stop_ids if stop_ids is None else stop_ids
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    # Made before any runs: a prompt that cannot be used is refused at once.
    runs = [
        decode(
            model,
            batch,
            max_new_tokens=max_new_tokens,
            stop_ids=ends,
            sampling=sampling or SamplingConfig(),
            vocab_size=tokenizer.vocab_size,
        )
        for batch in batches
    ]

    def results() -> Iterator[list[tuple[int, Completion]]]:
        numbers = iter(order)
        for batch, steps in zip(batches, runs, strict=True):
            for _ in steps:
                pass
            yield [(next(numbers), row) for row in batch]

    return results()
