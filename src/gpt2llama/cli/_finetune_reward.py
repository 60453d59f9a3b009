"""`gpt2llama finetune reward MODEL --data PROMPTS.jsonl --out RUN --reward arithmetic`."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, counted
from ._options import Track
from ._print import Json, print_json, tell
from ._progress import nothing_left
from ._tuning import (
    Begin,
    HeldOut,
    Lora,
    LoraAlpha,
    LoraDropout,
    LoraModules,
    Out,
    Resume,
    Settings,
    TuningProgress,
    lora_of,
    run_of,
)


def reward(
    model: Begin = None,
    *,
    data: Annotated[
        Path | None, typer.Option(help="JSONL: prompt (text or messages), and what is right.")
    ] = None,
    out: Out,
    reward: Annotated[
        str | None,
        typer.Option(
            help="arithmetic, format:REGEX, or file.py:function, which is run.",
            show_default="arithmetic",
        ),
    ] = None,
    held_out: HeldOut = None,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_modules: LoraModules = None,
    settings: Settings = None,
    resume: Resume = False,
    track: Track = None,
    json: Json = False,
) -> None:
    """Teach a model by rewards for answers that can be checked (GRPO).

    arithmetic: 1 if the last number of the answer is the line's "answer". format: 1 if the
    expression is found in it. A function takes the answer and the line, and returns a number.

    Fields for --set: variant (grpo, dr-grpo), group_size, max_new_tokens, temperature,
    clip_ratio, kl, updates, chat (false: a prompt is text to continue), and those of `train` but
    the model's (lr: 1e-5, with --lora 1e-4).

    To go on, --out RUN --resume is enough, but for --reward file.py:function.
    """
    from ..finetune.grpo import RewardConfig
    from ..finetune.reward import DEFAULTS, tune_reward
    from ..finetune.rewards import is_function
    from ..train.trackers import Tracking

    named = []
    if reward is not None:
        if is_function(reward):  # another folder may be the current one when it is resumed
            file, _, function = reward.rpartition(":")
            reward = f"{Path(file).resolve()}:{function}"
        named = [f"reward={_quoted(reward)}"]
    pairs = [*(settings or []), *named]
    adapters = partial(lora_of, lora, lora_alpha, lora_dropout, lora_modules)
    run = run_of(RewardConfig, DEFAULTS, model, out, data, held_out, pairs, resume, adapters)
    if is_function(run.method.reward) and reward is None:  # a config.toml alone runs no code
        raise ConfigError(
            f"the reward is code, {run.method.reward}; name it again to run it: --reward "
            f"{shlex.quote(run.method.reward)}"
        )
    try:
        with TuningProgress(_words) as shown, Tracking(out, track or []) as tracked:
            report = tracked(partial(shown.update, steps=run.train.steps))
            done = tune_reward(run, out, resume=resume, report=report)
    except KeyboardInterrupt as error:
        again = f" --reward {shlex.quote(run.method.reward)}" * is_function(run.method.reward)
        said, place = str(error) or "stopped", shlex.quote(str(out))
        tell(f"{said}; go on with: gpt2llama finetune reward --out {place} --resume{again}")
        raise typer.Exit(130) from None
    from ..train.run_folder import read_metrics

    lines, now, skipped = read_metrics(out), done.progress, done.tasks.skipped
    groups = run.train.batch_size * run.train.accumulate * now.step
    equal = int(sum(line.get("equal_groups", 0) for line in lines))
    start = lines[0]["held_out_reward"]
    result: dict[str, Any] = {"run": str(out), "step": now.step, "skipped_prompts": skipped}
    result |= {"groups": groups, "all_equal_groups": equal, "start_reward": start}
    if json:
        print_json(result | shown.last)
        return
    if not shown.last:
        tell(nothing_left(now, run.train.patience))
        return
    long = f"; {counted(skipped, 'prompt')} longer than the context left out" if skipped else ""
    tell(
        f"{counted(now.step, 'step')} in {now.seconds:.0f} s, {equal} of "
        f"{counted(groups, 'group')} with equal rewards{long}: {out}"
    )


def _words(line: dict[str, Any]) -> str:
    return f"reward {line['held_out_reward']:.3f}, greedy {line['held_out_greedy']:.3f}"


def _quoted(text: str) -> str:
    """As a TOML string, so that --set takes it whole."""
    import json

    return json.dumps(text, ensure_ascii=False)
