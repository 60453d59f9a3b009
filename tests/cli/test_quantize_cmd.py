"""`gpt2llama quantize`, and the other commands on what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.finetune.lora import AdapterStore, LoraConfig, adapters, add_lora, merge
from gpt2llama.quant.apply import dequantised, quantise, quantised_layers, schemes_of
from gpt2llama.quant.calibration import windows
from gpt2llama.quant.scheme import SCHEMES
from gpt2llama.tokenizer import train_bpe

TEXT = "却说曹操引军至赤壁。the reader and the model\n" * 9
CFG = g.ModelConfig(
    vocab_size=320, max_seq_len=32, n_layers=2, n_heads=2, n_kv_heads=1, d_model=32, d_ff=48
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    g.save(g.Transformer(CFG), train_bpe([TEXT], 280), folder / "ours")
    return folder / "ours"


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    return source.parent / "text.txt"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_report_is_true(run: Any, source: Path, text: Path, kind: str, tmp_path: Path) -> None:
    out, _ = run(
        "quantize", source, "--out", tmp_path / "q", "--scheme", kind, "--text", text, "--json"
    )
    got = json.loads(out)
    model, small = g.load(source)[0], g.load(tmp_path / "q")[0]
    plain = dequantised(small)
    count = sum(p.numel() for p in model.parameters())
    assert got["parameters"] == count
    for name, error in got["errors"].items():
        before, after = (m.get_submodule(name).weight.detach() for m in (model, plain))
        assert error == pytest.approx(float((after - before).norm() / before.norm()))
    assert got["errors"].keys() == schemes_of(small).keys()
    left = {f"layers.{i}.mlp.down_proj": 48 for i in range(2)}
    assert got["left"] == left
    assert got["quantised_share"] == pytest.approx(1 - (2 * 48 * 32 + 5 * 32) / count)
    # 320 + 2 · (32 + 2 · 16 + 32 + 2 · 48) rows of 32 inputs, a scale each; fp32 for the rest.
    rows = 320 + 2 * 192
    bits = rows * (32 * (8 if kind == "int8" else 4) + 16) + 32 * (2 * 48 * 32 + 5 * 32)
    assert got["bits_per_weight"] == pytest.approx(bits / count)
    for name, folder in (("before", source), ("after", tmp_path / "q")):
        score, _ = run("eval", folder, "--text", text, "--json")
        assert got["bits_per_byte"][name] == json.loads(score)["bits_per_byte"]
    assert got["bits_per_byte"]["before"] != got["bits_per_byte"]["after"]


@pytest.mark.parametrize(
    ("command", "at", "says"),
    [
        ("quantize", "weights.save", "stopped: nothing was written"),
        (
            "quantize",
            "train.metrics.evaluate_text",
            "stopped while scoring: the model is whole, in",
        ),
        ("convert", "weights.save", "stopped: nothing was written"),
        ("data", "cli.data.prepare", "stopped: nothing was written"),
    ],
)
def test_ctrl_c_says_what_there_is(
    run: Any,
    source: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    at: str,
    says: str,
) -> None:
    """In one line, and as it says: a whole model, or nothing."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"gpt2llama.{at}", interrupted)
    out = tmp_path / "out"
    options = {
        "quantize": ["quantize", source, "--out", out, "--text", text],
        "convert": ["convert", source, out, "--to", "hf"],
        "data": ["data", "prepare", text, "--tokenizer", source, "--out", out],
    }
    printed, err = run(*options[command], code=130)
    assert printed == ""
    assert err.startswith(says)
    assert err.count("\n") == 1
    if "whole" in says:
        g.load(out)
    else:
        assert not any(tmp_path.iterdir())


def test_an_adapter_is_merged_first(run: Any, source: Path, tmp_path: Path) -> None:
    """As everywhere where one is loaded: of the sum the same integers."""
    tuned, lora = g.load(source)[0], LoraConfig(rank=2, modules="up_proj lm_head")
    add_lora(tuned, lora)
    for layer in adapters(tuned).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    (tmp_path / "adapter").mkdir()
    AdapterStore(source, lora).write(tmp_path / "adapter", tuned, None)
    run("quantize", tmp_path / "adapter", "--out", tmp_path / "q")
    merge(tuned)
    want = quantised_layers(quantise(tuned, SCHEMES["int8"]))
    got = quantised_layers(g.load(tmp_path / "q")[0])
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name].words, layer.words) for name, layer in want.items())
    plain = quantised_layers(quantise(g.load(source)[0], SCHEMES["int8"]))
    assert not torch.equal(plain["lm_head"].words, want["lm_head"].words)


