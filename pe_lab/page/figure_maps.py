"""The heat maps of an analysis on the page: a picture of one pixel a cell for each panel, and values for the script.

Without the script all panels are visible, side by side. With it (`figure_script`) there is a large view of one panel,
chosen with a slider, and a pointer or the arrow keys tell the value of each cell.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

from pe_lab.page.figure_axes import axis_number, colour_limits, colour_map, every, exceeds, tick_names
from pe_lab.page.markup import Markup, element
from pe_lab.results.figures import HeatMaps
from pe_lab.results.formatting import shortened

LETTER = 8  # pixels, at most
WIDE, NARROW, HIGH = 1080, 270, 520  # pixels of the large view: its width on a laptop and on a phone, and its height
CELL = 64  # pixels, at most


def heat_maps(figure: HeatMaps) -> Markup:
    """The figure: its large view, the bar of colours, and all panels if they are several."""
    pictures = [picture(colours) for colours in cell_colours(figure)]
    count, rows, columns = figure.values.shape
    ratio = min(max(rows / columns, 0.28), 1.2)
    small = [
        element("div", element("p", shortened(name, 40)), _cells(image, described, 1 / ratio), class_="panel")
        for name, image, described in zip(figure.panels, pictures, map(_described, figure.values), strict=True)
    ]
    names = {
        "panels": figure.panels,
        "rows": figure.rows,
        "columns": figure.columns,
        "labels": [figure.panel_label, figure.row_label, figure.column_label, figure.value_label],
    }
    return element(
        "figure",
        element("div", figure.title, class_="chart-title"),
        _large(figure, pictures[0], count > 1),
        element("p", _directions(figure), class_="soft small"),
        _scale(figure),
        element("div", small, class_="panels") if count > 1 else None,
        element("figcaption", figure.caption),
        class_="chart analysis-maps",
        data_maps=json.dumps(names, separators=(",", ":"), ensure_ascii=False),
        data_values=base64.b64encode(figure.values.astype("<f4").tobytes()).decode(),
    )


def cell_colours(figure: HeatMaps) -> UInt8[np.ndarray, "P Y X 4"]:
    """Red, green, blue and opacity of each cell; cells that were not measured are transparent."""
    low, high = colour_limits(figure)
    shares = np.clip((figure.values.astype(np.float64) - low) / (high - low), 0, 1)
    colours = colour_map(figure)(np.nan_to_num(shares), bytes=True)
    return np.where(np.isnan(figure.values)[..., None], np.zeros(4, np.uint8), colours)


def picture(colours: UInt8[np.ndarray, "Y X 4"]) -> str:
    """A PNG picture of one pixel a cell, as the address of an image."""
    from PIL import Image

    palette, index = np.unique(colours.reshape(-1, 4), axis=0, return_inverse=True)
    buffer = io.BytesIO()
    if len(palette) > 256:
        Image.fromarray(colours).save(buffer, "png", optimize=True)
    else:  # a byte a cell; the opacity of each colour is a chunk of its own
        image = Image.fromarray(index.reshape(colours.shape[:2]).astype(np.uint8))
        image.putpalette(palette[:, :3].tobytes())
        image.save(buffer, "png", optimize=True, transparency=palette[:, 3].tobytes())
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _cells(image: str, described: str, aspect: float, **more: object) -> Markup:
    """A panel's picture, stretched to a width of `aspect` times its height."""
    inner = element("img", src=image, alt=described, draggable="false")
    return element("div", inner, class_="cells", style=f"aspect-ratio:{aspect:.3f}", **more)


def _described(values: Float[np.ndarray, "Y X"]) -> str:
    """What a panel holds, for those who do not see it."""
    measured = values[np.isfinite(values)]
    if not measured.size:
        return "not measured"
    low, mean, high = map(axis_number, (float(measured.min()), float(measured.mean()), float(measured.max())))
    return f"from {low} to {high}, mean {mean}"


