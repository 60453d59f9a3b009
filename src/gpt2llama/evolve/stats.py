"""What a sweep shows: rungs compared over seeds, with intervals and verdicts.

Intervals cover other seeds, not other texts. They are not corrected for the number of comparisons
and verdicts are, so an interval may leave out 0 where no difference is shown.
How they come about, and what they assume, stands in `intervals`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special  # type: ignore[import-untyped]  # SciPy has no types

from ..errors import InputError
from .intervals import (
    ALPHA,
    CONFIDENCE,
    Array,
    Mask,
    detectable,
    estimate,
    holm,
    pooled_degrees_of_freedom,
)

BySeed = Mapping[int, float | None]  # held-out bits per byte; None: the run diverged

BOOTSTRAP_FROM = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One difference, in bits per byte: below 0 is better. None: too few seeds to say."""

    name: str
    seeds: int  # on which no run of it diverged
    diverged: int  # seeds on which one did
    difference: float | None
    low: float | None  # t-interval, uncorrected
    high: float | None
    p: float | None  # two-sided
    p_holm: float | None
    verdict: str | None  # helps, hurts, no difference shown; not comparable: too many diverged
    detectable: float | None  # the true difference that would be found with POWER, uncorrected
    correlation: float | None  # of the two rungs over seeds: what pairing gains
    bootstrap: tuple[float, float] | None  # percentile interval of the mean


@dataclass(frozen=True, kw_only=True)
class Analysis:
    comparisons: tuple[Comparison, ...]
    pooled: bool
    equal_variance_p: float | None  # None: fewer than 2 comparisons or 3 seeds
    degrees_of_freedom: float  # not pooled: the fewest of any comparison; 0: none has 2 seeds
    confidence: float = CONFIDENCE


def compare(results: Mapping[str, BySeed], pairs: Sequence[tuple[str, str]]) -> Analysis:
    """Each rung less its reference, in the order of `pairs`: (rung, reference)."""
    rows, values, lost = _table(results)
    weights, correlations = np.zeros((len(pairs), len(rows))), []
    for weight, pair in zip(weights, pairs, strict=True):
        if unknown := [name for name in pair if name not in rows]:
            raise InputError(f"no results for rung {unknown[0]!r}; there are {', '.join(rows)}")
        if pair[0] == pair[1]:
            raise InputError(f"rung {pair[0]!r} cannot be compared with itself; name another")
        weight[[rows[name] for name in pair]] = 1, -1
        correlations.append(_correlation(*(values[rows[name]] for name in pair)))
    return _analyse([rung for rung, _ in pairs], values, lost, weights, correlations)


def factorial(results: Mapping[tuple[int, ...], BySeed], switches: Sequence[str]) -> Analysis:
    """Main effects, then two-way interactions, of all 2^k combinations of k switches.

    `results` is keyed by levels: 1 for each switch that is on, 0 for one that is off. An effect is
    the mean with the switch on less the mean with it off; an interaction `a × b` is half of what
    b on, rather than off, adds to the effect of a (Box, Hunter and Hunter 2005, chapter 5). A seed
    on which any run diverged is left out of all. The contrasts are orthogonal, so uncorrelated.
    """
    rows, values, lost = _table(results)
    wanted = set(itertools.product((0, 1), repeat=len(switches)))
    if wrong := rows.keys() ^ wanted:
        levels = min(wrong)
        raise InputError(
            f"a factorial design of {', '.join(switches)} needs results for each of its "
            f"{len(wanted)} combinations of levels and no other; {levels} is "
            f"{'missing' if levels in wanted else 'none of them'}"
        )
    signs = 2.0 * np.array(list(rows)).T - 1  # (switches, runs)
    effects = dict(zip(switches, signs, strict=True))
    for (a, sign_a), (b, sign_b) in itertools.combinations(list(effects.items()), 2):
        effects[f"{a} × {b}"] = sign_a * sign_b
    weights = np.array(list(effects.values())) / (len(rows) / 2)
    return _analyse(list(effects), values, lost, weights, [None] * len(effects))


