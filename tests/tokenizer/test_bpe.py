"""Our byte-level BPE: lossless, deterministic, and the same ids as transformers reads from it."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gpt2llama.errors import FileError, InputError, TokenizerError
from gpt2llama.tokenizer import BPETokenizer, load_tokenizer, train_bpe
from gpt2llama.tokenizer.bpe import MAX_PIECE_BYTES, PATTERN, SPECIALS

# Any character, but often those between which the pattern decides.
anything = (
    st.text(
        st.sampled_from("a曹操9 \n\t\r　。，“-'s½ⅷ〇é́😀\0<|>")
        | st.characters(codec="utf-8", max_codepoint=0xFFFF)
    )
    | st.text()
)


@given(anything)
@example("".join(map(chr, range(0x300))))
@example("<|endoftext|>")
@example("\0")
@example("👨‍👩‍👧‍👦")
def test_any_text_comes_back(tokenizer: BPETokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode("utf-8")


@given(st.lists(st.integers(0, 399)))
def test_any_ids_decode_as_their_bytes(tokenizer: BPETokenizer, ids: list[int]) -> None:
    joined = b"".join(tokenizer.decode_bytes([id]) for id in ids)
    assert tokenizer.decode_bytes(ids) == joined
    assert tokenizer.decode(ids) == joined.decode("utf-8", errors="replace")


def test_invalid_bytes_become_replacement_characters(tokenizer: BPETokenizer) -> None:
    first, *_ = tokenizer.encode("麤")  # never seen: its bytes are not one piece
    assert tokenizer.decode([first]) == "\ufffd"


@given(anything)
def test_split_is_digits_alone_then_gpt2s(text: str) -> None:
    """What llama.cpp calls "smollm", so that an exported model splits text as in training."""
    ours = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert pre_tokenizers.Sequence([ours, byte_level]).pre_tokenize_str(
        text
    ) == pre_tokenizers.Sequence([digits, gpt2]).pre_tokenize_str(text)


def pieces_of(tokenizer: BPETokenizer, text: str) -> list[str]:
    return [tokenizer.decode([id]) for id in tokenizer.encode(text)]


def test_pieces_stop_where_they_should() -> None:
    tokenizer = train_bpe("却说曹操。\nthe attention 2019\n" * 9, 1000)
    assert pieces_of(tokenizer, "2019") == ["2", "0", "1", "9"]  # although seen together
    assert pieces_of(tokenizer, "却说曹操。\n") == ["却说曹操", "。", "\n"]
    assert pieces_of(tokenizer, "the attention") == ["the", " attention"]


def test_no_piece_is_long_or_crosses_a_border(tokenizer: BPETokenizer) -> None:
    long = train_bpe("天地玄黄宇\n宙洪荒日月盈昃辰宿\nantidisestablishmentarianism\n" * 9, 1000)
    for vocabulary in (tokenizer, long):
        ids = set(range(vocabulary.vocab_size)) - vocabulary.special_ids
        assert max(len(vocabulary.decode_bytes([id])) for id in ids) <= MAX_PIECE_BYTES
        for id in ids:
            piece = vocabulary.decode([id])
            assert not re.search(r"\d.|.\d|\w[。，：“”、；]|[。，：“”、；]\w|\S\s", piece), piece
    assert len(long.encode("天地玄黄宇")) == 1  # up to the bound there is nothing in the way


@given(st.lists(st.sampled_from([*SPECIALS, "a", " ", "曹", "<|", "\n"])).map("".join))
def test_special_strings_stay_text(tokenizer: BPETokenizer, text: str) -> None:
    assert tokenizer.special_ids == set(range(len(SPECIALS)))
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))
    chat = tokenizer.apply_chat([{"role": "user", "content": text}])
    assert tokenizer.decode(chat) == "<|user|>" + text + "<|end|><|assistant|>"
    assert [id for id in chat if id in tokenizer.special_ids] == [2, 4, 3]


def test_a_corpus_of_special_strings_teaches_none() -> None:
    tokenizer = train_bpe(["".join(SPECIALS) * 50], 1000)
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("".join(SPECIALS)))


def test_special_ids(tokenizer: BPETokenizer) -> None:
    assert [tokenizer.decode([id]) for id in range(len(SPECIALS))] == list(SPECIALS)
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    assert tokenizer.stop_ids == {0, SPECIALS.index("<|end|>")}
    assert tokenizer.adds_bos


def test_training_is_deterministic(texts: list[str], tokenizer: BPETokenizer) -> None:
    for order in itertools.permutations(texts):
        assert train_bpe(iter(order), 400).fingerprint == tokenizer.fingerprint
    program = (
        "import json, sys; from gpt2llama.tokenizer import train_bpe;"
        "print(train_bpe(json.load(sys.stdin), 400).fingerprint)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAYON_NUM_THREADS": "7", "PYTHONHASHSEED": "1"},
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == tokenizer.fingerprint


def test_long_texts_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{word}\n" for word in ["却说", "曹操", "大喜"] * 30)
    whole = train_bpe([text], 300).fingerprint
    monkeypatch.setattr("gpt2llama.tokenizer.bpe._CHUNK", 7)
    assert train_bpe([text], 300).fingerprint == whole
    assert train_bpe(text, 300).fingerprint == whole  # a string is one text, not many


def test_fewer_merges_than_asked_for_give_a_smaller_vocabulary() -> None:
    tokenizer = train_bpe(["ab ab"], 5000)
    assert tokenizer.vocab_size == 264 + 1  # `ab`, but not ` ab`: that occurs once
    assert tokenizer.decode(tokenizer.encode("Hello, 世界")) == "Hello, 世界"


@pytest.mark.parametrize("size", [0, -1, 263, 1 << 40])
def test_impossible_size(size: int) -> None:
    with pytest.raises(TokenizerError, match=rf"from 264 .*\(got {size}\)"):
        train_bpe(["text"], size)


@pytest.mark.parametrize("nothing", [[], [""], ["", ""], ""])
def test_empty_corpus(nothing: list[str]) -> None:
    with pytest.raises(TokenizerError, match="no text to train"):
        train_bpe(nothing, 300)


def test_half_a_surrogate_pair(tokenizer: BPETokenizer) -> None:
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(TokenizerError, match="surrogate"):
        train_bpe(["a\ud83d"], 300)


@pytest.mark.parametrize("id", [-1, 400, 1 << 40])
def test_unknown_id_is_named(tokenizer: BPETokenizer, id: int) -> None:
    with pytest.raises(TokenizerError, match=f"id {id} is not in the vocabulary of 400"):
        tokenizer.decode([5, id])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least one message"),
        ([{"role": "tool", "content": "x"}], "message 0 has role 'tool'"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "message 1 has role None"),
        ([{"role": "user"}], "message 0 must have a string content"),
    ],
)
def test_bad_chat(tokenizer: BPETokenizer, messages: list[dict[str, str]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        tokenizer.apply_chat(messages)


def test_fingerprint_names_the_vocabulary(
    texts: list[str], tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64}", tokenizer.fingerprint)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert train_bpe(texts, 399).fingerprint != tokenizer.fingerprint
    state = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for change in (
        lambda s: s["model"]["merges"].reverse(),
        lambda s: s["pre_tokenizer"]["pretokenizers"].pop(0),
        lambda s: s["added_tokens"][3].update(content="<|other|>"),
        lambda s: s.update(normalizer={"type": "NFC"}),
    ):
        other = json.loads(json.dumps(state))
        change(other)
        (tmp_path / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
        assert load_tokenizer(tmp_path).fingerprint != tokenizer.fingerprint


def test_save_replaces_whole_files_or_nothing(
    texts: list[str], tokenizer: BPETokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_bpe(texts, 300).save(tmp_path)
    tokenizer.save(tmp_path)
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names

    def no_room(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(FileError, match=r"cannot write .* No space left"):
        train_bpe(texts, 300).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    with pytest.raises(FileError, match="cannot write"):
        tokenizer.save(tmp_path / "tokenizer.json")  # not a folder