def _directions(figure: HeatMaps) -> str:
    """Where rows and columns begin and end."""
    down, right = (names[:1] + names[1:][-1:] for names in (figure.rows, figure.columns))
    sides = ("Rows from the top", figure.row_label, down), ("Columns from the left", figure.column_label, right)
    return " ".join(f"{side}, {label}: {' to '.join(ends)}." for side, label, ends in sides)


def _scale(figure: HeatMaps) -> Markup:
    """The bar of colours with the values of its ends, and the look of cells that were not measured."""
    low, high = colour_limits(figure)
    bar = colour_map(figure)(np.linspace(0, 1, 64), bytes=True)[None]
    ends, marks = exceeds(figure), ("≤ ", "≥ ")
    shown = [mark * end + axis_number(value) for mark, end, value in zip(marks, ends, (low, high), strict=True)]
    hatch = element("span", element("i", class_="box none", aria_hidden="true"), " not measured")
    return element(
        "p",
        element("span", figure.value_label),
        element("span", shown[0], element("img", src=picture(bar), alt="to", class_="colours"), shown[1]),
        hatch if np.isnan(figure.values).any() else None,
        class_="scale",
    )


def large_size(rows: int, columns: int) -> tuple[int, int]:
    """Width and height in pixels of the large view on a laptop: square cells, unless it would be too high or flat."""
    width = min(CELL * columns, WIDE)
    if width * rows / columns > HIGH:
        width = max(HIGH * columns // rows, min(width, 480))
    return width, max(min(width * rows // columns, HIGH), min(14 * rows, HIGH))


def _large(figure: HeatMaps, first: str, several: bool) -> Markup:
    """The large view: of the one panel, or of the first of several, hidden until the script finds it."""
    rows = [shortened(name, 16) for name in tick_names(figure.rows, figure.row_label)]
    columns = [shortened(name, 16) for name in tick_names(figure.columns, figure.column_label)]
    width, height = large_size(len(rows), len(columns))
    across = LETTER * max(map(len, columns)) + 10
    least = min(14 * len(rows), 300)  # of its height, on a phone
    column_ticks = _ticks(columns, "left", width / across, min(width, NARROW) / across)
    row_ticks = _ticks(rows, "top", height / 14, least / 14)
    words = f"{figure.title}. Arrow keys: other cells."
    what = f"{figure.panels[0]}: {_described(figure.values[0])}"
    cells = _cells(first, what, width / height, tabindex="0", role="group", aria_label=words)
    parts = (
        element("div", figure.row_label, class_="row-label"),
        element("div", row_ticks, class_="row-ticks", style=f"width:{LETTER * max(map(len, rows))}px"),
        element("div", cells, class_="large-cells", style=f"--least:{least}px"),
        element("div", column_ticks, class_="column-ticks"),
        element("div", figure.column_label, class_="column-label"),
    )
    slider = None
    if several:
        name, last = figure.panel_label or "panel", len(figure.panels) - 1
        inner = element("input", type="range", min=0, max=last, value=0, step=1, aria_label=f"{figure.title}: {name}")
        slider = element("label", element("span", name), inner, element("output", figure.panels[0]), class_="slider")
    plot = element("div", parts, class_="plot", style=f"--widest:{width}px")
    value = element("p", class_="value", role="status")
    return element("div", slider, plot, value, class_="large", hidden=several)


def _ticks(names: Sequence[str], side: str, wanted: float, on_phones: float) -> list[Markup]:
    """As many names as are wanted along a side, and on phones as many of them as fit there."""
    shown = range(0, len(names), every(len(names), wanted))
    kept = shown[:: every(len(shown), on_phones)]
    places = {n: f"{side}:{100 * (n + 0.5) / len(names):.2f}%" for n in shown}
    return [
        element("span", names[n], style=place, class_=None if n in kept else "wide-only") for n, place in places.items()
    ]
