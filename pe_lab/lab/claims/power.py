"""How many seeds a claim needs: from the spread of its differences in a pilot, and the effect that it has to see.

A criterion is to be confirmed where it holds, and refuted where it fails by the effect, each with a probability of 80%:

| criterion | confirmed with 80% at a difference of | refuted with 80% at |
|---|---|---|
| better `by` m, effect e | e | -e |
| as good, `tolerance` m, effect e | 0 | -e |
| equal, `within` m, effect e | 0 | -e or e |

Both errors are those of the verdict: 2.5% on each side to confirm, and to refute 2.5% divided by the comparisons of the
claim. Power is that of the noncentral t distribution; of equality, that of the two one-sided tests, by integration over
the distribution of the deviation (Schuirmann 1987; Phillips 1990). It takes the pilot's deviation for the true one,
which three seeds know within a factor of 0.5 to 6 (95%).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.lab.claims.values import Values
from pe_lab.lab.claims.verdict import Criterion, spread_of
from pe_lab.results.statistics import LEVEL, Spread, t_quantile

POWER = 0.8
LEAST, LEAST_OF_ONE, MOST = 3, 5, 64  # seeds: of a claim, of one with a single criterion, and what is looked at
PILOT = 3  # seeds, of a claim without a result


def beyond(distance: float, spread: Spread, seeds: int, level: float = LEVEL) -> float:
    """The probability that an interval lies beyond a bound that the true difference is `distance` beyond."""
    from scipy.stats import nct  # a second to import

    deviation, degrees, factor = _interval(spread, seeds, level)
    if deviation == 0:
        return float(distance > 0)
    return float(nct.sf(factor, degrees, distance / deviation))


def inside(margin: float, spread: Spread, seeds: int, level: float = LEVEL) -> float:
    """The probability that an interval lies between -margin and margin, where the true difference is 0."""
    from scipy.stats import chi2, norm

    deviation, degrees, factor = _interval(spread, seeds, level)
    if deviation == 0:
        return float(margin > 0)
    # Over the quantiles of the estimated deviation, in units of the true one.
    estimated = np.sqrt(chi2.ppf((np.arange(2000) + 0.5) / 2000, degrees) / degrees)
    return float(np.maximum(2 * norm.cdf(margin / deviation - factor * estimated) - 1, 0).mean())


def _interval(spread: Spread, seeds: int, level: float) -> tuple[float, float, float]:
    """The standard error of a mean, its degrees of freedom, and how many of it the interval has to each side."""
    deviation, degrees = math.sqrt(spread.variance(seeds)), spread.degrees(seeds)
    p = (1 + level) / 2
    alone = t_quantile(p, seeds - 1) * math.sqrt(spread.seed / seeds)
    factor = t_quantile(p, degrees)
    if deviation and alone > factor * deviation:  # as Spread.mean takes the wider one
        return deviation, seeds - 1, alone / deviation
    return deviation, degrees, factor


def power(criterion: Criterion, spread: Spread, seeds: int, comparisons: int) -> tuple[float, float]:
    """The probabilities that so many seeds confirm a criterion where it holds, and refute it where it fails."""
    margin, wide = criterion.margin, 1 - (1 - LEVEL) / comparisons
    if criterion.within:
        confirmed = inside(margin, spread, seeds)
    else:
        confirmed = beyond(margin if criterion.tolerance else criterion.sees - margin, spread, seeds)
    return confirmed, beyond(criterion.sees - margin, spread, seeds, wide)


def seeds_needed(criterion: Criterion, spread: Spread, comparisons: int, least: int = LEAST) -> int | None:
    """The fewest seeds, from `least` on, whose power is 80% to either side; None: more than `MOST`."""
    for seeds in range(least, MOST + 1):
        if min(power(criterion, spread, seeds, comparisons)) >= POWER:
            return seeds
    return None


def power_table(criteria: Sequence[Criterion], values: Values) -> list[dict[str, Any]]:
    """Of each criterion the pilot's deviation, the effect, the seeds that it needs, and the power of those it has.

    Of several comparisons the one that needs most. A criterion without two seeds has no deviation: all is None.
    """
    comparisons = sum(max(1, len(one.over)) for one in criteria)
    least = LEAST_OF_ONE if len(criteria) == 1 else LEAST
    return [_row(one, values, comparisons, least) for one in criteria]


def _row(criterion: Criterion, values: Values, comparisons: int, least: int) -> dict[str, Any]:
    found = []
    for against in criterion.over or ("",):
        try:
            mean, of = spread_of(criterion, values, against)
        except ConfigError:
            continue
        if mean.count > 1:
            needed = seeds_needed(criterion, of, comparisons, least)
            found.append((math.inf if needed is None else needed, of.seed, of, mean.count))
    row: dict[str, Any] = {"text": criterion.text, "effect": criterion.sees, "margin": criterion.margin}
    if not found:
        return row | dict.fromkeys(("deviation", "text_error", "pilot", "seeds", "confirms", "refutes"))
    needed, _, of, pilot = max(found, key=lambda one: one[:2])
    confirms, refutes = power(criterion, of, pilot, comparisons)
    numbers = {"deviation": math.sqrt(of.seed), "text_error": math.sqrt(of.text), "pilot": pilot}
    return row | numbers | {"seeds": None if needed > MOST else needed, "confirms": confirms, "refutes": refutes}


def seeds_of(table: Sequence[Mapping[str, Any]], claim: str) -> int:
    """The seeds that a power table asks for.

    Raises:
      ConfigError: a criterion has no deviation, or needs more than `MOST` seeds.
    """
    for row in table:
        if row["deviation"] is None:
            raise ConfigError(f"claim '{claim}': '{row['text']}' has no deviation in its pilot. Give --seeds=N.")
        if row["seeds"] is None:
            raise ConfigError(
                f"claim '{claim}': '{row['text']}' needs more than {MOST} seeds to see {row['effect']:g} beyond "
                f"{row['margin']:g}, with a deviation of {row['deviation']:.2g}. Give --seeds=N, or a larger `effect`."
            )
    return max(int(row["seeds"]) for row in table)


def power_rows(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A power table as texts, under `POWER_HEADER`."""
    rows = []
    for one in table:
        if one["deviation"] is None:
            rows.append([one["text"], "–", "–", f"{one['effect']:g}", "–", "–"])
            continue
        text = f", of text {one['text_error']:.2g}" if one["text_error"] else ""
        seeds = f"> {MOST}" if one["seeds"] is None else str(one["seeds"])
        now = f"{100 * one['confirms']:.0f}% and {100 * one['refutes']:.0f}%"
        rows.append([one["text"], f"{one['deviation']:.2g}{text}", str(one["pilot"]), f"{one['effect']:g}", seeds, now])
    return rows


POWER_HEADER = ("criterion", "deviation of a seed", "of seeds", "effect to see", "seeds needed", "confirms and refutes")
