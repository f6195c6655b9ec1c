"""95% intervals of mean scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964  # normal quantile of a two-sided 95% interval


@dataclass(frozen=True)
class Mean:
    """A mean of scores in 0..1, its standard error (None: a single score), and a 95% interval."""

    score: float
    stderr: float | None
    low: float
    high: float
    count: int


def mean_of(scores: Sequence[float]) -> Mean | None:
    """The mean of independent scores in 0..1; None of none.

    The interval is Wilson's where every score is 0 or 1, which is honest at the ends and for few samples; otherwise
    Student's t, cut at 0 and 1, or Wilson's where that is wider: equal scores are not certainty.
    """
    n = len(scores)
    if not n:
        return None
    mean = math.fsum(scores) / n
    low, high = wilson(mean, n)
    stderr = math.sqrt(math.fsum((x - mean) ** 2 for x in scores) / (n - 1) / n) if n > 1 else None
    if stderr and any(x not in (0.0, 1.0) for x in scores):
        half = student95(n - 1) * stderr
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return Mean(mean, stderr, low, high, n)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` (Wilson 1927)."""
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def student95(freedom: int) -> float:
    """The two-sided 95% quantile of Student's t."""
    from scipy.special import stdtrit  # scipy takes a moment to import

    return float(stdtrit(freedom, 0.975))
