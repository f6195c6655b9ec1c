"""Figures as files for papers: SVG, and PNG and PDF made of it; small multiples on one page, 7 inches wide."""

from __future__ import annotations

import hashlib
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pe_lab.page.charts import line_styles, series_of
from pe_lab.page.colours import cell_colours, picture, scale_colours, step, step_colours
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.plot import (
    LETTER,
    Frame,
    axes_of,
    axis_number,
    colour_ends,
    colour_limits,
    draw,
    drawable,
    every,
    labels_of,
    legend_shapes,
    line_shape,
    linear_ticks,
    text_shape,
    tick_names,
)
from pe_lab.page.stylesheet import ATTRIBUTES, FONTS, PALETTE
from pe_lab.results.figures import Effects, Figure, HeatMaps, LineCharts
from pe_lab.results.formatting import percent, shortened

FORMATS = ("png", "svg", "pdf")
WIDTH, HIGHEST = 672, 880  # pixels: 7 inches, and the most that the panels of a page may take
GAP, NAME, TICK = 12, 10.5, 9.0  # pixels between panels; sizes of the letters of names and of ticks
SCALE = 2  # pixels of a PNG for each of its SVG
# DejaVu Sans, its Latin, Greek and Cyrillic letters and its signs: a file looks the same on every machine.
FONT = {weight: Path(__file__).parent / "fonts" / f"DejaVuSans{weight}.ttf" for weight in ("", "-Bold")}


def render(figure: Figure, form: str) -> bytes:
    """A figure as the bytes of a `pdf`, `png` or `svg` file; the same bytes each time. Its caption is not drawn."""
    return render_all([[figure]], form)


def render_all(groups: Sequence[Sequence[Figure]], form: str, title: str = "") -> bytes:
    """Figures on one page, a group below the other; those of a group of several stand in two columns."""
    drawn = svg(groups, title)
    return drawn.encode() if form == "svg" else png(drawn) if form == "png" else pdf(drawn)


def svg(groups: Sequence[Sequence[Figure]], title: str = "") -> str:
    """The page of figures as SVG."""
    shapes, top = _titles(title, 4.0, WIDTH, "file-title")
    for group in groups:
        columns = max(min(len(group), 2), 1)
        width = (WIDTH - GAP * (columns - 1)) / columns
        for start in range(0, len(group), columns):
            blocks = [_block(figure, width) for figure in group[start : start + columns]]
            shapes += [_at(n * (width + GAP), top, block.shapes) for n, block in enumerate(blocks)]
            top += max(block.height for block in blocks) + GAP
    return page_of(f"-6 -4 {WIDTH + 12} {math.ceil(top) + 4}", "", shapes)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def page_of(box: str, before: str, shapes: object) -> str:
    """Shapes on white paper with their styles as attributes: a file has no stylesheet."""
    x, y, width, height = box.split()
    about = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "width": width, "height": height}
    root = str(element("svg", "", **about, font_family=FONTS, font_size=12, fill=PALETTE["soft"]))
    paper = before or element("rect", x=x, y=y, width=width, height=height, fill="#fff")
    body = re.sub(r' class="([\w-]+)"', lambda m: ATTRIBUTES.get(m[1], ""), f"{paper}{text(shapes)}")
    body = re.sub(r"var\(--(?:c-)?([\w-]+)\)", lambda m: PALETTE.get(m[1], "#000"), body)
    return f"{root.removesuffix('</svg>')}{body}</svg>"


def png(drawn: str) -> bytes:
    """A page of SVG as a PNG of twice its size."""
    import resvg_py

    fonts = {"font_files": [str(path) for path in FONT.values()], "skip_system_fonts": True}
    family = {"font_family": "DejaVu Sans", "sans_serif_family": "DejaVu Sans"}
    return bytes(resvg_py.svg_to_bytes(svg_string=drawn, zoom=float(SCALE), **fonts, **family))


