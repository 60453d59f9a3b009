"""`gpt2llama eval PATH --text FILE` or `--tasks FILE.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataError, counted
from ._options import IgnoreKey, Model, Quant, RopeFactor
from ._print import BadUsage, Json, log, print_json
from ._text import read_text

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

app = typer.Typer(add_completion=False)

TEXT, TASKS = "With --text", "With --tasks"


@app.command()
def evaluate(
    context: typer.Context,
    path: Model,
    text: Annotated[str | None, typer.Option(help="The file to score; - reads stdin.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="A .jsonl file of questions, or lm-eval's tasks: hellaswag,arc_easy."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from window to window; side by side unless given.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a window; the model's context unless given.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    by_position: Annotated[
        bool,
        typer.Option(
            "--by-position", help="Also the loss in 16 parts of the window.", rich_help_panel=TEXT
        ),
    ] = False,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="Read on with linear, ntk, dynamic, yarn or llama3.", rich_help_panel=TEXT
        ),
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="Of --rope-scaling.", rich_help_panel=TEXT)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions.", rich_help_panel=TASKS)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, rich_help_panel=TASKS)
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Answers at a time.", rich_help_panel=TASKS)
    ] = 16,
    out: Annotated[
        Path | None, typer.Option(help="A new .jsonl of all answers.", rich_help_panel=TASKS)
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            help="Stored answers; exit 1 where they are others now.", rich_help_panel=TASKS
        ),
    ] = None,
    write_golden: Annotated[
        bool, typer.Option("--write-golden", help="Store them there.", rich_help_panel=TASKS)
    ] = False,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible API, …/v1, that grades; its key in $OPENAI_API_KEY.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Which of its models.", rich_help_panel=TASKS)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Another model: the judge compares the two.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    ignore_key: IgnoreKey = None,
    quant: Quant = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Bits per byte of a text: every token once, in windows of the context; or answers to tasks.

    A line of a task file: {"prompt": …} and any of "answer", "keywords" (["a|b", "c"]), "choices"
    with "label", "unknown": true.
    """
    if (text is None) == (tasks is None):
        raise BadUsage("give a text to score, --text, or --tasks to answer")
    _check_panel(context, TASKS if tasks is None else TEXT)

    def load(name: str) -> tuple[Transformer, Tokenizer]:
        from ._model import load_with_tokenizer

        if name == path:
            return load_with_tokenizer(name, ignore_key, rope_factor, quant)
        return load_with_tokenizer(name, None, None, quant)

    if tasks is not None:
        from ._eval_tasks import How, is_local, run_lm_eval, run_local

        how = How(
            limit=limit,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            out=out,
            golden=golden,
            write_golden=write_golden,
            judge=judge,
            judge_model=judge_model,
            against=against,
            json=json,
        )
        how.check(is_local(tasks))
        if is_local(tasks):
            run_local(load, path, tasks, how, _shown)
        else:
            run_lm_eval(load, path, tasks, how, _shown)
        return
    if (rope_scaling is None) != (factor is None):
        raise BadUsage("--rope-scaling and --factor belong together")
    assert text is not None
    content = read_text(text)
    if not content:
        raise DataError(f"{text} is empty; give some text to score")
    from ..evolve.measure import rescaled, text_by_position
    from ..train.metrics import evaluate_text

    model, tokenizer = load(path)
    if rope_scaling is not None and factor is not None:
        model = rescaled(model, rope_scaling, factor)
    score = evaluate_text(model, tokenizer, content, stride=stride, watch=_shown, seq_len=length)
    parts = text_by_position(model, tokenizer, content, length) if by_position else []
    if json:
        keys = ("bits_per_byte", "perplexity", "tokens", "bytes")
        values = {key: getattr(score, key) for key in keys}
        print_json({**values, "by_position": parts} if by_position else values)
        return
    print(
        f"{score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.2f}; "
        f"{counted(score.tokens, 'token')}, {counted(score.bytes, 'byte')}"
    )
    width = length or model.config.max_seq_len
    for i, nats in enumerate(parts):
        first, last = i * width // len(parts) + 1, (i + 1) * width // len(parts)
        print(f"positions {first:>6,} to {last:>6,}: {nats:.4f} nats per token")


def _check_panel(context: typer.Context, panel: str) -> None:
    """Refuses an option that belongs to the other way of evaluating."""
    for option in context.command.params:
        if getattr(option, "rich_help_panel", None) != panel:
            continue
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name != "DEFAULT":
            raise BadUsage(f"{option.opts[0]} goes {panel.lower()}")


def _shown(items: Iterable[Any], count: int) -> Iterable[Any]:
    """A bar with the time left; without a terminal a line every ten seconds."""
    from rich.progress import track

    if log.is_terminal:
        yield from track(items, "scoring", count, console=log, transient=True)
        return
    begun = shown = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - shown > 10 and done:
            log.print(f"scored {done}/{count}, {(now - begun) / done * (count - done):.0f} s left")
            shown = now
        yield item
