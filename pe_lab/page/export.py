"""The figures and tables of a report as files with stable names, and an index of them: `pe_lab.report --export`.

What the page shows is read from the page itself, so that a file has what the page shows; the page's own script makes
the same files from the same elements. Heat maps and figures of analyses are drawn for paper (`figure_files`).
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.page.figure_files import page_of, png, render
from pe_lab.page.maps import map_name, needle_maps, needle_picture
from pe_lab.page.markup import Markup
from pe_lab.page.variants import SCORED, task_suites
from pe_lab.results.figures import Figure, HeatMaps
from pe_lab.results.formatting import listing
from pe_lab.results.groups import pooled
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.table import csv_text

INDEX = "index.csv"
FORMATS = ("png", "svg", "csv")
# A run's name, a table in its box, or a figure with a chart; the page does not nest them.
PARTS = re.compile(
    r'data-run="(?P<run>[^"]*)"'
    r'|role="region" aria-label="(?P<name>[^"]*), table"><table(?P<table>.*?)</table>'
    r'|<figure class="chart(?P<look>[^"]*)" data-(?P<kind>chart|table)="(?P<data>[^"]*)">(?P<figure>.*?)</figure>',
    re.S,
)


def export_files(runs: Sequence[RunFiles], page: str, formats: Sequence[str]) -> dict[str, bytes]:
    """The files by their names: what `page` shows of `runs`, its heat maps and analyses as pictures, and `INDEX`.

    A name begins with the name of the run or group, or `comparison`, and goes on with the title on the page.

    Args:
      formats: of png, svg and csv.
    """
    files = {INDEX: b""}
    index = [["file", "title"]]

    def add(name: str, form: str, title: str, content: bytes) -> None:
        """A name that another figure has is numbered."""
        if form in formats:
            numbered = (f"{name}{f'-{n}' if n > 1 else ''}.{form}" for n in itertools.count(1))
            file = next(one for one in numbered if one not in files)
            files[file] = content
            index.append([file, title])

    for one in shown(page):
        if one.rows:
            add(one.name, "csv", one.title, csv_text(one.rows).encode())
        if one.svg and "svg" in formats:
            add(one.name, "svg", one.title, one.svg.encode())
        if one.svg and "png" in formats:
            add(one.name, "png", one.title, png(one.svg))
    pictures = [form for form in formats if form != "csv"]
    for run in [single for group in pooled(runs) for single in (group, *group.members)]:
        for suite in task_suites({*run.evaluation} & {*SCORED} | {*run.evaluation} - {"beta"}):
            for table in build_tables(suite, [run]):
                if needle_maps(table):
                    title = map_name(table)
                    for form in pictures:
                        content = render(needle_picture(table), form)
                        add(f"{slug(run.name)}-heat-maps-{slug(title)}", form, title, content)
        for directory, analysis in run.analyses.items():
            for figure in analysis.findings.figures:
                name = f"{slug(run.name)}-{slug(directory)}-{slug(figure.name)}"
                for form in pictures:
                    add(name, form, figure.title, render(figure, form))
                add(name, "csv", figure.title, csv_text(figure_rows(figure)).encode())
    files[INDEX] = csv_text(index).encode()
    return files


def figure_rows(figure: Figure) -> list[list[str]]:
    """The numbers of an analysis's figure, one a row."""
    if isinstance(figure, HeatMaps):
        rows = [["panel", "row", "column", "value"]]
        for p, panel in enumerate(figure.panels):
            for r, row in enumerate(figure.rows):
                values = map(_number, figure.values[p, r])
                rows += [[panel, row, column, value] for column, value in zip(figure.columns, values, strict=True)]
        return rows
    rows = [["panel", "series", figure.x_label, figure.y_label, "low", "high"]]
    for panel, lines in figure.panels:
        for line in lines:
            low, high = (np.full(len(line.x), np.nan) if end is None else end for end in (line.low, line.high))
            for numbers in zip(line.x, line.y, low, high, strict=True):
                rows.append([panel, line.label, *map(_number, numbers)])
    return rows


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.7g}"


def read_formats(text: str) -> tuple[str, ...]:
    """The formats of `--formats=png,svg`.

    Raises:
      ConfigError: one of them is unknown.
    """
    formats = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"--formats={text}: '{unknown[0]}' is no format of figures. Choose of {listing([*FORMATS])}.")
    if not formats:
        raise ConfigError(f"--formats is empty. Choose of {listing([*FORMATS])}.")
    return formats


