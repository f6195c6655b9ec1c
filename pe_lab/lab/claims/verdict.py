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

An interval covers seeds and text where the windows of both numbers are known and the same (`statistics.crossed`), else
seeds alone; the judged criterion says which. Where re-running moves a difference by more than the margin
(`reruns.noise`), only an interval beyond that noise settles it, above or below: neither a smaller gain nor equality.

A precondition is judged by its mean over seeds, not by an interval: it is a bound on the model, not a claim about it.
One that was not measured leaves a claim not settled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pe_lab.errors import ConfigError
from pe_lab.lab.claims.reruns import Rerun, noise
from pe_lab.lab.claims.values import MINUS, Values, by_window, check_terms, number
from pe_lab.results.statistics import LEVEL, Mean, Spread, crossed, spread, student

CONFIRMED, EQUIVALENT, REFUTED, OPEN = "confirmed", "equivalent", "refuted", "not settled"
UNMEASURED = "not measured"  # a criterion whose number the runs did not log
UNTESTABLE = "not testable here"  # a claim with a precondition that is not met
VERDICTS = (CONFIRMED, REFUTED, EQUIVALENT, OPEN, UNTESTABLE)
SEEDS_ALONE = "seeds alone"  # what an interval covers


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
      effect: the difference that the claim has to be able to see, larger than the margin; 0: twice the margin. The
        number of seeds follows from it (`power`).
      unit: of the difference, for the figure; criteria of one unit share an axis.
    """

    text: str
    of: str
    over: tuple[str, ...] = ()
    lower: bool = False
    by: float = 0.0
    tolerance: float = 0.0
    within: float = 0.0
    effect: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        check_terms(f"criterion {self.text!r}", self.terms)
        margins = [self.by, self.tolerance, self.within]
        if min(margins) < 0 or sum(margin > 0 for margin in margins) > 1:
            raise ConfigError(f"criterion {self.text!r}: give one of `by`, `tolerance` and `within`, above 0.")
        if not any(margins):
            raise ConfigError(f"criterion {self.text!r}: `by` is missing: how large a difference counts?")
        if self.within and len(self.over) > 1:
            raise ConfigError(f"criterion {self.text!r}: `within` compares with one number.")
        if self.effect and not self.effect > self.margin:
            raise ConfigError(
                f"criterion {self.text!r}: `effect` {self.effect:g} is no more than the margin {self.margin:g}: no "
                "number of seeds would show it."
            )

    @property
    def terms(self) -> list[str]:
        """Every "ARM: METRIC" that it names."""
        return [one for whole in (self.of, *self.over) for one in whole.split(MINUS)]

    @property
    def margin(self) -> float:
        """The difference that counts, whatever the kind."""
        return self.by or self.tolerance or self.within

    @property
    def sees(self) -> float:
        """The difference that it has to be able to see."""
        return self.effect or 2 * self.margin

    @property
    def rule(self) -> str:
        """The comparison in words, with the effect that it has to see if that is not twice the margin."""
        sign = "<" if self.lower else ">"
        others = {0: "0", 1: self.over[0] if self.over else ""}.get(len(self.over), f"each of ({'; '.join(self.over)})")
        sees = f"; sees {self.effect:g}" if self.effect else ""
        if self.tolerance:
            return f"{self.of} {sign} {others} {'+' if self.lower else '-'} {self.tolerance:g}{sees}"
        if self.within:
            return f"{self.of} = {others}, within {self.within:g}{sees}"
        return f"{self.of} {sign} {others}, by more than {self.by:g}{sees}"


@runtime_checkable
class Condition(Protocol):
    """What has to be true for the question of a claim to be asked: a sentence, its rule in words, and its check."""

    text: str

    @property
    def terms(self) -> list[str]: ...

    @property
    def rule(self) -> str: ...

    def check(self, values: Values) -> dict[str, Any]:
        """The precondition with its number, and whether it is met, as in results; `ConfigError` without the number."""


@dataclass(frozen=True)
class Precondition:
    """A measured sentence without which the question of a claim cannot be asked at its size.

    Attributes:
      text: the sentence, with what the paper has.
      of: the number, a term as that of a criterion.
      least, most: the bounds of its mean over seeds.
      others: further numbers; the best of all, by its mean, is the one that is bounded.
      lower: whether lower is better.
    """

    text: str
    of: str
    least: float | None = None
    most: float | None = None
    others: tuple[str, ...] = ()
    lower: bool = False

    def __post_init__(self) -> None:
        check_terms(f"precondition {self.text!r}", self.terms)
        if self.least is None and self.most is None:
            raise ConfigError(f"precondition {self.text!r}: give `least` or `most`.")

    @property
    def terms(self) -> list[str]:
        """Every "ARM: METRIC" that it names."""
        return [one for whole in (self.of, *self.others) for one in whole.split(MINUS)]

    @property
    def rule(self) -> str:
        """The bounds in words."""
        bounds = {">=": self.least, "<=": self.most}
        of = f"the best of ({'; '.join((self.of, *self.others))})" if self.others else self.of
        return f"if {of} {' and '.join(f'{sign} {one:g}' for sign, one in bounds.items() if one is not None)}"

    def check(self, values: Values) -> dict[str, Any]:
        """The mean over seeds, its interval, which is shown and does not decide, and whether the mean is in bounds."""
        each = [student([*number(values, term).values()]) for term in (self.of, *self.others)]
        best = (min if self.lower else max)(each, key=lambda one: one.mean)
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        return stated(self, best, least <= best.mean <= most)


def stated(one: Condition, found: Mean, met: bool | None, note: str = "") -> dict[str, Any]:
    """A precondition as in results; `met` None: it was not measured. `note` stands for its number where it has none."""
    numbers = {"mean": found.mean, "low": found.low, "high": found.high}
    return {"text": one.text, "rule": one.rule, **numbers, "met": met} | ({"note": note} if note else {})


def differences_of(criterion: Criterion, values: Values, against: str = "") -> dict[int, float]:
    """{seed: how much better `of` is than `against`, a term of `over`, or than 0} for the seeds that have both."""
    of = number(values, criterion.of)
    other = number(values, against) if against else dict.fromkeys(of, 0.0)
    sign = -1.0 if criterion.lower else 1.0
    return {seed: sign * (of[seed] - other[seed]) for seed in sorted(set(of) & set(other))}


def judge(
    criteria: Sequence[Criterion],
    values: Values,
    preconditions: Sequence[Condition] = (),
    missing_is_unmeasured: bool = False,
    reruns: Sequence[Rerun] = (),
) -> tuple[list[dict[str, Any]], str, list[dict[str, Any]]]:
    """Each criterion with its outcome, the verdict on the claim, and each precondition with its number, as in results.

    A criterion has the mean of its differences, positive where the claim holds, and the interval that decided, of
    probability `level`, with NaN ends for fewer than two seeds. `against` is the term of `over` that decided: of
    several the one over which least is gained. `covers` says what the interval covers, `noise` what re-running moves.

    Args:
      missing_is_unmeasured: whether a number that is missing is "not measured", and not an error.
      reruns: records of runs that were run again.

    Raises:
      ConfigError: a number that a criterion or a precondition names was not measured.
    """
    checked = [_check(one, values, missing_is_unmeasured) for one in preconditions]
    comparisons = sum(max(1, len(one.over)) for one in criteria)
    judged = [_judge(one, values, comparisons, missing_is_unmeasured, reruns) for one in criteria]
    if any(one["met"] is False for one in checked):
        return judged, UNTESTABLE, checked
    shown = [(one["outcome"], one["outcome"] == (EQUIVALENT if one["within"] else CONFIRMED)) for one in judged]
    return judged, OPEN if any(one["met"] is None for one in checked) else _together(shown), checked


def _judge(
    criterion: Criterion, values: Values, comparisons: int, missing_is_unmeasured: bool, reruns: Sequence[Rerun]
) -> dict[str, Any]:
    """A criterion by its comparison with the number over which least is gained, of those that decide."""
    try:
        each = [_compare(criterion, values, term, comparisons, reruns) for term in criterion.over or ("",)]
    except ConfigError:
        if not missing_is_unmeasured:
            raise
        return _judged(criterion, "", student([]), LEVEL, UNMEASURED, SEEDS_ALONE, None)
    outcome = _together([(one["outcome"], one["outcome"] == CONFIRMED) for one in each])
    return min([one for one in each if one["outcome"] == outcome] or each, key=lambda one: one["mean"])


def _check(precondition: Condition, values: Values, missing_is_unmeasured: bool) -> dict[str, Any]:
    try:
        return precondition.check(values)
    except ConfigError:
        if not missing_is_unmeasured:
            raise
        return stated(precondition, student([]), None)


def spread_of(criterion: Criterion, values: Values, against: str = "") -> tuple[Mean, Spread]:
    """The mean of a criterion's differences, without an interval, and their spread, with that of text if known."""
    found = differences_of(criterion, values, against)
    mean = student([*found.values()])
    windows = by_window(values, criterion.of, against, [*found]) if len(found) > 1 else None
    return mean, spread([*found.values()]) if windows is None else crossed(windows)


