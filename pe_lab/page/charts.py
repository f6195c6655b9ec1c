"""Line charts as inline SVG, which need no script and no download.

Each chart is drawn twice, for wide and for narrow screens, so that text keeps its size on a phone; the stylesheet shows
one of the two. Colours are variables of the stylesheet (`--c-NAME`), which dark mode changes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pe_lab.page.chart_parts import (
    MOST,
    Axis,
    Series,
    ask_for_all,
    colour_of,
    file_parts,
    hidden,
    legend,
    line_shape,
    text_shape,
)
from pe_lab.page.markup import Markup, element
from pe_lab.page.ticks import Point, decimate, linear_ticks, log_ticks
from pe_lab.results.formatting import Number, shortened

Mark = tuple[Number, str]  # where a vertical line stands, and its label: the training length


@dataclass(frozen=True)
class Frame:
    """One drawing size in pixels: the whole, and the margins left of, right of, above and below the plot."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


FRAMES = {"wide": Frame(960, 360, 56, 176, 28, 46), "half": Frame(520, 310, 52, 168, 28, 46)}
NARROW = Frame(358, 280, 44, 14, 28, 44)
SMALL = Frame(190, 136, 38, 8, 8, 24)


def line_chart(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    caption: object = "",
    size: str = "wide",
    first: Sequence[str] = (),
) -> Markup:
    """A figure with the chart in two sizes, a legend, and its data for the tooltip; "" if nothing can be drawn.

    Points that are not finite, or not positive on a logarithmic axis, are left out. `size` is wide, or half or third
    of a laptop's page, or small: one of many charts with the same axes, whose legend and names stand beside them all.

    Of more than `MOST` named series, the others are hidden until a box is checked, which the page has above the chart
    (beside them all, if `small`). Those that `first` names are shown first, then the others in their order.
    """
    series = [clean for s in series if (clean := _drawable(s, x, y)).points]
    if not series:
        return Markup("")
    drawn = {s.name for s in series if not s.faint}
    order = dict.fromkeys([*(name for name in map(shortened, first) if name in drawn), *(s.name for s in series)])
    shown = [name for name in order if name in drawn][:MOST]
    series = [replace(s, hidden=s.name in drawn and s.name not in shown) for s in series]
    named = [s for s in series if not s.faint]
    summary = "; ".join(
        f"{s.name}: from {y.show(s.points[0][1])} at {x.show(s.points[0][0])} to {y.show(s.points[-1][1])} at "
        f"{x.show(s.points[-1][0])}"
        for s in named
    )
    description = f"{y.label} against {x.label}. {summary}."
    small, dots = size == "small", not any(s.line for s in named)
    long = size in FRAMES and not _names_fit(named, FRAMES[size])
    data = [
        {
            "n": s.name,
            "c": s.style.colour,
            "p": [_told(point, x, y) for point in decimate(_with_intervals(s), 40 if small else 160)],
            **({"m": 1} if s.hidden else {}),
        }
        for s in named
    ]
    frames = [(FRAMES[size], "wide")] if size in FRAMES else []
    frames = [(SMALL, "small")] if small else [*frames, (NARROW, "narrow")]
    return element(
        "figure",
        element("div", title, class_="chart-title"),
        None if small else [ask_for_all(named), legend(named)],
        [_draw(*frame, series, x, y, marks, (title, description), file=frame is frames[0]) for frame in frames],
        element("figcaption", caption) if caption else None,
        class_=f"chart {size}{' dots' * dots}{' long' * long}",
        data_chart=json.dumps({"x": x.label, "y": y.label, "series": data}, separators=(",", ":")),
    )


def _told(point: tuple[Number, Number, tuple[Number, Number] | None], x: Axis, y: Axis) -> list[object]:
    """A point for the tooltip and for files: numbers of six digits, their texts, and the ends of the interval."""
    a, b, ends = point
    return [*map(_digits, (a, b)), x.show(a), y.show(b) + _interval_text(ends, y), *map(_digits, ends or ())]


def _digits(value: Number) -> float:
    return float(f"{value:.6g}")


def _with_intervals(series: Series) -> list[tuple[Number, Number, tuple[Number, Number] | None]]:
    """The points with the ends of their intervals, None where there are none."""
    known = [ends if all(map(math.isfinite, ends)) else None for ends in series.intervals]
    return [(a, b, ends) for (a, b), ends in zip(series.points, known or [None] * len(series.points), strict=True)]


