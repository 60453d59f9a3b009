"""How a text is cut before byte-level BPE: no piece crosses a border of these patterns.

The names are llama.cpp's (`tokenizer.ggml.pre`). Where there are several patterns, each cuts what
the one before it left.
"""

from __future__ import annotations

import itertools
from typing import Any

from tokenizers import Regex, pre_tokenizers

from ..errors import TokenizerError

# Ours, for `train_bpe`: a digit; an English contraction; letters (Chinese up to its punctuation, or
# a word with the space before it); marks; white space, whose last character is left to a word that
# follows. It is GPT-2's with every digit alone: SPLITS["smollm"] in one pattern.
# On held-out Chinese at 4096 pieces, letting a mark join the letters after it saves 4% of the ids
# but costs a 4-gram model 2% in bits per byte; cutting Chinese every 4 characters costs both.
PATTERN = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "smollm": (r"\p{N}", _GPT2),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# A word that is a piece as it stands is that piece, whatever the merges make of it.
TAKES_WHOLE_WORDS = frozenset({"llama-bpe"})


def pre_tokenizer(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Cuts by each pattern in turn, then spells the words in GPT-2's byte alphabet."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, spell])


def split_name(state: dict[str, Any], takes_whole_words: bool) -> str:
    """The name in SPLITS of a tokenizer.json's pre_tokenizer. Raises TokenizerError."""
    patterns = _patterns(state)
    for name, known in SPLITS.items():
        ours = name == "smollm" and patterns == (PATTERN,)
        if (patterns == known or ours) and takes_whole_words == (name in TAKES_WHOLE_WORDS):
            return name
    raise TokenizerError(
        f"its way of splitting text into words is none of {', '.join(SPLITS)}, the ones that a "
        "GGUF file can name here; keep it as a tokenizer.json"
    )


def _patterns(step: dict[str, Any] | None) -> tuple[str, ...]:
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return tuple(itertools.chain.from_iterable(map(_patterns, steps)))
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": how, "invert": over}:
            if (how, over) in (("Isolated", False), ("Removed", True)):
                return (pattern,)
        case {"type": "Digits", "individual_digits": True}:
            return (r"\p{N}",)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": by_itself}:
            return (_GPT2,) if by_itself else ()
    return ("",)  # in none of SPLITS
