"""PEFT's folders: every tensor has its place, and what does not fit is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sharp import CONTEXT, SIZES, configs, make, tokens
from torch import Tensor, nn
from torch.testing import assert_close

from gpt2llama.errors import ConfigError, FileError, Gpt2LlamaError, InputError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.scheme import SCHEMES
from gpt2llama.tokenizer import train_bpe
from gpt2llama.weights import load, open_model, peft, save
from gpt2llama.weights.build import on_meta
from gpt2llama.weights.report import report

CFG = ModelConfig(**SIZES, n_kv_heads=2)
Q, UP = "layers.1.self_attn.q_proj", "layers.0.mlp.up_proj"
IN_FILE = f"base_model.model.model.{Q}"
IDS = tokens(2, CONTEXT)
# Its q, k and v are one matrix in the file.
LIKE_GPT2: dict[str, Any] = {
    "n_kv_heads": None, "head_dim": None, "norm": "layernorm", "norm_placement": "pre",
    "norm_bias": True, "gated_mlp": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
    "embed_scale": False, "qk_norm": False, "sliding_window": None, "logit_softcap": None,
    "position": "learned", "rope_scaling": None,
}  # fmt: skip
State = dict[str, Tensor]


def pairs(cfg: ModelConfig, names: list[str], rank: int = 2) -> dict[str, tuple[Tensor, Tensor]]:
    random, model = torch.Generator().manual_seed(0), on_meta(cfg)
    found = {}
    for name in names:
        outputs, inputs = model.get_submodule(name).weight.shape
        shapes = (rank, inputs), (outputs, rank)
        a, b = (torch.randn(shape, generator=random) / 3 for shape in shapes)
        found[name] = a, b
    return found


def write(folder: Path, base: str, names: list[str] = [Q, UP], cfg: ModelConfig = CFG) -> Path:  # noqa: B006
    folder.mkdir()
    given = pairs(cfg, names)
    peft.write_adapter(folder, given, cfg, rank=2, alpha=3, dropout=0.0, base=base)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter, beside its base model."""
    save(make(CFG, dtype=torch.float32), None, tmp_path / "base")
    return write(tmp_path / "adapter", "../base")


def by_hand(model: Transformer, names: list[str], times: int = 1) -> Tensor:
    with torch.no_grad():
        for name, (a, b) in pairs(model.config, names).items():
            model.get_submodule(name).weight.add_(times * 1.5 * b @ a)
        logits: Tensor = model(IDS)
    return logits


def test_beside_the_adapter_or_as_load_takes_it(folder: Path, tmp_path: Path) -> None:
    want = by_hand(load(tmp_path / "base")[0], [Q, UP])
    assert_close(load(folder)[0](IDS), want)
    assert_close(load(write(tmp_path / "other", str(tmp_path / "base")))[0](IDS), want)
    assert any("added to 2 matrices" in note for note in open_model(folder).notes)


@pytest.mark.parametrize("format", ["gpt2llama", "hf", "gguf"])
@pytest.mark.parametrize("tied", [True, False])
def test_any_format_of_the_base(format: str, tied: bool, tmp_path: Path) -> None:
    """And a tied head that is adapted leaves the embedding as it is."""
    cfg = CFG.replace(tie_embeddings=tied, n_kv_heads=None)
    model = make(cfg, dtype=torch.float32)
    save(model, None, tmp_path / "base", format)
    names = [Q, UP, "lm_head"]
    write(tmp_path / "adapter", "../base", names, cfg)
    alone = Transformer(cfg.replace(tie_embeddings=False)).eval()
    alone.load_state_dict(model.state_dict())
    found, _ = load(tmp_path / "adapter")
    assert_close(found(IDS), by_hand(alone, names))
    assert not found.config.tie_embeddings
    opened = open_model(tmp_path / "adapter")
    assert any("no longer tied" in note for note in opened.notes) == tied
    listed = [name for line in report(opened) for name in line.ours]
    assert sorted(listed) == sorted(found.state_dict())
    save(found, None, tmp_path / "again", "hf")
    assert_close(load(tmp_path / "again")[0](IDS), found(IDS))


