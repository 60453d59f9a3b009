from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.data.batches import PackedBatches, TokenData, held_out_windows
from gpt2llama.data.prepare import prepare
from gpt2llama.data.shards import Tokens
from gpt2llama.errors import DataError, FileError, InputError


def data_of(count: int) -> TokenData:
    """A training stream 0, 1, 2, … so that a token tells its position; in two shards."""
    stream = np.arange(count, dtype=np.uint32)
    cut = count // 3
    return TokenData(
        train=Tokens([stream[:cut], stream[cut:]], count),
        held_out=Tokens([stream], count),
        vocab_size=count,
        fingerprint="",
        held_out_bytes=0,
        held_out_text=Path("held-out.txt"),
    )


SIZES = st.tuples(st.integers(2, 200), st.integers(1, 20), st.integers(1, 12)).filter(
    lambda sizes: sizes[0] > sizes[1]
)


@given(SIZES, st.integers(0, 5))
@settings(deadline=None)
def test_an_epoch_covers_each_token_at_most_once_and_nearly_all(
    sizes: tuple[int, int, int], seed: int
) -> None:
    count, seq_len, batch_size = sizes
    batches = PackedBatches(data_of(count), batch_size, seq_len, seed)
    windows = batches.windows_per_epoch
    rows = []
    while len(rows) < 3 * windows:
        batch = batches.batch(len(rows) // batch_size)
        assert batch.ids.shape == batch.targets.shape == (batch_size, seq_len)
        assert batch.ids.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.ids + 1)  # the next token, in this stream
        rows += batch.targets.tolist()
    for epoch in range(3):
        targets = [t for row in rows[epoch * windows : (epoch + 1) * windows] for t in row]
        assert len(set(targets)) == len(targets)
        missing = sorted(set(range(count)) - set(targets))
        assert len(missing) < 2 * seq_len
        inner = [t for t in missing if min(targets) < t < max(targets)]
        assert not inner  # only the ends of the stream are missing


@given(SIZES, st.integers(0, 5), st.lists(st.integers(0, 50), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_batch_depends_on_seed_and_index_alone(
    sizes: tuple[int, int, int], seed: int, indices: list[int]
) -> None:
    count, seq_len, batch_size = sizes
    data = data_of(count)
    used = PackedBatches(data, batch_size, seq_len, seed)
    for index in indices:
        fresh = PackedBatches(data, batch_size, seq_len, seed).batch(index)
        assert torch.equal(used.batch(index).ids, fresh.ids)


def test_epochs_and_seeds_differ() -> None:
    data = data_of(1000)
    batches = PackedBatches(data, 4, 10, seed=0)
    assert batches.windows_per_epoch == 99
    first = torch.cat([batches.batch(i).ids for i in range(24)])
    second = torch.cat([batches.batch(i).ids for i in range(25, 49)])
    assert not torch.equal(first, second)
    assert not torch.equal(first[:4], PackedBatches(data, 4, 10, seed=1).batch(0).ids)
    assert not torch.equal(first, first.sort(dim=0).values)  # shuffled
    starts = {tuple(sorted(epoch[:, 0].remainder(10).tolist())) for epoch in (first, second)}
    assert len(starts) == 2  # another offset
    assert [batches.epoch_of(i) for i in (0, 24, 25, 49, 50)] == [0, 0, 1, 1, 2]


def test_a_stream_too_short_is_refused_and_the_shortest_is_not() -> None:
    with pytest.raises(DataError, match=r"has 10 tokens, fewer than seq_len \+ 1 = 11"):
        PackedBatches(data_of(10), 2, 10, 0)
    assert PackedBatches(data_of(11), 2, 10, 0).batch(5).ids[1].tolist() == list(range(10))
    for wrong in ({"batch_size": 0}, {"seq_len": 0}, {"seed": -1}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be at least"):
            PackedBatches(data_of(10), **{"batch_size": 1, "seq_len": 2, "seed": 0, **wrong})


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 5), st.none() | st.just(99))
@settings(deadline=None)
def test_held_out_windows_predict_each_token_once_in_order(
    count: int, seq_len: int, batch_size: int, start_id: int | None
) -> None:
    stream = list(range(count))
    targets, shapes = [], set()
    for batch in held_out_windows(stream, seq_len, start_id, batch_size):
        shapes.add(tuple(batch.ids.shape))
        valid = batch.targets != -100
        targets += batch.targets[valid].tolist()
        before = torch.where(batch.targets == 0, 99, batch.targets - 1)
        assert torch.equal(batch.ids[valid], before[valid])
        assert (batch.ids >= 0).all()
    assert targets == stream[0 if start_id is not None else 1 :]
    assert all(rows <= batch_size and width <= min(seq_len, count) for rows, width in shapes)
    pairs = [held_out_windows(s, seq_len, start_id, batch_size) for s in (stream, _tokens(stream))]
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)


