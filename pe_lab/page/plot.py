"""One plot as SVG, for the page and for files alike: its axes, and lines, bands, bars and dots within them.

Colours are variables of the stylesheet (`--c-NAME`), which dark mode changes and files replace; sizes are pixels.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from pe_lab.page.colours import Style
from pe_lab.page.markup import Markup, element
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


def colour_ends(figure: HeatMaps, show: Callable[[Number], str]) -> tuple[str, str]:
    """The values of the first and the last colour as texts, with ≤ and ≥ where values lie beyond them."""
    low, high = colour_limits(figure)
    below, above = bool((figure.values < low).any()), bool((figure.values > high).any())
    return "≤ " * below + show(low), "≥ " * above + show(high)


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


def _ends(parts: Sequence[Float[np.ndarray, " _"]], log: bool) -> tuple[float, float]:
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


# ---------------------------------------------------------------------------------------------------------------------
# Series and the frame that they are drawn in


Mark = tuple[Number, str]  # where a vertical line stands, and its label: the training length
MOST = 5  # lines of a chart until its reader asks for all
LETTER = 7 / 12  # the width of a letter in units of its size


@dataclass(frozen=True)
class Series:
    """One line. `faint`: without label and tooltip. `markers`: with a dot at each point. `line=False`: dots only.

    `intervals`, a low and a high value for each point, are drawn as a band; with `bars`, and where there are dots only,
    as a bar at each point.
    Points that cannot be drawn are left out; `broken`: they break the line. `gaps` and `hidden` are for `line_chart`.
    """

    name: str
    points: Sequence[Point]
    style: Style
    faint: bool = False
    markers: bool = False
    line: bool = True
    intervals: Sequence[tuple[Number, Number]] = ()
    broken: bool = False
    gaps: tuple[int, ...] = ()  # numbers of the points before which the line is broken
    bars: bool = False
    hidden: bool = False  # until all are asked for; `line_chart` decides


@dataclass(frozen=True)
class Frame:
    """One drawing size in pixels: the whole, and the margins left of, right of, above and below the plot.

    Attributes:
      font: size of letters.
      named: whether the names of the axes and of the marks are written; else they stand beside several plots.
      labelled: whether the name of each line stands at its end.
      ticks: how many of x and of y, about.
      letters: in a line of a label of x, of labels that stand in several lines; 0: in one, where they fit.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    font: float = 12.0
    named: bool = True
    labelled: bool = False
    ticks: tuple[int, int] = (4, 6)
    letters: int = 0

    def width_of(self, words: str) -> float:
        """The width of a text."""
        return LETTER * self.font * len(words)


def colour_of(series: Series) -> str:
    return f"var(--c-{series.style.colour})"


def line_shape(x1: Number, x2: Number, y1: Number, y2: Number, **attributes: object) -> Markup:
    return element("line", x1=x1, x2=x2, y1=y1, y2=y2, **attributes)


def text_shape(words: str, x: Number, y: Number, anchor: str | None = None, look: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=look)


def hidden(shapes: object) -> Markup:
    """Shapes that are not shown until all are asked for; nor in a file."""
    return element("g", shapes, class_="more", display="none")


def stroke_of(s: Series, x: Number, y: Number) -> Markup:
    """A short stroke in a series' colour and dash, or its dot."""
    if not s.line:
        return element("circle", cx=x + 12, cy=y, r=4, fill=colour_of(s))
    return line_shape(x, x + 24, y, y, stroke=colour_of(s), stroke_width=s.style.width, stroke_dasharray=s.style.dash)


def legend_shapes(named: Sequence[Series], left: Number, y: Number, width: Number) -> tuple[list[Markup], Number]:
    """The names of series beside their strokes, in lines of `width` from a baseline on; and the last baseline."""
    shapes, x = [], float(left)
    for s in named:
        wide = 38 + 7 * len(s.name)
        if x > left and x + wide > left + width:
            x, y = float(left), y + 18
        name = [stroke_of(s, x, y - 4), text_shape(s.name, x + 30, y)]
        shapes += [hidden(name)] if s.hidden else name
        x += wide
    return shapes, y


# ---------------------------------------------------------------------------------------------------------------------
# The plot


class Plot(NamedTuple):
    """The shapes of a plot, the left, right, top and bottom edge of its area in pixels, and the ends of x and y."""

    shapes: list[Markup]
    area: tuple[Number, Number, Number, Number]
    x: tuple[Number, Number]
    y: tuple[Number, Number]


def drawable(series: Series, x: PlotAxis, y: PlotAxis) -> Series:
    """The series with a short name and without points that cannot be drawn."""

    def fits(value: Number, axis: PlotAxis) -> bool:
        return math.isfinite(value) and not (axis.log and value <= 0)

    kept = [n for n, (a, b) in enumerate(series.points) if fits(a, x) and fits(b, y)]
    return replace(
        series,
        name=shortened(series.name),
        points=[series.points[n] for n in kept],
        intervals=[series.intervals[n] for n in kept] if series.intervals else (),
        gaps=tuple(i for i in range(1, len(kept)) if series.broken and kept[i] > kept[i - 1] + 1),
    )