# ---------------------------------------------------------------------------------------------------------------------
# What the page shows


class Shown(NamedTuple):
    """A figure or a table of a page: `svg` is empty for a table, `rows` has its numbers, if none, another has."""

    name: str
    title: str
    svg: str
    rows: list[list[str]]


def shown(page: str) -> Iterator[Shown]:
    """Every table and every chart of a page, in order, with the names of their files."""
    run, seen = "", dict[str, int]()
    for found in PARTS.finditer(page):
        if found["run"] is not None:
            run = html.unescape(found["run"])
            continue
        if found["table"] is not None:
            title, svg = html.unescape(found["name"]), ""
            rows = table_rows(f"<table{found['table']}</table>")
        else:
            if " small" in found["look"]:  # one panel of an analysis, whose figure is a file of its own
                continue
            title = html.unescape(re.sub("<[^>]+>", "", found["figure"].partition("</div>")[0]))
            data = json.loads(html.unescape(found["data"]))
            rows = chart_rows(data) if found["kind"] == "chart" else [list(map(str, row)) for row in data]
            drawn = re.search(r"<svg(?=[^>]*data-file=).*?</svg>", found["figure"], re.S)
            svg = standalone(drawn.group()) if drawn else ""
        name = "-".join(filter(None, map(slug, (run, title)))) or "table"
        seen[name] = seen.get(name, 0) + 1
        name = name if seen[name] == 1 else f"{name}-{seen[name]}"
        yield Shown(name, title, svg, rows)
        if svg and drawn and ' class="more"' in drawn.group():
            yield Shown(f"{name}-all-lines", f"{title}, all lines", standalone(drawn.group(), every=True), [])


def slug(words: str) -> str:
    """Words as part of a file's name: lower case, of letters, digits and hyphens, at most 60."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace("×", "x").replace("β", "beta")).strip("-")[:60].rstrip("-")


def standalone(svg: str, every: bool = False) -> str:
    """A chart's SVG as a file: with its title and legend, on white, with its styles as attributes.

    With `every`, lines that the page hides at first are shown.
    """
    opening = re.match(r"<svg[^>]*>", svg)
    file = re.search(r'data-file="([^"]*)"', opening.group() if opening else "")
    if not opening or not file:
        raise ValueError("this is no SVG with data-file")
    box, parts = json.loads(html.unescape(file.group(1)))
    body = svg[opening.end() :].removesuffix("</svg>")
    if every:
        parts, body = (one.replace('class="more" display="none"', "") for one in (parts, body))
        body = body.replace('class="few"', 'display="none"')
    return page_of(box, parts, Markup(body))


def table_rows(markup: str) -> list[list[str]]:
    """The rows of a table, its head first. A column of values with intervals, of `data-csv`, becomes three."""
    found = []
    for row in re.findall(r"<tr\b.*?</tr>", markup, re.S):
        cells = re.findall(r"<(?:td|th)\b([^>]*)>(.*?)</(?:td|th)>", row, re.S)
        values = (re.search(r'data-csv="([^"]*)"', attributes) for attributes, _ in cells)
        numbers = [known and html.unescape(known[1]).split("|") for known in values]
        words = [" ".join(html.unescape(re.sub("<svg.*?</svg>|<[^>]*>", " ", inner)).split()) for _, inner in cells]
        found.append(list(zip(words, numbers, strict=True)))
    head, *body = found
    sizes = [max([1, *(len(row[n][1] or ()) for row in body if n < len(row))]) for n in range(len(head))]
    parts = ("", " low", " high")
    rows = [[f"{words}{part}" for (words, _), size in zip(head, sizes, strict=True) for part in parts[:size]]]
    for row in body:
        cells = [(values or [words], size) for (words, values), size in zip(row, sizes, strict=False)]
        rows.append([value for values, size in cells for value in [*values, *[""] * (size - len(values))]])
    return rows


def chart_rows(data: dict) -> list[list[str]]:
    """The points of a chart, as they are drawn: series, x, y, and the ends of the interval where there is one."""
    rows = [["series", data["x"], data["y"], "low", "high"]]
    for series in data["series"]:
        for x, y, _, _, *ends in series["p"]:
            numbers = [f"{value:.12g}" for value in (x, y, *ends)]
            rows.append([series["n"], *numbers, *[""] * (4 - len(numbers))])
    return rows