@given(
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 5),
    st.none() | st.just(99),
)
@settings(deadline=None)
def test_overlapping_windows_predict_each_token_once_with_enough_before_it(
    count: int, seq_len: int, stride: int, batch_size: int, start_id: int | None
) -> None:
    stride, stream, targets = min(stride, seq_len), list(range(count)), []
    for batch in held_out_windows(stream, seq_len, start_id, batch_size, stride):
        valid = batch.targets != -100
        for row, places in zip(batch.targets, valid, strict=True):
            targets += row[places].tolist()
            later = places.any() and row[places].min() >= seq_len + (start_id is None)
            context = int(places.int().argmax()) if places.any() else 0
            assert context == (seq_len - stride if later else 0)
        before = torch.where(batch.targets == 0, 99, batch.targets - 1)
        assert torch.equal(batch.ids[valid], before[valid])
    assert targets == stream[0 if start_id is not None else 1 :]


def test_a_stride_beyond_the_window_is_refused() -> None:
    for wrong in (0, 11):
        with pytest.raises(InputError, match=f"stride must be from 1 to .* 10 .got {wrong}."):
            next(held_out_windows([1, 2], 10, 0, 1, wrong))


def _tokens(stream: list[int]) -> Tokens:
    half = len(stream) // 2
    return Tokens([np.array(part, np.uint16) for part in (stream[:half], stream[half:])], 100)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("0123456789" * 10, encoding="utf-8")
    folder = tmp_path / "shards"
    prepare([tmp_path / "a.txt"], ByteTokenizer(), folder, shard_tokens=40)
    return folder


def test_open(prepared: Path) -> None:
    tokenizer = ByteTokenizer()
    data = TokenData.open(prepared, tokenizer.fingerprint)
    assert tokenizer.decode(data.train[:].tolist()) == "0123456789" * 9
    assert tokenizer.decode(data.held_out[:].tolist()) == "0123456789"
    assert (data.vocab_size, data.held_out_bytes) == (257, 10)
    assert data.held_out_text.read_bytes() == b"0123456789"
    assert TokenData.open(prepared).fingerprint == tokenizer.fingerprint


def test_another_vocabulary_is_refused(prepared: Path) -> None:
    with pytest.raises(DataError, match="made with another vocabulary"):
        TokenData.open(prepared, ByteTokenizer(vocab_size=258).fingerprint)
    other = prepared.parent / "other"
    prepare([prepared.parent / "a.txt"], ByteTokenizer(258), other, shard_tokens=40)
    (other / "held-out-00000.safetensors").replace(prepared / "held-out-00000.safetensors")
    with pytest.raises(DataError, match="different vocabularies"):
        TokenData.open(prepared)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_shard_is_noticed(prepared: Path, lost: int) -> None:
    assert len(list(prepared.glob("train-*"))) == 3
    (prepared / f"train-{lost:05d}.safetensors").unlink()
    with pytest.raises(DataError, match="not one whole set"):
        TokenData.open(prepared)


def test_no_shards(prepared: Path) -> None:
    (prepared / "held-out-00000.safetensors").unlink()
    with pytest.raises(FileError, match="no held-out shards"):
        TokenData.open(prepared)
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it with .*prepare"):
        TokenData.open(prepared / "nowhere")
