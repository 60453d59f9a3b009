"""Whole or not at all: on a full disk, an error, a Ctrl-C, beside an old file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2llama.atomic import new_file, new_folder, write_text
from gpt2llama.errors import FileError


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a"
    with new_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert [*path.parent.iterdir()] == [path]
    with pytest.raises(FileError, match="a exists already; name another"), new_file(path):
        pass
    write_text(path, "二\r\n", overwrite=True)
    assert path.read_bytes() == "二\r\n".encode()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_one(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old", encoding="utf-8")

    def half_a_file() -> None:
        with new_file(path, overwrite=True) as file:
            file.write(b"half")
            raise error

    def half_a_folder() -> None:
        with new_folder(tmp_path / "b" / "c" / "d") as folder:
            (folder / "half").touch()
            raise error

    for half in (half_a_file, half_a_folder):
        with pytest.raises(error):
            half()
    assert path.read_text(encoding="utf-8") == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()  # an empty one is no one's
    with new_folder(target) as folder:
        (folder / "x").touch()
        assert not any(target.iterdir())
    assert [path.name for path in target.iterdir()] == ["x"]
    for place, why in ((target, "not empty"), (target / "x", "a file")):
        with pytest.raises(FileError, match=f"{place} is {why}; name a new folder"):
            new_folder(place).__enter__()


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from gpt2llama.atomic import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 5000)\n"
        "except OSError as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "full")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(f"FileError cannot write {tmp_path / 'full'}: File too large;")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/", "", "a\0b"])
def test_what_is_no_name_of_a_file(name: str) -> None:
    for write in (lambda: write_text(Path(name), "x"), lambda: new_folder(Path(name)).__enter__()):
        with pytest.raises(FileError):
            write()
