"""Line charts of the report: where their parts lie, by hand from the frame and the data, and what is left out.

The wide frame is 960 x 360 and its plot spans x 56..784 and y 28..314; the narrow one is 358 x 280, its plot 44..344
and 28..236.
"""

import html
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from pe_lab.page.charts import line_chart
from pe_lab.page.colours import Style
from pe_lab.page.export import shown
from pe_lab.page.plot import PlotAxis, Series, decimate, linear_ticks, log_ticks, smooth
from pe_lab.page.variants import assign_styles

PLAIN = Style("rope")
PLOTS = {"wide": (56, 784, 28, 314, 960, 360), "narrow": (44, 344, 28, 236, 358, 280)}
# With 4% of their height below and 6% above, the y axis is from 96 to 206: 2.6 pixels a unit in the wide frame.
POINTS = [(10.0, 100.0), (15.0, 200.0), (20.0, 150.0)]


def figure_of(*series: Series, x: PlotAxis | None = None, y: PlotAxis | None = None, **more) -> ElementTree.Element:
    chart = line_chart("Scores", series, x or PlotAxis("steps"), y or PlotAxis("points"), **more)
    return ElementTree.fromstring(str(chart))


def drawing(figure: ElementTree.Element, size: str = "wide") -> ElementTree.Element:
    return figure.find(f"svg[@class='{size}']")


def at(shape: ElementTree.Element, *names: str) -> list[float]:
    return [float(shape.get(name)) for name in names or ("x1", "x2", "y1", "y2")]


def corners(path: ElementTree.Element) -> list[list[float]]:
    """The points of `M1 2L3 4`."""
    return [[float(number) for number in point.split()] for point in path.get("d").removeprefix("M").split("L")]


def words_below(svg: ElementTree.Element) -> dict[str, float]:
    """Labels of the x axis, and their middles."""
    return {text.text: at(text, "x")[0] for text in svg.findall("text[@text-anchor='middle']") if not text.get("class")}


@pytest.mark.parametrize(("size", "steps"), [("wide", (10, 12, 14, 16, 18, 20)), ("narrow", (10, 15, 20))])
def test_axes_ticks_and_names_lie_where_the_data_puts_them(size, steps):
    svg = drawing(figure_of(Series("a", POINTS, PLAIN)), size)
    left, right, top, bottom, width, height = PLOTS[size]
    assert svg.get("viewBox") == f"0 0 {width} {height}"
    assert json.loads(svg.get("data-plot")) == [left, right, top, bottom, 10, 20, 0, 96, 206, 0]
    heights = {value: bottom - (value - 96) * (bottom - top) / 110 for value in (100, 120, 140, 160, 180, 200)}
    grid = svg.findall("line[@class='grid']")
    assert [at(line) for line in grid] == [[left, right, *[pytest.approx(y, abs=0.01)] * 2] for y in heights.values()]
    labels = [text for text in svg.findall("text[@text-anchor='end']") if not text.get("class")]
    assert [text.text for text in labels] == [str(value) for value in heights]
    for text, y in zip(labels, heights.values(), strict=True):  # beside their lines
        assert left - 15 < at(text, "x")[0] < left and y < at(text, "y")[0] < y + 8
    places = {str(step): left + (right - left) * (step - 10) / 10 for step in steps}
    assert words_below(svg) == {word: pytest.approx(place, abs=0.01) for word, place in places.items()}
    *ticks, axis = svg.findall("line[@class='axis']")
    assert at(axis) == [left, right, bottom, bottom]
    assert [at(tick)[:3] for tick in ticks] == [[*[pytest.approx(x, abs=0.01)] * 2, bottom] for x in places.values()]
    assert all(bottom < at(tick, "y2")[0] < bottom + 8 for tick in ticks)
    below, above = svg.findall("text[@class='name']")
    assert (below.text, at(below, "x")[0], below.get("text-anchor")) == ("steps", (left + right) / 2, "middle")
    (row,) = {at(text, "y")[0] for text in svg.findall("text[@text-anchor='middle']") if text is not below}
    assert bottom + 12 < row and row + 12 < at(below, "y")[0] < height - 4  # below the ticks' labels and inside
    assert (above.text, above.get("text-anchor")) == ("points", None)
    assert 0 <= at(above, "x")[0] < left and 10 < at(above, "y")[0] < top
    line = svg.find("g/path")
    expected = [(left, heights[100]), ((left + right) / 2, heights[200]), (right, bottom - 54 * (bottom - top) / 110)]
    assert corners(line) == [pytest.approx(point, abs=0.06) for point in expected]


