"""tokenizer.json in and out, with transformers as the oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken.load
import tokenizers
from hard_texts import HARD, any_texts
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import real

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
    with pytest.raises(FileError, match=r"has none of tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileError, match=r"there is no .*nowhere; make a tokenizer"):
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
    with pytest.raises((TokenizerError, FileError), match=sentence):
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
    with pytest.raises((TokenizerError, FileError), match=sentence):
        load_tokenizer(tmp_path)


def test_too_large_a_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)  # sparse
    with pytest.raises(FileError, match="more than 64 MiB"):
        load_tokenizer(tmp_path)


def llama2_json(folder: Path, metaspace: bool) -> None:
    """tokenizer.json in SentencePiece's style, as Llama 2's (or with `metaspace` a newer one)."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = tokenizers.normalizers
    if metaspace:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        steps = [spaces.Prepend("▁"), spaces.Replace(" ", "▁")]
        backend.normalizer = spaces.Sequence(steps)
    decode = tokenizers.decoders
    steps = [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse()]
    backend.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, special_tokens=names, show_progress=False, max_token_length=9
    )
    backend.train_from_iterator([t for t in HARD if "\x00" not in t], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are pieces like others
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("metaspace", [False, True])
def test_sentencepiece_style_json(tmp_path: Path, metaspace: bool) -> None:
    llama2_json(tmp_path, metaspace)
    tokenizer = load_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)

    @given(any_texts)
    def any_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids)
        if not any(name in text for name in ("<unk>", "<s>", "</s>")):
            assert theirs.encode(text) == [1, *ids]
        # Metaspace adds no space where there is one, and so cannot give the first one back.
        if "▁" not in text and not (metaspace and text.startswith(" ")):
            assert tokenizer.decode(ids) == text

    for text in HARD:
        any_text.hypothesis.inner_test(text)
    any_text()


def test_a_special_string_that_was_trained_on_stays_text(tmp_path: Path) -> None:
    """Its merges lead to it, so that its letters would become the special id."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>"], show_progress=False)
    backend.train_from_iterator(["<s>", "<s>", "a"], trainer)
    assert backend.model.tokenize("<s>")[0].id == 0
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("<s>a<s>"))
    assert tokenizer.decode(tokenizer.encode("<s>a<s>")) == "<s>a<s>"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


GPT2_FILES = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]


def save_gpt2(folder: Path, texts: list[str], names: tuple[str, str], end: str) -> Any:
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, 500, special_tokens=[end])
    for file, name in zip(backend.save_model(str(folder)), names, strict=True):
        Path(file).rename(folder / name)
    return tokenizers.ByteLevelBPETokenizer.from_file(*(str(folder / name) for name in names))


@pytest.mark.parametrize("names", GPT2_FILES)
def test_gpt2s_two_files(texts: list[str], tmp_path: Path, names: tuple[str, str]) -> None:
    theirs = save_gpt2(tmp_path, texts, names, "<|endoftext|>")
    tokenizer = load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / names[0]).fingerprint == tokenizer.fingerprint
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    assert tokenizer.special_ids == {0}
    assert not tokenizer.adds_bos
    tokenizer.save(tmp_path / "saved")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in HARD:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert tokenizer.decode(ids) == text
        if "<|endoftext|>" not in text:
            assert fast.encode(text) == ids
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


def test_gpt2_files_without_an_end_of_text(texts: list[str], tmp_path: Path) -> None:
    save_gpt2(tmp_path, texts, GPT2_FILES[0], "<s>")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_ids) == (None, None, set())


@pytest.mark.parametrize(
    ("vocab", "merges", "sentence"),
    [
        ("{", "", "vocab.json is not JSON"),
        ("[]", "", "vocab.json must be a JSON object"),
        ('{"a": 0, "b": 0}', "", "each piece an id of its own"),
        ('{"a": 0, "b": "1"}', "", "each piece an id of its own"),
        ('{"a": 0, "b": true}', "", "each piece an id of its own"),
        ('{"a": 0, "b": -1}', "", "each piece an id of its own"),
        ('{"a": 0, "b": 99999999999}', "", "each piece an id of its own"),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\nab\n", "merge 2 in merges.txt is not"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b a\n", "merge 1 in merges.txt is not two pieces"),
        ('{"a": 0, "b": 1}', "a b\n", "merge of 'a' and 'b' is not in its vocabulary"),
    ],
)
def test_bad_gpt2_files(tmp_path: Path, vocab: str, merges: str, sentence: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab, encoding="utf-8")
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    with pytest.raises((TokenizerError, FileError), match=sentence):
        load_tokenizer(tmp_path)


def test_half_of_gpt2s_files_and_another_models(texts: list[str], tmp_path: Path) -> None:
    save_gpt2(tmp_path, texts, GPT2_FILES[0], "<|endoftext|>")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "Qwen2Tokenizer"}', encoding="utf-8")
    with pytest.raises(TokenizerError, match="a Qwen2Tokenizer's, not GPT-2's"):
        load_tokenizer(tmp_path)
    config.unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileError, match=r"vocab\.json needs merges\.txt beside it"):
        load_tokenizer(tmp_path)


@pytest.mark.network
def test_gpt2(tmp_path: Path) -> None:
    for path in real("gpt2-vocab").parent.glob("*[!n]"):
        shutil.copy(path, tmp_path)
    shutil.copy(real("gpt2-vocab"), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    load = tiktoken.load.data_gym_to_mergeable_bpe_ranks
    ranks = load(str(tmp_path / "vocab.bpe"), str(tmp_path / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    theirs = tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    assert tokenizer.vocab_size == theirs.n_vocab == 50257
    assert tokenizer.bos_id == tokenizer.eos_id == theirs.eot_token

    @given(any_texts)
    def any_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == text

    for text in HARD:
        any_text.hypothesis.inner_test(text)
    any_text()


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 40),
    st.sampled_from([b"", b"null", b"-1", b"1e99", b'"x"', b"{}", b"[]"]),
)
def test_a_damaged_json_is_refused_or_works(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, start: int, cut: int, noise: bytes
) -> None:
    """No other error, whatever is cut out of the file or put in its place."""
    whole = (folder / "tokenizer.json").read_bytes()
    start %= len(whole)
    end = start + cut
    damaged = tmp_path_factory.getbasetemp() / "damaged.json"
    damaged.write_bytes(whole[:start] + noise + whole[end:])
    try:
        tokenizer = load_tokenizer(damaged)
        tokenizer.decode(tokenizer.encode("The attention, 曹操 <|im_end|> 9"))
    except (TokenizerError, FileError):
        pass
