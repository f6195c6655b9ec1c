"""Axes and marks of the charts of scores and of one run: their ends, ticks, smoothing and borders of phases."""

import html
import json
import re
from pathlib import Path

import pytest

from pe_lab.page.charts import length_words, position_chart, score_chart
from pe_lab.page.colours import STYLES
from pe_lab.page.run_charts import (
    frequency_charts,
    learned_charts,
    loss_chart,
    loss_comparison,
    offsets,
    rotation_of,
    running_mean,
    source_losses,
)
from pe_lab.page.variants import assign_styles
from pe_lab.results.runs import PhaseFiles, RunFiles
from pe_lab.results.table import Bucket, Cell, Length, Table


def plot_of(chart: str) -> list[float]:
    """The ends of the axes: x from, to, log, y from, to, log."""
    return json.loads(re.search(r'data-plot="([^"]*)"', chart).group(1))[4:]


def series_of(chart: str) -> dict[str, list[list[float]]]:
    found = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart).group(1)))["series"]
    return {one["n"]: [point[:2] for point in one["p"]] for one in found}


def table(values: dict[float, float], suite: str = "niah", columns=None, share: bool = True, ends=None) -> Table:
    columns = columns or tuple(Length(factor, 64 * factor) for factor in values)
    cells = {("a", c.key): Cell(v, v, None, {}, share, ends) for c, v in zip(columns, values.values(), strict=True)}
    return Table(columns, {"a": {}}, cells, suite, "vt")


@pytest.mark.parametrize(("best", "top"), [(0.5, 0.56), (0.05, 0.1), (0.95, 1.0)])
def test_an_axis_of_shares_starts_at_none_and_ends_an_eighth_above_the_best(best, top):
    assert plot_of(score_chart(table({1.0: 0.01, 2.0: best}), {}, "T")) == [1, 2, 1, 0, pytest.approx(top), 0]


@pytest.mark.parametrize(("high", "top"), [(0.5, 0.52), (0.05, 0.104), (0.99, 1.0)])
def test_an_axis_with_bars_ends_above_the_highest_bar(high, top):
    chart = score_chart(table({1.0: 0.01, 2.0: 0.02}, ends=(0.0, high)), {}, "T", bars=True)
    assert plot_of(chart) == [1, 2, 1, 0, pytest.approx(top), 0] and "Thin bars" in chart
    assert chart.count('stroke-opacity="0.6"') == 2 * 2  # a bar at each of two lengths, in two sizes


def test_a_chart_of_scores_needs_two_lengths_and_bars_need_shares():
    assert score_chart(table({1.0: 0.5}), {}, "T") == "" == score_chart(table({0.0: 0.5, 1.0: 0.5}), {}, "T")
    values = {1.0: 3.0, 2.0: 4.0}
    assert score_chart(table(values, share=False), {}, "T", bars=True) == ""
    assert plot_of(score_chart(table(values, share=False), {}, "T"))[-1] == 0
    assert plot_of(score_chart(table(values, "perplexity", share=False), {}, "T"))[-1] == 1


def test_the_training_length_is_marked_between_shorter_and_longer_ones():
    assert ">trained<" in score_chart(table({0.5: 0.5, 1.0: 0.5, 2.0: 0.5}), {}, "T")
    assert ">trained<" not in score_chart(table({1.0: 0.5, 2.0: 0.5}), {}, "T")  # it is the edge
    assert ">trained<" not in score_chart(table({0.5: 0.5, 2.0: 0.5}), {}, "T")
    columns = tuple(Length(None, length) for length in (1, 2048))
    chart = score_chart(table({1.0: 0.5, 2.0: 0.5}, columns=columns), {}, "T")
    assert plot_of(chart)[:3] == [1, 2048, 1] and ">tokens<" in chart and ">2.0K<" in chart


