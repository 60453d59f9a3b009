"""nanoGPT's ckpt.pt against its forward pass, said once more here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from gpt2llama.errors import ConfigError, WeightsError
from gpt2llama.weights import load, open_model
from gpt2llama.weights.build import state_of
from gpt2llama.weights.nanogpt import state_from_nanogpt, state_to_nanogpt

ARGS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 64}
IDS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


def sharp_state(bias: bool) -> dict[str, Tensor]:
    d = ARGS["n_embd"]
    shapes = {"attn.c_attn": (3 * d, d), "attn.c_proj": (d, d), "mlp.c_fc": (4 * d, d)}
    shapes |= {"mlp.c_proj": (d, 4 * d), "ln_1": (d,), "ln_2": (d,)}
    full = {f"h.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    full |= {"wte": (ARGS["vocab_size"], d), "wpe": (ARGS["block_size"], d), "ln_f": (d,)}
    rng, state = torch.Generator().manual_seed(0), {}
    for name, shape in full.items():
        noise = torch.randn(shape, generator=rng)
        if len(shape) == 1:
            noise = 1 + 0.3 * noise
        elif name.startswith("h."):
            noise /= shape[1] ** 0.5
        if name.endswith("c_attn"):
            noise[:d] *= 6
        state[f"transformer.{name}.weight"] = noise
        if bias and name.startswith(("h.", "ln_f")):
            state[f"transformer.{name}.bias"] = 0.3 * torch.randn(shape[0], generator=rng)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def nanogpt(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits (B, T, V)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    w = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    for i in range(ARGS["n_layer"]):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(x.shape[-1], 2)
        heads = [
            ((a @ b.mT) / a.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1) @ c
            for a, b, c in zip(*(t.chunk(ARGS["n_head"], 2) for t in (q, k, v)), strict=True)
        ]
        x = x + linear(torch.cat(heads, 2), f"h.{i}.attn.c_proj")
        x = x + linear(
            F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj"
        )
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def write(path: Path, model: Any, **args: Any) -> Path:
    """As nanoGPT's train.py saves it."""
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(9)}}
    groups = [{"lr": 6e-4, "betas": (0.9, 0.95), "fused": None, "params": [0]}]
    checkpoint = {
        "model": model,
        "optimizer": {"state": moments, "param_groups": groups},
        "model_args": ARGS | args,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.4697),
        "config": {"out_dir": "out", "compile": True, "init_from": "scratch"},
    }
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_logits(bias: bool, prefix: str, tmp_path: Path) -> None:
    state = sharp_state(bias)
    full = {prefix + name: tensor for name, tensor in state.items()}
    path = write(tmp_path / "ckpt.pt", full, bias=bias, dropout=0.2)
    model, tokenizer = load(path)
    assert tokenizer is None
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not [name for name in state_of(model) if name.endswith("bias")] or bias
    # With AVX-512 the two sum in other orders: one of 3,072 logits up to 5 is off by 1.3e-5.
    assert_close(model(IDS), nanogpt(state, IDS), rtol=1e-5, atol=2e-5)
    assert_close(load(tmp_path)[0](IDS), model(IDS), rtol=0, atol=0)


def test_opening_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt.pt", sharp_state(bias=True))
    code = "import sys; from gpt2llama.weights import open_model; open_model(sys.argv[1])"
    code += "\nassert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=True)


def test_from_before_there_were_switches(tmp_path: Path) -> None:
    """No `bias` in model_args, and the causal mask saved as a buffer."""
    state = sharp_state(bias=True)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
    assert_close(load(write(tmp_path / "ckpt.pt", state | masks))[0](IDS), nanogpt(state, IDS))


def test_dict_to_dict_and_back(tmp_path: Path) -> None:
    state = sharp_state(bias=True)
    state.pop("lm_head.weight")
    back = state_to_nanogpt(state_from_nanogpt(state))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert_close(back[name], tensor, rtol=0, atol=0)


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    state = sharp_state(bias=False) | {"lm_head.weight": torch.randn(64, 32)}
    path = write(tmp_path / "ckpt.pt", state, bias=False)
    with pytest.warns(UserWarning, match="untied"):
        model, _ = load(path)
    assert_close(model(IDS), nanogpt(state, IDS))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"n_kv_head": 2}, "'n_kv_head' is not known here; did you mean 'n_head'.*ignore_keys"),
        ({"block_size": None}, "ModelArgs lacks block_size"),
        ({"n_embd": "32"}, "n_embd must be a whole number above 0"),
        ({"bias": 1}, "bias must be true or false"),
        ({"n_head": 3}, "n_heads must divide d_model"),
    ],
)
def test_model_args_that_cannot_be(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt.pt", sharp_state(bias=True), **args)
    with pytest.raises(ConfigError, match=rf"ckpt\.pt: .*{message}"):
        open_model(path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "'model' in .*ckpt.pt holds a NoneType"),
        ({"transformer.wte.weight": [1.0]}, "holds a list as 'transformer.wte.weight'"),
        ({3: torch.ones(1)}, "as 3"),
    ],
)
def test_a_model_that_is_none(model: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt.pt", model)
    with pytest.raises(WeightsError, match=message):
        open_model(path)


def test_tensors_are_checked(tmp_path: Path) -> None:
    state = sharp_state(bias=True)
    state["transformer.h.0.mlp.c_fc.weight"] = torch.ones(32, 128)
    path = write(tmp_path / "ckpt.pt", state)
    with pytest.raises(WeightsError, match=r"c_fc\.weight has the shape \(32, 128\).*\(128, 32\)"):
        load(path)


def test_another_kind_of_file(tmp_path: Path) -> None:
    for content in (torch.ones(3), [1, 2], {"model": {}}, {"model_args": {"n_layer": [2]}}):
        torch.save(content, tmp_path / "ckpt.pt")
        with pytest.raises(WeightsError, match="'model_args', as nanoGPT's do"):
            open_model(tmp_path / "ckpt.pt")
