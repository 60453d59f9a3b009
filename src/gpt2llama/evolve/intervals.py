"""Tests and intervals for paired differences over seeds, and what could be seen: on arrays.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special  # type: ignore[import-untyped]  # SciPy has no types

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CONFIDENCE, POWER = 0.95, 0.80
ALPHA = 0.05  # of intervals, verdicts and the check of equal variances


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


def pooled_degrees_of_freedom(weights: Array, present: Mask) -> float:
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
    often than POWER (on a ladder, 75% with 3 seeds, 77% with 5).
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
