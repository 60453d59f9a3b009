"""`gpt2llama train`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, counted
from ._config import config_of, nothing_named
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import TrainingProgress, nothing_left

app = typer.Typer(add_completion=False)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    preset: Annotated[str | None, typer.Option(help="A named model to start from.")] = None,
    begin: Annotated[
        str | None, typer.Option("--from", help="A model to train on from, with its config.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A run as TOML (a config.toml).")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder of `data prepare`.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Train a model from scratch, from the weights of another, or go on with --resume.

    Fields for --set: those of the model (n_layers, norm, position …) and steps, batch_size,
    seq_len, accumulate, lr, optimizer, schedule, warmup_steps, weight_decay, clip, eval_every,
    checkpoint_every, patience, seed, dtype, device, compile.
    """
    from ..model.presets import preset as named
    from ..train.config import RunConfig, TrainConfig
    from ..train.run import train as train_run
    from ..train.trackers import Tracking
    from ..train.trainer import Interrupted

    named_in = [name for name in (preset, begin, config) if name is not None]
    if len(named_in) > 1:
        raise ConfigError("--preset, --from and --config exclude each other; give one")
    if not named_in and resume and (out / "config.toml").exists():
        config = out / "config.toml"
    if config is not None:
        run = RunConfig.read(config)
    elif preset is not None:
        run = RunConfig(model=named(preset), train=TrainConfig(), data="")
    elif begin is not None:
        found = str(Path(begin).resolve()) if Path(begin).exists() else begin
        run = RunConfig(model=config_of(begin), train=TrainConfig(), data="", begin=found)
    else:
        says = "name what to train: --preset zh-3m, --from MODEL or --config run.toml"
        raise nothing_named(says, out, resume)
    if data is not None:
        run = replace(run, data=str(data.resolve()))
    if not run.data:
        raise ConfigError("--data is missing: give the folder that `data prepare` wrote")
    run = run.set(settings or [])
    try:
        with TrainingProgress() as shown, Tracking(out, track or []) as tracked:
            total = run.train.steps
            report = tracked(partial(shown.update, steps=total))
            done = train_run(run, out, resume=resume, report=report)
    except Interrupted as error:
        tell(f"{error}; go on with: gpt2llama train --out {shlex.quote(str(out))} --resume")
        raise typer.Exit(130) from None
    result = {"run": str(out), "step": done.step, "tokens": done.tokens, **shown.last}
    if json:
        print_json(result)
    elif not shown.last:
        tell(nothing_left(done, run.train.patience))
    else:
        early = f" (stopped early: step {done.best_step} was the best)" * (done.step < total)
        tokens = counted(done.tokens, "token")
        tell(f"{counted(done.step, 'step')}{early}, {tokens} in {done.seconds:.0f} s: {out}")
