"""Results as people read them: numbers in words, intervals, cells, tables, and the order of variants."""

from __future__ import annotations

import json
import math

import pytest

from pe_lab.results import variants
from pe_lab.results.formatting import count, duration, listing, percent, short_number, shortened, times
from pe_lab.results.records import RecordFile, SampleFile, bins, mappings, number
from pe_lab.results.scores import arrange, measure, source_of
from pe_lab.results.statistics import Z95, exp, mean_of, wilson
from pe_lab.results.table import Cell, Length, Table, compare, mean_cell, with_shares

# --- Numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0.00"), (9.876, "9.88"), (10, "10.0"), (99.94, "99.9"), (100, "100"), (99_999, "99,999"),
        (100_000, "1.0·10⁵"), (-2.5e12, "-2.5·10¹²"), (-12.34, "-12.3"),
        (math.inf, "∞"), (-math.inf, "−∞"), (math.nan, "n/a"),
    ],
)  # fmt: skip
def test_a_number_has_three_digits_or_so(value, shown):
    assert short_number(value) == shown


def test_counts_have_a_unit():
    given = (0, 950, 999, 1000, 6100, 24e6, 16.8e9, 1.2e12, 100_400, 150_000_000, -2000)
    shown = ["0", "950", "999", "1K", "6.1K", "24M", "16.8B", "1.2T", "100K", "150M", "-2K"]
    assert [count(value) for value in given] == shown


def test_per_cent_have_a_decimal_near_their_ends_alone():
    given = (0, 0.0004, 0.004, 0.094, 0.1, 0.5, 0.9949, 0.995, 0.999, 0.9996, 1, math.nan)
    shown = ["0%", "0%", "0.4%", "9.4%", "10%", "50%", "99%", "99.5%", "99.9%", "100%", "100%", "n/a"]
    assert [percent(share) for share in given] == shown


def test_times_have_two_units():
    given = (0, 48, 59.6, 60, 432, 3599, 3600, 11_100, 86_399, 86_400, 187_200)
    shown = ["0 s", "48 s", "1 min", "1 min", "7 min 12 s", "59 min 59 s", "1 h", "3 h 5 min", "23 h 59 min", "1 d"]
    assert [duration(seconds) for seconds in given] == [*shown, "2 d 4 h"]
    assert times(1.5) == "1.5×" and times(8.0) == "8×"


def test_listings_and_long_texts():
    assert [listing(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    long = "".join(chr(ord("A") + i % 26) for i in range(49))
    assert shortened(long[:48]) == long[:48]
    assert shortened(long) == f"{long[:31]}…{long[-16:]}" and len(shortened(long)) == 48
    assert shortened("abcdefghij", 9) == "abcde…hij"


# --- Intervals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "n"), [(0.2, 50), (0.5, 3), (0.9, 1000)])
def test_wilsons_ends_are_the_shares_that_are_95_per_cent_of_the_noise_away(share, n):
    low, high = wilson(share, n)
    for end in (low, high):
        assert abs(share - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / n))
    assert 0 < low < share < high < 1
    assert wilson(0.0, n) == pytest.approx((0, Z95**2 / (n + Z95**2)))
    assert wilson(1.0, n) == pytest.approx((n / (n + Z95**2), 1)) and wilson(1.0, n)[1] <= 1


def test_a_mean_of_independent_scores():
    found = mean_of([0.0, 1.0, 1.0, 0.0])
    assert (found.mean, found.count, found.stderr) == (0.5, 4, pytest.approx(math.sqrt(1 / 3 / 4)))
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 4))
    assert mean_of([1.0]).stderr is None and mean_of([]) is None
    assert mean_of([0.0, 1.0]).stderr == pytest.approx(0.5)
    # Together with a 0 and a 1: mean 1/2, variance (2 * 1/4 + 2 * 0) / 4 = 1/8, so 2 * 1/4 / (1/8) = 4 answers.
    halves = mean_of([0.5, 0.5])
    assert halves.stderr == 0 and (halves.low, halves.high) == pytest.approx(wilson(0.5, 4))


