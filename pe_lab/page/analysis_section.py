"""The analyses of a run on the page: what each found, its tables and figures, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.page.figure_axes import axis_number
from pe_lab.page.figure_lines import line_charts
from pe_lab.page.figure_maps import heat_maps
from pe_lab.page.markup import Markup, element, folded, note, text
from pe_lab.page.provenance import pairs
from pe_lab.page.tables import plain_table
from pe_lab.results.figures import HeatMaps
from pe_lab.results.formatting import duration
from pe_lab.results.runs import RunFiles
from pe_lab.results.standing import former_models


def analysis_title(directory: str, name: str) -> str:
    """The title of an analysis: its name in words, and that of its directory if it has another."""
    words = name.replace("_", " ").strip().capitalize() or "Analysis"
    return words if directory == name else f"{words} ({directory})"


def analysis_parts(run: RunFiles) -> list[tuple[str, list[object]]]:
    """(title, parts of the section) of each analysis of a run."""
    return [
        (analysis_title(directory, analysis.name), _parts(run, analysis))
        for directory, analysis in run.analyses.items()
    ]


def _parts(run: RunFiles, analysis: Any) -> list[object]:
    """Sentences, tables and figures, and folded how they were made. `analysis` is an `analysis.analysis.Written`."""
    found, former = analysis.findings, former_models(run, analysis.about)
    sentences = [element("li", sentence) for sentence in found.sentences]
    figures = [heat_maps(one) if isinstance(one, HeatMaps) else line_charts(one) for one in found.figures]
    return [
        note(former) if former else None,
        element("ul", sentences, class_="points") if sentences else None,
        [_table(table) for table in found.tables],
        figures,
        folded("How this was made", _about(analysis.about), _arrays(found.shapes)),
    ]


def _table(table: Any) -> Markup:
    """A `TextTable` below its title."""
    inner = plain_table(table.title, table.header, table.rows, words=table.header[: table.words])
    return element("div", element("p", table.title, class_="title"), inner, class_="below")


def _about(about: object) -> Markup:
    """Every key of an analysis's record of how it was made; commands and nested values in lines of their own."""
    known = {str(key): _shown(key, value) for key, value in about.items()} if isinstance(about, Mapping) else {}
    parts: list[object] = []
    if command := known.pop("command", None):
        parts = [element("p", "To make it again:", class_="title"), element("pre", command, class_="command")]
    items = [(key.replace("_", " ").capitalize(), value) for key, value in known.items() if value]
    return text([*parts, pairs(items) if items else None])


def _shown(key: object, value: object) -> object:
    """A value of `about` for people: numbers with units where the key has one, short mappings in a line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return duration(value) if key == "seconds" and value >= 1 else axis_number(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Mapping) and not any(isinstance(item, Mapping | Sequence) and not isinstance(item, str)
                                              for item in value.values()):  # fmt: skip
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    return folded("Show", element("pre", json.dumps(value, indent=1, ensure_ascii=False, default=str)))


def _arrays(shapes: object) -> Markup:
    """The arrays of `analysis.npz` and what their axes are."""
    if not isinstance(shapes, Mapping) or not shapes:
        return Markup("")
    rows = [[element("code", f"numbers/{name}"), shape] for name, shape in shapes.items()]
    title = element("p", "The arrays in analysis.npz", class_="title below")
    return text([title, plain_table("Arrays in analysis.npz", ("Array", "Axes"), rows)])
