"""`gpt2llama plan`: every section by figures worked out by hand, and tables that do not fray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len

from gpt2llama.model.presets import preset
from gpt2llama.plan import Hardware
from gpt2llama.train import speed

Run = Callable[..., tuple[str, str]]


def found(run: Run, *words: object) -> dict[str, Any]:
    return json.loads(run("plan", *words, "--json")[0])


def test_what_fits(run: Run) -> None:
    """8B in bf16 is 16,060,522,496 bytes, a token of its cache 131,072."""
    fits = found(run, "llama-3-8b", "--memory", "24GB", "--memory", "16GB", "--on", "h100")["fits"]
    left = 24 * 10**9 - 16_060_522_496
    assert fits[0] == {
        "memory": "24GB",
        "bytes": 24 * 10**9,
        "largest_batch": left // (131_072 * 8192),
        "largest_context": left // 131_072,
    }
    assert (fits[1]["largest_batch"], fits[1]["largest_context"]) == (0, 0)
    assert (fits[2]["memory"], fits[2]["bytes"]) == ("h100", 80 * 10**9)
    out, _ = run("plan", "llama-3-8b", "--memory", "16GB")
    assert "16GB: even the bf16 weights do not fit, 16.06 GB." in out


def test_named_hardware_by_weights_alone(run: Run) -> None:
    names = ["dgx-spark", "h100", "mi300x"]
    options = [word for name in names for word in ("--on", name)]
    speeds = found(run, "llama-3-8b", "--context", 1, *options)["roofline"]
    assert [s["hardware"] for s in speeds] == names
    assert [round(s["weights_alone_tokens_per_second"]) for s in speeds] == [17, 209, 330]
    # A step leaves out the look-up table, all but one row of 4,096, and reads 131,072 bytes of KV.
    read = 16_060_522_496 - 2 * 128_255 * 4096 + 131_072
    assert speeds[0]["decode"]["tokens_per_second"] == pytest.approx(273e9 / read)
    assert [s["decode"]["limit"] for s in speeds] == ["bandwidth"] * 3


def test_training_cost(run: Run) -> None:
    words = ["gpt2", "--tokens", "10B", "--on", "a100-80gb", "--mfu", 0.5, "--price", 2]
    training = found(run, *words)["training"]
    flops = 10**10 * 854_438_400
    hours = flops / (312e12 * 0.5) / 3600
    assert (training["tokens"], training["flops"]) == (10**10, flops)
    assert training["on"][0]["hours"] == pytest.approx(hours)
    assert training["on"][0]["cost"] == pytest.approx(2 * hours)


def test_settings_and_changes(run: Run) -> None:
    got = found(run, "zh-3m", "--set", "n_kv_heads=4", "--compare", "zh-3m")
    # 4 layers of K and V, each two more heads of 64 for a width of 256; 2 bytes a cached number.
    assert got["parameters"] - got["compare"]["parameters"] == 4 * 2 * 2 * 64 * 256 == 262_144
    assert got["changes_from"] == "zh-3m"
    assert got["changes"] == [
        {
            "field": "n_kv_heads",
            "before": 2,
            "after": 4,
            "parameters": 262_144,
            "flops_per_token": 6 * 262_144,
            "kv_bytes_per_token": 4 * 2 * 2 * 64 * 2,
            "refused": "",
        }
    ]
    assert (
        run("plan", "--compare", "gpt2", "gpt2-xl")[0]
        == (run("plan", "gpt2-xl", "--compare", "gpt2")[0])
    )


def test_a_field_that_cannot_change_alone(run: Run) -> None:
    out, _ = run("plan", "llama-3-8b")
    assert "n_kv_heads cannot change alone: n_kv_heads must divide n_heads." in out


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-405b --batch 4096 --on h100 --on mi300x --memory 24GB --tokens 15T --price 3",
        "--compare transformer-2017 llama-3.1-405b --context 4096 --on laptop-ddr5 --tokens 15T",
        "zh-3m --compare zh-3m-2017 --on rtx-4090 --memory 1.5GiB",
        "gpt2 --tokens 2M",
    ],
)
def test_tables_keep_to_80_columns(run: Run, words: str) -> None:
    out, _ = run("plan", *words.split())
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    edges = [i for i, line in enumerate(lines) if line[:1] in "┌┏└"]
    assert len(edges) >= 4
    for top, bottom in zip(edges[::2], edges[1::2], strict=True):
        assert len({cell_len(line.rstrip()) for line in lines[top : bottom + 1]}) == 1
    assert "…" not in out


def test_training_memory(run: Run) -> None:
    """zh-3m at 16 × 128 is fullest at the loss: two tables of logits beside what is kept."""
    got = found(run, "zh-3m", "--batch", 16)["training_memory"]
    logits = 4 * 16 * 128 * 4096
    parts = got["activations_by_part"]
    assert parts["logits"] == logits + 8 * 16 * 128  # and the targets
    assert parts["mlp"] == 4 * 4 * 16 * 128 * 4 * 512  # 4 layers, 4 factors
    assert (got["moment"], got["activations"]) == ("loss", sum(parts.values()))
    assert (got["weights"], got["optimizer"]) == (4 * 3_410_176, 8 * 3_410_176)
    assert got["peak"] == 12 * 3_410_176 + got["activations"] + 2 * logits
    words = ["zh-3m", "--batch", 16, "--optimizer", "muon", "--accumulate", 4]
    muon = found(run, *words)["training_memory"]
    hidden = 786_432 + 1_572_864  # one moment of attention's and the MLP's matrices
    assert muon["optimizer"] == 8 * 3_410_176 - 4 * hidden
    assert muon["gradients"] == 4 * 3_410_176  # the first batch's, while the second computes
    assert "to train, 4 × 16 × 128 tokens, muon" in run("plan", *words)[0]


def test_models_on_disk_and_runs(run: Run, tmp_path: Path) -> None:
    from gpt2llama import Transformer, save
    from gpt2llama.train.config import RunConfig, TrainConfig

    cfg = preset("zh-3m").replace(n_layers=1)
    save(Transformer(cfg), None, tmp_path / "saved")
    started = tmp_path / "run"
    started.mkdir()
    text = RunConfig(model=cfg, train=TrainConfig(), data="").to_toml()
    (started / "config.toml").write_text(text, encoding="utf-8")
    wanted = found(run, "zh-3m", "--set", "n_layers=1")["parts"]
    for place in (tmp_path / "saved", started, started / "config.toml"):
        assert found(run, place)["parts"] == wanted


def test_a_preset_is_not_fetched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """smollm2-135m is an asset too: arithmetic needs no download."""
    monkeypatch.setattr("gpt2llama.assets.fetch", lambda *_: pytest.fail("fetched"))
    assert found(run, "smollm2-135m")["parameters"] == 134_515_008


def test_this_machine_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(step_bytes: int) -> Hardware:
        asked.append(step_bytes)
        return Hardware(name="this-machine", bandwidth=1e9, flops=1e11, memory=None)

    monkeypatch.setattr(speed, "this_machine", measured)
    got = found(run, "zh-3m", "--this-machine")
    assert asked == [got["weight_bytes"] + got["kv_bytes"]]  # tied: all of it is read
    assert got["roofline"][0]["decode"]["by_bandwidth"] == pytest.approx(1e9 / asked[0])
    assert "fits" not in got  # a system that does not say how much memory it has
    words, peaks = ("zh-3m", "--this-machine", "--optimizer", "muon", "--context", 16), []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr("gpt2llama.machine.bf16_if_native", lambda device, dtype=dtype: dtype)
        peaks.append(found(run, *words)["training_memory"]["workspace"])
    assert peaks[1] < peaks[0] == found(run, *words[:1], *words[2:])["training_memory"]["workspace"]


def test_names_are_not_markup(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "[red]"
    place.mkdir()
    run_file = place / "a.toml"
    from gpt2llama.train.config import RunConfig, TrainConfig

    text = RunConfig(model=preset("zh-3m"), train=TrainConfig(), data="").to_toml()
    run_file.write_text(text, encoding="utf-8")
    assert "[red]" in run("plan", run_file)[0].replace("\n", "")
