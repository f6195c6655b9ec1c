"""Axes: their ends, round ticks and names; numbers beside them; and curves with fewer or smoother points."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from pe_lab.results.figures import HeatMaps, LineCharts
from pe_lab.results.formatting import SUPERSCRIPTS, Number, count, percent, short_number, shortened, size_text

Point = tuple[Number, Number]
# How values of a unit are written; a `length` is one of tokens.
UNITS = {"bytes": size_text, "tokens": count, "share": percent, "length": lambda value: tokens_text(round(value))}


@dataclass(frozen=True)
class PlotAxis:
    """An axis. `ticks` and `domain`, its ends, are in data units; None: chosen from the data."""

    label: str
    log: bool = False
    show: Callable[[Number], str] = short_number
    ticks: Sequence[Number] | None = None
    domain: tuple[Number, Number] | None = None

    def ticks_within(self, ends: tuple[Number, Number], wanted: int) -> list[Number]:
        """Its own ticks, else about `wanted`."""
        ticks = self.ticks or (log_ticks(*ends, wanted) if self.log else linear_ticks(*ends, wanted))
        return [tick for tick in ticks if ends[0] <= tick <= ends[1]]

    def tick_text(self, tick: Number) -> str:
        """A tick's label, without zeros at the end."""
        word = self.show(tick)
        return word.rstrip("0").rstrip(".") if re.fullmatch(r"-?\d+\.\d+", word) else word

    def scale(self, ends: tuple[Number, Number], start: Number, end: Number) -> Callable[[Number], Number]:
        """Data units to pixels from `start` to `end`."""
        low, high = ends
        if low == high:
            low, high = (low / 2, high * 2) if self.log else (low - 0.5, high + 0.5)

        def to_pixels(value: Number) -> Number:
            share = (value - low) / (high - low)
            if self.log:
                share = math.log(max(value, 1e-300) / low) / math.log(high / low)
            return start + (end - start) * min(max(share, 0.0), 1.0)

        return to_pixels


# ---------------------------------------------------------------------------------------------------------------------
# Ticks and curves


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


# ---------------------------------------------------------------------------------------------------------------------
# The axes of figures


def axes_of(figure: LineCharts) -> tuple[PlotAxis, PlotAxis]:
    """The axes that all panels share."""
    (left, right), (low, high) = axis_limits(figure)
    margin = 0.0 if figure.log_y or figure.y_limits else 0.05 * (high - low)
    domain = (low - margin, high + margin)
    y = PlotAxis(figure.y_label, figure.log_y, UNITS.get(figure.y_unit, axis_number), domain=domain)
    names, ticks, show = figure.x_names, None, UNITS.get(figure.x_unit, axis_number)
    if names:
        ticks = [float(n) for n in range(0, len(names), every(len(names), 24))]

        def show(value: Number) -> str:
            return shortened(names[min(max(math.floor(value + 0.5), 0), len(names) - 1)], 24)

    elif figure.x_ticks:
        ticks = list(figure.x_ticks)
    elif in_powers_of_two(figure):
        ticks = powers_of_two(left, right, 7)

        def show(value: Number) -> str:
            whole = value >= 1 and np.log2(value).is_integer()
            return tokens_text(int(value)) if whole else axis_number(value)

    elif counts(figure) and not figure.log_x:
        ticks = [n for n in linear_ticks(left, right) if float(n).is_integer()]
    return PlotAxis(figure.x_label, figure.log_x, show, ticks, (left, right)), y


def colour_limits(figure: HeatMaps) -> tuple[float, float]:
    """The values of the first and the last colour; those of a diverging scale are equally far from 0."""
    measured = figure.values[np.isfinite(figure.values)]
    low, high = figure.limits or (measured.min(initial=np.inf), measured.max(initial=-np.inf))
    if figure.scale == "diverging":
        high = max(abs(low), abs(high))
        low = -high
    if not (math.isfinite(low) and math.isfinite(high)):
        return (-1.0, 1.0) if figure.scale == "diverging" else (0.0, 1.0)
    margin = 0.0 if low < high else (abs(low) or 1.0) / 2
    return float(low) - margin, float(high) + margin


