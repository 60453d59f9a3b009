"""Folders in and out: the same model comes back, and damage is one sentence."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gpt2llama.atomic import new_folder
from gpt2llama.errors import (
    ConfigError,
    FileError,
    Gpt2LlamaError,
    InputError,
    TokenizerError,
    WeightsError,
)
from gpt2llama.model.config import Llama3Scaling, ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import BPETokenizer, train_bpe
from gpt2llama.weights import checkpoint, load, open_model, save
from gpt2llama.weights.build import state_of

SIZES: dict[str, Any] = {"vocab_size": 290, "max_seq_len": 16, "n_layers": 2, "n_heads": 2}
CFG = ModelConfig(**SIZES, d_model=8, d_ff=12, n_kv_heads=1)
GPT2 = CFG.replace(
    norm="layernorm",
    position="learned",
    gated_mlp=False,
    activation="gelu_tanh",
    n_kv_heads=None,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
ODD = GPT2.replace(norm_placement="post", position="sinusoidal", embed_scale=True, qk_norm=True)
SCALED = CFG.replace(
    tie_embeddings=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, original_max_seq_len=8)
)
IDS = torch.arange(30).view(2, 15)


def make(cfg: ModelConfig = CFG) -> Transformer:
    torch.manual_seed(0)
    return Transformer(cfg).eval()


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe(["却说曹操引军至赤壁。the reader and the model\n" * 3], 280)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(make(), None, tmp_path / "ours")
    return tmp_path / "ours"


@pytest.mark.parametrize("format", ["gpt2llama", "hf"])
@pytest.mark.parametrize("cfg", [CFG, GPT2, SCALED, ODD], ids=["gqa", "gpt2", "untied", "odd"])
def test_the_same_model_comes_back(cfg: ModelConfig, format: str, tmp_path: Path) -> None:
    model = make(cfg)
    if cfg is ODD and format == "hf":
        with pytest.raises(ConfigError, match=r"norm_placement='post'.*gpt2llama"):
            save(model, None, tmp_path / "out", format=format)
        assert not list(tmp_path.iterdir())
        return
    save(model, None, tmp_path / "out", format=format)
    back, tokenizer = load(tmp_path / "out")
    assert tokenizer is None
    assert back.config == cfg
    assert not back.training
    assert (back.lm_head.weight is back.embed_tokens.weight) == cfg.tie_embeddings
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) != cfg.tie_embeddings
    assert all(p.is_contiguous() and p.requires_grad for p in back.parameters())
    torch.testing.assert_close(back(IDS), model(IDS), rtol=0, atol=0)


def test_dtypes(tmp_path: Path) -> None:
    model = make().bfloat16()
    save(model, None, tmp_path / "out")
    assert {p.dtype for p in load(tmp_path / "out")[0].parameters()} == {torch.bfloat16}
    wide, _ = load(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(wide(IDS), model.float()(IDS), rtol=0, atol=0)
    edit(tmp_path / "out", lambda state: state.update({"norm.weight": torch.ones(8).half()}))
    assert {p.dtype for p in load(tmp_path / "out")[0].parameters()} == {torch.float32}
    with pytest.raises(InputError, match="int8"):
        load(tmp_path / "out", dtype=torch.int8)


@pytest.mark.parametrize("format", ["gpt2llama", "hf"])
def test_a_weight_that_float16_cannot_hold(format: str, tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    save(model, None, tmp_path / "out", format)
    assert load(tmp_path / "out", torch.bfloat16)[0].norm.weight[0] > 9e5
    with pytest.raises(WeightsError, match=r"norm\.weight has a weight beyond 65504"):
        load(tmp_path / "out", torch.float16)


def test_training_what_was_loaded_leaves_the_file_alone(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    model, _ = load(saved)
    loss = model(IDS).logsumexp(-1).mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert (saved / "model.safetensors").read_bytes() == before
    assert not torch.equal(model(IDS), load(saved)[0](IDS))


def test_others_may_read_what_one_user_saved(saved: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in saved.iterdir()}
    assert modes == {(saved.stat().st_mode & 0o666)}


def test_compiled_and_untied_models(tmp_path: Path) -> None:
    class Compiled(nn.Module):  # what torch.compile returns, as far as names go
        def __init__(self, model: Transformer) -> None:
            super().__init__()
            self.config, self._orig_mod, self.lm_head = model.config, model, model.lm_head

    assert state_of(make()).keys() < state_of(Compiled(make())).keys() | {"lm_head.weight"}
    assert not [name for name in state_of(Compiled(make())) if "_orig_mod" in name]
    model = make()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(WeightsError, match="tie_embeddings"):
        save(model, None, tmp_path / "out")


def test_tokenizer_travels_along(tokenizer: BPETokenizer, tmp_path: Path) -> None:
    save(make(), tokenizer, tmp_path / "out")
    back = load(tmp_path / "out")[1]
    assert back is not None
    assert back.fingerprint == tokenizer.fingerprint
    other = train_bpe(["quite another text, quite another vocabulary\n" * 3], 270)
    other.save(tmp_path / "out")
    with pytest.raises(TokenizerError, match=f"{tokenizer.fingerprint}.*{other.fingerprint}"):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    ("ends", "more"), [(7, {7}), ([9, 5], {5, 9}), (None, set()), ([10**9], set())]
)
def test_stop_ids_of_the_generation_config(
    ends: Any, more: set[int], tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    save(make(), tokenizer, tmp_path / "out", format="hf")
    text = json.dumps({"eos_token_id": ends})
    (tmp_path / "out" / "generation_config.json").write_text(text, encoding="utf-8")
    back = load(tmp_path / "out")[1]
    assert back is not None
    assert back.stop_ids == tokenizer.stop_ids | more
    for format in ("hf", "gpt2llama"):
        save(make(), back, tmp_path / format, format=format)
        again = load(tmp_path / format)[1]
        assert again is not None
        assert again.stop_ids == back.stop_ids


@pytest.mark.parametrize("format", ["gpt2llama", "hf"])
def test_tokenizer_larger_than_the_table(
    format: str, tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    small = make(CFG.replace(vocab_size=tokenizer.vocab_size - 1))
    with pytest.raises(TokenizerError, match=f"{tokenizer.vocab_size}.*only"):
        save(small, tokenizer, tmp_path / "out", format)
    save(small, None, tmp_path / "out", format)
    tokenizer.save(tmp_path / "out")
    with pytest.raises(TokenizerError, match=f"{tokenizer.vocab_size}.*only"):
        load(tmp_path / "out")


def test_run_folder(tmp_path: Path) -> None:
    for step in (1, 2):
        model = make()
        model.norm.weight.data.fill_(step)
        with new_folder(tmp_path / "checkpoints" / f"step-{step}") as folder:
            checkpoint.write_model(folder, model, None)
    (tmp_path / "latest").write_text("step-1\n", encoding="utf-8")
    assert load(tmp_path)[0].norm.weight[0] == 1
    assert load(tmp_path / "checkpoints" / "step-2")[0].norm.weight[0] == 2
    for name in ("", "../elsewhere", "step-3"):
        (tmp_path / "latest").write_text(name, encoding="utf-8")
        with pytest.raises(FileError, match="checkpoints"):
            load(tmp_path)


def test_a_run_that_kept_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(FileError, match="names no checkpoint yet; let its own command go on"):
        load(tmp_path)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.weight"), r"lacks the tensor norm.weight"),
        (lambda s: s.update(extra=torch.ones(1)), r"no place for: extra"),
        (
            lambda s: s.update({"norm.weight": torch.ones(9)}),
            r"norm.weight has the shape \(9,\), but its config asks for \(8,\)",
        ),
        (lambda s: s.update({"norm.weight": torch.ones(8).int()}), r"norm.weight is int32"),
        (lambda s: s.clear(), "vocab_size"),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], Any], message: str, saved: Path
) -> None:
    edit(saved, change)
    with pytest.raises(WeightsError, match=f"model.safetensors.*{message}"):
        load(saved)


def test_tensors_of_a_hugging_face_folder_keep_their_names(tmp_path: Path) -> None:
    save(make(GPT2), None, tmp_path / "out", format="hf")
    name = "transformer.h.1.mlp.c_fc.weight"
    edit(tmp_path / "out", lambda state: state.update({name: torch.ones(12, 8)}))
    with pytest.raises(WeightsError, match=rf"{name} has the shape \(12, 8\).*\(8, 12\)"):
        load(tmp_path / "out")


@pytest.mark.parametrize("cfg", [CFG, GPT2], ids=["llama", "gpt2"])
def test_a_head_beside_a_tied_embedding(cfg: ModelConfig, tmp_path: Path) -> None:
    """Left out where it repeats the embedding, kept where it differs: the tensors decide."""
    model, out = make(cfg), tmp_path / "out"
    save(model, None, out, format="hf")
    edit(out, lambda state: state.update({"lm_head.weight": model.lm_head.weight.detach()}))
    assert load(out)[0].config.tie_embeddings
    head = torch.randn(290, 8)
    edit(out, lambda state: state.update({"lm_head.weight": head}))
    with pytest.warns(UserWarning, match=r"lm_head\.weight.*kept, untied"):
        back = load(out)[0]
    assert not back.config.tie_embeddings
    torch.testing.assert_close(back(IDS), model.hidden(IDS) @ head.T)
    edit(out, lambda state: state.update({"lm_head.weight": torch.randn(9, 8)}))
    with (
        pytest.warns(UserWarning, match="untied"),
        pytest.raises(WeightsError, match=r"lm_head\.weight has the shape \(9, 8\)"),
    ):
        load(out)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(make(GPT2), None, out, format="hf")
    edit(out, lambda state: state.update({"ln_f.weight": torch.ones(8)}))
    with pytest.raises(WeightsError, match=r"has (transformer\.)?ln_f\.weight, and .*one tensor"):
        load(out)


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(make(SCALED), None, out, format="hf")
    state = load_file(out / "model.safetensors")
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(state.items()):
        parts["ab"[i % 2] + ".safetensors"][name] = tensor
    for file, part in parts.items():
        save_file(part, out / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (out / "model.safetensors").rename(out / "stray.safetensors")
    opened = open_model(out)
    assert opened.notes == [
        "stray.safetensors ignored: model.safetensors.index.json does not list it"
    ]
    torch.testing.assert_close(load(out)[0](IDS), make(SCALED)(IDS), rtol=0, atol=0)
    (out / "b.safetensors").unlink()
    with pytest.raises(FileError, match=r"b\.safetensors is missing, which .*index\.json lists"):
        load(out)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_tensors(size: int, saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WeightsError, match=r"model.safetensors is truncated"):
        load(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(name: str, saved: Path) -> None:
    (saved / name).unlink()
    with pytest.raises(FileError, match=f"has no {name}|{name}.*No such file"):
        load(saved)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", WeightsError, "not JSON"),
        ("[]", WeightsError, "JSON object"),
        ("[" * 100000, WeightsError, "not JSON"),
        (b"\xff{}", WeightsError, "UTF-8"),
        (" " * (17 << 20), WeightsError, "16 MB"),
        ("{}", WeightsError, "neither"),
        ({"version": 2}, WeightsError, "version 2"),
        ({"model": 3}, WeightsError, "'model'"),
        ({"tokenizer_fingerprint": 3}, WeightsError, "tokenizer_fingerprint"),
        ({"model": {"vocab_sise": 3}}, ConfigError, "did you mean 'vocab_size'"),
    ],
)
def test_damaged_config(
    text: str | bytes | dict[str, Any], error: type[Exception], message: str, saved: Path
) -> None:
    file = saved / "config.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(file.read_text(encoding="utf-8")) | text)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=f"config.json.*{message}"):
        load(saved)


@pytest.mark.parametrize("name", ["vocab_size", "n_layers", "d_ff", "head_dim", "max_seq_len"])
def test_a_config_cannot_ask_for_more_than_the_file_holds(name: str, tmp_path: Path) -> None:
    """Refused before anything of that size is built."""
    save(make(GPT2), None, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model"][name] = 10**12
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(WeightsError, match=rf"{name}=\d000000000000"):
        load(tmp_path / "out")


def test_hugging_face_files_that_cannot_be_read(tmp_path: Path) -> None:
    save(make(), None, tmp_path / "out", format="hf")
    file, index = tmp_path / "out/model.safetensors", tmp_path / "out/model.safetensors.index.json"
    file.rename(tmp_path / "elsewhere.safetensors")
    for shards in ({"a": "../elsewhere.safetensors"}, {"a": 3}, [], None):
        index.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
        with pytest.raises(Gpt2LlamaError, match=r"index.json|No such file"):
            load(tmp_path / "out")
    index.unlink()
    (tmp_path / "out/pytorch_model.bin").touch()
    with pytest.raises(FileError, match="pickle"):
        load(tmp_path / "out")


def test_what_is_not_available(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"int8, int4 or keep \(got 'int5'\)"):
        load(saved, quant="int5")
    with pytest.raises(InputError, match=r"onnx.*one of gpt2llama, hf, gguf"):
        save(make(), None, tmp_path / "out", format="onnx")
    with pytest.raises(InputError, match="dtype='F16' is GGUF's"):
        save(make(), None, tmp_path / "out", format="hf", dtype="F16")
    with pytest.raises(FileError, match="not there"):
        load(tmp_path / "nowhere")


def test_a_folder_in_use_is_refused(saved: Path, tmp_path: Path) -> None:
    before = (saved / "config.json").read_bytes()
    with pytest.raises(FileError, match="is in use"):
        save(make(GPT2), None, saved)
    assert (saved / "config.json").read_bytes() == before
    with pytest.raises(FileError, match="is in use"):
        save(make(), None, saved / "config.json")
    (tmp_path / "empty").mkdir()
    save(make(), None, tmp_path / "empty")
    load(tmp_path / "empty")


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 8 kB. Not a fixture: pytest's own log may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("format", ["gpt2llama", "hf"])
def test_full_disk_leaves_nothing_behind(format: str, tmp_path: Path) -> None:
    with small_disk(), pytest.raises(FileError, match=r"cannot write .*out.*too large"):
        save(make(), None, tmp_path / "new" / "out", format)
    assert not (tmp_path / "new").exists()


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            checkpoint.write_model(folder, make(), None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["gpt2llama", "hf"])
def test_nothing_is_initialised(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors that only imports torch._dynamo, which takes seconds; so does torch.cat."""
    save(make(GPT2), None, tmp_path / "out", format)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("initialised")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(Tensor, name, fail)
    monkeypatch.setattr(torch, "cat", fail)
    load(tmp_path / "out")
