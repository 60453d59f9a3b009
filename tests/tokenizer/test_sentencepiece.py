"""SentencePiece's tokenizer.model, with its own library and transformers as the oracles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hard_texts import HARD, any_texts, without_bar
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import (
    BYTES,
    SPECIALS,
    Piece,
    field,
    model_proto,
    real,
    spelled,
    train_sentencepiece,
)

from gpt2llama.errors import TokenizerError
from gpt2llama.tokenizer import BPETokenizer, StreamDecoder, load_tokenizer
from gpt2llama.tokenizer.bpe import assembled
from gpt2llama.tokenizer.sentencepiece import CONTROL, NORMAL, USER_DEFINED, read_sentencepiece

Pair = tuple[BPETokenizer, sentencepiece.SentencePieceProcessor]

# What SentencePiece can do that Llama's vocabularies do not, one at a time.
WAYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "no dummy space": {"add_dummy_prefix": False},
    "spaces stripped": {"remove_extra_whitespaces": True},
    "no byte fallback": {"byte_fallback": False},
    "control symbols": {"control_symbols": "[INST],[/INST]"},
    "all characters": {"character_coverage": 1.0},
}
LOSSLESS = [way for way in WAYS if way not in ("spaces stripped", "no byte fallback")]


def both(model: bytes) -> Pair:
    ours = assembled(*read_sentencepiece(model))
    return ours, sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module")
def trained(texts: list[str]) -> dict[str, Pair]:
    corpus = [*texts, *HARD]
    return {
        way: both(train_sentencepiece(corpus, 1100, hard_vocab_limit=False, **options))
        for way, options in WAYS.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_hard_texts(trained: dict[str, Pair], way: str) -> None:
    ours, theirs = trained[way]
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id(), theirs.eos_id()) == (1, 2)
    control = {id for id in range(ours.vocab_size) if theirs.is_control(id)}
    assert ours.special_ids == control | {theirs.unk_id()}
    assert ours.adds_bos


@given(st.sampled_from([*WAYS]), any_texts)
def test_any_text(trained: dict[str, Pair], way: str, text: str) -> None:
    ours, theirs = trained[way]
    assert ours.encode(text) == theirs.encode(text)


@given(st.sampled_from(LOSSLESS), without_bar)
def test_any_text_comes_back(trained: dict[str, Pair], way: str, text: str) -> None:
    tokenizer, _ = trained[way]
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids]) == "<s>" + text
    space = b" " if tokenizer.dummy_space and text else b""
    assert tokenizer.decode_bytes(ids) == space + text.encode()


@given(st.lists(st.integers(3, 700)))
def test_any_ids_decode_alike(trained: dict[str, Pair], ids: list[int]) -> None:
    ours, theirs = trained["llama"]
    decoded = ours.decode(ids)
    space_as_byte = ids[:1] == [3 + 0x20]  # stripped here and by transformers, not by the library
    if "\ufffd" not in decoded and not space_as_byte:  # which gives one for each broken byte
        assert decoded == theirs.decode(ids)


@given(st.lists(st.integers(0, 700)), st.integers(0, 5))
def test_streamed_is_decoded(trained: dict[str, Pair], ids: list[int], start: int) -> None:
    tokenizer, _ = trained["llama"]
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
    before = tokenizer.decode(ids[:start])
    if not before.endswith("\ufffd"):  # a torn character of the prompt comes with what follows
        stream = StreamDecoder(tokenizer, after=ids[:start])
        after = "".join(map(stream.push, ids[start:])) + stream.flush()
        assert before + after == tokenizer.decode(ids)


def test_a_continuation_keeps_its_space(trained: dict[str, Pair]) -> None:
    tokenizer, _ = trained["llama"]
    first, *rest = tokenizer.encode("the attention")
    for prompt in ([1], tokenizer.encode("the")):
        stream = StreamDecoder(tokenizer, after=prompt)
        text = "".join(map(stream.push, [first, *rest]))
        assert text == ("the attention" if prompt == [1] else " the attention")


@st.composite
def vocabularies(draw: st.DrawFn) -> list[Piece]:
    """Overlapping pieces of few letters in any order, and runs of spaces that all score the same,
    as Mistral's do."""
    words = st.text("ab▁", min_size=2, max_size=6).filter(lambda word: word.strip("▁"))
    merged = draw(st.lists(words, unique=True, max_size=25))
    runs = draw(st.sets(st.integers(2, 12)))
    tied = [("▁" * n, -1e9, NORMAL) for n in runs]
    return [*SPECIALS, *BYTES, *spelled(*merged, "a", "b", "▁"), *tied]


@given(vocabularies(), st.booleans(), st.lists(st.text("ab  \n", max_size=40), min_size=1))
def test_any_vocabulary(pieces: list[Piece], dummy: bool, examples: list[str]) -> None:
    ours, theirs = both(model_proto(pieces, dummy_space=dummy))
    for text in examples:
        assert ours.encode(text) == theirs.encode(text)


def test_transformers_reads_what_is_saved(trained: dict[str, Pair], tmp_path: Path) -> None:
    for way, (ours, _) in trained.items():
        ours.save(tmp_path / way)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / way)
        again = load_tokenizer(tmp_path / way)
        assert again.fingerprint == ours.fingerprint
        for text in HARD:
            if not any(name in text for name in ("<s>", "</s>", "<unk>", "[INST]")):
                ids = ours.encode(text)
                assert theirs.encode(text) == [1, *ids], (way, text)
                assert again.encode(text) == ids
                decoded = theirs.decode(ids, clean_up_tokenization_spaces=False)
                assert decoded == ours.decode(ids), (way, text)