def test_bf16_is_summed_in_fp32(folder: Path, tmp_path: Path) -> None:
    base = make(CFG, dtype=torch.bfloat16)
    save(base, None, tmp_path / "half")
    set_config(folder, base_model_name_or_path="../half")
    found, _ = load(folder)
    a, b = pairs(CFG, [Q])[Q]
    want = (base.get_submodule(Q).weight.float() + 1.5 * (b @ a)).bfloat16()
    assert_close(found.get_submodule(Q).weight, want, rtol=0, atol=0)
    assert found.lm_head.weight.dtype == torch.bfloat16
    assert load(folder, dtype=torch.float32)[0].lm_head.weight.dtype == torch.float32


def test_adapters_on_top_of_each_other(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "second", "../adapter")
    want = by_hand(load(tmp_path / "base")[0], [Q, UP], times=2)
    assert_close(load(tmp_path / "second")[0](IDS), want)
    set_config(folder, base_model_name_or_path="../second")
    with pytest.raises(WeightsError, match="more than 8 adapters on top of each other"):
        load(folder)


def test_the_adapters_tokenizer_comes_first(folder: Path, tmp_path: Path) -> None:
    cfg = CFG.replace(vocab_size=300)
    mine, its = train_bpe(["却说曹操"], 270), train_bpe(["the model"], 265)
    save(make(cfg, dtype=torch.float32), its, tmp_path / "named")
    write(tmp_path / "plain", "../named", cfg=cfg)
    assert load(tmp_path / "plain")[1].fingerprint == its.fingerprint  # type: ignore[union-attr]
    mine.save(tmp_path / "plain")
    assert load(tmp_path / "plain")[1].fingerprint == mine.fingerprint  # type: ignore[union-attr]


def test_opening_takes_no_torch(folder: Path) -> None:
    code = (
        "import sys; from gpt2llama.weights import open_model; open_model(sys.argv[1]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True)


@settings(max_examples=20)
@given(st.one_of(configs(), configs(**LIKE_GPT2)), st.data())
def test_every_matrix_has_its_place_and_comes_back(cfg: ModelConfig, data: st.DataObject) -> None:
    model = on_meta(cfg)
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    leaves = data.draw(st.sets(st.sampled_from([n.rpartition(".")[2] for n in linear]), min_size=1))
    names = [name for name in linear if name.rpartition(".")[2] in leaves]
    family, given = peft._family(cfg), pairs(cfg, names)
    state = peft.to_peft(given, family)
    for key, tensor in state.items():
        theirs = key.removeprefix("base_model.model.").removesuffix(".weight")[: -len(".lora_A")]
        ours, (outputs, inputs) = peft._matrices(theirs, cfg)
        assert set(ours) <= set(linear)
        assert outputs == sum(model.get_submodule(name).weight.shape[0] for name in ours)
        assert tensor.shape[1 if key.endswith("A.weight") else 0] in (inputs, outputs)
    back = peft.from_peft(state, names, family)
    assert back.keys() == given.keys()
    for name, pair in given.items():
        assert all(torch.equal(x, y) for x, y in zip(back[name], pair, strict=True))


def edit(folder: Path, change: Callable[[State], Any]) -> None:
    state = dict(load_file(folder / peft.WEIGHTS))
    change(state)
    save_file({k: t.clone() for k, t in state.items()}, folder / peft.WEIGHTS)


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / peft.CONFIG
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(values), encoding="utf-8")