def test_a_range_of_lengths_stands_at_its_geometric_middle():
    """Of 4096 to 8192: 4096 times the root of 2; a range from 0 counts from half of its end."""
    columns = (Bucket(None, 4096, 0), Bucket(None, 8192, 4096))
    chart = score_chart(table({1.0: 0.5, 2.0: 0.25}, columns=columns), {}, "T")
    assert [x for x, _ in series_of(chart)["a"]] == [pytest.approx(2896.31, abs=0.01), pytest.approx(5792.62, abs=0.01)]


def test_a_length_in_words():
    assert length_words(Length(8.0, 1024)) == "8× the training length (1,024 tokens)"
    assert length_words(Length(None, 1024)) == "1,024 tokens" and length_words(Length(2.0, None)).endswith("length")


def test_scores_inside_sequences_stand_at_the_middles_of_their_bins():
    """Of 0 to 4, 4 to 12 and 12 to 52: 2, 8 and 32, with a tick at each power of two; the last one is the mark's."""
    column = Length(1.0, 32)
    losses = {"position_edges": [0, 4, 12, 52], "nll_by_position": [0.0, 60.0, 0.0]}
    shares = {"accuracy_by_distance": {"edges": [0, 4, 12, 52], "accuracy": [0.25, 0.5, 0.0]}}
    info = {"positional": [], "sequence_length": 32}
    charts = {}
    for suite, record in (("perplexity", losses), ("needles", shares)):
        cells = {("a", 1.0): Cell(1.0, 1.0, None, record)}
        scores = Table((column,), {"a": {}}, cells, suite)
        run = RunFiles("demo", Path("demo"), {}, [PhaseFiles("p", info)], {}, [])
        charts[suite] = str(position_chart(run, scores, column, {}, "half"))
    perplexity, needles = charts["perplexity"], charts["needles"]
    # e^60 is cut to e^50, 5.18471e21.
    assert series_of(perplexity)["a"] == [[2, 1], [8, pytest.approx(5.18471e21)], [32, 1]]
    assert series_of(needles)["a"] == [[2, 0.25], [8, 0.5], [32, 0]]
    assert [plot_of(chart)[-1] for chart in (perplexity, needles)] == [1, 0]
    for chart, dots in ((perplexity, 0), (needles, 2 * 3)):
        assert plot_of(chart)[:3] == [2, 32, 1] and chart.count(">training length<") == 2
        assert chart.count("<circle") == dots
        wide = chart[: chart.index('class="narrow"')]
        assert [word for word in ("2", "4", "8", "16", "32") if f'text-anchor="middle">{word}<' not in wide] == []


# ------------------------------------------------------------------------------------------------------------
# One run


def phase(name: str, encoding: str, losses: list[float], first: int = 1, **more) -> PhaseFiles:
    """A step of 10 tokens, each with its loss."""
    info = {"positional": [{"encoding": encoding}], "tokens_per_step": 10, "sequence_length": 64}
    metrics = [{"step": n, "tokens": 10 * n, "loss": loss, **more} for n, loss in enumerate(losses, first)]
    return PhaseFiles(name, info, metrics)


def run_of(*phases: PhaseFiles, evaluation=None, **model) -> RunFiles:
    return RunFiles("demo", Path("demo"), {"config": {"model": model}}, list(phases), evaluation or {}, [])


ROPE = phase("pretrain", "rope(base=500)", [3.0] * 40)


def test_phases_follow_each_other_whether_or_not_they_count_on():
    again, on = phase("again", "nope", [2.0] * 5), phase("on", "nope", [2.0] * 5, first=41)
    assert offsets(run_of(ROPE, again)) == {"pretrain": 0, "again": 400}
    assert offsets(run_of(ROPE, on)) == {"pretrain": 0, "on": 0}
    assert offsets(run_of(ROPE, again, again.__class__("third", again.info, again.metrics)))["third"] == 450
    # The first record of a phase of its own may be of more tokens than the phase before it has read.
    rare = PhaseFiles("rare", again.info, [{"step": n, "tokens": 10 * n, "loss": 2.0} for n in (50, 100)])
    assert offsets(run_of(ROPE, rare))["rare"] == 400
    # Where the batch has doubled, tokens are as logged, not steps times the last batch.
    doubled = PhaseFiles(
        "p", {"tokens_per_step": 20}, [{"step": n, "tokens": t, "loss": 2.0} for n, t in ((1, 10), (3, 40))]
    )
    assert offsets(run_of(doubled, again))["again"] == 40
    assert [doubled.tokens_at(step) for step in (1, 3, 4)] == [10, 40, 60]
    chart = loss_chart(run_of(ROPE, again))
    assert series_of(chart)["again"][0] == [410, 2] and plot_of(chart)[:2] == [10, 450]
    assert ">again starts<" in chart and "pretrain starts" not in chart and ">training tokens<" in chart


