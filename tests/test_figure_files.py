"""The figures of analyses as files: the same bytes each time, legible labels, and the right colours."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from pe_lab.page.axes import axis_number, colour_limits, every, powers_of_two, tick_names, tokens_text
from pe_lab.page.figure_files import grid, render
from pe_lab.page.plot import draw
from pe_lab.results.figures import HeatMaps, Line, LineCharts, layer_names

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
    import matplotlib

    figure, files = maps(), {}
    for form in ("png", "pdf", "svg"):
        files[form] = render(figure, form)
        with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 20, "pdf.fonttype": 3}):
            assert render(figure, form) == files[form]
        assert not re.search(rb"CreationDate|<dc:date>|tIME", files[form])
    assert files["png"].startswith(b"\x89PNG") and files["pdf"].startswith(b"%PDF")
    svg = files["svg"].decode()
    assert ">layer 1<" in svg and "&lt;b&gt;$x_1$" in svg and "nats of $x$" in svg
    assert b"/Type0" in files["pdf"] and b"/Type3" not in files["pdf"]  # whole fonts, which can be searched and edited


def overlaps(figure) -> list[tuple[str, str]]:
    """Pairs of texts of a drawn figure that lie on each other, and texts that leave it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()

    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    # Tick labels outside the ends of an axis exist, but are not drawn.
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = {id(t) for tick in axis._update_ticks() for t in (tick.label1, tick.label2) if t.get_visible()}
            hidden |= {id(t) for t in axis.get_ticklabels(which="both") if id(t) not in drawn}
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if id(t) not in hidden]
    width, height = canvas.get_width_height()
    found = [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    return found + [
        (a, "") for a, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]


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
    drawn = draw(figure)
    assert drawn.get_size_inches()[0] == 7 and drawn.get_size_inches()[1] <= 10
    assert overlaps(drawn) == []


def test_all_panels_have_one_scale_of_colours_and_one_bar():
    figure = maps((5, 2, 3), "diverging")
    drawn = draw(figure)
    images = [axes.images[0] for axes in drawn.axes if axes.images]
    largest = np.nanmax(np.abs(figure.values))
    assert len(images) == 5 and len(drawn.axes) == 6  # the last one is the bar's
    assert {image.get_clim() for image in images} == {(-largest, largest)}
    for image, values in zip(images, figure.values, strict=True):
        np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), values)
    assert drawn.axes[0].patch.get_hatch()  # where nothing was measured
    assert drawn.axes[-1].get_ylabel() == "nats of $x$" or drawn.axes[-1].get_xlabel() == "nats of $x$"


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
    (panel,) = draw(lines(1)).axes
    assert len(panel.collections) == 3 and all(len(band.get_paths()) == 2 for band in panel.collections)
    assert panel.get_xscale() == "log" and [t.get_text() for t in panel.texts] == [HOSTILE]
    colours = [line.get_color() for line in panel.lines[:3]]
    dashes = [line.get_linestyle() for line in panel.lines[:3]]
    assert len(set(colours)) == 3 and dashes[0] == "-" and "--" in dashes
    (panel,) = draw(lines(1, points=True)).axes
    assert all(line.get_linestyle() == "None" for line in panel.lines[:3])
    assert len({line.get_marker() for line in panel.lines[:3]}) == 3


def test_the_legend_names_each_label_and_mark_once_whatever_its_first_letter():
    (legend,) = [one for part in draw(lines(6)).subfigs for one in part.legends]
    assert [t.get_text() for t in legend.get_texts()] == ["a", "_b", HOSTILE, HOSTILE]
    assert not any(t.get_parse_math() for t in legend.get_texts())


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
