"""The kernel, compiled on first use for the machine at hand and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from ..assets import cache_folder

SOURCE = Path(__file__).with_name("decode.c")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
SECONDS = 120  # for the compiler


class CannotBuild(Exception):
    """Why there is no kernel on this machine."""


def library() -> ctypes.CDLL:
    """The kernel; CannotBuild where there is no compiler, or $GPT2LLAMA_NATIVE is 0.

    $CC and $CFLAGS (after our own flags) choose how it is compiled. Tried once in a process.
    """
    if isinstance(found := _tried(), str):
        raise CannotBuild(found)
    return found


@cache
def _tried() -> ctypes.CDLL | str:
    """The kernel, or why there is none."""
    try:
        return _loaded()
    except CannotBuild as why:
        return str(why)


def _loaded() -> ctypes.CDLL:
    if os.environ.get("GPT2LLAMA_NATIVE") == "0":
        raise CannotBuild("GPT2LLAMA_NATIVE is 0")
    if sys.platform == "win32" or sys.byteorder != "little":
        raise CannotBuild("it is written for Linux and macOS on little-endian processors")
    named = os.environ.get("CC", "cc")
    compiler = shutil.which(named)
    if compiler is None:
        raise CannotBuild(f"there is no C compiler {named!r}; install one, e.g. gcc")
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = (*FLAGS, native, *shlex.split(os.environ.get("CFLAGS", "")))
    try:
        return ctypes.CDLL(str(built(compiler, flags, cache_folder() / "native")))
    except OSError as error:
        raise CannotBuild(f"it cannot be written or loaded: {error}") from error


def built(compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """The shared library in `folder`, compiled if it is not there: its name is a digest of the
    source, the flags, the compiler and the processor, so that no other machine's is taken."""
    stat = os.stat(compiler)
    headers = sorted(SOURCE.parent.glob("*.h"))
    texts = [path.read_text(encoding="utf-8") for path in (SOURCE, *headers)]
    what = (texts, flags, compiler, stat.st_size, stat.st_mtime_ns)
    digest = hashlib.sha256(repr((*what, _processor())).encode("utf-8")).hexdigest()
    done = folder / f"decode-{digest[:24]}.so"
    if done.exists():
        return done
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as work:
        made = Path(work) / "decode.so"
        command = [compiler, *flags, str(SOURCE), "-o", str(made), "-lm"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{compiler} took more than {SECONDS} s") from error
        if found.returncode:
            said = (found.stderr or found.stdout).strip().splitlines() or ["nothing"]
            raise CannotBuild(f"{shlex.join(command)} failed: {said[0]}")
        made.replace(done)
    return done


def _processor() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith(("flags", "Features", "model name"))]
        return "".join(sorted(set(lines)))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.release()}"
