"""Line charts of the report: what is drawn, where, and in which colour."""

import html
import json
import re

import pytest

from pe_lab.page.charts import Axis, Series, decimate, line_chart, log_ticks
from pe_lab.page.variants import Style, assign_styles


def test_a_spike_survives_decimation():
    points = [(float(i), 9.0 if i == 4321 else 2.0) for i in range(100_000)]
    kept = decimate(points)
    assert len(kept) < 600 and (4321.0, 9.0) in kept and kept == sorted(kept)


def test_a_chart_leaves_out_what_cannot_be_drawn():
    style = Style("rope")
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, -1.0), (4.0, float("inf")), (8.0, 3.0)]
    chart = line_chart("T", [Series("s", points, style)], Axis("x", log=True), Axis("y", log=True))
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart).group(1)))
    assert [p[:2] for p in data["series"][0]["p"]] == [[8.0, 3.0]]
    assert line_chart("T", [Series("s", points[1:2], style)], Axis("x"), Axis("y")) == ""


@pytest.mark.parametrize("log", [False, True])
def test_a_line_stays_inside_its_plot(log):
    points = [(1.0, 0.02), (4.0, 0.2), (8.0, 0.05)]
    chart = line_chart("T", [Series("s", points, Style("rope"))], Axis("x", log=log), Axis("y", log=log))
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
    chart = line_chart("T", series, Axis("position"), Axis("y", domain=(0.0, 1.0)))
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
    records = {f"custom {i}": {"variant": f"custom {i}", "method": "custom"} for i in range(6)}
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
