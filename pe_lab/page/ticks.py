"""Round numbers for axes, and curves with fewer or smoother points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

from pe_lab.results.formatting import Number

Point = tuple[Number, Number]


def linear_ticks(low: Number, high: Number, wanted: int = 5) -> list[Number]:
    """Round values (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: Number, high: Number, wanted: int = 6) -> list[Number]:
    """Values 1, 2 and 5 times powers of ten within [low, high]: powers alone if these are too many, linear if none."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for sizes in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [size * 10.0**e for e in exponents for size in sizes if low * 0.999 <= size * 10.0**e <= high * 1.001]
        if len(ticks) <= wanted:
            break
    every = math.ceil(len(ticks) / wanted)
    return ticks[::every] if len(ticks) >= 2 else linear_ticks(low, high, 4)


Placed = TypeVar("Placed", bound=tuple)  # a point, or a point and more


def decimate(points: Sequence[Placed], limit: int = 240) -> list[Placed]:
    """At most about 2 * `limit` points: the lowest and the highest of each bin, so that spikes survive."""
    if len(points) <= 2 * limit:
        return list(points)
    kept = [points[0]]
    for index in range(limit):
        part = points[index * len(points) // limit : (index + 1) * len(points) // limit]
        ends = {part.index(min(part, key=lambda p: p[1])), part.index(max(part, key=lambda p: p[1]))}
        kept += [part[i] for i in sorted(ends)]
    kept.append(points[-1])
    return kept


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """A centred running mean over `window` points, narrower at the ends."""
    half, result = window // 2, []
    sums = list(itertools.accumulate((value for _, value in points), initial=0.0))
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        result.append((x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return result
