"""The report says of every tensor what loading made of it: held to the tensors themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2llama.errors import WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import preset
from gpt2llama.model.transformer import Transformer
from gpt2llama.weights import load, open_model, save
from gpt2llama.weights.build import state_of
from gpt2llama.weights.meta import state_to_meta
from gpt2llama.weights.nanogpt import state_to_nanogpt
from gpt2llama.weights.opened import PAIRS, SPLIT, TRANSPOSED
from gpt2llama.weights.report import report

SIZES = {"vocab_size": 40, "max_seq_len": 16, "n_layers": 2, "n_heads": 6, "d_model": 48}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2, d_ff=128, tie_embeddings=False)  # type: ignore[arg-type]
GPT2 = preset("gpt2").replace(**SIZES, d_ff=192, dropout=0.0)


def make(cfg: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(cfg)


def saved(format: str, cfg: ModelConfig) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / ("m.gguf" if format == "gguf" else "m")
        save(make(cfg), None, path, format)
        return path

    return write


def meta(folder: Path) -> Path:
    params = {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 40}
    params |= {"multiple_of": 32, "max_seq_len": 16}
    (folder / "params.json").write_text(json.dumps(params), encoding="utf-8")
    state = state_to_meta(state_of(make(LLAMA)), head_size=8)
    for i in range(2):
        part = {
            k: t.chunk(2, int(k.endswith(("wo.weight", "w2.weight"))))[i].clone()
            if t.dim() > 1
            else t
            for k, t in state.items()
        }
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    return folder


def nanogpt(folder: Path) -> Path:
    args = {"n_layer": 2, "n_head": 6, "n_embd": 48, "block_size": 16, "vocab_size": 40}
    state = state_to_nanogpt(state_of(make(GPT2.replace(activation="gelu"))))
    torch.save({"model": state, "model_args": args}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


WRITERS = {
    "hf llama": saved("hf", LLAMA),
    "hf gpt2": saved("hf", GPT2),
    "gguf llama": saved("gguf", LLAMA),
    "gguf gpt2": saved("gguf", GPT2),
    "gpt2llama": saved("gpt2llama", LLAMA),
    "meta": meta,
    "nanogpt": nanogpt,
}
CHANGES = {
    "hf llama": set(),
    "hf gpt2": {f"{TRANSPOSED}, {SPLIT}", TRANSPOSED, SPLIT, "tied"},
    "gguf llama": {PAIRS},
    "gguf gpt2": {SPLIT, "tied"},
    "gpt2llama": set(),
    "meta": {
        f"rows of 2 shards joined, {PAIRS}",
        "rows of 2 shards joined",
        "columns of 2 shards joined",
        "the same in all 2 shards",
    },
    "nanogpt": {SPLIT, "tied"},
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_it_says_is_what_was_done(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path)
    opened, lines = open_model(path), report(open_model(path))
    model = load(path)[0].state_dict()
    assert {line.change for line in lines} - {""} == CHANGES[kind]
    assert sorted(name for line in lines for name in line.ours) == sorted(model)
    assert [line.shape for line in lines] == [info.shape for info in opened.headers.values()]
    for name, line in zip(opened.headers, lines, strict=True):
        tensor = opened.read(name)
        if TRANSPOSED in line.change:
            tensor = tensor.T
        if line.change.endswith(PAIRS):
            tensor = halves_of(tensor)
        ours = [model[name] for name in line.ours]
        parts = tensor.chunk(3) if SPLIT in line.change else [tensor] * len(ours)
        assert all(torch.equal(a, b) for a, b in zip(ours, parts, strict=True))


def halves_of(tensor: Tensor) -> Tensor:
    """Rows 0, 2, 4 … of each head of 8, then 1, 3, 5 …"""
    order = [head + i for head in range(0, len(tensor), 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return tensor[order]


def test_a_head_that_repeats_the_table(tmp_path: Path) -> None:
    path = saved("hf", LLAMA)(tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8"
    )
    by_name = {line.name: line for line in report(open_model(path))}  # another head: kept
    assert by_name["lm_head.weight"].ours == ("lm_head.weight",)
    assert by_name["model.embed_tokens.weight"].change == ""
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, path / "model.safetensors")
    by_name = {line.name: line for line in report(open_model(path))}
    assert by_name["lm_head.weight"].ours == ()
    assert "left out" in by_name["lm_head.weight"].change
    assert by_name["model.embed_tokens.weight"].ours == ("embed_tokens.weight", "lm_head.weight")


def test_the_shard_is_named(tmp_path: Path) -> None:
    path = saved("hf", LLAMA)(tmp_path)
    assert {line.file for line in report(open_model(path))} == {str(path / "model.safetensors")}


def test_a_file_that_cannot_load(tmp_path: Path) -> None:
    path = saved("hf", GPT2)(tmp_path)
    state = load_file(path / "model.safetensors")
    state["transformer.h.0.attn.c_attn.weight"] = torch.ones(7)
    save_file(state, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"c_attn\.weight has the shape \(7,\)"):
        report(open_model(path))