def test_scores_of_a_cluster_count_as_one():
    found = mean_of([1.0, 1.0, 0.0], ["a", "a", "b"])
    assert (found.mean, found.count, found.stderr) == (pytest.approx(2 / 3), 3, pytest.approx(0.5))
    assert (found.low, found.high) == pytest.approx(wilson(2 / 3, 2))
    with pytest.raises(ValueError):
        mean_of([1.0, 1.0], ["a"])


def test_exp_overflows_to_infinity():
    assert exp(0.0) == 1 and exp(699.0) == math.exp(699) and exp(710.0) == math.inf


# --- Records ------------------------------------------------------------------------------------------------


def test_bins_are_where_the_lists_fit_each_other():
    found = {"e": [0, 2, 4, 8], "v": [0.5, None, 0.25], "count": [3, 3, 0], "low": [0.1, 0.2], "high": [1, 2, "x"]}
    assert bins(found, "e", "v", "low", "high") == [
        {"start": 0, "end": 2, "v": 0.5, "high": 1},
        {"start": 4, "end": 8, "v": 0.25, "high": None},
    ]
    assert bins(found, "e", "v", "count") == [{"start": 0, "end": 2, "v": 0.5, "count": 3}]
    places = found | {"e": [0, 50, 100]}
    assert [(one["start"], one["end"]) for one in bins(places, "e", "v")] == [(0, 0), (100, 100)]
    for edges in ([0, 2], [0, 2, 4, 8, 16], [0, 2, "x", 8], None):
        assert bins(found | {"e": edges}, "e", "v") == []
    assert bins({}, "e", "v") == []


def test_a_number_is_finite_and_no_truth_value():
    given = {"a": 3, "b": 2.5, "c": True, "d": "1", "e": math.nan, "f": math.inf, "g": None}
    assert {name: number(given, name) for name in (*given, "h")} == dict.fromkeys("cdefgh") | {"a": 3, "b": 2.5}
    assert mappings([{"a": 1}, 2, [], {}]) == [{"a": 1}, {}] and mappings({"a": 1}) == []


def test_records_that_differ_in_any_key_stand_beside_each_other(tmp_path):
    file = RecordFile(tmp_path / "x.jsonl")
    first = {"run": "a", "checkpoint": "b", "variant": "c", "length": 1, "seed": 0, "source": "s"}
    file.put([first | {"n": 0}, *({**first, name: "other", "n": 0} for name in first), first | {"n": 1.23456789}])
    assert [record["n"] for record in file.records] == [1.234568, *[0] * 6]


@pytest.mark.parametrize("left", ["", "{", "{" + "x" * 2**16, "x" * (2**16 - 1), "x" * 2**16, "x" * 200_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_part_of_a_line_is_cut_off_and_whole_lines_stay(tmp_path, left, whole):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"index": n}) + "\n" for n in range(whole)) + left)
    SampleFile(path).add([{"index": 7}, {"index": 0}] if whole else [{"index": 7}])
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [*range(whole), 7]


def test_forgotten_samples_are_gone_from_the_file_and_no_others(tmp_path):
    file = SampleFile(tmp_path / "samples.jsonl")
    file.add([{"index": n, "length": 8} for n in range(3)])
    wanted = [key for key, record in file.records.items() if record["index"] == 1]
    file.forget([*wanted, ("unknown",)])
    assert [json.loads(line)["index"] for line in file.path.read_text().splitlines()] == [0, 2]
    assert [record["index"] for record in file.records.values()] == [0, 2]


# --- Cells --------------------------------------------------------------------------------------------------


def answer(score, **more):
    return {"metric": "f1", "score": score} | more


def test_a_perplexity_has_the_interval_of_its_loss():
    cell = measure({"nll": math.log(8), "perplexity": 5.0, "stderr": 0.1})
    assert (cell.value, cell.score, cell.stderr, cell.share) == (pytest.approx(8), -math.log(8), 0.1, False)
    assert cell.ends == pytest.approx((8 * math.exp(-0.1 * Z95), 8 * math.exp(0.1 * Z95)))
    assert cell.interval == "6.58–9.73"  # 8 * e^-+0.196 = 8 / 1.2165, 8 * 1.2165
    assert (
        measure({"perplexity": 8.0}).score == pytest.approx(-math.log(8)) and measure({"perplexity": 8.0}).ends is None
    )
    assert measure({"perplexity": 8.0, "stderr": 0.1, "low": 7.0, "high": 9.5}).ends == (7, 9.5)
    assert measure({"perplexity": 0.0}) is None and measure({"perplexity": 0.5}).value == 0.5
    assert measure({"nll": 800.0}).value == math.inf


