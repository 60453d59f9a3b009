"""What every command shares: JSON on stdout and nothing else there; talk goes to stderr."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


class BadUsage(typer.BadParameter):
    """Options that do not go together: exit 2, with the sentence as it is."""

    def format_message(self) -> str:
        return self.message


log = Console(stderr=True, highlight=False)


def tell(text: str) -> None:
    """A line on stderr as it is: paths and commands in it can be copied."""
    log.print(text, soft_wrap=True, markup=False)


@contextmanager
def stopped(says: str) -> Iterator[None]:
    """On Ctrl-C the command ends with this line, as a shell expects it: exit 130."""
    try:
        yield
    except KeyboardInterrupt:
        tell(says)
        raise typer.Exit(130) from None


def model_text(text: str) -> str:
    """What a model wrote: to a terminal without the control characters that could steer it."""
    if not sys.stdout.isatty():
        return text
    return "".join(
        c if c in "\n\r\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text
    )


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on one line; Chinese stays readable."""
    print(json.dumps(values, ensure_ascii=False), flush=True)
