"""Heat maps of needles: the share found by the needle's depth (rows) and the sequence's length (columns).

Each variant has one small map, which is a table and needs neither a script nor a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.page.markup import Markup, element, folded, text
from pe_lab.page.suites import suite_title, task_name
from pe_lab.page.tables import UNMEASURED, header, label_markup, row, table
from pe_lab.page.variants import Style
from pe_lab.results.records import Record, as_dict, bins
from pe_lab.results.table import Length, Table
from pe_lab.results.variants import DROPPED, kind

Depth = tuple[float, float]  # per cent of the sequence before the needle, from and to; equal ends are one depth
STEPS = 20  # of colour between none found and all found
# One hue, for readers who do not tell hues apart; found is dark on light pages and bright on dark ones.
LIGHT = ("#eef2ef", "#c3e5d6", "#74c6a7", "#1f8f6c", "#004f39")
DARK = ("#262d32", "#1e4a40", "#1f7a60", "#38b88e", "#a5f2d5")
INKS = ("#04100b", "#ffffff")
IN_SIGHT = 3  # maps; the others are folded away


@dataclass(frozen=True)
class HeatMap:
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


def heat_maps(scores: Table) -> list[HeatMap]:
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
            maps.append(HeatMap(scores, label, depths, columns, cells))
    return maps


def in_sight(maps: Sequence[HeatMap]) -> tuple[list[HeatMap], list[HeatMap]]:
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


def step(score: float) -> int:
    """The index of a score's colour, of STEPS + 1."""
    return round(STEPS * min(max(score, 0.0), 1.0))


def colours(index: int, anchors: Sequence[str] = LIGHT) -> tuple[str, str]:
    """Background and ink of a step: a mix of its neighbours in `anchors`, and the ink with more contrast to it."""
    place = index / STEPS * (len(anchors) - 1)
    by_channel = zip(*map(channels, anchors), strict=True)
    mixed = [np.interp(place, range(len(anchors)), values) for values in by_channel]
    background = "#" + "".join(f"{round(value):02x}" for value in mixed)
    return background, max(INKS, key=lambda ink: contrast(ink, background))


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2), 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio (WCAG 2), 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def palette_css() -> str:
    """Rules `.h0` to `.h20` for light and dark pages."""
    light, dark = (
        "".join(
            f".h{index}{{background:{background};color:{ink}}}"
            for index in range(STEPS + 1)
            for background, ink in [colours(index, anchors)]
        )
        for anchors in (LIGHT, DARK)
    )
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"


def depth_name(depth: Depth) -> str:
    """`40%`, or `40–50%` for a bin."""
    return f"{depth[0]:g}%" if depth[0] == depth[1] else f"{depth[0]:g}–{depth[1]:g}%"


def cell_text(score: float) -> str:
    """Per cent without the sign; 0 and 100 are none and all, nothing else."""
    value = 100 * min(max(score, 0.0), 1.0)
    if 0 < value < 1:
        return "<1"
    return f"{math.floor(value) if value > 99 else value:.0f}"


def _map_table(one: HeatMap) -> Markup:
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


def _map_cell(one: HeatMap, depth: Depth, column: Length) -> Markup:
    """One depth at one length: its score as a figure and as a colour, its counts on hover."""
    at = f"{column.title}, depth {depth_name(depth)}"
    trained = " trained" if column.factor == 1 else ""
    found = one.cells.get((depth, column.key))
    if found is None:
        return element("td", UNMEASURED, class_=f"none{trained}", title=f"{at}: not measured")
    score, count = found
    of = f" of {count:,.0f} needles" if count else ""
    look, title = f"h{step(score)}{trained}", f"{at}: {100 * score:.1f}%{of}"
    return element("td", cell_text(score), class_=look, title=title, data_csv=f"{score:.6g}")


def legend() -> Markup:
    """The colours from none to all, an empty cell, and the frame of the training length."""
    bar = [element("i", class_=f"h{index}") for index in range(0, STEPS + 1, 2)]
    return element(
        "p",
        element("span", "0% ", element("span", bar, class_="bar", aria_hidden="true"), " 100% found"),
        element("span", element("i", class_="box none", aria_hidden="true"), " not measured"),
        element("span", element("i", class_="box framed", aria_hidden="true"), " training length"),
        class_="scale",
    )


def heat_map_figures(tables: Sequence[Table], styles: Mapping[str, Style], level: int) -> list[Markup]:
    """The maps of a suite's tasks: the first task under a heading of `level`, the others folded; [] without depths."""
    figures = []
    for scores in tables:
        if maps := heat_maps(scores):
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


def _map_grid(maps: Sequence[HeatMap], styles: Mapping[str, Style]) -> Markup:
    """Maps in a grid that wraps; "" without maps."""
    figures = [
        element("figure", element("figcaption", label_markup(one.label, styles)), _map_table(one)) for one in maps
    ]
    return element("div", figures, class_="maps") if figures else Markup("")
