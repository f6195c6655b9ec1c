"""What an evaluation prints: titles whole, intervals, the best in bold, needles by depth in colour."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from prompted_rows import METHODS, by_depth, row  # noqa: E402
from rich.console import Console  # noqa: E402

from pe_lab.evaluation.tables import (  # noqa: E402
    COLOURS,
    describe_cell,
    heat_cell,
    octave_perplexities,
    print_by_position,
    print_line,
    print_records,
    three_digits,
)
from pe_lab.results.scores import measure
from pe_lab.results.statistics import wilson


def printed(rows, width: int = 300, show=print_records) -> str:
    """As in a file."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(rows, console)
    return console.file.getvalue()


def coloured(rows, width: int = 300) -> str:
    """As in a terminal that has all colours."""
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=True, color_system="truecolor")
    print_records(rows, console)
    return console.file.getvalue()


def measured(suite: str, label: str, value: float | None, length: int, **more) -> dict:
    """A row of perplexity or symbolic needles."""
    name = "perplexity" if suite == "perplexity" else "accuracy"
    kept = {k: v for k, v in row(suite, "stdlib", label, 0.5, length).items() if k not in ("score", "low", "high")}
    return kept | {name: value, "stderr": 0.02, "windows": 50, "guessing": 0.521} | more


def cells(text: str, label: str) -> list[str]:
    """The cells of the first line of a table that begins with a name."""
    line = next(line for line in text.splitlines() if re.match(rf"[│|] {re.escape(label)} +[│|]", line))
    return [part.strip() for part in re.split("[│|]", line)[2:-1]]


def shown(record: dict) -> str:
    """The cell of a record."""
    return describe_cell(measure(record))


def test_cells_have_95_intervals():
    assert describe_cell(None) == "–"
    needles = {"suite": "needles", "accuracy": 0.5, "stderr": 0.021}
    assert shown(needles) == "50.0% (45.9–54.1)"
    assert shown(needles | {"stderr": None}) == "50.0%"
    assert shown({"suite": "perplexity", "perplexity": 17.1, "stderr": 0.009}) == "17.1 (16.8–17.4)"
    assert cells(printed([measured("perplexity", "RoPE", None, 64)]), "RoPE") == ["not a number"]
    assert shown({"suite": "perplexity", "perplexity": 3.2e8, "stderr": None}) == "3.2e+08"
    assert shown({"suite": "perplexity", "perplexity": 1234.5, "stderr": None}) == "1,234"
    assert shown(row("niah", "standard", "RoPE", 0.75, 64, low=0.62, high=0.845)) == "75.0% (62.0–84.5)"
    lm_eval = row("lm_eval", "wikitext", "RoPE", 22.0, metric="word_perplexity", higher_is_better=False, stderr=0.5)
    assert shown(lm_eval) == "22.0 (21.0–23.0)"
    assert cells(printed([row("lm_eval", "x", "RoPE", None)]), "RoPE") == ["not a number"]


def test_all_right_is_not_certain():
    low, high = wilson(1.0, 50)
    found = shown({"suite": "needles", "accuracy": 1.0, "stderr": 0.0, "queries": 50})
    assert found == f"100.0% ({100 * low:.1f}–100.0)" and 0.9 < low < 0.95 and high > 0.999


def test_method_by_length_under_a_title_that_is_not_broken():
    rows = [measured("perplexity", label, value * n, 64 * n)
            for label, value in (("RoPE", 8.0), ("DroPE", 7.5)) for n in (1, 2)]  # fmt: skip
    text = printed(rows, width=120)
    assert "\nPerplexity on stdlib, 95% intervals\n" in text and "64 (1x)" in text and "128 (2x)" in text
    assert cells(text, "DroPE") == ["7.50 (7.21–7.80)", "15.0 (14.4–15.6)"]
    narrow = [measured("perplexity", "a", 2.0, 64)]
    assert "\nPerplexity on stdlib, 95% intervals\n" in printed(narrow)  # its table is narrower than that
    assert "95% intervals\n" in printed([measured("needles", "RoPE", 0.5, 64)])
    assert "not yet asked for: 52%" in printed([measured("needles", "RoPE", 0.5, 64)])


def test_the_best_is_bold():
    for suite, best in (("perplexity", "0.250 (0.240–0.260)"), ("needles", "50.0% (46.1–53.9)")):
        text = coloured([measured(suite, "RoPE", 0.25, 64), measured(suite, "DroPE", 0.5, 64)])
        assert re.findall(r"\x1b\[1m(\d[^\x1b]*)\x1b", text) == [best]


