"""The rule of a study: criteria, each a difference with an interval over seeds, and the verdict that they give.

A criterion is confirmed if the 95% interval of its difference (Student's t, paired by seed) lies above 0 and the mean
is at least `by`, refuted if the interval lies below 0 and the mean is at most `-by`. A claim is confirmed if all of its
criteria are, and refuted if one is, with intervals that Bonferroni's correction widens for their number. Otherwise it
is not settled. So the same recipe under two names gets a verdict in fewer than 5 of 100 studies, however many criteria
there are: tests/studies/test_study_verdict.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.errors import ConfigError

MINUS = " - "  # between the two numbers of a difference
CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "not settled"
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # {arm: {metric: {seed: value}}}


@dataclass(frozen=True)
class Criterion:
    """One sentence of a claim: a number of one arm is better than numbers of others.

    Attributes:
      text: the sentence.
      of: "ARM: METRIC", or the difference of two, "ARM: METRIC - ARM: METRIC".
      over: other such numbers, of which the best of each seed counts; none: `of` is compared with 0.
      lower: whether lower is better.
      by: the least mean difference that settles anything, in the metric's units.
      tolerance: of a claim that `of` is at least as good: so much worse is as good.
    """

    text: str
    of: str
    over: tuple[str, ...] = ()
    lower: bool = False
    by: float = 0.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        for term in (one for terms in (self.of, *self.over) for one in terms.split(MINUS)):
            if not all(part.strip() for part in term.partition(": ")[::2]):
                raise ConfigError(f"criterion {self.text!r}: {term!r} must be 'ARM: METRIC'.")
        if self.by < 0 or self.tolerance < 0 or (self.by and self.tolerance):
            raise ConfigError(f"criterion {self.text!r}: give `by` or `tolerance`, at least 0.")
        if not self.by and not self.tolerance:
            raise ConfigError(f"criterion {self.text!r}: `by` is missing: how large a difference counts?")

    @property
    def rule(self) -> str:
        """The comparison in words."""
        sign = "<" if self.lower else ">"
        others = {0: "0", 1: self.over[0] if self.over else ""}.get(
            len(self.over), f"the best of ({'; '.join(self.over)})"
        )
        if self.tolerance:
            return f"{self.of} {sign} {others} {'+' if self.lower else '-'} {self.tolerance:g}"
        return f"{self.of} {sign} {others}, by at least {self.by:g}"


@dataclass(frozen=True)
class Judged:
    """A criterion with its difference, positive where the claim holds; intervals are NaN with fewer than two seeds.

    Attributes:
      differences: {seed: difference}.
      low, high: the 95% interval.
      outcome: confirmed, refuted or not settled.
    """

    criterion: Criterion
    differences: Mapping[int, float]
    mean: float
    low: float
    high: float
    outcome: str


def arms_in(term: str) -> list[str]:
    """The arms that a term names."""
    return [one.partition(": ")[0] for one in term.split(MINUS)]


def number(values: Values, term: str) -> Mapping[int, float]:
    """{seed: value} of "ARM: METRIC", or of the difference "ARM: METRIC - ARM: METRIC" on the seeds of both.

    Raises:
      ConfigError: there is no such number; the message names those that the arm has.
    """
    if MINUS in term:
        first, second = (number(values, one) for one in term.split(MINUS, 1))
        return {seed: first[seed] - second[seed] for seed in first if seed in second}
    arm, _, metric = term.partition(": ")
    if arm not in values:
        raise ConfigError(f"'{term}': no arm is called '{arm}'. Arms: {', '.join(values)}.")
    found = values[arm].get(metric)
    if found is None:
        raise ConfigError(f"'{term}': '{arm}' has no number '{metric}'. It has: {', '.join(values[arm]) or 'none'}.")
    return found


def differences_of(criterion: Criterion, values: Values) -> dict[int, float]:
    """{seed: how far the criterion holds} for the seeds that all of its numbers have."""
    of, others = number(values, criterion.of), [number(values, term) for term in criterion.over]
    best = min if criterion.lower else max
    sign = -1.0 if criterion.lower else 1.0
    seeds = sorted(set(of).intersection(*others))
    return {seed: sign * (of[seed] - best((one[seed] for one in others), default=0.0)) for seed in seeds}


def student(differences: Sequence[float], level: float) -> tuple[float, float, float]:
    """The mean and its interval by Student's t, two-sided with probability `level`; NaN ends of one value or none."""
    n = len(differences)
    mean = math.fsum(differences) / n if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    from scipy.stats import t  # a second to import

    half = float(t.ppf((1 + level) / 2, n - 1)) * float(np.std(differences, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def judge(criteria: Sequence[Criterion], values: Values) -> tuple[list[Judged], str]:
    """Each criterion with its outcome, and the verdict on the claim.

    Raises:
      ConfigError: a number that a criterion names was not measured.
    """
    judged = []
    for criterion in criteria:
        found = differences_of(criterion, values)
        listed = [found[seed] + criterion.tolerance for seed in sorted(found)]
        mean, low, high = student(listed, 0.95)
        *_, corrected = student(listed, 1 - 0.05 / len(criteria))
        outcome = OPEN
        if low > 0 and mean >= criterion.by:
            outcome = CONFIRMED
        elif corrected < 0 and mean <= -criterion.by:
            outcome = REFUTED
        shift = criterion.tolerance
        judged.append(Judged(criterion, found, mean - shift, low - shift, high - shift, outcome))
    outcomes = {one.outcome for one in judged}
    verdict = REFUTED if REFUTED in outcomes else CONFIRMED if outcomes == {CONFIRMED} else OPEN
    return judged, verdict
