"""The main number of a result record, and its 95% interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
      scores: in 0..1.
      clusters: the cluster of each score (four questions about one problem). Scores of a cluster are not independent:
        they count as one, their mean. None: all scores are independent.
    """
    if not scores:
        return None
    mean = math.fsum(scores) / len(scores)
    units = list(scores)
    if clusters is not None:
        together: dict[Hashable, list[float]] = {}
        for score, cluster in zip(scores, clusters, strict=True):
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
    """The number that a record is compared by: its perplexity, accuracy or score; None if it is no number."""
    name = {"needles": "accuracy", "perplexity": "perplexity"}.get(str(record.get("suite")), "score")
    value = record.get(name)
    return value if isinstance(value, int | float) else None


def is_share(record: Mapping[str, Any]) -> bool:
    """Whether `value_of` a record is a share of 1, which is shown in per cent."""
    value, suite = value_of(record), record.get("suite")
    # These metrics of lm_eval go from 0 to 100, and may be below 1.
    of_hundred = suite == "lm_eval" and str(record.get("metric")).startswith(("bleu", "chrf", "rouge", "ter"))
    return (
        suite != "perplexity"
        and not of_hundred
        and value is not None
        and 0 <= value <= 1
        and record.get("higher_is_better") is not False
    )


def interval_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95% interval of `value_of` a record, in the unit of that value; None where the record tells no spread.

    It is the record's own (`low`, `high`) where it has one. Otherwise the key `stderr` decides:
      - perplexity: `stderr` is of the loss in nats, so the ends are perplexity * exp(-+ 1.96 stderr);
      - a share of 0 or 1 over `queries` or `samples` answers: Wilson's, because the estimated error is 0 there;
      - other values: value -+ 1.96 stderr, for shares within 0..1.
    """
    value, stderr = value_of(record), record.get("stderr")
    if value is None:
        return None
    if record.get("low") is not None and record.get("high") is not None:
        return record["low"], record["high"]
    if record.get("suite") == "perplexity":
        return (value * math.exp(-Z95 * stderr), value * math.exp(Z95 * stderr)) if stderr else None
    share, asked = is_share(record), record.get("queries") or record.get("samples")
    if share and value in (0, 1) and asked:
        return wilson(value, int(asked))
    if stderr is None:
        return None
    low, high = value - Z95 * stderr, value + Z95 * stderr
    return (max(low, 0.0), min(high, 1.0)) if share else (low, high)
