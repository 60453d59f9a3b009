"""The house rules that no linter knows, read from the syntax trees of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpt2llama

ROOT = Path(gpt2llama.__file__).parent
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}

# Which room may call which, lazily or not; beside itself and `errors`, which all may.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "atomic": set(),
    "jsonl": set(),
    "memory": set(),
    "model": set(),
    "tokenizer": set(),
    "assets": set(),
    "plan": {"model.config", "model.presets"},
    "quant": {"model"},
    "weights": {"assets", "memory", "model", "quant", "tokenizer"},
    "native": {"assets", "memory", "model", "quant"},
    "machine": {"native"},
    "generate": {"machine", "model", "native", "quant", "tokenizer"},
    "data": {"tokenizer"},
    "train": {"machine", "model", "data", "tokenizer", "weights", "plan"},
    "evaluate": {"generate", "jsonl", "model", "tokenizer"},
    "corpus": {"assets", "data", "tokenizer"},
    "inference_speed": {"generate", "machine", "model", "native", "plan", "weights"},
    "finetune": {
        *("assets", "data", "generate", "jsonl", "machine", "model", "plan", "quant"),
        *("tokenizer", "train", "weights"),
    },
    "demo": {
        *("corpus", "data", "finetune", "generate", "machine", "model", "plan", "tokenizer"),
        *("train", "weights"),
    },
    "evolve": {
        *("assets", "corpus", "data", "generate", "machine", "model", "plan", "quant"),
        *("tokenizer", "train", "weights"),
    },
    "__main__": {"cli"},
    "__init__": {"errors", "generate", "model", "tokenizer", "weights"},  # the public names
}
MAY_IMPORT["cli"] = MAY_IMPORT.keys() - {"__main__", "__init__"}


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def our_imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name below gpt2llama) of each import, wherever it stands."""
    package = ("gpt2llama", *path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.split(".")[0] == "gpt2llama":
                yield node.lineno, name.removeprefix("gpt2llama").lstrip(".")


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in TREES} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_go_one_way(name: str) -> None:
    allowed = {"errors", "atomic", name, *MAY_IMPORT[name]}
    wrong = [
        f"{path}:{line} imports {target}"
        for path, tree in TREES.items()
        if room(path) == name
        for line, target in our_imports(path, tree)
        if not any(f"{target}.".startswith(f"{prefix}.") for prefix in allowed)
    ]
    assert wrong == []


def test_the_import_test_sees_every_kind() -> None:
    source = "import gpt2llama.cli.main\ndef f():\n from .. import cli\n from ..cli import x\n"
    source += " from .own import y\n from gpt2llama.cli import z\n import torch\n"
    found = [name for _, name in our_imports(Path("train/step.py"), ast.parse(source))]
    assert found == ["cli.main", "cli", "cli.x", "train.own.y", "cli.z"]


def test_the_model_is_an_afternoons_read() -> None:
    files = [path for path in (ROOT / "model").glob("*.py") if path.name != "presets.py"]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= 500
    assert max(map(len, lines)) <= 100


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_only_commands_print() -> None:
    for path, tree in TREES.items():
        if room(path) != "cli":
            printing = [call.lineno for name, call in calls(tree) if name == "print"]
            assert printing == [], path


def test_no_pickle_and_no_eval() -> None:
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path, tree in TREES.items():
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in [*node.names, ast.alias(getattr(node, "module", None) or "")]
        }
        assert not imported & forbidden, path
        for name, call in calls(tree):
            options = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert name not in ("eval", "exec"), path
            assert name != "torch.load" or options.get("weights_only") == "True", path
            assert "allow_pickle" not in options or options["allow_pickle"] == "False", path


def test_forward_compares_no_strings() -> None:
    """A switch is resolved once, in a constructor."""
    forwards = [
        (path, node)
        for path, tree in TREES.items()
        if room(path) == "model"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("forward", "hidden", "_place")
    ]
    assert len(forwards) >= 6
    for path, forward in forwards:
        for node in ast.walk(forward):
            if isinstance(node, ast.Compare | ast.Match):
                words = [
                    n.value
                    for n in ast.walk(node)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
                assert words == [], f"{path}:{node.lineno}"


def opens_as_text(name: str, call: ast.Call) -> bool:
    constants = [a.value for a in call.args if isinstance(a, ast.Constant)]
    binary = any("b" in str(mode) for mode in constants)
    if name.endswith((".read_text", ".write_text")):
        return len(call.args) < 2  # RunFolder.write_text has two
    if name.endswith(".open"):  # of a path: no argument but the mode
        return len(constants) == len(call.args) and not binary
    return name == "open" and not binary


def test_text_files_say_utf8() -> None:
    for path, tree in TREES.items():
        for name, call in calls(tree):
            if opens_as_text(name, call):
                said = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert said.get("encoding") == "'utf-8'", f"{path}:{call.lineno}"