def test_logarithmic_axes_have_equal_ratios_at_equal_distances():
    """y from 10 to 1000 with a twentieth of its two decades on both sides: 286 pixels for 2.2, 130 each.

    x from 2 to 32: four doublings of 182 pixels.
    """
    points = [(2.0, 10.0), (8.0, 1000.0), (32.0, 100.0)]
    figure = figure_of(Series("a", points, PLAIN), x=PlotAxis("x", log=True), y=PlotAxis("y", log=True))
    svg = drawing(figure)
    assert corners(svg.find("g/path")) == [[56, 301], [420, 41], [784, 171]]
    assert [at(line, "y1")[0] for line in svg.findall("line[@class='grid']")] == [
        pytest.approx(y, abs=0.01) for y in (301, 238.97, 171, 108.97, 41)  # 10, 30 (log10 3 = 0.4771), 100, ...
    ]  # fmt: skip
    # 2, 5 (1.3219 doublings), 10 and 20.
    assert words_below(svg) == {
        word: pytest.approx(place, abs=0.02)
        for word, place in {"2": 56, "5": 296.59, "10": 478.59, "20": 660.59}.items()
    }
    left, right, top, bottom, *ends = json.loads(svg.get("data-plot"))
    assert ends == [2, 32, 1, pytest.approx(10**0.9), pytest.approx(10**3.1), 1]


@pytest.mark.parametrize("log", [False, True])
def test_one_point_is_a_dot_in_the_middle(log):
    svg = drawing(figure_of(Series("a", [(7.0, 100.0)], PLAIN), x=PlotAxis("x", log=log), y=PlotAxis("y", log=log)))
    (dot,) = svg.findall("g/circle")
    assert at(dot, "cx", "cy") == [420, 171] and svg.find("g/path") is None
    assert [at(line, "y1") for line in svg.findall("line[@class='grid']")] == [[171]]
    assert words_below(svg) == {"7": 420}


def test_what_is_outside_of_the_given_ends_is_drawn_at_the_edge_and_has_no_tick():
    y = PlotAxis("y", domain=(0.0, 10.0), ticks=(-5.0, 0.0, 5.0, 10.0, 15.0))
    svg = drawing(figure_of(Series("a", [(0.0, -3.0), (1.0, 5.0), (2.0, 12.0)], PLAIN), y=y))
    assert corners(svg.find("g/path")) == [[56, 314], [420, 171], [784, 28]]
    assert [at(line, "y1")[0] for line in svg.findall("line[@class='grid']")] == [314, 171, 28]


def test_long_labels_of_values_stay_in_the_picture():
    y = PlotAxis("y", ticks=(1e6,), show=lambda value: f"{value:,.0f}")
    svg = drawing(figure_of(Series("a", [(0.0, 1.0), (1.0, 2e6)], PLAIN), y=y), "narrow")
    label = next(text for text in svg.findall("text[@text-anchor='end']"))
    assert label.text == "1,000,000" and at(label, "x")[0] >= 7 * len(label.text)
    left, right = json.loads(svg.get("data-plot"))[:2]
    assert corners(svg.find("g/path"))[0][0] == left == at(svg.find("line[@class='grid']"), "x1")[0] and right == 344


def test_bars_of_the_first_and_the_last_point_stay_in_the_plot():
    wide = [Series(f"{n}", [(0.0, 1.0), (1.0, 2.0)], PLAIN, intervals=[(0, 2), (1, 3)], bars=True) for n in range(7)]
    svg = drawing(figure_of(*wide))
    bars = [at(line, "x1")[0] for line in svg.iterfind(".//g/line")]
    assert len(bars) == 14 and 784 > max(bars) > min(bars) > 56


