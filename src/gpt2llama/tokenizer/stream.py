"""Ids to text one by one. A character may be spread over several ids, and is never torn."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from .protocol import Tokenizer


class StreamDecoder:
    """`"".join(push(id) for id in ids) + flush()` is what `decode([*after, *ids])` adds to
    `decode(after)`: all of `decode(ids)`, or with the ids of a prompt, the text that follows it.
    """

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = False  # not while there are only special ids
        for id in after:
            self.push(id)

    def push(self, id: int) -> str:
        """What is certain by now and was not given before; may be empty."""
        new = self._tokenizer.decode_bytes([id])
        if not self._begun and id not in self._tokenizer.special_ids:
            self._begun = True
            if self._tokenizer.decode([id]) != new.decode("utf-8", errors="replace"):
                new = new.removeprefix(b" ")  # SentencePiece's, which is not in the text
        return self._decoder.decode(new)

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)

    @property
    def holds_back(self) -> bool:
        """A character has begun and is not whole."""
        return self._decoder.getstate()[0] != b""


def split_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
    """(text, its ids), one for each id, or for the few that share characters."""
    decoder, text, group = StreamDecoder(tokenizer), "", []
    for id in ids:
        text += decoder.push(id)
        group.append(id)
        if not decoder.holds_back:
            yield text, group
            text, group = "", []
    if group:
        yield text + decoder.flush(), group
