"""Llama 3's `tokenizer.model`: a line for each piece, its bytes in base64 and its rank.

The file has neither the split pattern nor the special ids: they are Llama 3's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from .bpe import Parts, add_specials, byte_alphabet, byte_level
from .merges import merges_of
from .splits import SPLITS

LLAMA_3_PIECES = 128_000
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA_3_SPECIALS = (
    *(_BEGIN, _END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
)


def read_llama3(content: bytes) -> Parts:
    ranks = read_ranks(content)
    if len(ranks) != LLAMA_3_PIECES:
        raise TokenizerError(
            f"it has {len(ranks):,} pieces, and Llama 3's has {LLAMA_3_PIECES:,}; another model's "
            "split pattern is not in its file, so use its tokenizer.json"
        )
    backend = from_ranks(ranks, SPLITS["llama-bpe"], LLAMA_3_SPECIALS)
    return backend, {"bos_token": _BEGIN, "eos_token": _END, "add_bos_token": True}


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Pieces by rank, which is their id: 0, 1, 2 and so on. Raises TokenizerError."""
    ranks = dict[bytes, int]()
    for number, line in enumerate(content.splitlines()):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"its line {number + 1} is not a piece in base64 and a rank"
            ) from None
        if int(rank) != number or len(ranks) != number + 1:
            raise TokenizerError(
                f"the rank or the piece in its line {number + 1} is out of order or there twice"
            )
    return ranks


def from_ranks(
    ranks: dict[bytes, int], patterns: tuple[str, ...], specials: Sequence[str]
) -> Backend:
    """A backend that gives tiktoken's ids; the special ids follow the ranks."""
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise TokenizerError(f"it has no piece for the byte {lacking[0]}")
    spelling = {byte: c for c, byte in byte_alphabet().items()}
    vocab = {"".join([spelling[byte] for byte in piece]): id for piece, id in ranks.items()}
    backend = byte_level(vocab, merges_of(vocab), patterns, takes_whole_words=True)
    add_specials(backend, specials)
    return backend
