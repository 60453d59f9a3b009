"""A run's metrics in trackio, tensorboard or wandb, beside metrics.jsonl, which has them all."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..atomic import write_text
from ..errors import MissingExtraError
from ..weights.files import read_json
from .run_folder import read_metrics

PROJECT, STATE = "gpt2llama", "tracked.json"
# What is imported of each, when it is asked for; the extra that installs it has its name.
TRACKERS = {"trackio": "trackio", "tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir RUN`."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # its own queue waits for two minutes, which a kill would cost

    def close(self) -> None:
        self.writer.close()


class Run:
    """Of trackio or wandb, which share an interface; `how`: what their `init` takes."""

    def __init__(self, module: Any, **how: Any) -> None:
        self.module = module
        module.init(project=PROJECT, resume="allow", **how)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


def make_tracker(name: str, folder: Path, run_id: str, settings: Mapping[str, Any]) -> Tracker:
    """Nothing leaves this machine, unless the tracker's own environment variables say so.

    run_id: of the run to begin or continue. Raises MissingExtraError and whatever a tracker does.
    """
    module = load_tracker(name)
    if name == "tensorboard":
        return TensorBoard(module, folder)
    both = {"name": f"{folder.resolve().name}-{run_id}", "config": dict(settings)}
    if name == "trackio":  # its own samplers of the machine would run beside the training
        return Run(module, auto_log_cpu=False, auto_log_gpu=False, **both)
    return Run(
        module,
        id=run_id,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        settings=module.Settings(console="off", silent=True),
        **both,
    )


def load_tracker(name: str) -> Any:
    try:
        return import_module(TRACKERS[name])
    except ImportError as error:
        raise MissingExtraError(name, name) from error


class Tracking:
    """A context: `tracking(report)` is the report, and hands the lines to the trackers, too.

    They get every line of metrics.jsonl once, those from before they were asked for as well; what
    they have stands in tracked.json, by which a resumed run goes on with the same ones. One that
    fails is left out from there on, with a warning. Raises MissingExtraError for a package in
    `names` that is not installed.
    """

    def __init__(self, out: str | Path, names: Sequence[str] = ()) -> None:
        self.folder, self.open = Path(out), dict[str, Tracker]()
        self.state: dict[str, Any] = {"id": secrets.token_hex(4), "steps": {}}
        if (state := self.folder / STATE).exists():
            self.state |= read_json(state)
        for name in names:
            load_tracker(name)
        self.names = list(dict.fromkeys([*self.state["steps"], *names]))

    def __call__(self, report: Callable[..., None]) -> Callable[..., None]:
        def both(line: dict[str, Any], *rest: Any) -> None:
            report(line, *rest)
            for name in list(self.names):
                self._guarded(name, self._log, line)

        return both

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.open):
            self._guarded(name, lambda name: self.open.pop(name).close())

    def _guarded(self, name: str, act: Callable[..., None], *arguments: Any) -> None:
        """Trackers talk on stdout, which is the command's, and may fail, which is their own."""
        try:
            with redirect_stdout(sys.stderr):
                act(name, *arguments)
        except Exception as error:
            self.names = [other for other in self.names if other != name]
            warnings.warn(
                f"{name} is left out from here on ({error}); metrics.jsonl has everything",
                stacklevel=2,
            )

    def _log(self, name: str, line: dict[str, Any]) -> None:
        lines, steps = [line], self.state["steps"]
        if name not in self.open:
            lines = read_metrics(self.folder)  # the new line is there, too
            self.open[name] = make_tracker(name, self.folder, self.state["id"], self._settings())
        new = [line for line in lines if line["step"] > steps.get(name, -1)]
        if new:
            steps[name] = new[-1]["step"]
            # Before the tracker has them: a kill between the two may cost it a line, which is
            # never there twice.
            write_text(self.folder / STATE, json.dumps(self.state) + "\n", overwrite=True)
        for line in new:
            self.open[name].log(line["step"], _numbers(line))

    def _settings(self) -> dict[str, Any]:
        path = self.folder / "config.toml"
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }
