"""Means with 95% intervals, of scores in 0..1 and of any numbers, and differences in pairs with their tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

Z95 = 1.959964  # normal quantile of a two-sided 95% interval
LEVEL = 0.95
FLIPS = 100_000  # random sign flips where the exact test would need more
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Mean:
    """A mean over `count` samples or seeds, and its interval, whose ends are NaN where one value has none.

    `stderr` is the standard error of a mean of scores; None of a single score, and where it was not asked for.
    """

    mean: float
    low: float
    high: float
    count: int
    stderr: float | None = None

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The mean, and the ends of its interval."""
        return self.mean, self.low, self.high


@dataclass(frozen=True)
class Difference(Mean):
    """The mean difference of `count` pairs, its 95% interval, and the p-value of no difference.

    Attributes:
      p: of the sign-flip test (`paired`) or of Student's t test (`paired_t`), two-sided.
      corrected: p after Holm's correction for the comparisons that are looked at together (`with_holm`).
    """

    p: float = math.nan
    corrected: float = math.nan

    @property
    def verdict(self) -> str:
        """better, worse or tie, by the corrected p-value."""
        if self.corrected >= SIGNIFICANT:
            return "tie"
        return "better" if self.mean > 0 else "worse"

    @property
    def reversed(self) -> Difference:
        """The difference with the other sign: of losses, not of their negatives."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)


def exp(value: float) -> float:
    """e^value; infinity where math.exp overflows."""
    return math.exp(value) if value < 700 else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Means


def mean_of(scores: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Mean | None:
    """The mean of scores in 0..1; None of no scores.

    The interval is Wilson's for an effective number of yes-or-no answers: n p (1 - p) / s^2, where p and s^2 are the
    mean and the variance of the scores together with one 0 and one 1. It is n where every score is 0 or 1, and larger
    where the scores vary less. The added 0 and 1 keep it finite: 20 zeros end at 16%, and so do 19 zeros and a 0.25.

    Args:
      clusters: the cluster of each score (four questions about one problem). Scores of a cluster are not independent:
        they count as one, their mean. None: all scores are independent.
    """
    if not scores:
        return None
    mean, units = math.fsum(scores) / len(scores), cluster_means(scores, clusters)
    n, middle = len(units), math.fsum(units) / len(units)
    stderr = math.sqrt(math.fsum((x - middle) ** 2 for x in units) / (n - 1) / n) if n > 1 else None
    padded = [*units, 0.0, 1.0]
    p = math.fsum(padded) / len(padded)
    variance = math.fsum((x - p) ** 2 for x in padded) / len(padded)
    low, high = wilson(mean, n * p * (1 - p) / variance)
    return Mean(mean, low, high, len(scores), stderr)


def cluster_means(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    """The mean of each cluster's values; the values themselves without clusters."""
    if clusters is None:
        return list(values)
    together: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        together.setdefault(cluster, []).append(value)
    return [math.fsum(alike) / len(alike) for alike in together.values()]


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` (Wilson 1927)."""
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(max(share * (1 - share), 0.0) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def student(values: Sequence[float], level: float = LEVEL) -> Mean:
    """The mean and its interval by Student's t, two-sided with probability `level`; NaN ends of one value or none."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return Mean(mean, math.nan, math.nan, n)
    return spread(values).mean(mean, n, level)


@dataclass(frozen=True)
class Spread:
    """What the mean of values by seed, or by seed and window of text, varies with.

    Attributes:
      seed: variance of one seed's value on the windows that were read.
      text: variance of the mean because these windows were read and no others; 0 where windows are not known.
      residual: the part of `seed` that is neither of seeds nor of windows alone.
      windows: how many; 0: not known, and an interval is over seeds alone.
    """

    seed: float
    text: float = 0.0
    residual: float = 0.0
    windows: int = 0

    def variance(self, seeds: int) -> float:
        """The variance of a mean over so many seeds, on as many windows."""
        return max(self.seed, self.residual) / seeds + self.text

    def degrees(self, seeds: int) -> float:
        """Degrees of freedom of that variance, by Satterthwaite's approximation where it has two parts."""
        if not self.windows:
            return seeds - 1
        rest, of_text = self.residual / seeds, self.text + self.residual / seeds
        parts = (self.seed / seeds) ** 2 / (seeds - 1) + of_text**2 / (self.windows - 1)
        parts += rest**2 / ((seeds - 1) * (self.windows - 1))
        return self.variance(seeds) ** 2 / parts if parts else seeds - 1

    def mean(self, mean: float, seeds: int, level: float = LEVEL) -> Mean:
        """A mean with its interval, by Student's t; NaN ends of one seed.

        With windows, the interval is at no place narrower than that of seeds alone: of three seeds, Satterthwaite's
        degrees of freedom are too many where text varies as much as seeds (93% instead of 95%).
        """
        if seeds < 2:
            return Mean(mean, math.nan, math.nan, seeds)
        p = (1 + level) / 2
        half = t_quantile(p, self.degrees(seeds)) * math.sqrt(self.variance(seeds))
        half = max(half, t_quantile(p, seeds - 1) * math.sqrt(self.seed / seeds))
        return Mean(mean, mean - half, mean + half, seeds)


def spread(values: Sequence[float]) -> Spread:
    """The spread of one value of each seed."""
    return Spread(float(np.var(values, ddof=1)) if len(values) > 1 else math.nan)


def crossed(values: Float[np.ndarray, "S W"]) -> Spread:
    """The spread of the values of S seeds on the same W windows of text, both at least 2, both random effects.

    The variance of the mean is (MS_seeds + MS_windows - MS_residual) / (S W), by the mean squares of the two-way layout
    without replication (Searle, Casella & McCulloch 1992, section 4.4; as that of clusters in two ways, Cameron,
    Gelbach & Miller 2011; a bootstrap of such data has it nearly: Owen 2007); degrees of freedom by Satterthwaite
    (1946). A component that is estimated below 0 counts as 0.
    """
    values = np.asarray(values, np.float64)
    S, W = values.shape
    of_seed, of_window, mean = values.mean(1), values.mean(0), values.mean()
    rest = values - of_seed[:, None] - of_window + mean
    residual = float((rest**2).sum()) / ((S - 1) * (W - 1))
    of_windows = S * float(((of_window - mean) ** 2).sum()) / (W - 1)
    text = max(of_windows - residual, 0.0) / (S * W)
    return Spread(float(np.var(of_seed, ddof=1)), text, residual / W, W)


def over_seeds(values: Sequence[float]) -> Mean:
    """The mean over seeds: its t interval; of two seeds their range, from the lower to the higher.

    The t interval of two values is 12.7 standard errors wide to both sides, and would hide everything.
    """
    found = student(values)
    return replace(found, low=min(values), high=max(values)) if len(values) == 2 else found


@functools.cache
def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t, which takes 0.2 ms; degrees of freedom need not be whole."""
    from scipy.stats import t  # a second to import

    return float(t.ppf(probability, degrees))


@dataclass(frozen=True)
class Interval:
    """Means over the first axis with 95% intervals (Student's t); one value has an interval of NaN."""

    mean: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]

    def __getitem__(self, place: Any) -> Interval:
        """The interval of one number, or of some."""
        return Interval(*(np.asarray(np.asarray(part)[place]) for part in (self.mean, self.low, self.high)))

    def cell(self, form: str = "{:.3g}") -> str:
        """One number for a table: `0.31 ± 0.02`; without the interval where there is none, a dash for NaN."""
        if np.isnan(self.mean):
            return "–"
        mean = form.format(float(self.mean))
        return mean if np.isnan(self.high) else f"{mean} ± {form.format(float(self.high - self.mean))}"

    def words(self, form: str = "{:.3g}") -> str:
        """One number for a sentence: `0.31 [0.29, 0.33]`; without the interval where there is none."""
        mean, low, high = (form.format(float(part)) for part in (self.mean, self.low, self.high))
        return mean if np.isnan(self.high) else f"{mean} [{low}, {high}]"


def interval(values: Float[np.ndarray, "n ..."]) -> Interval:
    """The mean over n independent values (sequences, seeds), with its 95% interval."""
    values = np.asarray(values, np.float64)
    n, mean = len(values), np.asarray(values.mean(0))
    if n == 1:
        unknown = np.full_like(mean, np.nan)
        return Interval(mean, unknown, unknown)
    half = t_quantile(0.975, n - 1) * values.std(0, ddof=1) / n**0.5
    return Interval(mean, np.asarray(mean - half), np.asarray(mean + half))


# ---------------------------------------------------------------------------------------------------------------------
# Differences in pairs


def paired(
    scores: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Difference:
    """The difference `scores - baseline`, scores in 0..1, on the same samples.

    The interval is that of `mean_of` for (difference + 1) / 2, which is in 0..1. Samples of one cluster count as one,
    in the interval and in the test.
    """
    differences = [float(a) - float(b) for a, b in zip(scores, baseline, strict=True)]
    if not differences:
        raise ValueError("there is no pair of scores")
    found = mean_of([(d + 1) / 2 for d in differences], clusters)
    assert found is not None
    mean, p = math.fsum(differences) / len(differences), sign_flip_p(np.array(cluster_means(differences, clusters)))
    return Difference(mean, 2 * found.low - 1, 2 * found.high - 1, len(differences), p=p)


def paired_t(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The difference `scores - baseline` of pairs of any numbers: Student's t interval and its test; NaN of one pair.

    For pairs of training seeds, which are few: flipping the signs of 3 differences gives no p below 0.25. The price is
    that their distribution is taken for normal. Equal differences other than 0 have p = 0.
    """
    differences = np.asarray(scores, np.float64) - np.asarray(baseline, np.float64)
    if not len(differences):
        raise ValueError("there is no pair of scores")
    found = student(differences.tolist())
    if found.count == 1:
        p = math.nan
    elif np.ptp(differences) < 1e-12:
        p = 1.0 if abs(found.mean) < 1e-12 else 0.0
    else:
        from scipy.stats import ttest_1samp  # a second to import

        p = float(ttest_1samp(differences, 0.0).pvalue)
    return Difference(found.mean, found.low, found.high, found.count, p=p)


def paired_sum(groups: Sequence[Sequence[float]]) -> Difference:
    """The sum over groups of the mean of differences of pairs, by Welch's t; NaN ends if a group has one pair.

    For a score that is a sum of means over different samples: documents, and windows with questions.
    """
    if not groups or not all(groups):
        raise ValueError("there is no pair of scores")
    if len(groups) == 1:
        return paired_t(groups[0], [0.0] * len(groups[0]))
    means = [math.fsum(group) / len(group) for group in groups]
    mean, count = math.fsum(means), min(map(len, groups))
    if count < 2:
        return Difference(mean, math.nan, math.nan, count)
    variances = [float(np.var(group, ddof=1)) / len(group) for group in groups]
    variance = math.fsum(variances)
    if variance < 1e-24:
        return Difference(mean, mean, mean, count, p=1.0 if abs(mean) < 1e-12 else 0.0)

    from scipy.stats import t  # a second to import

    degrees = variance**2 / math.fsum(v**2 / (len(g) - 1) for v, g in zip(variances, groups, strict=True))
    half = float(t.ppf((1 + LEVEL) / 2, degrees)) * math.sqrt(variance)
    p = 2 * float(t.sf(abs(mean) / math.sqrt(variance), degrees))
    return Difference(mean, mean - half, mean + half, count, p=p)


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


Compared = TypeVar("Compared", bound=Hashable)


def with_holm(found: Mapping[Compared, Difference]) -> dict[Compared, Difference]:
    """Differences that are looked at together, each with its p-value corrected for their number."""
    corrected = holm([one.p for one in found.values()])
    return {key: replace(one, corrected=float(p)) for (key, one), p in zip(found.items(), corrected, strict=True)}
