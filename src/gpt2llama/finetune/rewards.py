"""What an answer is worth, where that can be checked: a sum, a form, or by the user's function."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ..errors import ConfigError, FileError, TrainingError

Reward = Callable[[str, dict[str, Any]], float]  # of an answer, and the line that its prompt is in
# A minus after a digit is a subtraction's.
_NUMBER = re.compile(r"(?:(?<!\d)[-−])?\d+(?:[,_]\d{3})*(?:\.\d+)?")


def make_reward(name: str) -> Reward:
    """arithmetic, format:REGEX, or file.py:function, whose file is run.

    A function takes the answer and the line of its prompt, as a dict, and returns a number.
    Raises ConfigError for a name that is none of these, FileError for a file without the function.
    """
    if name == "arithmetic":
        return arithmetic
    kind, _, rest = name.partition(":")
    if kind == "format" and rest:
        try:
            return matches(rest)
        except re.error as error:
            raise ConfigError(
                f"reward format: {rest!r} is no regular expression: {error}"
            ) from None
    if is_function(name):
        path, _, function = name.rpartition(":")
        return _from_file(Path(path), function)
    raise ConfigError(f"reward {name!r} must be arithmetic, format:REGEX or file.py:function")


def is_function(name: str) -> bool:
    """Whether the reward is code in a file."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def has_number(line: dict[str, Any]) -> bool:
    """Whether `arithmetic` can check answers to it."""
    return _NUMBER.fullmatch(str(line.get("answer"))) is not None


def arithmetic(answer: str, line: dict[str, Any]) -> float:
    """1 if the last number of the answer is the line's `answer`, else 0."""
    found = _NUMBER.findall(answer)
    return float(bool(found) and _number(found[-1]) == _number(str(line["answer"])))


def matches(pattern: str) -> Reward:
    """1 if the regular expression is found in the answer, else 0; `.` is any character."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda answer, line: float(compiled.search(answer) is not None)


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").replace("_", ""))


def _from_file(path: Path, name: str) -> Reward:
    spec = importlib.util.spec_from_file_location("gpt2llama_reward", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileError(f"there is no file {path} to take the reward {name} from")
    module = importlib.util.module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for what is asked of us
            spec.loader.exec_module(module)
    except Exception as error:
        raise FileError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise FileError(f"{path} has no function {name}; write def {name}(answer, line)")

    def reward(answer: str, line: dict[str, Any]) -> float:
        try:
            with redirect_stdout(sys.stderr):
                value = float(function(answer, line))
        except Exception as error:
            raise TrainingError(
                f"the reward {path}:{name} failed on the answer {answer!r:.60}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise TrainingError(f"the reward {path}:{name} gave {value} for {answer!r:.60}")
        return value

    return reward