def pdf(drawn: str) -> bytes:
    """A page of SVG as a PDF, whose lines stay lines and whose letters stay letters."""
    from reportlab.graphics import renderPDF
    from reportlab.pdfgen.canvas import Canvas
    from svglib.fonts import register_font
    from svglib.svglib import svg2rlg

    for weight, path in FONT.items():
        register_font("DejaVu Sans", str(path), weight="bold" if weight else "normal")
    plain = re.sub(r"<(title|desc)>.*?</\1>", "", drawn, flags=re.S)
    plain = plain.replace(FONTS, "DejaVu Sans").replace('font-weight="600"', 'font-weight="bold"')
    drawing, file = svg2rlg(io.BytesIO(plain.encode())), io.BytesIO()
    canvas = Canvas(file, (drawing.width, drawing.height), pageCompression=1, invariant=1)
    renderPDF.draw(drawing, canvas, 0, 0)
    canvas.save()
    same = hashlib.md5(plain.encode()).hexdigest().encode()  # the id that it has is of the names of temporary files
    return re.sub(rb"<[0-9a-f]{32}><[0-9a-f]{32}>", b"<%b><%b>" % (same, same), file.getvalue())


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


class FigureBlock(NamedTuple):
    """The shapes of a figure, from (0, 0) on, and its height."""

    shapes: list[Markup]
    height: float


def _block(figure: Figure, width: float) -> FigureBlock:
    if isinstance(figure, Effects):
        return _effects(figure, width)
    return _maps(figure, width) if isinstance(figure, HeatMaps) else _lines(figure, width)


def _at(x: float, y: float, shapes: object, **more: object) -> Markup:
    return element("g", shapes, transform=f"translate({x:.1f} {y:.1f})", **more)


def _titles(words: str, top: float, width: float, look: str = "block-title") -> tuple[list[Markup], float]:
    """A title in lines of a width, and where what is below it begins; nothing of an empty one."""
    if not words:
        return [], top
    size = 14 if look == "file-title" else 12
    lines = textwrap.wrap(words, int(width / (size * LETTER * 1.1)))
    return [text_shape(line, 0, top + size * (1.3 * n + 1), look=look) for n, line in enumerate(lines)], top + (
        1.3 * size * len(lines) + 6
    )


