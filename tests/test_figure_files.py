"""The figures of analyses as files: the same bytes each time, legible labels, and the right colours."""

from __future__ import annotations

import base64
import io
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image, ImageFont

from pe_lab.page.figure_files import FONT, grid, render, svg
from pe_lab.page.plot import axis_number, colour_limits, every, powers_of_two, tick_names, tokens_text
from pe_lab.results.figures import Effect, Effects, HeatMaps, Line, LineCharts, layer_names

HOSTILE = '<b>$x_1$ & "y"'


def maps(shape=(2, 3, 4), scale="sequential", limits=None, rows=None, columns=None) -> HeatMaps:
    values = np.random.default_rng(0).normal(size=shape)
    values[0, 0, 0] = np.nan
    panels, rows, columns = (
        given or tuple(f"{word} {n}" for n in range(size))
        for given, word, size in zip((None, rows, columns), ("layer", "head", "pair"), shape, strict=True)
    )
    return HeatMaps(
        "m", HOSTILE, "C", values, panels, rows, columns, "layer", "head", "pair", "nats of $x$", scale, limits
    )


def lines(panels=3, marks=((8.0, HOSTILE),), **more) -> LineCharts:
    x = np.arange(7.0) if "x_names" in more else 2.0 ** np.arange(1, 8)
    y = np.array([3, 2, np.nan, 1, 2, 3, 4.0])
    drawn = tuple(Line(label, x, y + n, y + n - 0.1, y + n + 0.1) for n, label in enumerate(("a", "_b", HOSTILE)))
    named = tuple((name, drawn) for name in layer_names(range(panels)))
    return LineCharts(
        "l", "T", "C", named, "position, tokens", "loss", log_x="x_names" not in more, marks=marks, **more
    )


def test_files_are_the_same_each_time_hold_no_date_and_letters_stay_letters():
    figure = maps()
    files = {form: render(figure, form) for form in ("png", "pdf", "svg")}
    for form, content in files.items():
        assert render(figure, form) == content
        assert not re.search(rb"<dc:date>|tIME|D:20[1-9]", content)
    assert files["png"].startswith(b"\x89PNG") and files["pdf"].startswith(b"%PDF")
    svg = files["svg"].decode()
    assert ">layer 1<" in svg and "&lt;b&gt;$x_1$" in svg and "nats of $x$" in svg
    assert b"/FontFile2" in files["pdf"] and b"DejaVuSans" in files["pdf"]  # letters that can be searched and edited
    assert "var(" not in svg and "class=" not in svg


def texts_of(svg: str) -> list[tuple[str, tuple[float, float, float, float]]]:
    """The texts of a drawing, and their boxes as the font has them."""
    found = []

    def walk(node: ElementTree.Element, x: float, y: float, size: float) -> None:
        if moved := re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", node.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        size = float(node.get("font-size", size))
        if node.tag.endswith("text") and (node.text or "").strip():
            bold = "-Bold" if node.get("font-weight") else ""
            font = ImageFont.truetype(FONT[bold], 100)
            wide = font.getlength(node.text) * size / 100
            left = x + float(node.get("x")) - {"middle": wide / 2, "end": wide}.get(node.get("text-anchor"), 0)
            low = y + float(node.get("y"))
            found.append((node.text, (left, low - 0.73 * size, left + wide, low + 0.1 * size)))
        for child in node:
            walk(child, x, y, size)

    walk(ElementTree.fromstring(svg), 0.0, 0.0, 12.0)
    return found


def overlaps(svg: str) -> list[tuple[str, str]]:
    """Pairs of texts of a drawing that lie on each other, and texts that leave it."""
    x, y, width, height = map(float, re.search(r'viewBox="([^"]*)"', svg)[1].split())
    boxes = texts_of(svg)
    pairs = [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(boxes, 2)
        if one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
    ]
    for word, (left, top, right, low) in boxes:
        if left < x or top < y or right > x + width or low > y + height:
            pairs.append((word, ""))
    return pairs


LONG = tuple(f"{n} ({6.3 * 1.4**n:,.4g} tokens)" for n in range(32))


@pytest.mark.parametrize(
    "figure",
    [
        maps((30, 9, 32), columns=LONG),
        maps((1, 30, 9), columns=tuple(f"a long name, number {n}" for n in range(9))),
        maps((7, 64, 4), "diverging", (-0.1, 0.1)),
        lines(12),
        lines(1, x_names=tuple(f"band number {n}" for n in range(20))),
    ],
    ids=["30 layers", "long names", "many heads", "12 panels", "names"],
)
def test_no_label_lies_on_another_on_a_page_7_inches_wide(figure):
    drawn = svg([[figure]])
    width, height = (float(re.search(f' {side}="([^"]*)"', drawn)[1]) for side in ("width", "height"))
    assert width == 7 * 96 + 12 and height <= 10.3 * 96
    assert overlaps(drawn) == []