def test_which_number_of_a_record_counts():
    assert measure({"accuracy": 0.5, "score": 0.25, "perplexity": 3.0}).value == 0.5
    assert measure(answer(0.25, accuracy=0.5, nll=1.0)).value == 0.25
    assert measure({"f1": 0.25}).value == 0.25 and not measure({"f1": 0.25}).share
    assert measure(answer(None, accuracy=0.5)) is None and measure({}) is None
    assert not measure({"score": 0.5}).share and measure({"metric": "f1", "f1": 0.5}).share is False


def test_what_is_a_share_of_1():
    assert [measure(answer(value)).share for value in (-0.1, 0.0, 0.5, 1.0, 1.1)] == [False, True, True, True, False]
    assert not measure(answer(0.5, higher_is_better=False)).share and measure(answer(0.5, higher_is_better=True)).share
    assert [measure(answer(0.5, suite="lm_eval", metric=name)).share for name in ("acc", "ter", "chrf2")] == [1, 0, 0]
    assert measure(answer(0.5, suite="longbench", metric="rouge_l")).share


def test_an_interval_is_the_records_own_else_of_its_standard_error():
    assert measure(answer(0.5, stderr=0.1)).ends == pytest.approx((0.5 - 0.1959964, 0.5 + 0.1959964))
    assert measure(answer(0.95, stderr=0.1)).ends == pytest.approx((0.95 - 0.1959964, 1))
    assert measure(answer(0.05, stderr=0.1)).ends[0] == 0
    assert measure(answer(5.0, stderr=1.0)).ends == pytest.approx((5 - Z95, 5 + Z95))
    assert measure(answer(0.5, stderr=0.1, low=0.4)).ends == pytest.approx((0.5 - 0.1959964, 0.5 + 0.1959964))
    given = measure(answer(0.5, low=0.4, high=0.6))
    assert given.ends == (0.4, 0.6) and given.stderr == pytest.approx(0.1 / Z95) and given.interval == "40–60%"
    assert (
        measure(answer(0.5)).ends is None and measure(answer(0.5)).interval == "" == measure({"accuracy": 0.5}).interval
    )


def test_all_or_none_right_has_the_error_of_agresti_and_coull_and_wilsons_interval():
    for right in (0.0, 1.0):
        cell = measure({"accuracy": right, "stderr": 0.0, "queries": 96, "samples": 5})
        assert cell.stderr == pytest.approx(math.sqrt(0.02 * 0.98 / 100))  # 2 more right and 2 more wrong: 2 of 100
        assert cell.ends == pytest.approx(wilson(right, 96))
    assert measure({"accuracy": 1.0, "stderr": 0.0}).stderr == 0
    assert measure(answer(0.5, stderr=0.1, samples=96)).stderr == 0.1
    assert measure(answer(1.0, samples=96)).stderr == pytest.approx((1 - wilson(1.0, 96)[0]) / (2 * Z95))


def test_less_is_better_turns_the_score_around():
    perplexity = measure(answer(20.0, metric="word_perplexity", higher_is_better=False, stderr=0.5))
    assert (perplexity.value, perplexity.score, perplexity.stderr) == (20, -math.log(20), 0.5 / 20)
    bits = measure(answer(2.0, metric="bits_per_byte", higher_is_better=False, stderr=0.5))
    assert (bits.value, bits.score, bits.stderr, bits.shown) == (2, -2, 0.5, "2.00")
    assert measure(answer(2.0, metric="perplexity", stderr=0.5)).score == 2
    assert measure(answer(0, metric="word_perplexity", higher_is_better=False)).score == 0


def cell(score, stderr=None, **record):
    return Cell(score, score, stderr, record)


