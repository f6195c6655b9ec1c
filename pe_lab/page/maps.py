"""Heat maps on the page: of needles by depth and length, as tables; and of analyses, as pictures with a slider.

A map of needles has the share found by the needle's depth (rows) and the sequence's length (columns), and needs neither
a script nor a picture. An analysis has a picture of one pixel a cell for each panel: without the script all of them are
visible, side by side; with it there is a large view of one panel, chosen with a slider, and a pointer or the arrow keys
tell the value of each cell.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pe_lab.errors import ConfigError, DataError, did_you_mean
from pe_lab.page.colours import STEPS, Style, cell_colours, picture, scale_colours, step
from pe_lab.page.figure_files import share_text
from pe_lab.page.markup import Markup, element, folded, text
from pe_lab.page.plot import axis_number, colour_ends, colour_limits, every, tick_names
from pe_lab.page.tables import UNMEASURED, header, label_markup, row, table
from pe_lab.page.variants import suite_title, task_name, task_suites
from pe_lab.results.figures import HeatMaps
from pe_lab.results.formatting import shortened
from pe_lab.results.records import Record, as_dict, bins
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.table import Length, Table
from pe_lab.results.variants import DROPPED, kind

Depth = tuple[float, float]  # per cent of the sequence before the needle, from and to; equal ends are one depth
IN_SIGHT = 3  # maps of needles; the others are folded away
LETTER = 8  # pixels, at most
WIDE, NARROW, HIGH = 1080, 270, 520  # pixels of the large view: its width on a laptop and on a phone, and its height
CELL = 64  # pixels, at most

# ---------------------------------------------------------------------------------------------------------------------
# Needles


@dataclass(frozen=True)
class NeedleMap:
    """One variant of a table: `cells` are (score in 0..1, needles or None) by (depth, column key)."""

    scores: Table
    label: str
    depths: tuple[Depth, ...]
    columns: tuple[Length, ...]
    cells: Mapping[tuple[Depth, float], tuple[float, float | None]]


def by_depth(record: Record) -> dict[Depth, tuple[float, float | None]]:
    """Score and count of each depth that was measured."""
    found = bins(as_dict(record.get("by_depth")), "depth", "score", "count")
    return {(part["start"], part["end"]): (part["score"], part.get("count")) for part in found}


def needle_maps(scores: Table) -> list[NeedleMap]:
    """The maps of a table's variants, all with the same depths and lengths; [] if no record has depths."""
    found = {key: by_depth(cell.record) for key, cell in scores.cells.items()}
    depths = tuple(sorted({depth for places in found.values() for depth in places}))
    columns = tuple(c for c in scores.columns if any(found.get((label, c.key)) for label in scores.rows))
    maps = []
    for label in scores.rows:
        cells = {
            (depth, column.key): value
            for column in columns
            for depth, value in found.get((label, column.key), {}).items()
        }
        if cells:
            maps.append(NeedleMap(scores, label, depths, columns, cells))
    return maps


def in_sight(maps: Sequence[NeedleMap]) -> tuple[list[NeedleMap], list[NeedleMap]]:
    """The maps to show first, and the others.

    First come RoPE as trained, RoPE + YaRN and the variant of the dropped model that the verdict compares, then any
    others in the order of tables.
    """
    of_kind = {kind(one.scores.rows[one.label]): one for one in reversed(maps)}
    dropped = [name for name in DROPPED if name in of_kind][:1]
    first = [of_kind[name] for name in ("RoPE", "YaRN", *dropped) if name in of_kind]
    rest = [one for one in maps if not any(one is other for other in first)]
    missing = IN_SIGHT - len(first)
    return first + rest[:missing], rest[missing:]


def depth_name(depth: Depth) -> str:
    """`40%`, or `40–50%` for a bin."""
    return f"{depth[0]:g}%" if depth[0] == depth[1] else f"{depth[0]:g}–{depth[1]:g}%"


def _map_table(one: NeedleMap) -> Markup:
    """One map as a table."""
    head = [header("depth")]
    head += [
        header(c.title.removesuffix(" tokens"), c.small, look="trained" if c.factor == 1 else None) for c in one.columns
    ]
    body = [row(depth_name(depth), [_map_cell(one, depth, column) for column in one.columns]) for depth in one.depths]
    overall = []
    for column in one.columns:
        cell = one.scores.cell(one.label, column)
        title = f"95% interval {cell.interval}" if cell and cell.interval else None
        trained = "trained" if column.factor == 1 else None
        overall.append(element("td", cell.shown.removesuffix("%") if cell else "–", class_=trained, title=title))
    look = "heat dense" if len(one.columns) > 9 else "heat"
    about = ": per cent found, by depth of the needle and length of the sequence"
    return table(f"{map_name(one.scores)}, {one.label}", head, body, look, about, "sideways", row("all", overall))


