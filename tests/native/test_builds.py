"""Other compilations of the kernel: without warnings, sanitised, for other vectors; and none."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from gpt2llama.native.build import FLAGS, SOURCE, CannotBuild, built

CC = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")
X86 = platform.machine() in ("x86_64", "AMD64")
x86 = pytest.mark.skipif(not X86, reason="names x86 processors")
SANITISED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run(tests: str, cache: Path, cflags: tuple[str, ...], **env: str) -> str:
    """The kernel's own tests in a process that compiles it with these flags."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-x", "-k", tests]
    kernel_tests = str(Path(__file__).with_name("test_kernel.py"))
    env = {**os.environ, "GPT2LLAMA_CACHE": str(cache), "CFLAGS": " ".join(cflags), **env}
    done = subprocess.run([*command, kernel_tests], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "skipped" not in done.stdout
    return done.stdout


@x86
@pytest.mark.parametrize("march", ["x86-64", "haswell", "sapphirerapids"])
def test_compiles_without_a_warning(march: str, tmp_path: Path) -> None:
    assert CC is not None
    flags = ("-O1", f"-march={march}", "-Wall", "-Wextra", "-Werror")
    assert built(CC, (*FLAGS, *flags), tmp_path).exists()


def test_runs_clean_under_the_sanitisers(tmp_path: Path) -> None:
    """Addresses and undefined behaviour: PyTorch's memory has fences too, once the sanitiser's
    allocator comes first."""
    libraries = [f"lib{name}.so" for name in ("asan", "ubsan", "stdc++")]
    found = [
        subprocess.run([str(CC), f"-print-file-name={name}"], capture_output=True, text=True)
        for name in libraries
    ]
    preload = [line.stdout.strip() for line in found]
    if not all(os.path.isabs(path) for path in preload):
        pytest.skip("the compiler has no sanitisers")
    env = {"LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0"}
    run(
        "switches or quantised or bf16 or refused or int8 or greedy or pieces or wide",
        tmp_path,
        SANITISED,
        **env,
    )


@x86
@pytest.mark.parametrize(
    "flags",
    [("-march=x86-64", "-DLANES=4"), ("-DLANES=16", "-Wno-psabi")],
    ids=["portable", "wide"],
)
def test_other_vectors_compute_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    """What other processors run, but for the instructions that this one lacks."""
    run("switches or quantised or bf16 or int8 or greedy or wide", tmp_path, ("-O1", *flags))


def test_a_build_is_kept_and_not_taken_for_another(tmp_path: Path) -> None:
    assert CC is not None
    first = built(CC, (*FLAGS, "-O0"), tmp_path)
    stamp = first.stat().st_mtime_ns
    assert built(CC, (*FLAGS, "-O0"), tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert built(CC, (*FLAGS, "-O0", "-DSPAN=64"), tmp_path) != first
    assert [path.suffix for path in tmp_path.iterdir()] == [".so", ".so"]  # no scraps


def test_what_the_compiler_said_is_passed_on(tmp_path: Path) -> None:
    assert CC is not None
    with pytest.raises(CannotBuild, match="-fno-such-flag"):
        built(CC, (*FLAGS, "-fno-such-flag"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("env", [{"CC": "no-such-compiler"}, {"GPT2LLAMA_NATIVE": "0"}], ids=str)
def test_without_a_compiler_pytorch_decodes_and_says_so_once(
    env: dict[str, str], tmp_path: Path
) -> None:
    code = """
import torch, gpt2llama as g
model = g.Transformer(g.preset("zh-3m").replace(n_layers=1))
for _ in range(2):
    print(g.generate_ids(model, [[1, 2, 3]], max_new_tokens=3))
"""
    env = {**os.environ, "GPT2LLAMA_CACHE": str(tmp_path), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.count("without the native kernel") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_asked_once(tmp_path: Path) -> None:
    asked, compiler = tmp_path / "asked", tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho >> {asked}\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    code = """
import torch, gpt2llama as g
model = g.Transformer(g.preset("zh-3m").replace(n_layers=1))
for _ in range(2):
    g.generate_ids(model, [[1, 2, 3]], max_new_tokens=3)
"""
    env = {**os.environ, "GPT2LLAMA_CACHE": str(tmp_path / "cache"), "CC": str(compiler)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert asked.read_text(encoding="utf-8") == "\n"


def test_source_is_in_the_package() -> None:
    names = {path.name for path in files("gpt2llama.native").iterdir()}
    assert {"decode.c", "matrix.h", "team.h", "vectors.h"} <= names
    assert SOURCE.name in names