def grid(count: int, wide: bool = False) -> tuple[int, int]:
    """Rows and columns of small multiples: few empty places, and about five columns (`wide`: about three)."""
    choices = [3, 2] if wide else [5, 6, 4, 3] if count <= 42 else [7, 8, 6]
    if count <= choices[0]:
        return 1, count
    columns = min(choices, key=lambda columns: (-count % columns, choices.index(columns)))
    return -(-count // columns), columns


def _lines(figure: LineCharts, width: float) -> FigureBlock:
    """All panels on the same axes, with one legend below them."""
    styles, (x, y) = line_styles(labels_of(figure)), axes_of(figure)
    panels = [
        (name, [drawable(series_of(line, figure, styles), x, y) for line in lines]) for name, lines in figure.panels
    ]
    panels = [(name, [one for one in series if one.points]) for name, series in panels]
    rows, columns = grid(len(panels))
    alone = len(panels) == 1
    shapes, top = _titles(figure.title or panels[0][0] * alone, 0.0, width)
    if alone:
        wide, above = width == WIDTH, 26 if y.label else 12
        letters, lines = _name_lines(figure, width - 90)
        below = 28 + 11 * lines if letters else 42
        size = (round(width), (202 if wide else 142) + above + below, 40, 12, above, below)
        frame = Frame(*size, ticks=(7 if wide else 5, 6), letters=letters)
        shapes.append(_at(0, top, draw(frame, panels[0][1], x, y, figure.marks).shapes if panels[0][1] else []))
        top += frame.height
    else:
        wide = (width - GAP * (columns - 1)) / columns
        high = min(max((HIGHEST - 130) / rows - 22, 64), 0.62 * wide + 30, 200)
        shapes.append(text_shape(f"Upwards: {figure.y_label}", 0, top + 10))
        top += 20
        ticks = max(int(wide / 44), 2), max(int(high / 28), 2)
        frame = Frame(round(wide), round(high), 14, 5, 5, 16, TICK, named=False, ticks=ticks)
        for n, (name, series) in enumerate(panels):
            place = n % columns * (wide + GAP), top + n // columns * (high + 20)
            shapes.append(_at(*place, _name(name, wide)))
            drawn = draw(frame, series, x, y, figure.marks).shapes if series else []
            shapes.append(_at(place[0], place[1] + 14, drawn, font_size=TICK))
        top += rows * (high + 20) + 12
        shapes.append(text_shape(figure.x_label, width / 2, top, "middle"))
        top += 6
    found = {one.name: replace(one, intervals=()) for _, series in panels for one in series if not one.faint}
    named = [found[name] for name in map(shortened, styles) if name in found] if len(styles) > 1 else []
    if named:
        names, top = legend_shapes(named, 0, top + 14, width)
        shapes += names
    if figure.marks and not alone:
        words = [f"The vertical line marks {x.show(at)}: {word}." for at, word in figure.marks]
        lines = textwrap.wrap(" ".join(words), int(width / (12 * LETTER)))
        shapes += [text_shape(line, 0, top + 17 * (n + 1)) for n, line in enumerate(lines)]
        top += 17 * len(lines)
    return FigureBlock(shapes, top + 6)


def _name_lines(figure: LineCharts, width: float) -> tuple[int, int]:
    """The letters of a line of the names of x, side by side, and their lines; (0, 1) of too many names for that."""
    names = [shortened(name, 24) for name in figure.x_names]
    letters = int(width / max(len(names), 1) / (9 * LETTER))
    if not names or letters < 7:
        return 0, 1
    return letters, max(len(textwrap.wrap(name, letters)) for name in names)


def _name(name: str, width: float) -> Markup:
    """The name above a panel."""
    shown = shortened(name, max(int(width / (NAME * LETTER)), 6))
    return element("text", shown, x=0, y=10, font_size=NAME, fill=PALETTE["ink"])


def _maps(figure: HeatMaps, width: float) -> FigureBlock:
    """All panels on one scale of colours, with its bar below them; cells that were not measured are hatched."""
    count, y_count, x_count = figure.values.shape
    rows, columns = grid(count, wide=x_count > 48)
    row_names = [shortened(name, 16) for name in tick_names(figure.rows, figure.row_label)]
    column_names = [shortened(name, 16) for name in tick_names(figure.columns, figure.column_label)]
    left = TICK * LETTER * max(map(len, row_names)) + 6
    wide = min((width - left - GAP * (columns - 1)) / columns, max(46.0 * x_count, 220.0) if figure.texts else 560.0)
    tallest = min((HIGHEST - 115) / rows - 20, 230 if count > 1 else 460)
    high = min(max(y_count * wide / x_count * (1.7 if count > 1 else 1.0), 48 if count > 1 else 150), tallest)
    high = 24.0 * y_count if figure.texts else high
    shapes, top = _titles(figure.title, 0.0, width)
    shapes.append(text_shape(f"Downwards: {figure.row_label}", 0, top + 10))
    top += 20
    for n, (name, values) in enumerate(zip(figure.panels, figure.values, strict=True)):
        place = left + n % columns * (wide + GAP), top + n // columns * (high + 20)
        shapes.append(_at(*place, [_name(name, wide), _at(0, 15, _cells(figure, values, wide, high))]))
        if n % columns == 0:
            shapes.append(_at(left - 4, place[1] + 15, _row_ticks(row_names, high), font_size=TICK))
        if n + columns >= count:
            shapes.append(_at(place[0], place[1] + 15 + high, _column_ticks(column_names, wide), font_size=TICK))
    top += rows * (high + 20) + 26
    shapes.append(text_shape(figure.column_label, left + (width - left) / 2, top, "middle"))
    return FigureBlock([*shapes, *_colour_bar(figure, top + 18)], top + 30)


def _cells(figure: HeatMaps, values: np.ndarray, wide: float, high: float) -> list[Markup]:
    """The cells of a panel as a picture, with their values and the frame of a column where a figure has them."""
    rows, columns = values.shape
    image = picture(cell_colours(figure.scale, values, colour_limits(figure)), 12 if columns <= 128 else 2)
    size = {"x": 0, "y": 0, "width": float(wide), "height": float(high)}
    shapes = [element("image", "", **size, preserveAspectRatio="none", href=image, style="image-rendering:pixelated")]
    if figure.texts:
        for r, c in np.argwhere(np.isfinite(values)):
            _, ink = step_colours(step(values[r, c]))
            at = {"x": (c + 0.5) * wide / columns, "y": (r + 0.5) * high / rows + 3.5}
            shapes.append(
                element("text", share_text(values[r, c]), **at, text_anchor="middle", font_size=10.0, fill=ink)
            )
    if figure.framed is not None:
        place = {"x": figure.framed * wide / columns, "y": 0.0, "width": wide / columns, "height": float(high)}
        shapes.append(element("rect", **place, fill="none", stroke="var(--mark)", stroke_width=2))
    return shapes


def share_text(score: float) -> str:
    """Per cent without the sign; 0 and 100 are none and all, nothing else."""
    value = 100 * min(max(score, 0.0), 1.0)
    if 0 < value < 1:
        return "<1"
    return f"{math.floor(value) if value > 99 else value:.0f}"


def _row_ticks(names: Sequence[str], high: float) -> list[Markup]:
    shown = range(0, len(names), every(len(names), high / (1.3 * TICK)))
    return [text_shape(names[n], 0, (n + 0.5) * high / len(names) + 3, "end") for n in shown]


def _column_ticks(names: Sequence[str], wide: float) -> list[Markup]:
    longest = TICK * LETTER * max(map(len, names)) + 8
    shown = range(0, len(names), every(len(names), wide / longest))
    return [text_shape(names[n], (n + 0.5) * wide / len(names), TICK + 3, "middle") for n in shown]


def _colour_bar(figure: HeatMaps, y: float) -> list[Markup]:
    """What the values are, and the colours with the values of their ends."""
    ends = colour_ends(figure, percent if figure.scale == "found" else axis_number)
    bar = picture(scale_colours(figure.scale, np.linspace(0, 1, 64))[None].repeat(8, 0).repeat(4, 1))
    start = 12 * LETTER * len(figure.value_label) + 14
    first, after = start + 12 * LETTER * len(ends[0]) + 6, "hatched: not measured" * bool(np.isnan(figure.values).any())
    after = ", ".join(filter(None, [after, "framed: the training length" * (figure.framed is not None)]))
    return [
        text_shape(figure.value_label, 0, y),
        text_shape(ends[0], start, y),
        element("image", "", x=first, y=y - 10, width=150, height=12, preserveAspectRatio="none", href=bar),
        text_shape(ends[1], first + 156, y),
        text_shape(after, first + 172 + 12 * LETTER * len(ends[1]), y),
    ]


def _effects(figure: Effects, width: float) -> FigureBlock:
    """Differences with their intervals on one axis, each in a row beside its sentence; marks are the margins."""
    shapes, top = _titles(figure.title, 0.0, width)
    start, end, small = 0.42 * width, 0.70 * width, 10.0
    ends = [
        value for row in figure.rows for value in (row.mean, row.low, row.high, *row.margins) if math.isfinite(value)
    ]
    low, far = min([0.0, *ends]), max([0.0, *ends])
    margin = 0.08 * (far - low) or 1.0

    def to_x(value: float) -> float:
        return start + (end - start) * (value - low + margin) / (far - low + 2 * margin)

    begin = top
    for row in figure.rows:
        lines = textwrap.wrap(row.text, int((start - 10) / (small * LETTER)))
        height = max(20.0, 13.0 * len(lines) + 6)
        middle, colour = top + height / 2, {"stroke": row.colour, "stroke_width": 2.4}
        first = middle - 13 * (len(lines) - 1) / 2 + 3
        shapes += [element("text", one, x=0, y=first + 13 * n, font_size=small) for n, one in enumerate(lines)]
        marks = [to_x(value) for value in row.margins]
        shapes += [line_shape(x, x, middle - 6, middle + 6, stroke=PALETTE["line"], stroke_width=2) for x in marks]
        if math.isfinite(row.low):
            shapes.append(line_shape(to_x(row.low), to_x(row.high), middle, middle, **colour))
        if math.isfinite(row.mean):
            shapes.append(element("circle", cx=to_x(row.mean), cy=middle, r=3.5, fill=row.colour))
        shapes.append(element("text", row.words, x=end + 10, y=middle + 3, font_size=small))
        top += height
    shapes.append(line_shape(to_x(0.0), to_x(0.0), begin, top, class_="axis"))
    shapes.append(line_shape(start, end, top, top, class_="axis"))
    for tick in linear_ticks(low - margin, far + margin, 4):
        shapes.append(line_shape(to_x(tick), to_x(tick), top, top + 4, class_="axis"))
        shapes.append(
            element("text", axis_number(tick), x=to_x(tick), y=top + 14, text_anchor="middle", font_size=small)
        )
    shapes.append(text_shape(figure.x_label, (start + end) / 2, top + 29, "middle"))
    return FigureBlock(shapes, top + 36)
