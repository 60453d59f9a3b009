"""A model with its tokenizer, for the commands that need both."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from ..weights import load

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer


def load_with_tokenizer(
    path: str,
    ignore_key: list[str] | None,
    rope_factor: float | None,
    quant: str | None = None,
) -> tuple[Transformer, Tokenizer]:
    gc.disable()  # importing torch makes so many objects that stay that searching them takes longer
    try:
        keys = ignore_key or ()
        model, tokenizer = load(path, quant=quant, ignore_keys=keys, rope_factor=rope_factor)
    finally:
        gc.freeze()
        gc.enable()
    if tokenizer is None:
        raise TokenizerError(f"{path} has no tokenizer; put its tokenizer.json beside the weights")
    return model, tokenizer
