"""The report: numbers of records reach the page, and no bad file or name breaks it."""

from __future__ import annotations

import contextlib
import html
import json
import math
import re
from html.parser import HTMLParser

import pytest
from run_directories import FACTORS, WINNING, make_run

from pe_lab.errors import UserError
from pe_lab.page.document import build_page
from pe_lab.report import main
from pe_lab.results.runs import read_run, read_runs
from pe_lab.results.scores import build_tables


class Outline(HTMLParser):
    """Checks that tags nest, and collects the text and the attributes that could load something."""

    void = {"meta", "link", "br", "path", "line", "rect", "circle"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)
        self.links += [value for key, value in attrs if key in {"src", "href", "srcset", "data", "action"} and value]
        self.ids += [value for key, value in attrs if key == "id" and value]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def page_of(*directories) -> str:
    return build_page(read_runs(directories))


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory) -> str:
    """The page of the plain, complete, winning run."""
    return page_of(make_run(tmp_path_factory.mktemp("demo")))


def table_rows(page: str, suite: str) -> dict[str, list[str]]:
    """The body of the first table of a suite: row header -> text of its cells."""
    table = re.search(rf'<table class="scores" aria-label="{suite}.*?</table>', page, re.S).group(0)
    rows = {}
    for row in re.findall(r"<tr.*?</tr>", table.split("<tbody>")[1], re.S):
        header = html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", "", re.search(r"<th.*?</th>", row, re.S).group(0)))
        rows[header] = re.findall(r"<td.*?</td>", row, re.S)
    return rows


def test_the_fitted_scales_are_printed(demo_page):
    body = re.search(r'aria-label="Fitted beta".*?</table>', demo_page, re.S).group(0).split("<tbody>")[1]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in body.split("</tr>")[:-1]]
    scales = [round(1 + 0.2 * math.log(factor), 3) for factor in (2, 4, 8)]
    assert [row[0] for row in rows] == ["2× (128 tokens)", "4× (256 tokens)", "8× (512 tokens)"]
    assert [float(row[1]) for row in rows] == scales and all(float(row[2]) == 0.2 for row in rows)


def test_the_table_shows_the_rows_of_the_evaluation(demo_page):
    page = demo_page
    needles, perplexity = table_rows(page, "Needle accuracy"), table_rows(page, "Perplexity")
    assert list(needles) == [label for _, _, label in WINNING] == list(perplexity)
    assert page.count('aria-label="Perplexity of each variant at each length"') == 1
    assert [">40%<" in needles["RoPE + PI"][1], ">39%<" in needles["RoPE + YaRN"][2]] == [True, True]
    assert ">240<" in perplexity["RoPE"][2] and ">7.40<" in perplexity["DroPE, β"][3]
    # 0.30 +- 1.96 * sqrt(0.3 * 0.7 / 1024); exp(ln 8.1 +- 1.96 * 0.004)
    assert "27–33%" in needles["RoPE + YaRN"][3] and "8.04–8.16" in perplexity["RoPE"][0]
    assert "recalibrate/checkpoints/800" in needles["DroPE, β"][3]
    for column in range(4):
        trained = [label for label, cells in needles.items() if 'class="trained"' in cells[column]]
        assert trained == (list(needles) if column == 0 else [])


def test_the_best_of_a_column_is_marked_and_what_cannot_be_told_from_it(demo_page):
    rows = table_rows(demo_page, "Needle accuracy")
    at_8 = {label: re.findall("[●○]", cells[3]) for label, cells in rows.items()}
    assert at_8.pop("DroPE, β") == ["●"] and not any(at_8.values())
    assert re.findall("[●○]", rows["DroPE"][1]) == ["○"]  # 53% and 56% of 1024: within the noise
    at_1 = [re.findall("[●○]", cells[0]) for cells in rows.values()]
    assert at_1.count(["●"]) == 1 and at_1.count(["○"]) == len(rows) - 1


def test_an_interval_is_not_empty_where_every_answer_was_wrong(tmp_path):
    (cell,) = [t.cells["RoPE", 8.0] for t in build_tables("needles", [read_run(make_run(tmp_path))])]
    assert cell.value == 0 and 0 < cell.stderr < 0.005 and cell.interval == "0–0.4%"  # Wilson's interval of 0 of 1,024


