"""What the package is from outside: its names, its errors, its commands, and what they cost."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gpt2llama as g
from gpt2llama.cli.main import COMMANDS, main
from gpt2llama.errors import Gpt2LlamaError, MissingExtraError, did_you_mean


def python(code: str) -> tuple[str, str]:
    """stdout and stderr of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, encoding="utf-8", check=False, env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_import_loads_nothing_and_says_nothing() -> None:
    out, err = python(
        "import sys; before = set(sys.modules); import gpt2llama\n"
        "new = sorted({name.split('.')[0] for name in set(sys.modules) - before})\n"
        "import json; json.dump(new, sys.stdout)"
    )
    assert err == ""
    loaded = set(json.loads(out))
    assert "gpt2llama" in loaded
    assert not loaded - sys.stdlib_module_names - {"gpt2llama"}


def test_arithmetic_and_text_need_no_torch() -> None:
    light = "errors assets plan model.config model.presets tokenizer data.prepare data.leaks"
    out, _ = python(
        "import importlib, sys\n"
        f"for name in {light.split()}: importlib.import_module('gpt2llama.' + name)\n"
        "print('torch' in sys.modules)"
    )
    assert out == "False\n"


def test_every_public_name_is_there() -> None:
    assert sorted(g.__all__) == g.__all__
    assert dir(g) == g.__all__
    for name in g.__all__:
        assert getattr(g, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'transformer'"):
        g.transformer  # noqa: B018  # the access is the test


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(g.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == g._HOME
    assert sorted([*g._HOME, "__version__"], key=g.__all__.index) == g.__all__


def all_errors(cls: type[Gpt2LlamaError] = Gpt2LlamaError) -> list[type[Gpt2LlamaError]]:
    return [e for sub in cls.__subclasses__() for e in (sub, *all_errors(sub))]


def test_every_error_is_a_value_or_an_os_error() -> None:
    assert len(all_errors()) >= 9
    for error in all_errors():
        assert issubclass(error, ValueError | OSError), error
    for error in set(all_errors()) - {MissingExtraError}:
        assert str(error("what, where, how to mend it")) == "what, where, how to mend it"
    said = str(MissingExtraError("pyarrow", "parquet"))
    assert said == "pyarrow is not installed; it comes with: pip install 'gpt2llama[parquet]'"


def test_did_you_mean() -> None:
    assert did_you_mean("n_layer", ["n_heads", "n_layers"]) == "; did you mean 'n_layers'?"
    assert did_you_mean("zzz", ["n_heads"]) == ""
    assert did_you_mean("n_layers", ["min_lr", "lr"]) == ""


@cache
def help_pages() -> dict[str, Any]:
    """Of each command and sub-command, all in one fresh interpreter: exit code, text, torch?"""
    out, _ = python(
        """
import importlib, json, sys
from typer.main import get_command
from typer.testing import CliRunner
from gpt2llama.cli.main import COMMANDS, app

pages = {}
def look(*words):
    got = CliRunner().invoke(app, [*words, "--help"])
    torch = "torch" in sys.modules
    pages[" ".join(words)] = [got.exit_code, got.output, torch, repr(got.exception)]

look()
for name in COMMANDS:
    look(name)
    module = sys.modules.get("gpt2llama.cli." + name)
    for sub in getattr(module and get_command(module.app), "commands", {}):
        look(name, sub)
json.dump(pages, sys.stdout)
"""
    )
    return dict(json.loads(out))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_helps_without_torch(name: str) -> None:
    pages = {words: page for words, page in help_pages().items() if words.split()[:1] == [name]}
    assert pages
    for words, (code, text, torch, exception) in pages.items():
        assert code == 0, (words, exception)
        assert f" {words} " in text.split("Usage:")[1].split("\n")[0]
        assert not torch, words


def test_the_list_of_commands() -> None:
    code, text, torch, _ = help_pages()[""]
    assert (code, torch) == (0, False)
    for name, says in COMMANDS.items():
        assert name in text
        assert says in " ".join(text.replace("│", " ").split())


def test_without_arguments_it_helps(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2llama"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "Usage" in "".join(capfd.readouterr())


def test_dash_m_is_the_command() -> None:
    command = [sys.executable, "-m", "gpt2llama", "plan", "gpt2", "--json"]
    out = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    assert json.loads(out)["parameters"] == 124439808
