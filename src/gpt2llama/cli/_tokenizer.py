"""The tokenizer of whatever a user names. No torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import AssetError, FileError, TokenizerError
from ..tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer, load_tokenizer
from ..weights import open_model


def tokenizer_of(source: str) -> Tokenizer:
    """Of a folder, one of a tokenizer's files, a .gguf file, an asset or a hub id."""
    place = Path(source)
    if place.suffix in (".json", ".model", ".bpe") or has_tokenizer(place):
        return load_tokenizer(place)
    try:
        tokenizer = open_model(source).tokenizer()
    except (FileError, AssetError) as error:
        if place.is_file():
            raise
        raise type(error)(
            f"{error}; for a tokenizer alone, give its {TOKENIZER_FILES}, or the folder of that"
        ) from error
    if tokenizer is None:
        raise TokenizerError(
            f"{source} has no tokenizer; put its {TOKENIZER_FILES} beside the weights"
        )
    return tokenizer