def test_a_run_that_is_still_training_says_so(tmp_path):
    run = make_run(tmp_path, evaluated=False, status="running", phases=(("pretrain", "rope(base=10000)", 60),))
    with (run / "pretrain" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "tok')
    text = outline(page_of(run)).text
    assert "Nothing has been evaluated here yet" in text and "python -m pe_lab.evaluate --from=" in text
    assert "The last line of pretrain/metrics.jsonl was cut off" in text
    assert "Phase pretrain is not complete" in text and "Loss over training" in text


@pytest.mark.parametrize("content", ["", "[]", '{"phase": "pretr', '{"positional": 3, "mixture": [1], "lineage": {}}'])
def test_broken_files_never_break_the_page(tmp_path, content):
    run = make_run(tmp_path, phases=(("pretrain", "rope(base=10000)", 60),))
    (run / "pretrain" / "phase.json").write_text(content)
    (run / "run.json").write_text(content)
    odd = '{"suite": "needles", "length": "x", "accuracy": NaN, "label": 3}'
    rubbish = f'\n3\n{{"suite": "needles"}}\n{odd}\nnot json'
    for name in ("needles", "perplexity", "beta"):
        (run / "evaluation" / f"{name}.jsonl").open("a").write(rubbish)
    text = outline(page_of(run)).text
    assert "could not be read" in text and "Needle accuracy" in text


@pytest.mark.parametrize(
    "gone", ["run.json", "pretrain", "evaluation", "pretrain/metrics.jsonl", "pretrain/phase.json"]
)
def test_a_missing_piece_never_breaks_the_page(tmp_path, gone):
    import shutil

    run = make_run(tmp_path, phases=(("pretrain", "rope(base=10000)", 60),))
    shutil.rmtree(run / gone) if (run / gone).is_dir() else (run / gone).unlink()
    outline(page_of(run))


def test_chance_is_on_the_page(tmp_path):
    run = make_run(tmp_path)
    path = run / "evaluation" / "needles.jsonl"
    records = [json.loads(line) | {"guessing": 0.16} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = page_of(run)
    assert page.count("Chance: picking any value that was stated and not yet asked for finds 16%.") == 1


def test_up_to_the_training_length_a_scaling_is_marked_as_the_model_as_trained(demo_page):
    rows = table_rows(demo_page, "Needle accuracy")
    marked = {label: ["as trained<" in cell for cell in cells] for label, cells in rows.items()}
    changed = {"RoPE + PI", "RoPE + NTK", "RoPE + YaRN", "RoPE, cropped context", "DroPE, β"}
    for label, cells in marked.items():
        assert cells == [label in changed, False, False, False], label
    assert "nothing is changed up to the training length" in rows["RoPE + YaRN"][0]


@pytest.mark.slow
def test_scores_of_several_checkpoints_are_drawn_against_tokens_trained(tmp_path):
    run = make_run(tmp_path)
    for suite, name in (("needles", "accuracy"), ("perplexity", "nll")):
        path = run / "evaluation" / f"{suite}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        early = [r | {"step": 400, "checkpoint": f"{r['phase']}/checkpoints/400", name: r[name] / 2} for r in records]
        # Older records have no tokens_trained: step times the tokens of a step, 32 sequences of 64.
        known = [r | {"tokens_trained": r["step"] * 2048} if suite == "needles" else r for r in [*records, *early]]
        path.write_text("".join(json.dumps(record) + "\n" for record in known))
    page = page_of(run)
    assert table_rows(page, "Needle accuracy")["DroPE, β"][3].count("51%") == 2  # the tables have the last checkpoint
    for suite, early, late in (("Needle accuracy", 0.255, 0.51), ("Perplexity", 7.4**0.5, 7.4)):
        title = f"{suite} by tokens trained in recalibrate, sequences of 8× the training length (512 tokens)"
        chart = re.search(rf'data-chart="([^"]*)"><div class="chart-title">{re.escape(title)}<', page).group(1)
        data = {s["n"]: s["p"] for s in json.loads(html.unescape(chart))["series"]}
        assert [point[:2] for point in data["DroPE, β"]] == [
            [400 * 2048, pytest.approx(early, rel=1e-5)],
            [800 * 2048, pytest.approx(late, rel=1e-5)],
        ]
    assert 'href="#history"' in page and 'id="history"' not in page_of(make_run(tmp_path, "plain"))


def test_a_long_label_is_short_on_the_page_and_whole_on_hover(tmp_path):
    long = "RoPE (" + ", ".join(f"layer {n}: rope(base=10000) / window 256" for n in range(60)) + ")"
    run = make_run(tmp_path, methods=WINNING | {("RoPE", "half", long): WINNING["RoPE", "YaRN", "RoPE + YaRN"]})
    page = page_of(run)
    assert len(long) > 2000 and max(map(len, outline(page).words)) < 2000
    cells = table_rows(page, "Needle accuracy")
    shown = next(label for label in cells if label.startswith("RoPE (layer 0"))
    assert len(shown) <= 48 and "…" in shown and shown.endswith("256)")
    assert f'title="{long}"' in page


def test_unknown_suites_variants_and_labels_are_shown(tmp_path):
    odd = {("Mamba", "whirl", "Mamba, whirled"): ((0.1, 0.2, 0.3, 0.4), (9.0, 9.0, 9.0, 9.0))}
    run = make_run(tmp_path, methods=WINNING | odd)
    rows = [{"suite": "puzzles", "label": "RoPE", "factor": f, "length": 64 * f, "score": 0.1234} for f in FACTORS]
    (run / "evaluation" / "puzzles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "evaluation" / "weird.jsonl").write_text('{"suite": "weird", "colour": "blue", "n": 7}\n')
    page = page_of(run)
    text = outline(page).text
    assert "Mamba, whirled" in table_rows(page, "Needle accuracy")
    assert "Puzzles" in text and "0.12" in text and "Weird" in text and "blue" in text


def test_the_latest_checkpoint_of_a_variant_counts(tmp_path):
    run = make_run(tmp_path)
    path = run / "evaluation" / "needles.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    older = {**first, "step": 100, "accuracy": 0.99}
    again = {**first, "accuracy": 0.11}
    with path.open("a") as file:
        file.write(json.dumps(again) + "\n" + json.dumps(older) + "\n")
    (table,) = build_tables("needles", [read_run(run)])
    assert table.cells["RoPE", 1.0].value == 0.11


def test_names_are_escaped(tmp_path):
    evil = '<script>alert(1)</script>"&'
    methods = WINNING | {("X", "y", f"{evil}!"): ((0.1, 0.2, 0.3, 0.4), (9.0, 9.0, 9.0, 9.0))}
    run = make_run(tmp_path, evil, directory="evil", methods=methods, mixture=((evil, 1.0),))
    other = make_run(tmp_path, "other", evaluated=False)
    for page in (page_of(run), page_of(run, other)):
        assert "<script>alert" not in page and page.count("<script>") == 1
        assert evil in outline(page).text


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    runs = make_run(tmp_path), make_run(tmp_path, "second")
    for page in (page_of(runs[0]), page_of(*runs)):
        found = outline(page)
        assert found.links and all(link.startswith("#") or link == "data:," for link in found.links)
        assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
        assert len(found.ids) == len(set(found.ids))
        assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", page)
        assert len(page.encode()) < 1_500_000


def test_the_reader_is_told_whether_needles_were_trained_on(tmp_path, demo_page):
    assert "synthetic needles were 30% of all training data" in demo_page
    without = make_run(tmp_path, "without", mixture=(("stdlib", 1.0),))
    assert "No synthetic needles were in the training mixture" in page_of(without)


def test_the_reader_is_told_of_the_extra_tokens(demo_page):
    assert "has read 27% more training tokens" in demo_page  # 160 / 600 steps


def test_what_was_run_is_there(demo_page):
    assert "<dt>Device</dt><dd>Intel Xeon</dd>" in demo_page
    text = outline(demo_page).text
    for part in (
        "221,440 parameters",
        "jax 0.10.2",
        "Intel Xeon",
        "sentencepiece 512",
        "70% stdlib and 30% needles",
        "python -m pe_lab.train --config=configs/drope_laptop.py",
        "rope(base=10000)",
        "1.6M tokens",
        "1 min 8 s",
        "1.416",
        "nats per token",
        "The whole config",
        "drop",
        "pretrain/checkpoints/600",
    ):
        assert part in text, part


def test_all_phases_are_on_one_axis_with_the_jump_at_the_drop(demo_page):
    page = demo_page
    chart = re.search(r'<figure[^>]*data-chart="([^"]*)"><div class="chart-title">Loss over', page).group(1)
    data = {s["n"]: s["p"] for s in json.loads(html.unescape(chart))["series"]}
    border = 600 * 32 * 64
    assert data["pretrain"][-1][0] == border < data["recalibrate"][0][0] <= border + 2 * 32 * 64
    assert data["recalibrate"][0][1] > data["pretrain"][-1][1] + 1.5
    assert {x > border for x, *_ in data["validation"]} == {True, False}
    assert "the loss jumps from 2." in page and "recalibrate starts" in page


def test_each_change_of_encoding_is_said_to_jump_or_not(tmp_path):
    phases = (("pretrain", "rope(base=10000)", 60), ("slopes", "alibi", 40), ("drop", "nope", 40))
    run = make_run(tmp_path, phases=phases, evaluated=False)
    for phase, losses in (("pretrain", [3.0] * 60), ("slopes", [2.5] * 40), ("drop", [4.0] * 12 + [2.0] * 28)):
        lines = [json.dumps({"step": n, "tokens": n * 2048, "loss": loss}) for n, loss in enumerate(losses, 1)]
        (run / phase / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said = "At slopes the loss does not jump. Where drop starts, the loss jumps from 2.50 to 4.00 and is back within "
    assert said in page_of(run)


def test_a_model_trained_without_encoding_has_the_colour_of_nope(tmp_path):
    run = make_run(tmp_path, evaluated=False, phases=(("pretrain", "nope", 50),))
    info = json.loads((run / "pretrain" / "phase.json").read_text())
    info["lineage"] = [{"what": "initialized at random, seed 0"}, {"what": "trained 50 steps of 'pretrain' with nope"}]
    (run / "pretrain" / "phase.json").write_text(json.dumps(info))
    assert "--at:var(--c-nope)" in page_of(run)
    info["lineage"].insert(1, {"what": "rope(base=10000) -> nope on layers 0-2"})
    (run / "pretrain" / "phase.json").write_text(json.dumps(info))
    assert "--at:var(--c-drope)" in page_of(run)


def test_phases_whose_tokens_count_on_are_not_shifted_twice(tmp_path):
    run = make_run(tmp_path, phases=(("a", "rope(base=10000)", 50), ("b", "nope", 50)))
    path = run / "b" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "tokens": row["tokens"] + 50 * 2048}) + "\n" for row in rows))
    chart = re.search(r'data-chart="([^"]*)"><div class="chart-title">Loss over', page_of(run)).group(1)
    data = {s["n"]: s["p"] for s in json.loads(html.unescape(chart))["series"]}
    assert data["b"][0][0] == 51 * 2048 and data["b"][-1][0] == 100 * 2048
    assert page_of(run).count(">b starts<") == 4  # losses and losses by source, wide and narrow


