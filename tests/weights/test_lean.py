"""Loading holds the weights once: the peak of a process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpt2llama.model.config import ModelConfig
from gpt2llama.weights.build import on_meta, state_of
from gpt2llama.weights.hf import config_to_hf, state_to_hf
from gpt2llama.weights.meta import state_to_meta

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

# 24M parameters; the largest tensor is 9% of them, as in Llama 3.2.
CFG = ModelConfig(
    vocab_size=4096, max_seq_len=4096, n_layers=5, n_heads=8, n_kv_heads=4, d_model=512, d_ff=2048,
    tie_embeddings=False,
)  # fmt: skip
MB = 1 << 20

# Not ru_maxrss: it starts with the peak of the process that started this one.
LOAD = """
import sys, torch
from gpt2llama.weights import build, load
def peak():
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
before = peak()
model, _ = load(sys.argv[1], dtype=torch.float32)
parameters = list(model.parameters())
[p.sum() for p in parameters]  # a mapped weight counts once it is read
print(before, peak(), sum(p.nbytes for p in parameters))
"""


def ones(dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: torch.ones(t.shape, dtype=dtype) for k, t in state_of(on_meta(CFG)).items()}


def write_hf(folder: Path, dtype: torch.dtype, shards: int) -> None:
    (folder / "config.json").write_text(json.dumps(config_to_hf(CFG)), encoding="utf-8")
    state = state_to_hf(ones(dtype), "llama")
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    place = {name: f"{i % shards}.safetensors" for i, name in enumerate(state)}
    for file in set(place.values()):
        save_file({k: t for k, t in state.items() if place[k] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}), encoding="utf-8")


def write_meta(folder: Path, dtype: torch.dtype, shards: int) -> None:
    params = {"dim": 512, "n_layers": 5, "n_heads": 8, "n_kv_heads": 4, "vocab_size": -1}
    params["ffn_dim_multiplier"] = 1.5
    (folder / "params.json").write_text(json.dumps(params), encoding="utf-8")
    state = state_to_meta(ones(dtype), CFG.head_size)
    state["output.weight"] *= 2  # else it would be tied
    cut = {k: int(k.endswith(("wo.weight", "w2.weight"))) for k, t in state.items() if t.dim() > 1}
    for i in range(shards):
        part = {k: t.chunk(shards, cut[k])[i].clone() if k in cut else t for k, t in state.items()}
        torch.save(part, folder / f"consolidated.{i:02d}.pth")


CASES = pytest.mark.parametrize(
    ("dtype", "shards"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=["fp32", "bf16-sharded"]
)


@CASES
def test_hugging_face(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    write_hf(tmp_path, dtype, shards)
    check_peak(tmp_path)


@CASES
def test_meta(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    write_meta(tmp_path, dtype, shards)
    check_peak(tmp_path)


def check_peak(folder: Path) -> None:
    """At most 1.25 of the weights kept, and 400 MB for Python and torch: those are measured here,
    so that half a copy too many shows in 90 MB of weights."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    before, peak, kept = map(int, done.stdout.split())
    assert kept > 80 * MB
    assert before < 400 * MB
    assert peak - before <= 1.25 * kept + 10 * MB
