from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt2llama.model.config import ModelConfig
from gpt2llama.plan import flops_per_token
from gpt2llama.train import speed
from gpt2llama.train.config import TrainConfig


def test_speed_is_told_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([1e9, 2e9])  # before and after: the better one counts
    monkeypatch.setattr(speed, "gemm_limit", lambda *_: next(limits))
    sizes: Any = {"n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 16}
    cfg = ModelConfig(vocab_size=40, max_seq_len=8, **sizes)
    train = TrainConfig(batch_size=2, dtype="fp32", compile="off", device="cpu")
    got = speed.measure_training(cfg, train, seq_len=4, seconds=0.01)
    assert got["flops_per_token"] == flops_per_token(cfg, 4)
    share = got["tokens_per_second"] * got["flops_per_token"] / 2e9
    assert got["fraction_of_limit"] == pytest.approx(share, abs=1e-4)
    assert (got["bits_per_weight"], got["dtype"], got["compiled"]) == (32, "float32", False)
    assert got["steps"] >= 3
    assert got["peak_rss_bytes"] is None or got["peak_rss_bytes"] > 1e7


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def bandwidth(size: int, device: str) -> float:
        sizes.append(size)
        return 7e9

    limits = {torch.float32: 3e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(speed, "pick_device", lambda _: "cpu")
    monkeypatch.setattr(speed, "read_bandwidth", bandwidth)
    monkeypatch.setattr(speed, "gemm_limit", lambda dtype, _: limits[dtype])
    for native, flops in ((torch.float32, 3e9), (torch.bfloat16, 5e9)):
        monkeypatch.setattr(speed, "bf16_if_native", lambda _, native=native: native)
        machine = speed.this_machine(10**6)
        assert (machine.bandwidth, machine.flops) == (7e9, flops)
    assert machine.memory is None or machine.memory > 10**8
    speed.this_machine(10**12)
    assert sizes == [10**6, 10**6, 1 << 29]
