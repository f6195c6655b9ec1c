"""Groups of runs that differ by seed only: who is grouped, means, intervals, differences in pairs, unfinished seeds."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest
from prompted_rows import row, write_rows
from run_directories import WINNING, make_run

from pe_lab.page.document import build_page
from pe_lab.results.comparison import differing, paired_differences, representative, short_names
from pe_lab.results.groups import curve_over_seeds, group_runs, pooled
from pe_lab.results.runs import read_runs
from pe_lab.results.scores import build_tables
from pe_lab.results.statistics import paired_t
from pe_lab.results.table import Table

T2, T1 = 4.302653, 12.706205  # two-sided 95% quantiles of Student's t with 2 and 1 degrees of freedom, from tables
METHODS = {key: value for key, value in WINNING.items() if key[1] in ("as trained", "YaRN")}


def change(directory: Path, **values) -> Path:
    """Sets keys of a run's config; `phases__0__steps=3` sets `phases.0.steps`."""
    path = directory / "run.json"
    run = json.loads(path.read_text())
    for key, value in values.items():
        *outer, last = key.split("__")
        place = run["config"]
        for name in outer:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[last] = value
    path.write_text(json.dumps(run))
    return directory


def scored(directory: Path, suite: str, **scale: float) -> None:
    """Multiplies a number of every record of a suite."""
    path = directory / "evaluation" / f"{suite}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        for key, factor in scale.items():
            record[key] *= factor
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def seeds(root: Path, name: str, scales: dict[int, float], **values) -> list[Path]:
    """A run for each seed, whose accuracies and perplexities are those of METHODS times a scale."""
    phases = (("pretrain", "rope(base=10000)", 24), ("recalibrate", "nope", 12))
    made = []
    for seed, scale in scales.items():
        run = make_run(root, name, directory=f"{name}-{seed}", methods=METHODS, phases=phases)
        change(run, seed=seed, data__seed=seed, **values)
        scored(run, "needles", accuracy=scale)
        scored(run, "perplexity", nll=scale)
        made.append(run)
    return made


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """Three seeds of each of two methods; the second one's scores are 2%, 4% and 6% above the first one's."""
    root = tmp_path_factory.mktemp("groups")
    a = seeds(root, "small", {1: 0.9, 2: 1.0, 3: 1.1})
    b = seeds(root, "large", {1: 0.92, 2: 1.04, 3: 1.16}, model__layers=4)
    return read_runs([*a, *b])


@pytest.fixture(scope="module")
def page(two_groups) -> str:
    return build_page(two_groups)


def names(groups) -> list[list[str]]:
    return [[run.name for run in group] for group in groups]


def test_runs_are_grouped_if_they_differ_by_seed_alone(tmp_path, two_groups):
    assert names(group_runs(two_groups)) == [[f"{name}-{n}" for n in (1, 2, 3)] for name in ("small", "large")]
    assert [run.name for run in pooled(two_groups)] == ["small", "large"]
    others = {
        "init": {"seed": 7},
        "order": {"data__seed": 7},
        "log": {"log": {"every_steps": 3}, "seed": 8},  # nothing depends on it
        "rate": {"phases__0__optimizer": {"learning_rate": 1.0}, "seed": 9},
        "longer": {"phases__0__steps": 601, "seed": 9},
        "again": {},  # the seeds of the first
    }
    made = [change(make_run(tmp_path, n, evaluated=False), **keys) for n, keys in [("first", {}), *others.items()]]
    (tmp_path / "bare" / "evaluation").mkdir(parents=True)
    (tmp_path / "bare" / "evaluation" / "needles.jsonl").write_text("")
    found = names(group_runs(read_runs([*made, tmp_path / "bare"])))
    assert [sorted(group) for group in found] == [
        ["first", "init", "log", "order"], ["rate"], ["longer"], ["again"], ["bare"],
    ]  # fmt: skip


