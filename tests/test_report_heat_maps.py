"""Heat maps of needles, on the page and as a picture: each cell has the score and the colour of its record."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
from PIL import Image
from prompted_rows import METHODS, by_depth, row, write_rows
from run_directories import make_run
from test_report import outline, page_of

from pe_lab.page.colours import DARK, LIGHT, STEPS, contrast, luminance, palette_css, step, step_colours
from pe_lab.page.figure_files import share_text
from pe_lab.page.maps import by_depth as by_depth_of
from pe_lab.page.maps import needle_legend, needle_table
from pe_lab.report import main
from pe_lab.results.runs import read_runs

LABELS = list(METHODS)


def niah(scores: dict[str, dict[int, list]], task: str = "standard", **more) -> list[dict]:
    """Rows of a needle task: label -> length -> score by depth."""
    return [
        row("niah", task, label, 0.5, length, by_depth=by_depth(found)) | more
        for label, by_length in scores.items()
        for length, found in by_length.items()
    ]


def maps_of(page: str, name: str = "Needle in a haystack: standard") -> dict[str, str]:
    """Label -> the table of its map, in the page's order."""
    found = re.findall(rf'<table class="heat[^"]*" aria-label="{re.escape(name)}, ([^:]*): .*?</table>', page, re.S)
    tables = re.findall(rf'(<table class="heat[^"]*" aria-label="{re.escape(name)}, .*?</table>)', page, re.S)
    return {html.unescape(label): table for label, table in zip(found, tables, strict=True)}


def cells_of(table: str, part: str = "tbody") -> dict[str, list[tuple[str, str, str]]]:
    """Depth -> (classes, text, hover) of each length."""
    body = re.search(rf"<{part}>(.*?)</{part}>", table, re.S).group(1)
    rows = {}
    for line in re.findall(r"<tr>(.*?)</tr>", body, re.S):
        depth = re.search(r'<th scope="row">(.*?)</th>', line).group(1)
        rows[depth] = [
            (
                " ".join(re.findall(r'class="([^"]*)"', attributes)),
                html.unescape(re.sub("<[^>]+>", "", text)),
                " ".join(re.findall(r'title="([^"]*)"', attributes)),
            )
            for attributes, text in re.findall(r"<td([^>]*)>(.*?)</td>", line, re.S)
        ]
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """All variants, three depths, three lengths; NTK lacks one length, and all lack one depth at 256."""
    run = make_run(tmp_path_factory.mktemp("maps"), evaluated=False)
    scores = {label: {64: [1.0, 0.996, 0.75], 128: [0.5, 0.25, 0.004], 256: [0.0, None, 0.1]} for label in LABELS}
    del scores["RoPE + NTK"][128]
    rows = niah(scores) + niah({label: {64: [0.5, 0.5, 0.5]} for label in LABELS}, task="multi_key")
    write_rows(run, "niah", rows)
    return page_of(run)


def test_a_cell_says_its_score_its_count_and_where_it_is(page):
    cells = cells_of(maps_of(page)["RoPE + YaRN"])
    assert list(cells) == ["0%", "50%", "100%"]  # the beginning of the text is on top
    assert [[text for _, text, _ in cells[depth]] for depth in cells] == [
        ["100", "50", "0"],
        ["99", "25", "–"],  # 99.6% is not all
        ["75", "<1", "10"],  # and 0.4% is not none
    ]
    assert cells["50%"][1][2] == "2×, depth 50%: 25.0% of 8 needles"
    columns = re.search(r"<thead>.*?</thead>", maps_of(page)["RoPE + YaRN"]).group(0)
    assert re.findall(r"([\d]+×)<small>([\d,]+)</small>", columns) == [("1×", "64"), ("2×", "128"), ("4×", "256")]


def test_deeper_colours_are_higher_scores(page):
    cells = cells_of(maps_of(page)["RoPE"])
    by_score = sorted((float(hover.split(": ")[1].split("%")[0]), classes)
                      for row in cells.values() for classes, _, hover in row if "none" not in classes)  # fmt: skip
    steps = [int(re.search(r"h(\d+)", classes).group(1)) for _, classes in by_score]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == STEPS
    assert steps == [step(score / 100) for score, _ in by_score]


def test_what_was_not_measured_is_hatched_and_said(page):
    rope, ntk = cells_of(maps_of(page)["RoPE"]), cells_of(maps_of(page)["RoPE + NTK"])
    assert rope["50%"][2][0].split() == ["none"] and rope["50%"][2][2].endswith("not measured")
    assert [cells[1][1] for cells in ntk.values()] == ["–", "–", "–"]
    assert 'aria-label="not measured"' in maps_of(page)["RoPE + NTK"]
    assert "RoPE + NTK" in maps_of(page) and [cell[1] for cell in cells_of(maps_of(page)["RoPE"], "tfoot")["all"]]


