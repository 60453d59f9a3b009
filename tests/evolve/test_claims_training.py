"""Comparisons that decide claims: trained once, stretched from the same weights, judged right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from gpt2llama import load
from gpt2llama.data.batches import TokenData
from gpt2llama.evolve import run as runs
from gpt2llama.evolve.claims import training
from gpt2llama.evolve.claims.chart import long_context_svg
from gpt2llama.evolve.claims.decide import decide
from gpt2llama.evolve.claims.trained import Comparison, comparisons_of
from gpt2llama.evolve.claims.training import Study, Trained
from gpt2llama.evolve.measure import loss_by_position, rescaled, windows_of
from gpt2llama.model.config import LinearScaling
from gpt2llama.tokenizer import load_tokenizer
from gpt2llama.train.config import TrainConfig

TINY = {
    "vocab_size": 300, "max_seq_len": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": None,
    "d_model": 16, "d_ff": 16,
}  # fmt: skip
SCHEMES = Comparison(
    number=13, base="zh-3m", baseline="rope", setup=TINY, match="none",
    variants={"learned": {"position": "learned"}, "no positions": {"position": "none"},
              "sinusoidal": {"position": "sinusoidal"}},
    reads="loss by position",
)  # fmt: skip
SCALINGS = Comparison(
    number=14, base="zh-3m", baseline="rope", setup=TINY, match="none",
    variants={"theta × 4": {"rope_theta": 4e4}, "PI": {"rope_scaling": LinearScaling(4.0)},
              "YaRN": {"rope_theta": 8e4}},
    reads="loss by position", without_training=True,
)  # fmt: skip
RATES = Comparison(
    number=9, base="zh-3m", baseline="rope", setup=TINY, match="none",
    variants={"learned": {"position": "learned"}}, learning_rates=(1e-3, 1e-2),
)  # fmt: skip
TRAIN = TrainConfig(
    steps=5, batch_size=4, seq_len=16, eval_every=2, checkpoint_every=1, compile="off",
    warmup_steps=2,
)  # fmt: skip


def study_of(folder: Path, data: Path) -> Study:
    (folder / "data").symlink_to(data)
    tokens = TokenData.open(data)
    return Study(
        folder=folder, train=TRAIN, seq_len=16, seeds=2, digest=runs.digest_of(tokens),
        corpus="tiny", held_out_tokens=len(tokens.held_out), nats_to_bits=0.5,
    )  # fmt: skip


def no_news(*_: Any) -> None:
    pass


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("claims")
    study = study_of(folder, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "COMPARISONS", (SCHEMES, SCALINGS))
        return study, study.run(SCHEMES, 1, no_news), study.run(SCALINGS, 1, no_news)


def test_a_run_that_two_comparisons_ask_for_is_made_once(
    done: tuple[Study, Trained, Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, schemes, scalings = done
    jobs = study.planned([SCHEMES, SCALINGS])
    assert len(jobs) == 4 * 2 + 4 * 2  # RoPE's two are both comparisons'
    assert {path.name for path in (study.folder / "runs").iterdir()} == {job.key for job in jobs}
    assert study.left(jobs) == []
    kept = list((study.folder / "runs").glob("*/model"))
    assert len(kept) == 2  # only what is stretched

    def train(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "_train", train)
    assert study.run(SCHEMES, 1, no_news) == schemes
    assert study.run(SCALINGS, 1, no_news) == scalings


def test_weights_that_are_missing_are_made_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(tmp_path, data)
    (first, *_) = study.jobs(SCALINGS, {})
    result = runs.finish(tmp_path, first)  # as a sweep that keeps no weights
    monkeypatch.setattr(training, "COMPARISONS", (SCHEMES, SCALINGS))
    (again, *_) = study.jobs(SCALINGS, {})
    assert again.keep
    assert again.key == first.key
    assert study.left([again]) == [again]
    assert runs.finish(tmp_path, again)["bits_per_byte"] == result["bits_per_byte"]
    model, tokenizer = load(tmp_path / "runs" / again.key / "model")
    assert model.config == again.run.model
    assert tokenizer is not None


def test_stretching_begins_with_the_trained_weights(
    done: tuple[Study, Trained, Trained],
) -> None:
    study, schemes, scalings = done
    jobs = study.jobs(SCALINGS, {})
    data = TokenData.open(study.folder / "data")
    start = load_tokenizer(study.folder / "data" / "tokenizer").bos_id
    for seed, base in enumerate(jobs):
        before = scalings.runs["rope"][seed]["by_position_before"]
        own = schemes.runs["rope"][seed]["by_position"]
        assert list(before) == ["16", "32", "64"]
        for length, losses in own.items():
            assert before[length] == pytest.approx(losses, rel=1e-6)
        model, _ = load(study.folder / "runs" / base.key / "model")
        pi = rescaled(model.eval(), "linear", 4.0)
        read = loss_by_position(pi, windows_of(data, [64], start)[64])
        found = scalings.runs["PI"][seed]["by_position_before"]["64"]
        assert found == pytest.approx(read, rel=1e-6)
        tuned = scalings.runs["PI"][seed]["by_position"]["64"]
        assert sum(tuned) < sum(found)  # one step on text like it


def test_each_config_takes_its_own_best_rate(data: Path, tmp_path: Path) -> None:
    study = study_of(tmp_path, data)
    trained = study.run(RATES, 1, no_news)
    for name, tuned in trained.tuned.items():
        assert [result["lr"] for result in tuned] == [1e-3, 1e-2]
        assert {result["seed"] for result in tuned} == {training.TUNING_SEED}
        best = min(tuned, key=lambda result: result["bits_per_byte"])["lr"]
        assert {result["lr"] for result in trained.runs[name]} == {best}


# What is decided, on made-up runs: five seeds, a common part by seed, noise of 0.001.
NOISE = (0.001, -0.001, 0.0005, -0.0005, 0.0)


def made_up(
    comparison: Comparison, bits: dict[str, float | None], positions: Any = None
) -> Trained:
    """positions: name -> key -> length -> mean nats per token."""
    found: dict[str, list[dict[str, Any]]] = {}
    for i, name in enumerate(comparison.configs()):
        for seed, common in enumerate((0.0, 0.2, -0.1, 0.05, 0.1)):
            more = common + NOISE[(seed + i) % 5]
            mean = bits.get(name, 2.0)
            run: dict[str, Any] = {
                "seed": seed, "diverged": mean is None,
                "bits_per_byte": None if mean is None else mean + more, "lr": 0.003,
            }  # fmt: skip
            for key, lengths in (positions or {}).get(name, {}).items():
                run[key] = {
                    str(n): None if at is None else [at + more, at + more]
                    for n, at in lengths.items()
                }
            found.setdefault(name, []).append(run)
    rates = [{"bits_per_byte": 2.0, "diverged": False}, {"bits_per_byte": 2.5, "diverged": False},
             {"bits_per_byte": None, "diverged": True}]  # fmt: skip
    return Trained(found, dict.fromkeys(found, rates))


@pytest.fixture(scope="module")
def study() -> Study:
    train = TRAIN.replace(steps=50, seq_len=128, batch_size=16)
    return Study(
        folder=Path("x"), train=train, seq_len=128, seeds=5, digest="", corpus="tiny",
        held_out_tokens=1000, nats_to_bits=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.0, "no-difference-shown"), (0.05, "hurts"), (-0.05, "helps")]
)
def test_a_single_change(study: Study, change: float, verdict: str) -> None:
    (comparison,) = comparisons_of(8)
    trained = made_up(comparison, {"rmsnorm": 2.0 + change})
    finding = decide(8, [(comparison, trained)], study)
    assert finding.verdict == verdict
    size = f"{abs(change):.4f} bits per byte ("
    assert re.match(rf"rmsnorm against layernorm [+−]{re.escape(size)}", finding.figure)
    assert f"{abs(change):.4f}（" in finding.figure_zh
    assert ("−0.05" in finding.figure) == (change < 0)
    assert ("could detect" in finding.figure) == (change == 0.0)


def test_of_several_variants_the_worst_counts(study: Study) -> None:
    (comparison,) = comparisons_of(23)
    helps = {"2 kv heads": 1.9, "1 kv head": 1.9}
    for change, verdict in (({}, "helps"), ({"1 kv head": 2.1}, "hurts"),
                            ({"1 kv head": None}, "not-measured")):  # fmt: skip
        trained = made_up(comparison, helps | change)
        assert decide(23, [(comparison, trained)], study).verdict == verdict


def test_what_diverged_is_not_measured(study: Study) -> None:
    (comparison,) = comparisons_of(8)
    finding = decide(8, [(comparison, made_up(comparison, {"rmsnorm": None}))], study)
    assert finding.verdict == "not-measured"
    assert "not comparable" in finding.figure


def test_perplexity_and_loss_in_percent(study: Study) -> None:
    """A fall of 0.02 bits per byte at half a bit per nat: exp(-0.04) - 1; of 2.05 bits, 0.98%."""
    for number, what, share in ((28, "perplexity", math.expm1(-0.04)), (29, "loss", -0.02 / 2.05)):
        done = [(c, made_up(c, {"swiglu": 1.98})) for c in comparisons_of(number)]
        finding = decide(number, done, study)
        assert finding.verdict == "helps"
        assert f"{what} −{-100 * share:.1f}% (" in finding.figure
        assert finding.figure.count("swiglu") == 1  # FLOPs matched is the same pair


@pytest.mark.parametrize(
    ("shallow", "deep", "verdict"),
    [(1.9, 1.8, "true"), (1.9, 1.9, "wrong-in-part"), (2.0, 1.8, "wrong-in-part"),
     (2.0, 2.0, "no-difference-shown"), (2.1, 2.1, "hurts"), (1.9, None, "not-measured")],
)  # fmt: skip
def test_pre_norm_by_depth(study: Study, shallow: float, deep: float | None, verdict: str) -> None:
    bits = {"pre-norm, 4 layers": shallow, "pre-norm, 24 layers": deep}
    done = [(c, made_up(c, bits)) for c in comparisons_of(9)]
    finding = decide(9, done, study)
    assert finding.verdict == verdict
    if deep is not None:
        more = f"{deep - shallow:+.4f}".replace("-", "−")
        assert f"from 4 to 24 layers the difference changes by {more} (" in finding.figure
    lost = 1 if deep is not None else 6  # one of its rates, and all of its seeds
    assert "post-norm, 24 layers: 0.003, 0.5000, 1" in finding.figure
    assert f"pre-norm, 24 layers: 0.003, 0.5000, {lost}" in finding.figure


@pytest.mark.parametrize(
    ("rope", "sinusoidal", "verdict"),
    [
        (2.0, 2.5, "true"),
        (2.5, 2.5, "wrong"),
        (2.0, 2.0, "wrong-in-part"),
        (2.5, 2.0, "wrong"),
        (2.0, None, "not-measured"),
        (2.012, 2.5, "no-difference-shown"),
    ],
)
def test_extrapolation(study: Study, rope: float, sinusoidal: float | None, verdict: str) -> None:
    """RoPE at 2.012 costs 0.024 behind the trained length, with a noise that hides it."""
    (comparison,) = comparisons_of(13)
    beyond = {"rope": rope, "sinusoidal": sinusoidal, "no positions": 2.0, "learned": None}
    positions = {
        name: {"by_position": {128: 2.0, 256: loss, 512: loss}} for name, loss in beyond.items()
    }
    if sinusoidal is None:
        positions["sinusoidal"] = {"by_position": {128: None, 256: None}}
    trained = made_up(comparison, {}, positions)
    if rope == 2.012:
        for run, noise in zip(trained.runs["rope"], (0.4, -0.4, 0.2, -0.2, 0.0), strict=True):
            run["by_position"]["256"] = [loss + noise for loss in run["by_position"]["256"]]
    finding = decide(13, [(comparison, trained)], study)
    assert finding.verdict == verdict
    assert "learned undefined" in finding.figure
    assert f"rope {2 * (rope - 2):+.3f} (" in finding.figure


@pytest.mark.parametrize(
    ("pi", "others", "verdict"),
    [(2.0, 2.0, "true"), (2.5, 2.0, "wrong-in-part"), (2.5, 2.5, "wrong")],
)
@pytest.mark.parametrize("plain", [2.0, 2.5])
def test_stretching(study: Study, plain: float, pi: float, others: float, verdict: str) -> None:
    (comparison,) = comparisons_of(14)
    twice = dict.fromkeys(comparison.configs(), others) | {"PI": pi, "rope": plain}
    if plain == pi == others:  # nothing to mend
        verdict = "no-difference-shown" if plain == 2.0 else "wrong"
    positions = {
        name: {"by_position_before": {128: 2.0, 256: loss, 512: 3.0}, "by_position": {512: 1.5}}
        for name, loss in twice.items()
    }
    finding = decide(14, [(comparison, made_up(comparison, {}, positions))], study)
    assert finding.verdict == verdict
    assert f"PI {pi - 2:+.3f} (" in finding.figure
    assert ", +1.000 at 512, −0.500 after the tune" in finding.figure
    assert "after 10 steps" in finding.figure


def test_the_ladder_refutes_by_one_rung(study: Study) -> None:
    (comparison,) = comparisons_of(46)
    names = list(comparison.configs())
    same = decide(46, [(comparison, made_up(comparison, {}))], study)
    assert same.verdict == "no-difference-shown"
    seen = made_up(comparison, dict.fromkeys(names[5:], 1.9))
    finding = decide(46, [(comparison, seen)], study)
    assert finding.verdict == "wrong-in-part"
    assert f"{names[5]} against {names[4]} −0.1" in finding.figure
    assert finding.figure.count("helps") == 1
    falling = {name: 2.0 - 0.1 * i for i, name in enumerate(names)}
    assert decide(46, [(comparison, made_up(comparison, falling))], study).verdict == "wrong"
    rising = {name: 2.0 + 0.1 * i for i, name in enumerate(names)}
    assert decide(46, [(comparison, made_up(comparison, rising))], study).verdict == "hurts"


def test_the_chart_has_every_scheme(done: tuple[Study, Trained, Trained]) -> None:
    study, schemes, scalings = done
    drawn = long_context_svg(schemes, scalings, study, "en")
    for name in {*schemes.runs, *scalings.runs} - {"learned"}:
        assert f">{name}</text>" in drawn
    assert "ends here: learned" in drawn
    assert drawn.count("<polyline") == 4 + 3 + 4  # schemes; scalings before; all after