def test_a_field_that_an_earlier_version_lacked_does_not_split_a_group(tmp_path):
    old, new = (make_run(tmp_path, name, evaluated=False) for name in ("old", "new"))
    for run in (old, new):
        path = run / "run.json"
        known = json.loads(path.read_text())
        known["config"]["model"] = {"layers": 3}
        known["config"]["phases"] = [{"name": "pretrain"}, {"name": "recalibrate", "positional": "nope"}]
        path.write_text(json.dumps(known))
    change(new, seed=1, data__validation_fraction=0.01, model__norm="rms")  # their defaults
    assert len(group_runs(read_runs([old, new]))) == 1


def test_scores_are_means_with_t_intervals_over_seeds(two_groups):
    small, _ = pooled(two_groups)
    (needles,), (losses,) = (build_tables(suite, [small]) for suite in ("needles", "perplexity"))
    cell = needles.cells["RoPE + YaRN", 8.0]  # 0.27, 0.30 and 0.33
    assert cell.value == pytest.approx(0.30) and cell.ends == pytest.approx(
        (0.3 - T2 * 0.03 / 3**0.5, 0.3 + T2 * 0.03 / 3**0.5)
    )
    loss = math.log(9.6)  # of perplexity the interval is the losses'
    cell = losses.cells["RoPE + YaRN", 8.0]
    half = T2 * 0.1 * loss / 3**0.5
    assert cell.value == pytest.approx(9.6)
    assert [math.log(end) for end in cell.ends] == pytest.approx([loss - half, loss + half])
    assert cell.stderr * 1.959964 == pytest.approx(half)  # comparisons are as careful as the interval


