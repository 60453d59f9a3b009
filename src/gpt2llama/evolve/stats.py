"""Paired comparisons of rungs over seeds: intervals, tests, verdicts, and what could be seen.

A run's bits per byte are modelled as rung + seed + noise. The seed's part (data order, start) is
common to all rungs and cancels in the difference of two rungs on one seed. At 3 seeds one
comparison's own variance has 2 degrees of freedom, too few to show much; so all comparisons of a
sweep share one: their sums of squares around their means, over sum(n - 1).

Comparisons that share a rung share its noise: neighbours on a ladder are correlated by -1/2,
comparisons with one base by +1/2. The pooled variance stays unbiased and independent of the
means, but varies more than sum(n - 1) degrees of freedom promise. It has Box's (tr V)² / tr(V²),
V being the covariance of all deviations: 6.2 (n - 1), not 9 (n - 1), on a ladder of ten rungs
(Box 1954, Annals of Mathematical Statistics 25, 290-302). A two-way analysis of variance keeps
9 (n - 1), but counts every pair of rungs: where the base that all are compared with is the noisy
one, it misses most of that noise. Holm's correction (1979, Scandinavian Journal of Statistics 6,
65-70) allows any dependence.

Pooling wants differences that vary alike. That is checked by the test of Brown and Forsythe (1974,
JASA 69, 364-367), its structural zeros removed (Noguchi and Gel 2010, Journal of Nonparametric
Statistics 22, 897-908), without which it all but never rejects at 3 seeds. It stays weak there:
of ladders with one rung five times as noisy as the rest it finds 1 in 5 at 3 seeds, 9 in 10 at 8;
where it fails to, intervals at that rung are too narrow. With 2 seeds nothing can be checked.

Intervals cover other seeds, not other texts. They are not corrected for the number of comparisons
and verdicts are, so an interval may leave out 0 where no difference is shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special  # type: ignore[import-untyped]

from ..errors import InputError

Array = npt.NDArray[np.float64]
BySeed = Mapping[int, float | None]  # held-out bits per byte; None: the run diverged

CONFIDENCE, POWER, BOOTSTRAP_FROM = 0.95, 0.80, 8
ALPHA = 0.05  # of intervals, verdicts and the check of equal variances


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One difference, in bits per byte: below 0 is better. None: too few seeds to say."""

    name: str
    seeds: int  # on which no run of it diverged
    difference: float | None
    low: float | None  # t-interval, uncorrected
    high: float | None
    p: float | None  # two-sided
    p_holm: float | None
    verdict: str | None  # helps, hurts, no difference shown
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
    rows, values = _table(results)
    weights, correlations = np.zeros((len(pairs), len(rows))), []
    for weight, pair in zip(weights, pairs, strict=True):
        if unknown := [name for name in pair if name not in rows]:
            raise InputError(f"no results for rung {unknown[0]!r}; there are {', '.join(rows)}")
        if pair[0] == pair[1]:
            raise InputError(f"rung {pair[0]!r} cannot be compared with itself; name another")
        weight[[rows[name] for name in pair]] = 1, -1
        correlations.append(_correlation(*(values[rows[name]] for name in pair)))
    return _analyse([rung for rung, _ in pairs], values, weights, correlations)


def factorial(results: Mapping[tuple[int, ...], BySeed], switches: Sequence[str]) -> Analysis:
    """Main effects, then two-way interactions, of all 2^k combinations of k switches.

    `results` is keyed by levels: 1 for each switch that is on, 0 for one that is off. An effect is
    the mean with the switch on less the mean with it off; an interaction `a × b` is half of what
    b on, rather than off, adds to the effect of a (Box, Hunter and Hunter 2005, chapter 5). A seed
    on which any run diverged is left out of all. The contrasts are orthogonal, so uncorrelated.
    """
    rows, values = _table(results)
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
    return _analyse(list(effects), values, weights, [None] * len(effects))


def estimate(samples: Sequence[Array], pooled_df: float) -> tuple[Array, Array, Array, Array]:
    """p-value, standard error and its degrees of freedom of each mean; p of the variance check.

    `samples` hold at least 2 differences each on their last axis; axes before it are sweeps of
    their own. Shapes (…, samples), the last (…); NaN where the check is not defined.
    """
    mean = np.stack([sample.mean(-1) for sample in samples], -1)
    own = np.stack([sample.var(-1, ddof=1) for sample in samples], -1)
    own_df = np.array([sample.shape[-1] - 1.0 for sample in samples])
    equal_p = equal_variance_p(samples)
    apart = equal_p[..., None] < ALPHA
    shared = (own @ own_df / own_df.sum())[..., None]
    error = np.sqrt(np.where(apart, own, shared) / (own_df + 1))
    df = np.where(apart, own_df, pooled_df)
    with np.errstate(divide="ignore"):  # the same difference on every seed
        return 2 * special.stdtr(df, -np.abs(mean) / error), error, df, equal_p


