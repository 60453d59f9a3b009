"""tokenizer.json in and out, with transformers as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.errors import FileError, TokenizerError
from gpt2llama.tokenizer import BPETokenizer, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

# Without special strings, which transformers reads as special ids and we as text.
words = st.text(
    st.sampled_from("a曹操却说9 \n\t　。，“'s😀\0") | st.characters(codec="utf-8")
).filter(lambda text: "<|" not in text)
chats = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": words}
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def folder(tokenizer: BPETokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "new"
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@given(words)
def test_ids_equal_transformers(ours: Tokenizer, theirs: Any, folder: Path, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert [ours.bos_id, *ids] == theirs.encode(text)  # what generation starts from


@given(st.lists(st.integers(0, 399)))
def test_text_equals_transformers(ours: Tokenizer, theirs: Any, ids: list[int]) -> None:
    assert ours.decode(ids) == theirs.decode(ids)


@given(chats)
def test_chat_equals_transformers(
    ours: Tokenizer, theirs: Any, messages: list[dict[str, str]]
) -> None:
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ours.apply_chat(messages) == prompt["input_ids"]


def test_names_equal_transformers(ours: Tokenizer, theirs: Any, folder: Path) -> None:
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs) == 400
    bare = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = "却说曹操 attention 2026"
    assert bare.encode(text, add_special_tokens=False) == ours.encode(text)


def test_loads_as_it_was_saved(tokenizer: BPETokenizer, folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "moved.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    load_tokenizer(folder).save(tmp_path / "again")
    for path in (folder, folder / "tokenizer.json", tmp_path / "again", alone):
        loaded = load_tokenizer(path)
        for name in ("vocab_size", "bos_id", "eos_id", "stop_ids", "adds_bos", "special_ids"):
            assert getattr(loaded, name) == getattr(tokenizer, name), (path, name)
        assert loaded.special_ids.isdisjoint(loaded.encode("<|endoftext|><|im_end|>"))


def save_foreign(folder: Path, texts: list[str], config: dict[str, Any]) -> None:
    """A byte-level BPE tokenizer as another project trains and saves it."""
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, 500, special_tokens=["<s>", "</s>", "<unused>"])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_foreign_tokenizer(texts: list[str], tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<unused>"}, "eos_token": "</s>", "add_bos_token": False}
    save_foreign(tmp_path, texts, named)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (2, 1, False)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "The attention 却说 2026 of the reader, 😀" * 3  # beyond the truncation
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert 1 not in tokenizer.encode("</s>")
    with pytest.raises(TokenizerError, match="write the prompt as text"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])

    tokenizer.save(tmp_path / "again")
    config = json.loads((tmp_path / "again/tokenizer_config.json").read_text(encoding="utf-8"))
    assert config == named


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (0, 1, True)),  # by the usual names; the post-processor puts <s> first
        ({"bos_token": None}, (None, 1, False)),
        ({"bos_token": "<unused>"}, (2, 1, False)),
        ({"bos_token": "<unused>", "add_bos_token": True}, (2, 1, True)),
        ({"bos_token": None, "add_bos_token": True}, (None, 1, False)),
        ({"eos_token": "<unused>"}, (0, 2, True)),
    ],
)
def test_foreign_bos_and_eos(
    texts: list[str], tmp_path: Path, config: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    save_foreign(tmp_path, texts, config)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == expected


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not a whole tokenizer.json"),
        (b"[1]", "not a whole tokenizer.json"),
        (b"{}", "not a whole tokenizer.json"),
        (b"[" * 100_000, "not a whole tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "not a whole"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "not a byte-level BPE"),
        (b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "not a byte-l"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    ],
)
def test_bad_file(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=sentence):
        load_tokenizer(tmp_path)


def test_truncated_file(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TokenizerError, match="not a whole tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"eos_token": "<|no|>"}', r"eos_token '<\|no\|>' is not in the vocabulary"),
        ('{"bos_token": {"id": 3}}', "bos_token .* is not in the vocabulary"),
        ('{"bos_token": 3}', "bos_token 3 is not in the vocabulary"),
    ],
)
def test_bad_config(folder: Path, tmp_path: Path, config: str, sentence: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(TokenizerError, match=sentence):
        load_tokenizer(tmp_path)


def test_too_large_a_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)  # sparse
    with pytest.raises(FileError, match="more than 64 MiB"):
        load_tokenizer(tmp_path)
