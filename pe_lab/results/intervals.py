"""95% intervals: of mean scores in 0..1, and Student's of arrays of any numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

Z95 = 1.959964  # normal quantile of a two-sided 95% interval


@dataclass(frozen=True)
class Mean:
    """A mean of scores in 0..1, its standard error (None: a single score), and a 95% interval."""

    score: float
    stderr: float | None
    low: float
    high: float
    count: int


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
    mean = math.fsum(scores) / len(scores)
    together: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, range(len(scores)) if clusters is None else clusters, strict=True):
        together.setdefault(cluster, []).append(score)
    units = [math.fsum(alike) / len(alike) for alike in together.values()]
    n, middle = len(units), math.fsum(units) / len(units)
    stderr = math.sqrt(math.fsum((x - middle) ** 2 for x in units) / (n - 1) / n) if n > 1 else None
    padded = [*units, 0.0, 1.0]
    p = math.fsum(padded) / len(padded)
    variance = math.fsum((x - p) ** 2 for x in padded) / len(padded)
    low, high = wilson(mean, n * p * (1 - p) / variance)
    return Mean(mean, stderr, low, high, len(scores))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` (Wilson 1927)."""
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(max(share * (1 - share), 0.0) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def exp(value: float) -> float:
    """e^value; infinity where math.exp overflows."""
    return math.exp(value) if value < 700 else math.inf


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
    from scipy.stats import t  # a second to import

    half = t.ppf(0.975, n - 1) * values.std(0, ddof=1) / n**0.5
    return Interval(mean, np.asarray(mean - half), np.asarray(mean + half))
