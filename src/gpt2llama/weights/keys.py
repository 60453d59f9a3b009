"""A foreign object of settings as a dataclass: every key is read, inert, or refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from ..errors import CheckedFields, ConfigError, did_you_mean, field_names

_Fields = TypeVar("_Fields", bound=CheckedFields)


def read_keys(
    cls: type[_Fields],
    values: dict[str, Any],
    ignore_keys: Collection[str] = (),
    inert: Collection[str] = (),
) -> _Fields:
    """ConfigError names a key that is missing, unknown or of a wrong value; null is missing."""
    left = {k: v for k, v in values.items() if k not in ignore_keys and k not in inert}
    known = field_names(cls)
    for key in left.keys() - set(known):
        raise ConfigError(
            f"the key {key!r} is not known here{did_you_mean(str(key), known)}; "
            f"ignore_keys=({key!r},) loads the model as if it were not there"
        )
    return cls.from_dict({key: value for key, value in left.items() if value is not None})
