"""GPT-2 as OpenAI released it, in a TensorFlow checkpoint: written here, and one by TensorFlow."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from hf_toys import logits, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from wheels import wheel

from gpt2llama.errors import ConfigError, FileError, WeightsError
from gpt2llama.tokenizer import train_bpe
from gpt2llama.weights import openai
from gpt2llama.weights.build import assemble, check
from gpt2llama.weights.openai import read_index


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """Zeros are left out, as protocol buffers have it."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value) if value else b""
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """LevelDB's: each key as its difference from the one before, whole again every 16."""
    content, restarts, before = b"", [], b""
    for i, (key, value) in enumerate(entries):
        if i % 16 == 0:
            restarts.append(len(content))
            before = b""
        shared = next((n for n, (a, b) in enumerate(zip(before, key, strict=False)) if a != b),
                      min(len(before), len(key)))  # fmt: skip
        content += varint(shared) + varint(len(key) - shared) + varint(len(value))
        content += key[shared:] + value
        before = key
    return content + b"".join(n.to_bytes(4, "little") for n in (*restarts, len(restarts)))


def write_table(path: Path, entries: list[tuple[bytes, bytes]], per_block: int = 20) -> None:
    content, places = b"", []

    def put(block: bytes) -> bytes:
        nonlocal content
        place = varint(len(content)) + varint(len(block))
        content += block + b"\0" + b"crc."
        return place

    for i in range(0, len(entries), per_block):
        part = entries[i : i + per_block]
        places.append((part[-1][0], put(block(part))))
    footer = put(block([])) + put(block(places))
    path.write_bytes(content + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db"))


def write(folder: Path, state: dict[str, Tensor]) -> None:
    """All that the release holds but the graph; the int64 step is another training's."""
    numbers, entries = b"", [(b"", field(1, 1) + field(3, field(1, 1)))]
    state = state | {"global_step": torch.tensor(9)}
    for name in sorted(state, key=str.encode):
        tensor = state[name]
        shape = b"".join(field(2, field(1, n)) for n in tensor.shape)
        content = tensor.contiguous().numpy().tobytes()
        entry = field(1, 1 if tensor.is_floating_point() else 9) + field(2, shape)
        entry += field(4, len(numbers)) + field(5, len(content)) + b"\x35crc."
        entries.append((name.encode(), entry))
        numbers += content
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(numbers)
    write_table(folder / "model.ckpt.index", entries)
    params = {"n_vocab": 97, "n_ctx": 80, "n_embd": 32, "n_head": 4, "n_layer": 2}
    (folder / "hparams.json").write_text(json.dumps(params), encoding="utf-8")


def openai_state() -> dict[str, Tensor]:
    """transformers' toy, in OpenAI's names."""
    letters = {"ln_1.weight": "g", "ln_2.weight": "g", "ln_f.weight": "g"}
    state = {}
    for name, tensor in toy("gpt2").transformer.state_dict().items():
        path, kind = name.rsplit(".", 1)
        letter = "b" if kind == "bias" else letters.get(".".join(name.split(".")[-2:]), "w")
        path = path.replace("h.", "h", 1).replace(".", "/") if path.startswith("h.") else path
        conv1d = letter == "w" and path.startswith("h")
        full = f"model/{path}" if path in ("wte", "wpe") else f"model/{path}/{letter}"
        state[full] = tensor[None] if conv1d else tensor
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, openai_state())
    return tmp_path


def test_logits_are_those_of_transformers(folder: Path) -> None:
    opened = openai.open_model(folder)
    assert opened.headers["model/h0/attn/c_attn/w"].shape == (1, 32, 96)
    assert_close(logits(assemble(opened)), logits(toy("gpt2")))
    assert opened.tokenizer() is None


def test_dict_to_dict_and_back() -> None:
    state = openai_state()
    back = openai.state_to_openai(openai.state_from_openai(state))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert_close(back[name], tensor, rtol=0, atol=0)


