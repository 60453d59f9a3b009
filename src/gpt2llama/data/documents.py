"""Files and folders become documents. Each is checked, and not a character of it is changed."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, FileError, Gpt2LlamaError, MissingExtraError


@dataclass(frozen=True)
class Document:
    text: str
    source: str  # the file, and the place in it


def read_documents(paths: Iterable[str | Path]) -> Iterator[Document]:
    """Every document of these files and folders, in a fixed order; see `find_files`.

    .txt and .md are one document each; a line of .jsonl, an entry of a .json list or a row of
    .parquet is one: a string, or an object with a string `text`. Empty strings are left out.
    Raises FileError for what cannot be read; DataError, with the place, for what is not text.
    """
    for path in find_files(paths)[0]:
        empty = True
        for place, value in _entries(path):
            text = value.get("text") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise DataError(f"{path}{place} must be a string, or an object with a text string")
            if not text.isascii():
                _require_unicode(text, f"{path}{place}")
            if text:
                empty = False
                yield Document(text, f"{path}{place}")
        if empty:
            raise DataError(f"{path} has no text in it; fill it or leave it out")


def find_files(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """The files to read, and those skipped in folders for a suffix that is not one of ours.

    Folders are walked in sorted order; what begins with a dot is not looked at.
    """
    files: list[Path] = []
    skipped: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            for found in _walk(path):
                (files if found.suffix.lower() in _READERS else skipped).append(found)
        elif not path.exists():
            raise FileError(f"{path} does not exist")
        elif path.suffix.lower() not in _READERS:
            raise DataError(f"{path} has none of the suffixes that are read: {' '.join(_READERS)}")
        else:
            files.append(path)
    if not files:
        raise DataError(f"no file to read: give files or folders of {' '.join(_READERS)}")
    return files, skipped


def _walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(place in the file, value) of each entry."""
    try:
        yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        if isinstance(error, Gpt2LlamaError):
            raise
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def _read_text(path: Path) -> Iterator[tuple[str, Any]]:
    yield "", _decode(path.read_bytes(), path)


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    entries = _parse(_decode(path.read_bytes(), path), f"{path}")
    if not isinstance(entries, list):
        raise DataError(f"{path} must be a list of strings or of objects with a text string")
    for index, entry in enumerate(entries):
        yield f"[{index}]", entry


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f":{number}", _parse(_decode(line, path, offset), f"{path}:{number}")
            offset += len(line)


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet") from None
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise DataError(f"{path} has no column named text")
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for value in batch.column(0).to_pylist():
                    yield f" row {row}", value
                    row += 1
    except ValueError as error:  # pyarrow's own are ValueErrors or OSErrors
        if isinstance(error, Gpt2LlamaError):
            raise
        raise DataError(f"{path} is not a readable .parquet file ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _decode(content: bytes, path: Path, offset: int = 0) -> str:
    """`content` begins at byte `offset` of the file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {offset + error.start} "
            f"(0x{content[error.start]:02x}); convert it, for example from GB18030 with iconv"
        ) from None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error})") from None


def _require_unicode(text: str, place: str) -> None:
    """JSON can spell half a surrogate pair (\\ud83d), which is no character and has no bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place} has half a surrogate pair at character {error.start}") from None
