"""The tokenizer of whatever a user names. No torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import TokenizerError
from ..tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from ..weights import open_model


def tokenizer_of(source: str) -> Tokenizer:
    """Of a folder, one of a tokenizer's files, a .gguf file, an asset or a hub id."""
    place = Path(source)
    if place.suffix in (".json", ".model", ".bpe") or has_tokenizer(place):
        return load_tokenizer(place)
    tokenizer = open_model(source).tokenizer()
    if tokenizer is None:
        raise TokenizerError(f"{source} has no tokenizer")
    return tokenizer
