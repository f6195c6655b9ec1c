"""Heat maps of needles: what share is found, by the needle's depth (rows) and the text's length (columns), one small
map a method, as tables that need neither script nor pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pe_lab.analysis.run_files import Row, as_dict, as_list, number
from pe_lab.analysis.scores import Cell, Column, Table
from pe_lab.analysis.variants import Style, kind
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.result_tables import scroll, suite_title, swatch

Depth = tuple[float, float]  # per cent of the text before the needle, from and to; the same twice is one depth
STEPS = 20  # of colour between none found and all found
# One hue, so that whoever sees no hues reads it too; found is dark on light pages and bright on dark ones.
LIGHT = ("#eef2ef", "#c3e5d6", "#74c6a7", "#1f8f6c", "#004f39")
DARK = ("#262d32", "#1e4a40", "#1f7a60", "#38b88e", "#a5f2d5")
INKS = ("#04100b", "#ffffff")
IN_SIGHT = 3  # maps; the others are folded away
NAMES = ("", "RoPE", "YaRN", "DroPE paper beta", "DroPE beta", "DroPE")


@dataclass(frozen=True)
class HeatMap:
    """One method: `cells` are (score in 0..1, needles or None) by (depth, column key); `overall` by column key."""

    label: str
    row: Row
    depths: tuple[Depth, ...]
    columns: tuple[Column, ...]
    cells: Mapping[tuple[Depth, float], tuple[float, float | None]]
    overall: Mapping[float, Cell]


def by_depth(row: Row) -> dict[Depth, tuple[float, float | None]]:
    """The depths of a row that were measured, with score and count. `depth` holds a depth a score, or the borders of
    bins; {} where it is neither."""
    found = as_dict(row.get("by_depth"))
    depths, scores, counts = (as_list(found.get(key)) for key in ("depth", "score", "count"))
    if any(number({"depth": depth}, "depth") is None for depth in depths):
        return {}
    if len(depths) == len(scores):
        places = [(float(depth), float(depth)) for depth in depths]
    elif len(depths) == len(scores) + 1:
        places = [(float(a), float(b)) for a, b in zip(depths, depths[1:], strict=False)]
    else:
        return {}
    measured = {}
    for index, place in enumerate(places):
        score = number({"score": scores[index]}, "score")
        count = number({"count": counts[index]}, "count") if len(counts) == len(scores) else None
        if score is not None and count != 0:
            measured[place] = (score, count)
    return measured


def heat_maps(table: Table) -> list[HeatMap]:
    """The maps of a table's methods, all with the same depths and lengths; none if no row knows depths."""
    found = {key: by_depth(cell.row) for key, cell in table.cells.items()}
    depths = tuple(sorted({depth for places in found.values() for depth in places}))
    columns = tuple(c for c in table.columns if any(found.get((label, c.key)) for label in table.rows))
    maps = []
    for label, row in table.rows.items():
        cells = {
            (depth, column.key): value
            for column in columns
            for depth, value in found.get((label, column.key), {}).items()
        }
        overall = {column.key: cell for column in columns if (cell := table.cell(label, column))}
        if cells:
            maps.append(HeatMap(label, row, depths, columns, cells, overall))
    return maps


def in_sight(maps: Sequence[HeatMap]) -> tuple[list[HeatMap], list[HeatMap]]:
    """The maps to show first, and the others: RoPE as trained, RoPE + YaRN, the dropped model as the verdict reads it,
    then whatever else there is, in the order of tables."""
    of_kind = {name: [one for one in maps if kind(one.row) == name] for name in NAMES}
    dropped = next((of_kind[name] for name in NAMES[3:] if of_kind[name]), [])
    first = [*of_kind["RoPE"][:1], *of_kind["YaRN"][:1], *dropped[:1]]
    rest = [one for one in maps if not any(one is other for other in first)]
    missing = IN_SIGHT - len(first)
    return first + rest[:missing], rest[missing:]


def step(score: float) -> int:
    """Which of the STEPS + 1 colours a score has."""
    return round(STEPS * min(max(score, 0.0), 1.0))


