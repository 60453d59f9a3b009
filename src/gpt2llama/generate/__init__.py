"""Text out of a model: `generate`, `stream` and `generate_ids`, sampling, and the decode loop."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..model.transformer import Transformer
from ..tokenizer import Tokenizer
from .decode import complete, decode, generate, generate_ids, stream
from .prefix import PrefixCache
from .sampling import SamplingConfig

__all__ = [
    "PrefixCache",
    "SamplingConfig",
    "complete",
    "decode",
    "generate",
    "generate_ids",
    "stream",
]


class _CallableModule(ModuleType):
    """Importing this package binds it as `gpt2llama.generate`, where the function is public too:
    so the package can be called."""

    def __call__(
        self, model: Transformer, tokenizer: Tokenizer, prompt: str, **settings: Any
    ) -> str:
        return generate(model, tokenizer, prompt, **settings)


sys.modules[__name__].__class__ = _CallableModule
