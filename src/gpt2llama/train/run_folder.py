"""A run's folder: config.toml, metrics.jsonl, checkpoints/step-NNNNNN/, latest, best.

One process holds it at a time; a checkpoint appears whole or not at all. A run that fails before it
began leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..atomic import write_text
from ..errors import FileError, WeightsError
from ..weights.files import read_json, read_tensors, write_json, write_tensors

_EMPTY = (".lock", "checkpoints")  # what a folder holds before its run begins
_SETTINGS = ("config.toml", "begun.sha256")


class InUseError(FileError):
    """Another process holds the folder."""


class RunFolder:
    """`resume`: take up a used folder; else it must be new or empty. Raises FileError.

    As a context it forgets, on an error, the settings of a run that made nothing else yet: the next
    may be given others.
    """

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        try:
            self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
            self._used = self._is_used()
            if self._used and not resume:
                raise FileError(
                    f"{path} is already used; continue it with --resume or name another --out"
                )
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _hold(self.path / ".lock")
        except FileError:
            raise
        except OSError as error:
            raise FileError(f"cannot use {path} as a run folder: {error}") from error
        for partial in self.checkpoints.glob(".*"):  # left by a kill in the middle of writing
            shutil.rmtree(partial, ignore_errors=True)

    def _is_used(self, but: Collection[str] = _EMPTY) -> bool:
        """By anything but what is there before a run begins."""
        found = list(self.path.iterdir()) if self.path.exists() else []
        inside = any(self.checkpoints.iterdir()) if self.checkpoints.exists() else False
        return inside or any(entry.name not in but for entry in found)

    def close(self) -> None:
        if not self._used and not self._is_used():
            self._remove()
        self._lock.close()

    def _remove(self) -> None:
        if os.name == "nt":
            self._lock.close()  # it deletes no file that is open
        with suppress(OSError):  # another process may have taken it up
            self.checkpoints.rmdir()
            (self.path / ".lock").unlink()
            for place in self._made:
                place.rmdir()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # a Ctrl-C is resumed
        if failed and not self._used and not self._is_used((*_EMPTY, *_SETTINGS)):
            for name in _SETTINGS:
                (self.path / name).unlink(missing_ok=True)
        self.close()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = [p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit()]
        return max(found, key=lambda p: int(p.name[5:]), default=None)

    def write_text(self, name: str, text: str) -> None:
        """The whole text or the old one, whatever happens meanwhile."""
        write_text(self.path / name, text, overwrite=True)

    @contextmanager
    def log(self, done: int) -> Iterator[MetricsLog]:
        """metrics.jsonl to append to, without the lines of steps after `done`."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= done]
        self.write_text(self.metrics.name, "".join(json.dumps(line) + "\n" for line in kept))
        with self.metrics.open("ab", buffering=0) as file:  # nothing left to flush on a full disk
            yield MetricsLog(self.metrics, file)


class MetricsLog:
    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file = path, file

    def write(self, values: dict[str, Any]) -> None:
        line = (json.dumps(values) + "\n").encode("utf-8")
        try:
            whole = self.file.write(line) == len(line)
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error}") from error
        if not whole:
            raise FileError(f"cannot write {self.path}: the disk is full")


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last one cut off by a kill is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}; move it away to go on") from error


def write_state(
    folder: Path,
    model: nn.Module,
    optimizers: list[Optimizer],
    rng: dict[str, Tensor],
    progress: dict[str, Any],
) -> None:
    """What `--resume` needs beside the weights: optimiser state under parameters' names, RNG."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {f"rng.{name}": state for name, state in rng.items()}
    for i, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            tensors |= {f"{i}.{key}.{names[p]}": value for key, value in state.items()}
    write_tensors(folder / "trainer.safetensors", tensors)
    write_json(folder / "trainer.json", progress)


def read_state(
    folder: Path, model: nn.Module, optimizers: list[Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Fills the optimisers; returns the RNG states and the progress."""
    params = dict(model.named_parameters())
    rng: dict[str, Tensor] = {}
    for key, value in read_tensors(folder / "trainer.safetensors").items():
        owner, _, rest = key.partition(".")
        if owner == "rng":
            rng[rest] = value.clone()
            continue
        what, _, name = rest.partition(".")
        if name not in params or int(owner) >= len(optimizers):
            raise WeightsError(f"{folder}: the optimiser state of {name} has no owner in this run")
        device = "cpu" if what == "step" else params[name].device
        optimizers[int(owner)].state[params[name]][what] = value.clone().to(device)
    return rng, read_json(folder / "trainer.json")


def _hold(path: Path) -> IO[bytes]:
    """Locks the file for this process; the lock goes when the process does, however it ends."""
    file = path.open("ab")
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # Windows
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise OSError  # its holder has just removed it
    except OSError:
        file.close()
        raise InUseError(
            f"{path.parent} is in use by another process; wait for it or name another --out"
        ) from None
    return file
