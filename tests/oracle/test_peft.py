"""Adapters held to `peft`: its forward, gradients and merge, its folders in and ours out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_toys import TEXT, logits, toy
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from gpt2llama.finetune.lora import AdapterStore, LoraConfig, adapters, add_lora, merge
from gpt2llama.model.transformer import Transformer
from gpt2llama.weights import load, save
from gpt2llama.weights.build import state_of
from gpt2llama.weights.hf import state_to_hf
from gpt2llama.weights.peft import from_peft

peft = pytest.importorskip("peft", reason="pip install peft (it adds accelerate and psutil)")

pytestmark = [  # peft's own
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but"),  # GPT-2's head is not
]
FAMILIES = ["llama", "llama-tied", "llama-biases", "mistral-head-dim", "qwen2", "qwen3", "gpt2"]


@pytest.fixture
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Transformer, Path]:
    """A sharp model of ours, and the folder of its HF export."""
    toy(request.param).save_pretrained(tmp_path / "toy")
    ours, _ = load(tmp_path / "toy")
    save(ours, None, tmp_path / "hf", format="hf")
    return ours, tmp_path / "hf"


def families(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("exported", names, indirect=True)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """As large as what they stand beside; as drawn B is zero and A's size does not show."""
    random = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if ".lora_A." in name:
            p.normal_(0, p.shape[1] ** -0.5, generator=random)
        elif ".lora_B." in name:
            p.normal_(0, 0.1, generator=random)


def adapt(model: Transformer, base: Path, folder: Path, **how: Any) -> None:
    cfg = LoraConfig(**how)
    add_lora(model, cfg)
    draw(model)
    folder.mkdir()
    AdapterStore(base, cfg).write(folder, model, None)


def theirs(base: Path, folder: Path) -> Any:
    """`peft` on the exported model; a tensor without a place would be a warning, so an error."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


# A merged weight is rounded anew, which these sharp layers make twice of fp32's default.
MERGED = {"rtol": 1e-4, "atol": 1e-4}


def same_weights(ours: Transformer, theirs: Any) -> None:
    want = theirs.state_dict()
    for name, tensor in state_to_hf(state_of(ours), theirs.config.model_type).items():
        assert_close(tensor, want[name])
    assert_close(logits(ours), logits(theirs), **MERGED)


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    found = model(ids)
    scores = found if isinstance(found, Tensor) else found.logits
    F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@families(*FAMILIES)
@pytest.mark.parametrize("modules", ["all-linear", "q_proj v_proj", "down_proj,o_proj,k_proj"])
def test_forward_gradients_and_merge(
    exported: tuple[Transformer, Path], modules: str, tmp_path: Path
) -> None:
    ours, base = exported
    before = logits(ours)
    adapt(ours, base, tmp_path / "lora", modules=modules, rank=3, alpha=5)
    other = theirs(base, tmp_path / "lora")
    assert_close(logits(ours), logits(other))
    assert (logits(ours) - before).abs().max() > 0.1  # what is compared is there

    got, want = gradients(ours, TEXT), gradients(other, TEXT)
    family = "gpt2" if ours.config.position == "learned" else "llama"
    named = {name.replace(".default.", "."): grad for name, grad in want.items()}
    pairs = from_peft(named, adapters(ours), family)
    assert got.keys() == {f"{name}.lora_{x}.weight" for name in pairs for x in "AB"}
    for name, pair in pairs.items():
        for x, grad in zip("AB", pair, strict=True):
            assert_close(got[f"{name}.lora_{x}.weight"], grad)

    assert merge(ours) == []
    summed = other.merge_and_unload()
    same_weights(ours, summed)
    same_weights(load(tmp_path / "lora")[0], summed)


@families("llama", "llama-tied", "gpt2")
def test_an_adapted_head(exported: tuple[Transformer, Path], tmp_path: Path) -> None:
    """Tied or not, the adapter is the head's alone; peft's own merge changes the embedding too."""
    ours, base = exported
    tied = ours.config.tie_embeddings
    adapt(ours, base, tmp_path / "lora", modules="q_proj lm_head")
    want = logits(theirs(base, tmp_path / "lora"))
    assert_close(logits(ours), want)
    notes = merge(ours)
    assert len(notes) == tied
    assert not ours.config.tie_embeddings
    assert_close(logits(ours), want, **MERGED)
    assert_close(logits(load(tmp_path / "lora")[0]), want, **MERGED)


@families("llama", "llama-tied", "qwen2", "gpt2")
@pytest.mark.parametrize(
    "how",
    [
        {"target_modules": "all-linear"},
        {"use_rslora": True},
        {"r": 2, "lora_dropout": 0.5, "init_lora_weights": "gaussian", "layers_to_transform": [1]},
    ],
    ids=["all-linear", "rslora", "one-layer"],
)
def test_made_by_peft(
    exported: tuple[Transformer, Path], how: dict[str, Any], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(exported[1])
    gpt2 = base.config.model_type == "gpt2"
    usual = {"target_modules": ["c_attn", "mlp.c_proj"] if gpt2 else ["q_proj", "v_proj"]}
    ours, model = both(base, tmp_path, task_type="CAUSAL_LM", fan_in_fan_out=gpt2, **usual | how)
    same_weights(ours, model.merge_and_unload())


@families("llama", "llama-tied")
def test_made_by_peft_with_patterns_and_a_head(
    exported: tuple[Transformer, Path], tmp_path: Path
) -> None:
    """`peft` writes the head itself beside its adapter."""
    base = AutoModelForCausalLM.from_pretrained(exported[1])
    tied = base.config.tie_word_embeddings
    with pytest.warns(UserWarning, match="embedding layers found"):
        ours, model = both(
            base, tmp_path, r=4, lora_alpha=6, target_modules=["q_proj", "up_proj", "lm_head"],
            rank_pattern={"up_proj": 2, r"^model\.layers\.1\.self_attn\.q_proj": 5},
            alpha_pattern={"layers.0.self_attn.q_proj": 9},
        )  # fmt: skip
    file = tmp_path / "peft" / "adapter_model.safetensors"
    assert b"lm_head.base_layer" in file.read_bytes()[:4096]
    if not tied:  # else its own merge changes the embedding as well
        same_weights(ours, model.merge_and_unload())


def both(base: Any, folder: Path, **how: Any) -> tuple[Transformer, Any]:
    """A model of `peft`, and ours from what it saved, with the same logits."""
    model = peft.get_peft_model(base, peft.LoraConfig(**how)).eval()
    draw(model)
    model.save_pretrained(folder / "peft")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(folder / "hf")
    ours, _ = load(folder / "peft")
    assert_close(logits(ours), logits(model), **MERGED)
    return ours, model