def _compare(
    criterion: Criterion, values: Values, against: str, comparisons: int, reruns: Sequence[Rerun]
) -> dict[str, Any]:
    """A criterion against one number."""
    margin, level = criterion.margin, 1 - (1 - LEVEL) / comparisons
    found, of = spread_of(criterion, values, against)
    plain, wide = (of.mean(found.mean, found.count, at) for at in (LEVEL, level))
    moves = noise(criterion.of, against, max(found.count, 1), reruns)
    resolved = moves is None or moves <= margin
    edge = margin if resolved else moves  # beyond which a difference counts
    outcome = OPEN
    if plain.low > (-margin if criterion.tolerance and resolved else edge) and not criterion.within:
        outcome = CONFIRMED
    elif -margin < plain.low and plain.high < margin and resolved and not criterion.tolerance:
        outcome = EQUIVALENT
    elif wide.high < -edge or (criterion.within and wide.low > edge):
        outcome = REFUTED
    covers = f"seeds and {of.windows} windows" if of.windows else SEEDS_ALONE
    if plain.high < -margin or (criterion.within and plain.low > margin):  # refuted, unless the wider interval is not
        return _judged(criterion, against, wide, level, outcome, covers, moves)
    return _judged(criterion, against, plain, LEVEL, outcome, covers, moves)


def _judged(
    criterion: Criterion, against: str, found: Mean, level: float, outcome: str, covers: str, moves: float | None
) -> dict[str, Any]:
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
        "effect": criterion.sees,
        "noise": moves,
        "covers": covers,
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
