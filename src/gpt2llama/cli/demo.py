"""`gpt2llama demo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._print import Json, print_json, tell

if TYPE_CHECKING:
    from ..demo import DemoResult

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(help="Bounds the training.")] = 3.0,
    out: Annotated[Path, typer.Option(help="Its folder; a stopped demo goes on in it.")] = Path(
        "demo-run"
    ),
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Teach it to answer, for as long again.")
    ] = True,
    json: Json = False,
) -> None:
    """Train a 3M Chinese model on this machine, score it, let it write, and teach it to answer."""
    from ..demo import demo as run_demo
    from ._progress import TrainingProgress

    def write(piece: str) -> None:
        shown.hide()
        if not json:
            print(piece, end="", flush=True)

    try:
        with TrainingProgress() as shown:
            result = run_demo(out, minutes, tune=tune, say=tell, report=shown.update, write=write)
    except KeyboardInterrupt as error:  # without words where no step was under way
        tell(f"{str(error) or 'stopped'}; the same command goes on from there")
        raise typer.Exit(130) from None
    if json:
        values = asdict(result)
        if values["score"] is not None:
            del values["score"]["answers"]
        print_json({k: str(v) if isinstance(v, Path) else v for k, v in values.items()})
        return
    print("\n")
    tell(
        f"{result.bits_per_byte:.3f} bits per byte on {result.held_out_bytes:,} held-out bytes "
        f"(xz -9e {result.xz:.2f}, bz2 -9 {result.bz2:.2f}, both knowing the training text)\n"
        f"{result.tokens:,} tokens ({result.epochs:.1f} epochs of {result.corpus}) in "
        f"{result.train_seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s\n"
        f"{_tuned(result)}\n"
        f"model {out}/latest · loss curve {out}/loss.svg · figures {out}/metrics.jsonl · "
        f"settings {out}/config.toml · tokenizer {out}/data/tokenizer\n\n"
        "next:\n"
        f"  gpt2llama {'chat' if result.score else 'generate'} {out}"
        f"{'' if result.score else ' 却说曹操 -n 60 --temperature 0.8'}\n"
        f"  gpt2llama tokenizer show {out}/data/tokenizer 天下大势，分久必合\n"
        f"  gpt2llama train --preset zh-3m --data {out}/data --out my-run --set steps=300"
    )


def _tuned(result: DemoResult) -> str:
    if result.score is None:
        return ""
    score = result.score
    second = "" if result.second is None else f" ({result.second:.0%} as a second question)"
    return (
        f"tuned for {result.tune_seconds:.0f} s; of held-out questions right: "
        f"{score.wordings:.0%} in new wordings{second}, {score.sums:.0%} of sums; "
        f"{score.unknown:.0%} of those outside its subject admitted\n"
    )
