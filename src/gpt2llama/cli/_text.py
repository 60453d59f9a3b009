"""Text from a file or from stdin: UTF-8, and not a character of it changed."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import DataError, FileError


def read_text(source: str) -> str:
    """The whole file, or stdin for "-"."""
    name = "stdin" if source == "-" else source
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {error.start} (0x{content[error.start]:02x}); "
            "convert it, for example from GB18030 with iconv"
        ) from None