def test_its_tokenizer(folder: Path) -> None:
    tokenizer = train_bpe(["the reader and the model\n" * 9], 90 + 200)
    tokenizer.save(folder / "bpe")
    model = json.loads((folder / "bpe/tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary, merges = model["vocab"], [" ".join(pair) for pair in model["merges"]]
    (folder / "encoder.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = "\n".join(["#version: 0.2", *merges, ""])
    (folder / "vocab.bpe").write_text(lines, encoding="utf-8")
    read = openai.open_model(folder).tokenizer()
    assert read is not None
    assert read.decode(read.encode("the model")) == "the model"


def test_damage(folder: Path) -> None:
    index, data = folder / "model.ckpt.index", folder / "model.ckpt.data-00000-of-00001"
    content, numbers = index.read_bytes(), data.read_bytes()
    data.write_bytes(numbers[:-100])
    with pytest.raises(WeightsError, match=r"index is damaged: .* is not in model\.ckpt\.data"):
        openai.open_model(folder)
    data.unlink()
    with pytest.raises(FileError, match=r"cannot read .*data-00000-of-00001: No such file"):
        openai.open_model(folder)
    data.write_bytes(numbers)
    for size in (0, 40, len(content) - 1):
        index.write_bytes(content[:size])
        with pytest.raises(WeightsError, match=r"ckpt\.index is truncated or not"):
            openai.open_model(folder)
    index.write_bytes(content.replace(b"\0crc.", b"\1crc."))
    with pytest.raises(WeightsError, match="is compressed"):
        openai.open_model(folder)
    index.write_bytes(bytes(2 << 20))
    with pytest.raises(WeightsError, match="larger than 1 MB"):
        openai.open_model(folder)
    index.unlink()
    with pytest.raises(FileError, match=r"cannot read .*ckpt\.index"):
        openai.open_model(folder)


def test_what_does_not_fit(folder: Path) -> None:
    state = openai_state()
    state["model/ln_f/g"] = torch.ones(31)
    write(folder, state)
    with pytest.raises(WeightsError, match=r"model/ln_f/g has the shape \(31,\).*\(32,\)"):
        check(openai.open_model(folder))
    (folder / "hparams.json").write_text('{"n_vocab": 97, "n_ctxt": 80}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hparams\.json: .*'n_ctxt'.*did you mean 'n_ctx'"):
        openai.open_model(folder)


def test_what_would_never_end(folder: Path) -> None:
    index = folder / "model.ckpt.index"
    for entries, message in (
        ([(b"a" * n, b"") for n in range(300)], "a name has more than 256 bytes"),
        ([(b"a", field(1, 1) + field(2, 9 * field(2, field(1, 1))))], "has 9 dimensions"),
    ):
        write_table(index, entries)
        with pytest.raises(WeightsError, match=message):
            read_index(index)


SMALL = [(b"", b"\x08\1"), (b"a/b", field(1, 1) + field(2, field(2, field(1, 4))) + field(5, 16))]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3)), max_size=4))
def test_damaged_bytes(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "small.index"
    path.with_suffix(".data-00000-of-00001").write_bytes(bytes(16))
    write_table(path, SMALL)
    assert read_index(path)["a/b"].shape == (4,)
    content = bytearray(path.read_bytes())
    for place, new in changes:
        content[place : place + len(new)] = new
    path.write_bytes(content)
    try:
        for tensor in read_index(path).values():
            assert not tensor.read().any()
    except WeightsError:
        pass


@pytest.mark.network
def test_a_file_that_tensorflow_wrote(tmp_path: Path) -> None:
    """basic-pitch has one model in TensorFlow's format and in ONNX, whose tensors are plain bytes;
    there each kernel (rows, columns, in, out) is (out, in, rows, columns)."""
    root = "basic_pitch/saved_models/icassp_2022/nmp"
    with zipfile.ZipFile(wheel("basic-pitch", "0.4.0")) as archive:
        onnx = archive.read(f"{root}.onnx")
        for name in ("variables.index", "variables.data-00000-of-00001"):
            (tmp_path / name).write_bytes(archive.read(f"{root}/variables/{name}"))
    stored = read_index(tmp_path / "variables.index")
    for layer, shape in ((3, (5, 5, 8, 1)), (4, (7, 7, 1, 32))):
        name = f"layer_with_weights-{layer}/%s/.ATTRIBUTES/VARIABLE_VALUE"
        kernel, bias = stored[name % "kernel"].read(), stored[name % "bias"].read()
        assert kernel.shape == shape
        assert kernel.permute(3, 2, 0, 1).contiguous().numpy().tobytes() in onnx
        assert bias.numpy().tobytes() in onnx