def _interval_text(ends: tuple[Number, Number] | None, y: Axis) -> str:
    return f" ({y.show(ends[0])} to {y.show(ends[1])})" if ends else ""


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    """The series with a short name and without points that cannot be drawn."""

    def fits(value: Number, axis: Axis) -> bool:
        return math.isfinite(value) and not (axis.log and value <= 0)

    kept = [n for n, (a, b) in enumerate(series.points) if fits(a, x) and fits(b, y)]
    return replace(
        series,
        name=shortened(series.name),
        points=[series.points[n] for n in kept],
        intervals=[series.intervals[n] for n in kept] if series.intervals else (),
        gaps=tuple(i for i in range(1, len(kept)) if series.broken and kept[i] > kept[i - 1] + 1),
    )


def _extent(series: Sequence[Series], which: int, axis: Axis, marks: Sequence[Mark] = ()) -> tuple[Number, Number]:
    """The ends of an axis."""
    if axis.domain:
        return axis.domain
    values = [point[which] for s in series for point in s.points] + [at for at, _ in marks]
    low, high = min(values), max(values)
    if which == 0:
        return low, high
    ends = [end for s in series for *_, pair in _with_intervals(s) if pair for end in pair if end > 0 or not axis.log]
    low, high = min([low, *ends]), max([high, *ends])
    if axis.log:
        margin = (high / low) ** 0.05
        return low / margin, high * margin
    return low - 0.04 * (high - low), high + 0.06 * (high - low)


def _draw(
    frame: Frame,
    size: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark],
    texts: tuple[str, str],
    file: bool = True,
) -> Markup:
    """One SVG of a chart. `texts`: its title and its description. `file`: it is the one that is saved as a file."""
    if not any(s.line for s in series):  # dots have no names beside their ends
        frame = replace(frame, right=min(frame.right, 24))
    xs, ys = _extent(series, 0, x, marks), _extent(series, 1, y)
    small = size == "small"
    y_ticks = [(tick, _tick_text(y, tick)) for tick in _ticks(y, ys, 3 if small else 6)]
    beside = 5 if small else 8
    left = max(frame.left, beside + 7 * max([len(word) for _, word in y_ticks], default=0))
    right, top, bottom = frame.width - frame.right, frame.top, frame.height - frame.bottom
    barred = [s for s in series if s.bars]
    inset = 1.25 * (len(barred) - 1) + 2 if barred else 0  # the bars of the first and last point stay within the plot
    to_x, to_y = _scale(xs, left + inset, right - inset, x.log), _scale(ys, bottom, top, y.log)
    shapes: list[Markup] = []
    for tick, word in y_ticks:
        at = to_y(tick)
        shapes += [line_shape(left, right, at, at, class_="grid"), text_shape(word, left - beside, at + 4, "end")]
    ticks = [(to_x(tick), _tick_text(x, tick)) for tick in _ticks(x, xs, 6 if size == "wide" else 4)]
    last, end = -math.inf, math.inf if not ticks else ticks[-1][0] - 3.5 * len(ticks[-1][1])
    for n, (at, word) in enumerate(ticks):
        shapes.append(line_shape(at, at, bottom, bottom + 4, class_="axis"))
        width = 7 * len(word)
        # A label that would touch its neighbour is left out; the last one, the longest sequence, never is.
        if n == len(ticks) - 1 or (at - width / 2 > last and at + width / 2 + 4 < end):
            middle = min(max(at, width / 2), frame.width - width / 2)
            shapes.append(text_shape(word, middle, bottom + (15 if small else 18), "middle"))
            last = at + width / 2 + 4
    shapes.append(line_shape(left, right, bottom, bottom, class_="axis"))
    if not small:
        shapes.append(text_shape(x.label, (left + right) / 2, frame.height - 8, "middle", "name"))
        shapes.append(text_shape(y.label, 4, 13, look="name"))
    for place, label in marks:
        at = to_x(place)
        after = at < (left + right) / 2
        shapes.append(line_shape(at, at, top, bottom, class_="mark"))
        if not small:
            shapes.append(text_shape(label, at + (5 if after else -5), top + 11, "start" if after else "end", "marked"))
    banded = [s for s in series if s.line and s.intervals and not s.bars]
    for s in banded:  # behind all lines, and paler where many would lie on each other
        bands = _bands(s, to_x, to_y, 0.18 if len(banded) <= 3 else 0.07)
        shapes += [hidden(list(bands))] if s.hidden else bands
    for s in sorted(series, key=lambda one: not one.faint):
        aside = _aside(s, barred) if s.bars else 0.0
        stroke = _stroke(s, to_x, to_y, aside)
        shapes.append(hidden(stroke) if s.hidden else stroke)
    if size == "wide":
        lines = [s for s in series if s.line and not s.faint]
        first = _end_labels(frame, [s for s in lines if not s.hidden], to_x, to_y, right)
        if any(s.hidden for s in lines):
            first = [element("g", first, class_="few"), hidden(_end_labels(frame, lines, to_x, to_y, right))]
        shapes += first
    named = sorted((s for s in series if not s.faint), key=lambda s: s.hidden)
    labelled = size == "wide" and all(s.line for s in named) and _names_fit(named, frame)  # at the ends of lines
    parts = file_parts(texts[0], [] if labelled else named, (frame.width, frame.height)) if file else None
    return element(
        "svg",
        element("title", texts[0]),
        None if small else element("desc", texts[1]),
        *shapes,
        viewBox=f"0 0 {frame.width} {frame.height}",
        class_=size,
        role="img",
        aria_label=". ".join(texts),
        data_plot=json.dumps([left + inset, right - inset, top, bottom, *xs, int(x.log), *ys, int(y.log)]),
        data_file=parts and json.dumps(parts, separators=(",", ":"), ensure_ascii=False),
    )


def _scale(ends: tuple[Number, Number], start: Number, end: Number, log: bool) -> Callable[[Number], Number]:
    """Data units to pixels along one axis."""
    low, high = ends
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)

    def to_pixels(value: Number) -> Number:
        share = math.log(max(value, 1e-300) / low) / math.log(high / low) if log else (value - low) / (high - low)
        return start + (end - start) * min(max(share, 0.0), 1.0)

    return to_pixels


def _ticks(axis: Axis, ends: tuple[Number, Number], wanted: int) -> list[Number]:
    """The axis's own ticks, else about `wanted`."""
    ticks = axis.ticks or (log_ticks(*ends, wanted) if axis.log else linear_ticks(*ends, wanted))
    return [tick for tick in ticks if ends[0] <= tick <= ends[1]]


def _tick_text(axis: Axis, tick: Number) -> str:
    """A tick's label, without zeros at the end."""
    word = axis.show(tick)
    return word.rstrip("0").rstrip(".") if re.fullmatch(r"-?\d+\.\d+", word) else word


def _bands(
    series: Series, to_x: Callable[[Number], Number], to_y: Callable[[Number], Number], opacity: float
) -> Iterator[Markup]:
    """The intervals of a line, one area for each of its pieces."""
    points = _with_intervals(series)
    for start, end in itertools.pairwise([0, *series.gaps, len(points)]):
        known = [(to_x(a), to_y(pair[0]), to_y(pair[1])) for a, _, pair in points[start:end] if pair]
        around = [(at, low) for at, low, _ in known] + [(at, high) for at, _, high in reversed(known)]
        if around:
            yield element("path", d=f"{_path(around)}Z", fill=colour_of(series), class_="band", opacity=opacity)


def _stroke(
    series: Series, to_x: Callable[[Number], Number], to_y: Callable[[Number], Number], aside: Number = 0.0
) -> Markup:
    """The line and the dots of a series, with its intervals; bars stand `aside` of their dots, not on each other."""
    pixels = [(to_x(a), to_y(b)) for a, b in series.points]
    ends = [pair and (to_y(pair[0]), to_y(pair[1])) for *_, pair in _with_intervals(series)]
    borders = [0, *series.gaps, len(pixels)]
    pieces = [range(start, end) for start, end in itertools.pairwise(borders)]
    shapes = []
    bars = [(at, pair) for (at, _), pair in zip(pixels, ends, strict=True) if pair]
    if series.bars or not series.line:
        look = {"stroke_width": 1.2, "opacity": 0.6} if series.line else {"stroke_width": 1.6}
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
            opacity=0.45 if series.faint else None,
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


def _names_fit(series: Sequence[Series], frame: Frame) -> bool:
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