def test_a_line_that_ends_early_has_its_name_without_a_stroke_to_it():
    whole, early = (Series(name, [(0.0, 1.0), (end, 1.0)], PLAIN) for name, end in (("whole", 10.0), ("early", 5.0)))
    svg = drawing(figure_of(whole, early))
    assert {text.text for text in svg.findall("text[@class='end']")} == {"whole", "early"}
    assert len([path for path in svg.findall("path") if path.get("fill") == "none"]) == 1


def test_a_tick_has_no_zeros_after_the_point():
    points = [(-0.5, 10.0), (2.0, 90.0)]
    svg = drawing(figure_of(Series("a", points, PLAIN), y=PlotAxis("y", show=lambda value: f"{value:.0f}%")))
    assert list(words_below(svg)) == ["-0.5", "0", "0.5", "1", "1.5", "2"]
    labels = [text.text for text in svg.findall("text[@text-anchor='end']")]
    assert labels == ["20%", "40%", "60%", "80%"]  # 6.8 to 94.8


def test_labels_that_would_touch_are_left_out_and_none_leaves_the_picture():
    """A domain of 0 to 728 is a unit a pixel, from 56. A label of 10 letters takes 70 pixels."""
    x = PlotAxis("x", domain=(0.0, 728.0), ticks=(0.0, 72.0, 77.0, 154.0, 220.0, 728.0), show=lambda at: f"{at:010.0f}")
    series = Series("a", [(0.0, 1.0), (728.0, 2.0)], PLAIN)
    svg = drawing(figure_of(series, x=x))
    assert {int(word): place for word, place in words_below(svg).items()} == {0: 56, 77: 133, 154: 210, 728: 784}
    ticks = [at(line, "x1")[0] for line in svg.findall("line[@class='axis']")[:-1]]
    assert ticks == [56, 128, 133, 210, 276, 784]  # the strokes stay
    # 300 pixels from 44 to 344 in a picture of 358: labels of 14 letters take 98.
    x = PlotAxis("x", domain=(0.0, 300.0), ticks=(0.0, 150.0, 300.0), show=lambda at: f"{at:014.0f}")
    narrow = drawing(figure_of(series, x=x), "narrow")
    assert list(words_below(narrow).values()) == [49, 194, 358 - 49]


def test_a_mark_widens_the_axis_and_its_label_is_on_the_side_with_room():
    points = [(12.0, 1.0), (15.0, 2.0)]
    svg = drawing(figure_of(Series("a", points, PLAIN), marks=((10.0, "first"), (14.0, "left"), (20.0, "right"))))
    # 10 to 20, at 72.8 pixels a unit; the middle is 15.
    strokes = svg.findall("line[@class='mark']")
    assert [at(line) for line in strokes] == [[x, x, 28, 314] for x in (56, 347.2, 784)]
    labels = svg.findall("text[@class='marked']")
    assert [(text.text, text.get("text-anchor")) for text in labels] == [
        ("first", "start"), ("left", "start"), ("right", "end"),
    ]  # fmt: skip
    first, left, right = (at(text, "x")[0] for text in labels)
    assert 56 < first < 66 and 347.2 < left < 357.2 and 774 < right < 784
    assert all(28 + 8 < at(text, "y")[0] < 28 + 20 for text in labels)  # below the upper edge


def test_the_sizes_of_a_page_and_of_parts_of_it():
    def frames(size: str) -> list[tuple[str, str, list[float]]]:
        found = figure_of(Series("a", POINTS, PLAIN), size=size).findall("svg")
        return [(svg.get("class"), svg.get("viewBox"), json.loads(svg.get("data-plot"))[:4]) for svg in found]

    narrow = ("narrow", "0 0 358 280", [44, 344, 28, 236])
    assert frames("wide") == [("wide", "0 0 960 360", [56, 784, 28, 314]), narrow]
    assert frames("half") == [("wide", "0 0 520 310", [52, 352, 28, 264]), narrow]
    assert frames("third") == [narrow]


