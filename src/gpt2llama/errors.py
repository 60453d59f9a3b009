"""Every error the package raises on purpose: one sentence that says what, where, how to mend it;
and the check of config dataclasses that raises most of them.

Each is a ValueError (the caller's values are wrong) or an OSError (something on disk, in a
process or on the network is), so that code which knows nothing of us can still catch it.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar, Self

_LARGEST = 2**63  # of whole numbers, which in Python have no end


class Gpt2LlamaError(Exception):
    """Base of all; the command line prints its message and exits with 1."""


class ConfigError(Gpt2LlamaError, ValueError):
    """A config field, preset or `--set` key that is unknown or contradicts another."""


class InputError(Gpt2LlamaError, ValueError):
    """An argument of a call (ids, prompt, mask, sampling setting) that cannot be used."""


class DataError(Gpt2LlamaError, ValueError):
    """Text or token shards that cannot be read or do not fit the run."""


class TokenizerError(Gpt2LlamaError, ValueError):
    """A vocabulary that cannot be read, trained, or does not belong to the model."""


class WeightsError(Gpt2LlamaError, ValueError):
    """A checkpoint whose tensors or config do not make the model they should."""


class TrainingError(Gpt2LlamaError, ValueError):
    """Training cannot go on: a loss that is not finite, a batch with nothing to learn."""


class FileError(Gpt2LlamaError, OSError):
    """A file or folder that is missing, used, truncated, or cannot be written."""


class AssetError(Gpt2LlamaError, OSError):
    """A named asset that cannot be fetched or whose bytes are not the expected ones."""


class MissingExtraError(Gpt2LlamaError, OSError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; it comes with: pip install 'gpt2llama[{extra}]'"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def counted(count: int, what: str, several: str | None = None) -> str:
    """`1 step`, `2,000 steps`; several: where the plural is not the word and an s."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


class CheckedFields:
    """Mixin of a frozen config dataclass: every field must fit its annotation, or ConfigError.

    Numbers are finite and above 0, those named in ZERO_ALLOWED at least 0. A field that may be
    one of several such dataclasses tells them apart by their KIND: `{"type": KIND, …}` as a dict.
    """

    ZERO_ALLOWED: ClassVar[tuple[str, ...]] = ()
    KIND: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name in field_names(type(self)):
            value, hint = getattr(self, name), hints[name]
            if isinstance(value, dict):  # as read from TOML or JSON
                value = _from_tagged(name, value, hint)
                object.__setattr__(self, name, value)
            least = "at least" if name in self.ZERO_ALLOWED else "above"
            if not _fits(value, hint, zero=least == "at least"):
                wanted = " or ".join(_describe(part, least) for part in _parts(hint))
                raise ConfigError(f"{name} must be {wanted} (got {value!r})")

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed; an unknown one is a ConfigError with the nearest."""
        check_names(type(self).__name__, type(self), changes)
        return replace(self, **changes)  # type: ignore[type-var]  # a dataclass

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or TOML; `from_dict` is the way back."""
        values = asdict(self)  # type: ignore[call-overload]  # a dataclass
        for name in values:
            if isinstance(part := getattr(self, name), CheckedFields):
                values[name] = {"type": part.KIND} | values[name]
        return dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises ConfigError for an unknown key, a missing one or a bad value."""
        check_names(cls.__name__, cls, values, complete=True)
        return cls(**values)


def field_names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]


def check_names(owner: str, cls: Any, values: dict[str, Any], complete: bool = False) -> None:
    """Refuses a key that is no field of the dataclass `cls`; `complete`: and a lacking one."""
    known = {f.name: f.default is MISSING for f in fields(cls)}
    for name in values:
        if name not in known:
            raise ConfigError(f"{owner} has no field {name!r}{did_you_mean(name, known)}")
    lacking = [name for name, required in known.items() if required and name not in values]
    if complete and lacking:
        raise ConfigError(f"{owner} lacks {', '.join(lacking)}")


def _from_tagged(name: str, values: dict[str, Any], hint: Any) -> Any:
    kinds = {part.KIND: part for part in _parts(hint) if hasattr(part, "KIND")}
    kind, rest = values.get("type"), {k: v for k, v in values.items() if k != "type"}
    if str(kind) not in kinds:
        raise ConfigError(f"{name} type {kind!r} must be one of {', '.join(kinds)}")
    check_names(f"{name} {kind!r}", kinds[str(kind)], rest, complete=True)
    return kinds[str(kind)](**rest)


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)


def _fits(value: object, hint: Any, zero: bool) -> bool:
    for part in _parts(hint):
        if typing.get_origin(part) is typing.Literal:
            fits = value in typing.get_args(part)
        elif part in (int, float):  # a bool is no number here, though Python says it is
            number = type(value) is int or (part is float and type(value) is float)
            limit = _LARGEST if type(value) is int else math.inf
            fits = number and value < limit and (value > 0 or (zero and value == 0))  # type: ignore  # a number
        else:
            fits = isinstance(value, part)
        if fits:
            return True
    return False


def _describe(part: Any, least: str) -> str:
    if typing.get_origin(part) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(part)))
    numbers = {int: f"a whole number {least} 0", float: f"a number {least} 0"}
    words: dict[Any, str] = {bool: "true or false", types.NoneType: "none", **numbers}
    return words.get(part, str(part.__name__))
