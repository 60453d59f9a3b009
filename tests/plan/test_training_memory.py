"""Training memory against what autograd keeps, what PyTorch allocates, what the process holds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt2llama.data.batches import Batch
from gpt2llama.errors import InputError
from gpt2llama.machine import bf16_if_native
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import preset, presets
from gpt2llama.model.transformer import Transformer
from gpt2llama.plan import activations, parameters, training_memory
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.step import Step, summed_loss

SMALL = preset("zh-3m").replace(
    vocab_size=101, max_seq_len=400, n_layers=2, n_heads=4, d_model=32, d_ff=48
)


def random_batch(cfg: ModelConfig, rows: int, steps: int) -> Batch:
    return Batch(*torch.randint(cfg.vocab_size, (2, rows, steps)))


def saved_bytes(cfg: ModelConfig, rows: int, steps: int) -> int:
    """Of all storages that the graph of a loss keeps, weights apart, each once."""
    model = Transformer(cfg)
    Step(model, TrainConfig(dtype="fp32", device="cpu"), compiled=False)  # its own dropout
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids, targets = (torch.randint(cfg.vocab_size, (rows, steps)) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = summed_loss(model.train(), ids, targets)
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    position = draw(st.sampled_from(["learned", "sinusoidal", "rope", "none"]))
    values: dict[str, Any] = {
        name: draw(st.booleans())
        for name in (
            *("norm_bias", "gated_mlp", "qkv_bias", "out_bias", "mlp_bias"),
            *("tie_embeddings", "embed_scale", "qk_norm"),
        )
    }
    values |= {
        "n_layers": draw(st.integers(1, 3)),
        "n_kv_heads": draw(st.sampled_from([None, 1, 2])),
        "head_dim": draw(st.sampled_from([None, 16])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "norm_placement": draw(st.sampled_from(["pre", "post"])),
        "activation": draw(st.sampled_from(["relu", "relu2", "gelu", "gelu_tanh", "silu"])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "sliding_window": draw(st.sampled_from([None, 8, 400])),
        "logit_softcap": draw(st.sampled_from([None, 30.0])),
    }
    return SMALL.replace(position=position, **values)


@settings(max_examples=40)
@given(cfg=configs(), rows=st.sampled_from([1, 2, 3]), steps=st.sampled_from([2, 24, 256, 300]))
def test_activations_are_what_autograd_saves(cfg: ModelConfig, rows: int, steps: int) -> None:
    """To the byte, but for single numbers: a drawn one for each dropout, and the loss's weight."""
    more = saved_bytes(cfg, rows, steps) - activations(cfg, steps, rows).total
    assert 0 <= more <= 4 * (2 + 4 * cfg.n_layers)


Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")


