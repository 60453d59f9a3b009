"""For all tests: one thread (tiny tensors gain nothing from two), no deadline for hypothesis; and
a command called as from a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

from gpt2llama.cli.main import main

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

Run = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """run("plan", "gpt2", code=0) -> what the command printed on stdout and on stderr."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["gpt2llama", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        assert (stop.value.code or 0) == code, err
        assert "Traceback" not in err
        return out, err

    return run
