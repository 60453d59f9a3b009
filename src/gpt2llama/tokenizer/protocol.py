"""What the rest of the house may ask of a tokenizer, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """The largest id + 1, special ids included."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None:
        """Ends a document; also what stands between two in training."""

    stop_ids: frozenset[int]
    """Generation ends at any of these; a model's generation_config.json may add some."""

    @property
    def adds_bos(self) -> bool:
        """Generation puts `bos_id` before a prompt."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that no text encodes to."""

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides which ids a text gets."""

    def encode(self, text: str) -> list[int]:
        """Adds no special id, and a special string in the text is text like any other."""

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD; special ids their names."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Of a concatenation, the concatenation."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja text that `apply_chat` renders; None: it cannot."""

    def apply_chat(
        self, messages: Sequence[dict[str, str]], generation_prompt: bool = True
    ) -> list[int]:
        """`{"role", "content"}` messages as a prompt for the assistant's next one; without
        generation_prompt, they alone."""

    def save(self, folder: Path) -> None: ...
