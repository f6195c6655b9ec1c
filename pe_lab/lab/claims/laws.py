"""Laws of a gap by the size of a model: fitted on small sizes, with intervals for larger ones, to be published first.

Two laws of the gap G in loss that a drop leaves, over the parameters N, the tokens R of its recalibration, and the
onset T, the tokens that a model without positions needs from random weights until it passes a trigram table:

  power law   ln G = a + b ln N
  onset law   ln G = a - k R / T(N),  ln T = c + d ln N

A line is fitted by least squares to the seeds of all sizes. The interval of a mean over new seeds at another size is
Student's t with the residual variance (Draper & Smith, "Applied Regression Analysis", 1.4), so that a size that the law
does not fit lies outside. The onset of another size is predicted by its own line, whose error is carried into G by
drawing both lines from their distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_lab.errors import DataError
from pe_lab.results.statistics import LEVEL

DRAWS = 20_000
FARTHEST = 1e12  # parameters up to which laws are compared


@dataclass(frozen=True)
class Size:
    """What was measured at one size.

    Attributes:
      parameters: N, without the embedding.
      tokens: R, of the recalibration.
      gaps: G of each seed, in nats.
      onsets: T of each seed that has reached it, in tokens.
    """

    parameters: float
    tokens: float
    gaps: tuple[float, ...]
    onsets: tuple[float, ...]


@dataclass(frozen=True)
class Predicted:
    """A number at a size that was not fitted: the middle, and the 95% interval of a mean over seeds."""

    middle: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a measured mean lies inside."""
        return self.low <= value <= self.high

    def json(self) -> dict[str, float]:
        """As JSON."""
        return {"middle": self.middle, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class FittedLine:
    """A least squares line y = a + b x through n points, with what its intervals need."""

    a: float
    b: float
    deviation: float  # of a residual
    count: int
    middle: float  # the mean of x
    spread: float  # the sum of squared differences of x from it

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the deviation."""
        return self.count - 2

    def slope(self) -> Predicted:
        """b with its interval."""
        half = _t(self.degrees) * self.deviation / math.sqrt(self.spread)
        return Predicted(self.b, self.b - half, self.b + half)

    def at(self, x: float, seeds: int) -> Predicted:
        """y at x, as a mean over `seeds` new points."""
        half = _t(self.degrees) * self.deviation * math.sqrt(1 / seeds + self._leverage(x))
        y = self.a + self.b * x
        return Predicted(y, y - half, y + half)

    def _leverage(self, x: float) -> float:
        return 1 / self.count + (x - self.middle) ** 2 / self.spread

    def draws(self, x: np.ndarray, rng: np.random.Generator, seeds: int = 0) -> np.ndarray:
        """Draws of y at each x, each with a line of its own; as means over `seeds` new points, 0: of the line alone."""
        scale = self.deviation * np.sqrt(self.degrees / rng.chisquare(self.degrees, x.shape))
        level, tilt = rng.standard_normal((2, *x.shape))
        y = (
            self.a
            + self.b * x
            + scale * (level / math.sqrt(self.count) + tilt * (x - self.middle) / math.sqrt(self.spread))
        )
        return y + scale * rng.standard_normal(x.shape) / math.sqrt(seeds) if seeds else y


def fit_line(x: Sequence[float], y: Sequence[float]) -> FittedLine:
    """The least squares line.

    Raises:
      DataError: fewer than three points, or all at one x.
    """
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    middle = float(across.mean()) if len(across) else 0.0
    spread = float(((across - middle) ** 2).sum())
    if len(across) < 3 or spread == 0:
        raise DataError("a law needs three numbers or more, at two sizes or more.")
    b = float(((across - middle) * up).sum()) / spread
    a = float(up.mean()) - b * middle
    deviation = math.sqrt(float(((up - a - b * across) ** 2).sum()) / (len(across) - 2))
    return FittedLine(a, b, deviation, len(across), middle, spread)


def power_line(sizes: Sequence[Size]) -> FittedLine:
    """The power law of the gap, in logarithms."""
    points = [(math.log(one.parameters), _logarithm(gap)) for one in sizes for gap in one.gaps]
    return fit_line(*zip(*points, strict=True))


def onset_lines(sizes: Sequence[Size]) -> tuple[FittedLine, FittedLine]:
    """The onset law: ln G over R / T, and ln T over ln N.

    T is the mean onset of a size, and that of the line where none of its seeds has reached one.

    Raises:
      DataError: fewer than three onsets, or all of one size.
    """
    known = [(math.log(one.parameters), math.log(onset)) for one in sizes for onset in one.onsets]
    line = fit_line([x for x, _ in known], [y for _, y in known])
    onsets = [
        _mean(one.onsets) if one.onsets else math.exp(line.a + line.b * math.log(one.parameters)) for one in sizes
    ]
    points = [(one.tokens / T, _logarithm(gap)) for one, T in zip(sizes, onsets, strict=True) for gap in one.gaps]
    return fit_line(*zip(*points, strict=True)), line


def by_power_law(sizes: Sequence[Size], parameters: float, seeds: int) -> Predicted:
    """The gap at another size by the power law, in nats."""
    found = power_line(sizes).at(math.log(parameters), seeds)
    return Predicted(*map(math.exp, (found.middle, found.low, found.high)))


def by_onset_law(sizes: Sequence[Size], parameters: float, tokens: float, seeds: int) -> Predicted:
    """The gap at another size by the onset law, whose recalibration has so many tokens, in nats."""
    gap, onset = onset_lines(sizes)
    rng, at = np.random.default_rng(0), np.full(DRAWS, math.log(parameters))
    drawn = gap.draws(tokens / np.exp(onset.draws(at, rng)), rng, seeds)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    middle = gap.a + gap.b * tokens / math.exp(onset.a + onset.b * math.log(parameters))
    return Predicted(*map(math.exp, (middle, float(low), float(high))))


def predictions(sizes: Sequence[Size], wanted: Mapping[str, tuple[float, float]], seeds: int) -> dict[str, Any]:
    """Both laws as JSON: what was fitted, and the gap of each wanted size {name: (parameters, tokens of the drop)}.

    The onset law is left out where fewer than three seeds, or those of one size alone, have reached their onset.
    """
    found: dict[str, Any] = {
        "power law": {
            "exponent": power_line(sizes).slope().json(),
            "gaps": {name: by_power_law(sizes, N, seeds).json() for name, (N, _) in wanted.items()},
        },
        "seeds": seeds,
    }
    reached = [one.onsets for one in sizes if one.onsets]
    if len(reached) < 2 or sum(map(len, reached)) < 3:
        return found
    gap, onset = onset_lines(sizes)
    return found | {
        "onset law": {
            "rate": gap.slope().json(),
            "exponent of the onset": onset.slope().json(),
            "gaps": {name: by_onset_law(sizes, *known, seeds).json() for name, known in wanted.items()},
        },
        "apart from": apart_from(sizes, seeds),
    }


def apart_from(sizes: Sequence[Size], seeds: int) -> float | None:
    """The parameters from which the intervals of the two laws exclude each other; None: not up to `FARTHEST`.

    The recalibration has the share of tokens per parameter of the largest size.
    """
    largest = max(sizes, key=lambda one: one.parameters)
    N = largest.parameters
    while (N := N * 2**0.25) < FARTHEST:
        one, other = (
            by_power_law(sizes, N, seeds),
            by_onset_law(sizes, N, largest.tokens / largest.parameters * N, seeds),
        )
        if one.low > other.high or other.low > one.high:
            return N
    return None


def _logarithm(gap: float) -> float:
    if gap <= 0:
        raise DataError(f"a gap of {gap:.4f} nats has no logarithm: these laws are of gaps above 0.")
    return math.log(gap)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _t(degrees: int) -> float:
    from scipy.stats import t  # a second to import

    return float(t.ppf((1 + LEVEL) / 2, degrees))
