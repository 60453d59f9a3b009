"""`gpt2llama inspect` and `convert` on tiny saved models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.tokenizer import train_bpe

CFG = g.ModelConfig(
    vocab_size=280, max_seq_len=32, n_layers=2, n_heads=2, n_kv_heads=1, d_model=16, d_ff=24
)
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "ours"
    tokenizer = train_bpe(["却说曹操引军至赤壁。the reader and the model\n" * 3], 280)
    g.save(g.Transformer(CFG), tokenizer, folder)
    return folder


def test_inspect_json(run: Any, source: Path) -> None:
    out, _ = run("inspect", source, "--json")
    got = json.loads(out)
    assert got["parameters"] == sum(p.numel() for p in g.Transformer(CFG).parameters())
    assert got["kv_bytes_per_token"] == 2 * 2 * 2 * 1 * 8  # k and v, 2 bytes, L, K, E
    assert g.ModelConfig.from_dict(got["config"]) == CFG
    assert got["dtypes"] == {"float32": 20}


def test_inspect_shows_the_way_from_gpt2(run: Any, source: Path) -> None:
    out, _ = run("inspect", source)
    below = out[out.index("gpt2 →") :]
    assert "rmsnorm" in below
    assert "tie_embeddings" not in below  # tied, both


def test_inspect_two(run: Any, source: Path) -> None:
    out, _ = run("inspect", "zh-3m", source, "--json")
    assert json.loads(out)["differences"]["d_ff"] == [512, 24]
    out, _ = run("inspect", "llama-3.2-1b", "llama-3.2-3b")
    assert "d_model" in out
    assert "rope_theta" not in out


def test_inspect_needs_no_torch(source: Path) -> None:
    code = (
        "import sys; sys.argv = ['gpt2llama', 'inspect', sys.argv[1], '--json']\n"
        "from gpt2llama.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source)], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("to", ["hf", "gguf", "gpt2llama"])
def test_convert_keeps_the_model(run: Any, source: Path, to: str, tmp_path: Path) -> None:
    target = tmp_path / ("m.gguf" if to == "gguf" else "m")
    out, err = run("convert", source, target, "--to", to)
    assert out.strip() == str(target)
    assert f"read: gpt2llama, 20 tensors, {source}" in err
    assert f"written: {to}, 20 tensors, {target}" in err
    model, tokenizer = g.load(target)
    want, before = g.load(source)
    torch.testing.assert_close(model(IDS), want(IDS), rtol=0, atol=0)
    assert tokenizer.encode("曹操 the 42") == before.encode("曹操 the 42")
    assert tokenizer.apply_chat([{"role": "user", "content": "hi"}]) == before.apply_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_convert_to_another_dtype(run: Any, source: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "half", "--to", "hf", "--dtype", "bf16")
    assert {p.dtype for p in g.load(tmp_path / "half")[0].parameters()} == {torch.bfloat16}
    _, err = run("convert", source, tmp_path / "q", "--to", "hf", "--dtype", "Q8_0", code=1)
    assert "--dtype must be one of F32, F16, BF16 for hf" in err


def test_convert_refuses_what_is_in_the_way(run: Any, source: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("", encoding="utf-8")
    _, err = run("convert", source, tmp_path / "used", "--to", "hf", code=1)
    assert "is in use; name a new folder" in err
    (tmp_path / "m.gguf").write_text("precious", encoding="utf-8")
    _, err = run("convert", source, tmp_path / "m.gguf", "--to", "gguf", code=1)
    assert (tmp_path / "m.gguf").read_text(encoding="utf-8") == "precious"


def test_inspect_says_what_will_not_load(run: Any, source: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "hf", "--to", "hf")
    assert "will not load" not in run("inspect", tmp_path / "hf")[0]
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    out, _ = run("inspect", tmp_path / "hf", "--json")
    (note,) = json.loads(out)["notes"]
    assert note.startswith("it will not load: it holds")


def test_inspect_tensors(run: Any, source: Path) -> None:
    out, _ = run("inspect", source, "--tensors", "--json")
    tensors = json.loads(out)["tensors"]
    assert len(tensors) == 20
    assert tensors[0]["ours"] == ["embed_tokens.weight", "lm_head.weight"]
    out, _ = run("inspect", source, "--tensors")
    assert " 2 × layers.*.mlp.up_proj.weight" in out
    assert "is a preset" in run("inspect", "gpt2", "--tensors", code=1)[1]


def test_two_that_do_not_differ(run: Any, source: Path) -> None:
    assert run("inspect", source, source)[0] == "no switch differs\n"


def test_inspect_takes_the_tokenizer_from_the_header(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("convert", source, tmp_path / "m.gguf", "--to", "gguf")
    tokenizer = g.load_tokenizer(source)
    want = {"pieces": tokenizer.vocab_size, "special": len(tokenizer.special_ids)}
    want["chat_template"] = tokenizer.chat_template

    def build(*_: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr("gpt2llama.tokenizer.bpe.BPETokenizer.__init__", build)
    for path in (source, tmp_path / "m.gguf"):
        got = json.loads(run("inspect", path, "--json")[0])
        assert got["tokenizer"] == want


def test_convert_refuses_before_it_loads(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("gpt2llama.weights.load", load)
    (tmp_path / "m.gguf").touch()
    for how in (["--to", "onnx"], ["--to", "gguf", "--dtype", "Q4_K"], ["--to", "gguf"]):
        assert run("convert", source, tmp_path / "m.gguf", *how, code=1)[1].count("\n") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_part_of_a_model(run: Any, source: Path, name: str) -> None:
    _, err = run("inspect", source / name, code=1)
    assert err == f"gpt2llama: {source / name} is a part of a model; give its folder, {source}\n"
