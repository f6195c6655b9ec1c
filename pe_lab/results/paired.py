"""Two variants on the same samples, or with the same seeds: the difference of their scores, its interval, and tests."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab.results.intervals import interval, mean_of

FLIPS = 100_000  # random sign flips where the exact test would need more
SIGNIFICANT = 0.05


class Difference(NamedTuple):
    """The mean difference of paired scores, its 95% interval, and the p-value of no difference.

    Attributes:
      mean, low, high: in the units of the scores.
      p: of the sign-flip test (`paired`) or of Student's t test (`paired_t`), two-sided, not corrected.
      count: pairs.
    """

    mean: float
    low: float
    high: float
    p: float
    count: int


def paired(
    scores: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Difference:
    """The difference `scores - baseline`, scores in 0..1, on the same samples.

    The interval is that of `intervals.mean_of` for (difference + 1) / 2, which is in 0..1. Samples of one cluster count
    as one, in the interval and in the test.
    """
    differences = [float(a) - float(b) for a, b in zip(scores, baseline, strict=True)]
    if not differences:
        raise ValueError("there is no pair of scores")
    found = mean_of([(d + 1) / 2 for d in differences], clusters)
    assert found is not None
    together: dict[Hashable, list[float]] = {}
    for d, cluster in zip(differences, range(len(differences)) if clusters is None else clusters, strict=True):
        together.setdefault(cluster, []).append(d)
    units = np.array([math.fsum(alike) / len(alike) for alike in together.values()])
    mean = math.fsum(differences) / len(differences)
    return Difference(mean, 2 * found.low - 1, 2 * found.high - 1, sign_flip_p(units), len(differences))


def paired_t(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The difference `scores - baseline` of pairs of any numbers: Student's t interval and its test; NaN of one pair.

    For pairs of training seeds, which are few: flipping the signs of 3 differences gives no p below 0.25. The price is
    that their distribution is taken for normal. Equal differences other than 0 have p = 0.
    """
    differences = np.asarray(scores, np.float64) - np.asarray(baseline, np.float64)
    if not len(differences):
        raise ValueError("there is no pair of scores")
    found, n = interval(differences), len(differences)
    if n == 1:
        p = math.nan
    elif np.ptp(differences) < 1e-12:
        p = 1.0 if abs(found.mean) < 1e-12 else 0.0
    else:
        from scipy.stats import ttest_1samp  # a second to import

        p = float(ttest_1samp(differences, 0.0).pvalue)
    return Difference(float(found.mean), float(found.low), float(found.high), p, n)


def sign_flip_p(units: Float[np.ndarray, " n"]) -> float:
    """The two-sided p-value of the hypothesis that each of n differences had either sign with equal chance.

    Where all differences that are not 0 have one size, it is the exact binomial test of their signs (McNemar's exact
    test, of yes-or-no answers). Otherwise all sign flips are counted, or 100,000 random ones.
    """
    units = np.asarray(units, np.float64)
    units = units[np.abs(units) > 1e-12]
    if len(units) == 0:
        return 1.0
    if np.ptp(np.abs(units)) < 1e-9:
        from scipy.stats import binomtest

        return float(binomtest(int((units > 0).sum()), len(units)).pvalue)
    total, n = abs(units.sum()) - 1e-9, len(units)
    if 2**n <= FLIPS:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        return float((np.abs(signs @ units) >= total).mean())
    rng, extreme, part = np.random.default_rng(0), 0, FLIPS // 20
    for _ in range(FLIPS // part):
        signs = 1 - 2 * rng.integers(0, 2, (part, n), np.int8)
        extreme += int((np.abs(signs @ units) >= total).sum())
    return (extreme + 1) / (FLIPS + 1)


def holm(p_values: Sequence[float]) -> Float[np.ndarray, " n"]:
    """p-values corrected for their number by Holm's step-down method (Holm 1979).

    Differences below 5% after it include no chance finding with a probability of 95%, however they depend on each
    other. It finds at least as many as Bonferroni's correction. NaN, which is no test, stays NaN and does not count.
    """
    p = np.asarray(p_values, np.float64)
    order, tests = np.argsort(p, kind="stable"), np.count_nonzero(~np.isnan(p))  # NaN comes last
    stepped = np.maximum.accumulate(p[order] * (tests - np.arange(len(p))))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(stepped, 1)
    return corrected


def verdict(difference: Difference, corrected: float) -> str:
    """better, worse or tie, by the corrected p-value."""
    if corrected >= SIGNIFICANT:
        return "tie"
    return "better" if difference.mean > 0 else "worse"