A, B = f"{IN_FILE}.lora_A.weight", f"{IN_FILE}.lora_B.weight"
GPT2 = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"
BEYOND = f"base_model.model.model.{Q.replace('1', '2')}.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop(B), rf"lacks {B}$"),
        (
            lambda s: s.update({A: torch.ones(2, 24)}),
            rf"{A} has the shape \(2, 24\), but rank 2 in .*base.* asks for \(2, 16\): "
            "the adapter is another model's$",
        ),
        (lambda s: s.update({A: torch.ones(3, 16)}), rf"{A} has the shape \(3, 16\)"),
        (lambda s: s.update({A: torch.ones(32)}), rf"{A} has the shape \(32,\)"),
        (lambda s: s.update({B: torch.ones(8, 2)}), rf"{B} has the shape \(8, 2\)"),
        (lambda s: s.update({BEYOND: torch.ones(2, 16)}), rf"{BEYOND} has no place in .*base"),
        (
            lambda s: s.update({GPT2: torch.ones(2, 16)}),
            r"transformer\.h\.1\.attn\.c_attn\.lora_A\.weight has no place",
        ),
        (lambda s: s.update({A: torch.ones(2, 16).int()}), f"{A} is int32, not a float"),
        (
            lambda s: s.update({f"{IN_FILE}.lora_magnitude_vector": torch.ones(16)}),
            "lora_magnitude_vector is no A or B of a matrix; merge this adapter with peft",
        ),
        (
            lambda s: s.update({k.replace(".model.layers", ".layers"): s[k] for k in (A, B)}),
            "q_proj is there twice",
        ),
        (lambda s: s.clear(), "holds no tensors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(change: Callable[[State], Any], says: str, folder: Path) -> None:
    edit(folder, change)
    with pytest.raises(WeightsError, match=says):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "'IA3' for 'CAUSAL_LM', and only 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "'LORA' for 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora=True is beyond what can be merged.*ignore-key use_dora"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is beyond"),
        ({"bias": "all"}, "bias='all' is beyond"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base"),
        ({"sparkle": 1}, "sparkle=1 is not known here"),
        ({"r": 0}, "r must be a whole number above 0"),
        ({"r": True}, "r must be a whole number"),
        ({"r": 3}, r"lora_A.weight has the shape \(2, 16\), but rank 3"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": {".*q_proj": 2}}, "rank_pattern='.*q_proj' is a regular expression"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern must be a number"),
        ({"base_model_name_or_path": None}, "must say where its base model lies"),
        ({"base_model_name_or_path": "no/such/place"}, "base_model_name_or_path: no/such/place is"),
        ({"base_model_name_or_path": "a\0b"}, "base_model_name_or_path: "),
    ],
)
def test_settings_that_do_not_load(changes: dict[str, Any], says: str, folder: Path) -> None:
    set_config(folder, **changes)
    with pytest.raises(Gpt2LlamaError, match=says) as raised:
        open_model(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_keys_to_ignore_are_the_adapters_or_the_bases(folder: Path) -> None:
    set_config(folder, sparkle=1)
    model, _ = load(folder, ignore_keys=["sparkle"])
    assert model.config == CFG


def test_ways_to_begin_and_keys_that_change_nothing(folder: Path) -> None:
    want = load(folder)[0](IDS)
    set_config(
        folder,
        init_lora_weights="gaussian",
        lora_dropout=0.3,
        peft_version="9",
        modules_to_save=[],
        use_dora=False,
        loftq_config={},
        alpha_pattern={"k_proj": 7},
    )
    assert torch.equal(load(folder)[0](IDS), want)
    set_config(folder, use_rslora=True, lora_alpha=1.5 * 2**0.5)
    assert_close(load(folder)[0](IDS), want)
    patterns = {"mlp.up_proj": 3, f"^model.{Q}": 3, "q_proj": 98}
    set_config(folder, use_rslora=False, lora_alpha=99, alpha_pattern=patterns)
    assert torch.equal(load(folder)[0](IDS), want)


def test_quantised_bases(folder: Path, tmp_path: Path) -> None:
    wide = CFG.replace(d_model=64, d_ff=64)
    save(quantise(make(wide, dtype=torch.float32), SCHEMES["int8"]), None, tmp_path / "int8")
    write(tmp_path / "wide", "../int8", cfg=wide)
    save(make(wide, dtype=torch.float32), None, tmp_path / "q8.gguf", "gguf", dtype="Q8_0")
    write(tmp_path / "blocks", "../q8.gguf", cfg=wide)
    blocks, _ = load(tmp_path / "q8.gguf")
    assert_close(load(tmp_path / "blocks")[0](IDS), by_hand(blocks, [Q, UP]))
    with pytest.raises(InputError, match="blocks has no blocks to keep"):
        load(tmp_path / "blocks", quant="keep")
    with pytest.raises(WeightsError, match=r"int8/\S+ is quantised, and a sum would not be"):
        load(tmp_path / "wide")


def test_files_that_are_not_there_or_damaged(folder: Path) -> None:
    file = folder / peft.WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(WeightsError, match="truncated"):
        load(folder)
    file.unlink()
    with pytest.raises(FileError, match="cannot read"):
        load(folder)
    (folder / "adapter_model.bin").touch()
    with pytest.raises(FileError, match="only a pickle"):
        load(folder)
    (folder / peft.CONFIG).write_text("[]", encoding="utf-8")
    with pytest.raises(WeightsError, match="must hold a JSON object"):
        load(folder)
    (folder / peft.CONFIG).write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="only 'LORA' for 'CAUSAL_LM' loads"):
        load(folder)
