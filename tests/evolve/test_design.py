"""Which models a design compares: one switch at a time, sizes matched."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.errors import InputError
from gpt2llama.evolve.design import SWITCHES, TOLERANCE, differences, fit, rungs_of
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import ladder, preset
from gpt2llama.plan import flops_per_token, parameters

CHAIN = ["2017", "pre-norm", "gelu", "learned", "rmsnorm", "rope", "swiglu", "gqa", "no-bias"]


def size(match: str, cfg: ModelConfig) -> int:
    return parameters(cfg)["total"] if match == "params" else flops_per_token(cfg)


@pytest.mark.parametrize("match", ["params", "flops", "none"])
def test_the_ten_rungs(match: Any) -> None:
    rungs = rungs_of("zh-3m-2017", "zh-3m", "ladder", match)
    assert [rung.name for rung in rungs] == [*CHAIN, "untied"]
    assert [rung.previous for rung in rungs] == [None, *CHAIN]
    for rung, config in zip(rungs, ladder().values(), strict=True):
        widths = {"d_ff": 1, "n_layers": 1}
        assert rung.config.replace(**widths) == config.replace(**widths)
    groups = [set(fields) for fields in SWITCHES.values()]
    for before, after in itertools.pairwise(rungs):
        a, b = vars(before.config), vars(after.config)
        changed = {f for f in a if a[f] != b[f]} - {"d_ff", "n_layers"}
        assert any(changed <= group for group in groups), changed
        assert all(f"{field}: " in after.change for field in changed)


@pytest.mark.parametrize("match", ["params", "flops"])
@pytest.mark.parametrize("design", ["ladder", "add", "drop"])
@pytest.mark.parametrize("base", ["zh-3m-2017", "zh-3m-gpt2"])
def test_sizes_are_matched_and_the_change_is_said(base: str, design: str, match: Any) -> None:
    rungs = rungs_of(base, "zh-3m", design, match)
    goal = size(match, rungs[0].config)
    for rung in rungs:
        assert abs(size(match, rung.config) - goal) <= TOLERANCE * goal
        if rung.adjusted:
            assert rung.adjusted.startswith(("d_ff: ", "n_layers: "))
            assert rung.adjusted.split(" → ")[-1].split(",")[0] in {
                str(rung.config.d_ff), str(rung.config.n_layers),
            }  # fmt: skip


def test_add_changes_the_base_and_drop_the_target() -> None:
    first, last = preset("zh-3m-gpt2"), preset("zh-3m")
    changes = differences(first, last)
    added = rungs_of("zh-3m-gpt2", "zh-3m", "add", "none")
    dropped = rungs_of("zh-3m-gpt2", "zh-3m", "drop", "none")
    assert [r.previous for r in added[1:]] == ["zh-3m-gpt2"] * len(changes)
    assert [r.previous for r in dropped[1:]] == ["zh-3m"] * len(changes)
    for fields, more, less in zip(changes.values(), added[1:], dropped[1:], strict=True):
        assert more.config == first.replace(**fields)
        assert less.config == last.replace(**{f: getattr(first, f) for f in fields})
        assert less.name.startswith("without ")


def test_the_differences_lead_from_one_to_the_other() -> None:
    for base, to in (("zh-3m-2017", "zh-3m"), ("gpt2", "gpt2-xl"), ("llama-1-7b", "llama-2-70b")):
        first, last = preset(base), preset(to)
        wanted = {f for f in vars(first) if getattr(first, f) != getattr(last, f)}
        found = {f for fields in differences(first, last).values() for f in fields}
        assert found == wanted


def test_a_factorial_has_every_combination() -> None:
    chosen = ["norm", "position", "n_kv_heads"]
    rungs = rungs_of("zh-3m-gpt2", "zh-3m", "factorial", "none", switches=chosen)
    assert len({rung.config for rung in rungs}) == 8
    assert [rung.levels for rung in rungs[:3]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    first, last = preset("zh-3m-gpt2"), preset("zh-3m")
    for rung in rungs:
        for on, field in zip(rung.levels, chosen, strict=True):
            assert getattr(rung.config, field) == getattr(last if on else first, field)
    assert rungs[-1].name == "rmsnorm + rope + gqa 2"


@given(st.integers(8, 2000), st.floats(0.8, 1.3))
def test_fit_comes_close_where_that_can_be(d_ff: int, share: float) -> None:
    cfg = preset("zh-3m").replace(d_ff=d_ff)
    goal = round(share * parameters(cfg)["total"])
    found = fit(cfg, lambda c: parameters(c)["total"], goal)
    unchanged = {"d_ff": 1, "n_layers": 1}
    assert found.replace(**unchanged) == cfg.replace(**unchanged)
    assert abs(size("params", found) - goal) <= abs(size("params", cfg) - goal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "llama-3.2-1b", "ladder", "none"), "gpt2 has a vocabulary of 50,257"),
        (("zh-3m", "zh-3m", "ladder", "none"), "differ in nothing"),
        (("zh-3m-2017", "zh-3m", "stairs", "none"), "the design must be one of ladder"),
        (("zh-3m-2017", "zh-3m", "ladder", "size"), "--match must be one of params"),
        (("gpt2", "gpt2-xl", "ladder", "params"), "cannot be matched"),
    ],
)
def test_what_cannot_be_compared(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rungs_of(*arguments)


def test_switches_of_a_factorial() -> None:
    with pytest.raises(InputError, match=r"'norms' does not differ .* did you mean 'norm'"):
        rungs_of("zh-3m-gpt2", "zh-3m", "factorial", "none", switches=["norms"])
    with pytest.raises(InputError, match="is for --design factorial"):
        rungs_of("zh-3m-gpt2", "zh-3m", "add", "none", switches=["norm"])
    with pytest.raises(InputError, match="7 switches make 128 models"):
        rungs_of("zh-3m-2017", "zh-3m", "factorial", "none")