def test_a_phase_begins_where_the_last_one_ended_not_at_its_last_validation(tmp_path):
    run = make_run(tmp_path, phases=(("a", "rope(base=10000)", 50), ("b", "nope", 50)))
    path = run / "a" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[30:]:
        row.pop("validation_loss", None)
    assert any("validation_loss" in row for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = re.search(r'data-chart="([^"]*)"><div class="chart-title">Loss over', page_of(run)).group(1)
    data = {s["n"]: s["p"] for s in json.loads(html.unescape(chart))["series"]}
    assert data["b"][0][0] == 51 * 2048


def test_the_drawn_frequencies_are_those_of_the_schemes(demo_page):
    page = demo_page
    chart = re.search(r'data-chart="([^"]*)"><div class="chart-title">Stretched 4×', page).group(1)
    ratio = {s["n"]: [y for _, y, *_ in s["p"]] for s in json.loads(html.unescape(chart))["series"]}
    assert ratio["PI"] == [0.25] * 16 and ratio["RoPE"] == [1.0] * 16 and ratio["DroPE"] == [0.0] * 16
    assert ratio["NTK"][0] == 1 and ratio["NTK"][-1] == pytest.approx(0.25) and ratio["YaRN"][-1] == 0.25
    assert ratio["NTK"][5] == pytest.approx(4 ** (-10 / 30), abs=1e-5)  # w'/w = s^(-2i/(d-2))
    circles = re.search(r'aria-label="Stretched 4×[^"]*".*?</svg>', page, re.S).group(0).count("<circle")
    assert circles == 3 * 16  # on the curves of PI, NTK and YaRN, not on the straight lines


def test_slow_frequencies_are_marked_where_there_are_some(demo_page, tmp_path):
    assert demo_page.count("&lt; 1 rotation in training") == 3  # at 2, 4 and 8 times, a chart each
    # Pairs 0 to 4 make a whole turn within 64 tokens: 64 / 2 pi = 10.2 > 10000 ** (i / 16) up to i = 4.
    chart = re.search(r'aria-label="Stretched 4×.*?</svg>', demo_page, re.S).group(0)
    left, right, _, _, first, last, *_ = json.loads(re.search(r'data-plot="([^"]*)"', chart).group(1))
    at = float(re.search(r'<line x1="([^"]*)"[^>]*class="mark"', chart).group(1))
    assert first + (at - left) / (right - left) * (last - first) == pytest.approx(4.5, abs=0.01)
    fast = make_run(tmp_path, evaluated=False, phases=(("pretrain", "rope(base=2)", 20),))
    assert "Stretched" in (page := page_of(fast)) and "1 rotation in training" not in page


@pytest.mark.slow
def test_several_runs_are_compared_and_each_has_its_section(tmp_path, capsys):
    runs = [make_run(tmp_path / "runs", name) for name in ("one", "two")]
    assert main([str(run) for run in runs]) == 0
    page = (tmp_path / "runs" / "report.html").read_text()
    rows = table_rows(page, "Needle accuracy")
    assert {"one: RoPE", "two: RoPE", "one: DroPE, β", "two: DroPE, β"} <= set(rows)
    assert page.count('<section class="run" ') == 2 and "2 of the 2 runs that drop" in page
    assert main([str(path) for path in (tmp_path / "runs").iterdir()]) == 0  # runs/*, the report included


def test_rope_and_drope_in_runs_apart_are_still_judged(tmp_path):
    phases = (("pretrain", "rope(base=10000)", 60),)
    for model in ("RoPE", "DroPE"):
        make_run(tmp_path, model, phases=phases, methods={k: v for k, v in WINNING.items() if k[0] == model})
    text = outline(page_of(tmp_path / "RoPE", tmp_path / "DroPE")).text
    assert "Across runs: Without its positional encoding" in text and "RoPE: RoPE + YaRN) 30%" in text


def test_a_child_made_by_surgery_is_a_run(tmp_path):
    folder = tmp_path / "dropped"
    folder.mkdir()
    lineage = [{"id": "a1", "what": "pretrain", "path": "runs/rope/pretrain/checkpoints/3000", "step": 3000}]
    info = {
        "phase": "dropped",
        "steps": 0,
        "sequence_length": 64,
        "lineage": lineage,
        "status": "complete",
        "positional": [{"layers": "0-2", "encoding": "nope", "window": None}],
    }
    (folder / "phase.json").write_text(json.dumps(info))
    text = outline(page_of(folder)).text
    assert "dropped" in text and "runs/rope/pretrain/checkpoints/3000" in text and "metrics.jsonl" not in text


def test_the_command_writes_where_it_should(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main([str(run)]) == 0 and (run / "report.html").exists()
    assert main([str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")
    assert "Without its positional encoding" in capsys.readouterr().out
    assert not [path for path in run.rglob(".report*")]


@pytest.mark.parametrize("make", ["absent", "empty", "file", "page"])
def test_what_is_no_run_is_refused_with_one_line(tmp_path, capsys, make):
    path = tmp_path / ("report.html" if make == "page" else "thing")
    if make == "empty":
        path.mkdir()
    elif make != "absent":
        path.write_text("x")
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "run" in error
    assert [p.name for p in tmp_path.iterdir()] == ([] if make == "absent" else [path.name])


def test_beside_runs_what_is_no_run_is_left_out_with_a_line(tmp_path, capsys):
    run = make_run(tmp_path, evaluated=False, phases=(("pretrain", "nope", 3),))
    converted = tmp_path / "converted"
    (converted / "params").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("x")
    given = [str(path) for path in (converted, run, tmp_path / "notes.txt")]
    assert main(given) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Left out: ")]
    assert [line.partition(" is ")[0] for line in lines] == [f"Left out: {path}" for path in (given[0], given[2])]
    assert "run.json" in lines[0] and "pe_lab report · run" in (run / "report.html").read_text()
    assert main([given[0], given[2]]) == 2 and "is not a run directory" in capsys.readouterr().err
    assert main([str(run), str(tmp_path / "mistyped")]) == 2 and "does not exist" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, capsys):
    run = make_run(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([str(run), "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_training_length_is_marked_where_it_is_in_sight(tmp_path):
    run = make_run(tmp_path)
    path = run / "evaluation" / "needles.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for edges, marked in (([32, 96, 160], True), ([40, 96, 160], False), ([16, 32, 96], True), ([16, 32, 95], False)):
        by = {"edges": edges, "accuracy": [0.5, 0.25], "count": [64, 64]}  # points in the middle of a bin
        path.write_text("".join(json.dumps(record | {"accuracy_by_distance": by}) + "\n" for record in records))
        charts = re.findall(r'<div class="chart-title">Needle accuracy by distance.*?</figure>', page_of(run), re.S)
        assert [">training length<" in chart for chart in charts] == [marked] * len(charts) and charts


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    make_run(tmp_path, "same", directory="a", evaluated=False)
    make_run(tmp_path, "same", directory="b", evaluated=False)
    assert [run.name for run in read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "a"])] == ["a", "b"]
    with pytest.raises(UserError):
        read_run(tmp_path / "none")


def test_every_variant_that_can_be_measured_is_explained():
    """Every encoding of the registry, alone, in a mix and as an addition, under every method: no sentence is empty."""
    from pe_lab.evaluation.variants import model_name, possible_variants
    from pe_lab.page.variants import DEFINITIONS, definition
    from pe_lab.positional import NoPE, PartialRope, Rope, Yarn
    from pe_lab.positional.codec import ENCODINGS
    from pe_lab.positional.layers import Layer
    from pe_lab.positional.registry import is_external
    from pe_lab.results.variants import KINDS, VARIANTS

    assert set(DEFINITIONS) == set(KINDS)
    made = [Rope(fraction=0.25), Rope(scaling=Yarn(4.0, 64)), PartialRope(fraction=0.5)]
    for kind in ENCODINGS.values():
        try:
            made += [] if is_external(kind) else [kind()]
        except TypeError:  # `function`, whose encodings have names of their own
            continue
    assert len(made) > 20
    stacks = [[Layer(one)] for one in made] + [[Layer(one), Layer(NoPE())] for one in made]
    for one in made:
        with contextlib.suppress(UserError):  # it can only be the layer's encoding
            stacks.append([Layer(Rope(), extras=(one,))])
    for layers in stacks:
        model = model_name(layers)
        for method in (*possible_variants(layers, 64), "alibi"):
            words = definition({"model": model, "variant": method})
            assert len(words) > 40 and "of the run's own code" not in words, (model, method)
            assert ("another encoding" in words) == (method not in VARIANTS)
    assert definition({"model": "Mine", "variant": "as trained"}).startswith(
        "The encoding Mine, of the run's own code."
    )
    both = definition({"model": "RoPE/NoPE (YaRN 4)", "variant": "PI"})
    assert both.startswith("Its layers have different encodings. RoPE: Rotary") and "(YaRN 4)" in both
    assert both.endswith("(position interpolation).")


@pytest.mark.parametrize("step", [1e23, 1e308, -3, "NaN", True, "7", 10**400])
def test_records_of_absurd_steps_are_set_aside_with_a_notice(tmp_path, step):
    run = make_run(tmp_path, phases=(("pretrain", "rope(base=10000)", 20),))
    line = json.dumps({"step": step, "tokens": 9, "loss": 1e308}).replace('"NaN"', "NaN")
    with (run / "pretrain" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps({"step": 21, "tokens": -1, "loss": 2.0}) + "\n")
    text = outline(page_of(run)).text
    assert "pretrain/metrics.jsonl: 2 record(s) whose step or tokens are no count are left out (first: step" in text
    (phase,) = read_run(run).phases
    assert phase.steps_done == 20 and max(y for _, y in phase.series("loss")) < 100
