"""Files and folders that appear whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import FileError, Gpt2LlamaError


@contextmanager
def new_file(path: Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` once all of it is on disk; the old one stays till then.

    FileError if there is one (unless `overwrite`), or it cannot be written.
    """
    with _file_errors(path), _parents(path):
        partial = _beside(path)
        try:
            if path.exists() and not overwrite:
                raise FileError(f"{path} exists already; name another file or delete it")
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, overwrite: bool = False) -> None:
    """The whole text, as UTF-8 with its newlines as they are; the same errors."""
    with new_file(path, overwrite) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write into, which becomes `folder` once all of it is on disk.

    FileError if `folder` is in use or cannot be written; it is then as it was before.
    """
    with _file_errors(folder), _parents(folder):
        folder = folder.resolve()
        partial = _beside(folder)
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                kind = "not empty" if folder.is_dir() else "a file"
                raise FileError(f"{folder} is {kind}; name a new folder or delete it")
            partial.mkdir()
            yield partial
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
            _sync(folder.parent)
        except FileError as error:  # of a file inside: the user knows only the folder's own name
            raise FileError(str(error).replace(partial.name, folder.name)) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    if "\0" in str(path):
        raise FileError(f"{str(path)!r} is no name for a file or folder; choose another")
    try:
        yield
    except OSError as error:
        if isinstance(error, Gpt2LlamaError):
            raise
        why = error.strerror or str(error)
        raise FileError(f"cannot write {path}: {why}; free some space or name another") from error


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Makes the folders that lead to it, and removes them again if nothing comes of it."""
    missing = [place for place in path.parents if not place.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # something else is there by now
            for place in missing:
                place.rmdir()
        raise


def _beside(path: Path) -> Path:
    """A hidden name in the same folder, which no one else has."""
    if not path.name:
        raise FileError(f"{str(path)!r} is no name for a file or folder; choose another")
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
