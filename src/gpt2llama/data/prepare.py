"""Documents become a folder of token shards, with a held-out split.

The folder: train-00000.safetensors and on, held-out-00000.safetensors and on; held-out.txt, the
held-out documents as they were, joined by newlines; tokenizer/, the one that made the tokens.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import new_folder
from ..errors import DataError, InputError
from .documents import find_files, read_documents
from .leaks import count_leaks
from .shards import Shard, Tokens, open_shard, shard_name, token_dtype, write_shard

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

SPLITS = ("train", "held-out")
LEAK_WINDOW = 64  # tokens
_PIECE = 1 << 20  # characters given to the tokenizer at once


@dataclass
class Split:
    """What became of one half; `bytes` of UTF-8."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


@dataclass(frozen=True, kw_only=True)
class Report:
    folder: Path
    train: Split
    held_out: Split
    skipped: list[Path]  # files of a folder that are no text
    leaked_windows: int  # of held_out.tokens // LEAK_WINDOW, also in the training tokens
    leaked_documents: int  # held-out documents that are, whole, also in the training split

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"folder": str(self.folder), "skipped": [*map(str, self.skipped)]}
        for name in ("train", "held_out"):
            values[name]["bytes_per_token"] = getattr(self, name).bytes_per_token
        return values


def prepare(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    held_out: float = 0.1,
    *,
    shard_tokens: int = 100_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Writes the folder `out`, all of it or nothing; the last documents are the held-out split.

    `held_out`: their share, at least one document; a single document gives its last characters.
    The text is read twice, to check it and to encode it, so that memory holds one file of it at
    most (one entry of a .jsonl or .parquet) and `shard_tokens` tokens of each split.
    `progress(done, total)` counts bytes of UTF-8. Raises FileError, DataError, InputError.
    """
    if not 0 < held_out < 1:
        raise InputError(f"held_out must be a share between 0 and 1 (got {held_out})")
    with new_folder(Path(out)) as folder:
        files, skipped = find_files(paths)
        digests, total, done = array("Q"), 0, 0
        for document in read_documents(files):
            raw = document.text.encode("utf-8")
            digests.frombytes(hashlib.blake2b(raw, digest_size=8).digest())
            total += len(raw)
        count = len(digests)
        first_held = max(1, count - max(1, round(count * held_out)))

        tokenizer.save(folder / "tokenizer")
        train, held = (_Writer(folder, name, tokenizer, shard_tokens) for name in SPLITS)
        with (folder / "held-out.txt").open("xb") as raw_file:
            for i, text in enumerate(_texts(files, count, held_out)):
                writer = train if i < first_held else held
                for piece in _pieces(text):
                    done += writer.add(piece)
                    if progress is not None:
                        progress(done, total)
                writer.end_document()
                if writer is held:
                    raw_file.write(b"\n" * (i > first_held) + text.encode("utf-8"))
            raw_file.flush()
            os.fsync(raw_file.fileno())
        leaked_windows = count_leaks(train.close(), held.close(), LEAK_WINDOW)
        return Report(
            folder=Path(out),
            train=train.total,
            held_out=held.total,
            skipped=skipped,
            leaked_windows=leaked_windows,
            leaked_documents=int(np.isin(digests[first_held:], digests[:first_held]).sum()),
        )


def _texts(files: list[Path], count: int, held_out: float) -> Iterator[str]:
    """The texts in order; a single one is cut in two."""
    documents = read_documents(files)
    if count > 1:
        yield from (document.text for document in documents)
        return
    document = next(documents)
    cut = len(document.text) - max(1, round(len(document.text) * held_out))
    if cut < 1:
        raise DataError(f"{document.source} is too short to hold anything out; give more text")
    yield document.text[:cut]
    yield document.text[cut:]


def _pieces(text: str) -> Iterator[str]:
    """The text, in several pieces if it is long, so that encoding it needs bounded memory.

    A piece ends with a line where it can. At such a cut the tokens may differ from those of the
    whole text; the text itself never does.
    """
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


class _Writer:
    """Fills one shard's worth of memory at a time."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, limit: int) -> None:
        self.total = Split()
        self._folder, self._split, self._tokenizer = folder, split, tokenizer
        self._buffer = np.empty(limit, token_dtype(tokenizer.vocab_size))
        self._filled, self._index, self._bytes = 0, 0, 0
        self._ends: list[int] = []

    def add(self, text: str) -> int:
        """Appends the text's tokens; returns its length in bytes."""
        self._append(self._tokenizer.encode(text))
        size = len(text.encode("utf-8"))
        self._bytes += size
        self.total.bytes += size
        return size

    def end_document(self) -> None:
        if self._tokenizer.eos_id is not None:
            self._append([self._tokenizer.eos_id])
        self._ends.append(self._filled)
        self.total.documents += 1

    def close(self) -> Tokens:
        """Writes the last shard; returns all of the split's tokens, mapped."""
        self._flush(last=True)
        names = [shard_name(self._split, index) for index in range(self._index)]
        shards = [open_shard(self._folder / name) for name in names]
        return Tokens([shard.tokens for shard in shards], self._tokenizer.vocab_size)

    def _append(self, ids: list[int]) -> None:
        tokens = np.asarray(ids, np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave id {tokens.max()}, outside its {self._tokenizer.vocab_size:,}"
            )
        self.total.tokens += tokens.size
        while tokens.size:
            if self._filled == self._buffer.size:
                self._flush(last=False)
            room = self._buffer.size - self._filled
            taken, tokens = tokens[:room], tokens[room:]
            self._buffer[self._filled : self._filled + taken.size] = taken
            self._filled += taken.size

    def _flush(self, last: bool) -> None:
        shard = Shard(
            tokens=self._buffer[: self._filled],
            document_ends=np.array(self._ends, np.int64),
            split=self._split,
            index=self._index,
            last=last,
            vocab_size=self._tokenizer.vocab_size,
            fingerprint=self._tokenizer.fingerprint,
            bytes=self._bytes,
        )
        write_shard(self._folder, shard)
        self._filled, self._index, self._bytes = 0, self._index + 1, 0
        self._ends.clear()
