"""What is compared of methods: numbers by measure and length, with the values that pairs are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pe_lab.evaluation.suites import suite_of
from pe_lab.results.records import Record
from pe_lab.results.statistics import Difference, paired, paired_sum, paired_t, student

FEWEST = 16  # tokens that need a far context, in all documents: fewer say nothing
FIRST_POSITION = 16  # of the loss by position: the loss of earlier tokens is that of no context


@dataclass(frozen=True)
class Measure:
    """A kind of number.

    Attributes:
      suites: whose records have it.
      title: in tables.
      unit: of the number; "" is a share of 1.
      key: of the records.
      by_unit: the key of the values that pairs are made of: by document, or by window.
    """

    suites: tuple[str, ...]
    title: str
    unit: str
    key: str
    by_unit: str

    @property
    def lower(self) -> bool:
        """Whether a lower number is better."""
        return self.unit == "nats"


NEEDLES = ("needles", "passkeys")
MEASURES = {
    "far": Measure(("long_range",), "loss on far tokens", "nats", "nll", "nll_by_document"),
    "text": Measure(("long_range",), "loss on text", "nats", "all_nll", "all_nll_by_document"),
    "found": Measure(NEEDLES, "needles found", "", "accuracy", "accuracy_by_window"),
    "answers": Measure(NEEDLES, "loss of the needles", "nats", "answer_nll", "answer_nll_by_window"),
    "position": Measure(("long_range",), "loss by position", "nats", "nll_by_position", ""),
}


def measure_of(name: str) -> Measure:
    """The measure of a name; of another suite, its mean score over tasks."""
    return MEASURES.get(name) or Measure((name,), suite_of(name).title, "", "score", "")


class At(NamedTuple):
    """Which number: a measure at a length; of the loss by position, at the end of a bin."""

    measure: str
    length: int


@dataclass(frozen=True)
class Number:
    """A number with the values that it is the mean of; None where one has no value.

    Attributes:
      mean: as its record has it: over tokens, not over units.
      units: by document or window, or by seed.
      by_seed: whether units are seeds.
    """

    mean: float
    units: tuple[float | None, ...]
    by_seed: bool = False

    @property
    def mean_of_units(self) -> float:
        """What comparisons in pairs are of; `mean` where there are no units."""
        found = [unit for unit in self.units if unit is not None]
        return math.fsum(found) / len(found) if found else self.mean


Numbers = Mapping[At, Number]


def numbers_of(records: Sequence[Record]) -> dict[At, Number]:
    """The numbers of one method from its records; of several sources the first counts.

    The loss by position is that of the longest sequences.
    """
    found: dict[At, Number] = {}
    longest = max((int(record["length"]) for record in records if "position_edges" in record), default=0)
    for record in records:
        if "position_edges" in record and record["length"] == longest:
            edges, losses = record["position_edges"], record["nll_by_position"]
            for (first, end), loss in zip(itertools.pairwise(edges), losses, strict=True):
                if first >= FIRST_POSITION:
                    found.setdefault(At("position", int(end)), Number(float(loss), ()))
        for name, measure in MEASURES.items():
            if name == "position":
                continue
            few = name == "far" and record["tokens"] < FEWEST if record.get("suite") == "long_range" else False
            if record.get("suite") in measure.suites and record.get(measure.key) is not None and not few:
                units = tuple(record.get(measure.by_unit) or ())
                found.setdefault(At(name, int(record["length"])), Number(float(record[measure.key]), units))
    return found


def suite_numbers(records: Sequence[Record]) -> dict[At, Number]:
    """The mean scores over the tasks of other suites, by suite and length; their units are the tasks."""
    scores: dict[At, dict[str, float]] = {}
    for record in records:
        if record.get("score") is not None and record.get("length"):
            at = At(str(record["suite"]), int(record["length"]))
            scores.setdefault(at, {})[str(record.get("task"))] = float(record["score"])
    return {at: Number(math.fsum(found.values()) / len(found), tuple(found.values())) for at, found in scores.items()}


def over_seeds(seeds: Sequence[Numbers]) -> dict[At, Number]:
    """The means over runs of several seeds, whose units are the seeds; of one run its own units."""
    if len(seeds) == 1:
        return dict(seeds[0])
    common = [at for at in seeds[0] if all(at in one for one in seeds)]
    means = {at: tuple(one[at].mean for one in seeds) for at in common}
    return {at: Number(math.fsum(values) / len(values), values, by_seed=True) for at, values in means.items()}


def difference(one: Number, other: Number, measure: str) -> Difference | None:
    """`one - other` in pairs, with a 95% interval and a test; None for no pair, and without an interval for one.

    Losses have Student's interval, shares one that stays within -1 .. 1.
    """
    pairs = _pairs(one, other)
    if not pairs:
        return None
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    return paired_t(left, right) if measure_of(measure).lower or len(pairs) < 5 else paired(left, right)


def _pairs(one: Number, other: Number) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(one.units, other.units, strict=False) if a is not None and b is not None]


# --------------------------------------------------------------------------------------------------------------------
# The score that methods are ranked by


def score_terms(numbers: Sequence[Numbers], length: int) -> tuple[At, ...]:
    """What a score is the sum of: the loss on far tokens, or where there are too few on all, and that of needles.

    Of each, what all methods have.
    """
    common = {at for at in numbers[0] if all(at in one for one in numbers)} if numbers else set()
    text = [At(name, length) for name in ("far", "text") if At(name, length) in common]
    return (*text[:1], *[at for at in [At("answers", length)] if at in common])


def score(numbers: Numbers, terms: Sequence[At]) -> float:
    """The sum of the terms, nats; lower is better. Each is the mean over its units, as in a comparison in pairs."""
    return math.fsum(numbers[at].mean_of_units for at in terms)


def score_difference(one: Numbers, other: Numbers, terms: Sequence[At]) -> Difference | None:
    """The difference of two scores, in pairs; None where a term has no pair.

    The terms of one seed are of one model, and are added before they are compared; documents and windows are different
    samples.
    """
    groups = [[a - b for a, b in _pairs(one[at], other[at])] for at in terms]
    if not groups or not all(groups):
        return None
    if all(numbers[at].by_seed for numbers in (one, other) for at in terms):
        sums = [math.fsum(of_seed) for of_seed in zip(*groups, strict=True)]
        return paired_t(sums, [0.0] * len(sums))
    return paired_sum(groups)


def interval(number: Number) -> tuple[float, float]:
    """The 95% interval of a number over its units, around its mean; NaN of one unit."""
    units = [unit for unit in number.units if unit is not None]
    if len(units) < 2:
        return math.nan, math.nan
    found = student(units)
    return number.mean + found.low - found.mean, number.mean + found.high - found.mean


# --------------------------------------------------------------------------------------------------------------------
# Numbers in tables


def in_order(numbers: Iterable[Numbers]) -> list[At]:
    """What was measured of any of them, by measure, then by length."""
    found = {at for one in numbers for at in one}
    names = [*MEASURES, *sorted({at.measure for at in found} - MEASURES.keys())]
    return sorted(found, key=lambda at: (names.index(at.measure), at.length))


def columns(numbers: Iterable[Numbers], lengths: Sequence[int]) -> list[At]:
    """What a table shows of the numbers: those at these lengths, without the loss by position."""
    return [at for at in in_order(numbers) if at.length in lengths and at.measure != "position"]


def shown_number(numbers: Numbers, at: At) -> str:
    """A number in a table; "" for none."""
    if at not in numbers:
        return ""
    return f"{numbers[at].mean:.3f}" if measure_of(at.measure).lower else f"{100 * numbers[at].mean:.1f}%"


def shown_difference(found: Difference | None) -> str:
    """A difference of losses with its 95% interval; "" for none."""
    if found is None:
        return ""
    if math.isnan(found.low):
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def numbers_json(numbers: Numbers) -> list[dict[str, Any]]:
    """The numbers as JSON."""
    return [
        {**at._asdict(), "mean": one.mean, "units": list(one.units), "by_seed": one.by_seed}
        for at, one in numbers.items()
    ]


def numbers_from_json(found: Sequence[Mapping[str, Any]]) -> dict[At, Number]:
    """The numbers that `numbers_json` wrote."""
    return {
        At(one["measure"], one["length"]): Number(one["mean"], tuple(one["units"]), one["by_seed"]) for one in found
    }