def colours(index: int, anchors: Sequence[str] = LIGHT) -> tuple[str, str]:
    """Background and ink of a step: between its neighbours in `anchors`, and whichever ink is easier to read there."""
    place = index / STEPS * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    mixed = [
        a + (b - a) * (place - low) for a, b in zip(channels(anchors[low]), channels(anchors[low + 1]), strict=True)
    ]
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
    """Rules `.h0` to `.h20` for both kinds of page."""
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
    """Per cent without the sign, and 0 and 100 for none and all alone."""
    value = 100 * min(max(score, 0.0), 1.0)
    if 0 < value < 1:
        return "<1"
    return f"{math.floor(value) if value > 99 else value:.0f}"


def map_table(one: HeatMap, name: str) -> Markup:
    """One map as a table."""
    head = [element("th", "depth", scope="col")]
    for column in one.columns:
        small = element("small", column.small) if column.small else None
        trained = "trained" if column.factor == 1 else None
        head.append(element("th", column.title.removesuffix(" tokens"), small, scope="col", class_=trained))
    body = []
    for depth in one.depths:
        cells = [map_cell(one, depth, column) for column in one.columns]
        body.append(element("tr", element("th", depth_name(depth), scope="row"), cells))
    overall = []
    for column in one.columns:
        cell = one.overall.get(column.key)
        title = f"95% interval {cell.interval}" if cell and cell.interval else None
        trained = "trained" if column.factor == 1 else None
        overall.append(element("td", cell.shown.removesuffix("%") if cell else "–", class_=trained, title=title))
    foot = element("tr", element("th", "all", scope="row"), overall)
    return element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        element("tfoot", foot),
        class_="heat dense" if len(one.columns) > 9 else "heat",
        aria_label=f"{name}, {one.label}: per cent found, by depth of the needle and length of the text",
    )


def map_cell(one: HeatMap, depth: Depth, column: Column) -> Markup:
    """One depth at one length: its score as figure and as colour, its counts on hover."""
    at = f"{column.title}, depth {depth_name(depth)}"
    trained = " trained" if column.factor == 1 else ""
    found = one.cells.get((depth, column.key))
    if found is None:
        blank = element("span", "–", aria_label="not measured")
        return element("td", blank, class_=f"none{trained}", title=f"{at}: not measured")
    score, count = found
    of = f" of {count:,.0f} needles" if count else ""
    return element("td", cell_text(score), class_=f"h{step(score)}{trained}", title=f"{at}: {100 * score:.1f}%{of}")


def legend() -> Markup:
    """The colours from none to all, and what an empty cell and a frame mean."""
    bar = [element("i", class_=f"h{index}") for index in range(0, STEPS + 1, 2)]
    return element(
        "p",
        element("span", "0% ", element("span", bar, class_="bar", aria_hidden="true"), " 100% found"),
        element("span", element("i", class_="box none", aria_hidden="true"), " not measured"),
        element("span", element("i", class_="box framed", aria_hidden="true"), " training length"),
        class_="scale",
    )


def heat_map_figures(tables: Sequence[Table], styles: Mapping[str, Style], level: int) -> list[Markup]:
    """The maps of a suite's tasks: those of the first task under a heading of `level`, the other tasks folded. Nothing
    if no row knows depths."""
    drawn = [(map_name(table), maps) for table in tables if (maps := heat_maps(table))]
    figures = []
    for name, maps in drawn:
        shown, others = (map_grid(some, styles, name) for some in in_sight(maps))
        more = element("details", element("summary", "The other ways of reading"), others) if others else None
        figures.append((name, text([shown, more])))
    if not figures:
        return []
    (name, first), *rest = figures
    folded = [element("div", element("p", name, class_="title"), figure, class_="below") for name, figure in rest]
    summary = element("summary", f"{suite_title(tables[0].suite)}: {len(rest)} more")
    return [element(f"h{level}", name), first, *([element("details", summary, folded)] if rest else [])]


def map_name(table: Table) -> str:
    """What a table's maps are of: `Needle in a haystack: multi query`."""
    synthetic = table.suite == "needles"
    return "Needles in filler" if synthetic else f"{suite_title(table.suite)}: {table.source.replace('_', ' ')}"


def map_grid(maps: Sequence[HeatMap], styles: Mapping[str, Style], name: str) -> Markup:
    """Maps in a grid that wraps."""
    figures = []
    for one in maps:
        title = element("figcaption", swatch(styles.get(one.label)), one.label)
        figures.append(element("figure", title, scroll(map_table(one, name), f"{name}, {one.label}", "sideways")))
    return element("div", figures, class_="maps") if figures else Markup("")