def test_a_folder_with_a_config(texts: list[str], tmp_path: Path) -> None:
    model = train_sentencepiece(texts, 400, control_symbols="<end>")
    (tmp_path / "tokenizer.model").write_bytes(model)
    config = '{"eos_token": "<end>", "add_bos_token": false, "tokenizer_class": "LlamaTokenizer"}'
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (tmp_path / "vocab.json").write_text("{", encoding="utf-8")  # comes after the model
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 3, False)
    assert tokenizer.config["chat_template"] == "{{ messages }}"
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode("the attention") == theirs.encode("the attention")
    tokenizer.save(tmp_path / "saved")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.encode("the attention") == tokenizer.encode("the attention")
    assert loaded.eos_token_id == 3


GOOD = [*SPECIALS, *BYTES, *spelled("▁a", "ab", "a", "b", "▁")]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (b"", "it has no pieces"),
        (model_proto([("a", 0, NORMAL)]), "neither byte pieces nor an unknown one"),
        (b"\xff" * 20, "not a whole SentencePiece model: a number is cut"),
        (b"\x0b\x0c", "not a whole SentencePiece model: a field is cut or unknown"),
        (field(1, 7), "not a SentencePiece model: a field has the wrong type"),
        (field(1, field(1, b"\xff")), "a piece is not UTF-8"),
        (field(1, field(1, "a") + field(2, 3)), "a score is not a float"),
        (field(1, field(1, "a") + field(3, "x")), "a piece's type is not a number"),
        (model_proto([("c", 0, 9), *GOOD]), "of the unknown type 9"),
        (model_proto([*GOOD, ("x", 0, CONTROL)]), "special piece 'x' is one that text is spelled"),
        (model_proto(GOOD, kind=1), r"unigram, word or char, not BPE, .* tokenizer\.json"),
        (model_proto(GOOD) + field(3, field(2, b"map")), "rewrites characters"),
        (model_proto(GOOD) + field(3, field(5, 0)), "does not write spaces as ▁"),
        (model_proto(GOOD) + field(2, field(24, 1)), "puts ▁ after words"),
        (model_proto([*GOOD, ("[X]", 0, USER_DEFINED)]), "has user-defined symbols"),
        (model_proto(GOOD[:100]), "not the 256 from <0x00> to <0xFF>"),
        (model_proto([*GOOD, GOOD[-1]]), r"piece 263, '▁', is empty or there twice"),
        (model_proto([*GOOD, ("", 0, NORMAL)]), "piece 264, '', is empty or there twice"),
        (model_proto([*GOOD, ("ba", float("nan"), NORMAL)]), "score is not a number"),
        (model_proto([*GOOD, ("ba", -1, NORMAL)]), "'ab' and 'ba' have the same score"),
        (model_proto([*GOOD, ("ax", -9, NORMAL)]), "'ax' has a character that is no piece"),
        (model_proto([*GOOD, ("a" * 99999, -9, NORMAL)]), "too long for any text"),
        (model_proto(GOOD) + field(2, field(41, "x")), "a piece's type is not a number"),
    ],
)
def test_refused(tmp_path: Path, model: bytes, sentence: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model: .*{sentence}"):
        load_tokenizer(tmp_path)


def test_a_model_of_another_kind_is_refused(texts: list[str]) -> None:
    for options, says in (
        ({"model_type": "unigram", "split_digits": False}, "unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "rewrites characters"),
        ({"treat_whitespace_as_suffix": True}, "puts ▁ after words"),
        ({"user_defined_symbols": "[X]"}, "user-defined symbols"),
    ):
        model = train_sentencepiece(texts, 400, hard_vocab_limit=False, **options)
        with pytest.raises(TokenizerError, match=says):
            read_sentencepiece(model)


@given(st.integers(0, 10**6), st.binary(max_size=3))
def test_a_damaged_model_is_refused_or_read(at: int, noise: bytes) -> None:
    whole = model_proto(GOOD)
    at %= len(whole)
    for damaged in (whole[:at], whole[:at] + noise + whole[at + len(noise) :]):
        try:
            tokenizer, _ = read_sentencepiece(damaged)
        except TokenizerError:
            continue
        assert tokenizer.get_vocab_size() > 0


def test_no_bos() -> None:
    pieces = [("<unk>", 0, 2), ("x", 0, NORMAL), ("y", -1, NORMAL), *BYTES]
    tokenizer, _ = both(model_proto(pieces))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)
    assert CONTROL not in {kind for _, _, kind in pieces}


@pytest.mark.network
def test_mistral(tmp_path: Path) -> None:
    shutil.copy(real("mistral-tokenizer-for-tests"), tmp_path / "tokenizer.model")
    ours = load_tokenizer(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours.save(tmp_path / "saved")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.adds_bos) == (32000, 1, 2, True)

    @given(any_texts)
    def any_text(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        if "▁" not in text:
            assert ours.decode(ids) == text
        if not any(name in text for name in ("<s>", "</s>", "<unk>")):
            assert fast.encode(text) == [1, *ids]

    for text in HARD:
        any_text.hypothesis.inner_test(text)
    any_text()
