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
    left = {k: v for k, v in values.items() if k not in ignore_keys and k not in inert}
    known = field_names(cls)
    for key in left.keys() - set(known):
        raise ConfigError(
            f"the key {key!r} is not known here{did_you_mean(str(key), known)}; "
            f"ignore_keys=({key!r},) loads the model as if it were not there"
        )
    return cls.from_dict({key: value for key, value in left.items() if value is not None})


def refuse(key: str, value: object, why: str) -> NoReturn:
    raise ConfigError(
        f"{key}={reprlib.repr(value)} {why}; "
        f"ignore_keys=({key!r},) loads the model as if it were not there"
    )


def plain(cfg: ModelConfig) -> ModelConfig:
    """`n_kv_heads` and `head_dim` that say what None says become None."""
    return cfg.replace(
        n_kv_heads=None if cfg.n_kv_heads == cfg.n_heads else cfg.n_kv_heads,
        head_dim=None if cfg.head_size * cfg.n_heads == cfg.d_model else cfg.head_dim,
    )
