"""Folders as Meta wrote them give the logits of Meta's own code, and of transformers."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_toys import logits
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from wheels import wheel

from gpt2llama.model.config import Llama3Scaling
from gpt2llama.model.position import rope_frequencies
from gpt2llama.weights import load, open_model

VOCAB, DIM, HEADS, KV, WIDTH = 96, 48, 6, 2, 192
# In four parts w2 is square, and so does not show how it was cut.
PARAMS: dict[str, Any] = {
    "dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCAB,
    "multiple_of": 64, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 5000.0,
}  # fmt: skip
TEXT = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
COLUMNS = ("wo.weight", "w2.weight")  # cut along the input, all other matrices along the output


def sharp_state(kv: int = KV, width: int = WIDTH) -> dict[str, Tensor]:
    """All of the weights, in Meta's names and shapes; attention far from uniform."""
    small = DIM // HEADS * kv
    shapes = {
        "attention.wq": (DIM, DIM),
        "attention.wk": (small, DIM),
        "attention.wv": (small, DIM),
    }
    shapes |= {"attention.wo": (DIM, DIM), "feed_forward.w1": (width, DIM)}
    shapes |= {"feed_forward.w2": (DIM, width), "feed_forward.w3": (width, DIM)}
    shapes |= {"attention_norm": (DIM,), "ffn_norm": (DIM,)}
    full = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    full |= {"tok_embeddings": (VOCAB, DIM), "output": (VOCAB, DIM), "norm": (DIM,)}
    rng, state = torch.Generator().manual_seed(0), {}
    for name, shape in full.items():
        noise = torch.randn(shape, generator=rng)
        if len(shape) == 1:
            noise = 1 + 0.3 * noise
        elif name != "tok_embeddings":
            noise *= (6 if name.endswith("wq") else 1) / shape[1] ** 0.5
        state[f"{name}.weight"] = noise
    return state


def write(folder: Path, params: dict[str, Any], state: dict[str, Tensor], n: int, cut: int) -> None:
    """n shards, the table cut along `cut`; norms and rotation angles in every one."""
    (folder / "params.json").write_text(json.dumps(params), encoding="utf-8")
    for i in range(n):
        shard = {"rope.freqs": torch.ones(DIM // HEADS // 2)}
        for name, tensor in state.items():
            if tensor.dim() > 1:
                dim = cut if name.startswith("tok") else int(name.endswith(COLUMNS))
                tensor = tensor.chunk(n, dim)[i].clone()
            shard[name] = tensor
        torch.save(shard, folder / f"consolidated.{i:02d}.pth")


def in_halves(weight: Tensor) -> Tensor:
    """Meta turns rows 0 and 1 of a head together, transformers rows 0 and E/2."""
    size = DIM // HEADS
    rows = [h * size + r for h in range(len(weight) // size)
            for r in (*range(0, size, 2), *range(1, size, 2))]  # fmt: skip
    return weight[rows]


def in_transformers(params: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
    names = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj"}
    names |= {"attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj"}
    names |= {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj"}
    names |= {"feed_forward.w3": "mlp.up_proj", "ffn_norm": "post_attention_layernorm"}
    names |= {"attention_norm": "input_layernorm", "tok_embeddings": "embed_tokens"}
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=params.get("n_kv_heads", HEADS), rms_norm_eps=params["norm_eps"],
        intermediate_size=len(state["layers.0.feed_forward.w1.weight"]),
        rope_parameters={"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)},
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip
    theirs = {}
    for name, tensor in state.items():
        turned = in_halves(tensor) if name.endswith(("wq.weight", "wk.weight")) else tensor
        for meta, hf in names.items():
            name = name.replace(meta, hf)
        theirs["lm_head.weight" if name == "output.weight" else f"model.{name}"] = turned
    model.load_state_dict(theirs)
    return model.eval()


@pytest.mark.parametrize("cut", [0, 1], ids=["table-rows", "table-columns"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_logits_are_those_of_transformers(shards: int, cut: int, tmp_path: Path) -> None:
    state = sharp_state()
    write(tmp_path, PARAMS, state, shards, cut)
    ours, tokenizer = load(tmp_path)
    assert tokenizer is None
    assert_close(logits(ours, TEXT), logits(in_transformers(PARAMS, state), TEXT))


def test_a_first_llama(tmp_path: Path) -> None:
    """No n_kv_heads, no theta, no multiplier, and the size of the vocabulary left open."""
    params = {"dim": DIM, "multiple_of": 32, "n_heads": HEADS, "n_layers": 2, "norm_eps": 1e-6}
    params["vocab_size"] = -1
    state = sharp_state(kv=HEADS, width=128)
    write(tmp_path, params, state, 2, 1)
    ours, _ = load(tmp_path)
    assert ours.config.vocab_size == VOCAB
    assert_close(logits(ours, TEXT), logits(in_transformers(params, state), TEXT))


@pytest.fixture(scope="module")
def meta_code() -> Iterator[Any]:
    """llama_models.llama3.model, run from its wheel on one process."""
    wheel_path = wheel("llama-models", "0.3.0")
    standing_in = {
        "initialize": {"get_model_parallel_world_size": lambda: 1},
        "layers": {
            "ColumnParallelLinear": lambda a, b, bias, **_: nn.Linear(a, b, bias),
            "RowParallelLinear": lambda a, b, bias, **_: nn.Linear(a, b, bias),
            "VocabParallelEmbedding": lambda a, b, **_: nn.Embedding(a, b),
        },
    }
    path = "fairscale.nn.model_parallel"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fairscale", "fairscale.nn", path, *(f"{path}.{x}" for x in standing_in)):
            module = types.ModuleType(name)
            vars(module).update(standing_in.get(name.removeprefix(f"{path}."), {}))
            patch.setitem(sys.modules, name, module)
            above, _, leaf = name.rpartition(".")
            if above:
                setattr(sys.modules[above], leaf, module)
        patch.syspath_prepend(str(wheel_path))
        yield importlib.import_module("llama_models.llama3.model")


@pytest.mark.network
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_logits_are_those_of_metas_code(
    shards: int, scaled: bool, meta_code: Any, tmp_path: Path
) -> None:
    params = PARAMS | {"use_scaled_rope": scaled, "rope_theta": 500000.0}
    state = sharp_state()
    args = meta_code.ModelArgs(**params, max_batch_size=2, max_seq_len=64)
    theirs = meta_code.Transformer(args)
    theirs.load_state_dict(state)
    write(tmp_path, params, state, shards, 0)
    ours, _ = load(tmp_path, rope_factor=8.0 if scaled else None)
    assert_close(logits(ours, TEXT), theirs(TEXT, 0).clone())
    inv_freq, _ = rope_frequencies(ours.config)
    assert_close(theirs.freqs_cis[1].angle(), inv_freq.float())


def test_the_factor_that_no_file_holds(tmp_path: Path) -> None:
    write(tmp_path, PARAMS | {"use_scaled_rope": True}, sharp_state(), 1, 0)
    cfg = open_model(tmp_path, rope_factor=32.0).config
    assert cfg.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, original_max_seq_len=8192)
    assert cfg.max_seq_len == 131072
