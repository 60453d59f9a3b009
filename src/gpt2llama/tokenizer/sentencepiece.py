"""SentencePiece's `tokenizer.model` (Llama 1 and 2, Mistral), without its library.

The file is a ModelProto of sentencepiece_model.proto; only what decides the ids is read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from .bpe import MAX_VOCAB_SIZE, Parts, add_specials
from .merges import merges_of

# Types of piece, the same in a ModelProto and in GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def read_sentencepiece(content: bytes) -> Parts:
    """Raises TokenizerError for a damaged file and for what BPE of `tokenizers` cannot do alike."""
    model, pieces, scores, types = _fields(content), list[str](), list[float](), list[int]()
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for field, value in model:
        if field == 1:
            piece = dict(_fields(value))
            pieces.append(_text(piece.get(1, b"")))
            scores.append(_float(piece.get(2, bytes(4))))
            types.append(_int(piece.get(3, NORMAL)))
        elif field in specs:
            specs[field] |= dict(_fields(value))
    if not pieces:
        raise TokenizerError("it is not a SentencePiece model: it has no pieces")
    trainer, normalizer = specs[2], specs[3]
    for wrong, what in (
        (trainer.get(3, 1) != 2, "is of the kind unigram, word or char, not BPE"),
        (normalizer.get(2), "rewrites characters (a precompiled charsmap) before it encodes"),
        (not normalizer.get(5, 1), "does not write spaces as ▁"),
        (trainer.get(24), "puts ▁ after words"),
        (USER_DEFINED in types, "has user-defined symbols"),
    ):
        if wrong:
            raise TokenizerError(
                f"this SentencePiece model {what}, which is not read here; use the model's "
                "tokenizer.json"
            )
    ids = (_int(trainer.get(41, 1)), _int(trainer.get(42, 2)))
    bos, eos = (pieces[id] if id < len(pieces) and types[id] == CONTROL else None for id in ids)
    backend = sentencepiece(
        pieces,
        scores,
        types,
        dummy_space=bool(normalizer.get(3, 1)),
        strips_spaces=bool(normalizer.get(4, 1)),
    )
    return backend, {"bos_token": bos, "eos_token": eos, "add_bos_token": True}


def sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    dummy_space: bool,
    strips_spaces: bool = False,
) -> Backend:
    """A backend of SentencePiece's style. `dummy_space`: a text gets a space before it."""
    vocab, of_type = vocabulary(pieces), dict[int, list[str]]()
    for piece, kind in zip(pieces, types, strict=True):
        of_type.setdefault(kind, []).append(piece)
    if unheard := of_type.keys() - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise TokenizerError(f"a piece is of the unknown type {min(unheard)}")
    found, unknown = of_type.get(BYTE, []), of_type.get(UNKNOWN, [])
    if found and sorted(found) != BYTE_PIECES:
        raise TokenizerError("its byte pieces are not the 256 from <0x00> to <0xFF>")
    if not found and not unknown:
        raise TokenizerError("it has neither byte pieces nor an unknown one for rare characters")
    if not all(map(math.isfinite, scores)):
        raise TokenizerError("a piece's score is not a number; is this file damaged?")
    score = {piece: scores[vocab[piece]] for piece in of_type.get(NORMAL, [])}
    rank = {score: i for i, score in enumerate(sorted(set(score.values()), reverse=True))}
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges_of({piece: rank[score] for piece, score in score.items()}),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool(found),
        )
    )
    edges = [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" +"), " ")]
    dummy = [normalizers.Prepend("▁")] if dummy_space else []
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence((edges if strips_spaces else []) + dummy + spaces)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * dummy_space)
    add_specials(backend, [*unknown, *of_type.get(CONTROL, []), *of_type.get(UNUSED, [])])
    own = of_type.get(USER_DEFINED, [])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    return backend


def vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    """Raises TokenizerError for a piece that is empty or there twice, and for too many."""
    if len(pieces) > MAX_VOCAB_SIZE:
        raise TokenizerError(f"it has {len(pieces):,} pieces, and {MAX_VOCAB_SIZE:,} is the most")
    ids = {piece: id for id, piece in enumerate(pieces)}
    if len(ids) < len(pieces) or "" in ids:
        id = next(id for id, piece in enumerate(pieces) if ids[piece] != id or not piece)
        raise TokenizerError(f"piece {id}, {pieces[id]!r}, is empty or there twice")
    return ids


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message's fields: int, or bytes for all other wire types."""
    if not isinstance(message, bytes):
        raise TokenizerError("it is not a SentencePiece model: a field has the wrong type")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise TokenizerError("it is not a whole SentencePiece model: a field is cut or unknown")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(the value, where it ends): 7 bits a byte, the last one below 128."""
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise TokenizerError("it is not a whole SentencePiece model: a number is cut")


def _text(value: Any) -> str:
    try:
        return str(value, "utf-8")
    except (TypeError, UnicodeDecodeError):
        raise TokenizerError("it is not a SentencePiece model: a piece is not UTF-8") from None


def _float(value: Any) -> float:
    if isinstance(value, bytes) and len(value) == 4:
        return float(struct.unpack("<f", value)[0])
    raise TokenizerError("it is not a SentencePiece model: a score is not a float")


def _int(value: Any) -> int:
    if isinstance(value, int):
        return value
    raise TokenizerError("it is not a SentencePiece model: a piece's type is not a number")
