"""What a tokenizer's file says of it, without building it, which takes seconds for Llama 3's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .bpe import name_of
from .chat import template_of
from .load import find_file, is_llama3, load_tokenizer, read_config, read_model, read_object
from .protocol import Tokenizer
from .sentencepiece import CONTROL, UNKNOWN, UNUSED
from .tiktoken import LLAMA_3_PIECES, LLAMA_3_SPECIALS, read_ranks


class Facts(NamedTuple):
    """pieces: the largest id + 1; special: how many ids no text encodes to."""

    pieces: int
    special: int
    chat_template: str | None


def facts_of(tokenizer: Tokenizer) -> Facts:
    special = len(tokenizer.special_ids)
    return Facts(tokenizer.vocab_size, special, tokenizer.chat_template)


def read_facts(path: Path) -> Facts:
    """Of a folder or a file as load_tokenizer takes it, and the same errors."""
    file = find_file(path)
    own = read_config(file)
    if file.name == "tokenizer.json":
        try:
            return _of_json(read_object(file), own)
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # whoever builds it says what is wrong
    elif file.suffix == ".model" and is_llama3(content := read_model(file)):
        names, count = set(LLAMA_3_SPECIALS), len(read_ranks(content))
        if count == LLAMA_3_PIECES:
            return Facts(count + len(names), len(names), template_of(own, names))
    return facts_of(load_tokenizer(path))


def facts_of_gguf(metadata: Mapping[str, Any]) -> Facts | None:
    """None where the metadata is not that of a tokenizer we know."""
    pieces, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(pieces, list) or not isinstance(types, list) or len(pieces) != len(types):
        return None
    count = len(types)
    while count and types[count - 1] == UNUSED:
        count -= 1
    hidden = (UNKNOWN, CONTROL, UNUSED)
    special = {pieces[i] for i in range(count) if types[i] in hidden}
    own = {"chat_template": metadata.get("tokenizer.chat_template")}
    return Facts(count, len(special), template_of(own, special))


def _of_json(values: dict[str, Any], own: dict[str, Any]) -> Facts:
    listed = {int(id): token for id, token in (own.get("added_tokens_decoder") or {}).items()}
    added = {token["id"]: token for token in values["added_tokens"]} | listed
    special = {token["content"] for token in added.values() if token["special"]}
    vocab = values["model"]["vocab"]
    named = (name_of(own.get(key)) for key in ("bos_token", "eos_token"))
    special |= {name for name in named if isinstance(name, str) and len(name) > 1 and name in vocab}
    ids = [*vocab.values(), *added]
    return Facts(1 + max(ids), len(special), template_of(own, special))
