"""A folder with a corpus, a tokenizer made for it, and its shards: for the demo and evolve.

corpus.jsonl has a text a line, in order; data/ is `data prepare`'s folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from .assets import fetch
from .atomic import write_text
from .data.documents import read_documents
from .data.prepare import prepare
from .errors import AssetError, InputError, counted
from .tokenizer import train_bpe

HELD_OUT = 0.1  # of the documents, the last: of sanguo 12 of 120 chapters
# Marks in the digital text that are no part of the novel; the held-out text keeps its own.
STRAY = str.maketrans("", "", "□\ufeff")


def prepare_corpus(
    folder: Path,
    source: str,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
    also: Sequence[str] = (),
) -> str:
    """Makes corpus.jsonl and data/ in `folder`, unless they are there; returns the corpus's name.

    source: sanguo, or a file or folder of texts. The tokenizer sees nothing of what is held out;
    also: texts that it sees beside them, such as those of a later tuning.
    Raises AssetError, FileError, DataError, TokenizerError, InputError for a folder that holds
    another corpus.
    """
    path, data = folder / "corpus.jsonl", folder / "data"
    prose = files("gpt2llama.data").joinpath("prose.zh.txt").read_text(encoding="utf-8")
    if not path.exists():
        name, texts = _sanguo(prose, say) if source == "sanguo" else _own(source)
        lines = [json.dumps({"text": text, "corpus": name}, ensure_ascii=False) for text in texts]
        write_text(path, "".join(line + "\n" for line in lines))
    with path.open(encoding="utf-8") as file:
        name = str(json.loads(file.readline())["corpus"])
    same = (
        name in ("sanguo", "prose")
        if source == "sanguo"
        else _own(source)[1] == corpus_texts(folder)
    )
    if not same:
        raise InputError(f"{folder} holds work on another text than {source}; name another --out")
    if not data.exists():
        texts = corpus_texts(folder)
        learned = texts[: len(texts) - max(1, round(len(texts) * HELD_OUT))]
        say(f"training a tokenizer on {sum(map(len, learned)):,} characters")
        tokenizer = train_bpe([*learned, *[prose] * (name == "sanguo"), *also], vocab_size)
        done = prepare([path], tokenizer, data, HELD_OUT)
        say(
            f"{done.train.tokens:,} tokens to train on, {done.held_out.tokens:,} held out; "
            f"{counted(done.leaked_windows, 'held-out window')} also in training"
        )
    return name


def corpus_texts(folder: Path) -> list[str]:
    with (folder / "corpus.jsonl").open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line)["text"] for line in file]


def _sanguo(prose: str, say: Callable[[str], None]) -> tuple[str, list[str]]:
    """The novel's chapters, or without a network the sections of the prose that ships."""
    try:
        chapters = [d.text for d in read_documents([fetch("sanguo", timeout=90)])]
    except AssetError as error:
        say(f"{error}")
        say("training on the small text that ships instead: expect little of the model")
        return "prose", prose.strip().split("\n\n")
    first_held = len(chapters) - round(len(chapters) * HELD_OUT)
    return "sanguo", [c.translate(STRAY) for c in chapters[:first_held]] + chapters[first_held:]


def _own(source: str) -> tuple[str, list[str]]:
    texts = [document.text for document in read_documents([source])]
    if len(texts) == 1:  # its end is held out
        cut = len(texts[0]) - max(1, round(len(texts[0]) * HELD_OUT))
        texts = [texts[0][:cut], texts[0][cut:]]
    return Path(source).name, texts
