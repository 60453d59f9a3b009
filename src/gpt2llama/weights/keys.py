"""Foreign settings: every key is read, inert, or refused by name."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

from ..errors import CheckedFields, ConfigError, did_you_mean, field_names
from ..model.config import ModelConfig

_Fields = TypeVar("_Fields", bound=CheckedFields)


def read_keys(
    cls: type[_Fields],
    values: dict[str, Any],
    ignore_keys: Collection[str] = (),
    inert: Collection[str] = (),
) -> _Fields:
    """ConfigError names a key that is missing, unknown or of a wrong value; null is missing."""
    left = {k: v for k, v in without(values, ignore_keys).items() if k not in inert}
    known = field_names(cls)
    for key in left.keys() - set(known):
        like = did_you_mean(str(key), known)
        raise ConfigError(f"the key {key!r} is not known here{like}; {_as_if_not_there(key)}")
    return cls.from_dict({key: value for key, value in left.items() if value is not None})


def without(values: dict[str, Any], ignore_keys: Collection[str]) -> dict[str, Any]:
    """The others; ConfigError for a key to ignore that is not there."""
    for key in ignore_keys:
        if key not in values:
            raise ConfigError(f"there is no key {key!r} to ignore{did_you_mean(key, list(values))}")
    return {key: value for key, value in values.items() if key not in ignore_keys}


def refuse(key: str, value: object, why: str) -> NoReturn:
    raise ConfigError(f"{key}={reprlib.repr(value)} {why}; {_as_if_not_there(key)}")


def _as_if_not_there(key: str) -> str:
    return f"--ignore-key {key} (ignore_keys=[{key!r}]) loads the model as if it were not there"


def plain(cfg: ModelConfig) -> ModelConfig:
    """`n_kv_heads` and `head_dim` that say what None says become None."""
    return cfg.replace(
        n_kv_heads=None if cfg.n_kv_heads == cfg.n_heads else cfg.n_kv_heads,
        head_dim=None if cfg.head_size * cfg.n_heads == cfg.d_model else cfg.head_dim,
    )
