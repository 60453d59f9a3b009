"""Llama 3's tokenizer.model, with tiktoken (and Meta's own class, if installed) as the oracles."""

from __future__ import annotations

import base64
import random
import shutil
from pathlib import Path

import pytest
import tiktoken
import transformers
from hard_texts import HARD, any_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import real

from gpt2llama.errors import FileError, TokenizerError
from gpt2llama.tokenizer import BPETokenizer, Tokenizer, load_tokenizer
from gpt2llama.tokenizer.splits import SPLITS
from gpt2llama.tokenizer.tiktoken import from_ranks, read_ranks

BYTES = [bytes([byte]) for byte in range(256)]


def written(pieces: list[bytes]) -> bytes:
    """As the file has them."""
    return b"".join(base64.b64encode(p) + b" %d\n" % rank for rank, p in enumerate(pieces))


def theirs_of(ranks: dict[bytes, int], name: str) -> tiktoken.Encoding:
    (pattern,) = SPLITS[name]
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@settings(max_examples=20)
@given(any_texts, st.sampled_from(["llama-bpe", "gpt-2", "qwen2"]), st.integers())
def test_any_ranks(drawn: str, name: str, seed: int) -> None:
    """Pieces cut from texts at random, so that some are reached by no merge."""
    shuffled = random.Random(seed)
    cut = [text.encode() for text in HARD if text]
    pieces = set()
    for _ in range(300):
        source = shuffled.choice(cut)
        start = shuffled.randrange(len(source))
        pieces.add(source[start : start + shuffled.randint(2, 8)])
    order = [*BYTES, *sorted(pieces - set(BYTES))]
    shuffled.shuffle(order)
    ranks = read_ranks(written(order))
    assert ranks == {piece: rank for rank, piece in enumerate(order)}
    ours, theirs = BPETokenizer(from_ranks(ranks, SPLITS[name], []), {}), theirs_of(ranks, name)
    for text in [*HARD, drawn]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, disallowed_special=())
        assert ours.decode(ids) == text


def test_specials_follow_the_ranks() -> None:
    ranks = {piece: rank for rank, piece in enumerate([*BYTES, b"ab"])}
    backend = from_ranks(ranks, SPLITS["llama-bpe"], ["<|a|>", "ab", "<|b|>"])
    tokenizer = BPETokenizer(backend, {"bos_token": "<|a|>"})
    assert tokenizer.bos_id == 257
    assert tokenizer.vocab_size == 259
    assert 257 not in tokenizer.encode("<|a|> ab <|b|>")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"IQ== 0\n", "it has 1 pieces, and Llama 3's has 128,000"),
        (b"IQ== 0\nI!== 1\n", "line 2 is not a piece in base64 and a rank"),
        (b"IQ== 0\nIg\n", "line 2 is not a piece"),
        (b"IQ== 0\nIg= 1\n", "line 2 is not a piece"),
        (b"IQ== 0\nIg== one\n", "line 2 is not a piece"),
        (b"IQ== 0\n\xff\xfe\n", "line 2 is not a piece"),
        (b"IQ== 0\nIg== 0\n", "line 2 .* out of order or there twice"),
        (b"IQ== 0\nIQ== 1\n", "line 2 .* out of order or there twice"),
        (b"IQ== 0\nIg== 4294967296\n", "line 2 .* out of order or there twice"),
        (b"IQ== 1\n", "line 1 .* out of order or there twice"),
    ],
)
def test_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model: .*{sentence}"):
        load_tokenizer(tmp_path)


def test_a_byte_without_a_piece() -> None:
    with pytest.raises(TokenizerError, match="no piece for the byte 255"):
        from_ranks({piece: rank for rank, piece in enumerate(BYTES[:255])}, (), [])


def test_too_large_a_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate((8 << 20) + 1)  # sparse
    with pytest.raises(FileError, match="more than 8 MiB"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    shutil.copy(real("llama3-tokenizer-for-tests"), folder / "tokenizer.model")
    load_tokenizer(folder).save(folder / "saved")
    return folder


@pytest.fixture(scope="module")
def tokenizer(llama3: Path) -> Tokenizer:
    return load_tokenizer(llama3 / "saved")


@pytest.mark.network
def test_llama3(tokenizer: Tokenizer, llama3: Path) -> None:
    """As saved, so that what is saved is tested too."""
    content = (llama3 / "tokenizer.model").read_bytes()
    ranks = {base64.b64decode(piece): int(n) for piece, n in map(bytes.split, content.splitlines())}
    theirs = theirs_of(ranks, "llama-bpe")
    fast = transformers.AutoTokenizer.from_pretrained(llama3 / "saved")

    @given(any_texts)
    def any_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == text
        if "<|" not in text:
            assert fast.encode(text) == [128000, *ids]

    for text in HARD:
        any_text.hypothesis.inner_test(text)
    any_text()


@pytest.mark.network
def test_llama3s_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 128256
    assert tokenizer.special_ids == set(range(128000, 128256))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (128000, 128001, True)
    assert tokenizer.stop_ids == {128001, 128008, 128009}


@pytest.mark.network
def test_llama3_equals_metas_own(tokenizer: Tokenizer, llama3: Path) -> None:
    metas = pytest.importorskip("llama_models.llama3.tokenizer", reason="make oracles")
    theirs = metas.Tokenizer(llama3 / "tokenizer.model")
    assert theirs.special_tokens == {
        tokenizer.decode([id]): id for id in sorted(tokenizer.special_ids)
    }
    assert set(theirs.stop_tokens) == tokenizer.stop_ids
    assert theirs.n_words == tokenizer.vocab_size
    for text in HARD:
        assert tokenizer.encode(text) == theirs.encode(text, bos=False, eos=False)
