"""What every stage's run is: a folder with its settings, one trainer, a loss curve."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..train.config import to_toml
from ..train.run import draw_curve
from ..train.run_folder import RunFolder
from ..train.trainer import Progress, Trainer

# What a resumed run may change: nothing that its numbers so far depend on.
_MAY_CHANGE = {"epochs", "steps", "eval_every", "checkpoint_every", "patience"}


def tune(
    out: str | Path,
    settings: Mapping[str, Any],
    make: Callable[[RunFolder], Trainer],
    resume: bool = False,
) -> Progress:
    """Runs make's trainer in the folder `out`, whose config.toml holds the settings.

    settings: plain values, and one level of tables of them. Raises what Trainer raises, FileError
    for a used folder without `resume`, ConfigError for one begun with other settings.
    """
    with RunFolder(out, resume) as folder:
        written = folder.path / "config.toml"
        if written.exists():
            _check_same(written, settings)
        trainer = make(folder)
        folder.write_text(written.name, to_toml(settings))
        progress = trainer.run()
        draw_curve(folder)
    return progress


def _check_same(written: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = _flat(tomllib.loads(written.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{written} is not TOML: {error}") from error
    now = _flat(tomllib.loads(to_toml(settings)))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and name not in _MAY_CHANGE:
            raise ConfigError(
                f"{written.parent} was begun with {name}={before.get(name)!r}, not "
                f"{now.get(name)!r}; resume it with the same settings or tune in another --out"
            )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat
