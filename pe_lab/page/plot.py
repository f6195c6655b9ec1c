"""One plot as SVG: lines, bands, bars and dots within two axes, for the page and for files alike.

Colours are variables of the stylesheet (`--c-NAME`), which dark mode changes and files replace; sizes are pixels.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pe_lab.page.axes import PlotAxis, Point
from pe_lab.page.colours import Style
from pe_lab.page.markup import Markup, element
from pe_lab.results.formatting import Number, shortened

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
    """Each line's name at the height of its last point, moved apart where they would overlap.

    A stroke joins them, unless the line ends before the right edge of the plot.
    """
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