def test_more_than_forty_losses_are_smoothed_over_a_sixtieth():
    assert "stroke-opacity" not in loss_chart(run_of(ROPE))
    assert loss_chart(run_of(phase("pretrain", "rope", [3.0] * 41))).count("stroke-opacity") == 2  # in both sizes
    points = [(float(i), 6.0 if i == 50 else 0.0) for i in range(180)]  # a window of 3
    assert {(x, y) for x, y in running_mean(points) if y} == {(49.0, 2.0), (50.0, 2.0), (51.0, 2.0)}
    assert running_mean(points[:59]) == points[:59]


def test_a_jump_is_from_the_mean_of_the_last_twenty_losses_to_the_highest_of_the_first_ten():
    before = phase("pretrain", "rope", [9.0] * 20 + [2.0] * 10 + [3.0] * 10)  # 2.5
    up = loss_chart(run_of(before, phase("drop", "nope", [4.0] * 9 + [5.0, 8.0] + [5.0] * 9)))
    assert "Where drop starts, the loss jumps from 2.50 to 5.00; the old level was not reached again." in up
    # With a mean over 3: 4, 3 (of 4, 4, 1), 2 (of 4, 1, 1) is below 2.5 two steps of 10 tokens after the first.
    back = loss_chart(run_of(before, phase("drop", "nope", [4.0, 4.0, 1.0, 1.0])))
    assert "from 2.50 to 4.00 and is back within 20 tokens." in back
    same = loss_chart(run_of(before, phase("drop", "nope", [2.5, 2.0])))
    assert "At drop the loss does not jump." in same
    assert "jump" not in loss_chart(run_of(before, phase("more", "rope(base=5)", [5.0] * 9)))


def test_a_phase_without_losses_is_passed_over():
    chart = loss_chart(
        run_of(phase("empty", "rope", []), ROPE, phase("none", "nope", []), phase("late", "nope", [2.0]))
    )
    assert list(series_of(chart)) == ["pretrain", "late"] and series_of(chart)["late"] == [[410, 2]]


def test_the_axis_is_of_steps_where_tokens_are_not_known():
    steps = PhaseFiles("p", {"positional": []}, [{"step": n, "loss": 2.0} for n in (1, 2)])
    assert ">training steps<" in loss_chart(run_of(steps))
    logged = PhaseFiles("p", {"positional": []}, [{"step": n, "tokens": 9 * n, "loss": 2.0} for n in (1, 2)])
    assert ">training tokens<" in loss_chart(run_of(logged))


def test_learned_values_are_a_chart_for_each_parameter_and_a_line_for_each_layer():
    assert learned_charts(run_of(ROPE)) == ""
    values = {f"learned/wave.height/{n}{part}": n + high for n in range(12) for part, high in (("", 0.5), ("/high", 1))}
    values |= {f"learned/base.log/{n}": 9.0 for n in (0, 11)}
    metrics = [{"step": n, "tokens": 10 * n, **values} for n in (0, 1, 2)]
    charts = learned_charts(run_of(PhaseFiles("p", {"positional": []}, metrics)))
    base, wave = str(charts).split("<figure")[1:]
    assert (
        "Learned: base.log" in base and "value in a layer" in base and list(series_of(base)) == ["layer 0", "layer 11"]
    )
    assert "Learned: wave.height" in wave and "mean in a layer" in wave
    assert series_of(wave)["layer 3"] == [[0, 3.5], [10, 3.5], [20, 3.5]] and len(series_of(wave)) == 12
    shown = [one["n"] for one in json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', wave)[1]))["series"]
             if "m" not in one]  # fmt: skip
    assert shown == ["layer 0", "layer 3", "layer 6", "layer 8", "layer 11"]  # spread over the depth


