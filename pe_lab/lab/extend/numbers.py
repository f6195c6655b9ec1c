"""What is compared of methods: numbers by measure and length, with the values that pairs are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pe_lab.results.records import Record
from pe_lab.results.statistics import Difference, paired, paired_t, student


@dataclass(frozen=True)
class Measure:
    """A kind of number.

    Attributes:
      title: in tables.
      unit: of the number; "" is a share of 1.
      key: of its suite's records.
      by_unit: the key of the values that pairs are made of: by document, or by window.
    """

    suite: str
    title: str
    unit: str
    key: str
    by_unit: str

    @property
    def lower(self) -> bool:
        """Whether a lower number is better."""
        return self.unit == "nats"


MEASURES = {
    "long_range": Measure("long_range", "loss on far tokens", "nats", "nll", "nll_by_document"),
    "text": Measure("long_range", "loss on all tokens", "nats", "all_nll", "all_nll_by_document"),
    "needles": Measure("needles", "needles found", "", "accuracy", "accuracy_by_window"),
    "passkeys": Measure("passkeys", "passkeys found", "", "accuracy", "accuracy_by_window"),
    "answers": Measure("passkeys", "loss of the passkeys", "nats", "answer_nll", "answer_nll_by_window"),
}


class At(NamedTuple):
    """Which number: a measure at a length."""

    measure: str
    length: int


@dataclass(frozen=True)
class Number:
    """A number with the values that it is the mean of; None where one has no value.

    Attributes:
      mean: as its record has it: over tokens, not over units.
      units: by document or window, or by seed.
    """

    mean: float
    units: tuple[float | None, ...]


Numbers = Mapping[At, Number]


def numbers_of(records: Sequence[Record]) -> dict[At, Number]:
    """The numbers of one method from its records; of several sources the first counts."""
    found: dict[At, Number] = {}
    for record in records:
        for name, measure in MEASURES.items():
            if record.get("suite") == measure.suite and record.get(measure.key) is not None:
                units = tuple(record.get(measure.by_unit) or ())
                found.setdefault(At(name, int(record["length"])), Number(float(record[measure.key]), units))
    return found


def over_seeds(seeds: Sequence[Numbers]) -> dict[At, Number]:
    """The means over runs of several seeds, whose units are the seeds; of one run its own units."""
    if len(seeds) == 1:
        return dict(seeds[0])
    common = [at for at in seeds[0] if all(at in one for one in seeds)]
    means = {at: tuple(one[at].mean for one in seeds) for at in common}
    return {at: Number(math.fsum(values) / len(values), values) for at, values in means.items()}


def difference(one: Number, other: Number, measure: str) -> Difference | None:
    """`one - other` in pairs, with a 95% interval and a test; None for no pair.

    Of one pair there is no interval. Losses have Student's interval, shares one that stays within -1 .. 1.
    """
    pairs = [(a, b) for a, b in zip(one.units, other.units, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    return paired_t(left, right) if MEASURES[measure].lower or len(pairs) < 5 else paired(left, right)


def interval(number: Number) -> tuple[float, float]:
    """The 95% interval of a number over its units, around its mean; NaN of one unit."""
    units = [unit for unit in number.units if unit is not None]
    if len(units) < 2:
        return math.nan, math.nan
    found = student(units)
    return number.mean + found.low - found.mean, number.mean + found.high - found.mean
