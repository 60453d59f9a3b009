from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gpt2llama.cli.main import main

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As in tests/cli: what a command printed on stdout and on stderr."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["gpt2llama", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        assert (stop.value.code or 0) == code, err
        assert "Traceback" not in err
        return out, err

    return run
