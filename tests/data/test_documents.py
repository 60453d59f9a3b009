from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpt2llama.data.documents import find_files, read_documents
from gpt2llama.errors import DataError, FileError, MissingExtraError

ODD = "a\r\nb\rc\u2028d\x85\ufeff 刘备\t\U0001f600\0"  # all that a careless reader would change


def texts(*paths: Path) -> list[str]:
    return [document.text for document in read_documents(paths)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("escape", [True, False])
def test_every_format_gives_the_text_unchanged(tmp_path: Path, escape: bool) -> None:
    one, two = json.dumps(ODD, ensure_ascii=escape), json.dumps({"text": ODD, "id": 3})
    assert texts(write(tmp_path / "a.txt", ODD)) == [ODD]
    assert texts(write(tmp_path / "a.md", ODD)) == [ODD]
    assert texts(write(tmp_path / "a.json", f"[{one}, {two}]")) == [ODD, ODD]
    assert texts(write(tmp_path / "a.jsonl", f"{two}\r\n\n{one}")) == [ODD, ODD]


def test_a_mark_before_json_is_no_part_of_it(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.json", '\ufeff["x"]')) == ["x"]
    assert texts(write(tmp_path / "a.txt", "\ufeffx")) == ["\ufeffx"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the parquet extra")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": [ODD, "x"]}), path)
    assert texts(path) == [ODD, "x"]
    parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    with pytest.raises(DataError, match="row 1 must be a string"):
        texts(path)
    parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    with pytest.raises(DataError, match="no column named text"):
        texts(path)
    with pytest.raises(DataError, match=r"not a readable \.parquet"):
        texts(write(path, b"PAR1 and no more"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"gpt2llama\[parquet\]"):
        texts(write(tmp_path / "a.parquet", b"PAR1"))


def test_folders_are_sorted_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y/1.md", "a/y/2.TXT", "c/d.txt"):
        write(tmp_path / name, name)
    for name in (".hidden.txt", ".git/x.txt", "a/y/.x/q.txt"):
        write(tmp_path / name, "hidden")
    picture = write(tmp_path / "c/d.png", b"\x89")
    assert texts(tmp_path) == ["a/y/1.md", "a/y/2.TXT", "a/z.txt", "b.txt", "c/d.txt"]
    assert texts(tmp_path / "c", tmp_path / "b.txt") == ["c/d.txt", "b.txt"]
    assert find_files([tmp_path])[1] == [picture]


def test_sources_name_the_place(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '"x"\n\n"y"\n')
    entries = write(tmp_path / "b.json", '["x", "", "y"]')
    sources = [document.source for document in read_documents([lines, entries])]
    assert sources == [f"{lines}:1", f"{lines}:3", f"{entries}[0]", f"{entries}[2]"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "a.txt has no text"),
        ("a.json", b"[]", "a.json has no text"),
        ("a.jsonl", b"\n\n", "a.jsonl has no text"),
        ("a.json", b'["", {"text": ""}]', "a.json has no text"),
        ("a.txt", "刘备".encode() + b"\xff", r"a.txt is not UTF-8 at byte 6 \(0xff\)"),
        ("a.txt", "刘备".encode("gb18030"), "not UTF-8 at byte 0"),
        ("a.txt", "刘".encode()[:2], "not UTF-8 at byte 0"),
        ("a.json", b'["\xff"]', "a.json is not UTF-8 at byte 2"),
        ("a.jsonl", b'"ok"\n"\xe5\x88"\n', "a.jsonl is not UTF-8 at byte 6"),
        ("a.jsonl", b'"ok"\n\n{"text": \n', r"a.jsonl:3 is not JSON"),
        ("a.jsonl", b'"ok"\n{"body": "x"}', r"a.jsonl:2 must be a string, or an object with"),
        ("a.jsonl", b'{"text": 7}', r"a.jsonl:1 must be"),
        ("a.json", b'["ok", null]', r"a.json\[1\] must be"),
        ("a.json", b'{"text": "x"}', "a.json must be a list"),
        ("a.json", b"[" * 100_000, "a.json is not JSON"),
        ("a.json", b'["\\ud83d"]', r"a.json\[0\] has half a surrogate pair at character 0"),
        ("a.html", b"<p>", "a.html has none of the suffixes"),
    ],
)
def test_what_is_no_text_gets_a_sentence(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        texts(write(tmp_path / name, content))


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere\.txt does not exist"):
        texts(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="no file to read"):
        texts(tmp_path)
    with pytest.raises(DataError, match="no file to read"):
        texts()
