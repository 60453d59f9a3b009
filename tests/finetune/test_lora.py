"""Adapters: what they add, that nothing else learns, that a stopped run goes on, and the merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sharp import CONTEXT, SIZES, configs, make, tokens
from torch import Tensor, nn
from torch.testing import assert_close

from gpt2llama.data.batches import Batch
from gpt2llama.errors import ConfigError, InputError, WeightsError
from gpt2llama.finetune.lora import (
    AdapterStore,
    LoraConfig,
    LoraLinear,
    adapters,
    add_lora,
    merge,
    merged,
    without,
)
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.kv_cache import KVCache
from gpt2llama.model.transformer import Transformer
from gpt2llama.native import decoder
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.scheme import SCHEMES
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.run_folder import RunFolder
from gpt2llama.train.trainer import Trainer
from gpt2llama.weights import load, save

LLAMA = ModelConfig(**SIZES, n_kv_heads=2)
GPT2 = ModelConfig(
    **SIZES, norm="layernorm", position="learned", activation="gelu_tanh", gated_mlp=False,
    qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]


@torch.no_grad()
def draw(model: nn.Module, size: float = 0.3) -> None:
    """B, which would be zero."""
    random = torch.Generator().manual_seed(1)
    for layer in adapters(model).values():
        layer.lora_B.weight.normal_(0, size, generator=random)


@settings(max_examples=15)
@given(configs(), st.sets(st.sampled_from(LEAVES), min_size=1), st.integers(1, 4))
def test_the_sum_by_hand_for_every_switch(cfg: ModelConfig, leaves: set[str], rank: int) -> None:
    """A fresh adapter adds nothing, to the bit; a drawn one what W + alpha / rank · B A adds."""
    model, ids = make(cfg), tokens(2, CONTEXT)
    before = model(ids)
    add_lora(model, LoraConfig(rank=rank, alpha=3.0, modules=" ".join(sorted(leaves))))
    assert torch.equal(model(ids), before)

    draw(model)
    by_hand = Transformer(cfg.replace(tie_embeddings=False)).double().eval()
    state = {k.replace(".base.", "."): t for k, t in model.state_dict().items()}
    for name, layer in adapters(model).items():
        assert name.rpartition(".")[2] in leaves
        delta = 3 / rank * layer.lora_B.weight @ layer.lora_A.weight
        state[f"{name}.weight"] = state[f"{name}.weight"] + delta
    by_hand.load_state_dict({k: t for k, t in state.items() if ".lora_" not in k})
    want = by_hand(ids)
    assert_close(model(ids), want)

    copy = merged(model)
    assert_close(copy(ids), want)
    assert len(adapters(model)) > 0 == len(adapters(copy))
    assert copy.embed_tokens.weight is model.embed_tokens.weight
    assert not any(p.requires_grad for p in copy.parameters())
    tied_head = "lm_head" in leaves and cfg.tie_embeddings
    assert len(merge(model)) == tied_head
    assert model.config == cfg.replace(tie_embeddings=cfg.tie_embeddings and not tied_head)
    assert {type(m) for n, m in model.named_modules() if n.endswith(tuple(leaves))} == {nn.Linear}
    assert all(p.requires_grad for p in model.parameters())
    assert_close(model(ids), want)


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_without_adapters_it_is_the_model_as_it_was_in_the_same_memory(cfg: ModelConfig) -> None:
    model, ids = make(cfg), tokens(2, CONTEXT)
    before = model(ids)
    add_lora(model, LoraConfig(rank=2, modules="all-linear"))
    draw(model)
    plain, shared = without(model.train()), set(map(id, model.parameters()))
    assert torch.equal(plain(ids), before)
    assert not torch.equal(model(ids), before)
    assert adapters(plain) == {}
    assert len(adapters(model)) > 0
    assert {id(p) for p in plain.parameters()} < shared


def test_all_linear_is_all_but_the_head() -> None:
    for cfg, leaves in ((LLAMA, [*LEAVES[:-1], "gate_proj"]), (GPT2, LEAVES[:-1])):
        model = Transformer(cfg)
        add_lora(model, LoraConfig())
        assert {name.rpartition(".")[2] for name in adapters(model)} == set(leaves)
        assert len(adapters(model)) == cfg.n_layers * len(leaves)
        learning = {name for name, p in model.named_parameters() if p.requires_grad}
        assert learning == {f"{n}.lora_{x}.weight" for n in adapters(model) for x in "AB"}


def test_drawn_by_the_seed_alone() -> None:
    drawn = []
    for seed in (0, 0, 1):
        model = make(LLAMA)
        torch.manual_seed(seed)
        add_lora(model, LoraConfig(modules="q_proj, down_proj"))
        drawn.append(torch.cat([m.lora_A.weight.flatten() for m in adapters(model).values()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    layers = adapters(model).values()
    reach = [m.lora_A.weight.abs().max().item() * m.base.in_features**0.5 for m in layers]
    assert max(reach) <= 1
    assert min(reach) > 0.9
    assert all(m.lora_B.weight.count_nonzero() == 0 for m in layers)


def test_dropout_is_the_adapters_alone() -> None:
    x = torch.randn(2, 5, 6)
    layer = LoraLinear(nn.Linear(6, 4), LoraConfig(rank=2, dropout=0.5))
    nn.init.normal_(layer.lora_B.weight)
    torch.manual_seed(3)
    got = layer(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5)
    assert_close(got, layer.base(x) + 8 * layer.lora_B(layer.lora_A(dropped)))
    layer.eval()
    assert_close(layer(x), layer.base(x) + 8 * layer.lora_B(layer.lora_A(x)))


def test_a_base_in_bf16() -> None:
    model = make(LLAMA, dtype=torch.bfloat16)
    add_lora(model, LoraConfig(rank=2))
    draw(model, 0.01)
    layer = adapters(model)["layers.0.mlp.up_proj"]
    a, b, old = layer.lora_A.weight, layer.lora_B.weight, layer.base.weight
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    want = layer.base(x).float() + 8 * x.float() @ a.T @ b.T
    assert torch.equal(layer(x), want.bfloat16())
    assert model(tokens(1, 4)).dtype == torch.bfloat16
    merge(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.layers[0].mlp.up_proj.weight, (old.float() + 8 * (b @ a)).bfloat16())


class Random:
    """Batch i is drawn by its number."""

    def batch(self, index: int) -> Batch:
        ids = tokens(2, CONTEXT + 1, seed=index)
        return Batch(ids[:, :-1], ids[:, 1:])


LORA = LoraConfig(rank=2, alpha=4, dropout=0.2, modules="q_proj v_proj down_proj")
TRAIN = TrainConfig(
    steps=4, batch_size=2, lr=0.01, warmup_steps=1, checkpoint_every=2, eval_every=None,
    dtype="fp32", device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save(make(request.param, dtype=torch.float32), None, folder)
    return folder


def trainer(base: Path, folder: RunFolder, seed: int = 0, cfg: TrainConfig = TRAIN) -> Trainer:
    model, _ = load(base)
    torch.manual_seed(seed)
    add_lora(model, LORA)
    return Trainer(model, Random(), cfg, folder, store=AdapterStore(base, LORA))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_adapters_learn_and_only_they_are_written(
    base: Path, dtype: str, tmp_path: Path
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        run = trainer(base, folder, cfg=TRAIN.replace(dtype=dtype))
        before = {name: t.clone() for name, t in run.model.state_dict().items()}
        run.run(until=2)  # in the first step only B moves: A's gradient comes through it
        changed = {n for n, t in run.model.state_dict().items() if not torch.equal(t, before[n])}
        assert changed == {f"{n}.lora_{x}.weight" for n in adapters(run.model) for x in "AB"}
        checkpoint = folder.checkpoint(2)
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {
        *("adapter_config.json", "adapter_model.safetensors"),
        *("trainer.json", "trainer.safetensors"),
    }
    config = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(base)
    ids = tokens(2, CONTEXT)
    run.model.eval()
    assert_close(load(tmp_path / "run")[0](ids), run.model(ids))


def test_a_resumed_run_equals_an_undisturbed_one(base: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "whole") as folder:
        trainer(base, folder).run()
    with RunFolder(tmp_path / "parts") as folder:
        trainer(base, folder).run(until=3)
    with RunFolder(tmp_path / "parts", resume=True) as folder:
        trainer(base, folder, seed=9).run()  # whatever was drawn first
    for name in ("adapter_model.safetensors", "trainer.safetensors"):
        path = Path("checkpoints", "step-000004", name)
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "parts" / path).read_bytes()
    losses = []
    for run in ("whole", "parts"):
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_adapters_of_another_run(base: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        trainer(base, folder).run(until=2)
        checkpoint = folder.checkpoint(2)
    for change in ({"rank": 3}, {"modules": "q_proj"}, {"modules": "q_proj v_proj o_proj"}):
        model, cfg = load(base)[0], LORA.replace(**change)
        add_lora(model, cfg)
        with pytest.raises(WeightsError, match=r"adapter_model.safetensors: base_model\.\S+ has"):
            AdapterStore(base, cfg).read(checkpoint, model)


def test_the_kernel_serves_the_merged_model() -> None:
    model, ids = make(LLAMA, dtype=torch.float32), tokens(1, CONTEXT)
    add_lora(model, LORA)
    draw(model)
    assert decoder(model) is None
    want = model(ids)
    merge(model)
    fast = decoder(model)
    if fast is None:
        pytest.skip("the kernel cannot be built here")
    got = fast.step(ids, KVCache(model.config, 1, CONTEXT), keep=CONTEXT)
    assert_close(got, want, rtol=1e-4, atol=1e-4)  # other sums, through sharp layers


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("format", ["gpt2llama", "hf", "gguf"])
def test_the_merged_model_is_saved_and_an_unmerged_one_not(
    cfg: ModelConfig, format: str, tmp_path: Path
) -> None:
    model, ids = make(cfg, dtype=torch.float32), tokens(2, CONTEXT)
    add_lora(model, LORA.replace(modules="up_proj lm_head"))
    draw(model)
    want = model(ids)
    with pytest.raises(InputError, match="merge them first"):
        save(model, None, tmp_path / "out.gguf", format)
    with pytest.raises(InputError, match="merge them first"):
        quantise(model, SCHEMES["int8"])
    merge(model)
    save(model, None, tmp_path / "out.gguf", format)
    assert_close(load(tmp_path / "out.gguf")[0](ids), want)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rank": 0}, "rank must be a whole number above 0"),
        ({"alpha": -1.0}, "alpha must be a number above 0"),
        ({"dropout": 1.0}, "dropout must be below 1"),
        ({"modules": "q_proj v_prj"}, "'v_prj' must be one of .*; did you mean 'v_proj'"),
        ({"modules": "embed_tokens"}, "'embed_tokens' must be one of"),
        ({"modules": " , "}, "modules must name one of"),
        ({"modules": ["q_proj"]}, "modules must be"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LoraConfig(**values)


def test_models_that_cannot_be_adapted() -> None:
    with pytest.raises(ConfigError, match=r"the model has no gate_proj; it has q_proj, .*lm_head"):
        add_lora(make(GPT2), LoraConfig(modules="gate_proj"))
    with pytest.raises(ConfigError, match=f"rank 99 is above {SIZES['d_model']}"):
        add_lora(make(LLAMA), LoraConfig(rank=99))
    model = make(LLAMA)
    add_lora(model, LoraConfig())
    with pytest.raises(InputError, match="has adapters already"):
        add_lora(model, LoraConfig())
    wide = make(LLAMA.replace(d_model=64, d_ff=64), dtype=torch.float32)
    with pytest.raises(InputError, match="is quantised and cannot be adapted"):
        add_lora(quantise(wide, SCHEMES["int8"]), LoraConfig())


def test_gradients_by_finite_differences() -> None:
    """Of the loss in fp64, through every layer behind them."""
    model, ids = make(LLAMA), tokens(1, 6)
    add_lora(model, LoraConfig(rank=2, modules="k_proj"))
    draw(model)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss(*_: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[0, :-1], ids[0, 1:])

    assert torch.autograd.gradcheck(loss, parameters)
