"""What calibration sees: the inputs that the model's own forward pass hands to its matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharp import make, tokens
from torch import Tensor, nn

from gpt2llama.errors import InputError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.calibration import blocks
from gpt2llama.quant.linear import round_activations
from gpt2llama.quant.scheme import QuantScheme

CFG = ModelConfig(
    vocab_size=23, max_seq_len=12, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=96
)
FLOAT = QuantScheme(bits=4, group=32, activations="float")
TEXTS = [tokens(3, 12), tokens(2, 5, seed=1)]


def inputs_of(model: Transformer, name: str) -> Tensor:
    """(tokens, K), from whole forward passes."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments[0].flatten(0, 1))

    with model.get_submodule(name).register_forward_pre_hook(keep):
        for ids in TEXTS:
            model(ids)
    return torch.cat(seen)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("gated", [True, False])
def test_each_matrix_as_the_model_now_is(tied: bool, activations: Any, gated: bool) -> None:
    """Every block is changed after it was seen: the next one's inputs come from what it became."""
    # fp64: batches of other shapes differ in their last bits, and a bit turns a number round.
    model = make(CFG.replace(tie_embeddings=tied, gated_mlp=gated), dtype=torch.float64)
    how, order = FLOAT.replace(activations=activations), []
    for at, module, found in blocks(model, TEXTS, how):
        order.append(at)
        for name, seen in found.items():
            x = inputs_of(model, f"{at}.{name}" if at else name)
            x = round_activations(x) if activations == "int8" else x
            torch.testing.assert_close(seen.gram.to(x.dtype), x.T @ x, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(seen.magnitude.to(x.dtype), x.abs().mean(0))
        linear = {name for name, inner in module.named_modules() if isinstance(inner, nn.Linear)}
        assert found.keys() == (linear if at else {"lm_head"})
        for parameter in module.parameters() if at else [model.lm_head.weight]:
            parameter.mul_(0.7)
    assert order == (["", "layers.0", "layers.1"] if tied else ["layers.0", "layers.1", ""])


def test_the_model_is_untouched_and_the_work_is_watched() -> None:
    model = make(CFG, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched: list[int] = []

    def watch(work: Any, count: int) -> Any:
        watched.append(count)
        return work

    for method in ("rtn", "gptq", "awq"):
        quantise(model, FLOAT.replace(method=method), TEXTS, watch)
    assert watched == [15, 3, 3]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_cannot_calibrate(method: Any) -> None:
    model, how = make(CFG, dtype=torch.float32), FLOAT.replace(method=method)
    for lacking in (None, []):
        with pytest.raises(InputError, match="needs calibration"):
            quantise(model, how, lacking)
    with pytest.raises(InputError, match="outside the model's vocabulary of 23"):
        quantise(model, how, [torch.tensor([[1, 23]])])
    model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(WeightsError, match="calibration are not finite"):
        quantise(model, how, TEXTS)
