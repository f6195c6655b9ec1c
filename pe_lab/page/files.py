"""The figures and tables of a page as files: SVG and PNG pictures, and CSV tables, for `pe_lab.report --export`.

They are read from the page itself, so that a file has what the page shows. The page's own script (`file_script`) makes
the same files from the same elements.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import NamedTuple

from pe_lab.errors import ConfigError
from pe_lab.page.file_script import ATTRIBUTES, FONTS, PALETTE
from pe_lab.page.markup import element
from pe_lab.results.formatting import listing

FORMATS = ("png", "svg", "csv")
SCALE = 2  # pixels of a PNG for each of its SVG
# A run's name, a table in its box, or a figure with a chart; the page does not nest them.
PARTS = re.compile(
    r'data-run="(?P<run>[^"]*)"'
    r'|role="region" aria-label="(?P<name>[^"]*), table"><table(?P<table>.*?)</table>'
    r'|<figure class="chart(?P<look>[^"]*)" data-(?P<kind>chart|table)="(?P<data>[^"]*)">(?P<figure>.*?)</figure>',
    re.S,
)


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


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


class _Cells(HTMLParser):
    """The cells of a table: the texts of each, or the values of its `data-csv`, by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, list[str] | None]]] = []
        self._words: list[str] | None = None
        self._values: list[str] | None = None
        self._drawn = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            given = dict(attrs).get("data-csv")
            self._words, self._values = [], None if given is None else given.split("|")
        elif tag == "svg":
            self._drawn += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg":
            self._drawn -= 1
        elif tag in ("td", "th") and self._words is not None:
            self.rows[-1].append((" ".join(" ".join(self._words).split()), self._values))
            self._words = None

    def handle_data(self, data: str) -> None:
        if self._words is not None and not self._drawn:
            self._words.append(data)


def table_rows(markup: str) -> list[list[str]]:
    """The rows of a table, its head first. A column of values with intervals becomes three."""
    parser = _Cells()
    parser.feed(markup)
    head, *body = parser.rows
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


def csv_bytes(rows: Sequence[Sequence[str]]) -> bytes:
    """Rows as a CSV file in UTF-8."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def standalone(svg: str, every: bool = False) -> str:
    """A chart's SVG as a file: with its title and legend, on white, with its styles as attributes.

    With `every`, lines that the page hides at first are shown.
    """
    opening = re.match(r"<svg[^>]*>", svg)
    file = re.search(r'data-file="([^"]*)"', opening.group() if opening else "")
    if not opening or not file:
        raise ValueError("this is no SVG with data-file")
    box, parts = json.loads(html.unescape(file.group(1)))
    *_, width, height = box.split()
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "width": width, "height": height}
    root = str(element("svg", "", **attributes, font_family=FONTS, font_size=12, fill=PALETTE["soft"]))
    body = parts + svg[opening.end() :]
    if every:
        body = body.replace('class="more" display="none"', "").replace('class="few"', 'display="none"')
    body = re.sub(r' class="([\w-]+)"', lambda m: ATTRIBUTES.get(m[1], ""), body)
    body = re.sub(r"var\(--(?:c-)?([\w-]+)\)", lambda m: PALETTE.get(m[1], "#000"), body)
    return root.removesuffix("</svg>") + body


def png(svg: str) -> bytes:
    """A standalone SVG as a PNG of twice its size, with the DejaVu fonts that matplotlib brings along.

    Raises:
      ConfigError: resvg_py is not installed.
    """
    from matplotlib import get_data_path

    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "--formats: png needs a package that draws SVG. Install it: pip install 'pe-lab[report]', or choose "
            "--formats=svg,csv."
        ) from None
    fonts = [f"{get_data_path()}/fonts/ttf/DejaVuSans{weight}.ttf" for weight in ("", "-Bold")]
    family = {"font_files": fonts, "skip_system_fonts": True, "sans_serif_family": "DejaVu Sans"}
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=float(SCALE), font_family="DejaVu Sans", **family))


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