def allocated_peak(
    cfg: ModelConfig, rows: int, steps: int, accumulate: int, optimizer: Optimizer
) -> int:
    """Bytes on top of weights, optimiser state and batches, by the events of PyTorch's allocator
    in the second step."""
    from torch.profiler import ProfilerActivity, profile

    train = TrainConfig(dtype="fp32", device="cpu", optimizer=optimizer)
    step = Step(Transformer(cfg), train, compiled=False)
    batches = [random_batch(cfg, rows, steps) for _ in range(accumulate)]
    step(batches, 1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(batches, 1e-3)
    found = profiled.profiler
    assert found is not None
    assert found.kineto_results is not None
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


STEPS: list[tuple[int, int, int, Optimizer]] = [  # rows, tokens, accumulate, optimiser
    (rows, steps, accumulate, optimizer)
    for rows, steps in ((1, 16), (8, 64))
    for accumulate, optimizer in ((1, OPTIMIZERS[0]), (2, OPTIMIZERS[0]), (1, OPTIMIZERS[1]))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_what_pytorch_allocates(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Whatever is the fullest moment, by the shape of the model and of the batch; with Muon's
    copies in bf16, too, as a processor has them that multiplies in it."""
    monkeypatch.setattr("gpt2llama.train.optim.bf16_if_native", lambda device: dtype)
    bf16 = dtype == torch.bfloat16
    sizes = {"n_layers": 3, "d_model": 64, "n_heads": 4, "d_ff": 160}
    base = preset("zh-3m").replace(**sizes)
    gpt2 = {"gated_mlp": False, "activation": "gelu", "norm": "layernorm", "position": "learned"}
    moments = set()
    for cfg in (
        base.replace(vocab_size=300),
        base.replace(vocab_size=3000, **gpt2),
        base.replace(vocab_size=3000, tie_embeddings=False),
        base.replace(vocab_size=50, tie_embeddings=False, dropout=0.1),
        base.replace(vocab_size=50, n_kv_heads=None, **gpt2),
        base.replace(vocab_size=50, n_kv_heads=1, d_ff=66, n_layers=9),  # a large stack, then less
    ):
        for rows, steps, accumulate, optimizer in STEPS:
            if bf16 and optimizer != "muon":
                continue
            plan = training_memory(cfg, steps, rows, accumulate, optimizer, bf16)
            moments.add(plan.moment)
            real = allocated_peak(cfg, rows, steps, accumulate, optimizer)
            real += plan.weights + plan.optimizer
            assert plan.peak == pytest.approx(real, rel=0.05), (cfg, rows, accumulate, optimizer)
    if not bf16:
        assert moments == {"loss", "head", "last layer", "first layer", "embedding", "update"}
    assert "update" in moments


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_the_optimizers(optimizer: Optimizer) -> None:
    train = TrainConfig(dtype="fp32", device="cpu", optimizer=optimizer)
    step = Step(Transformer(SMALL), train, compiled=False)
    step([random_batch(SMALL, 1, 8)], 1e-3)
    held = [
        value
        for each in step.optimizers
        for state in each.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0  # AdamW counts its steps
    ]
    plan = training_memory(SMALL, 8, optimizer=optimizer)
    assert plan.optimizer == sum(tensor.nbytes for tensor in held)
    assert plan.weights == 4 * parameters(SMALL)["total"]


IN_A_PROCESS = """
import ctypes, sys, torch
from gpt2llama import ModelConfig, Transformer, preset
from gpt2llama.data.batches import Batch
from gpt2llama.plan import training_memory
from gpt2llama.train import step as steps
from gpt2llama.train.config import TrainConfig

def status(key):
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def train(cfg, rows, length, optimizer):
    how = TrainConfig(dtype="fp32", device="cpu", optimizer=optimizer)
    step = steps.Step(Transformer(cfg), how, compiled=False)
    ids = torch.randint(cfg.vocab_size, (2, rows, length))
    for _ in range(3):
        step([Batch(*ids)], 1e-3)

torch.set_num_threads(1)
# The C library maps every tensor apart, so that what is freed is given back.
steps.keep_freed_memory = lambda: None
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
small = dict(n_layers=1, n_heads=2, n_kv_heads=2, d_model=8, d_ff=8, vocab_size=50)
train(preset("zh-3m").replace(**small), 1, 8, OPTIMIZER)  # loads what PyTorch loads when used
before = status("VmRSS")
train(preset("zh-3m").replace(**CHANGES), ROWS, 128, OPTIMIZER)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; its C library is told how to map")
@pytest.mark.parametrize(
    ("changes", "rows", "optimizer"),
    [
        ({}, 16, "adamw"),
        ({"n_layers": 12, "tie_embeddings": False, "vocab_size": 16384}, 1, "muon"),
    ],
)
def test_peak_is_what_the_process_holds(
    changes: dict[str, Any], rows: int, optimizer: Optimizer
) -> None:
    names = {"CHANGES": changes, "ROWS": rows, "OPTIMIZER": optimizer}
    script = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + IN_A_PROCESS
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    bf16 = bf16_if_native(torch.device("cpu")) == torch.bfloat16
    cfg = preset("zh-3m").replace(**changes)
    plan = training_memory(cfg, 128, rows, optimizer=optimizer, bf16=bf16)
    assert plan.peak > 200e6
    assert int(ran.stdout) == pytest.approx(plan.peak, rel=0.15)


@pytest.mark.parametrize("name", presets())
def test_more_of_anything_takes_no_less(name: str) -> None:
    cfg = preset(name)
    plan = training_memory(cfg, 127, 2)
    for other in (
        training_memory(cfg, 128, 2),
        training_memory(cfg, 127, 3),
        training_memory(cfg, 127, 2, accumulate=2),
        training_memory(cfg.replace(n_layers=cfg.n_layers + 1), 127, 2),
    ):
        assert other.peak >= plan.peak
    assert plan.peak >= 4 * plan.weights  # weights, gradients, two moments


def test_refusals() -> None:
    with pytest.raises(InputError, match="batch must be at least 1"):
        training_memory(SMALL, 8, 0)
    with pytest.raises(InputError, match="max_seq_len=1024"):
        training_memory(preset("gpt2"), 1025)
    with pytest.raises(InputError, match="accumulate must be at least 1"):
        training_memory(SMALL, 8, accumulate=0)
