"""`gpt2llama generate PATH PROMPT`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, counted
from ._options import (
    IgnoreKey,
    KVDtype,
    MaxNewTokens,
    MinP,
    Model,
    Quant,
    RepetitionPenalty,
    RopeFactor,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from ._print import Json, log, model_text, print_json, tell
from ._text import read_text

if TYPE_CHECKING:
    from ..generate.generation import Generation

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    path: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads stdin.")],
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    seed: Seed = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Continuations of the prompt.")] = 1,
    speculate: Annotated[
        str | None, typer.Option(help="Guess ahead: lookup (in the text), or a smaller model.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Guesses at a time.")] = 3,
    quant: Quant = None,
    kv_dtype: KVDtype = "auto",
    ignore_key: IgnoreKey = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Continue a text. Only what is new goes to stdout, as it comes."""
    if speculate is not None and num_samples > 1:
        raise InputError("--speculate is for one text; leave it or --num-samples out")
    text = read_text(prompt) if prompt == "-" else prompt
    from ._model import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(path, ignore_key, rope_factor, quant)
    drafter: Any = speculate
    if speculate not in (None, "lookup"):
        drafter, spoken = load_with_tokenizer(str(speculate), None, None, quant)
        if spoken.fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"{speculate} has another tokenizer than {path}; take one with the same"
            )
    from ..generate import complete

    samples, steps = complete(
        model,
        tokenizer,
        text,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        kv_dtype=kv_dtype,
        speculate=drafter,
        draft_tokens=draft_tokens,
    )
    context = model.config.max_seq_len
    if max_new_tokens > (room := context - len(samples[0].prompt)):
        tell(
            f"room for {counted(room, 'new token')}, not {max_new_tokens:,}: the model's context "
            f"has {context:,}, the prompt's among them"
        )
    start = time.perf_counter()
    for _ in steps:
        if num_samples == 1 and not json:
            print(model_text(samples[0].take()), end="", flush=True)
    seconds = time.perf_counter() - start
    rate = sum(len(sample.ids) for sample in samples) / seconds
    if json:
        answers = [
            {"text": s.text, "tokens": len(s.ids), "finish_reason": s.finish_reason}
            for s in samples
        ]
        one = answers[0] if num_samples == 1 else {"samples": answers}
        print_json({**one, "tokens_per_second": rate, **guessed(samples[0])})
    elif num_samples == 1:
        print()
    else:
        for i, sample in enumerate(samples, start=1):
            print(f"--- {i}\n{model_text(sample.text)}")
    if speculate is not None:
        share = guessed(samples[0])
        log.print(
            f"{share['acceptance_rate']:.0%} of {counted(samples[0].proposed, 'guess', 'guesses')} "
            f"accepted, {share['tokens_per_step']:.2f} tokens a step"
        )
    if any(sample.finish_reason == "context" for sample in samples):
        tell(f"stopped at the model's context of {context} tokens")


def guessed(sample: Generation) -> dict[str, float]:
    """How speculative decoding went; nothing where there was none."""
    if sample.passes == 0:
        return {}
    return {
        "acceptance_rate": sample.accepted / max(1, sample.proposed),
        "tokens_per_step": len(sample.ids) / sample.passes,
    }