def test_a_difference_counts_beyond_the_noise_of_both():
    # 1.96 * hypot(0.03, 0.04) = 0.098
    assert compare(cell(0.6, 0.03), cell(0.5, 0.04)) == "win" and compare(cell(0.5, 0.03), cell(0.6, 0.04)) == "loss"
    assert compare(cell(0.59, 0.03), cell(0.5, 0.04)) == "tie" == compare(cell(0.5, 0.03), cell(0.59, 0.04))
    assert compare(cell(0.5), cell(0.5)) == "tie" and compare(cell(0.51), cell(0.5)) == "win"
    assert compare(cell(0.5), cell(0.45, 0.03)) == "tie" == compare(cell(0.5, 0.03), cell(0.45))


# --- Tables -------------------------------------------------------------------------------------------------


def table_of(cells):
    """A table of (label, factor) -> cell."""
    columns = tuple(Length(factor, None) for factor in dict.fromkeys(factor for _, factor in cells))
    return Table(columns, {label: {} for label, _ in cells}, cells, "s")


def test_names_of_lengths():
    assert [Length(*ends).title for ends in ((2, 128), (None, 2048), (None, None))] == [
        "2×",
        "2,048 tokens",
        "the sequences' own lengths",
    ]
    assert [Length(*ends).small for ends in ((2, 2048), (2, None), (None, 128))] == ["2,048", "", ""]
    assert [Length(*ends).key for ends in ((2, 128), (None, 128), (None, None))] == [2, 128, 0]
    assert source_of({"source": "a", "task": "b"}) == "a" and source_of({"task": "b"}) == "b" and source_of({}) == ""


def test_the_best_of_a_length_and_what_ties_with_it():
    table = table_of(
        {("a", 1): cell(0.5, 0.02), ("b", 1): cell(0.55, 0.02), ("c", 1): cell(0.3, 0.02), ("d", 2): cell(1)}
    )
    assert table.best(table.columns[0]) == ("b", {"a"}) and table.best(Length(4, None)) == ("", set())
    certain = table_of({("a", 1): cell(0.5, 0.2), ("b", 1): cell(0.55)})
    assert certain.best(certain.columns[0]) == ("b", set())
    assert list(table.column(table.columns[1])) == ["d"] and table.higher_is_better
    for record in ({"nll": 1}, {"perplexity": 1}, {"higher_is_better": False}):
        assert not table_of({("a", 1): cell(1, None, **record), ("b", 1): cell(1)}).higher_is_better
    asked = Cell(1, 1, None, {"metric": "f1", "score": 1})
    task = table_of({("a", 1): cell(1), ("b", 1): asked})
    assert (task.prompted, task.metric, table.prompted, table.metric) == (True, "f1", False, "")


def test_the_latest_step_of_a_label_counts_and_its_lengths():
    def given(label, factor, length, **record):
        return "s", label, Length(factor, length), {"accuracy": 0.5} | record

    rows = [given("a", 1, 64, step=5), given("a", 2, 128, step=9, accuracy=0.4), given("a", 2, 128, step=9)]
    rows += [given("b", 2, 256), given("b", 4, 256, accuracy=None)]
    (table,) = arrange(rows)
    assert list(table.cells) == [("a", 2), ("b", 2), ("b", 4)] and table.cells["a", 2].value == 0.5
    assert table.columns == (Length(2, None), Length(4, 256))  # of two training lengths
    assert math.isnan(table.cells["b", 4].value) and table.best(Length(4, None))[0] == "b"
    two = arrange([given("a", 1, 64, source="x"), ("t", "a", Length(1, 64), {"source": "x", "accuracy": 1.0})])
    assert [(one.suite, one.source) for one in two] == [("s", "x"), ("t", "x")]


def share(value, stderr=0.03, **record):
    return Cell(value, value, stderr, record, True)


