"""`gpt2llama chat PATH`: one answer, or a conversation, in a terminal or through a pipe."""

from __future__ import annotations

import contextlib
import json as jsonlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..atomic import write_text
from ..errors import DataError, FileError, Gpt2LlamaError, counted
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
from ._print import BadUsage, Json, model_text, print_json, tell
from ._text import read_text

if TYPE_CHECKING:
    from ..generate.chat import Chat
    from ..tokenizer import Tokenizer

app = typer.Typer(add_completion=False)

HELP = """\
/reset         forget what was said
/system TEXT   from now on with this system message; without a text, with none
/save FILE     the messages as JSON
/help          this
/exit          leave; so does the end of the input
Ctrl-C stops an answer; twice, it leaves."""


@app.command()
def chat(
    path: Model,
    prompt: Annotated[str | None, typer.Option(help="Answer this once; - reads stdin.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    template: Annotated[
        str | None, typer.Option(help="chatml, llama-3, llama-2, or a Jinja file.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    ignore_key: IgnoreKey = None,
    quant: Quant = None,
    kv_dtype: KVDtype = "auto",
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Talk with a model. Each line of stdin is a message; /help lists the commands."""
    if json and prompt is None:
        raise BadUsage("--json prints one answer: it needs --prompt")
    text = read_text(prompt) if prompt == "-" else prompt
    from ..generate.chat import Chat
    from ..tokenizer import BPETokenizer
    from ..tokenizer.chat import BUILT_IN
    from ._model import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(path, ignore_key, rope_factor, quant)
    if template is None:
        if why := untaught(path, tokenizer):
            name = shlex.quote(path)
            tell(f"{why}; teach it: gpt2llama finetune instruct {name} --data FILE --out DIR")
    elif isinstance(tokenizer, BPETokenizer):
        tokenizer.config["chat_template"] = BUILT_IN.get(template) or read_text(template)
    talk = Chat(
        model,
        tokenizer,
        kv_dtype=kv_dtype,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if text is None:
        converse(talk)
    elif json:
        start = time.perf_counter()
        answer = "".join(talk.say(text))
        seconds = time.perf_counter() - start
        assert talk.answer is not None
        print_json(
            {
                "text": answer,
                "prompt_tokens": len(talk.answer.prompt),
                "new_tokens": len(talk.answer.ids),
                "finish_reason": talk.answer.finish_reason,
                "tokens_per_second": len(talk.answer.ids) / seconds,
            }
        )
    else:
        answer_aloud(talk, text)


def untaught(path: str, tokenizer: Tokenizer) -> str:
    """What shows that a model was never taught to answer, if anything does.

    The tokenizers that we train all have a template: of these models a run's folder tells it, and
    that of the run whose weights it was begun with.
    """
    from ..tokenizer import BPETokenizer
    from ..train.config import read_toml

    if tokenizer.chat_template is None:
        return ""  # nor can it be taught: what asks for a chat says so
    if isinstance(tokenizer, BPETokenizer) and tokenizer.config.get("chat_template") is None:
        return f"{path} has no chat template of its own and may only continue text"
    begun, seen = path, set[str]()
    while begun not in seen:
        seen.add(begun)
        run, name = Path(begun), Path(begun).name
        if run.parent.name == "checkpoints":
            run = run.parent.parent
        elif (run / "latest").is_file():
            name = (run / "latest").read_text(encoding="utf-8").strip()
        try:
            settings = read_toml(run / "config.toml")
        except Gpt2LlamaError:  # no run's
            return ""
        if (
            name == "tuned"  # the demo's
            or settings.get("data") == "assistant"
            or not settings.keys() <= {"data", "begin", "model", "train", "distill"}
        ):
            return ""
        if not (begun := str(settings.get("begin", ""))):
            return f"{path} was trained on text alone, which it continues: it answers nothing"
    return ""


def converse(talk: Chat) -> None:
    """Until /exit, the end of the input, or a second Ctrl-C in a row."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        tell("/help lists the commands.")
    lines, stopped = read_lines(terminal), False
    while True:
        try:
            line = next(lines, "/exit")
            stopped = False
            if line.strip() == "/exit":
                return
            if line.startswith("/"):
                obey(talk, line)
            elif line.strip():
                answer_aloud(talk, line)
        except KeyboardInterrupt:
            print(flush=True)
            if stopped:
                return
            stopped, lines = True, read_lines(terminal)
            tell("Stopped; Ctrl-C again leaves.")
        except Gpt2LlamaError as error:
            if not terminal:
                raise
            tell(str(error))


def read_lines(terminal: bool) -> Iterator[str]:
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and history in input()
    while True:
        try:
            if terminal:
                line = input("> ")
            elif raw := sys.stdin.buffer.readline():
                line = raw.decode("utf-8").rstrip("\r\n")
            else:
                return
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            raise DataError(
                f"a line of stdin is not UTF-8 at byte {error.start}; convert the text, for "
                "example from GB18030 with iconv"
            ) from None
        yield line


def obey(talk: Chat, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        talk.reset()
        tell("Forgotten.")
    elif command == "/system":
        talk.system = rest.strip() or None
        tell("The system message is set." if talk.system else "There is no system message.")
    elif command == "/save":
        save(talk.messages, rest.strip())
        tell(f"Saved {counted(len(talk.messages), 'message')} to {rest.strip()}")
    elif command == "/help":
        tell(HELP)
    else:
        tell(f"There is no {command}; /help lists the commands. A message may begin with a space.")


def answer_aloud(talk: Chat, text: str) -> None:
    start, dropped = time.perf_counter(), talk.dropped
    for piece in talk.say(text):
        print(model_text(piece), end="", flush=True)
    print(flush=True)
    seconds = time.perf_counter() - start
    assert talk.answer is not None
    count = len(talk.answer.ids)
    tell(f"{counted(count, 'token')}, {count / seconds:.1f} tokens/s")
    if talk.dropped > dropped:
        tell(f"The context is full: the oldest {counted(talk.dropped, 'message')} left out.")
    if talk.answer.finish_reason == "length":
        tell(f"Cut off at {counted(count, 'token')}; -n sets how many.")
    elif talk.answer.finish_reason == "context":
        tell(f"Cut off at the model's context of {talk.model.config.max_seq_len} tokens.")


def save(messages: list[dict[str, str]], name: str) -> None:
    """Raises FileError: for a file that exists, or cannot be written."""
    if not name:
        raise FileError("/save needs the name of a file")
    write_text(Path(name), jsonlib.dumps(messages, ensure_ascii=False, indent=2) + "\n")
