"""The tokenizer inside a GGUF file: its `tokenizer.ggml.*` metadata, both ways.

Keys and defaults are llama.cpp's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from .bpe import ENDS_A_TURN, BPETokenizer, add_specials, assembled, byte_level
from .merges import merges_of
from .protocol import Tokenizer
from .sentencepiece import (
    BYTE,
    BYTE_PIECES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    sentencepiece,
    vocabulary,
)
from .splits import ALIASES, SPLITS, TAKES_WHOLE_WORDS, split_name

_KEY, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
# GGUF's name of a token's id, and the name of the token itself in tokenizer_config.json.
_NAMED = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
_ENDS = ("eot_token_id", "eom_token_id")  # of a turn, of a message
# What SentencePiece does to spaces, as a tokenizer.json says it.
_SPACES: tuple[dict[str, Any], ...] = (
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> BPETokenizer:
    """Raises TokenizerError. Unused pieces at the end, a model's padding, are left out."""
    kind, pre = metadata.get(_KEY + "model"), str(metadata.get(_KEY + "pre", "default"))
    pieces = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, default=[NORMAL] * len(pieces))
    scores = _list(metadata, "scores", float, default=[0.0] * len(pieces))
    if not len(types) == len(scores) == len(pieces):
        raise TokenizerError(
            f"the GGUF file has {len(pieces):,} tokens, but {len(types):,} types and "
            f"{len(scores):,} scores"
        )
    while types and types[-1] == UNUSED:
        types.pop()
    pieces, scores = pieces[: len(types)], scores[: len(types)]
    if kind == "llama":
        space = bool(metadata.get(_KEY + "add_space_prefix", True))
        backend, adds_bos = sentencepiece(pieces, scores, types, dummy_space=space), True
    elif kind == "gpt2":
        pre = ALIASES.get(pre, pre)
        if pre not in SPLITS:
            raise TokenizerError(
                f"the GGUF file's tokenizer.ggml.pre {pre!r} is not known here ({', '.join(SPLITS)}"
                " are); load the model from its Hugging Face folder"
            )
        backend = _byte_level(pieces, types, _list(metadata, "merges", str), pre)
        adds_bos = pre == "llama-bpe"
    else:
        raise TokenizerError(
            f"the GGUF file's tokenizer.ggml.model {kind!r} is not read here; gpt2 (byte-level "
            "BPE) and llama (SentencePiece BPE) are"
        )
    config: dict[str, Any] = {"add_bos_token": bool(metadata.get(_KEY + "add_bos_token", adds_bos))}
    for key, name in _NAMED.items():
        id = metadata.get(_KEY + key)
        if id is not None:
            if not isinstance(id, int) or not 0 <= id < len(pieces):
                raise TokenizerError(f"the GGUF file's {key} {id!r} is none of its tokens")
            config[name] = pieces[id]
    if isinstance(template := metadata.get(_TEMPLATE), str):
        config["chat_template"] = template
    tokenizer = assembled(backend, config)
    ends = [metadata.get(_KEY + key) for key in _ENDS]
    tokenizer.stop_ids |= {id for id in ends if isinstance(id, int) and 0 <= id < len(pieces)}
    return tokenizer


