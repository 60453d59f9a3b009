"""Lines of text and of JSON from outside: bounded, in UTF-8, each with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DataError, FileError

MAX_LINE = 1 << 22  # bytes; a longer one is no text to learn from
MAX_FILE = 1 << 30  # bytes, all of which its readers hold in memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, or one of both


def read_jsonl(path: str | Path, shape: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each line; empty lines are left out.

    shape: what a line should be, in the words of an error. Raises FileError; DataError, naming the
    line, for one that is no such object, and for a file without any.
    """
    empty = True
    for number, text in read_text_lines(path):
        if text.strip():
            empty = False
            yield number, _object(text.strip(), f"{path}:{number}", shape)
    if empty:
        raise DataError(f"{path} is empty; a line of it is {shape}")


def _object(text: str, place: str, shape: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); mend it or leave it out") from None
    if not isinstance(values, dict):
        raise DataError(f"{place} must be {shape}")
    if _SURROGATE.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{place} has half a surrogate pair; mend it or leave it out") from None
    return values


def read_text_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1, each with its line end. Raises FileError; DataError for a file or a line
    that is too long or not UTF-8.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE:
            raise DataError(f"{path} has more than {MAX_FILE >> 20} MiB; give a sample of it")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise DataError(f"{path}:{number} is longer than {MAX_LINE:,} bytes; cut it")
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{number} is not UTF-8 ({error.reason}); save the file as UTF-8"
                    ) from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
