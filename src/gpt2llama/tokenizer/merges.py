"""The merges of a vocabulary that lists only its pieces, in the order in which BPE forms them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..errors import TokenizerError

_NEVER = 1 << 62
_MAX_WORK = 1 << 25  # squared characters; Llama 3's 128,000 pieces take 7 million


def merges_of(rank: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pair that makes each piece of `rank` (lower is merged first), in order of rank.

    SentencePiece and tiktoken merge any two neighbours whose concatenation is a piece. But BPE run
    on a piece alone goes the way that it goes inside any text, as long as nothing merges across the
    piece's ends. So the last pair before the piece is whole is the only one it ever comes from, and
    a list of one pair a piece gives the same ids. A piece that is never reached has none.

    Equal ranks mean: whichever comes first in the text. No list of pairs says that in general, but
    for runs of one character, SentencePiece's spaces, it is the same as the longest first.
    """
    if sum(len(piece) ** 2 for piece in rank) > _MAX_WORK:
        raise TokenizerError("its pieces are too long for any text; is this file damaged?")
    pairs = {piece: pair for piece in rank if (pair := _last_pair(piece, rank))}
    bare = next((piece for piece, pair in pairs.items() if not rank.keys() >= set(pair)), None)
    if bare is not None:
        raise TokenizerError(f"its piece {bare!r} has a character that is no piece itself")
    order = sorted(pairs, key=lambda piece: (rank[piece], -len(piece)))
    for _, equals in itertools.groupby(order, key=rank.__getitem__):
        first, *others = equals
        if others and len(set("".join([first, *others]))) > 1:
            raise TokenizerError(
                f"the pieces {first!r} and {others[0]!r} have the same score, so which is merged "
                "first is not known; use the model's tokenizer.json"
            )
    return [pairs[piece] for piece in order]


def _last_pair(piece: str, rank: Mapping[str, int]) -> tuple[str, str] | None:
    parts = list(piece)
    ranks = [rank.get(a + b, _NEVER) for a, b in itertools.pairwise(parts)]
    while len(ranks) > 1:
        i = ranks.index(lowest := min(ranks))  # the leftmost of equals
        if lowest == _NEVER:
            return None
        parts[i] += parts.pop(i + 1)
        del ranks[i]
        if i > 0:
            ranks[i - 1] = rank.get(parts[i - 1] + parts[i], _NEVER)
        if i < len(ranks):
            ranks[i] = rank.get(parts[i] + parts[i + 1], _NEVER)
    return (parts[0], parts[1]) if len(parts) == 2 else None
