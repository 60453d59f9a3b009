"""The tokenizer inside a GGUF file, both ways."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers
from hard_texts import HARD, any_texts
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import BYTES, SPECIALS, model_proto, real, spelled, train_sentencepiece

from gpt2llama.errors import TokenizerError
from gpt2llama.tokenizer import (
    BPETokenizer,
    load_tokenizer,
    tokenizer_from_gguf,
    tokenizer_to_gguf,
    train_bpe,
)
from gpt2llama.tokenizer.bpe import assembled
from gpt2llama.tokenizer.sentencepiece import read_sentencepiece
from gpt2llama.tokenizer.splits import SPLITS, pre_tokenizer
from gpt2llama.weights.gguf_file import read_header

# As llama.cpp spells them (src/llama-vocab.cpp): each cuts what the one before it left.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CPP = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
    "smollm": [r"\p{N}", _GPT2],
}
# The two engines know different versions of Unicode, and llama.cpp's Llama 3 knows no long s.
agreed = any_texts.filter(
    lambda text: all(c != "ſ" and unicodedata.ucd_3_2_0.category(c) != "Cn" for c in text)
)


def cut(text: str, patterns: list[str]) -> list[str]:
    words = [text]
    for pattern in patterns:
        borders = [
            sorted({0, len(word), *(i for m in regex.finditer(pattern, word) for i in m.span())})
            for word in words
        ]
        words = [
            word[start:end]
            for word, places in zip(words, borders, strict=True)
            for start, end in itertools.pairwise(places)
        ]
    return words


@given(st.sampled_from([*SPLITS]), agreed)
def test_text_is_cut_as_llama_cpp_does(name: str, text: str) -> None:
    spans = [span for _, span in pre_tokenizer(SPLITS[name]).pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == cut(text, LLAMA_CPP[name])


def test_hard_texts_are_cut_as_llama_cpp_does() -> None:
    for name, patterns in LLAMA_CPP.items():
        for text in HARD:
            if "ſ" not in text and not regex.search(r"\p{Cn}", text):
                spans = [span for _, span in pre_tokenizer(SPLITS[name]).pre_tokenize_str(text)]
                assert [text[start:end] for start, end in spans] == cut(text, patterns), name


def byte_level(texts: list[str], pre: str) -> BPETokenizer:
    """Another project's byte-level vocabulary, its special ids at the end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer(SPLITS[pre])
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(["<|bos|>", "<|eos|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    backend.add_special_tokens(["<|pad|>"])
    named = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "pad_token": "<|pad|>"}
    return BPETokenizer(backend, {**named, "chat_template": "{{ messages }}"})


def same(one: BPETokenizer, other: BPETokenizer) -> None:
    for name in ("vocab_size", "bos_id", "eos_id", "stop_ids", "adds_bos", "special_ids"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.config.get("chat_template") == other.config.get("chat_template")
    for text in [*HARD, "a<think>b"]:
        ids = one.encode(text)
        assert ids == other.encode(text), text
        assert one.decode(ids) == other.decode(ids)


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_there_and_back(texts: list[str], pre: str) -> None:
    tokenizer = byte_level([*texts, *HARD], pre)
    metadata = tokenizer_to_gguf(tokenizer, 600)
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == pre
    assert len(metadata["tokenizer.ggml.tokens"]) == 600
    size = tokenizer.vocab_size
    types = metadata["tokenizer.ggml.token_type"]
    assert types == [1] * (size - 4) + [3, 3, 4, 3] + [5] * (600 - size)
    assert metadata["tokenizer.ggml.padding_token_id"] == size - 1
    same(tokenizer_from_gguf(metadata), tokenizer)


def test_ours_there_and_back(tokenizer: BPETokenizer) -> None:
    metadata = tokenizer_to_gguf(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.ggml.token_type"] == [3] * 8 + [1] * 392
    assert metadata["tokenizer.ggml.bos_token_id"] == metadata["tokenizer.ggml.eos_token_id"] == 0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|system|>"]
    same(tokenizer_from_gguf(metadata), tokenizer)


@pytest.mark.parametrize("dummy", [True, False])
def test_sentencepiece_there_and_back(texts: list[str], tmp_path: Path, dummy: bool) -> None:
    model = train_sentencepiece([*texts, *HARD], 700, add_dummy_prefix=dummy)
    tokenizer = assembled(*read_sentencepiece(model))
    tokenizer.save(tmp_path)
    metadata = tokenizer_to_gguf(tokenizer, 720)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.token_type"] == [2, 3, 3] + [6] * 256 + [1] * 441 + [5] * 20
    assert metadata["tokenizer.ggml.add_space_prefix"] == dummy
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    same(tokenizer_from_gguf(metadata), tokenizer)
    from_json = load_tokenizer(tmp_path)
    assert tokenizer_to_gguf(from_json, 720) == metadata


@given(
    st.lists(st.text("ab▁", min_size=2, max_size=6), unique=True, max_size=25),
    st.lists(st.text("ab  ", max_size=40)),
)
def test_scores_say_what_the_merges_did(words: list[str], examples: list[str]) -> None:
    """SentencePiece itself reads the scores that are written."""
    pieces = [*SPECIALS, *BYTES, *spelled(*words, "a", "b", "▁")]
    tokenizer = assembled(*read_sentencepiece(model_proto(pieces)))
    metadata = tokenizer_to_gguf(tokenizer, len(pieces))
    names = (f"tokenizer.ggml.{key}" for key in ("tokens", "scores", "token_type"))
    model = model_proto(zip(*(metadata[name] for name in names), strict=True))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in examples:
        assert theirs.encode(text) == tokenizer.encode(text)


def gguf(**changes: Any) -> dict[str, Any]:
    """A small good one, some keys changed, or left out where None."""
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<e>", "[PAD]"],
        "token_type": [1, 1, 1, 3, 5],
        "merges": ["a b"],
        "eos_token_id": 3,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


SPM = {"model": "llama", "scores": [0.0] * 5, "token_type": [1, 1, 1, 2, 3], "eos_token_id": 4}


def test_defaults() -> None:
    tokenizer = tokenizer_from_gguf(gguf())
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.adds_bos) == (4, 3, False)
    assert tokenizer.encode("abba") == [2, 1, 0]
    assert tokenizer_from_gguf(gguf(pre=None, token_type=None)).encode("abba") == [2, 1, 0]
    assert tokenizer_from_gguf(gguf(bos_token_id=3, pre="llama3")).adds_bos
    assert not tokenizer_from_gguf(gguf(bos_token_id=3, pre="llama3", add_bos_token=False)).adds_bos
    spm = tokenizer_from_gguf(gguf(**SPM, bos_token_id=4))
    assert spm.adds_bos
    assert spm.dummy_space
    assert spm.encode("ab") == [3, 2]  # ▁ is no piece here
    assert tokenizer_from_gguf(gguf(**SPM, add_space_prefix=False)).encode("ab") == [2]


def test_a_special_word_is_not_taken_whole() -> None:
    """Although "llama-bpe" takes a word that is a piece as it stands."""
    tokens = ["A", "s", "<e>", "As"]
    tokenizer = tokenizer_from_gguf(
        gguf(pre="llama-bpe", tokens=tokens, token_type=[1, 1, 3, 3], merges=[], eos_token_id=2)
    )
    assert tokenizer.encode("As") == [0, 1]
    assert tokenizer.decode([3, 2]) == "As<e>"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "tokens is no list of str"),
        (gguf(model="bert"), "model 'bert' is not read here"),
        (gguf(pre="tekken"), "pre 'tekken' is not known here"),
        (gguf(tokens=["a", 1]), "tokens is no list of str"),
        (gguf(tokens="ab"), "tokens is no list of str"),
        (gguf(token_type=[1.5] * 5), "token_type is no list of int"),
        (gguf(token_type=[1] * 4), "5 tokens, but 4 types and 5 scores"),
        (gguf(merges=None), "merges is no list of str"),
        (gguf(merges=["ab"]), "merge of 'ab' and '' is not in its vocabulary"),
        (gguf(merges=["b a"]), "merge of 'b' and 'a' is not in its vocabulary"),
        (gguf(tokens=["a", "a", "ab", "<e>", "x"]), "piece 0, 'a', is empty or there twice"),
        (gguf(tokens=["a", "", "ab", "<e>", "x"]), "piece 1, '', is empty or there twice"),
        (gguf(eos_token_id=4), "eos_token_id 4 is none of its tokens"),  # padding
        (gguf(eos_token_id=-1), "eos_token_id -1 is none of its tokens"),
        (gguf(eos_token_id="<e>"), "eos_token_id '<e>' is none of its tokens"),
        (gguf(tokens=["a"] * (1 << 21), token_type=None), "2,097,152 pieces, and 1,048,576"),
        (gguf(token_type=[1, 3, 1, 3, 5]), "special piece 'b' is one that text is spelled with"),
        (gguf(**SPM | {"scores": [0.0] * 4}), "5 tokens, but 5 types and 4 scores"),
        (gguf(**SPM | {"scores": [float("inf")] * 5}), "score is not a number"),
        (gguf(**SPM | {"token_type": [1, 1, 1, 3, 3]}), "neither byte pieces nor an unknown one"),
        (gguf(**SPM | {"token_type": [1, 1, 1, 2, 77]}), "unknown type 77"),
    ],
)
def test_refused(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TokenizerError, match=sentence):
        tokenizer_from_gguf(metadata)