def test_a_chart_shows_five_lines_until_all_are_asked_for():
    """The first five by `first`, then by their order; the others are in the picture and not displayed."""
    lines = [Series(f"{n}", [(0.0, 1.0 + n), (1.0, 2.0)], PLAIN) for n in range(7)]
    figure = line_chart("T", lines, PlotAxis("x"), PlotAxis("y"), first=["6", "gone"])
    hidden = [re.findall("<title>([^<]*)", part)[0] for part in figure.split('<g class="more" display="none"><g>')[1:]]
    assert hidden[:2] == ["4", "5"] and "All 7 lines" in figure and figure.count('<li class="more">') == 2
    ends = [part.partition("</g>")[0] for part in figure.split('class="few"')[1:]]
    names = [re.findall('class="end"[^>]*>([^<]*)', part) for part in ends]
    assert [sorted(found) for found in names] == [["0", "1", "2", "3", "6"]]
    data = json.loads(html.unescape(re.search('data-chart="([^"]*)', figure)[1]))
    assert [one["n"] for one in data["series"] if one.get("m")] == ["4", "5"] and len(data["series"]) == 7
    few = line_chart("T", lines[:5], PlotAxis("x"), PlotAxis("y"))
    assert "more" not in few and "checkbox" not in few


def test_a_file_of_a_chart_has_the_lines_that_are_shown_and_another_has_all():
    lines = [Series(f"{n}", [(0.0, 1.0 + n), (1.0, 2.0)], PLAIN) for n in range(7)]
    first, every = shown(str(line_chart("T", lines, PlotAxis("x"), PlotAxis("y"))))
    assert (first.name, every.name, every.rows) == ("t", "t-all-lines", []) and len(first.rows) == 15
    assert first.svg.count('display="none"') == 3 and every.svg.count('display="none"') == 1


def test_the_label_of_the_longest_length_is_never_left_out():
    """On a phone's width 16× and 32× touch: 16× gives way."""
    ticks = [1.0, 2.0, 4.0, 8.0, 16.0, 17.0]
    axis = PlotAxis("x", True, lambda value: f"{value:g}×", ticks)
    svg = drawing(figure_of(Series("a", [(t, 1.0 + t) for t in ticks], PLAIN), x=axis), "narrow")
    assert "17×" in words_below(svg) and "16×" not in words_below(svg)


def test_two_points_are_a_line():
    svg = drawing(figure_of(Series("a", POINTS[:2], PLAIN)))
    assert corners(svg.find("g/path")) == [[56, 303.6], [784, 43.6]] and svg.find("g/circle") is None


