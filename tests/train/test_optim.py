from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpt2llama.machine import bf16_if_native
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.optim import Muon, make_optimizers, orthogonalise

SHAPES = [(8, 24), (24, 8), (16, 16), (8, 24), (16, 16)]  # wide, tall, square, and two again


def model(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    base: dict[str, Any] = {
        "vocab_size": 30, "max_seq_len": 8, "n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24,
        "norm": "layernorm", "position": "learned", "qkv_bias": True, "mlp_bias": True,
    }  # fmt: skip
    return Transformer(ModelConfig(**base | switches))


@pytest.mark.parametrize("momentum", [0.95, 0.8])
def test_muon_equals_torch(momentum: float) -> None:
    rng = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.1, weight_decay=0.1, momentum=momentum, dtype=torch.bfloat16)
    b = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.1, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(6):
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(p.shape, generator=rng)
            p.grad, q.grad = (None, None) if (step, i) == (2, 1) else (grad, grad.clone())
        a.step()
        b.step()  # type: ignore[no-untyped-call]  # torch's
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q)


def test_orthogonalise_turns_singular_values_to_about_one() -> None:
    x = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0)) * 1e-3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    turned = u.mT @ orthogonalise(x) @ v.mT  # the same singular vectors: only a diagonal is left
    values = turned.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-4)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (orthogonalise(torch.zeros(1, 2, 3)) == 0).all()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_acts_on_matrices_only(optimizer: Any) -> None:
    network = model()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.5)
            p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    cfg = TrainConfig(optimizer=optimizer, lr=0.1, weight_decay=0.2)
    for made in make_optimizers(network, cfg):
        made.step()
    for name, p in network.named_parameters():
        shrunk = before[name] * (1 - 0.1 * 0.2) if p.dim() == 2 else before[name]
        torch.testing.assert_close(p.detach(), shrunk, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_who_learns_what(optimizer: Any, tied: bool) -> None:
    network = model(tie_embeddings=tied)
    network.get_parameter("layers.0.mlp.up_proj.weight").requires_grad_(False)
    made = make_optimizers(network, TrainConfig(optimizer=optimizer))
    names = {p: name for name, p in network.named_parameters()}
    owned = {type(o): [names[p] for g in o.param_groups for p in g["params"]] for o in made}
    everyone = sorted(name for owner in owned.values() for name in owner)
    assert everyone == sorted(name for p, name in names.items() if p.requires_grad)
    hidden = {name for p, name in names.items() if name[:7] == "layers." and p.dim() == 2}
    hidden.remove("layers.0.mlp.up_proj.weight")
    assert set(owned.get(Muon, [])) == (hidden if optimizer == "muon" else set())
    assert "embed_tokens.weight" in owned[torch.optim.AdamW]


def test_betas_reach_adamw() -> None:
    (made,) = make_optimizers(model(), TrainConfig(beta1=0.8, beta2=0.9))
    assert made.defaults["betas"] == (0.8, 0.9)


def test_momentum_reaches_muon() -> None:
    muon, _ = make_optimizers(model(), TrainConfig(optimizer="muon", momentum=0.8))
    assert muon.defaults["momentum"] == 0.8


def test_bf16_only_where_the_device_has_it() -> None:
    has = torch.cpu.get_capabilities()
    fast = has.get("avx512_bf16") or has.get("amx_bf16")
    assert bf16_if_native(torch.device("cpu")) == (torch.bfloat16 if fast else torch.float32)
    assert bf16_if_native(torch.device("meta")) == torch.float32
