"""Lines from outside: what is read as it stands, and what is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama import jsonl
from gpt2llama.errors import DataError, FileError
from gpt2llama.jsonl import read_jsonl, read_text_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each, max_size=2)
)


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1), st.booleans())
def test_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], plain: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=plain) for row in rows]  # an emoji is a whole pair
    path.write_bytes("\ufeff".encode() + "\r\n\n".join(lines).encode())
    assert list(read_jsonl(path, "an object")) == [(2 * i + 1, row) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": "1"', "a.jsonl:2 is not JSON "),
        (b"[" * 100_000, "a.jsonl:2 is not JSON "),
        (b'"text"', "a.jsonl:2 must be an object with a text"),
        (b'{"a": "\xff"}', "a.jsonl:2 is not UTF-8"),
        (b'{"a": ["x\\uD83d"]}', "a.jsonl:2 has half a surrogate pair"),
        (b'{"\\ude00\\ud83d": 1}', "a.jsonl:2 has half a surrogate pair"),
        (b'{"a": "' + b"x" * jsonl.MAX_LINE + b'"}', "a.jsonl:2 is longer than 4,194,304 bytes"),
    ],
)
def test_a_bad_line_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\\ud83d\\ude00 \\u4e2d"}\n' + content + b"\n")
    with pytest.raises(DataError, match=said) as raised:
        list(read_jsonl(tmp_path / "a.jsonl", "an object with a text"))
    assert len(str(raised.value)) < 300


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(FileError, match=r"cannot read .*a\.jsonl: No such file"):
        list(read_text_lines(path))
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=r"a\.jsonl is empty; a line of it is an object"):
        list(read_jsonl(path, "an object"))
    monkeypatch.setattr(jsonl, "MAX_FILE", 2)
    with pytest.raises(DataError, match="give a sample"):
        list(read_text_lines(path))
