"""The rule of a claim: preconditions, criteria, each a difference with an interval over seeds, and the verdict.

A criterion names a margin: `by`, how large a gain counts; `tolerance`, how much worse is as good; or `within`, how far
apart is equal. It is judged by where the interval of its difference lies (Student's t, paired by seed):

| criterion | confirmed | equivalent | refuted |
|---|---|---|---|
| better `by` more than m | above m | between -m and m | below -m |
| as good, `tolerance` m | above -m | | below -m |
| equal, `within` m | | between -m and m | beyond -m or m |

Otherwise it is not settled. The interval has 95%; one within the margins is two one-sided tests of equivalence, each at
2.5%. To refute, it is widened by Bonferroni's correction for all comparisons of the claim, since one of them is enough;
confirming needs all of them, which is conservative by itself. A criterion against several numbers is compared with each
of them: the best one of each seed would be better than all where all are equal, by the noise of the seeds.

How often it errs is in docs/claims.md, and counted in tests/lab/claims/test_claim_verdict.py.

A precondition is judged by its mean over seeds, not by an interval: it is a bound on the model, not a claim about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.errors import ConfigError
from pe_lab.results.statistics import LEVEL, Mean, student

MINUS = " - "  # between the two numbers of a difference
CONFIRMED, EQUIVALENT, REFUTED, OPEN = "confirmed", "equivalent", "refuted", "not settled"
UNMEASURED = "not measured"  # a criterion whose number the runs did not log
UNTESTABLE = "not testable at this size"  # a claim with a precondition that is not met
VERDICTS = (CONFIRMED, REFUTED, EQUIVALENT, OPEN, UNTESTABLE)
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # {arm: {metric: {seed: value}}}


@dataclass(frozen=True)
class Criterion:
    """One sentence of a claim: a number of one arm is better than those of others, as good, or equal.

    Attributes:
      text: the sentence.
      of: "ARM: METRIC", or the difference of two, "ARM: METRIC - ARM: METRIC".
      over: other such numbers, with each of which `of` is compared; none: `of` is compared with 0.
      lower: whether lower is better.
      by: a gain counts if it is larger, in the metric's units.
      tolerance: of a claim that `of` is at least as good: so much worse is as good.
      within: of a claim that both are equal: so far apart is equal.
      unit: of the difference, for the figure; criteria of one unit share an axis.
    """

    text: str
    of: str
    over: tuple[str, ...] = ()
    lower: bool = False
    by: float = 0.0
    tolerance: float = 0.0
    within: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        _check_terms(f"criterion {self.text!r}", self.terms)
        margins = [self.by, self.tolerance, self.within]
        if min(margins) < 0 or sum(margin > 0 for margin in margins) > 1:
            raise ConfigError(f"criterion {self.text!r}: give one of `by`, `tolerance` and `within`, above 0.")
        if not any(margins):
            raise ConfigError(f"criterion {self.text!r}: `by` is missing: how large a difference counts?")
        if self.within and len(self.over) > 1:
            raise ConfigError(f"criterion {self.text!r}: `within` compares with one number.")

    @property
    def terms(self) -> list[str]:
        """Every "ARM: METRIC" that it names."""
        return [one for whole in (self.of, *self.over) for one in whole.split(MINUS)]

    @property
    def margin(self) -> float:
        """The difference that counts, whatever the kind."""
        return self.by or self.tolerance or self.within

    @property
    def rule(self) -> str:
        """The comparison in words."""
        sign = "<" if self.lower else ">"
        others = {0: "0", 1: self.over[0] if self.over else ""}.get(len(self.over), f"each of ({'; '.join(self.over)})")
        if self.tolerance:
            return f"{self.of} {sign} {others} {'+' if self.lower else '-'} {self.tolerance:g}"
        if self.within:
            return f"{self.of} = {others}, within {self.within:g}"
        return f"{self.of} {sign} {others}, by more than {self.by:g}"


@dataclass(frozen=True)
class Precondition:
    """A measured sentence without which the question of a claim cannot be asked at its size.

    Attributes:
      text: the sentence, with what the paper has.
      of: the number, a term as that of a criterion.
      least, most: the bounds of its mean over seeds.
    """

    text: str
    of: str
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        _check_terms(f"precondition {self.text!r}", self.terms)
        if self.least is None and self.most is None:
            raise ConfigError(f"precondition {self.text!r}: give `least` or `most`.")

    @property
    def terms(self) -> list[str]:
        """Every "ARM: METRIC" that it names."""
        return self.of.split(MINUS)

    @property
    def rule(self) -> str:
        """The bounds in words."""
        bounds = {">=": self.least, "<=": self.most}
        return f"if {self.of} {' and '.join(f'{sign} {one:g}' for sign, one in bounds.items() if one is not None)}"


def _check_terms(where: str, terms: Sequence[str]) -> None:
    for term in terms:
        if not all(part.strip() for part in term.partition(": ")[::2]):
            raise ConfigError(f"{where}: {term!r} must be 'ARM: METRIC'.")


def arm_of(term: str) -> str:
    """The arm of "ARM: METRIC"."""
    return term.partition(": ")[0]


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


def differences_of(criterion: Criterion, values: Values, against: str = "") -> dict[int, float]:
    """{seed: how much better `of` is than `against`, a term of `over`, or than 0} for the seeds that have both."""
    of = number(values, criterion.of)
    other = number(values, against) if against else dict.fromkeys(of, 0.0)
    sign = -1.0 if criterion.lower else 1.0
    return {seed: sign * (of[seed] - other[seed]) for seed in sorted(set(of) & set(other))}


def judge(
    criteria: Sequence[Criterion],
    values: Values,
    preconditions: Sequence[Precondition] = (),
    missing_is_unmeasured: bool = False,
) -> tuple[list[dict[str, Any]], str, list[dict[str, Any]]]:
    """Each criterion with its outcome, the verdict on the claim, and each precondition with its number, as in results.

    A criterion has the mean of its differences, positive where the claim holds, and the interval that decided, of
    probability `level`, with NaN ends for fewer than two seeds. `against` is the term of `over` that decided: of
    several the one over which least is gained.

    Args:
      missing_is_unmeasured: whether a criterion whose number is missing is "not measured", and not an error.

    Raises:
      ConfigError: a number that a criterion or a precondition names was not measured.
    """
    checked = [_check(one, values) for one in preconditions]
    comparisons = sum(max(1, len(one.over)) for one in criteria)
    judged = [_judge(one, values, comparisons, missing_is_unmeasured) for one in criteria]
    shown = [(one["outcome"], one["outcome"] == (EQUIVALENT if one["within"] else CONFIRMED)) for one in judged]
    return judged, _together(shown) if all(one["met"] for one in checked) else UNTESTABLE, checked


def _judge(criterion: Criterion, values: Values, comparisons: int, missing_is_unmeasured: bool) -> dict[str, Any]:
    """A criterion by its comparison with the number over which least is gained, of those that decide."""
    try:
        each = [_compare(criterion, values, term, comparisons) for term in criterion.over or ("",)]
    except ConfigError:
        if not missing_is_unmeasured:
            raise
        return _judged(criterion, "", student([]), LEVEL, UNMEASURED)
    outcome = _together([(one["outcome"], one["outcome"] == CONFIRMED) for one in each])
    return min([one for one in each if one["outcome"] == outcome] or each, key=lambda one: one["mean"])


def _check(precondition: Precondition, values: Values) -> dict[str, Any]:
    found = number(values, precondition.of)
    over = student([found[seed] for seed in sorted(found)])
    least = -math.inf if precondition.least is None else precondition.least
    most = math.inf if precondition.most is None else precondition.most
    return {
        "text": precondition.text,
        "rule": precondition.rule,
        "mean": over.mean,
        "low": over.low,
        "high": over.high,
        "met": least <= over.mean <= most,
    }


def _compare(criterion: Criterion, values: Values, against: str, comparisons: int) -> dict[str, Any]:
    """A criterion against one number."""
    found, margin = [*differences_of(criterion, values, against).values()], criterion.margin
    level = 1 - (1 - LEVEL) / comparisons
    plain, wide = (student(found, at) for at in (LEVEL, level))
    outcome = OPEN
    if plain.low > (-margin if criterion.tolerance else margin) and not criterion.within:
        outcome = CONFIRMED
    elif -margin < plain.low and plain.high < margin and not criterion.tolerance:
        outcome = EQUIVALENT
    elif wide.high < -margin or (criterion.within and wide.low > margin):
        outcome = REFUTED
    if plain.high < -margin or (criterion.within and plain.low > margin):  # refuted, unless the wider interval is not
        return _judged(criterion, against, wide, level, outcome)
    return _judged(criterion, against, plain, LEVEL, outcome)


def _judged(criterion: Criterion, against: str, found: Mean, level: float, outcome: str) -> dict[str, Any]:
    return {
        "text": criterion.text,
        "rule": criterion.rule,
        "outcome": outcome,
        "against": against,
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "level": level,
        "by": criterion.by,
        "tolerance": criterion.tolerance,
        "within": criterion.within,
        "unit": criterion.unit,
        "seeds": found.count,
    }


def _together(each: Sequence[tuple[str, bool]]) -> str:
    """The outcome of several, given (outcome, whether it is what was claimed) of each: one refutes, all confirm."""
    if any(outcome == REFUTED for outcome, _ in each):
        return REFUTED
    if all(holds for _, holds in each):
        return CONFIRMED
    return EQUIVALENT if all(holds or outcome == EQUIVALENT for outcome, holds in each) else OPEN
