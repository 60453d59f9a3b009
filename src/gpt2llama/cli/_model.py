"""A model with its tokenizer, for the commands that need both."""

from __future__ import annotations

from ..errors import TokenizerError
from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from ..weights import load


def load_with_tokenizer(
    path: str, ignore_key: list[str] | None, rope_factor: float | None
) -> tuple[Transformer, Tokenizer]:
    model, tokenizer = load(path, ignore_keys=ignore_key or (), rope_factor=rope_factor)
    if tokenizer is None:
        raise TokenizerError(f"{path} has no tokenizer; put its tokenizer.json beside the weights")
    return model, tokenizer
