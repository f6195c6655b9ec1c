"""Figures and tables of a report as files, the tables of mixtures and of changes, and the directory of a sweep."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from run_directories import WINNING, make_run

from pe_lab.page.document import build_page
from pe_lab.page.export import export_files, shown, slug, table_rows
from pe_lab.report import main
from pe_lab.results.figures import HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings, write_findings
from pe_lab.results.runs import read_run, read_runs

METHODS = {key: WINNING[key] for key in (("RoPE", "as trained", "RoPE"), ("DroPE", "as trained", "DroPE"))}
PHASES = (("pretrain", "rope(base=10000)", 24), ("recalibrate", "nope", 12))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = make_run(tmp_path_factory.mktemp("files"), "a $run, 2", methods=METHODS, phases=PHASES)
    figures = (
        HeatMaps("m", "Maps", "C", np.arange(4.0).reshape(1, 2, 2), ("p",), ("r", "s"), ("c", "d"), "P", "R", "C", "V"),
        LineCharts("l", "Lines", "C", (("one", (Line("x", np.arange(3.0), np.arange(3.0)),)),), "x", "y"),
    )
    write_findings(directory / "analysis" / "a", "a", Findings((), (), figures), {})
    return directory


@pytest.fixture(scope="module")
def page(run) -> str:
    return build_page([read_run(run)])


@pytest.fixture(scope="module")
def files(run, page) -> dict[str, bytes]:
    return export_files([read_run(run)], page, ("svg", "csv"))


def rows(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode())))


def test_every_table_and_chart_of_the_page_is_a_file(page, files):
    charts = len(re.findall(r'<figure class="chart(?! small)[^"]*" data-chart', page))
    tables, of_analyses = page.count("<table"), {"a-run-2-a-m", "a-run-2-a-l"}
    names = {name.rpartition(".")[0] for name in files} - {"index"}
    assert len(names - of_analyses - {"a-run-2-heat-maps-needles-in-filler"}) == charts + tables > 10
    assert of_analyses <= names and f"{sorted(of_analyses)[0]}.svg" in files
    assert {row[0] for row in rows(files["index.csv"])[1:]} == set(files) - {"index.csv"}
    again = [one.name for one in shown(page)]
    assert again == list(dict.fromkeys(again)) and all(re.fullmatch(r"a-run-2-[a-z0-9-]+", name) for name in again)


def test_the_csv_of_a_table_has_the_values_and_intervals_of_the_page(page, files):
    found = rows(files["a-run-2-needle-accuracy.csv"])
    assert found[0][:4] == ["Variant length in tokens", "trained 1× 64", "trained 1× 64 low", "trained 1× 64 high"]
    assert [row[0] for row in found[1:]] == ["RoPE", "DroPE"]
    assert [float(value) for value in found[2][1::3]] == [0.53, 0.53, 0.36, 0.09]
    low, high = (float(value) for value in found[2][2:4])  # 0.53 -+ 1.96 sqrt(0.53 * 0.47 / 1024)
    assert (low, high) == pytest.approx((0.4994, 0.5606), abs=1e-4) and "50–56%" in page
    plain = rows(files["a-run-2-encodings-of-pretrain.csv"])
    assert plain == [["Layers", "Encoding", "Window"], ["0-2", "rope(base=10000)", "none"]]


def test_cells_are_told_as_text_or_as_their_values():
    head = "<tr><th>a</th><th>b</th></tr>"
    first = '<tr><th>x <svg><title>no</title></svg><b>1</b></th><td data-csv="1|2|3">one</td></tr>'
    second = '<tr><th>y, "z"</th><td data-csv="">–</td></tr><tr><th>w</th><td>two</td></tr>'
    assert table_rows(f"<table>{head}{first}{second}</table>") == [
        ["a", "b", "b low", "b high"], ["x 1", "1", "2", "3"], ['y, "z"', "", "", ""], ["w", "two", "", ""],
    ]  # fmt: skip


def test_the_csv_of_a_chart_has_the_points_that_are_drawn(page, files):
    found = rows(files["a-run-2-perplexity-against-length.csv"])
    assert found[0] == ["series", "sequence length / training length", "perplexity (log scale)", "low", "high"]
    assert [row[:3] for row in found[1:5]] == [
        ["RoPE", "1", "8.1"],
        ["RoPE", "2", "31"],
        ["RoPE", "4", "240"],
        ["RoPE", "8", "910"],
    ]
    drawn = re.search(r'data-chart="([^"]*)"><div class="chart-title">Perplexity against length', page).group(1)
    series = json.loads(html.unescape(drawn))["series"]
    assert [[float(x) for x in row[1:]] for row in found[1:]] == [p[:2] + p[4:] for one in series for p in one["p"]]


def test_an_svg_stands_alone_with_its_title_legend_and_light_colours(page, files):
    charts = {name: content.decode() for name, content in files.items() if name.endswith(".svg")}
    own = {name: svg for name, svg in charts.items() if "heat-maps" not in name and not name.startswith("a-run-2-a-")}
    assert len(own) > 5
    for name, svg in own.items():
        tree = ElementTree.fromstring(svg)
        assert tree.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in svg and "class=" not in svg, name
        assert tree.get("viewBox").split()[2:] == [tree.get("width"), tree.get("height")]
        paper = tree[0]
        assert paper.get("fill") == "#fff" and [paper.get("width"), paper.get("height")] == [
            tree.get("width"),
            tree.get("height"),
        ]
        assert not re.search(r"(href|url\()", svg)
    loss = own["a-run-2-loss-over-training.svg"]
    texts = [one.text for one in ElementTree.fromstring(loss).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss over training", "pretrain", "validation", "recalibrate starts"} <= set(texts)
    assert 'stroke="#5b6470"' in loss  # the light grey of RoPE


def test_a_png_has_twice_the_size_and_ink_where_its_letters_are(run):
    from pe_lab.page.figure_files import png

    one = next(one for one in shown(build_page([read_run(run)])) if one.svg)
    picture = Image.open(io.BytesIO(png(one.svg)))
    width, height = (float(ElementTree.fromstring(one.svg).get(side)) for side in ("width", "height"))
    assert picture.size == (round(2 * width), round(2 * height)) and picture.format == "PNG"
    grey = np.asarray(picture.convert("L"))
    assert grey[0, 0] == 255 and (grey[10:60, :400] < 80).sum() > 200  # the title


def test_the_command_exports_the_chosen_formats(run, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert main([str(run), "--out", str(tmp_path / "a.html"), f"--export={out}", "--formats=CSV"]) == 0
    assert {path.suffix for path in out.iterdir()} == {".csv"} and "index.csv" in capsys.readouterr().out
    for options, words in (
        (["--formats=csv"], "--formats is an option of --export=DIR"),
        (["--export=x", "--formats=jpg,csv"], "'jpg' is no format of figures. Choose of png, svg and csv."),
        (["--export=x", "--formats=,"], "--formats is empty"),
    ):
        assert main([str(run), *options]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(run), "--out", str(tmp_path / "b.html"), "--export", str(tmp_path / "file"), "--formats=csv"]) == 2
    assert "cannot be written" in capsys.readouterr().err and not (tmp_path / "b.html").exists()


def test_names_of_files_are_plain():
    assert slug("Needle accuracy, β at 8× (1,024)") == "needle-accuracy-beta-at-8x-1-024" and slug("../x") == "x"
    assert len(slug("long " * 40)) <= 60


def test_a_sweep_stands_for_its_runs(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for name in ("a", "b"):
        make_run(sweep, name, evaluated=False, phases=PHASES[:1])
    (sweep / "sweep.json").write_text("{}")
    (sweep / "logs").mkdir()
    assert main([str(sweep)]) == 0
    assert f"Wrote {sweep / 'report.html'}" in capsys.readouterr().out
    first = (sweep / "report.html").read_text()
    assert main([str(path) for path in sorted(sweep.iterdir())]) == 0  # runs/sweep/*
    assert (sweep / "report.html").read_text().count('class="run"') == first.count('class="run"') == 2
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "sweep.json").write_text("{}")
    assert main([str(tmp_path / "empty")]) == 2 and "no run has begun" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures and changes


def test_a_mixture_is_told_by_source_with_epochs(tmp_path):
    run = make_run(tmp_path, evaluated=False, phases=PHASES[:1])
    info = json.loads((run / "pretrain" / "phase.json").read_text())
    info["mixture"] = [{"source": "stdlib", "weight": 3, "tokens": 40_000}, {"source": "needles", "weight": 1}]
    (run / "pretrain" / "phase.json").write_text(json.dumps(info))
    counts = {"read_tokens/stdlib": 60_000, "expected_tokens/stdlib": 75_000}
    counts |= {"read_tokens/needles": 26_000, "expected_tokens/needles": 25_000}
    with (run / "pretrain" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "tokens": 1, **dict.fromkeys(counts, 1)}) + "\n")
        file.write(json.dumps({"step": 24, "tokens": 100_000, **counts}) + "\n")
    page = build_page(read_runs([run]))
    table = re.search(r'aria-label="Tokens of each source">.*?</table>', page, re.S).group()
    assert table_rows(table)[1:] == [
        ["pretrain", "stdlib", "75%", "75K", "60K", "0.800", "1.5"],
        ["pretrain", "needles", "25%", "25K", "26K", "1.040", "–"],
    ]
    assert "Tokens of each source" not in build_page(read_runs([make_run(tmp_path, "old", evaluated=False)]))


def test_figures_of_runs_whose_names_are_alike_have_files_of_their_own(tmp_path):
    directories = [make_run(tmp_path, name, evaluated=False, phases=PHASES[:1]) for name in ("a b", "a-b")]
    for n, directory in enumerate(directories):
        line = Line("x", np.arange(3.0), np.full(3, float(n)))
        findings = Findings((), (), (LineCharts("l", "Lines", "C", (("one", (line,)),), "x", "y"),))
        write_findings(directory / "analysis" / "a", "a", findings, {})
    made = export_files(read_runs(directories), "", ("csv",))
    assert {*made} == {"index.csv", "a-b-a-l.csv", "a-b-a-l-2.csv"}
    assert rows(made["a-b-a-l.csv"])[1][3] == "0" and rows(made["a-b-a-l-2.csv"])[1][3] == "1"
    assert [row[0] for row in rows(made["index.csv"])[1:]] == [name for name in made if name != "index.csv"]


@pytest.mark.parametrize("what", ["continued with phases.0.steps 12 -> 24", "prolonged from 12 to 24 steps (hold)"])
def test_changes_of_a_run_are_a_table_and_marks_at_their_tokens(what, tmp_path):
    run = make_run(tmp_path, evaluated=False, phases=PHASES[:1])
    known = json.loads((run / "run.json").read_text())
    change = {"time": "2026-03-02", "command": "python -m pe_lab.train", "keys": {"phases.0.steps": [12, 24]}}
    (run / "run.json").write_text(json.dumps(known | {"changes": [change]}))
    info = json.loads((run / "pretrain" / "phase.json").read_text())
    info["lineage"].insert(0, {"what": what, "step": 12, "path": "pretrain/checkpoints/12"})
    (run / "pretrain" / "phase.json").write_text(json.dumps(info))
    page = build_page(read_runs([run]))
    table = re.search(r'aria-label="Changes since the first start">.*?</table>', page, re.S).group()
    assert table_rows(table)[1:] == [
        ["2026-03-02", "phases.0.steps: 12 → 24", "python -m pe_lab.train"],
        ["pretrain, step 12", what, "–"],
    ]
    chart = re.search(r'aria-label="Loss over training.*?</svg>', page, re.S).group()
    left, right, _, _, first, last, *_ = json.loads(re.search(r'data-plot="([^"]*)"', chart).group(1))
    at = float(re.search(r'<line x1="([^"]*)"[^>]*class="mark"', chart).group(1))
    assert ">changed<" in chart and first + (at - left) / (right - left) * (last - first) == pytest.approx(
        12 * 2048, rel=0.01
    )