def exceeds(figure: HeatMaps) -> tuple[bool, bool]:
    """Whether values lie below the first colour, and above the last."""
    low, high = colour_limits(figure)
    return bool((figure.values < low).any()), bool((figure.values > high).any())


def counts(figure: LineCharts) -> bool:
    """Whether every x is a whole number: a layer, a pair, a step."""
    return all(np.all(np.mod(line.x, 1) == 0) for _, lines in figure.panels for line in lines)


def axis_limits(figure: LineCharts) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of x, marks included, and of y, intervals included, over all panels; (0, 1) if nothing can be drawn."""
    lines = [line for _, lines in figure.panels for line in lines]
    xs = [np.asarray(line.x)[np.isfinite(line.y)] for line in lines] + [np.array([at for at, _ in figure.marks])]
    ys = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    if figure.x_names:
        xs = [np.array([-0.5, len(figure.x_names) - 0.5])]
    return _ends(xs, figure.log_x), figure.y_limits or _ends(ys, figure.log_y)


def _ends(parts: Sequence[Float[np.ndarray, "_"]], log: bool) -> tuple[float, float]:
    values = np.concatenate([np.zeros(0), *(np.asarray(part, np.float64).ravel() for part in parts)])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not values.size:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if low < high:
        return low, high
    return (low / 2, high * 2) if log else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def labels_of(figure: LineCharts) -> list[str]:
    """The labels of all lines, each once, in the order of the panels."""
    return list(dict.fromkeys(line.label for _, lines in figure.panels for line in lines if not line.faint))


def shift(figure: LineCharts, label: int) -> float:
    """How far beside a name the points of a label stand, so that those of several labels do not cover each other."""
    count = len(labels_of(figure))
    beside = figure.points and figure.x_names and not figure.log_x
    return (label - (count - 1) / 2) * min(0.18, 0.6 / count) if beside else 0.0


def in_powers_of_two(figure: LineCharts) -> bool:
    """Whether the logarithmic axis of x counts tokens, or has powers of two alone."""
    if not figure.log_x:
        return False
    values = {float(x) for _, lines in figure.panels for line in lines for x in line.x if x > 0}
    return "token" in figure.x_label.lower() or all(math.log2(value).is_integer() for value in values)


def powers_of_two(low: Number, high: Number, wanted: int) -> list[float]:
    """About `wanted` powers of two within [low, high], evenly apart."""
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**exponent for exponent in exponents[:: max(math.ceil(len(exponents) / wanted), 1)]]


def tick_names(names: Sequence[str], label: str) -> list[str]:
    """Names as short as ticks need: of `head 3` the number, if the axis is labelled head; of `7 (64 tokens)` the 7."""
    short = [name.partition(" (")[0] if name.endswith(")") else name for name in names]
    words = {name.rpartition(" ")[0] for name in short}
    if len(words) == 1 and (word := words.pop()) and word.lower() in label.lower():
        short = [name.removeprefix(f"{word} ") for name in short]
    return short if len(set(short)) == len(set(names)) else list(names)


def every(count: int, wanted: float) -> int:
    """The round step at which at most `wanted` of `count` things (at least one) get a label.

    Where the count is a power of two, so is the step: labels of 64 ranges of a sequence stand at quarters or eighths.
    """
    halves = count & (count - 1) == 0
    steps = (2**n for n in range(40)) if halves else (s * 10**n for n in range(9) for s in (1, 2, 4, 5, 8))
    return next(step for step in steps if math.ceil(count / step) <= max(wanted, 1))


def tokens_text(tokens: int) -> str:
    """4096 as 4k, 2^20 as 1M; ten million, which is no power of two, as 10M."""
    if tokens == 10_000_000:
        return "10M"
    if tokens < 2**10:
        return f"{tokens}"
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}k"


def axis_number(value: Number) -> str:
    """A number of any size with three or more digits: 0.00123, 1.5, 4,096; with a power of ten if tiny or huge."""
    size = abs(value)
    if not math.isfinite(value):
        return short_number(value)
    if 1000 <= size < 1e6:
        return f"{value:,.0f}".replace("-", "−")
    if not size or 1e-3 <= size < 1000:
        return f"{value:.4g}".replace("-", "−")
    digits, _, exponent = f"{value:.2e}".partition("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if digits == "1.00" else f"{float(digits):g}·{power}".replace("-", "−")