def equal_variance_p(samples: Sequence[Array]) -> Array:
    """Brown and Forsythe's test, structural zeros removed, over the samples' last axis."""
    spreads = [_spread(sample) for sample in samples]
    n = np.array([spread.shape[-1] for spread in spreads])
    means = np.stack([spread.mean(-1) for spread in spreads], -1)
    between = ((means - (means @ n / n.sum())[..., None]) ** 2) @ n
    within = sum(spread.var(-1) * spread.shape[-1] for spread in spreads)
    df = len(n) - 1, n.sum() - len(n)
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0: fewer than 2 samples, 3 seeds
        return np.asarray(special.fdtrc(*df, between / df[0] / (within / df[1])))


def _spread(sample: Array) -> Array:
    """Distances from the median, less the one that says nothing: 0, or equal to another."""
    distances = np.sort(np.abs(sample - np.median(sample, -1, keepdims=True)), -1)
    if distances.shape[-1] % 2 == 0:  # the two middle values lie equally far: (m, m) -> (0, √2 m)
        distances[..., 1] *= math.sqrt(2)
    return distances[..., 1:]


def pooled_degrees_of_freedom(weights: Array, present: npt.NDArray[np.bool_]) -> float:
    """Box's (tr V)² / tr(V²), for `weights` (comparisons, rungs), `present` (comparisons, seeds).

    V need not be built: the block of two comparisons is their covariance times the product of
    their centrings, over the seeds that both have.
    """
    covariance = weights @ weights.T
    both, n = present.astype(float) @ present.T, present.sum(1)
    blocks = both * (1 - 1 / n - 1 / n[:, None]) + both**2 / np.outer(n, n)
    return float((covariance.diagonal() @ (n - 1)) ** 2 / (covariance**2 * blocks).sum())


def detectable(error: Array, df: Array) -> Array:
    """The true difference that a two-sided 5% t-test finds with POWER, by the noncentral t.

    Left out is the chance to find it with the wrong sign, below 1e-5. `error` is an estimate, and
    so is this: over many sweeps, differences as large as each reports are found a little less
    often than POWER (75 to 77% on a ladder of 3 to 5 seeds).
    """
    critical = special.stdtrit(df, 1 - ALPHA / 2)
    return np.asarray(error * special.nctdtrinc(df, 1 - POWER, critical))


def holm(p: Array) -> Array:
    """Step-down adjusted p-values over the last axis, in the order given."""
    order = np.argsort(p, -1)
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(steps, -1), 1), -1)
    return adjusted


def _table(results: Mapping[Any, BySeed]) -> tuple[dict[Any, int], Array]:
    """The row of each rung, and bits per byte (rungs, seeds); NaN: diverged or never run."""
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    values = np.full((len(results), len(seeds)), np.nan)
    for row, (name, by_seed) in zip(values, results.items(), strict=True):
        for seed, value in by_seed.items():
            if value is not None and not math.isfinite(value):
                raise InputError(
                    f"bits per byte of {name} with seed {seed} must be finite, or None if the "
                    f"run diverged (got {value})"
                )
            row[seeds.index(seed)] = np.nan if value is None else value
    return {name: row for row, name in enumerate(results)}, values


def _analyse(
    names: Sequence[str], values: Array, weights: Array, correlations: Sequence[float | None]
) -> Analysis:
    """`values` (rungs, seeds), NaN where there is none; `weights` (comparisons, rungs)."""
    rounding = 1e-12 * np.abs(np.nan_to_num(values)).max(initial=0)
    all_seeds = np.array([w[w != 0] @ values[w != 0] for w in weights])
    all_seeds[np.abs(all_seeds) < rounding] = 0
    present = ~np.isnan(all_seeds)
    samples = [row[here] for row, here in zip(all_seeds, present, strict=True)]
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
            verdict=_verdict(mean[i], p_holm[i]),
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


def _verdict(difference: float, p_holm: float) -> str | None:
    if np.isnan(p_holm):
        return None
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