def test_a_score_of_no_needles_is_no_score():
    depths = {"depth": [0, 50, 100], "score": [0.5, 0.5, None], "count": [0, 2, 2]}
    assert by_depth_of({"by_depth": depths}) == {(50.0, 50.0): (0.5, 2.0)}
    assert by_depth_of({"by_depth": {**depths, "count": None}}) == {(d, d): (0.5, None) for d in (0.0, 50.0)}


def test_the_training_length_is_framed_in_every_row(page):
    for table in maps_of(page).values():
        for part in ("tbody", "tfoot"):
            for cells in cells_of(table, part).values():
                assert ["trained" in classes for classes, _, _ in cells] == [True, False, False]


def test_rope_yarn_and_the_dropped_model_are_in_sight_the_others_folded(page):
    assert list(maps_of(page)) == ["RoPE", "RoPE + YaRN", "DroPE", "RoPE + NTK", "DroPE, paper's β"]
    section = page[page.index('id="depth"') : page.index('id="tasks"')]
    at = [section.index(table) for table in maps_of(page).values()]
    fold = section.index("<summary>The other variants</summary>")
    assert [place < fold for place in at] == [True, True, True, False, False]
    assert (
        fold < section.index("Needle in a haystack: 1 more") < section.index("Needle in a haystack: multi key, RoPE:")
    )


def test_without_a_scale_the_dropped_model_as_it_is(tmp_path):
    run = make_run(tmp_path, evaluated=False)
    write_rows(run, "niah", niah({label: {64: [1, 1, 1]} for label in ("DroPE", "RoPE + NTK", "RoPE")}))
    assert list(maps_of(page_of(run))) == ["RoPE", "DroPE", "RoPE + NTK"]


def test_symbolic_needles_have_maps_too_by_bins(tmp_path):
    run = make_run(tmp_path)
    path = run / "evaluation" / "needles.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    bins = {"depth": [0, 50, 100], "score": [0.25, 0.75], "count": [40, 40]}
    path.write_text("".join(json.dumps(one | {"by_depth": bins}) + "\n" for one in rows))
    page = page_of(run)
    maps = maps_of(page, "Needles in filler")
    assert list(maps)[:3] == ["RoPE", "RoPE + YaRN", "DroPE, β"]
    cells = cells_of(maps["RoPE"])
    assert {depth: row[0][1] for depth, row in cells.items()} == {"0–50%": "25", "50–100%": "75"}
    assert [cell[1] for cell in cells_of(maps["RoPE"], "tfoot")["all"]] == ["54", "29", "2.0", "0"]
    assert 'href="#depth"' in page and "Where in the sequence a needle stands" in page


def test_broken_depths_never_break_the_page(tmp_path):
    broken = [
        3,
        [],
        {"depth": [0, 50], "score": [1], "count": "x"},
        {"depth": [0, "x"], "score": [1, 1]},
        {"depth": [0, 1, 2, 3], "score": [1]},
        {"depth": None, "score": None},
        {"depth": [0, 50], "score": ["x", None], "count": [1, 1]},
    ]
    run = make_run(tmp_path, evaluated=False)
    write_rows(run, "niah", [row("niah", f"t{i}", "RoPE", 0.5, 64, by_depth=one) for i, one in enumerate(broken)])
    page = page_of(run)
    assert "Needle in a haystack" in outline(page).text and 'aria-label="Needle in a haystack: t2' in page
    assert page.count('<table class="heat"') == 1  # a score between two borders is one bin


def test_names_are_escaped(tmp_path):
    evil = '<script>alert(1)</script>"&'
    run = make_run(tmp_path, evaluated=False)
    rows = niah({f"{evil}label": {64: [1, 0, 1]}}, task=f"{evil}task")
    write_rows(run, "niah", [one | {"metric": f"{evil}metric"} for one in rows])
    page = page_of(run)
    assert "<script>alert" not in page and page.count("<script>") == 1
    assert f"{evil}label" in outline(page).text and f"{evil}task" in outline(page).text


@pytest.mark.parametrize(("anchors", "sign"), [(LIGHT, -1), (DARK, 1)])
def test_the_scale_goes_one_way_in_brightness_and_its_figures_are_readable(anchors, sign):
    steps = [step_colours(index, anchors) for index in range(STEPS + 1)]
    bright = [luminance(background) for background, _ in steps]
    assert all(sign * (b - a) > 0 for a, b in zip(bright, bright[1:], strict=False))
    assert max(bright) > 10 * min(bright)
    assert min(contrast(background, ink) for background, ink in steps) > 4.4  # WCAG asks for 4.5 of small text
    assert palette_css().count(f".h{STEPS}{{") == 2 and steps[STEPS][0] in palette_css()


