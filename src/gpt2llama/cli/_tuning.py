"""What the commands of fine-tuning share: a run from options or from its folder, and its lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..errors import CheckedFields, ConfigError
from ._config import nothing_named
from ._print import log
from ._progress import TrainingProgress

if TYPE_CHECKING:
    from ..finetune.lora import LoraConfig
    from ..finetune.settings import Tuning
    from ..train.config import TrainConfig

M = TypeVar("M", bound=CheckedFields)
T = TypeVar("T")

Begin = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="What to tune: a folder, run, asset or hub id."),
]
Out = Annotated[Path, typer.Option(help="The run's folder.")]
HeldOut = Annotated[
    Path | None,
    typer.Option(help="More of it, only scored.", show_default="a tenth of the prompts"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One of the fields above; several."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
Lora = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", help="Only adapters learn, of this rank: LoRA."),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option(help="Adapters count alpha / rank times.", show_default="twice the rank"),
]
LoraDropout = Annotated[
    float | None, typer.Option(help="Of what the adapters read.", show_default="0.0")
]
LoraModules = Annotated[
    str | None,
    typer.Option(
        help="Which matrices have one: q_proj,v_proj …", show_default="all-linear, but for the head"
    ),
]
LORA_RATE = 10  # times full tuning's learning rate (Schulman et al. 2025, "LoRA Without Regret")


def lora_of(
    rank: int | None,
    alpha: float | None,
    dropout: float | None,
    modules: str | None,
    begun: LoraConfig | None = None,
) -> LoraConfig | None:
    """By the options above; what they leave open is as the run was `begun` with, if it was."""
    from ..finetune.lora import LoraConfig

    changes = given(alpha=alpha, dropout=dropout, modules=modules)
    if begun is not None:
        return begun.replace(**changes, **given(rank=rank))
    if rank is not None:
        return LoraConfig(**{"rank": rank, "alpha": 2 * rank} | changes)
    if changes:
        raise ConfigError(f"--lora-{next(iter(changes))} is of adapters; add --lora RANK")
    return None


def given(**options: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def lasting(name: str | Path) -> str:
    """Absolute, if it is a path: a run may be resumed from another folder."""
    return str(Path(name).resolve()) if Path(name).exists() else str(name)


def run_of(
    kind: type[M],
    train: TrainConfig,
    model: str | None,
    out: Path,
    data: Path | None,
    held_out: Path | None,
    settings: list[str],
    resume: bool,
    lora: Callable[[LoraConfig | None], LoraConfig | None],
) -> Tuning[M]:
    """By the options; what they leave open is as in the folder that is resumed, or `train`.

    lora: by its options and by what the run was begun with.
    """
    from ..finetune.settings import Tuning

    written = out / "config.toml"
    if resume and written.exists():
        run = Tuning[M].read(written, kind)
        run = replace(run, lora=lora(run.lora))
    elif model is None:
        says = f"name the model to tune: gpt2llama finetune {kind.KIND} MODEL …"
        raise nothing_named(says, out, resume)
    else:
        adapters = lora(None)
        if adapters is not None:
            train = train.replace(lr=LORA_RATE * train.lr)
        run = Tuning(begin="", data="", method=kind(), train=train, lora=adapters)
    if model is not None:
        run = replace(run, begin=lasting(model))
    if data is not None:
        run = replace(run, data=str(data.resolve()))
    if held_out is not None:
        run = replace(run, held_out=str(held_out.resolve()))
    if not run.data:
        raise ConfigError("--data is missing: give a JSONL file")
    return run.set(settings)


class TuningProgress(TrainingProgress):
    """`held_out`: the words for a line with held-out figures."""

    def __init__(self, held_out: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.held_out = held_out

    def update(self, line: dict[str, Any], steps: int) -> None:
        if "tokens_per_s" in line:  # not in line 0, the model as it was
            ours = {k: v for k, v in line.items() if not k.startswith("held_out")}
            super().update(ours, steps)
        self.last |= line
        if "held_out_loss" in line:
            log.print(f"step {line['step']:,}: held out {self.held_out(line)}", soft_wrap=True)


def watched(items: Iterable[T], count: int) -> Iterable[T]:
    """The reference's pass with the time left: a bar, or a line every ten seconds."""
    from rich.progress import track

    if log.is_terminal:
        yield from track(items, "reference", count, console=log, transient=True)
        return
    begun = shown = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - shown > 10 and done:
            left = (now - begun) / done * (count - done)
            log.print(f"reference {done}/{count}, {left:.0f} s left")
            shown = now
        yield item