def test_each_series_has_its_colour_dash_and_dots():
    figure = figure_of(
        Series("solid", POINTS, Style("rope", None, 3.0)),
        Series("dashed", POINTS, Style("pi", "8 4", 2.5), markers=True),
        Series("dots", POINTS, Style("ntk"), line=False),
        Series("thin", POINTS, Style("yarn", None, 3.0), faint=True),
    )
    groups = drawing(figure).findall("g")
    paths = [group.find("path") for group in groups]
    looks = [
        path is not None and [path.get(f"stroke{part}") for part in ("", "-width", "-dasharray", "-linecap")]
        for path in paths
    ]
    assert looks == [
        ["var(--c-yarn)", "1", None, "round"],  # behind the others
        ["var(--c-rope)", "3", None, "round"],
        ["var(--c-pi)", "2.5", "8 4", "butt"],
        False,
    ]
    assert [path.get("stroke-opacity") is not None for path in paths[:3]] == [True, False, False]
    assert [path.find("title").text for path in paths[:3]] == ["thin", "solid", "dashed"]
    assert [[dot.get("fill") for dot in group.findall("circle")] for group in groups] == [
        [], [], ["var(--c-pi)"] * 3, ["var(--c-ntk)"] * 3,
    ]  # fmt: skip
    assert [at(dot, "cx", "cy") for dot in groups[2].findall("circle")] == corners(paths[2])
    # Neither a faint line nor dots have a name at their end; all but the faint are in the legend and the tooltip.
    assert [text.text for text in drawing(figure).findall("text[@class='end']")] == ["solid", "dashed"]
    assert drawing(figure, "narrow").find("text[@class='end']") is None
    items = figure.findall("ul/li")
    assert ["".join(item.itertext()) for item in items] == ["solid", "dashed", "dots"]
    assert [one["n"] for one in json.loads(figure.get("data-chart"))["series"]] == ["solid", "dashed", "dots"]
    for item, dash, colour in zip(items[:2], (None, "8 4"), ("rope", "pi"), strict=True):
        x1, x2, y1, y2 = at(item.find("svg/line"))
        width, height = at(item.find("svg"), "width", "height")
        # In the middle of its box, from edge to edge.
        assert 0 <= x1 <= 2 and x1 + x2 == width and y1 == y2 == height / 2
        assert item.find("svg/line").get("stroke-dasharray") == dash
        assert item.find("svg/line").get("stroke") == f"var(--c-{colour})"
    dot, box = items[2].find("svg/circle"), items[2].find("svg")
    assert [2 * place for place in at(dot, "cx", "cy")] == at(box, "width", "height")
    assert dot.get("fill") == "var(--c-ntk)" and items[2].find("svg/line") is None


def test_a_chart_is_said_in_words_and_has_the_numbers_of_its_tooltip():
    points = [(10.0, 1234567.0), (20.0, 50.0)]
    series = [Series("a", points, PLAIN), Series("b", POINTS, Style("pi")), Series("no", POINTS, PLAIN, faint=True)]
    figure = figure_of(*series, caption="Seen & heard")
    said = "points against steps. a: from 1.2·10⁶ at 10.0 to 50.0 at 20.0; b: from 100 at 10.0 to 150 at 20.0."
    for svg in figure.findall("svg"):
        assert (svg.find("title").text, svg.find("desc").text) == ("Scores", said)
        assert svg.get("aria-label") == f"Scores. {said}"
    assert json.loads(figure.get("data-chart")) == {
        "x": "steps",
        "y": "points",
        "series": [
            {"n": "a", "c": "rope", "p": [[10, 1234570, "10.0", "1.2·10⁶"], [20, 50, "20.0", "50.0"]]},
            {"n": "b", "c": "pi", "p": [[10, 100, "10.0", "100"], [15, 200, "15.0", "200"], [20, 150, "20.0", "150"]]},
        ],
    }
    assert figure.find("div[@class='chart-title']").text == "Scores"
    assert figure.find("figcaption").text == "Seen & heard" and figure_of(series[0]).find("figcaption") is None


@pytest.mark.parametrize(
    ("x_log", "y_log", "kept"),
    [(False, False, [-1, 0, 1, 2, 3]), (True, False, [1, 2, 3]), (False, True, [-1, 0, 3]), (True, True, [3])],
)
def test_a_logarithmic_axis_alone_leaves_out_what_is_not_positive(x_log, y_log, kept):
    points = [(-1.0, 5.0), (0.0, 4.0), (1.0, 0.0), (2.0, -6.0), (3.0, 3.0), (4.0, float("nan")), (float("inf"), 1.0)]
    figure = figure_of(Series("a", points, PLAIN), x=PlotAxis("x", log=x_log), y=PlotAxis("y", log=y_log))
    assert [point[0] for point in json.loads(figure.get("data-chart"))["series"][0]["p"]] == kept


