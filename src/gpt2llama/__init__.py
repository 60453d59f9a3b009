"""gpt2llama: one decoder-only Transformer that is GPT-2 and is Llama 3.2.

    import gpt2llama as g
    model = g.Transformer(g.preset("llama-3.2-1b").replace(norm="layernorm"))

The names below load on first use: importing the package loads no torch and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import errors
    from .generate import generate, generate_ids, stream
    from .model.config import (
        DynamicScaling,
        LinearScaling,
        Llama3Scaling,
        ModelConfig,
        NTKScaling,
        YarnScaling,
    )
    from .model.kv_cache import KVCache
    from .model.position import rope_frequencies
    from .model.presets import depth, preset, presets
    from .model.transformer import Transformer
    from .tokenizer import load_tokenizer
    from .weights import load, save

_HOME = {
    "errors": "errors",
    "generate": "generate",
    "generate_ids": "generate",
    "stream": "generate",
    "DynamicScaling": "model.config",
    "LinearScaling": "model.config",
    "Llama3Scaling": "model.config",
    "ModelConfig": "model.config",
    "NTKScaling": "model.config",
    "YarnScaling": "model.config",
    "KVCache": "model.kv_cache",
    "rope_frequencies": "model.position",
    "depth": "model.presets",
    "preset": "model.presets",
    "presets": "model.presets",
    "Transformer": "model.transformer",
    "load_tokenizer": "tokenizer",
    "load": "weights",
    "save": "weights",
}

__all__ = [
    "DynamicScaling",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "NTKScaling",
    "Transformer",
    "YarnScaling",
    "__version__",
    "depth",
    "errors",
    "generate",
    "generate_ids",
    "load",
    "load_tokenizer",
    "preset",
    "presets",
    "rope_frequencies",
    "save",
    "stream",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gpt2llama' has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    # `errors` and `generate` are modules themselves (the latter can be called: see its docstring).
    value = module if name == home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