def tokenizer_to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata for a model of `vocab_size` embeddings: those without a piece are unused.

    Raises TokenizerError where llama.cpp would give other ids, but for two that its own converter
    leaves out too: it normalises no text (Qwen's NFC changes few), and puts the dummy space also
    before a text that begins with a space (a tokenizer.json's Metaspace does not).
    """
    if not isinstance(tokenizer, BPETokenizer):
        raise TokenizerError("only a BPE tokenizer can be written to GGUF")
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size:,} pieces and the model only {vocab_size:,}"
        )
    state, config = tokenizer.state, tokenizer.config
    model, added = state["model"], {token["id"]: token for token in state["added_tokens"]}
    named = {id: piece for piece, id in model["vocab"].items()}
    named |= {id: token["content"] for id, token in added.items()}
    pieces = [named.get(id, f"[PAD{id}]") for id in range(vocab_size)]
    ids = vocabulary(pieces)
    types = [NORMAL if id in named else UNUSED for id in range(vocab_size)]
    for id, token in added.items():
        types[id] = CONTROL if token["special"] else USER_DEFINED
    values: dict[str, Any] = {"tokens": pieces, "token_type": types}
    if tokenizer.byte_level:
        if state["normalizer"] not in (None, {"type": "NFC"}):
            raise TokenizerError("its normalizer cannot be written to GGUF; export to hf instead")
        values |= {
            "model": "gpt2",
            "pre": split_name(state["pre_tokenizer"], model["ignore_merges"]),
            "merges": [" ".join(pair) for pair in model["merges"]],
        }
    else:
        if model["byte_fallback"]:
            if not ids.keys() >= set(BYTE_PIECES):
                raise TokenizerError("it has not all 256 byte pieces, from <0x00> to <0xFF>")
            for piece in BYTE_PIECES:
                types[ids[piece]] = BYTE
        if model["unk_token"] in ids:
            types[ids[model["unk_token"]]] = UNKNOWN
        normal = [piece for piece, kind in zip(pieces, types, strict=True) if kind == NORMAL]
        values |= {
            "model": "llama",
            "pre": "default",
            "scores": _scores(state, normal, ids),
            "add_space_prefix": tokenizer.dummy_space,
        }
    for key, name in _NAMED.items():
        token = config.get(name)
        if (token := token.get("content") if isinstance(token, dict) else token) in ids:
            values[key] = ids[token]
    values["add_bos_token"] = tokenizer.adds_bos
    metadata = {_KEY + key: value for key, value in values.items()}
    known = {tokenizer.eos_id, *(ids.get(name) for name in ENDS_A_TURN)}  # to llama.cpp too
    others = sorted(tokenizer.stop_ids - known)
    metadata |= {_KEY + key: id for key, id in zip(_ENDS, others, strict=False)}
    if template := tokenizer.chat_template:
        metadata[_TEMPLATE] = template
    return metadata


def _byte_level(
    pieces: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str
) -> Backend:
    """Special ids after the last piece of text stay out of the merges' vocabulary, as they do in
    Llama 3's tokenizer.json."""
    hidden = (UNKNOWN, CONTROL, UNUSED)
    added = {i: t in hidden for i, t in enumerate(types) if t in (*hidden, USER_DEFINED)}
    inside = len(types)
    while inside - 1 in added:
        inside -= 1
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = dict(itertools.islice(vocabulary(pieces).items(), inside))
    backend = byte_level(vocab, pairs, SPLITS[pre], takes_whole_words=pre in TAKES_WHOLE_WORDS)
    for special, ids in itertools.groupby(added, key=added.__getitem__):  # in order: they get ids
        names = [pieces[id] for id in ids]
        if special:
            add_specials(backend, names)
        else:
            backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    return backend


def _scores(state: dict[str, Any], normal: Sequence[str], ids: Mapping[str, int]) -> list[float]:
    """A score for each of `ids`: the sooner a tokenizer.json's merges form a piece, the higher."""
    merges = [(left, right) for left, right in state["model"]["merges"]]
    first = {left + right: i for i, (left, right) in reversed([*enumerate(merges)])}
    rank = {piece: first.get(piece, len(merges) + ids[piece]) for piece in normal}
    place = {pair: i for i, pair in enumerate(merges)}
    needed = [place.get(pair, -1) for pair in merges_of(rank)]
    normalizer = state["normalizer"] or {"normalizers": []}
    spaces_only = all(step in _SPACES for step in normalizer.get("normalizers", [normalizer]))
    uncut = (state["pre_tokenizer"] or {"type": "Metaspace"})["type"] == "Metaspace"
    if not spaces_only or not uncut or needed != sorted(needed) or -1 in needed:
        raise TokenizerError("GGUF's scores cannot say how it merges; export to hf instead")
    return [float(-rank.get(piece, 0)) for piece in ids]


def _list(
    metadata: Mapping[str, Any], key: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    values = metadata.get(_KEY + key, default)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or set(map(type, values)) - {kind}:
        raise TokenizerError(
            f"the GGUF file has no tokenizer here: {_KEY}{key} is no list of {kind.__name__}"
        )
    return list(values)
