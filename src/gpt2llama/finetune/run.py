"""What every stage's run is: a folder with its settings, one trainer, a loss curve."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckedFields, ConfigError
from ..train.config import read_toml, to_toml, with_none
from ..train.run import draw_curve
from ..train.run_folder import RunFolder
from ..train.trainer import Progress, Trainer

C = TypeVar("C", bound=CheckedFields)
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


def read_settings(path: Path, stage: str) -> Mapping[str, Any]:
    """What `tune` wrote of a run of this stage; raises FileError and ConfigError."""
    settings = read_toml(path)
    if settings.get("stage") != stage:
        raise ConfigError(f"{path} is not the config of a run of finetune {stage}")
    return settings


def table(path: Path, settings: Mapping[str, Any], name: str, kind: type[C]) -> C:
    """A table of these settings; raises ConfigError, naming the file."""
    values = settings.get(name, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {name} must be a table, [{name}]")
    try:
        return kind.from_dict(with_none(kind, values))
    except ConfigError as error:
        raise ConfigError(f"{path}: [{name}]: {error}") from error


def _check_same(written: Path, settings: Mapping[str, Any]) -> None:
    was, will = read_toml(written), tomllib.loads(to_toml(settings))
    if difference := _difference(was, will):
        raise ConfigError(
            f"{written.parent} was begun {difference}; resume it with the same settings or tune in "
            "another --out"
        )


def _difference(was: Mapping[str, Any], will: Mapping[str, Any]) -> str | None:
    before, now = _flat(was), _flat(will)
    for name in sorted((before.keys() & now.keys()) - _MAY_CHANGE):
        if before[name] != now[name]:
            return f"with {name}={before[name]!r}, not {now[name]!r}"
    for ours, theirs in ((was, will), (before, now)):  # a table says more than what is in it
        for name in sorted(ours.keys() ^ theirs.keys()):
            return f"with {name}, not without" if name in ours else f"without {name}, not with it"
    return None


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat
