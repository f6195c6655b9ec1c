"""95% intervals: of mean scores in 0..1, and of the main number of a result record."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.results.records import number

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


def value_of(record: Mapping[str, Any]) -> float | None:
    """The main number of a result record: an accuracy, a perplexity or a score; None without one."""
    if is_prompted(record):
        return number(record, "score")
    if (accuracy := number(record, "accuracy")) is not None:
        return accuracy
    if (nll := number(record, "nll")) is not None:
        return exp(nll)
    names = ("perplexity", "score", "value", "exact_match", "f1")
    return next((value for name in names if (value := number(record, name)) is not None), None)


def is_prompted(record: Mapping[str, Any]) -> bool:
    """Whether a record is of a task that is asked with prompts: it names the metric of its score."""
    return isinstance(record.get("metric"), str) and "score" in record


def is_loss(record: Mapping[str, Any]) -> bool:
    """Whether a record's main number is a perplexity, with the standard error of its logarithm."""
    known = any(number(record, name) is not None for name in ("nll", "perplexity"))
    return known and not is_prompted(record) and number(record, "accuracy") is None


def is_share(record: Mapping[str, Any]) -> bool:
    """Whether a record's main number is a share of 1, where more is better."""
    value = value_of(record)
    if not is_prompted(record):
        return number(record, "accuracy") is not None
    # lm_eval also has metrics from 0 to 100, which may happen to be below 1.
    of_hundred = record.get("suite") == "lm_eval" and record["metric"].startswith(("bleu", "chrf", "rouge", "ter"))
    return value is not None and 0 <= value <= 1 and record.get("higher_is_better") is not False and not of_hundred


def interval_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95% interval of a record's main number; None if its error is not known.

    The record's `low` and `high` where it has them. Else: exp(nll -+ Z95 stderr) of a perplexity; Wilson's interval of
    `queries` or `samples` answers of a share that is 0 or 1, whose standard error is 0; Z95 standard errors to both
    sides of any other number, inside 0..1 for a share.
    """
    value, stderr = value_of(record), number(record, "stderr")
    low, high = number(record, "low"), number(record, "high")
    if value is None:
        return None
    if low is not None and high is not None:
        return low, high
    if is_loss(record):
        nll = number(record, "nll")
        nll = math.log(value) if nll is None and value > 0 else nll
        return None if stderr is None or nll is None else (exp(nll - Z95 * stderr), exp(nll + Z95 * stderr))
    share, asked = is_share(record), number(record, "queries") or number(record, "samples")
    if share and value in (0.0, 1.0) and asked:
        return wilson(value, asked)
    if stderr is None:
        return None
    low, high = value - Z95 * stderr, value + Z95 * stderr
    return (max(low, 0.0), min(high, 1.0)) if share else (low, high)


def exp(value: float) -> float:
    """e^value; infinity where math.exp overflows."""
    return math.exp(value) if value < 700 else math.inf