def test_names_of_lines_that_end_at_the_top_are_a_line_of_text_apart():
    long = "a name that is far too long to stand beside its line"
    names = ["first", "second", long, "alone"]
    ends = (10.0, 9.9, 9.8, 5.0)  # y 28, 30.86, 33.72 and 171
    series = [Series(name, [(0.0, 0.0), (1.0, end)], PLAIN) for name, end in zip(names, ends, strict=True)]
    svg = drawing(figure_of(*series, y=PlotAxis("y", domain=(0.0, 10.0))))
    labels = svg.findall("text[@class='end']")
    leaders = [corners(path) for path in svg.findall("path")]
    assert [start[1] for start, _ in leaders] == [pytest.approx(y, abs=0.06) for y in (28, 30.86, 33.72, 171)]
    assert [end[1] for _, end in leaders] == [28, 42, 56, 171]  # as high as the first can be, then 14 each
    for text, ((x1, _), (x2, y2)) in zip(labels, leaders, strict=True):
        assert 784 < x1 < x2 < at(text, "x")[0] < 784 + 20 and y2 < at(text, "y")[0] < y2 + 8
    # As many letters of 7 pixels as fit between the label's left edge and the picture's right one.
    shown = labels[2].text
    assert 960 - 14 < at(labels[2], "x")[0] + 7 * len(shown) <= 960 and shown[0] == "a" and shown.endswith("line")


def test_linear_ticks_are_one_two_or_five_apart():
    assert linear_ticks(0, 5) == [0, 1, 2, 3, 4, 5]
    assert linear_ticks(0, 6) == [0, 2, 4, 6]
    assert linear_ticks(96, 206, 6) == [100, 120, 140, 160, 180, 200]
    assert linear_ticks(0, 20) == [0, 5, 10, 15, 20]
    assert linear_ticks(0, 40) == [0, 10, 20, 30, 40]
    assert linear_ticks(-1, 1) == [-1, -0.5, 0, 0.5, 1]
    assert linear_ticks(1.1, 1.5, 4) == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])  # 1.1 / 0.1 is above 11
    assert linear_ticks(0, 0.3, 3) == pytest.approx([0, 0.1, 0.2, 0.3])  # and 0.3 / 0.1 below 3
    assert linear_ticks(3, 3) == [3]


def test_log_ticks_of_a_short_axis():
    assert log_ticks(1, 6) == [1, 2, 3, 4, 5, 6]
    assert log_ticks(2, 3) == [2, 3]
    assert log_ticks(0.01, 0.1) == pytest.approx([0.01, 0.02, 0.05, 0.1])
    # No round number lies within: linear ticks.
    assert log_ticks(7.3, 7.6) == pytest.approx([7.3, 7.4, 7.5, 7.6])
    # Five ticks fit at most: of the six powers, every second.
    assert log_ticks(1, 1e5, 5) == [1, 100, 1e4]


def test_decimation_keeps_the_ends_and_both_extremes_of_each_bin():
    heights = [5.0, 1.0, 9.0, 2.0, 2.0, 2.0, 4.0, 7.0, 0.0, 3.0]  # of bins 0-2, 3-5 and 6-9
    points = [(float(x), y) for x, y in enumerate(heights)]
    assert [int(x) for x, _ in decimate(points, 3)] == [0, 1, 2, 3, 7, 8, 9]
    assert decimate(points[:6], 3) == points[:6]  # twice the limit: all


def test_smoothing_takes_as_much_before_as_after():
    points = [(float(x), y) for x, y in enumerate([0.0, 6.0, 3.0, 9.0, 12.0, 15.0, 6.0, 9.0])]
    # Means of 1, 3, 5, 5, 5, 5, 3 and 1: (0 + 6 + 3) / 3, (0 + 6 + 3 + 9 + 12) / 5, ...
    expected = [0, 3, 6, 9, 9, 10.2, 10, 9]
    assert smooth(points, 5) == [(x, pytest.approx(y)) for x, y in enumerate(expected)]
    assert smooth(points, 1) == points


def test_a_spike_survives_decimation():
    points = [(float(i), 9.0 if i == 4321 else 2.0) for i in range(100_000)]
    kept = decimate(points)
    assert len(kept) < 600 and (4321.0, 9.0) in kept and kept == sorted(kept)