def test_means_are_of_shares_that_all_tasks_have():
    column = Length(1, None)
    tables = [table_of({("a", 1): share(0.2, samples=10), ("b", 1): share(0.5)}),
              table_of({("a", 1): share(0.6, 0.04, samples=20), ("b", 1): share(math.nan)})]  # fmt: skip
    mean = mean_cell(tables, "a", column)
    assert (mean.value, mean.stderr, mean.share) == (pytest.approx(0.4), pytest.approx(0.05 / 2), True)
    assert mean.ends == pytest.approx((0.4 - Z95 * 0.025, 0.4 + Z95 * 0.025))
    assert mean.record == {"scores": {}, "samples": 30, "truncated": None}
    assert mean_cell(tables, "b", column) is None and mean_cell(tables, "c", column) is None
    certain = mean_cell([tables[0], table_of({("a", 1): share(0.6, None)})], "a", column)
    assert (certain.value, certain.stderr, certain.ends) == (pytest.approx(0.4), None, None)
    number_of_100 = table_of({("a", 1): share(0.6), ("b", 1): cell(30.0)})
    diverged = table_of({("a", 1): share(math.nan)})
    assert with_shares([*tables, number_of_100, diverged]) == tables


# --- Variants -----------------------------------------------------------------------------------------------


def test_the_papers_scale_is_1_up_to_the_training_length():
    assert variants.paper_beta(0.412, 4.0) == pytest.approx(1.571, abs=5e-4)  # 1 + 0.412 * 1.386
    assert variants.paper_beta(0.412, 0.5) == 1 == variants.paper_beta(0.412, 1.0)
    assert variants.label("DroPE", "paper beta", 0.103) == "DroPE, paper's β (c = 0.103)"
    assert variants.label("RoPE", "NTK") == "RoPE + NTK" and variants.label("RoPE", "as trained") == "RoPE"


def test_what_a_model_and_a_method_make():
    def kind(model, method):
        return variants.kind({"model": model, "variant": method})

    assert kind("RoPE", "as trained") == "RoPE" and kind("RoPE", "cropped") == "cropped" and kind("RoPE", "beta") == ""
    assert kind("DroPE", "paper beta") == "DroPE paper beta" and kind("drope", "as trained") == "DroPE"
    assert kind("NoPE", "beta") == "NoPE beta" and kind("NoPE", "NTK") == "" and kind("ALiBi", "as trained") == ""
    rotary = {model: variants.is_rotary({"model": model}) for model in ("RoPE", "p-RoPE", "DroPE", "NoPE", "")}
    assert [model for model, rotates in rotary.items() if rotates] == ["RoPE", "p-RoPE"]


def test_up_to_the_training_length_a_scaling_changes_nothing():
    asked = [variants.is_unchanged({"variant": "NTK"}, factor) for factor in (None, 0.5, 1, 1.5)]
    assert asked == [False, True, True, False] and not variants.is_unchanged({"variant": "as trained"}, 1.0)


def test_variants_are_in_the_order_of_tables_and_others_by_label_behind():
    given = {"z": ("Mamba", ""), "y": ("DroPE", "beta"), "b": ("Mamba", ""), "x": ("RoPE", "PI"), "w": ("NoPE", "beta")}
    given = {label: {"model": model, "variant": method} for label, (model, method) in given.items()}
    assert list(variants.in_order(given)) == ["x", "y", "w", "b", "z"]


def test_a_record_file_reads_again_what_another_process_wrote(tmp_path, monkeypatch):
    """Its own writes are not read again: beside many records that would take their memory a second time."""
    from pe_lab.results import records

    path = tmp_path / "perplexity.jsonl"
    path.write_text(json.dumps({"source": "a", "nll": 1.0}) + "\n")
    ours, theirs = records.RecordFile(path), records.RecordFile(path)
    reads = []
    read = records.RecordFile._read
    monkeypatch.setattr(records.RecordFile, "_read", lambda self: reads.append(self) or read(self))
    ours.put([{"source": "b", "nll": 2.0}])
    ours.put([{"source": "c", "nll": 3.0}])
    assert reads == []
    theirs.put([{"source": "d", "nll": 4.0}])
    ours.put([{"source": "e", "nll": 5.0}])
    assert reads == [theirs, ours]
    assert [json.loads(line)["source"] for line in path.read_text().splitlines()] == ["a", "b", "c", "d", "e"]
