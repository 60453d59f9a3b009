"""`gpt2llama chat PATH`."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FileError, Gpt2LlamaError, TokenizerError
from ._print import Json, print_json, tell

if TYPE_CHECKING:
    from ..generate.chat import Chat

app = typer.Typer(add_completion=False)

HELP = "/reset  /system TEXT  /save FILE  /help  /exit; Ctrl-C stops an answer"


@app.command()
def chat(
    path: Annotated[str, typer.Argument(help="A model: folder, file, asset or hub id.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this and end.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 0.7,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest, up to p.")] = 0.9,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same answers each time.")] = None,
    json: Json = False,
) -> None:
    """Talk to a model. Piped, each line of stdin is one message; answers go to stdout."""
    from ..generate.chat import Chat
    from ._model import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(path)
    if tokenizer.chat_template is None:
        raise TokenizerError(f"{path} has no chat template; use gpt2llama generate")
    talk = Chat(
        model,
        tokenizer,
        system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if prompt is not None:
        _answer(talk, prompt, json)
        return
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        tell(HELP)
    while (line := _read(at_terminal)) is not None:
        try:
            if line.startswith("/"):
                if line == "/exit":
                    return
                _command(talk, line)
            elif line:
                _answer(talk, line, json)
        except Gpt2LlamaError as error:  # the chat goes on
            tell(f"gpt2llama: {error}")


def _read(at_terminal: bool) -> str | None:
    """The next line, or None at the end of the input."""
    try:
        return input("> " if at_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(talk: Chat, text: str, json: bool) -> None:
    dropped, begun, pieces = talk.dropped, time.perf_counter(), list[str]()
    try:
        for piece in talk.say(text):
            pieces.append(piece)
            if not json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        tell("\nstopped")
    rate = talk.new_tokens / (time.perf_counter() - begun)
    if json:
        print_json(
            {
                "text": "".join(pieces),
                "prompt_tokens": talk.prompt_tokens,
                "new_tokens": talk.new_tokens,
                "finish_reason": talk.finish_reason,
                "tokens_per_second": rate,
            }
        )
        return
    print()
    tell(f"{talk.prompt_tokens} + {talk.new_tokens} tokens, {rate:.1f} tokens/s")
    if talk.dropped > dropped:
        tell(f"the context of {talk.context} tokens is full: the oldest messages were dropped")
    if talk.finish_reason == "length":
        tell(f"stopped at {talk.max_new_tokens} tokens (-n)")


def _command(talk: Chat, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        kept = [m["content"] for m in talk.messages if m["role"] == "system"]
        talk.reset(kept[0] if kept else None)
    elif name == "/system":
        talk.reset(rest.strip() or None)
    elif name == "/save" and rest.strip():
        _save(talk, Path(rest.strip()))
    else:
        tell(HELP)


def _save(talk: Chat, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            jsonlib.dump(talk.messages, file, ensure_ascii=False, indent=2)
    except FileExistsError:
        raise FileError(f"{path} exists; name another file") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error
    tell(f"{len(talk.messages)} messages in {path}")