def test_a_chart_leaves_out_what_cannot_be_drawn():
    style = Style("rope")
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, -1.0), (4.0, float("inf")), (8.0, 3.0)]
    chart = line_chart("T", [Series("s", points, style)], PlotAxis("x", log=True), PlotAxis("y", log=True))
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart).group(1)))
    assert [p[:2] for p in data["series"][0]["p"]] == [[8.0, 3.0]]
    assert line_chart("T", [Series("s", points[1:2], style)], PlotAxis("x"), PlotAxis("y")) == ""


@pytest.mark.parametrize("log", [False, True])
def test_a_line_stays_inside_its_plot(log):
    points = [(1.0, 0.02), (4.0, 0.2), (8.0, 0.05)]
    chart = line_chart("T", [Series("s", points, Style("rope"))], PlotAxis("x", log=log), PlotAxis("y", log=log))
    frames = [json.loads(text) for text in re.findall(r'data-plot="([^"]*)"', chart)]
    paths = re.findall(r'<g><path d="M([^"]*)"', chart)
    assert len(frames) == len(paths) == 2  # wide and narrow
    for (left, right, top, bottom, *_), path in zip(frames, paths, strict=True):
        xs, ys = zip(*(map(float, point.split()) for point in path.split("L")), strict=True)
        assert (xs[0], xs[-1]) == (left, right)
        # The line has room above and below, and fills most of the plot.
        assert top < min(ys) == ys[1] and ys[0] == max(ys) < bottom
        assert 0.87 < (max(ys) - min(ys)) / (bottom - top) < 0.95


def test_names_at_the_ends_of_lines_are_apart_and_inside():
    ends = (0.0, 0.001, 0.002, 0.5, 1.0)
    series = [Series(f"line {end}", [(0.0, 0.5), (1.0, end)], Style("rope")) for end in ends]
    chart = line_chart("T", series, PlotAxis("position"), PlotAxis("y", domain=(0.0, 1.0)))
    wide = re.search(r'<svg viewBox="0 0 960 360".*?</svg>', chart, re.S).group(0)
    left, right, top, bottom, *_ = json.loads(re.search(r'data-plot="([^"]*)"', wide).group(1))
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="end"[^>]*>([^<]*)<', wide)
    heights = [float(y) for _, y, _ in found]
    assert [name for *_, name in found] == [f"line {end}" for end in reversed(ends)]
    assert all(float(x) > right for x, *_ in found) and heights[0] == top + 4 and heights[-1] == bottom + 4
    # The lowest three would overlap: they move up, a line of text apart; the others stay beside their lines.
    assert [b - a for a, b in zip(heights[2:], heights[3:], strict=False)] == [14, 14]
    assert heights[1] == pytest.approx((top + bottom) / 2 + 4, abs=0.1)
    (middle,) = re.findall(r'<text x="([\d.]+)"[^>]*class="name">position<', wide)
    assert float(middle) == (left + right) / 2


def test_variants_without_a_colour_of_their_own_get_spare_ones_in_order():
    records = {f"custom {i}": {"model": f"custom {i}", "variant": "custom"} for i in range(6)}
    assert [(style.colour, style.dash) for style in assign_styles(records).values()] == [
        *((colour, None) for colour in ("extra-1", "extra-2", "extra-3", "extra-4")),
        ("extra-1", "7 3"),
        ("extra-2", "7 3"),
    ]


@pytest.mark.parametrize(("low", "high"), [(1, 8), (7.3, 7.6), (0.001, 1e6), (2, 3)])
def test_log_ticks_lie_inside_and_are_few(low, high):
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 7 and all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_log_ticks_are_as_many_round_numbers_as_fit():
    assert log_ticks(4, 9) == [4, 5, 6, 7, 8, 9]
    assert log_ticks(1, 20) == [1, 2, 5, 10, 20]
    assert log_ticks(1, 300) == [1, 3, 10, 30, 100, 300]
    assert log_ticks(1, 1e5) == [1, 10, 100, 1e3, 1e4, 1e5]
    assert log_ticks(1, 1e10) == [1, 100, 1e4, 1e6, 1e8, 1e10]
