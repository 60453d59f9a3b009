from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2llama.assets import ASSETS
from gpt2llama.cli.main import main


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An asset that is in the cache already."""
    monkeypatch.setenv("GPT2LLAMA_CACHE", str(tmp_path))
    sha256 = hashlib.sha256(b"text").hexdigest()
    asset = replace(ASSETS["sanguo"], size=4, sha256=sha256)
    monkeypatch.setitem(ASSETS, "sanguo", asset)
    asset.path.parent.mkdir()
    asset.path.write_bytes(b"text")
    return asset.path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpt2llama", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    return int(raised.value.code or 0)


def test_path_on_stdout_and_the_rest_on_stderr(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "fetch", "sanguo") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{kept}\n"
    assert "public domain" in printed.err
    assert ASSETS["sanguo"].source in printed.err


def test_json(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "fetch", "sanguo", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["name"], got["path"], got["bytes"]) == ("sanguo", str(kept), 4)
    assert got["licence"].startswith("public domain")
    assert got["source"].startswith("https://")


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "fetch") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ASSETS)
    assert run(monkeypatch, "fetch", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["assets"]
    assert [asset["name"] for asset in listed] == list(ASSETS)


def test_unknown_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "fetch", "sanguo[/x]") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no asset is named 'sanguo[/x]'; did you mean 'sanguo'" in printed.err
