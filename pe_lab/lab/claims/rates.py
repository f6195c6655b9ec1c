"""The learning rate of every arm is the best of one grid, the same for all arms: a grid, its pilot, and its check."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pe_lab.errors import ConfigError
from pe_lab.lab.claims.values import Values, number
from pe_lab.lab.claims.verdict import stated
from pe_lab.results.statistics import student

if TYPE_CHECKING:
    from pe_lab.lab.claims.claim import Arm

BEST = "every arm's learning rate is the best of one grid, the same for all arms"
_RATE = re.compile(r"(?<=[:,])rate=([^,]+)")


@dataclass(frozen=True)
class Rates:
    """The learning rates that a pilot trains every arm of a claim at. The recipes of the arms take `rate=`.

    Attributes:
      grid: ascending, at least three, so that the best one can lie between two others.
      default: the rate of a recipe that names none.
      of: the number whose best rate is looked for, of `losses`; lower is better.
      within: a rate is the best one if none is lower by as much as this, in the number's unit: where the curve is flat,
        chance would choose between neighbours.
      seeds: how many of the claim's seeds, the first ones, the pilot trains.
      arms: the names of those that the pilot trains, where muP carries their rates to the others; (): all.
      apart: why there is no grid, where the rate is what the claim compares; `grid` is then empty.
    """

    grid: tuple[float, ...] = ()
    default: float = 3e-3
    of: str = "validation prose"
    within: float = 0.0
    seeds: int = 1
    arms: tuple[str, ...] = ()
    apart: str = ""

    def __post_init__(self) -> None:
        if bool(self.grid) == bool(self.apart):
            raise ConfigError("rates: give a grid, or in `apart` why there is none.")
        if self.grid and (len(self.grid) < 3 or list(self.grid) != sorted(set(self.grid)) or self.grid[0] <= 0):
            raise ConfigError(f"rates: a grid has at least three rates above 0, ascending, not {self.grid}.")
        if self.seeds < 1:
            raise ConfigError("rates: the pilot needs a seed.")

    def own(self, arm: Arm) -> float:
        """The rate of an arm's recipe."""
        named = _RATE.search(arm.recipe)
        try:
            return float(named[1]) if named else self.default
        except ValueError:
            raise ConfigError(f"arm {arm.name!r}: rate={named[1] if named else ''} is no number.") from None

    def at(self, arm: Arm, rate: float) -> Arm:
        """The arm of the pilot: another rate from the same start; the arm itself at its own rate."""
        if rate == self.own(arm):
            return arm
        if _RATE.search(arm.recipe):
            recipe = _RATE.sub(f"rate={rate:g}", arm.recipe)
        else:
            recipe = f"{arm.recipe}{',' if ':' in arm.recipe else ':'}rate={rate:g}"
        return dataclasses.replace(arm, name=f"{arm.name}.rate_{rate:.10f}".rstrip("0"), recipe=recipe, seeds=0)

    def pilot(self, arms: Sequence[Arm]) -> tuple[Arm, ...]:
        """The arms that the pilot trains, apart from the claim's own."""
        return tuple(one for arm in self._tried(arms) for rate in self.grid if (one := self.at(arm, rate)) != arm)

    def preconditions(self, arms: Sequence[Arm]) -> tuple[BestRate, ...]:
        """That each of these arms has the best rate of the grid."""
        return tuple(
            BestRate(arm.name, self.own(arm), self.of, tuple((r, self.at(arm, r).name) for r in self.grid), self.within)
            for arm in self._tried(arms)
            if self.grid
        )

    def _tried(self, arms: Sequence[Arm]) -> list[Arm]:
        return [arm for arm in arms if not self.arms or arm.name in self.arms]


@dataclass(frozen=True)
class BestRate:
    """The precondition that an arm's rate is the best of a grid, and not at its end, where a better may lie beyond.

    Attributes:
      arm: its name.
      rate: its rate.
      of: the number, lower is better.
      grid: (rate, the name of the arm that was trained at it).
      within: by how much another rate may be lower.
    """

    arm: str
    rate: float
    of: str
    grid: tuple[tuple[float, str], ...]
    within: float = 0.0

    @property
    def text(self) -> str:
        """The sentence."""
        return f"{self.arm}: its learning rate is the best of the grid, the same for all arms"

    @property
    def terms(self) -> list[str]:
        """Every "ARM: METRIC" that it names."""
        return [f"{name}: {self.of}" for _, name in self.grid]

    @property
    def rule(self) -> str:
        """The grid in words."""
        rates = ", ".join(f"{rate:g}" for rate, _ in self.grid)
        lowest = f"within {self.within:g} of the lowest" if self.within else "the lowest"
        return f"if {self.arm}: {self.of} at rate {self.rate:g} is {lowest} of {rates}, and not at an end"

    def check(self, values: Values) -> dict[str, Any]:
        """Whether it is, by the means over the seeds that all rates have; the note has these."""
        found = {rate: number(values, term) for (rate, _), term in zip(self.grid, self.terms, strict=True)}
        seeds = set.intersection(*(set(one) for one in found.values()))
        if not seeds:
            raise ConfigError(f"'{self.arm}': no seed has '{self.of}' at every rate of the grid.")
        means = {rate: sum(one[seed] for seed in seeds) / len(seeds) for rate, one in found.items()}
        best = min(means, key=lambda rate: means[rate])
        if means.get(self.rate, math.inf) < means[best] + self.within:
            best = self.rate
        note = f"best at {best:g} ({', '.join(f'{rate:g}: {mean:.4g}' for rate, mean in means.items())})"
        ends = {self.grid[0][0]: "lowest", self.grid[-1][0]: "highest"}
        if best in ends:
            note += f", the {ends[best]} of the grid: a better one may lie beyond"
        return stated(self, student([best]), best == self.rate and best not in ends, note)


@dataclass(frozen=True)
class Untuned:
    """The same precondition of a claim that compares arms and declares no grid: their best rates are not measured."""

    text: str = BEST
    rule: str = f"if {BEST}"

    @property
    def terms(self) -> list[str]:
        """None."""
        return []

    def check(self, values: Values) -> dict[str, Any]:
        """Not measured."""
        return stated(self, student([]), None)