def with_intervals(series: Series) -> list[tuple[Number, Number, tuple[Number, Number] | None]]:
    """The points with the ends of their intervals, None where there are none."""
    known = [ends if all(map(math.isfinite, ends)) else None for ends in series.intervals]
    return [(a, b, ends) for (a, b), ends in zip(series.points, known or [None] * len(series.points), strict=True)]


def draw(frame: Frame, series: Sequence[Series], x: PlotAxis, y: PlotAxis, marks: Sequence[Mark] = ()) -> Plot:
    """The plot of series that can be drawn (`drawable`)."""
    if not any(s.line for s in series) and frame.labelled:  # dots have no names beside their ends
        frame = replace(frame, right=min(frame.right, 24))
    xs, ys = _extent(series, 0, x, marks), _extent(series, 1, y)
    y_ticks = [(tick, y.tick_text(tick)) for tick in y.ticks_within(ys, frame.ticks[1])]
    beside = 8 if frame.named else 5
    left = max(frame.left, beside + max([frame.width_of(word) for _, word in y_ticks], default=0))
    right, top, bottom = frame.width - frame.right, frame.top, frame.height - frame.bottom
    barred = [s for s in series if s.bars]
    inset = 1.25 * (len(barred) - 1) + 2 if barred else 0  # the bars of the first and last point stay within the plot
    to_x, to_y = x.scale(xs, left + inset, right - inset), y.scale(ys, bottom, top)
    shapes: list[Markup] = []
    for tick, word in y_ticks:
        at = to_y(tick)
        shapes += [line_shape(left, right, at, at, class_="grid"), text_shape(word, left - beside, at + 4, "end")]
    shapes += _ticks_of_x(frame, [(to_x(tick), x.tick_text(tick)) for tick in x.ticks_within(xs, frame.ticks[0])])
    shapes.append(line_shape(left, right, bottom, bottom, class_="axis"))
    if frame.named:
        shapes.append(text_shape(x.label, (left + right) / 2, frame.height - 8, "middle", "name"))
        shapes.append(text_shape(y.label, 4, 13, look="name"))
    for place, label in marks:
        at = to_x(place)
        after = at < (left + right) / 2
        shapes.append(line_shape(at, at, top, bottom, class_="mark"))
        if frame.named:
            shapes.append(text_shape(label, at + (5 if after else -5), top + 11, "start" if after else "end", "marked"))
    banded = [s for s in series if s.line and s.intervals and not s.bars]
    for s in banded:  # behind all lines, and paler where many would lie on each other
        bands = _bands(s, to_x, to_y, 0.18 if len(banded) <= 3 else 0.07)
        shapes += [hidden(list(bands))] if s.hidden else bands
    for s in sorted(series, key=lambda one: not one.faint):
        aside = _aside(s, barred) if s.bars else 0.0
        stroke = _stroke(s, to_x, to_y, aside)
        shapes.append(hidden(stroke) if s.hidden else stroke)
    if frame.labelled:
        lines = [s for s in series if s.line and not s.faint]
        first = _end_labels(frame, [s for s in lines if not s.hidden], to_x, to_y, right)
        if any(s.hidden for s in lines):
            first = [element("g", first, class_="few"), hidden(_end_labels(frame, lines, to_x, to_y, right))]
        shapes += first
    return Plot(shapes, (left + inset, right - inset, top, bottom), xs, ys)


def _ticks_of_x(frame: Frame, ticks: Sequence[tuple[Number, str]]) -> Iterator[Markup]:
    """The ticks of x. A label that would touch its neighbour is left out; the last one, the longest sequence, never."""
    bottom = frame.height - frame.bottom
    last, end = -math.inf, math.inf if not ticks else ticks[-1][0] - frame.width_of(ticks[-1][1]) / 2
    for n, (at, word) in enumerate(ticks):
        yield line_shape(at, at, bottom, bottom + 4, class_="axis")
        if frame.letters:
            for line, part in enumerate(textwrap.wrap(word, frame.letters)):
                yield element("text", part, x=at, y=bottom + 15.0 + 11 * line, text_anchor="middle", font_size=9)
            continue
        width = frame.width_of(word)
        if n == len(ticks) - 1 or (at - width / 2 > last and at + width / 2 + 4 < end):
            middle = min(max(at, width / 2), frame.width - width / 2)
            yield text_shape(word, middle, bottom + frame.font * (1.5 if frame.named else 1.25), "middle")
            last = at + width / 2 + 4


