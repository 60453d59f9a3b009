"""`inference_speed` and `gpt2llama bench decode|prefill|load`: what is counted, against `plan`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama import inference_speed
from gpt2llama.cli.main import main
from gpt2llama.errors import InputError
from gpt2llama.plan import decode_step, prefill_step

SIZES: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 48}
CFG = g.ModelConfig(vocab_size=80, max_seq_len=24, **SIZES)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "qkv_bias": True},
        {"position": "learned", "norm": "layernorm", "mlp_bias": True},
        {"sliding_window": 6},
    ],
)
def test_the_bytes_of_a_token_are_those_that_plan_counts(
    changes: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of plan's over the contexts; a token's bytes a second over the limit's."""
    cfg = CFG.replace(**changes)
    model = g.Transformer(cfg).to(DTYPES[dtype])
    monkeypatch.setattr(inference_speed, "read_bandwidth", lambda size: 1e9)
    monkeypatch.setattr(inference_speed, "_timed", lambda *_: (0.25, 0.5))
    got = inference_speed.measure_decoding(model, prompt=4, new=9, seconds=0)
    contexts = range(5, 13)  # the prompt's own pass gives the first of the nine
    want = sum(decode_step(cfg, n, 1, dtype, dtype).bytes for n in contexts) / len(contexts)
    assert got["bytes_per_token"] == pytest.approx(want, abs=1)
    assert got["tokens_per_second"] == 8 / 0.5
    assert got["time_to_first_token_seconds"] == 0.25
    assert got["fraction_of_limit"] == pytest.approx(16 * want / 1e9, abs=1e-4)
    assert got["bits_per_weight"] == {"fp32": 32, "bf16": 16}[dtype]
    assert (got["dtype"], got["quant"], got["new_tokens"]) == (dtype, None, 9)


def test_the_higher_of_the_limits_around_a_repeat_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([4e6, 2e6, 2e6, 1e6])
    monkeypatch.setattr(inference_speed, "gemm_limit", lambda dtype: next(limits))
    monkeypatch.setattr(inference_speed, "bf16_if_native", lambda device: torch.float32)
    times = iter([9.0, 0.1, 0.1, 0.1])  # the first warms up
    monkeypatch.setattr(inference_speed, "_timed", lambda *_: (next(times), 0.0))
    got = inference_speed.measure_prefill(g.Transformer(CFG), prompt=10, seconds=0)
    flops = prefill_step(CFG, 10).flops
    assert got["fraction_of_limit"] == pytest.approx(flops / 0.1 / 2e6, abs=1e-4)  # of 4, 2, 2
    assert got["gemm_limit_flops_per_second"] == 2e6
    assert got["tokens_per_second"] == 100


def test_a_prompt_ends_where_the_context_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def timed(_: Any, prompt: int, new: int, settings: Any) -> tuple[float, float]:
        asked.append((prompt, new))
        return 1.0, 1.0

    monkeypatch.setattr(inference_speed, "_timed", timed)
    monkeypatch.setattr(inference_speed, "read_bandwidth", lambda size: 1e9)
    monkeypatch.setattr(inference_speed, "gemm_limit", lambda dtype: 1e9)
    model = g.Transformer(CFG)
    assert inference_speed.measure_decoding(model, 20, 256, seconds=0)["new_tokens"] == 4
    assert inference_speed.measure_prefill(model, 512, seconds=0)["prompt_tokens"] == 23
    assert set(asked) == {(20, 4), (23, 1)}
    with pytest.raises(InputError, match="leaves no room"):
        inference_speed.measure_decoding(model, 23)


def test_keys_and_values_of_int8_have_scales() -> None:
    model = g.Transformer(CFG)
    pairs = 2 * CFG.n_layers * CFG.kv_heads  # a key and a value of each head, in each layer
    assert inference_speed.kv_bytes_read(model) == pairs * CFG.head_size * 4
    assert inference_speed.kv_bytes_read(model, "bf16") == pairs * CFG.head_size * 2
    assert inference_speed.kv_bytes_read(model, "int8") == pairs * (CFG.head_size + 4)


def test_every_token_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once a call of the model: one for the prompt, one for each token but one."""
    model, ticks = g.Transformer(CFG).eval(), 0

    def tick(*_: Any) -> None:
        nonlocal ticks
        ticks += 1

    model.register_forward_hook(tick)
    monkeypatch.setattr(inference_speed.time, "perf_counter", lambda: ticks)
    assert inference_speed._timed(model, 5, 7, {}) == (1, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    g.save(g.Transformer(CFG).to(torch.bfloat16), None, tmp_path / "model")
    return tmp_path / "model"


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """bench("decode", …) -> its JSON; what runs in a process of its own runs in this one."""

    def run(*arguments: object, code: int = 0) -> dict[str, Any]:
        argv = ["gpt2llama", "bench", *map(str, arguments), "--seconds", "0", "--json"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert (stop.value.code or 0) == code, err
        return json.loads(out) if code == 0 else {"error": err}

    monkeypatch.setattr(inference_speed, "_in_fresh_process", lambda f, *arguments: f(*arguments))
    monkeypatch.setattr(inference_speed, "read_bandwidth", lambda size: 1e12)
    monkeypatch.setattr(inference_speed, "gemm_limit", lambda dtype: 1e15)
    return run


def test_commands(bench: Bench, folder: Path) -> None:
    decoding = bench("decode", "--model", folder, "--context", 8)
    assert (decoding["prompt_tokens"], decoding["new_tokens"], decoding["dtype"]) == (8, 16, "bf16")
    prefill = bench("prefill", "--model", folder, "--dtype", "fp32")
    assert (prefill["prompt_tokens"], prefill["bits_per_weight"]) == (23, 32)
    loading = bench("load", "--model", folder)
    assert sum(loading["stages"].values()) == pytest.approx(
        loading["time_to_first_token_seconds"], abs=0.1
    )
    for result in (decoding, prefill, loading):
        assert result["model"] == str(folder)
        assert result["threads"] == torch.get_num_threads()
        assert result["time_to_first_token_seconds"] > 0
        assert result["peak_rss_bytes"] is None or result["peak_rss_bytes"] > 1e7
    assert "fp32 or bf16" in bench("decode", "--dtype", "fp8", code=1)["error"]
    assert "--context" in bench("decode", "--context", 0, code=2)["error"]


def test_a_preset_has_random_weights_of_its_sizes(bench: Bench) -> None:
    got = bench("decode", "--preset", "zh-3m", "--dtype", "bf16", "--context", 4, "--new", 3)
    assert (got["model"], got["dtype"], got["bits_per_weight"]) == ("zh-3m", "bf16", 16)
    read = decode_step(g.preset("zh-3m"), 6, 1, "bf16", "bf16").bytes
    assert got["bytes_per_token"] == pytest.approx(read, rel=1e-3)


def test_loading_begins_with_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_speed, "LEAST_REPEATS", 1)
    begun = time.perf_counter()
    got = inference_speed.measure_loading(str(folder), torch.float32, seconds=0)
    waited = time.perf_counter() - begun
    assert 0 < got["stages"]["imports"] < got["time_to_first_token_seconds"] <= waited + 0.01
    assert (got["repeats"], got["dtype"]) == (1, "fp32")