def test_what_gguf_cannot_say(tokenizer: BPETokenizer, texts: list[str]) -> None:
    with pytest.raises(TokenizerError, match="has 400 pieces and the model only 399"):
        tokenizer_to_gguf(tokenizer, 399)
    state, steps = tokenizer.state, tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(**parts(state)))
    backend.decoder = tokenizers.decoders.ByteLevel()
    for unknown in (
        steps.ByteLevel(add_prefix_space=True),
        steps.Sequence([steps.Whitespace(), steps.ByteLevel(add_prefix_space=False)]),
        steps.Sequence([steps.Split("x", "isolated"), steps.ByteLevel(add_prefix_space=False)]),
    ):
        backend.pre_tokenizer = unknown
        with pytest.raises(TokenizerError, match="splitting text into words is none of default, "):
            tokenizer_to_gguf(BPETokenizer(backend, {}), 400)
    backend.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
    backend.normalizer = tokenizers.normalizers.NFC()
    metadata = tokenizer_to_gguf(BPETokenizer(backend, {}), 400)
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    backend.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(TokenizerError, match="normalizer cannot be written"):
        tokenizer_to_gguf(BPETokenizer(backend, {}), 400)

    model = train_sentencepiece(texts, 400, remove_extra_whitespaces=True)
    with pytest.raises(TokenizerError, match="scores cannot say how it merges"):
        tokenizer_to_gguf(assembled(*read_sentencepiece(model)), 400)


