"""Suites that ask with prompts, on the page: scores in variant-by-task tables, averages, lengths, and several runs."""

from __future__ import annotations

import html
import json
import math
import re

import pytest
from prompted_rows import METHODS, all_suites, row, write_rows
from run_directories import make_run
from test_report import outline, page_of

from pe_lab.evaluation.suites import AVERAGED
from pe_lab.page.charts import score_chart
from pe_lab.page.run_section import work_out
from pe_lab.results.runs import read_run
from pe_lab.results.scores import averages, build_tables, by_sequence_length, measure
from pe_lab.results.variants import kind


def plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", markup)).split())


def table_of(page: str, label: str) -> tuple[list[str], dict[str, list[str]]]:
    """Heads and rows (row header -> markup of its cells) of the first table whose name begins so."""
    table = re.search(rf'<table [^>]*aria-label="{re.escape(html.escape(label))}.*?</table>', page, re.S).group(0)
    head, body = table.split("<tbody>")
    rows = {}
    for line in re.findall(r"<tr.*?</tr>", body, re.S):
        rows[plain(re.search(r"<th.*?</th>", line, re.S).group(0))] = re.findall(r"<td.*?</td>", line, re.S)
    return [plain(cell) for cell in re.findall(r"<th .*?</th>", head, re.S)], rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with rows of every suite, beside the symbolic needles and perplexity."""
    run = make_run(tmp_path_factory.mktemp("whole"))
    all_suites(run)
    return run


@pytest.fixture(scope="module")
def page(whole) -> str:
    return page_of(whole)


def found_in(directory, suite: str):
    return build_tables(suite, [read_run(directory)])


def test_a_table_has_tasks_in_columns_variants_in_rows_at_the_longest_length_first(page):
    heads, rows = table_of(page, "Needle in a haystack at")
    assert heads == ["Variant", "standard", "multi query"] and list(rows) == list(METHODS)
    assert 'aria-label="Needle in a haystack at 4× (256 tokens): each variant on each task"' in page
    first = page.index("Needle in a haystack at 4×")
    assert first < page.index("Needle in a haystack at the other lengths") < page.index("Needle in a haystack at 2×")
    at_256 = rows["RoPE + YaRN"][0]  # 0.4 * 128 / 256, and its interval as the row gives it
    assert ">20%<" in at_256 and ">12–28%<" in at_256 and ">all: 4.0%<" in at_256
    assert "100 answers" in at_256 and "pretrain/checkpoints/800" in at_256


def test_the_best_of_a_task_is_marked_and_what_cannot_be_told_from_it(tmp_path):
    scores = {"RoPE": (0.2, 0.9), "RoPE + YaRN": (0.45, 0.5), "DroPE": (0.5, 0.3)}
    write_rows(tmp_path, "niah", (
        row("niah", task, label, scores[label][i], 128) for i, task in enumerate(("a", "b")) for label in scores
    ))  # fmt: skip
    _, rows = table_of(page_of(tmp_path), "Needle in a haystack at")
    assert {label: [re.findall("[●○]", cell) for cell in cells] for label, cells in rows.items()} == {
        "RoPE": [[], ["●"]],
        "RoPE + YaRN": [["○"], []],
        "DroPE": [["●"], []],
    }
    heats = [[float(re.search(r"--heat:([\d.]+)", cell).group(1)) for cell in cells] for cells in rows.values()]
    assert heats == [[0.2, 0.9], [0.45, 0.5], [0.5, 0.3]]


def test_prompted_rows_are_in_the_new_tables_alone(page):
    assert len(re.findall(r'aria-label="RULER at 4× \(256', page)) == 2  # a table and the box it scrolls in
    assert "Ruler" not in page and "string match" not in page
    results = page[page.index('id="results"') : page.index('id="depth"')]
    assert "niah" not in results and "LongBench" not in results and "arc" not in results
    sections = re.findall(r'<h2 id="(\w+)">', page)
    assert sections[:4] == ["results", "depth", "tasks", "position"]
    suites = re.findall(r"<h3>(.*?)</h3>", page[page.index('id="tasks"') : page.index('id="position"')])
    assert suites == ["Needle in a haystack", "RULER", "LongBench", "Many-shot learning", "lm-evaluation-harness"]


def test_the_verdict_is_as_without_the_tasks(whole, tmp_path):
    assert work_out(read_run(whole)).verdict == work_out(read_run(make_run(tmp_path))).verdict


def test_an_average_is_of_a_variant_that_has_all_tasks(tmp_path):
    rows = [row("ruler", f"t{i}", "RoPE", i / 13, 128) for i in range(13)]
    rows += [row("ruler", f"t{i}", "DroPE", 0.5, 128) for i in range(12)]
    write_rows(tmp_path, "ruler", rows)
    average = averages(found_in(tmp_path, "ruler"), AVERAGED)
    assert average.source == "average" and list(average.rows) == ["RoPE"]
    (cell,) = average.cells.values()
    assert cell.value == pytest.approx(6 / 13)
    # Errors of 13 independent means: sqrt(sum of variances) / 13. The one of 0 of 100 is Agresti and Coull's.
    variances = [p * (1 - p) / 100 for p in (i / 13 for i in range(1, 13))] + [2 / 104 * 102 / 104 / 104]
    assert cell.stderr == pytest.approx(math.sqrt(sum(variances)) / 13)
    heads, table = table_of(page_of(tmp_path), "RULER at")
    assert heads[:3] == ["Variant", "average", "t0"] and ">46%<" in table["RoPE"][0] and "–" in table["DroPE"][0]


def test_a_length_of_an_earlier_checkpoint_alone_is_no_column(tmp_path):
    tasks = ("standard", "multi_key")
    rows = [row("niah", task, "RoPE", 0.25, 128, step=400) for task in tasks]
    rows += [row("niah", task, "RoPE", 0.5, 64) for task in tasks]
    write_rows(tmp_path, "niah", rows)
    assert [column.length for table in found_in(tmp_path, "niah") for column in table.columns] == [64, 64]
    assert page_of(tmp_path).count(">50%<") >= 2


def test_an_average_of_some_tasks_says_of_how_many(whole):
    assert averages(found_in(whole, "ruler"), AVERAGED).source == "mean of 5 of 13 tasks"
    assert averages(found_in(whole, "longbench"), AVERAGED).source == "mean of 2 of 21 tasks"
    assert averages(found_in(whole, "lm_eval"), AVERAGED).source == "mean of 2 tasks"  # not of a perplexity
    assert averages(found_in(whole, "niah"), AVERAGED) is None


def test_the_harness_table_has_its_standard_errors_and_knows_that_less_perplexity_is_better(page):
    heads, rows = table_of(page, "lm-evaluation-harness:")
    assert heads == ["Task", "RoPE", "DroPE"]
    assert list(rows) == ["arc easy acc ↑", "piqa acc ↑", "wikitext word perplexity ↓", "mean of 2 tasks"]
    assert ">40%<" in rows["arc easy acc ↑"][0] and ">±4.9<" in rows["arc easy acc ↑"][0]  # sqrt(.4 * .6 / 100)
    assert ">22.0<" in rows["wikitext word perplexity ↓"][0] and ">50%<" in rows["mean of 2 tasks"][1]


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte"])
def test_less_is_better_where_the_row_says_so(tmp_path, metric):
    write_rows(tmp_path, "lm_eval", (
        row("lm_eval", "wikitext", label, score, metric=metric, higher_is_better=False, stderr=0.2)
        for label, score in (("RoPE", 31.0), ("DroPE", 22.5))
    ))  # fmt: skip
    (table,) = found_in(tmp_path, "lm_eval")
    assert table.best(table.columns[0])[0] == "DroPE" and not table.higher_is_better
    assert table.cells["DroPE", 0.0].interval == "22.1–22.9"


def test_scores_by_the_length_of_the_sequence(page, whole):
    heads, rows = table_of(page, "LongBench, musique")
    assert heads == ["Variant", "0–4K 0–64×", "4–8K 64–128×", "8–16K 128–256×"]
    assert ">40%<" in rows["DroPE, paper's β"][0] and ">10–50%<" in rows["DroPE, paper's β"][0]
    assert ">20%<" in rows["DroPE, paper's β"][2] and "9 answers" in rows["DroPE, paper's β"][2]
    assert "3 of them to sequences that were cut to fit" in table_of(page, "LongBench:")[1]["RoPE"][1]
    bucketed = by_sequence_length(found_in(whole, "longbench")[0])
    assert [column.key for column in bucketed.columns] == [4096, 8192, 16384]


def test_a_bucket_without_sequences_is_not_measured(tmp_path):
    lengths = {"edges": [0, 1000, 4096], "score": [0.5, None], "low": [0.4, None], "high": [0.6, None], "count": [9, 0]}
    write_rows(tmp_path, "longbench", [row("longbench", "lcc", "RoPE", 0.5, by_length=lengths)])
    bucketed = by_sequence_length(found_in(tmp_path, "longbench")[0])
    assert [column.title for column in bucketed.columns] == ["0–1,000"]


def test_charts_have_the_scores_and_bars_of_their_intervals(page):
    figure = re.search(r'<figure[^>]*data-chart="([^"]*)"><div class="chart-title">RULER, vt<.*?</figure>', page, re.S)
    series = {one["n"]: one["p"] for one in json.loads(html.unescape(figure.group(1)))["series"]}
    assert [point[:2] for point in series["RoPE + YaRN"]] == [[1, 0.9], [2, 0.4], [4, 0.2]]
    bars = re.findall(
        r'<line x1="([\d.]+)" x2="([\d.]+)" y1="([\d.]+)" y2="([\d.]+)" [^>]*stroke-opacity', figure.group(0)
    )
    assert len(bars) == 5 * 3 and all(x == other and float(low) > float(high) for x, other, low, high in bars)
    # The axis ends 4% above the highest bar, 0.9 and two standard errors of 0.03.
    ends = [json.loads(plot)[-2] for plot in re.findall(r'data-plot="([^"]*)"', figure.group(0))]
    assert ends == [pytest.approx(1.04 * 0.96)]


def test_a_run_with_tasks_alone_says_what_was_measured(tmp_path):
    run = make_run(tmp_path, evaluated=False)
    write_rows(run, "niah", [row("niah", "standard", "RoPE", 0.5, length) for length in (64, 128)])
    text = outline(page_of(run)).text
    assert "Measured here: Needle in a haystack. Perplexity and symbolic needles" in text
    assert "Nothing has been evaluated" not in text and "To measure it" not in text
    heads, rows = table_of(page_of(run), "Needle in a haystack, standard of each variant")  # one task: by length
    assert heads[1:] == ["trained 1× 64", "2× 128"] and ">50%<" in rows["RoPE"][1]


def test_several_runs_are_compared_task_by_task(tmp_path):
    paths = []
    for name, score in (("one", 0.25), ("two", 0.75)):
        paths.append(make_run(tmp_path, name, evaluated=False))
        write_rows(paths[-1], "niah", (
            row("niah", task, label, score, 128, run=name) for task in ("a", "b") for label in ("RoPE", "DroPE")
        ))  # fmt: skip
    page = page_of(*paths)
    heads, rows = table_of(page[page.index('id="compare"') :], "Needle in a haystack at")
    assert heads == ["Variant", "a", "b"] and set(rows) == {"one: RoPE", "two: RoPE", "one: DroPE", "two: DroPE"}
    assert ">75%<" in rows["two: DroPE"][1] and ">25%<" in rows["one: RoPE"][0]
    outline(page)


def test_words_are_explained_where_they_occur(page, tmp_path):
    words = page[page.index('id="read"') :]
    for term in ("depth", "needle in a haystack", "fraction found, all found", "RULER", "LongBench"):
        assert f"<dt>{term}</dt>" in words
    plain_page = page_of(make_run(tmp_path))
    assert "<dt>RULER</dt>" not in plain_page and "<dt>depth</dt>" not in plain_page and 'id="tasks"' not in plain_page


@pytest.mark.parametrize(
    "more",
    [
        {"score": None},
        {"score": "N/A", "stderr": "N/A"},
        {"score": math.nan},
        {"low": "x", "high": [], "stderr": {}},
        {"metric": "", "scores": 3, "samples": "x", "truncated": "y"},
        {"scores": {"all_found": "x", "other": None}},
        {"by_length": {"edges": [0, 1], "score": ["x"]}, "length": None, "factor": None},
        {"by_length": {"edges": [0, "x"], "score": [1]}, "by_depth": 1},
        {"source": None, "label": None, "length": "x", "factor": None},
        {"length": -5, "factor": 0},
        {"higher_is_better": False, "metric": "word_perplexity", "score": 0},
        {"higher_is_better": None, "metric": "mcc", "score": -0.25},
    ],
)
def test_odd_rows_never_break_the_page(tmp_path, more):
    for suite in ("niah", "lm_eval", "longbench"):
        good = row(suite, "task", "RoPE", 0.5, 64)
        write_rows(tmp_path, suite, [good, good | more, good | {"source": "other"} | more])
    assert "RoPE" in outline(page_of(tmp_path)).text


@pytest.mark.parametrize(
    ("suite", "metric", "score", "shown"),
    [
        ("niah", "fraction_found", 0.5, "50%"),
        ("longbench", "rouge_l", 0.213, "21%"),
        ("lm_eval", "acc_norm", 0.5, "50%"),
        ("lm_eval", "bleu", 0.5, "0.50"),  # of 100
        ("lm_eval", "mcc", -0.1, "-0.10"),
        ("lm_eval", "rougeL", 32.1, "32.1"),
    ],
)
def test_a_share_is_shown_in_per_cent_and_nothing_else(suite, metric, score, shown):
    assert measure(row(suite, "t", "RoPE", score, metric=metric)).shown == shown


def test_all_wrong_is_not_certain():
    given = measure(row("niah", "t", "RoPE", 0.0, 64, low=0.0, high=0.06))
    assert given.interval == "0–6.0%" and given.stderr > 0
    assert measure(row("niah", "t", "RoPE", 0.0, 64, low=None, high=None)).interval == "0–3.7%"  # Wilson's


def test_a_scaling_with_options_is_of_its_kind():
    assert kind({"model": "RoPE", "variant": "yarn:factor=2"}) == "YaRN"
    assert kind({"model": "RoPE", "variant": "longrope:factor=2"}) == ""
    assert kind({"model": "DroPE", "variant": "yarn:factor=2"}) == ""


@pytest.mark.parametrize(
    ("suite", "name", "other"), [("needles", "accuracy", "score"), ("recall", "score", "accuracy")]
)
def test_the_axis_of_shares_is_accuracy_for_needles_and_score_for_others(tmp_path, suite, name, other):
    write_rows(tmp_path, suite, (
        {"suite": suite, "label": "RoPE", "length": 64 * n, "factor": n, "accuracy": 0.5} for n in (1, 2)
    ))  # fmt: skip
    chart = str(score_chart(found_in(tmp_path, suite)[0], {}, "A title"))
    assert f">{name}<" in chart and f">{other}<" not in chart


@pytest.mark.parametrize("lengths", [(64,), (64, 128)])
def test_one_task_is_in_a_column_at_one_length_and_by_length_at_several(tmp_path, lengths):
    write_rows(tmp_path, "niah", [row("niah", "a", "RoPE", 0.5, length) for length in lengths])
    page = page_of(tmp_path)
    assert ("each variant on each task" in page) == (len(lengths) == 1)
    assert ("Needle in a haystack, a of each variant at each length" in page) == (len(lengths) == 2)


def test_a_length_that_is_no_multiple_is_in_tokens(tmp_path):
    write_rows(tmp_path, "niah", [row("niah", "a", "RoPE", 0.5, 2048, factor=None)])
    assert 'aria-label="Needle in a haystack at 2,048 tokens: each variant on each task"' in page_of(tmp_path)


def test_the_ticks_of_a_chart_by_sequence_length_are_where_its_buckets_meet(tmp_path):
    lengths = {"edges": [0, 1000, 4096, 16_384], "score": [0.5, 0.4, 0.3]}
    write_rows(tmp_path, "longbench", [row("longbench", "lcc", "RoPE", 0.5, by_length=lengths)])
    chart = re.search(
        r'<div class="chart-title">lcc by the length of the sequence<.*?</figure>', page_of(tmp_path), re.S
    )
    for tick in ("1,000", "4K", "tokens of the sequence (log scale)"):
        assert f">{tick}<" in chart.group(0), tick


def test_runs_with_different_tokenizers_are_not_compared_by_their_losses(tmp_path):
    paths = [make_run(tmp_path, name, evaluated=False, phases=(("a", "nope", 5),)) for name in ("one", "two")]
    said = "These runs cut text with different tokenizers"
    assert said not in page_of(*paths)
    info = json.loads((paths[1] / "a" / "phase.json").read_text()) | {"tokenizer": "bytes"}
    (paths[1] / "a" / "phase.json").write_text(json.dumps(info))
    assert said in page_of(*paths)
