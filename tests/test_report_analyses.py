"""Analyses in the report: what is found is on the page, the values and colours are right, no name breaks it."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
from PIL import Image
from run_directories import make_run

from pe_lab.page.charts import line_styles
from pe_lab.page.colours import cell_colours, picture
from pe_lab.page.document import build_page
from pe_lab.page.maps import large_size
from pe_lab.report import main
from pe_lab.results.figures import HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings, write_findings
from pe_lab.results.runs import read_runs
from pe_lab.results.table import TextTable

EVIL = "<script>alert(1)</script>\"'&"


def maps(panels=3, **more) -> HeatMaps:
    values = np.random.default_rng(0).normal(size=(panels, 2, 4)).astype(np.float32).astype(np.float64)
    values[0, 1, 2] = np.nan
    names = layer_names(range(panels)), ("head 0", "head 1"), tuple(f"{n} ({2**n} tokens)" for n in range(4))
    labels = ("layer", "head", "pair, fast first", "norm, nats")
    return HeatMaps("m", "Norms of queries", "Of all sequences.", values, *names, *labels, **more)


def lines(panels=1, **more) -> LineCharts:
    x = np.array([64.0, 128, 256, 512, 1024])
    y = np.array([3.0, 2.5, np.nan, 2.0, 2.75])
    drawn = (Line("RoPE", x, y, y - 0.25, y + 0.25), Line("other", x[:2], y[:2]))
    named = tuple((f"layer {n}", drawn) for n in range(panels))
    more = {"log_x": True, "marks": ((128.0, "trained"),)} | more
    return LineCharts("l", "Loss by position", "Breaks at a gap.", named, "position, tokens", "loss, nats", **more)


def analysis(*figures, sentences=("Heads use 12 of 32 pairs.",), tables=None) -> Findings:
    tables = tables or (TextTable("Kinds of heads", ("kind", "heads"), (("previous token", "14"),)),)
    return Findings(sentences, tables, figures, {"norms": np.zeros(3)}, {"norms": "[L, H] layer, head"})


ABOUT = {
    "command": "python -m pe_lab.analyze heads",
    "models": [{"name": "rope", "lineage": [{"what": "pretrain"}]}],
    "sequences": "wikitext, 64",
    "seconds": 412.0,
    "peak_memory_gib": 3.2104,
    "versions": {"jax": "0.10.2"},
    "finished": True,
    "length": None,
}


def page_of(tmp_path, *figures, about=ABOUT, name="heads", run=None, **more) -> str:
    run = run or tmp_path / "run"
    write_findings(run / "analysis" / name, name, analysis(*figures, **more), about)
    return build_page(read_runs([run]))


def figures_of(page: str) -> list[str]:
    return re.findall(r'<figure class="chart analysis-maps".*?</figure>', page, re.S)


class Nesting(HTMLParser):
    """The text of a page whose tags nest, without style and script."""

    void = {"meta", "link", "br", "path", "line", "rect", "circle", "img", "input"}

    def __init__(self, page):
        super().__init__()
        self.open, self.words = [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_without_javascript_everything_is_there(tmp_path):
    page = page_of(tmp_path, maps(), lines(), lines(8, points=True))
    text = Nesting(page).text
    for words in (
        "Analyzed here: Heads.", "Heads use 12 of 32 pairs.", "Kinds of heads", "previous token", "14",
        "Norms of queries",
        "Of all sequences.", "layer 0", "layer 2", "norm, nats", "not measured",
        "Rows from the top, head: head 0 to head 1.",
        "Columns from the left, pair, fast first: 0 (1 tokens) to 3 (8 tokens).",
        "Loss by position", "Breaks at a gap.", "trained", "Upwards: loss, nats. To the right: position, tokens.",
        "How this was made", "python -m pe_lab.analyze heads", "wikitext, 64", "6 min 52 s", "3.21",
        "jax 0.10.2", "yes", '"what": "pretrain"', "numbers/norms", "[L, H] layer, head",
    ):  # fmt: skip
        assert words in text, words
    assert page.count("<script>") == 1 and 'href="#analysis-0"' in page and 'id="analysis-0"' in page
    assert "python -m pe_lab.evaluate" not in text  # there is no checkpoint here
    (figure,) = figures_of(page)
    assert figure.count('<div class="panel">') == 3 and figure.count("<img src=") == 3 + 1 + 1
    assert re.search(r'class="large" hidden', figure) and 'type="range" min="0" max="2"' in figure


def test_the_values_of_the_page_are_the_figures(tmp_path):
    figure = maps()
    (markup,) = figures_of(page_of(tmp_path, figure))
    stored = base64.b64decode(re.search(r'data-values="([^"]*)"', markup).group(1))
    np.testing.assert_array_equal(np.frombuffer(stored, "<f4").reshape(3, 2, 4), figure.values.astype(np.float32))
    names = json.loads(html.unescape(re.search(r'data-maps="([^"]*)"', markup).group(1)))
    assert names == {
        "panels": ["layer 0", "layer 1", "layer 2"],
        "rows": ["head 0", "head 1"],
        "columns": ["0 (1 tokens)", "1 (2 tokens)", "2 (4 tokens)", "3 (8 tokens)"],
        "labels": ["layer", "head", "pair, fast first", "norm, nats"],
    }


@pytest.mark.parametrize(
    ("more", "name", "ends"),
    [({}, "viridis", None), ({"scale": "diverging"}, "RdBu_r", 0), ({"limits": (-0.5, 0.25)}, "viridis", (-0.5, 0.25))],
)
def test_a_pixel_has_the_colour_of_its_value(tmp_path, more, name, ends):
    figure = maps(**more)
    low, high = ends or (np.nanmin(figure.values), np.nanmax(figure.values))
    if ends == 0:
        high = np.nanmax(np.abs(figure.values))
        low = -high
    (markup,) = figures_of(page_of(tmp_path, figure))
    images = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="([^"]*)"', markup)
    assert images[0][0] == images[2][0]  # the large view, the bar, and the panels
    assert images[2][1].startswith("from ")
    for values, (image, _) in zip(figure.values, images[2:], strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGBA"))
        expected = matplotlib.colormaps[name](matplotlib.colors.Normalize(low, high)(values.copy()), bytes=True)
        measured = ~np.isnan(values)
        # matplotlib's red to blue is rounded down.
        np.testing.assert_allclose(pixels[measured], expected[measured], atol=int(name == "RdBu_r"))
        assert (pixels[~measured][:, 3] == 0).all()  # the hatching behind it shows


def test_a_picture_of_more_than_256_colours_is_whole():
    colours = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    image = base64.b64decode(picture(colours).partition(",")[2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image)).convert("RGBA")), colours)


def test_a_map_of_30_layers_is_small(tmp_path):
    values = np.random.default_rng(0).random((30, 9, 32))
    names = (
        layer_names(range(30)),
        tuple(f"head {n}" for n in range(9)),
        tuple(f"{n} (1,234 tokens)" for n in range(32)),
    )
    figure = HeatMaps("m", "T", "C", values, *names, "layer", "head", "pair", "norm")
    assert cell_colours(figure.scale, figure.values, (0.0, 1.0)).shape == (30, 9, 32, 4)
    (markup,) = figures_of(page_of(tmp_path, figure))
    assert len(markup.encode()) < 130_000


def test_one_panel_is_shown_large_with_and_without_the_script(tmp_path):
    (figure,) = figures_of(page_of(tmp_path, maps(1)))
    assert '<div class="large"><div class="plot"' in figure
    assert "slider" not in figure and 'class="panels"' not in figure


def test_the_large_view_has_square_cells_unless_it_would_be_too_high_or_flat():
    assert large_size(9, 32) == (1080, 303) and large_size(3, 4) == (256, 192) and large_size(64, 64) == (520, 520)
    assert large_size(30, 9) == (480, 520) and large_size(1, 100) == (1080, 14) and large_size(10, 500) == (1080, 140)


def charts(page: str) -> list[dict]:
    return [json.loads(html.unescape(found)) for found in re.findall(r'data-chart="([^"]*)"', page)]


def test_a_line_has_its_interval_and_breaks_where_nothing_was_measured(tmp_path):
    page = page_of(tmp_path, lines())
    (chart,) = charts(page)
    assert chart["series"][0]["p"] == [
        [64.0, 3.0, "64", "3 (2.75 to 3.25)", 2.75, 3.25],
        [128.0, 2.5, "128", "2.5 (2.25 to 2.75)", 2.25, 2.75],
        [512.0, 2.0, "512", "2 (1.75 to 2.25)", 1.75, 2.25],
        [1024.0, 2.75, "1k", "2.75 (2.5 to 3)", 2.5, 3.0],
    ]
    wide = re.search(r"<svg[^>]*960 360.*?</svg>", page, re.S).group(0)
    line, other = re.findall(r'<path d="([^"]*)" stroke="[^"]*" fill="none" stroke-width', wide)
    assert line.count("M") == 2 and other.count("M") == 1
    assert len(re.findall(r'class="band"', wide)) == 2
    assert re.search(r'data-plot="\[56, 784, 28, 314, 64.0, 1024.0, 1, ', wide)
    ticks = re.findall(r'<text x="[\d.]*" y="332"[^>]*>([^<]*)<', wide)
    assert ticks == ["64", "128", "256", "512", "1k"]


def test_points_of_several_labels_stand_beside_each_other_with_bars_and_a_legend(tmp_path):
    x = np.arange(3.0)
    drawn = tuple(Line(label, x, x + n, x + n - 0.5, x + n + 0.5) for n, label in enumerate(("a", "b")))
    figure = LineCharts("p", "T", "C", (("", drawn),), "band", "y", ("near", "middle", "far"), points=True)
    page = page_of(tmp_path, figure)
    (chart,) = charts(page)
    first, second = ([point[0] for point in series["p"]] for series in chart["series"])
    assert all(a < n < b and b - a < 0.5 for n, (a, b) in enumerate(zip(first, second, strict=True)))
    assert [point[2] for point in chart["series"][1]["p"]] == ["near", "middle", "far"]
    wide = re.search(r"<svg[^>]*960 360.*?</svg>", page, re.S).group(0)
    assert wide.count("<circle") == 6 and wide.count('stroke-width="1.6"') == 6
    assert '<figure class="chart wide dots"' in page and ">middle</text>" in wide


def test_numbers_of_heads_have_whole_ticks(tmp_path):
    line = Line("RoPE", np.arange(3.0), np.arange(3.0))
    page = page_of(tmp_path, LineCharts("p", "T", "C", (("", (line,)),), "masked heads", "y"))
    wide = re.search(r"<svg[^>]*960 360.*?</svg>", page, re.S).group(0)
    assert re.findall(r'<text x="[\d.]*" y="332"[^>]*>([^<]*)<', wide) == ["0", "1", "2"]


def test_many_panels_are_small_on_the_same_axes_with_one_legend(tmp_path):
    page = page_of(tmp_path, lines(8))
    plots = [json.loads(plot)[4:] for plot in re.findall(r'data-plot="([^"]*)"', page)]
    assert len(plots) == 8 and plots.count(plots[0]) == 8
    assert page.count('<ul class="legend">') == 1 and page.count('<figure class="chart small"') == 8


def test_lines_with_the_names_of_the_pages_variants_have_their_colours():
    styles = line_styles(["RoPE", "b", "DroPE", *(f"other {n}" for n in range(20))])
    assert (styles["RoPE"].colour, styles["DroPE"].colour) == ("rope", "drope")
    looks = [(style.colour, style.dash) for style in styles.values()]
    assert len(set(looks)) == len(looks) and not {"rope", "drope"} & {styles[f"other {n}"].colour for n in range(20)}


def test_hostile_names_are_escaped(tmp_path):
    figure = HeatMaps("m", EVIL, EVIL, np.ones((1, 1, 1)), (EVIL,), (EVIL,), (EVIL,), EVIL, EVIL, EVIL, EVIL)
    line = Line(EVIL, np.arange(2.0), np.arange(2.0))
    chart = LineCharts("l", EVIL, EVIL, ((EVIL, (line,)),) * 8, EVIL, EVIL, (EVIL, EVIL), marks=((0.5, EVIL),))
    table = TextTable(EVIL, (EVIL, "n"), ((EVIL, EVIL),))
    about = {EVIL: EVIL, "command": EVIL, "deep": [{EVIL: [EVIL]}]}
    page = page_of(tmp_path, figure, chart, sentences=(EVIL,), tables=(table,), about=about)
    assert "<script>alert" not in page and page.count("<script>") == 1
    assert EVIL in Nesting(page).text
    assert json.loads(html.unescape(re.search(r'data-maps="([^"]*)"', page).group(1)))["rows"] == [EVIL]


@pytest.mark.parametrize("about", [{}, {"command": None}])
def test_an_analysis_that_does_not_know_how_it_was_made(tmp_path, about):
    run = tmp_path / "run"
    write_findings(run / "analysis" / "a", "a", Findings(("One.",), (), ()), {})
    path = run / "analysis" / "a" / "analysis.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": about}))
    page = build_page(read_runs([run]))
    assert (
        "One." in Nesting(page).text
        and "How this was made" not in page
        and "analysis-maps" in page.split("</style>")[0]
    )


def test_each_run_shows_its_own_analyses(tmp_path, capsys):
    short = {"evaluated": False, "phases": (("pretrain", "nope", 20),)}
    runs = [make_run(tmp_path, name, **short) for name in ("one", "two")]
    plain = build_page(read_runs(runs))
    assert "analysis-maps" not in plain
    for run, value in zip(runs, (1.0, 2.0), strict=True):
        page_of(tmp_path, maps(), run=run, sentences=(f"Found {value}.",))
    page_of(tmp_path, run=runs[1], name="heads_2k", sentences=("Longer.",))
    path = runs[1] / "analysis" / "heads_2k" / "analysis.json"
    path.write_text(path.read_text().replace('"analysis": "heads_2k"', '"analysis": "heads"'))
    (runs[0] / "analysis" / "broken").mkdir()
    (runs[0] / "analysis" / "broken" / "analysis.json").write_text("{")
    assert main([str(run) for run in runs]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Wrote .*report.html \(\d+ KB, 3 analyses\)", printed)
    page = (tmp_path / "report.html").read_text()
    Nesting(page)
    first, second = page.split('id="run-0"')[1].split('id="run-1"')
    assert "Found 1.0." in first and "Found 2.0." not in first and "Found 2.0." in second and "Longer." in second
    assert ">Heads (heads_2k)</h3>" in second and 'id="run-1-analysis-1"' in second
    assert "is damaged: it holds no JSON object" in first
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
