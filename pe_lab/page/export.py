"""Every figure and table of a report as files with stable names, and an index of them."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence

import numpy as np

from pe_lab.page import figure_files
from pe_lab.page.files import csv_bytes, png, shown, slug
from pe_lab.page.heat_maps import heat_maps, map_name
from pe_lab.page.heat_picture import draw_heat_maps
from pe_lab.page.suites import SCORED, task_suites
from pe_lab.results.figures import Figure, HeatMaps
from pe_lab.results.groups import pooled
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables

INDEX = "index.csv"


def export_files(runs: Sequence[RunFiles], page: str, formats: Sequence[str]) -> dict[str, bytes]:
    """The files by their names: what `page` shows of `runs`, its heat maps and analyses as pictures, and `INDEX`.

    A name begins with the name of the run or group, or `comparison`, and goes on with the title on the page.

    Args:
      formats: of png, svg and csv.

    Raises:
      ConfigError: png was asked for, and resvg_py is not installed.
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
            add(one.name, "csv", one.title, csv_bytes(one.rows))
        if one.svg and "svg" in formats:
            add(one.name, "svg", one.title, one.svg.encode())
        if one.svg and "png" in formats:
            add(one.name, "png", one.title, png(one.svg))
    pictures = [form for form in formats if form != "csv"]
    for run in [single for group in pooled(runs) for single in (group, *group.members)]:
        for suite in task_suites({*run.evaluation} & {*SCORED} | {*run.evaluation} - {"beta"}):
            for table in build_tables(suite, [run]):
                if heat_maps(table):
                    title = map_name(table)
                    for form in pictures:
                        add(f"{slug(run.name)}-heat-maps-{slug(title)}", form, title, draw_heat_maps(table, form))
        for directory, analysis in run.analyses.items():
            for figure in analysis.findings.figures:
                name = f"{slug(run.name)}-{slug(directory)}-{slug(figure.name)}"
                for form in pictures:
                    add(name, form, figure.title, figure_files.render(figure, form))
                add(name, "csv", figure.title, csv_bytes(figure_rows(figure)))
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(index)
    files[INDEX] = file.getvalue().encode()
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
