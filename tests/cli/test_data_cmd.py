from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpt2llama.cli.main import main
from gpt2llama.data.batches import TokenData

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from byte_tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    monkeypatch.setattr("gpt2llama.cli._tokenizer.tokenizer_of", lambda name: tokenizer)
    return tokenizer


def prepare(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    options = ["--tokenizer", "any", "--out", str(folder / "out"), *arguments]
    monkeypatch.setattr("sys.argv", ["gpt2llama", "data", "prepare", str(folder / "in"), *options])
    with pytest.raises(SystemExit) as raised:
        main()
    return int(raised.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    text = "".join(json.dumps({"text": f"第{i}回 " + chr(65 + i) * 99}) + "\n" for i in range(20))
    (tmp_path / "in" / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "in" / "[b].png").touch()
    return tmp_path


def test_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(monkeypatch, folder, "--json") == 0
    printed = capsys.readouterr()
    got = json.loads(printed.out)
    data = TokenData.open(folder / "out", ByteTokenizer().fingerprint)
    assert got["folder"] == str(folder / "out")
    assert (got["train"]["documents"], got["held_out"]["documents"]) == (18, 2)
    assert (got["train"]["tokens"], got["held_out"]["tokens"]) == tuple(
        map(len, (data.train, data.held_out))
    )
    assert got["held_out"]["bytes"] == data.held_out_bytes
    assert got["held_out"]["bytes_per_token"] == data.held_out_bytes / len(data.held_out)
    assert got["skipped"] == [str(folder / "in" / "[b].png")]
    assert (got["leaked_windows"], got["leaked_documents"]) == (0, 0)
    assert "skipped 1 file (no text): [b].png" in printed.err
    assert "warning" not in printed.err


def test_a_leak_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = folder / "in" / "a.jsonl"
    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    corpus.write_text("".join(lines + lines[:10]), encoding="utf-8")
    assert prepare(monkeypatch, folder, "--held-out", "0.34") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3
    warning = " ".join(printed.err.split())
    assert "of the held-out text, 16 of 16 windows of 64 tokens" in warning
    assert "10 of 10 whole documents are also in the training text" in warning


def test_bad_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "in" / "b.txt").write_bytes(b"\xff")
    assert prepare(monkeypatch, folder) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "not UTF-8 at byte 0" in printed.err
    assert "Traceback" not in printed.err
    assert not (folder / "out").exists()
