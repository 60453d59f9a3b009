from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from gpt2llama.data.shards import Shard, Tokens, open_shard, write_shard
from gpt2llama.errors import DataError, FileError


def shard(ids: list[int], ends: list[int], vocab_size: int = 300) -> Shard:
    return Shard(
        tokens=np.array(ids, np.uint32),
        document_ends=np.array(ends, np.int64),
        split="train",
        index=3,
        last=True,
        vocab_size=vocab_size,
        fingerprint="f" * 64,
        bytes=17,
    )


PATH = "train-00003.safetensors"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)]
)
def test_round_trip_and_the_library_reads_it_too(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    ids = [0, 5, vocab_size - 1]
    written = shard(ids, [2, 3], vocab_size)
    write_shard(tmp_path, written)
    got = open_shard(tmp_path / PATH)
    assert got.tokens.dtype == dtype
    assert got.tokens.tolist() == ids
    assert got.document_ends.tolist() == [2, 3]
    for field in ("split", "index", "last", "vocab_size", "fingerprint", "bytes"):
        assert getattr(got, field) == getattr(written, field)
    with safe_open(tmp_path / PATH, framework="numpy") as file:
        assert file.get_tensor("tokens").tolist() == ids
        assert file.get_tensor("tokens").dtype == dtype
        assert file.get_tensor("document_ends").tolist() == [2, 3]
        assert file.metadata()["dtype"] == np.dtype(dtype).name
        assert (file.metadata()["tokens"], file.metadata()["documents"]) == ("3", "2")


def test_the_same_shard_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name, shard([1, 2], [2]))
    assert (tmp_path / "a" / PATH).read_bytes() == (tmp_path / "b" / PATH).read_bytes()


def test_truncated_anywhere_is_one_sentence(tmp_path: Path) -> None:
    write_shard(tmp_path, shard([1, 2, 3], [3]))
    whole = (tmp_path / PATH).read_bytes()
    for size in range(len(whole)):
        (tmp_path / PATH).write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{PATH} is no whole token shard"):
            open_shard(tmp_path / PATH)
    (tmp_path / PATH).write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(tmp_path / PATH)


@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_never_escapes_as_another_error(
    tmp_path: Path, place: int, byte: int
) -> None:
    path = tmp_path / "x.safetensors"
    if not (tmp_path / PATH).exists():
        write_shard(tmp_path, shard([1, 2, 3], [3]))
    content = bytearray((tmp_path / PATH).read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        got = open_shard(path)
        assert got.tokens.shape == (3,)
        assert got.document_ends[-1] <= 3
    except DataError:
        pass


def rewritten(path: Path, **metadata: str) -> None:
    """The shard again, with other metadata."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"].update(metadata)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "pt"},
        {"version": "2"},
        {"dtype": "uint32"},
        {"vocab_size": "70000"},
        {"vocab_size": "many"},
        {"tokens": "4"},
        {"documents": "2"},
        {"last": "maybe"},
        {"index": ""},
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, metadata: dict[str, str]) -> None:
    write_shard(tmp_path, shard([1, 2, 3], [3]))
    rewritten(tmp_path / PATH)
    open_shard(tmp_path / PATH)
    rewritten(tmp_path / PATH, **metadata)
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(tmp_path / PATH)


@pytest.mark.parametrize("ends", [[4], [-1, 3], [2, 1], [3, 2**62]])
def test_document_ends_outside_the_tokens(tmp_path: Path, ends: list[int]) -> None:
    write_shard(tmp_path, shard([1, 2, 3], ends))
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(tmp_path / PATH)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"tokens": np.zeros(3, np.float32)}, path)
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(path)
    save_file({"tokens": np.zeros(3, np.uint16), "document_ends": np.zeros(1, np.int64)}, path)
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(DataError, match="no whole token shard"):
        open_shard(path)
    with pytest.raises(FileError, match="cannot read"):
        open_shard(tmp_path / "nowhere.safetensors")
    with pytest.raises(FileError, match="cannot read"):
        open_shard(tmp_path)


@given(
    parts=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5),
    span=st.tuples(*[st.none() | st.integers(-30, 30)] * 2),
)
@settings(deadline=None)
def test_tokens_slice_like_one_list(
    parts: list[list[int]], span: tuple[int | None, int | None]
) -> None:
    joined = [i for part in parts for i in part]
    tokens = Tokens([np.array(part, np.uint16) for part in parts], 10)
    assert len(tokens) == len(joined)
    assert tokens[slice(*span)].tolist() == joined[slice(*span)]
    assert tokens[slice(*span)].dtype == np.int64


def test_an_id_outside_the_vocabulary_is_found_when_read(tmp_path: Path) -> None:
    write_shard(tmp_path, replace(shard([1, 299, 3], [3]), vocab_size=299))
    tokens = Tokens([open_shard(tmp_path / PATH).tokens], 299)
    assert tokens[:1].tolist() == [1]
    with pytest.raises(DataError, match="id 299, outside 299"):
        tokens[:2]