def test_losses_by_source_need_two_sources():
    one = {"validation_loss/a": 2.0}
    assert source_losses(run_of(phase("p", "rope", [3.0] * 3, **one))) == ""
    two = one | {"validation_loss/b": 4.0}
    chart = source_losses(run_of(phase("p", "rope", [3.0] * 3, **two), phase("q", "nope", [3.0] * 3, **two)))
    assert series_of(chart)["b"] == [[x, 4] for x in (10, 20, 30, 40, 50, 60)] and list(series_of(chart)) == ["a", "b"]
    assert chart.count("<circle") == 2 * 2 * 6 and ">q starts<" in chart  # dots in both sizes
    assert ">p starts<" not in chart


def test_each_run_has_its_colour_and_more_than_ten_are_dashed():
    chart = loss_comparison([RunFiles(f"r{i}", Path("r"), {}, [ROPE], {}, []) for i in range(11)])
    legend = chart[chart.index("<ul") : chart.index("</ul>")]
    colours = re.findall(r"--c-([\w-]+)", legend)
    assert len(set(colours[:10])) == 10 and colours[10] == colours[0] and legend.count("dasharray") == 1


def test_the_rotation_is_of_the_first_rotary_phase():
    nope = phase("n", "nope", [3.0])
    assert rotation_of(run_of(nope, ROPE, heads=4, d_model=64)) == (500, 16, 64)
    assert rotation_of(run_of(phase("p", "rope", [3.0]), head_dim=8, heads=4, d_model=64)) == (10000, 8, 64)
    assert rotation_of(run_of(nope, head_dim=8)) is None and rotation_of(run_of(ROPE)) is None


def test_frequencies_under_interpolation_and_the_mark_of_slow_pairs():
    """w = 1, 0.1, 0.01 and 0.001: 64 tokens are 10.2, 1.02, 0.1 and 0.01 rotations, so the last two are slow."""
    run = run_of(evaluation={"needles": [{"model": "RoPE"}, {"model": "DroPE"}]})
    chart = str(frequency_charts(run, [1, 4], 10000.0, 8, 64))
    assert chart.count("<figure") == 1 and "Stretched 4×" in chart
    lines = series_of(chart)
    assert lines["RoPE"] == [[i, 1] for i in range(4)] and lines["DroPE"] == [[i, 0] for i in range(4)]
    assert lines["PI"] == [[i, 0.25] for i in range(4)]
    assert plot_of(chart) == [0, 3, 0, -0.04, 1.17, 0]
    # Between the second and the third pair: half of 300 pixels from 44.
    assert re.findall(r'<line x1="([\d.]+)" [^>]*class="mark"', chart) == ["194"]
    assert re.findall(r'text-anchor="end">([^<]*)<', chart) == ["0", "1/4", "0.5", "1"]
    assert str(frequency_charts(run, [], 10000.0, 8, 64)).count("<figure") == 3  # 2, 4 and 8
    assert str(frequency_charts(run, list(range(1, 12)), 10000.0, 8, 64)).count("<figure") == 6
    assert "mark" not in str(frequency_charts(run_of(), [2], 2.0, 8, 4096)) and "DroPE" not in str(
        frequency_charts(run_of(), [2], 2.0, 8, 4096)
    )


def test_a_later_round_of_spare_colours_has_another_dash():
    styles = assign_styles({f"v{i:02}": {"model": "M", "variant": "m"} for i in range(13)})
    assert [style.dash for style in styles.values()] == [None] * 4 + ["7 3"] * 4 + ["2 3"] * 4 + [None]
    known = assign_styles({"a": {"model": "RoPE", "variant": "PI"}, "b": {"model": "RoPE", "variant": "PI"}})
    assert known["a"] == STYLES["PI"] and known["b"].colour == "extra-1"