def _extent(series: Sequence[Series], which: int, axis: PlotAxis, marks: Sequence[Mark] = ()) -> tuple[Number, Number]:
    """The ends of an axis."""
    if axis.domain:
        return axis.domain
    values = [point[which] for s in series for point in s.points] + [at for at, _ in marks]
    low, high = min(values), max(values)
    if which == 0:
        return low, high
    ends = [end for s in series for *_, pair in with_intervals(s) if pair for end in pair if end > 0 or not axis.log]
    low, high = min([low, *ends]), max([high, *ends])
    if axis.log:
        margin = (high / low) ** 0.05
        return low / margin, high * margin
    return low - 0.04 * (high - low), high + 0.06 * (high - low)


def _bands(
    series: Series, to_x: Callable[[Number], Number], to_y: Callable[[Number], Number], opacity: float
) -> Iterator[Markup]:
    """The intervals of a line, one area for each of its pieces."""
    points = with_intervals(series)
    for start, end in itertools.pairwise([0, *series.gaps, len(points)]):
        known = [(to_x(a), to_y(pair[0]), to_y(pair[1])) for a, _, pair in points[start:end] if pair]
        around = [(at, low) for at, low, _ in known] + [(at, high) for at, _, high in reversed(known)]
        if around:
            yield element("path", d=f"{_path(around)}Z", fill=colour_of(series), class_="band", fill_opacity=opacity)


def _stroke(
    series: Series, to_x: Callable[[Number], Number], to_y: Callable[[Number], Number], aside: Number = 0.0
) -> Markup:
    """The line and the dots of a series, with its intervals; bars stand `aside` of their dots, not on each other."""
    pixels = [(to_x(a), to_y(b)) for a, b in series.points]
    ends = [pair and (to_y(pair[0]), to_y(pair[1])) for *_, pair in with_intervals(series)]
    borders = [0, *series.gaps, len(pixels)]
    pieces = [range(start, end) for start, end in itertools.pairwise(borders)]
    shapes = []
    bars = [(at, pair) for (at, _), pair in zip(pixels, ends, strict=True) if pair]
    if series.bars or not series.line:
        look = {"stroke_width": 1.2, "stroke_opacity": 0.6} if series.line else {"stroke_width": 1.6}
        shapes += [line_shape(at + aside, at + aside, *pair, stroke=colour_of(series), **look) for at, pair in bars]
    if series.line and len(pixels) > 1:
        line = element(
            "path",
            element("title", series.name),
            d="".join(_path([pixels[n] for n in piece]) for piece in pieces),
            stroke=colour_of(series),
            fill="none",
            stroke_width=1.0 if series.faint else series.style.width,
            stroke_dasharray=series.style.dash,
            stroke_linejoin="round",
            stroke_linecap="butt" if series.style.dash else "round",
            stroke_opacity=0.45 if series.faint else None,
        )
        shapes.append(line)
    alone = [pixels[piece[0]] for piece in pieces if len(piece) == 1]  # a point without neighbours is no line
    dots = pixels if series.markers or not series.line else alone
    shapes += [element("circle", cx=a, cy=b, r=3.0, fill=colour_of(series)) for a, b in dots]
    return element("g", *shapes)


def _aside(s: Series, barred: Sequence[Series]) -> float:
    """How far a series' bars stand aside of its dots, in pixels; those that are hidden at first stand outside."""
    alike = [one for one in barred if one.hidden == s.hidden]
    n, shown = alike.index(s), len(barred) - len(alike)
    if not s.hidden:
        return 2.5 * (n - (len(alike) - 1) / 2)
    return 2.5 * (shown / 2 + 0.5 + n // 2) * (1 if n % 2 else -1)


def _path(pixels: Sequence[Point]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in pixels)


def _letters(frame: Frame) -> int:
    """How many letters, which are about 7 pixels wide, fit beside the end of a line."""
    return int((frame.right - 16) / 7.2)


def names_fit(series: Sequence[Series], frame: Frame) -> bool:
    return all(len(s.name) <= _letters(frame) for s in series)


def _end_labels(
    frame: Frame,
    series: Sequence[Series],
    to_x: Callable[[Number], Number],
    to_y: Callable[[Number], Number],
    right: int,
) -> list[Markup]:
    """Each line's name at the height of its last point, moved apart, with a stroke to lines that end at the right."""
    gap = 14.0
    wanted = sorted(((to_y(s.points[-1][1]), s) for s in series), key=lambda item: item[0])
    places: list[float] = []
    for at, _ in wanted:
        places.append(max(at, places[-1] + gap if places else frame.top))
    lowest = float(frame.height - frame.bottom)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], lowest)
        lowest = places[index] - gap
    labels = []
    for (at, s), place in zip(wanted, places, strict=True):
        name = shortened(s.name, _letters(frame))
        end = to_x(s.points[-1][0]) + 3
        if end > right - 24:
            stroke = f"M{end:.1f} {at:.1f}L{right + 11} {place:.1f}"
            labels.append(element("path", d=stroke, stroke=colour_of(s), fill="none"))
        labels.append(element("text", name, x=right + 14, y=place + 4, class_="end", style=f"fill:{colour_of(s)}"))
    return labels