def test_options_become_the_scheme(run: Any, source: Path, tmp_path: Path) -> None:
    out, err = run(
        "quantize", source, "--out", tmp_path / "q", "--scheme", "int4", "--zero", "--no-head",
        "--weight-only",
    )  # fmt: skip
    assert out.strip() == str(tmp_path / "q")
    assert re.search(r"1 × lm_head +left as it is: --no-head", err)
    assert re.search(r"2 × layers\.\*\.mlp\.down_proj +left as it is: 32 must divide its 48", err)
    assert re.search(r"2 × layers\.\*\.mlp\.up_proj +error \d\.\d\d%, at most \d\.\d\d%", err)
    out, _ = run("inspect", tmp_path / "q", "--json")
    got = json.loads(out)
    assert got["quantization"] == {
        "bits": 4, "group": 32, "zero": True, "activations": "float", "method": "rtn",
        "head": False,
    }  # fmt: skip
    assert got["notes"] == []
    assert got["dtypes"]["int4"] == 2 * 6
    small = g.load(tmp_path / "q")[0]
    assert not any("head" in name or "embed" in name for name in quantised_layers(small))


def test_the_commands_take_it(run: Any, source: Path, text: Path, tmp_path: Path) -> None:
    small = tmp_path / "q"
    run("quantize", source, "--out", small, "--scheme", "int4")
    model, tokenizer = g.load(small)
    assert tokenizer is not None
    out, _ = run("generate", small, "却说", "-n", 5, "--json")
    assert json.loads(out)["text"] == g.generate(model, tokenizer, "却说", max_new_tokens=5)
    out, _ = run("inspect", small, "--tensors")
    assert "quantised  13 × int4, group 32, activations int8, rtn" in out
    assert "lm_head.words and embed_tokens.words: tied" in out
    for to, options in (("hf", ()), ("gguf", ()), ("gpt2llama", ("--dtype", "F32"))):
        target = tmp_path / f"{to}.gguf"
        run("convert", small, target, "--to", to, *options)
        back = g.load(target)[0]
        assert schemes_of(back) == {}
        assert torch.equal(back.lm_head.weight, model.lm_head.dequantise())
    run("convert", small, tmp_path / "again", "--to", "gpt2llama")
    assert schemes_of(g.load(tmp_path / "again")[0]) == schemes_of(model)
    run("data", "prepare", text, "--tokenizer", source, "--out", tmp_path / "data")
    _, err = run(
        "train", "--from", small, "--data", tmp_path / "data", "--out", tmp_path / "r",
        "--set", "seq_len=8", code=1,
    )  # fmt: skip
    assert "is quantised and cannot train" in err


def test_what_is_refused(run: Any, source: Path, text: Path, tmp_path: Path) -> None:
    place = ("--out", tmp_path / "q")
    run("quantize", source, *place)
    for options, said in (
        (place, "in use"),
        (("--out", tmp_path / "r", "--group", 64), "no matrix of the model has inputs that 64"),
        (("--out", tmp_path / "r", "--group", 7), "group must be 32, 64, 128"),
        (("--out", tmp_path / "r", "--zero"), "zero is for 4 bits"),
        (("--out", tmp_path / "r", "--method", "awq"), "--calibration is missing: awq needs"),
        (("--out", tmp_path / "r", "--calibration", text), "--calibration is for gptq and awq"),
    ):
        _, err = run("quantize", source, *options, code=1)
        assert said in err
    _, err = run("quantize", tmp_path / "q", "--out", tmp_path / "r", code=1)
    assert "quantised already" in err
    assert not (tmp_path / "r").exists()


def test_calibration_windows() -> None:
    ids = list(range(100, 200))
    (all_of_it,) = windows(ids, 30, count=4)
    assert all_of_it.tolist() == [list(range(s, s + 30)) for s in (100, 130, 160)]
    drawn = [torch.cat(windows(ids, 10, count=5, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for row in drawn[0].tolist():
        assert row == list(range(row[0], row[0] + 10))
    with pytest.raises(g.errors.DataError, match="give a longer one"):
        windows(ids, 101)