def _map_cell(one: NeedleMap, depth: Depth, column: Length) -> Markup:
    """One depth at one length: its score as a figure and as a colour, its counts on hover."""
    at = f"{column.title}, depth {depth_name(depth)}"
    trained = " trained" if column.factor == 1 else ""
    found = one.cells.get((depth, column.key))
    if found is None:
        return element("td", UNMEASURED, class_=f"none{trained}", title=f"{at}: not measured")
    score, count = found
    of = f" of {count:,.0f} needles" if count else ""
    look, title = f"h{step(score)}{trained}", f"{at}: {100 * score:.1f}%{of}"
    return element("td", share_text(score), class_=look, title=title, data_csv=f"{score:.6g}")


def needle_legend() -> Markup:
    """The colours from none to all, an empty cell, and the frame of the training length."""
    bar = [element("i", class_=f"h{index}") for index in range(0, STEPS + 1, 2)]
    return element(
        "p",
        element("span", "0% ", element("span", bar, class_="bar", aria_hidden="true"), " 100% found"),
        element("span", element("i", class_="box none", aria_hidden="true"), " not measured"),
        element("span", element("i", class_="box framed", aria_hidden="true"), " training length"),
        class_="scale",
    )


def needle_figures(tables: Sequence[Table], styles: Mapping[str, Style], level: int) -> list[Markup]:
    """The maps of a suite's tasks: the first task under a heading of `level`, the others folded; [] without depths."""
    figures = []
    for scores in tables:
        if maps := needle_maps(scores):
            shown, others = (_map_grid(some, styles) for some in in_sight(maps))
            figures.append((map_name(scores), text([shown, folded("The other variants", others)])))
    if not figures:
        return []
    (name, first), *rest = figures
    others = [element("div", element("p", name, class_="title"), figure, class_="below") for name, figure in rest]
    return [element(f"h{level}", name), first, folded(f"{suite_title(tables[0].suite)}: {len(rest)} more", others)]


def map_name(scores: Table) -> str:
    """The name of a table's maps: `Needle in a haystack: multi query`."""
    return "Needles in filler" if scores.suite == "needles" else f"{suite_title(scores.suite)}: {task_name(scores)}"


def _map_grid(maps: Sequence[NeedleMap], styles: Mapping[str, Style]) -> Markup:
    """Maps in a grid that wraps; "" without maps."""
    figures = [
        element("figure", element("figcaption", label_markup(one.label, styles)), _map_table(one)) for one in maps
    ]
    return element("div", figures, class_="maps") if figures else Markup("")


def needle_picture(scores: Table) -> HeatMaps:
    """The maps that the page shows first, as a figure for files."""
    maps, _ = in_sight(needle_maps(scores))
    depths, columns = maps[0].depths, maps[0].columns
    values = np.full((len(maps), len(depths), len(columns)), np.nan)
    for at in np.ndindex(values.shape):
        panel, depth, column = at
        values[at] = maps[panel].cells.get((depths[depth], columns[column].key), (np.nan, None))[0]
    trained = [n for n, column in enumerate(columns) if column.factor == 1]
    return HeatMaps(
        "needles",
        map_name(scores),
        "",
        values,
        tuple(one.label for one in maps),
        tuple(map(depth_name, depths)),
        tuple(column.title.removesuffix(" tokens") for column in columns),
        "variant",
        "depth of the needle",
        "sequence length",
        "found",
        "found",
        (0.0, 1.0),
        framed=trained[0] if trained else None,
        texts=True,
    )


def needle_table(runs: Sequence[RunFiles], suite: str | None = None, task: str | None = None) -> Table:
    """The results to draw: those of `suite` and `task` if they are named, else the first with depths.

    Raises:
      DataError: the runs have no needle results by depth.
      ConfigError: they have none of this suite or task.
    """
    found: dict[str, list[Table]] = {}
    for name in sorted(task_suites({name for run in runs for name in run.evaluation}), key=lambda n: n == "needles"):
        if tables := [table for table in build_tables(name, runs) if needle_maps(table)]:
            found[name] = tables
    where = ", ".join(str(run.directory) for run in runs)
    if not found:
        raise DataError(
            f"--heat-map: {where} has no needle results by depth. Measure some: "
            f"python -m pe_lab.evaluate --from={runs[0].directory} --suite=niah"
        )
    if suite is not None and suite not in found:
        raise ConfigError(
            f"--suite='{suite}' has no needle results by depth in {where}. {did_you_mean(suite, [*found])}"
        )
    tables = found[suite or next(iter(found))]
    if task is None:
        return tables[0]
    if task not in (sources := [table.source for table in tables]):
        raise ConfigError(f"--task='{task}' has no needle results by depth in {where}. {did_you_mean(task, sources)}")
    return tables[sources.index(task)]


# ---------------------------------------------------------------------------------------------------------------------
# Analyses


def analysis_maps(figure: HeatMaps) -> Markup:
    """The figure: its large view, the bar of colours, and all panels if they are several."""
    pictures = [picture(one) for one in cell_colours(figure.scale, figure.values, colour_limits(figure))]
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
    first, last = colour_ends(figure, axis_number)
    bar = scale_colours(figure.scale, np.linspace(0, 1, 64))[None]
    hatch = element("span", element("i", class_="box none", aria_hidden="true"), " not measured")
    return element(
        "p",
        element("span", figure.value_label),
        element("span", first, element("img", src=picture(bar), alt="to", class_="colours"), last),
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