def _table(results: Mapping[Any, BySeed]) -> tuple[dict[Any, int], Array, Mask]:
    """The row of each rung; bits per byte (rungs, seeds), NaN: diverged or never run; which did."""
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    values = np.full((len(results), len(seeds)), np.nan)
    lost = np.zeros(values.shape, dtype=bool)
    for i, (name, by_seed) in enumerate(results.items()):
        for seed, value in by_seed.items():
            if value is not None and not math.isfinite(value):
                raise InputError(
                    f"bits per byte of {name} with seed {seed} must be finite, or None if the "
                    f"run diverged (got {value})"
                )
            at = i, seeds.index(seed)
            values[at], lost[at] = (np.nan, True) if value is None else (value, False)
    return {name: i for i, name in enumerate(results)}, values, lost


def _analyse(
    names: Sequence[str],
    values: Array,
    lost: Mask,
    weights: Array,
    correlations: Sequence[float | None],
) -> Analysis:
    """values (rungs, seeds), NaN: none; lost (rungs, seeds); weights (comparisons, rungs)."""
    diverged = [int(lost[w != 0].any(0).sum()) for w in weights]
    rounding = 1e-12 * np.abs(np.nan_to_num(values)).max(initial=0)
    per_seed = np.array([w[w != 0] @ values[w != 0] for w in weights])
    per_seed = per_seed.reshape(len(weights), values.shape[1])  # even with no comparison
    per_seed[np.abs(per_seed) < rounding] = 0
    present = ~np.isnan(per_seed)
    samples = [row[here] for row, here in zip(per_seed, present, strict=True)]
    tested = [i for i, sample in enumerate(samples) if len(sample) >= 2]
    # Runs equal to the bit (a switch without effect) say nothing of the noise of the others.
    noisy = [i for i in tested if samples[i].any()]

    mean = np.array([sample.mean() if len(sample) else np.nan for sample in samples])
    p, p_holm, error, df = (np.full(len(names), np.nan) for _ in range(4))
    p[tested], error[tested], df[tested] = 1, 0, present[tested].sum(1) - 1
    equal_p = np.array(np.nan)
    if noisy:
        pooled_df = pooled_degrees_of_freedom(weights[noisy], present[noisy])
        estimates = estimate([samples[i] for i in noisy], pooled_df)
        p[noisy], error[noisy], df[noisy], equal_p = estimates
    p_holm[tested] = holm(p[tested])
    half, least = error * special.stdtrit(df, 1 - ALPHA / 2), detectable(error, df)
    columns = {"difference": mean, "low": mean - half, "high": mean + half, "p": p}
    columns |= {"p_holm": p_holm, "detectable": least}
    comparisons = tuple(
        Comparison(
            name=name,
            seeds=len(samples[i]),
            diverged=diverged[i],
            verdict=_verdict(mean[i], p_holm[i], diverged[i]),
            correlation=correlations[i],
            bootstrap=_bootstrap(samples[i]),
            **{field: _known(column[i]) for field, column in columns.items()},
        )
        for i, name in enumerate(names)
    )
    return Analysis(
        comparisons=comparisons,
        pooled=len(noisy) > 1 and not equal_p < ALPHA,
        equal_variance_p=_known(equal_p),
        degrees_of_freedom=float(df[noisy or tested].min()) if tested else 0.0,
    )


def _known(value: float | Array) -> float | None:
    return None if np.isnan(value) else float(value)


def _verdict(difference: float, p_holm: float, diverged: int) -> str | None:
    if np.isnan(p_holm):
        return "not comparable" if diverged else None
    if p_holm >= ALPHA:
        return "no difference shown"
    return "helps" if difference < 0 else "hurts"


def _correlation(a: Array, b: Array) -> float | None:
    """Pearson's, over common seeds; None below 3 of them or where a rung never varies."""
    a, b = np.stack([a, b])[:, ~np.isnan(a + b)]
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _bootstrap(sample: Array) -> tuple[float, float] | None:
    """The same at each call; None below BOOTSTRAP_FROM seeds, where it is far too narrow."""
    if len(sample) < BOOTSTRAP_FROM:
        return None
    picked = np.random.default_rng(0).integers(len(sample), size=(10_000, len(sample)))
    low, high = np.quantile(sample[picked].mean(1), [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)