@pytest.mark.slow
def test_a_task_of_two_groups_has_a_chart_with_their_means(tmp_path):
    made = []
    for name, layers, level in (("small", 3, 0.5), ("large", 4, 0.7)):
        for seed in (1, 2):
            run = make_run(tmp_path, name, directory=f"{name}-{seed}", methods={})
            change(run, seed=seed, model__layers=layers)
            scores = [row("niah", "standard", "RoPE", level + 0.1 * seed, n, factor=n // 64) for n in (64, 128)]
            write_rows(run, "niah", scores)
            made.append(run)
    series = chart(build_page(read_runs(made)), "Needle in a haystack, standard against length")
    assert [name for name in series] == ["small", "large"]
    assert series["large"] == [[x, pytest.approx(0.85), pytest.approx(0.8), pytest.approx(0.9)] for x in (1, 2)]


def test_two_seeds_have_a_range_and_equal_seeds_the_interval_of_their_samples(tmp_path):
    (pair,) = pooled(read_runs(seeds(tmp_path / "two", "m", {1: 0.9, 2: 1.1})))
    (table,) = build_tables("needles", [pair])
    assert table.cells["RoPE + YaRN", 8.0].ends == pytest.approx((0.27, 0.33))
    assert table.cells["RoPE + YaRN", 8.0].stderr * 1.959964 == pytest.approx(T1 * 0.03)  # 0.0424 / sqrt 2
    runs = read_runs(seeds(tmp_path / "same", "m", {1: 1.0, 2: 1.0, 3: 1.0}))
    alone, together = (build_tables("needles", [run])[0].cells["RoPE", 8.0] for run in (runs[0], pooled(runs)[0]))
    assert together.ends == alone.ends and together.ends[1] > 0  # no needle was found: Wilson's


def test_curves_are_means_with_intervals_where_seeds_have_them():
    found = dict(curve_over_seeds([[(1, 1.0), (2, 4.0)], [(1, 2.0), (2, 6.0)], [(1, 3.0)]]))
    assert found[1].numbers == pytest.approx((2.0, 2 - T2 / 3**0.5, 2 + T2 / 3**0.5)) and found[1].count == 3
    assert found[2].numbers == (5.0, 4.0, 6.0) and found[2].count == 2  # the range of two


def chart(page: str, title: str) -> dict[str, list]:
    """The series of the first chart of a title, as numbers."""
    found = re.search(rf'data-chart="([^"]*)"><div class="chart-title">{re.escape(title)}<', page).group(1)
    return {one["n"]: [p[:2] + p[4:] for p in one["p"]] for one in json.loads(html.unescape(found))["series"]}


def logged(directory: Path, phase: str, losses: dict[int, float]) -> None:
    rows = [{"step": n, "tokens": 10 * n, "loss": x, "validation_loss": x} for n, x in losses.items()]
    (directory / phase / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_seed_that_has_not_finished_is_named_and_not_averaged(tmp_path):
    runs = seeds(tmp_path, "m", {1: 0.9, 2: 1.0, 3: 1.1})
    for run, level in zip(runs, (1.0, 2.0, 3.0), strict=True):
        logged(run, "pretrain", dict.fromkeys(range(1, 5), level))
        logged(run, "recalibrate", dict.fromkeys(range(1, 5), level))
    logged(runs[2], "recalibrate", {1: 3.0, 2: 3.0})
    path = runs[2] / "recalibrate" / "phase.json"
    path.write_text(path.read_text().replace('"complete"', '"running"'))
    (runs[2] / "evaluation" / "needles.jsonl").unlink()
    other = make_run(tmp_path, "other", evaluated=False)
    page = build_page(read_runs([*runs, other]))
    series = chart(page, "Validation loss")
    assert [y for _, y, *_ in series["m"]] == [2.0] * 6 and [x for x, *_ in series["m"]][-1] == 60
    assert [point[:2] for point in series["m, 2 of 3 seeds"]] == [[70, 1.5], [80, 1.5]]
    row = re.search(r'aria-label="Runs">.*?<tbody><tr>(.*?)</tr>', page, re.S).group(1)
    assert "1.50<small>1.000–2.000</small><small>2 of 3 seeds</small>" in row and "2 of 3 seeds complete" in row
    cells = re.search(r'aria-label="Needle accuracy of each.*?</table>', page, re.S).group()
    assert cells.count("<small>2 of 3 seeds</small>") == 4 * len(METHODS)
    assert "Phase recalibrate is not complete (2 of 3 seeds have finished it)" in page


def test_differences_are_of_the_seeds_that_both_have(two_groups):
    found = paired_differences(pooled(two_groups), ["needles", "perplexity"])
    # DroPE at 1x: 0.53 times 0.02, 0.04 and 0.06.
    (at_1,) = [
        one for one in found if one.labels == ("DroPE", "DroPE") and one.column.key == 1 and one.what == "needles"
    ]
    assert at_1.name == "large − small" and at_1.share and at_1.difference.count == 3
    half = T2 * 0.53 * 0.02 / 3**0.5
    assert at_1.difference.numbers == pytest.approx((0.0212, 0.0212 - half, 0.0212 + half))
    (loss,) = [
        one for one in found if one.what == "perplexity, stdlib" and one.labels[0] == "DroPE" and one.column.key == 1
    ]
    assert loss.difference.mean == pytest.approx(0.04 * math.log(8.0))  # nats, and the other has more
    apart = [run for run in two_groups if run.name in ("small-1", "small-2", "large-2", "large-3")]
    assert paired_differences(pooled(apart), ["needles"]) == []  # one seed in common


def test_the_last_phase_stands_for_a_run_without_a_dropped_model(two_groups):
    run = two_groups[0]

    def variant(model: str, method: str, phase: str) -> dict:
        return {"model": model, "variant": method, "phase": phase}

    rope, scaled = variant("RoPE", "as trained", "pretrain"), variant("ALiBi", "YaRN", "recalibrate")
    variants = {"RoPE": rope, "ALiBi": variant("ALiBi", "as trained", "recalibrate"), "ALiBi + YaRN": scaled}
    assert representative(run, Table((), variants, {}, "perplexity", "text")) == "ALiBi"
    dropped = {
        f"DroPE{end}": variant("DroPE", method, "recalibrate") for end, method in (("", "as trained"), (", β", "beta"))
    }
    assert representative(run, Table((), {"RoPE": rope, **dropped}, {}, "perplexity", "text")) == "DroPE, β"


def test_the_page_corrects_p_for_the_comparisons_of_its_table(page):
    table = re.search(r'aria-label="Differences, large − small".*?</table>', page, re.S).group()
    found = re.findall(r"<td>([\d.]+)</td><td>([\d.]+)</td><td>3</td>", table)
    # 2%, 4% and 6%: t = 3.4641, p = 0.0742, times the number of comparisons.
    assert len(found) == table.count("<tr") - 1 and {p for p, _ in found} == {"0.074", "1.000"}
    assert all(corrected == f"{min(0.0741799 * len(found), 1):.3f}" for p, corrected in found if p == "0.074")


def test_the_t_test_of_pairs_by_hand():
    found = paired_t([1.0, 3.0, 2.0], [0.0, 1.0, -1.0])  # 1, 2 and 3: t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees
    assert found.numbers == pytest.approx((2, 2 - T2 / 3**0.5, 2 + T2 / 3**0.5), abs=1e-5)
    assert found.p == pytest.approx(1 - 3.4641016 / (3.4641016**2 + 2) ** 0.5) and found.count == 3
    assert paired_t([1.0, 1.0], [1.0, 1.0]).p == 1 and paired_t([2.0, 2.0], [1.0, 1.0]).p == 0
    one = paired_t([1.0], [0.0])
    assert one.mean == 1 and math.isnan(one.high) and math.isnan(one.p)


def test_settings_that_differ_are_columns_and_equal_ones_are_stated_once(tmp_path, two_groups, page):
    columns, equal = differing(pooled(two_groups))
    assert columns == {"layers": [3, 4]} and equal["model.d_model"] == 64 and "seed" not in equal
    one = change(make_run(tmp_path, "one", evaluated=False), phases__0__positional={"kind": "rope", "base": 200.0})
    other = make_run(tmp_path, "other", phases=(("pretrain", "rope(base=10000)", 600),), evaluated=False)
    columns, _ = differing(read_runs([one, other]))
    assert columns == {
        "phases": ["pretrain → recalibrate", "pretrain"],
        "positional": ["rope(base=200.0)", "rope(base=10000)"],
    }
    table = re.search(r'aria-label="Runs">(.*?)</table>', page, re.S).group(1)
    assert ">Layers<" in table and ">Parameters<" not in table
    assert page.count("In all of them: phases pretrain → recalibrate; parameters 221K;") == 1


def test_short_names_are_the_shortest_that_tell_keys_apart():
    keys = ["model.layers", "a.optimizer.learning_rate", "b.optimizer.learning_rate"]
    assert [*short_names(keys).values()] == ["layers", "a optimizer learning_rate", "b optimizer learning_rate"]


def test_a_group_is_one_section_with_its_runs_folded_in_it(two_groups, page):
    assert "6 runs in 2 groups by seed" in page and page.count('<section class="run" data-run="small"') == 1
    links = re.findall(r'<a href="#(run-0-\d)">([^<]*)</a>', page)
    assert links == [(f"run-0-{n}", f"small-{n + 1}") for n in range(3)]
    assert all(f'<h3 id="{identity}">{name}</h3>' in page for identity, name in links)
    assert "small: RoPE" in page and "small-1: RoPE" not in page
    assert "Last validation loss, in pairs of seeds: large − small" in page
    assert pooled(two_groups[:1]) == two_groups[:1]  # a group of one is the run itself


def test_a_page_of_one_group_is_that_of_a_run_and_has_its_runs(two_groups):
    page = build_page(two_groups[:2])
    assert "pe_lab report · 2 seeds of <b>small</b>" in page and "Values are means over 2 seeds." in page
    assert (
        "the small figures are the range of the two" in page and 'id="run-0-1"' in page and 'id="compare"' not in page
    )