def test_one_task_is_method_by_length_and_several_are_a_table_each_length():
    one = [row("niah", "standard", label, 0.5, n) for label in ("RoPE", "DroPE") for n in (64, 128)]
    text = printed(one)
    assert "\nNeedle in a haystack: standard (fraction found), 95% intervals\n" in text
    assert cells(text, "RoPE") == ["50.0% (40.0–60.0)"] * 2
    tasks = [row("ruler", f"t{i}", label, 0.1 * i, n, metric=f"m{i % 2}")
             for i in range(1, 4) for label in ("RoPE", "DroPE") for n in (64, 128)]  # fmt: skip
    text = printed(tasks)
    assert text.count("RULER, at 64 (1x) tokens, 95% intervals\n") == 1 == text.count("RULER, at 128 (2x) tokens")
    assert cells(text, "t3 (m1)") == ["30.0% (20.8–39.2)"] * 2 and cells(text, "mean of 3") == ["20.0%", "20.0%"]


def test_the_fewer_are_in_columns():
    rows = [row("niah", task, label, 0.5, 64) for task in ("a", "b") for label in METHODS]
    text = printed(rows)
    assert "Needle in a haystack, fraction found, at 64 (1x) tokens" in text and len(cells(text, "RoPE + NTK")) == 2


def test_whether_all_were_found_is_said_where_it_differs():
    both = {"fraction_found": 0.5, "all_found": 0.2}
    rows = [row("niah", task, "RoPE", 0.5, 64, scores=both if task == "multi_query" else {"all_found": 0.5})
            for task in ("standard", "multi_query")]  # fmt: skip
    low, high = wilson(0.2, 100)
    text = printed(rows)
    assert cells(text, "multi_query, all found") == [f"20.0% ({100 * low:.1f}–{100 * high:.1f})"]
    assert "standard, all found" not in text
    rows += [row("niah", "multi_query", "DroPE", None, 64, scores=None), row("niah", "multi_query", "X", 0.1, 64)]
    assert cells(printed(rows), "multi_query")[1:] == ["not a number", "10.0% (4.0–16.0)"]


def test_a_mean_over_tasks_counts_each_once():
    both = {"string_match_all": 0.75, "all_found": 0.0}
    rows = [row("ruler", "niah_multivalue", "RoPE", 0.75, 64, scores=both), row("ruler", "vt", "RoPE", 0.5, 64),
            row("ruler", "niah_single_1", "RoPE", 1.0, 64)]  # fmt: skip
    text = printed(rows)
    assert cells(text, "niah_multivalue, all found")[0].startswith("0.0%")
    assert cells(text, "mean of 3") == ["75.0%"] and "mean of 4" not in text


def test_the_scale_of_a_model_that_diverged_is_no_traceback():
    fit = row("beta", None, "DroPE", None, 64, beta=None, c=None, nll_before=None, nll_after=3.0)
    assert "β = not a number, c = not a number, loss without β = not a number, loss with β = 3.0000" in printed([fit])


def test_an_average_leaves_out_who_lacks_a_task_and_what_is_no_share():
    rows = [row("lm_eval", task, "RoPE", score) for task, score in (("a", 0.2), ("b", 0.4))]
    rows += [row("lm_eval", "a", "DroPE", 0.3)]
    rows += [row("lm_eval", "w", "RoPE", 20.0, metric="word_perplexity", higher_is_better=False)]
    assert cells(printed(rows), "mean of 2") == ["30.0%", "–"]


def test_a_task_asked_by_itself_and_in_a_group_counts_once():
    alone = [row("lm_eval", "arc_easy", "RoPE", 0.2, asked="arc_easy", by_depth=by_depth([1.0, 0.5, 0.0]))]
    group = [row("lm_eval", task, "RoPE", 0.4, asked="pair", by_depth=by_depth([1.0, 0.5, 0.0]))
             for task in ("arc_easy", "piqa")]  # fmt: skip
    text = printed([*alone, *group])
    assert cells(text, "mean of 2") == ["40.0%"] and cells(text, "arc_easy") == ["40.0% (30.2–49.8)"]
    assert len(re.findall(r"^depth +all *$", text, re.M)) == 2  # a grid for each task, with one column


def test_a_model_that_diverged_on_a_task_has_no_mean_and_the_others_keep_theirs():
    """The terminal left the task out of all means; the report did not."""
    rows = [row("ruler", task, label, score, 64)
            for task, score in (("a", 0.2), ("b", 0.4), ("c", 0.6)) for label in ("RoPE", "DroPE")]  # fmt: skip
    rows[-1]["score"] = None
    text = printed(rows)
    assert cells(text, "mean of 3") == ["40.0%", "–"] and cells(text, "c")[1] == "not a number"


def test_same_names_are_told_apart():
    rows = [row("niah", "standard", "RoPE", 0.5, 64, run=run, checkpoint=checkpoint)
            for run, checkpoint in (("one", "a/1"), ("one", "a/2"), ("two", "a/1"))]  # fmt: skip
    text = printed(rows)
    for name in ("one: RoPE (a/1)", "one: RoPE (a/2)", "two: RoPE"):
        assert cells(text, name)


