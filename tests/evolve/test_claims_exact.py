"""Every claim that arithmetic or a small computation decides, against independent figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpt2llama import preset
from gpt2llama.evolve.claims import CLAIMS, IN_CHINESE, Finding

# By hand, from the papers and checkpoints: the verdict, and what the figure must contain.
EXPECTED: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("true", ("equal",)),
    2: ("wrong", ("0.3015", "0.9901", "torch gives 0.3015")),
    3: ("wrong", (f"{math.sqrt(3 / 4):.4f}", f"{math.sqrt(255 / 256):.4f}")),
    4: ("wrong", ("1e-06: 1-7b 1-13b 1-30b;", "1e-05: 1-65b 2-7b", "from memory")),
    5: ("wrong", ("1.19e-07", "0.278", "0.032")),
    7: ("wrong", ("65:",)),
    10: ("true", ("1024 tokens run", "1025 positions")),
    11: ("true-if", ("less than 1e-12",)),
    12: ("both", ("Meta", "Hugging Face")),
    15: ("wrong", ("3: theta 500,000; 3.1: 500,000", "8/1/4/8192", "factor 32")),
    16: ("true", ("16 GiB as bool", "64 GiB as fp32")),
    17: ("true", ("67,108,864", "8,388,608", "8 times")),
    18: ("true", ("10,737,418,240", "1,342,177,280", "1.25 GiB")),
    19: ("true-if", ("50.0%", "51.56%")),
    20: ("true-if", ("3-8b 4", "3-70b 8", "3.2-1b 4", "3.2-3b 3")),
    21: ("wrong", ("llama-2-70b",)),
    22: ("wrong", ("= 64: 256 → 128", "512 → 256 with V")),
    25: ("true-if", ("Spark 17, H100 209, MI300X 330", "from memory")),
    26: ("true", ("524,288 · 786,432 · 523,776",)),
    27: ("wrong-in-part", ("28,672", "28,416", "14,336")),
    30: ("true-if", ("back exactly", "-0.278 at -1.278")),
    31: ("true-if", ("82,944", "0.067%")),
    33: ("wrong", ("32,000", "128,000 + 256 special")),
    34: ("not-measurable-here", ("tokenizer compare",)),
    35: ("true-if", ("31.0%", "5.2% of XL")),
    36: ("true-if", ("tied: 3.2-1b 3.2-3b; untied: 1-7b", "3.3-70b")),
    37: ("wrong", ("256,000", "7.4%", "2,470")),
    38: ("true-if", ("262,668,288", "394,002,432", "not tied: 3-8b")),
    40: ("true", ("12.05 MiB", "12.64 MB")),
    41: ("true-if", ("4.7e-04",)),
    42: ("wrong-in-part", ("right: RMSNorm, RoPE", "not so: GQA, SwiGLU", "ReLU²")),
    43: ("wrong-in-part", ("from memory", "OPT, BLOOM")),
    44: ("not-measured", ("int8 and int4",)),
    45: ("incomplete", ("o_proj transposed",)),
    47: ("wrong", ("from memory", "989 against 1307", "3.35 against 5.3")),
    48: ("true", ("30 ms against 0.1 ms",)),
    49: ("true-if", ("$48", "from memory")),
    50: ("wrong", ("2023-02",)),
    51: ("true-if", ("682", "704 (+3.1%)")),
    52: ("true", ("less than 1e-12",)),
    53: ("both", ("2,951,424 + 256 V", "3,143,680", "3,147,520")),
    54: ("not-measurable-here", ("from memory", "would decide")),
    55: ("wrong", ("undefined: head_dim,", "ours equals")),
}


def finding(number: int) -> Finding:
    return CLAIMS[number - 1].check()


def test_the_list_is_whole_and_in_order() -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 56))
    trained = {claim.number for claim in CLAIMS if claim.trained}
    assert trained == {8, 9, 13, 14, 23, 28, 29, 32, 39, 46}
    timed = {claim.number for claim in CLAIMS if claim.times_machine}
    assert timed == {6, 24}
    assert EXPECTED.keys() | trained | timed == set(range(1, 56))


@pytest.mark.parametrize("number", EXPECTED)
def test_verdict_and_figure(number: int) -> None:
    verdict, parts = EXPECTED[number]
    found = finding(number)
    assert found.verdict == verdict
    for part in parts:
        assert part in found.figure


def digits(text: str) -> set[str]:
    return {word for word in text.replace(",", "").split() if word.isdigit() and len(word) > 3}


@pytest.mark.parametrize("number", EXPECTED)
def test_chinese_says_the_same_numbers(number: int) -> None:
    found = finding(number)
    together = found.figure_zh.replace(",", "")
    assert all(number in together for number in digits(found.figure))
    assert any("\u4e00" <= c <= "\u9fff" for c in found.figure_zh + IN_CHINESE[found.verdict])
    assert ("from memory" in found.figure) == ("凭记忆" in found.figure_zh)


@pytest.mark.parametrize("number", [6, 24])
def test_speeds_are_of_this_machine(number: int) -> None:
    found = finding(number)
    assert found.verdict in ("true", "true-if")
    assert f"{torch.get_num_threads()} threads" in found.figure


def test_relative_score_by_its_closed_form() -> None:
    """Of two vectors of ones 2 apart: 2 Σ cos(2 · theta^(-2i/E))."""
    frequencies = 10000.0 ** (-2 * np.arange(32) / 64)
    assert f"({2 * np.cos(2 * frequencies).sum():.2f})" in finding(11).figure


def test_dynamic_ntk_moves_the_score_by_its_formula() -> None:
    """2 · 204/128 − 1 stretches theta at the longer text."""
    theta = 10000.0 * (2 * 204 / 128 - 1) ** (64 / 62)
    near, far = (2 * np.cos(2 * t ** (-2 * np.arange(32) / 64)).sum() for t in (1e4, theta))
    assert f"by {abs(far - near):.2g} with dynamic NTK" in finding(11).figure


def test_meta_widths_by_hand() -> None:
    assert 4096 * 7 == 28_672 == preset("llama-3-70b").d_ff
    assert 256 * 111 == 28_416 >= int(1.3 * 21_845) > 256 * 110
    assert 256 * 56 == 14_336 == preset("llama-3-8b").d_ff


def test_vocabulary_for_fifteen_percent() -> None:
    for vocab, tables in ((2_034.5, 1), (2_470.5, 2)):
        share = 256 * vocab / (2_951_424 + tables * 256 * vocab)
        assert share == pytest.approx(0.15, rel=1e-3)


def test_share_of_zeros_is_the_normal_distributions() -> None:
    symmetric, shifted = (
        float(word.removesuffix("%")) for word in finding(30).figure.split() if word.endswith("%")
    )
    assert symmetric == pytest.approx(50, abs=1)
    assert shifted == pytest.approx(50 * math.erfc(1 / math.sqrt(2)), abs=1)  # Φ(−1)


def test_cost_of_gpt2_by_hand() -> None:
    rate = 8 * 989e12 * 0.4
    per_token = 6 * (48 * 12 * 1600**2 + 50257 * 1600) + 12 * 48 * 1600 * 1024
    figure = finding(49).figure
    assert f"{rate * 7200 / per_token / 1e9:.1f}B tokens" in figure
    assert f"takes {20 * 1_557_611_200 * per_token / rate / 3600:.0f} h" in figure


def test_bias_bounds_by_hand() -> None:
    biases = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    figure = finding(54).figure
    assert f"({biases:,} biases" in figure
    assert f"{15e12 * 2 * biases / (989e12 * 0.4) / 3600:,.0f} H100-hours if fused" in figure
    assert f"{15e12 * 6 * biases / 3.35e12 / 3600:,.0f} if not" in figure


def test_checks_leave_torchs_random_state_alone() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    finding(30)
    finding(45)
    assert torch.equal(before, torch.random.get_rng_state())