def test_cells_that_were_not_measured_are_hatched_and_shares_are_written():
    values = np.array([[[np.nan, 0.5], [1.0, 0.0]]])
    names = ("all",), ("a", "b"), ("c", "d")
    figure = HeatMaps("m", "T", "", values, *names, "", "", "", "found", "found", (0, 1), framed=1, texts=True)
    drawn = render(figure, "svg").decode()
    assert [word for word, _ in texts_of(drawn)][3:] == ["50", "100", "0", "a", "b", "c", "d"] + [
        word for word, _ in texts_of(drawn)
    ][10:]
    image = re.search(r'href="data:image/png;base64,([^"]*)"', drawn)[1]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB"))
    quarters = [pixels[:12, :12], pixels[:12, 12:], pixels[12:, :12], pixels[12:, 12:]]
    assert [len(np.unique(part.reshape(-1, 3), axis=0)) for part in quarters] == [2, 1, 1, 1]
    assert "framed: the training length" in drawn and "hatched: not measured" in drawn


@pytest.mark.parametrize(
    ("values", "scale", "limits", "expected"),
    [
        ([1.0, 3.0, np.nan], "sequential", None, (1, 3)),
        ([1.0, -3.0, 2.0], "diverging", None, (-3, 3)),
        ([1.0, 3.0, 2.0], "sequential", (0.0, 2.5), (0, 2.5)),
        ([1.0, 3.0, 2.0], "diverging", (-1.0, 2.0), (-2, 2)),
        ([np.nan] * 3, "sequential", None, (0, 1)),
        ([4.0] * 3, "sequential", None, (2, 6)),
        ([0.0] * 3, "diverging", None, (-0.5, 0.5)),
    ],
)
def test_the_ends_of_the_colours(values, scale, limits, expected):
    figure = HeatMaps("m", "", "", np.array(values)[None, None], ("",), ("",), ("a", "b", "c"), *"    ", scale, limits)
    assert colour_limits(figure) == expected


def test_lines_have_bands_that_break_where_nothing_was_measured_and_points_have_bars():
    drawn = svg([[lines(1)]])
    assert len(re.findall(r"<path [^>]*fill-opacity", drawn)) == 6 and HOSTILE in [word for word, _ in texts_of(drawn)]
    strokes = re.findall(r'<path d="[^"]*" stroke="(#\w+)" fill="none"[^>]*', drawn) or re.findall(
        r'<path (?=[^>]*fill="none")[^>]*stroke="(#\w+)"', drawn
    )
    assert len(set(strokes)) == 3 and drawn.count("stroke-dasharray") >= 3
    points = svg([[lines(1, points=True)]])
    assert "<path" not in points and points.count("<circle") == 3 * 6 + 3


def test_the_legend_names_each_label_and_mark_once_whatever_its_first_letter():
    words = [word for word, _ in texts_of(svg([[lines(6)]]))]
    assert [words.count(label) for label in ("a", "_b", HOSTILE)] == [1, 1, 1]
    assert f"The vertical line marks 8: {HOSTILE}." in words


def test_effects_have_their_numbers_their_margins_and_zero():
    rows = (
        Effect(
            "one sentence that is long enough for two lines of the figure", 0.5, 0.25, 0.75, (0.1,), "+0.5", "#123456"
        ),
    )
    drawn = svg([[Effects("u", "", rows, "nats")]], "refuted")
    words = [word for word, _ in texts_of(drawn)]
    assert {"refuted", "+0.5", "nats", "0"} <= set(words) and overlaps(drawn) == []
    assert drawn.count("#123456") == 2 and words[1:3] == [
        "one sentence that is long enough for two lines",
        "of the figure",
    ]


def test_grids_have_few_empty_places():
    shown = {count: grid(count) for count in (1, 3, 5, 6, 12, 24, 28, 30, 32, 40)}
    assert shown == {
        1: (1, 1), 3: (1, 3), 5: (1, 5), 6: (1, 6), 12: (2, 6), 24: (4, 6), 28: (7, 4), 30: (6, 5), 32: (8, 4),
        40: (8, 5),
    }  # fmt: skip
    assert grid(30, wide=True) == (10, 3) and grid(4, wide=True) == (2, 2)


def test_ticks():
    assert [tokens_text(n) for n in (1, 512, 1024, 4096, 2**20, 10_000_000)] == ["1", "512", "1k", "4k", "1M", "10M"]
    assert powers_of_two(3, 100, 9) == [4, 8, 16, 32, 64] and powers_of_two(1, 2048, 4) == [1, 8, 64, 512]
    assert [every(32, wanted) for wanted in (40, 20, 8, 4.2, 0)] == [1, 2, 4, 8, 32]
    assert [every(50, wanted) for wanted in (40, 20, 8, 4.2, 0)] == [2, 4, 8, 20, 50]
    shown = [axis_number(x) for x in (0, 0.00123, -1.5, 4096, 0.30000000000000004, 1.2345e-5, -2.5e7, float("nan"))]
    assert shown == ["0", "0.00123", "−1.5", "4,096", "0.3", "1.23·10⁻⁵", "−2.5·10⁷", "n/a"]
    assert tick_names(("head 0", "head 1"), "query head") == ["0", "1"]
    assert tick_names(("key head 0", "key head 1"), "head") == ["key head 0", "key head 1"]
    assert tick_names(("7 (64 tokens)", "8 (90 tokens)"), "pair") == ["7", "8"]
    assert tick_names(("a (1)", "a (2)"), "pair") == ["a (1)", "a (2)"]
