"""A tokenizer simple enough to check by eye: one id a byte, then an end of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class ByteTokenizer:
    bos_id: int | None = None
    adds_bos = False

    def __init__(self, vocab_size: int = 257, eos_id: int | None = 256, shift: int = 0) -> None:
        self.vocab_size, self.eos_id, self._shift = vocab_size, eos_id, shift
        self.stop_ids = frozenset() if eos_id is None else frozenset({eos_id})
        self.special_ids = self.stop_ids
        self.fingerprint = f"{vocab_size:064x}"

    def encode(self, text: str) -> list[int]:
        return [byte + self._shift for byte in text.encode("utf-8")]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i - self._shift for i in ids if i not in self.special_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def apply_chat(
        self, messages: list[dict[str, str]], generation_prompt: bool = True
    ) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "size").write_text(str(self.vocab_size), encoding="utf-8")