@pytest.mark.parametrize("anchors", [LIGHT, DARK])
def test_the_scale_passes_through_its_anchors_at_even_steps(anchors):
    """Five anchors at 0, 5, 10, 15 and 20; step 2 is two fifths of the way from the first to the second."""
    assert tuple(step_colours(index, anchors)[0] for index in (0, 5, 10, 15, 20)) == anchors
    # From #eef2ef (238, 242, 239) to #c3e5d6 (195, 229, 214): 220.8, 236.8, 229.
    assert step_colours(2, LIGHT) == ("#ddede5", "#04100b") and step_colours(20, LIGHT)[1] == "#ffffff"
    assert [step(score) for score in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [0, 0, 10, 20, 20]
    assert re.findall(r'class="h(\d+)"', needle_legend()) == [str(index) for index in range(0, 21, 2)]


def test_contrast_of_a_nearly_black_grey():
    """19.8, as WebAIM's contrast checker has it: WCAG's luminance is linear below 0.04045."""
    assert round(contrast("#0a0a0a", "#ffffff"), 1) == round(contrast("#ffffff", "#0a0a0a"), 1) == 19.8


def test_only_none_and_all_are_0_and_100():
    assert [share_text(score) for score in (0, 0.0001, 0.014, 0.5, 0.991, 0.9999, 1)] == [
        "0", "<1", "1", "50", "99", "99", "100"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# The picture


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("picture"))
    rows = niah({label: {64: [1, None, 1], 128: [0.75, 0.75, 0.75]} for label in LABELS})
    write_rows(run, "niah", rows + niah({"RoPE": {64: [0.5, 0.5, 0.5]}}, task="multi_key"))
    return run


def test_the_picture_has_the_colours_of_the_page(run, tmp_path, capsys):
    path = tmp_path / "new" / "maps.png"
    assert main([str(run), f"--heat-map={path}"]) == 0
    assert "niah, standard" in capsys.readouterr().out and not (run / "report.html").exists()
    pixels = np.asarray(Image.open(path).convert("RGB"), int)
    assert pixels.shape[1] == 1368 and pixels.shape[0] < pixels.shape[1]

    def share(index: int) -> float:
        wanted = [int(step_colours(index)[0][i : i + 2], 16) for i in (1, 3, 5)]
        return (abs(pixels - np.array(wanted)).max(-1) <= 1).mean()

    # Two cells of six found all, three found three in four, one was not measured.
    assert share(STEPS) > 0.08 and share(step(0.75)) == pytest.approx(1.5 * share(STEPS), rel=0.1)
    assert max(share(step(score)) for score in (0, 0.25, 0.5)) < 0.02  # of the scale alone
    assert [path.name for path in path.parent.iterdir()] == ["maps.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heat-map=OUT.png", "--suite=nia"], "Did you mean 'niah'?"),
        (["--heat-map=OUT.png", "--task=multikey"], "Did you mean 'multi_key'?"),
        (["--heat-map=OUT.gif"], "End its name in .png"),
        (["--heat-map=RUN/run.json/maps.png"], "cannot be written"),
        (["--suite=niah"], "--heat-map=FILE"),
    ],
)
def test_a_picture_that_cannot_be_is_one_message(run, tmp_path, capsys, arguments, message):
    given = [text.replace("OUT", str(tmp_path / "maps")).replace("RUN", str(run)) for text in arguments]
    assert main([str(run), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_runs_apart_are_drawn_together_under_names_that_are_no_formulas(run, tmp_path, capsys):
    other = make_run(tmp_path, "$_$", evaluated=False)
    write_rows(other, "niah", niah({"DroPE": {64: [1, 1, 1]}}))
    table = needle_table(read_runs([run, other]))
    assert {"demo: RoPE", "demo: DroPE", "$_$: DroPE"} <= set(table.rows)
    make_run(tmp_path, "third")
    paths = [str(tmp_path / name) for name in ("third", "$_$")]
    assert main([*paths, f"--heat-map={tmp_path / 'maps.svg'}"]) == 0
    assert "$_$: DroPE" in re.sub("<!--|-->", "", (tmp_path / "maps.svg").read_text())


def test_a_run_without_depths_says_what_to_do(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main([str(run), f"--heat-map={tmp_path / 'maps.png'}"]) == 2
    assert "python -m pe_lab.evaluate --from=" in capsys.readouterr().err
