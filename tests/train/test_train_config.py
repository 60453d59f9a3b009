from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import ConfigError, FileError
from gpt2llama.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    YarnScaling,
)
from gpt2llama.model.presets import preset, presets
from gpt2llama.train.config import RunConfig, TrainConfig, learning_rate

RUN = RunConfig(model=preset("zh-3m"), train=TrainConfig(), data="data")


def rates(**settings: Any) -> list[float]:
    cfg = TrainConfig(**{"lr": 2.0, "steps": 100, "warmup_steps": 10, "min_lr": 0.1, **settings})
    return [learning_rate(cfg, step) for step in range(cfg.steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_up_to_the_full_rate(schedule: str) -> None:
    assert rates(schedule=schedule)[:11] == pytest.approx([*(0.2 * i for i in range(1, 11)), 2.0])
    assert rates(schedule=schedule, warmup_steps=0)[0] == 2.0


def test_cosine() -> None:
    curve = rates()[10:]
    assert curve[45] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert curve[30] == pytest.approx(2.0 * (0.1 + 0.9 * 0.75))  # cos 60° = 1/2
    assert curve[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(curve))


def test_wsd_is_flat_and_then_falls_in_a_line() -> None:
    curve = rates(schedule="wsd", decay=0.5, min_lr=0.0)
    assert curve[10:56] == pytest.approx([2.0] * 46)
    assert curve[55:] == pytest.approx([2.0 * (100 - i) / 45 for i in range(55, 101)])
    assert rates(schedule="wsd")[-1] == pytest.approx(0.2)


def test_constant() -> None:
    assert rates(schedule="constant")[10:] == pytest.approx([2.0] * 91)


def test_a_warm_up_longer_than_the_run() -> None:
    assert rates(warmup_steps=1000) == pytest.approx([2.0 * (i + 1) / 1000 for i in range(101)])


def through_a_file(run: RunConfig, folder: Path) -> RunConfig:
    (folder / "config.toml").write_text(run.to_toml(), encoding="utf-8")
    return RunConfig.read(folder / "config.toml")


def test_every_preset_comes_back_from_toml(tmp_path: Path) -> None:
    assert len(presets()) >= 30
    for name in presets():
        run = RunConfig(model=preset(name), train=TrainConfig(), data="数据\\'\"\t")
        assert through_a_file(run, tmp_path) == run, name


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(2.0),
        NTKScaling(2.0),
        DynamicScaling(2.0),
        YarnScaling(4.0, 64, attention_factor=1.5),
        YarnScaling(4.0, 64),
        Llama3Scaling(8.0, 1.0, 4.0, 64),
    ],
)
def test_every_scaling_comes_back_from_toml(scaling: Any, tmp_path: Path) -> None:
    run = RunConfig(model=preset("zh-3m").replace(rope_scaling=scaling), train=RUN.train, data="d")
    assert through_a_file(run, tmp_path) == run


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": None},
        {"eval_every": None},
        {"checkpoint_every": None},
        {"seq_len": 32, "patience": 3, "device": "cpu", "optimizer": "muon", "compile": "on"},
    ],
)
def test_every_training_field_comes_back_from_toml(changes: Any, tmp_path: Path) -> None:
    run = RunConfig(model=RUN.model, train=TrainConfig().replace(**changes), data="d")
    assert through_a_file(run, tmp_path) == run


@settings(deadline=None, max_examples=50)
@given(
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    data=st.text(st.characters(exclude_categories=["Cc", "Cs"])),
)
def test_any_number_and_any_path_come_back(
    lr: float, data: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunConfig(model=RUN.model, train=TrainConfig(lr=lr), data=data)
    assert through_a_file(run, tmp_path_factory.mktemp("run")) == run


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("lr=1e-3", 1e-3),
        ("lr=3", 3),
        ("steps=1_000", 1000),
        ("tie_embeddings=false", False),
        ("clip=none", None),
        ("norm=layernorm", "layernorm"),
        ('norm="layernorm"', "layernorm"),
        ("position=none", "none"),  # here it is a word
        ("device=cuda:1", "cuda:1"),
        ('rope_scaling={type = "linear", factor = 2}', LinearScaling(2)),
    ],
)
def test_set_knows_types(pair: str, value: Any) -> None:
    run, name = RUN.set([pair]), pair.split("=")[0]
    got = getattr(run.train if hasattr(run.train, name) else run.model, name)
    assert got == value
    assert type(got) is type(value)


def test_set_changes_nothing_else_and_the_last_one_counts() -> None:
    run = RUN.set(["lr=0.5", "n_layers=2", "lr=0.25"])
    assert run.train == RUN.train.replace(lr=0.25)
    assert run.model == RUN.model.replace(n_layers=2)
    assert RUN.set([]) == RUN


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (["n_layer=2"], "no field 'n_layer'; did you mean 'n_layers'"),
        (["weight_decy=0"], "did you mean 'weight_decay'"),
        (["lr"], "'lr' must have the form key=value"),
        (["steps=many"], "steps must be a whole number above 0 .got 'many'"),
        (["steps=true"], "steps must be"),
        (["steps=0"], "steps must be"),
        (["lr=nan"], "lr must be"),
        (["schedule=linear"], "schedule must be one of cosine, wsd, constant"),
        (["rope_scaling={type = 'cubic'}"], "rope_scaling type 'cubic' must be one of linear"),
        (["seq_len=129"], "seq_len 129 is above the model's max_seq_len 128"),
        (["max_seq_len=64", "seq_len=65"], "seq_len 65 is above"),
        (["decay=1.5"], "decay=1.5"),
        (["min_lr=2"], "min_lr=2"),
        (["momentum=1"], "momentum must be below 1 .got 1"),
        (["beta2=1.5"], "beta2 must be below 1 .got 1.5"),
        (["n_heads=3"], "n_heads"),
    ],
)
def test_set_refuses(pairs: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RUN.set(pairs)


def test_replace_refuses_an_unknown_field() -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        TrainConfig().replace(stesp=3)


def test_seq_len_is_the_models_unless_set() -> None:
    assert RUN.seq_len == 128
    assert RUN.set(["seq_len=32"]).seq_len == 32
    assert RUN.set(["max_seq_len=64"]).seq_len == 64


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[model", "is not TOML"),
        (b"data = '\xff'", "is not TOML"),
        ("[trian]", "no field 'trian'; did you mean 'train'"),
        ("[train]\nstep = 3", "no field 'step'; did you mean 'steps'"),
        ("[model]\nvocab_size = 9", "lacks max_seq_len"),
        ("train = 3", "train"),
        ("model = 3", "model"),
        (RUN.to_toml().replace("max_seq_len = 128", "max_seq_len = 0"), "max_seq_len must be"),
        (RUN.to_toml().replace("lr = 0.001", "lr = 'high'"), "lr must be a number"),
    ],
)
def test_read_refuses(content: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=says):
        RunConfig.read(path)
    with pytest.raises(FileError, match=r"cannot read .*none\.toml"):
        RunConfig.read(tmp_path / "none.toml")
