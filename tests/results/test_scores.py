"""Files of runs as tables: labels, lengths, histories, averages, and scores by the length of a sequence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pe_lab.errors import UserError
from pe_lab.results.runs import PhaseFiles, RunFiles, read_run, read_runs
from pe_lab.results.scores import (
    averages,
    build_tables,
    by_sequence_length,
    column_of,
    columns_of,
    histories,
    label_of,
    tokens_trained,
    variants_of,
)
from pe_lab.results.table import Bucket


def needles(label="RoPE", factor=2.0, accuracy=0.5, **more):
    return {
        "label": label, "model": label.split()[0], "variant": "as trained", "length": factor and int(64 * factor),
        "factor": factor, "accuracy": accuracy, "stderr": 0.01, "step": 800, "phase": "pretrain", "source": "needles",
    } | more  # fmt: skip


def answered(label="RoPE", score=0.5, task="a", length=128, **more):
    return {
        "label": label, "model": label, "variant": "as trained", "metric": "f1", "score": score, "length": length,
        "source": task, "stderr": 0.01, "samples": 100,
    } | more  # fmt: skip


def run_of(records, suite="needles", name="one", phases=None):
    if phases is None:
        phases = [PhaseFiles("pretrain", {"sequence_length": 64, "tokens_per_step": 2048, "status": "complete"})]
    return RunFiles(name, Path(name), {}, phases, {suite: list(records)}, [])


# --- Labels and lengths -------------------------------------------------------------------------------------


def test_a_variant_without_a_label_has_its_model_and_method():
    assert label_of({"label": "mine", "model": "RoPE", "variant": "NTK"}) == "mine"
    assert label_of({"model": "RoPE", "variant": "NTK"}) == "RoPE + NTK"
    assert label_of({"model": "RoPE", "variant": None}) == "RoPE"
    assert label_of({}) == "unnamed" and label_of({"label": 3}) == "3"


def test_the_factor_of_a_length_is_the_records_own_or_of_the_training_length():
    run, bare = run_of([]), run_of([], phases=[])
    assert column_of(run, {"length": 96}) == column_of(run, {"length": 96, "factor": 1.5})
    assert column_of(run, {"length": 96}).factor == 1.5 and column_of(run, {"length": 96}).length == 96
    assert column_of(run, {"length": 96, "factor": 3}).factor == 3
    assert column_of(run, {"factor": 2}).key == 2 and column_of(run, {"factor": 2}).length is None
    assert column_of(bare, {"length": 96}).factor is None and column_of(bare, {"length": 96}).key == 96
    assert column_of(run, {"accuracy": 0.5}) is None
    own = column_of(run, {"metric": "f1", "score": 0.5})
    assert (own.factor, own.length, own.key) == (None, None, 0)


def test_one_label_of_two_phases_is_two_variants():
    mixed = [needles(phase="pretrain"), needles(phase="later", accuracy=0.25), needles("DroPE", phase="later")]
    (table,) = build_tables("needles", [run_of(mixed)])
    assert list(table.rows) == ["RoPE (later)", "RoPE (pretrain)", "DroPE"]
    assert table.cells["RoPE (later)", 2.0].value == 0.25
    runs = [run_of([needles(phase="pretrain")]), run_of([needles(phase="later")], name="two")]
    (table,) = build_tables("needles", runs)
    assert set(table.rows) == {"one: RoPE", "two: RoPE"}


def test_records_without_a_number_or_a_length_are_counted_by_source():
    rows = [needles(), needles(factor=None), needles("DroPE", accuracy=None), needles(source="other")]
    one, other = build_tables("needles", [run_of(rows)])
    assert (one.source, one.skipped, other.source, other.skipped) == ("other", 0, "needles", 2)
    assert list(other.rows) == ["RoPE"]


def test_the_source_with_most_tokens_is_first_and_symbolic_needles_are_last():
    def text(source, tokens, factor):
        return needles(factor=factor, source=source) | {"accuracy": None, "nll": 2.0, "tokens": tokens}

    rows = [text("needles", 900, 4), text("few", 10, 2), text("many", 20, 4), text("many", 30, 1), text("some", 25, 1)]
    tables = build_tables("perplexity", [run_of(rows, "perplexity")])
    assert [table.source for table in tables] == ["many", "some", "few", "needles"]
    assert [column.key for column in tables[0].columns] == [1, 4]
    tasks = build_tables("ruler", [run_of([answered(task="b"), answered(task="a", tokens=50)], "ruler")])
    assert [table.source for table in tasks] == ["b", "a"]  # as the suite asked them


# --- Scores by tokens trained -------------------------------------------------------------------------------


def test_a_history_has_the_checkpoints_of_a_phase_and_the_longest_sequences_first():
    rows = [needles(step=step, factor=factor, accuracy=step / 1000) for step in (800, 400) for factor in (2.0, 4.0)]
    rows += [needles("DroPE"), needles("RoPE + NTK", step=400), needles("RoPE + NTK", step=200)]
    rows += [needles(step=None), needles(step=200, accuracy=None), needles(step=300, factor=None, length=None)]
    long, short = histories(run_of(rows), "needles")
    assert (long[0], long[1].key, short[1].key) == ("pretrain", 4, 2)
    assert [column.length for column in long[2].columns] == [400 * 2048, 800 * 2048]
    assert {key: cell.value for key, cell in long[2].cells.items()} == {
        ("RoPE", 400 * 2048): 0.4,
        ("RoPE", 800 * 2048): 0.8,
    }
    assert list(short[2].rows) == ["RoPE", "RoPE + NTK"]  # DroPE has one checkpoint
    assert [column.length for column in short[2].columns] == [200 * 2048, 400 * 2048, 800 * 2048]
    assert histories(run_of([needles(), needles("DroPE", step=400)]), "needles") == []


def test_the_tokens_of_a_record_are_its_own_or_its_steps():
    run = run_of([])
    assert tokens_trained(run, {"tokens_trained": 5.0, "step": 3, "phase": "pretrain"}) == 5
    assert tokens_trained(run, {"step": 3, "phase": "pretrain"}) == 3 * 2048
    assert tokens_trained(run, {"step": 3, "phase": "other"}) is None
    assert tokens_trained(run, {"phase": "pretrain"}) is None


# --- Tasks --------------------------------------------------------------------------------------------------


def tasks_of(scores, suite="ruler"):
    """Tables of (task, label, score, length)."""
    rows = [answered(label, score, task, length) for task, label, score, length in scores]
    return build_tables(suite, [run_of(rows, suite)])


def test_lengths_and_variants_of_several_tasks_are_each_named_once():
    tables = tasks_of([("a", "DroPE", 0.5, 256), ("b", "RoPE", 0.5, 64), ("b", "RoPE", 0.4, 256)])
    assert [column.key for column in columns_of(tables)] == [1, 4] and list(variants_of(tables)) == ["RoPE", "DroPE"]


@pytest.mark.parametrize(("of", "name"), [(2, "average"), (3, "mean of 2 of 3 tasks"), (None, "mean of 2 tasks")])
def test_an_average_says_of_how_many_tasks_it_is(of, name):
    scores = [("a", "RoPE", 0.2, 64), ("b", "RoPE", 0.6, 64), ("a", "RoPE", 0.1, 128), ("b", "DroPE", 0.6, 64)]
    average = averages(tasks_of(scores), {"ruler": of})
    assert average.source == name and [column.key for column in average.columns] == [1]
    assert list(average.rows) == ["RoPE"]
    assert average.cells["RoPE", 1.0].value == pytest.approx(0.4)
    assert average.cells["RoPE", 1.0].stderr == pytest.approx(math.sqrt(2) * 0.01 / 2)


def test_more_tasks_than_a_suite_has_are_no_average_of_it():
    assert (
        averages(tasks_of([("a", "RoPE", 0.2, 64), ("b", "RoPE", 0.6, 64)]), {"ruler": 1}).source == "mean of 2 tasks"
    )


def test_nothing_is_averaged_of_one_task_of_other_suites_or_without_a_common_variant():
    both = [("a", "RoPE", 0.2, 64), ("b", "RoPE", 0.6, 64)]
    assert averages(tasks_of(both[:1]), {"ruler": None}) is None
    assert averages(tasks_of(both), {"niah": None}) is None
    assert averages(tasks_of([both[0], ("b", "DroPE", 0.6, 64)]), {"ruler": None}) is None


def test_the_title_of_a_bucket_is_in_thousands_of_1024_where_both_ends_are():
    titles = [Bucket(None, end, start).title for start, end in ((4096, 8192), (0, 1000), (1000, 4096), (1024, 1500))]
    assert titles == ["4–8K", "0–1,000", "1,000–4,096", "1,024–1,500"]


def test_buckets_have_the_numbers_of_the_record_and_multiples_of_the_training_length():
    lengths = {
        "edges": [0, 32, 64, 96, 128], "score": [0.0, 1.0, 1.5, -0.5], "low": [0.0, 0.5, 1.0, 0.0],
        "high": [0.25, 1.0, 2.0, 0.0], "count": [4, 5, 6, 7],
    }  # fmt: skip
    rows = [answered(by_length=lengths, length=None, scores={"all": 1}, truncated=3)]
    rows += [answered("DroPE", length=None)]
    (table,) = build_tables("longbench", [run_of(rows, "longbench")])
    found = by_sequence_length(table, 64)
    assert [(column.start, column.length, column.small) for column in found.columns] == [
        (0, 32, "0–0.5×"),
        (32, 64, "0.5–1×"),
    ]  # a score outside 0..1 is none
    cell = found.cells["RoPE", 64.0]
    assert (cell.value, cell.ends, cell.record["samples"]) == (1, (0.5, 1), 5)
    assert not cell.record["truncated"] and list(found.rows) == ["RoPE"]
    assert [column.small for column in by_sequence_length(table).columns] == ["", ""]
    lengths["of"] = "characters"
    assert [column.small for column in by_sequence_length(table, 64).columns] == ["", ""]
    del rows[0]["by_length"]
    assert by_sequence_length(build_tables("longbench", [run_of(rows, "longbench")])[0]) is None


# --- Runs ---------------------------------------------------------------------------------------------------


def test_a_phase_counts_its_steps_and_tokens():
    logged = [{"step": 10, "tokens": 500, "loss": 3.0}, {"step": 30, "loss": 2.0}, {"step": 20, "tokens": 900}]
    phase = PhaseFiles("p", {"tokens_per_step": 50, "status": "complete"}, logged)
    assert (phase.steps_done, phase.tokens, phase.running, phase.length) == (30, 900, False, None)
    assert phase.series("loss") == [(500, 3), (1500, 2)]  # 30 steps of 50 tokens
    unlogged = PhaseFiles(
        "p", {"tokens_per_step": 50, "sequence_length": 64}, [{"step": 30, "loss": 2.0}, {"loss": 1.0}]
    )
    assert (unlogged.tokens, unlogged.running, unlogged.length) == (1500, True, 64)
    assert unlogged.series("loss") == [(1500, 2)]
    assert PhaseFiles("p", {}, [{"step": 30, "loss": 2.0}]).series("loss") == [(30, 2)]  # by steps
    assert (PhaseFiles("p", {}).steps_done, PhaseFiles("p", {}).tokens) == (0, 0)


def test_the_shares_of_a_mixture_add_up_to_1():
    phase = PhaseFiles("p", {"mixture": [{"source": "a", "weight": 3}, {"source": "b", "weight": 1}, {"weight": None}]})
    assert phase.mixture == [("a", 0.75), ("b", 0.25), ("?", 0)]
    assert PhaseFiles("p", {"mixture": [{"source": "a", "weight": 0}]}).mixture == []
    assert PhaseFiles("p", {"mixture": [{"source": "a", "weight": 0.25}]}).mixture == [("a", 1)]


def test_tokens_add_up_over_the_phases_of_a_run():
    phases = [
        PhaseFiles(name, {"tokens_per_step": 10}, [{"step": steps}]) for name, steps in (("a", 3), ("b", 4), ("c", 5))
    ]
    run = run_of([], phases=[PhaseFiles("none", {}), *phases])
    assert (run.tokens_until("b"), run.tokens_until("c"), run.tokens_until("d")) == (70, 120, None)
    assert run.phase("b").steps_done == 4 and run.phase("d") is None and run.training_length is None


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def test_phases_are_in_the_order_of_their_index_and_then_by_name(tmp_path):
    files = {f"{name}/phase.json": {"index": index} for name, index in (("a", 2), ("b", None), ("c", 1), ("d", 1))}
    run = read_run(write(tmp_path, files | {"run.json": {"name": "mine"}, "phase.json": {"phase": "own"}}))
    assert [phase.name for phase in run.phases] == ["b", "own", "c", "d", "a"]
    assert run.name == "mine" and run.problems == []  # phases without steps miss no file


@pytest.mark.parametrize(
    "files",
    [
        {"run.json": {}},
        {"phase.json": {}},
        {"a/phase.json": {}},
        {"evaluation/needles.jsonl": {"accuracy": 1}},
    ],
)
def test_each_file_of_a_run_makes_a_run(tmp_path, files):
    found = read_run(write(tmp_path / "mine", files))
    assert found.name == "mine" and found.problems == (["run.json is missing."] if "a/phase.json" in files else [])
    assert found.evaluation == ({"needles": [{"accuracy": 1}]} if "evaluation/needles.jsonl" in files else {})


def test_a_directory_without_any_of_them_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        read_run(write(tmp_path, {"source.json": {"source": "x"}}))


def test_a_phase_with_steps_must_have_metrics_and_need_not_have_speed(tmp_path):
    assert read_run(write(tmp_path, {"phase.json": {"steps": 5}})).problems == ["metrics.jsonl is missing."]
    found = read_run(write(tmp_path, {"phase.json": {}, "metrics.jsonl": '{"step": 4}\n', "speed.jsonl": '{"a": 1}'}))
    assert found.problems == [] and found.phases[0].steps_done == 4 and found.phases[0].speed == [{"a": 1}]


@pytest.mark.parametrize(
    ("lines", "problem", "kept"),
    [
        ('{"step": 1}\n{"st', "The last line of metrics.jsonl was cut off", [1]),
        ('{"st\n{"step": 1}\n\n3\n{"step": 2}\n', "metrics.jsonl: 2 line(s) could not be read and are left out "
         "(first: line 1).", [1, 2]),
        ('\n{"step": 1}\n{"st\n{"step": 2}', "metrics.jsonl: 1 line(s) could not be read and are left out "
         "(first: line 3).", [1, 2]),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_read_are_named(tmp_path, lines, problem, kept):
    found = read_run(write(tmp_path, {"phase.json": {}, "metrics.jsonl": lines}))
    (said,) = found.problems
    assert said.startswith(problem) and [record["step"] for record in found.phases[0].metrics] == kept


def test_damaged_json_is_one_problem_and_a_missing_one_another(tmp_path):
    found = read_run(write(tmp_path, {"run.json": "[", "a/phase.json": {}}))
    assert found.problems == ["run.json could not be read: it holds no whole JSON object."]
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    (said,) = read_run(tmp_path).problems
    assert said.startswith("run.json could not be read (")


def test_records_belong_to_the_suite_that_they_name_or_to_their_file(tmp_path):
    lines = '{"suite": "ruler", "n": 1}\n{"n": 2}\n'
    found = read_run(write(tmp_path, {"evaluation/a.jsonl": lines, "evaluation/ruler.jsonl": '{"n": 3}'}))
    assert {suite: [record["n"] for record in records] for suite, records in found.evaluation.items()} == {
        "ruler": [1, 3],
        "a": [2],
    }


@pytest.mark.parametrize(
    ("what", "source"),
    [("converted from hf:a", "hf:a"), ("read from b.gguf", "b.gguf"), ("initialized at random", "")],
)
def test_an_imported_model_is_known_by_its_lineage_unless_a_file_names_it(tmp_path, what, source):
    write(tmp_path, {"phase.json": {"lineage": [{"what": "x"}, {"what": what}]}})
    assert read_run(tmp_path).source == source
    assert read_run(write(tmp_path, {"source.json": {"source": "file"}})).source == "file"


def test_runs_of_different_names_keep_them(tmp_path):
    for folder, name in (("x", "same"), ("y", "same"), ("z", "other")):
        write(tmp_path / folder, {"run.json": {"name": name}})
    assert [run.name for run in read_runs([tmp_path / name for name in "zyx"])] == ["other", "y", "x"]
