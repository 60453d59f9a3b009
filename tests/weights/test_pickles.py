"""Files of torch.save read without torch: the same as torch.load, and damage is one sentence."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpt2llama.errors import FileError, WeightsError
from gpt2llama.weights import nanogpt
from gpt2llama.weights.pickles import PICKLE_LIMIT, Stored, read_pickle, tensors_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def loaded(found: Any) -> Any:
    """With every tensor read."""
    if isinstance(found, Stored):
        tensor = found.read()
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert found.header()[:3] == (tuple(tensor.shape), dtype, "")
        return tensor
    if isinstance(found, dict):
        return {key: loaded(value) for key, value in found.items()}
    return found


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    table = torch.randn(6, 4)
    saved: dict[str, Any] = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in DTYPES}
    saved |= {"table": table, "same": table, "part": table[1:4, 2:], "turned": table.T}
    saved |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "step": table[::2]}
    saved |= {"parameter": nn.Parameter(table[0]), "module": nn.Linear(3, 2).state_dict()}
    torch.save(saved, tmp_path / "x.pt")
    found = read_pickle(tmp_path / "x.pt")
    assert found["table"] == found["same"]
    theirs = torch.load(tmp_path / "x.pt", weights_only=True)
    torch.testing.assert_close(loaded(found), dict(theirs), rtol=0, atol=0, equal_nan=True)
    found["table"].read().zero_()
    assert torch.equal(found["table"].read(), table)


@settings(max_examples=50)
@given(values=PLAIN)
def test_plain_values(values: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plain.pt"
    torch.save(values, path)
    assert read_pickle(path) == torch.load(path, weights_only=True) == values


def put(path: Path, program: bytes) -> None:
    """With one tensor's numbers, all zero."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", program)
        archive.writestr("x/data/0", bytes(64))


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_nothing_is_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Runs(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=r"x\.pt holds a .*, which is not read"):
        read_pickle(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_what_would_never_end(tmp_path: Path) -> None:
    """2^60 leaves in a few bytes: to hash, compare or print one takes forever."""
    key: Any = "leaf"
    for _ in range(60):
        key = (key, key)
    for saved in (key, [key], {"model": key, "model_args": {"n_head": key}}):
        torch.save(saved, tmp_path / "x.pt")
        assert type(read_pickle(tmp_path / "x.pt")) is type(saved)
        with pytest.raises(WeightsError):
            nanogpt.open_model(tmp_path / "x.pt")
        with pytest.raises(WeightsError):
            tensors_of(read_pickle(tmp_path / "x.pt"), "x.pt")
    tower = b"N" + 60 * b"q\x00h\x00\x86"  # None; 60 times: the pair of it and it
    for program in (b"}" + tower + b"Ns.", tower + b"Q.", tower + b"NR.", b"N" + tower + b"R."):
        put(tmp_path / "x.pt", b"\x80\x02" + program)
        with pytest.raises(WeightsError, match="is truncated or not"):
            read_pickle(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        (argparse.Namespace(a=1), {}, "holds a argparse.Namespace, which is not read"),
        (torch.ones(2).to_sparse(), {}, "_rebuild_sparse_tensor, which is not read"),
        (torch.ones(2, dtype=torch.complex64), {}, "torch.ComplexFloatStorage, which is not read"),
        (torch.ones(2, 1).expand(2, 9), {}, "reaches beyond its own numbers"),
        (["x" * PICKLE_LIMIT], {}, "holds more than 2 MB beside its tensors"),
        ([1], {"pickle_protocol": 4}, "FRAME in its pickle, unlike torch.save's own"),
        ([1], {"_use_new_zipfile_serialization": False}, "truncated or not written by torch.save"),
    ],
)
def test_what_is_not_read(saved: Any, options: Any, message: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "x.pt", **options)
    with pytest.raises(WeightsError, match=rf"x\.pt.*{message}"):
        read_pickle(tmp_path / "x.pt")


def rewrite(path: Path, kind: int = zipfile.ZIP_STORED, **changes: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in (records | changes).items():
            archive.writestr(f"x/{name}", content)


def test_zips_that_torch_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    rewrite(path)
    assert torch.equal(read_pickle(path)["a"].read(), torch.zeros(1000))
    rewrite(path, byteorder=b"big")
    with pytest.raises(WeightsError, match="big-endian"):
        read_pickle(path)
    rewrite(path, zipfile.ZIP_DEFLATED, byteorder=b"little")
    with pytest.raises(WeightsError, match="is compressed; unpack it"):
        read_pickle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(WeightsError, match="a zip, but not one"):
        read_pickle(path)


def test_missing_and_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(FileError, match=r"cannot read .*x\.pt: No such file"):
        read_pickle(path)
    torch.save({"a": torch.ones(9000)}, path)
    content = path.read_bytes()
    stored = read_pickle(path)["a"]
    for size in (0, 10, 500, len(content) - 5):
        path.write_bytes(content[:size])
        with pytest.raises(WeightsError, match=r"x\.pt is truncated"):
            read_pickle(path)
    path.write_bytes(content[:2000])
    with pytest.raises(FileError, match=r"cannot read .*x\.pt"):
        stored.read()


def saved_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.ones(4, 4)}, "args": {"n": 3, "f": 0.5}}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


PROGRAM = saved_bytes()


def test_a_tensor_beyond_its_numbers(tmp_path: Path) -> None:
    assert PROGRAM.count(b"QK\x00") == 1  # the number that it starts at
    put(tmp_path / "x.pt", PROGRAM.replace(b"QK\x00", b"QK\x01"))
    with pytest.raises(WeightsError, match=r"a tensor of shape \(4, 4\) reaches beyond"):
        read_pickle(tmp_path / "x.pt")


@settings(max_examples=150)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(PROGRAM) - 1), st.binary(max_size=3)), max_size=4)
)
def test_damaged_programs(
    changes: list[tuple[int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only our own errors, at opening and at reading; a tensor that is read lies in the file."""
    program = bytearray(PROGRAM)
    for place, content in changes:
        program[place : place + len(content)] = content
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    put(path, bytes(program))
    try:
        found = read_pickle(path)
        model = found.get("model") if isinstance(found, dict) else None
        for value in model.values() if isinstance(model, dict) else ():
            if isinstance(value, Stored):
                assert isinstance(value.read(), Tensor)
                assert value.read().abs().sum() == 0
    except (WeightsError, FileError):
        pass