def parts(state: dict[str, Any]) -> dict[str, Any]:
    model = state["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def test_merges_in_another_order_than_scores_allow() -> None:
    """`a b` is no merge here, so `ab` is never made; by scores it would be."""
    vocab = {piece: id for id, piece in enumerate(["<unk>", "a", "b", "ab", "▁", "▁a"])}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>")
    )
    backend.decoder = tokenizers.decoders.Replace("▁", " ")
    with pytest.raises(TokenizerError, match="scores cannot say how it merges"):
        tokenizer_to_gguf(BPETokenizer(backend, {}), 6)


@pytest.mark.network
def test_smollm2() -> None:
    """The real file: what is written is what was read, and the ids are those of SmolLM2's own
    tokenizer.json, which cuts with the library's Digits and ByteLevel."""
    everything, _ = read_header(real("smollm2-135m"))
    metadata = {key: value for key, value in everything.items() if key.startswith("tokenizer.")}
    del metadata["tokenizer.ggml.add_space_prefix"]  # false, which byte-level BPE is anyway
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer_to_gguf(tokenizer, 49152) == metadata
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, False)
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.special_ids == set(range(17))

    steps = tokenizers.pre_tokenizers
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(**parts(tokenizer.state)))
    theirs.pre_tokenizer = steps.Sequence(
        [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)]
    )

    spelled = {tokenizer.decode_bytes([id]) for id in range(49152)}
    lacking = {byte for byte in range(256) if bytes([byte]) not in spelled}
    assert len(lacking) == 21, "some control characters and bytes that UTF-8 never has"

    @given(any_texts)
    def any_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text).ids
        if lacking.isdisjoint(text.encode()):
            assert tokenizer.decode(ids) == text

    for text in HARD:
        any_text.hypothesis.inner_test(text)
    any_text()


def test_the_words_of_our_training_are_smollms() -> None:
    tokenizer = train_bpe("ab 12 ab 12", 300)
    assert tokenizer_to_gguf(tokenizer, 300)["tokenizer.ggml.pre"] == "smollm"
