"""Every quantised type against ggml's own Python, on random blocks and on a real file."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from gpt2llama.assets import fetch
from gpt2llama.errors import AssetError, MissingExtraError, WeightsError
from gpt2llama.weights import gguf_blocks
from gpt2llama.weights.gguf_blocks import BY_NAME, KINDS, Kind, encode
from gpt2llama.weights.gguf_file import Stored, read_header, read_tensor, write_file

QUANTISED = [kind for kind in KINDS.values() if kind.dtype is None]


def blocks_of(kind: Kind, count: int) -> np.ndarray:
    """Random bytes; wherever a scale may stand, a finite fp16 number."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, kind.size), np.uint8)
    scales = np.random.default_rng(1).normal(size=(count, kind.size // 2)).astype(np.float16)
    finite = scales.view(np.uint8)
    places = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64]}
    for at in places.get(kind.name, [0, 2]):
        blocks[:, at : at + 2] = finite[:, at : at + 2]
    if kind.name == "IQ1_M":  # its scale is spread over the top bits of four numbers
        blocks[:, [49, 51, 53, 55]] &= 0x3F
    return blocks


def decoded(kind: Kind, blocks: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.write(blocks.tobytes())
        file.seek(0)
        found = gguf_blocks.decode(kind, file, len(blocks) * kind.block)
    assert found is not None
    return found


def test_sizes_are_those_of_ggml() -> None:
    for kind in KINDS.values():
        known = GGMLQuantizationType(kind.id)
        assert (kind.name, (kind.block, kind.size)) == (known.name, gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_dequantised_as_by_ggml(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 7 * kind.block)
    blocks = blocks_of(kind, 50)
    want = gguf.quants.dequantize(blocks, GGMLQuantizationType(kind.id))
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(decoded(kind, blocks), want.reshape(-1))


def sharp_rows() -> torch.Tensor:
    """Weights at which rounding is a close call: ties, one large among small, ±, zeros, tiny."""
    random = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    ties = torch.arange(-32, 32) / 2.0
    lone = torch.zeros(64)
    lone[5], lone[40] = -3.0, 3.0
    nearly = torch.full((64,), 0.49999997)
    nearly[::32] = 127.0
    return torch.cat(
        [random, torch.stack([ties, -ties, lone, nearly, torch.zeros(64)]), random / 1e6]
    )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_quantised_as_by_ggml(name: str) -> None:
    rows = sharp_rows()
    want = gguf.quants.quantize(rows.numpy(), GGMLQuantizationType[name])
    got = np.concatenate(list(encode(BY_NAME[name], rows, "x")))
    np.testing.assert_array_equal(got, want.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("weight", [7e4, float("nan"), float("-inf")])
def test_what_fp16_cannot_hold_is_refused(name: str, weight: float) -> None:
    rows = torch.zeros(3, 32)
    rows[1, 4] = weight
    with pytest.raises(WeightsError, match=f"blk.0.x.*{name}.*F32 or BF16"):
        list(encode(BY_NAME[name], rows, "blk.0.x"))


def test_k_quants_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.gguf"
    piece = blocks_of(BY_NAME["Q4_K"], 1).reshape(-1)
    write_file(path, {}, {"x": Stored(BY_NAME["Q4_K"], (1, 256))}, [("x", piece)])
    _, tensors = read_header(path)
    assert read_tensor(path, "x", tensors["x"]).shape == (1, 256)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"gpt2llama\[gguf\]"):
        read_tensor(path, "x", tensors["x"])


class WithoutWords(gguf.GGUFReader):
    """gguf's reader takes ten seconds for a vocabulary: this one steps over lists of strings."""

    def _get_field_parts(self, start: int, kind: int) -> Any:
        at = start + 12
        if kind != GGUFValueType.ARRAY or self._get(start, np.uint32)[0] != GGUFValueType.STRING:
            return super()._get_field_parts(start, kind)
        for _ in range(int(self._get(start + 4, np.uint64)[0])):
            at += 8 + int.from_bytes(self.data[at : at + 8].tobytes(), "little")
        return at - start, [], [], [GGUFValueType.ARRAY]


@pytest.mark.network
def test_real_tensors() -> None:
    try:
        path = fetch("smollm2-135m", timeout=120)
    except AssetError as error:
        pytest.skip(f"{error}; gpt2llama fetch smollm2-135m")
    _, ours = read_header(path)
    theirs = {tensor.name: tensor for tensor in WithoutWords(path).tensors}
    assert list(ours) == list(theirs)
    for name in ("token_embd.weight", "blk.3.attn_norm.weight", "blk.29.ffn_down.weight"):
        first = slice(64)  # rows, or numbers of a norm: gguf takes its time
        want = gguf.quants.dequantize(theirs[name].data[first], theirs[name].tensor_type)
        part = replace(ours[name], shape=(64, *ours[name].shape[1:]))
        np.testing.assert_array_equal(read_tensor(path, name, part).numpy(), want)
