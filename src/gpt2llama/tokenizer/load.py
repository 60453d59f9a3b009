"""From what lies on disk to a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from ..errors import FileError, TokenizerError
from .bpe import BPETokenizer
from .protocol import Tokenizer

MAX_BYTES = 64 << 20  # Llama 3's tokenizer.json has 17 MB, Gemma's 33
# For a tokenizer.json whose config does not name them.
_USUAL = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json (ours or any of byte-level BPE), or of that
    file, with the tokenizer_config.json beside it if there is one.

    Raises FileError for what is missing or too large, TokenizerError for what it cannot be.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no tokenizer.json" if path.is_dir() else f"{path} does not exist"
        raise FileError(f"{what}; make a tokenizer with gpt2llama tokenizer train")
    text = _read(file)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare ones
        raise TokenizerError(f"{file} is not a whole tokenizer.json ({error})") from None
    state = json.loads(text)
    kind, decoder = state["model"].get("type", "BPE"), json.dumps(state.get("decoder"))
    if kind != "BPE" or '"ByteLevel"' not in decoder:
        raise TokenizerError(f"{file} is not a byte-level BPE vocabulary, the only kind read here")
    config = _read_config(file.with_name("tokenizer_config.json"))
    specials = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
    for key, usual in _USUAL.items():
        config.setdefault(key, next((name for name in usual if name in specials), None))
    try:
        return BPETokenizer(backend, config)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{file} must be a JSON object")
    return config


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise FileError(f"{file} has more than {MAX_BYTES >> 20} MiB: no tokenizer is so large")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot read {file}: {error.strerror or error}") from error