def test_needles_by_depth_stand_in_a_grid_of_their_own():
    rows = [
        row("niah", "standard", label, 0.5, 64 * n, by_depth=by_depth([1.0, 0.254, None] if n == 1 else [0, 0.5, 1]))
        for label in ("RoPE", "DroPE")
        for n in (2, 1)
    ]
    text = printed(rows)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Needle in a haystack: standard, per cent found"))
    assert lines[at + 1].split() == ["RoPE", "DroPE"]  # side by side
    assert [line.split() for line in lines[at + 2 : at + 6]] == [
        2 * ["depth", "1x", "2x"],
        2 * ["0%", "100", "0"],
        2 * ["50%", "25", "50"],
        2 * ["100%", "·", "100"],
    ]
    assert text.index("per cent found") < text.index("95% intervals")  # the tables are what one sees last
    assert "per cent found" not in printed([row("niah", "standard", "RoPE", 0.5, 64)])


def test_colours_deepen_with_the_score_and_are_gone_where_there_are_none():
    steps = [heat_cell(score / 20).style.split(" on ")[1] for score in range(21)]
    order = [COLOURS.index(step) for step in steps]
    assert order == sorted(order) and (order[0], order[-1]) == (0, len(COLOURS) - 1)
    rows = [row("niah", "standard", "RoPE", 0.5, 64, by_depth=by_depth([1.0, 0.0, 0.5]))]
    red, green, blue = (int(COLOURS[-1][i : i + 2], 16) for i in (1, 3, 5))
    assert re.search(rf"48;2;{red};{green};{blue}m *100", coloured(rows)) and "\x1b[" not in printed(rows)


def test_nothing_is_markup():
    rows = [row("niah", "[red]task[/]", "[bold]x[/bold", 0.5, n, run="[i]", metric="[/]") for n in (64, 128)]
    rows += [one | {"source": "b", "by_depth": by_depth([1, 0, 1])} for one in rows]
    text = printed(rows) + coloured(rows)
    assert "[red]task[/]" in text and "[bold]x[/bold" in text
    console = Console(file=io.StringIO(), width=20)
    print_line("[red]" + "long " * 20, console)
    assert console.file.getvalue() == "[red]" + "long " * 20 + "\n"


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_loses_no_number(width):
    rows = [row("niah", "standard", label, 0.5, n) for label in ("RoPE", "DroPE") for n in (64, 128)]
    text = printed(rows, width)
    assert text.count("50.0%") == 4 and text.count("(40.0–60.0)") == 4 and "…" not in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_table_fits_its_terminal(width):
    """Also with a label of two thousand characters, as records of before have, and with more lengths than fit."""
    labels = ["RoPE", "RoPE, read as " + "+".join(["rope:base=10000"] * 120)]
    lengths = [64 * 2**n for n in range(10)]
    records = [measured("perplexity", label, 5.0 + n, n) for label in labels for n in lengths]
    records += [row("ruler", f"niah_multikey_{n}", label, 0.5, 64) for label in labels for n in range(3)]
    records += [row("ruler", f"niah_multikey_{n}", label, 0.5, 128) for label in [*labels, *"abcde"] for n in range(3)]
    lines = [line for line in printed(records, width).splitlines() if line[:1] in "┃│┏┡└├"]
    assert lines and max(map(len, lines)) <= width
    text = " ".join(lines)
    for n in lengths:
        assert f"{n:,}" in text and three_digits(n + 5.0) in text
    assert text.count("(40.0–60.0)") == 2 * 3 + 7 * 3 and text.count("50.0%") == 27 + 2 + 7  # with the means


def test_fitted_scales_are_a_line_each():
    beta = {"suite": "beta", "beta": 1.25, "c": 0.2, "nll_before": 3.5, "nll_after": 3.25, "label": "DroPE, β"}
    assert "DroPE, β at 128: β = 1.250, c = 0.200, loss without β = 3.5000, loss with β = 3.2500\n" in printed(
        [beta | {"length": 128}]
    )


def test_perplexity_by_position():
    fine = {"position_edges": [0, 512, 1024], "nll_by_position": [0.0, math.log(7)]}
    assert octave_perplexities(fine, [0, 512, 1024]) == ["1", "7"]
    assert octave_perplexities(fine, [0, 1024]) == [f"{math.sqrt(7):.4g}"]
    assert octave_perplexities({**fine, "nll_by_position": [None, 800.0]}, [0, 512, 1024]) == ["–", "–"]
    text = printed([measured("perplexity", "RoPE", 8.0, 1024, **fine)], show=print_by_position)
    assert "\nPerplexity by position in sequences of 1,024 tokens of stdlib\n" in text and cells(text, "RoPE") == [
        "1",
        "7",
    ]
    assert printed([measured("perplexity", "RoPE", 8.0, 1024)], show=print_by_position) == ""  # of documents: no places


def test_a_log_breaks_no_table(capsys):
    print_records(
        [row("niah", "a_task_with_quite_a_name", f"method {i}", 0.5, 64 * n) for i in range(3) for n in range(1, 9)]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > 150 and len({len(line) for line in lines if line.startswith("│")}) == 1
