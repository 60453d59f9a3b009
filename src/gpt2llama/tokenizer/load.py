"""From what lies on disk to a tokenizer."""

from __future__ import annotations

import json
import re
import reprlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from ..errors import FileError, TokenizerError
from .bpe import (
    END_OF_TEXT,
    MAX_VOCAB_SIZE,
    BPETokenizer,
    Parts,
    add_specials,
    assembled,
    byte_level,
    library_errors,
)
from .protocol import Tokenizer
from .sentencepiece import read_sentencepiece
from .splits import SPLITS
from .tiktoken import read_llama3

MAX_BYTES = 64 << 20  # Llama 3's tokenizer.json has 17 MB, Gemma's 33
MAX_MODEL_BYTES = 8 << 20  # Llama 3's tokenizer.model has 2 MB
# GPT-2's pair of files, as Hugging Face and as OpenAI name them.
_MERGES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMES = ("tokenizer.json", "tokenizer.model", *_MERGES)
TOKENIZER_FILES = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
# For a tokenizer.json whose config does not name them.
_USUAL = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder, or of one of its files: tokenizer.json (ours, or any of byte-level
    or SentencePiece BPE), tokenizer.model (SentencePiece's, or Llama 3's), GPT-2's vocab.json and
    merges.txt; in a folder, the first of them. A tokenizer_config.json beside it is read too.

    Raises FileError for what is missing, too large or damaged, TokenizerError for what it cannot
    be.
    """
    file = find_file(Path(path))
    own = read_config(file)
    try:
        if file.name in _MERGES:
            backend, config = _gpt2(file, own)
        elif file.suffix == ".json":
            backend, config = _tokenizer_json(file, own)
            _add_listed(backend, file, own)
            return BPETokenizer(backend, config)
        else:
            content = read_model(file)
            read = read_llama3 if is_llama3(content) else read_sentencepiece
            backend, config = read(content)
        _add_listed(backend, file, own)
        return assembled(backend, config | own)
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from None


def find_file(path: Path) -> Path:
    """Of a folder the file that says most; FileError if there is none."""
    found = [path / name for name in _NAMES if (path / name).is_file()] if path.is_dir() else [path]
    if not found or not found[0].is_file():
        what = f"{path} has none of {', '.join(_NAMES)}" if path.is_dir() else f"there is no {path}"
        raise FileError(f"{what}; make a tokenizer with gpt2llama tokenizer train")
    return found[0]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _NAMES)


def is_llama3(content: bytes) -> bool:
    """Whether a tokenizer.model has a piece in base64 and a rank to a line."""
    return re.match(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n", content) is not None


def _tokenizer_json(file: Path, own: dict[str, Any]) -> Parts:
    text = _text(file)
    with library_errors("it is not a whole tokenizer.json"):
        backend = Backend.from_str(text)
    _bound_growth(backend)
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None  # of training: it would make ids random
    specials = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
    usual = {
        key: next((name for name in names if name in specials), None)
        for key, names in _USUAL.items()
    }
    return backend, usual | own


def _gpt2(file: Path, own: dict[str, Any]) -> Parts:
    """Neither file says how text is split into words: it is GPT-2's way, and no other model's."""
    if (kind := own.get("tokenizer_class") or "GPT2Tokenizer") not in _GPT2_CLASSES:
        raise TokenizerError(f"it is a {kind}'s, not GPT-2's; use the model's tokenizer.json")
    if own.get("add_prefix_space"):
        raise TokenizerError("add_prefix_space is not done here; use the model's tokenizer.json")
    other = file.with_name(_MERGES[file.name])
    if not other.is_file():
        raise FileError(f"{file} needs {other.name} beside it: the one lists pieces, that merges")
    vocab = read_object(file)
    ids = set(vocab.values()) if all(type(id) is int for id in vocab.values()) else set()
    if len(ids) < len(vocab) or not all(0 <= id < MAX_VOCAB_SIZE for id in ids):
        raise TokenizerError("it must give each piece an id of its own")
    lines = _text(other).removesuffix("\n").split("\n")
    pairs = [line.split() for line in lines[lines[0].startswith("#version") :]]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"merge {wrong + 1} in {other.name} is not two pieces")
    backend = byte_level(vocab, [(left, right) for left, right in pairs], SPLITS["gpt-2"])
    name = END_OF_TEXT if END_OF_TEXT in vocab else None
    add_specials(backend, [name] if name else [])
    return backend, {"bos_token": name, "eos_token": name}


def _add_listed(backend: Backend, file: Path, own: dict[str, Any]) -> None:
    """Tokens that stand beside the vocabulary: in the config, or beside an older kind of file in
    added_tokens.json (a tokenizer.json has its own)."""
    beside, decoder = file.with_name("added_tokens.json"), own.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError("its added_tokens_decoder must be an object of tokens by id")
    listed: list[tuple[Any, Any]] = []
    if beside.is_file() and file.name != "tokenizer.json":
        listed += [(id, {"content": name}) for name, id in read_object(beside).items()]
    listed += [(int(id) if re.fullmatch("[0-9]{1,9}", id) else id, t) for id, t in decoder.items()]
    for id, token in listed:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise TokenizerError(f"its added token {reprlib.repr(id)} must have a content")
        if type(id) is not int or not 0 <= id < MAX_VOCAB_SIZE:
            raise TokenizerError(
                f"its added token {token['content']!r} cannot have the id {reprlib.repr(id)}"
            )
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for id, token in sorted(listed, key=lambda item: item[0]):
        name = token["content"]
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        added = AddedToken(name, **{flag: bool(token.get(flag)) for flag in flags})
        if token.get("special") and name not in special:
            backend.add_special_tokens([added])
        elif backend.token_to_id(name) is None:
            backend.add_tokens([added])
        if (got := backend.token_to_id(name)) != id:
            raise TokenizerError(
                f"its added token {name!r} has the id {id} in one file and would be {got}; "
                "use the tokenizer.json that belongs to it"
            )


def _bound_growth(backend: Backend) -> None:
    """A normalizer may replace a text by one many times longer, step by step: not here."""
    waiting = [json.loads(backend.normalizer.__getstate__()) if backend.normalizer else {}]
    growth = 1
    while waiting:
        step = waiting.pop()
        waiting += step.get("normalizers", [])
        growth *= max(1, len(step.get("content") or "")) if step.get("type") == "Replace" else 1
        if growth > 64 or len(step.get("prepend") or "") > 64:
            raise TokenizerError("its normalizer makes text much longer; is this file damaged?")


def read_config(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer's file, with the template that transformers 5
    keeps in a file of its own."""
    place = file.with_name("tokenizer_config.json")
    config = read_object(place) if place.is_file() else {}
    try:
        json.dumps(config, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise FileError(f"{place} has half a surrogate pair in a string") from None
    template = file.with_name("chat_template.jinja")
    return config | {"chat_template": _text(template)} if template.is_file() else config


def read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise FileError(f"{file} must be a JSON object")
    return values


def read_model(file: Path) -> bytes:
    return _read(file, MAX_MODEL_BYTES)


def _text(file: Path) -> str:
    try:
        return _read(file, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{file} is not UTF-8 at byte {error.start}") from None


def _read(file: Path, limit: int) -> bytes:
    try:
        if file.stat().st_size > limit:
            raise FileError(f"{file} has more than {limit >> 20} MiB: no tokenizer is so large")
        return file.read_bytes()
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot read {file}: {error.strerror or error}") from error
