"""The table of a sweep against numbers computed by hand."""

import csv
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from tiny_runs import write_recipe

from pe_lab.errors import ConfigError
from pe_lab.lab.sweeps import collect, make_sweep, save_sweep, summarize
from pe_lab.lab.sweeps.results import shown, write_results
from pe_lab.results.records import announced

# (rate, seed) -> the last validation loss
LOSSES = {
    ("0.1", 0): 3.0, ("0.1", 1): 3.2, ("0.1", 2): 3.1,
    ("0.2", 0): 3.5, ("0.2", 1): 3.8, ("0.2", 2): 3.5,
    ("0.4", 0): 3.1, ("0.4", 1): 3.3,
}  # fmt: skip
T2 = 4.302653  # Student's t at 97.5%, 2 degrees of freedom


@pytest.fixture
def sweep(tmp_path):
    recipe = str(write_recipe(tmp_path / "recipe"))
    key = "phases.0.optimizer.learning_rate"
    phase = "[{'name': 'only', 'steps': 20, 'sequence_length': 16, 'batch_size': 8, 'optimizer': {'warmup_steps': 2}}]"
    made = make_sweep(recipe, {key: ["0.1", "0.2", "0.4"]}, 3, tmp_path / "s", {"phases": phase})
    for cell in made.cells:
        value = LOSSES.get((cell.setting[key], cell.seed))
        directory = made.directory / cell.name / "only"
        directory.mkdir(parents=True)
        info = {"phase": "only", "steps": 20, "tokens_per_step": 128, "status": "complete" if value else "running"}
        (directory / "phase.json").write_text(json.dumps(info))
        records = [{"step": n, "tokens": 128 * n, "loss": 10.0 if n < 19 else n / 10} for n in range(1, 21)]
        records += [{"step": 10, "validation_loss": 9.0}, {"step": 20, "validation_loss": value or 9.0}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (made.directory / cell.name / "run.json").write_text(json.dumps({"name": "tiny", "config": {}}))
        evaluation = made.directory / cell.name / "evaluation"
        evaluation.mkdir()
        score = {
            "suite": "needles",
            "source": "needles",
            "label": "RoPE",
            "length": 32,
            "accuracy": 0.9 - cell.seed / 10,
        }
        (evaluation / "needles.jsonl").write_text(json.dumps(score) + "\n")
        loss = {"suite": "perplexity", "source": "stdlib", "label": "RoPE", "length": 32, "nll": cell.seed + 1.0}
        # Of an earlier checkpoint, which does not count.
        early = {**loss, "step": 5, "nll": 9.0}
        lines = [json.dumps(one) for one in ({**loss, "step": 20}, early)]
        (evaluation / "perplexity.jsonl").write_text("\n".join(lines) + "\n")
    return save_sweep(made)


def test_means_intervals_and_paired_differences(sweep):
    table = summarize(sweep, collect(sweep))
    assert [next(iter(one.values.values())) for one in table.numbers.rows.values()] == ["0.1", "0.4", "0.2"]
    best, middle, worst = table.numbers.rows
    found = table.cell(best, "validation_loss")
    half = T2 * 0.1 / math.sqrt(3)
    assert (found.value, found.ends[1]) == pytest.approx((3.1, 3.1 + half), abs=1e-6)
    # The training loss is the mean of the last tenth of the steps: 19 and 20.
    assert table.cell(best, "loss").value == pytest.approx(1.95)
    differences = table.differences("validation_loss")
    assert set(differences) == {middle, worst} and table.baseline == best == "learning_rate=0.1"
    # Two pairs: 0.1 and 0.1, whose t-test has no variance.
    difference = differences[middle]
    assert (difference.mean, difference.low, difference.count) == pytest.approx((0.1, 0.1, 2))
    setting = table.numbers.rows[middle]
    assert (setting.missing, [record.cell.seed for record in setting.records]) == (1, [0, 1])
    # Three pairs: 0.5, 0.6, 0.4; t = 0.5 / (0.1 / sqrt 3) = 8.66 with p = 0.01307; the larger of two: not doubled.
    difference = differences[worst]
    assert (difference.mean, difference.high) == pytest.approx((0.5, 0.5 + half), abs=1e-6)
    assert difference.corrected == pytest.approx(0.01307, abs=1e-5)


def test_scores_of_evaluations_are_metrics(sweep):
    name = "needles (RoPE) at 32"
    table = summarize(sweep, collect(sweep), metric=name, baseline="learning_rate=4e-1")
    assert table.higher == {name} and not table.best_is_baseline
    # Higher is better: 0.4 lacks its worst seed.
    first, second, _ = table.numbers.rows
    assert table.numbers.rows[first].values == {"phases.0.optimizer.learning_rate": "0.4"}
    two = table.cell(first, name)
    assert (two.value, *two.ends, len(two.scores)) == pytest.approx((0.85, 0.8, 0.9, 2))  # the range of two seeds
    losses = table.cell(second, "log perplexity stdlib (RoPE) at 32")
    # Perplexities e^1, e^2 and e^3 are averaged as losses.
    assert "log perplexity stdlib (RoPE) at 32" not in table.higher and losses.value == pytest.approx(2)
    assert losses.ends[1] == pytest.approx(2 + T2 / math.sqrt(3), abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "baseline", "message"),
    [
        ("validation_los", None, "Did you mean 'validation_loss'"),
        (None, "learning_rate=0.3", "names 0 settings"),
        (None, "rate=0.1", "the grid has no 'rate'"),
    ],
)
def test_what_is_refused(sweep, metric, baseline, message):
    with pytest.raises(ConfigError, match=message):
        summarize(sweep, collect(sweep), metric, baseline)


def test_files(sweep):
    table = write_results(sweep)
    with open(sweep.directory / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["setting"] for row in rows] == ["learning_rate=0.1", "learning_rate=0.4", "learning_rate=0.2"]
    assert float(rows[2]["validation_loss difference"]) == pytest.approx(0.5) and rows[0]["validation_loss p"] == ""
    with open(sweep.directory / "cells.csv") as file:
        assert [float(row["validation_loss"]) for row in csv.DictReader(file)] == list(LOSSES.values())
    text = shown(table)
    assert "3.1 ± 0.2484" in text and "+0.5 ± 0.25" in text and "2 of 3" in text
    assert "| 0.2 | 3 | 3.6 ± " in (sweep.directory / "table.md").read_text()
    assert (sweep.directory / "figure.png").read_bytes().startswith(b"\x89PNG")
    drawn = " ".join(ElementTree.parse(sweep.directory / "figure.svg").getroot().itertext())
    assert "learning_rate=0.4" in drawn and "validation loss, nats per token" in drawn and "training tokens" in drawn
    assert "learning_rate=0.1__seed=0" in (sweep.directory / "report.html").read_text()


def test_nothing_is_written_before_a_cell_is_complete(tmp_path):
    sweep = make_sweep(str(write_recipe(tmp_path / "recipe")), {}, 2, tmp_path / "s")
    assert write_results(save_sweep(sweep)).records == ()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["sweep.json"]


def test_a_cell_that_was_trained_for_longer_counts_with_the_steps_of_the_sweep(sweep):
    """One cell goes on from 20 to 40 steps, and is evaluated there: its numbers stay those of step 20."""
    before = {one.cell.name: one.metrics for one in collect(sweep)}
    run = sweep.directory / collect(sweep)[0].cell.name
    info = json.loads((run / "only" / "phase.json").read_text())
    (run / "only" / "phase.json").write_text(json.dumps(info | {"steps": 40}))
    with (run / "only" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": 0.5, "tokens": 5120}\n{"step": 40, "validation_loss": 0.5}\n')
    with (run / "evaluation" / "perplexity.jsonl").open("a") as file:
        late = {"suite": "perplexity", "source": "stdlib", "label": "RoPE", "length": 32, "phase": "only", "step": 40}
        file.write(json.dumps({**late, "nll": 0.1}) + "\n")
    assert {one.cell.name: one.metrics for one in collect(sweep)} == before
    assert f"{run.name}: It has been trained for longer" in shown(summarize(sweep, collect(sweep)))


def test_a_cell_that_was_trained_for_longer_says_what_its_evaluation_lacks(sweep):
    """Of the evaluation of step 20 needles are missing. That of step 40, which is not complete either, is no part."""
    run = sweep.directory / collect(sweep)[0].cell.name
    info = json.loads((run / "only" / "phase.json").read_text())
    (run / "only" / "phase.json").write_text(json.dumps(info | {"steps": 40}))
    with (run / "only" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": 0.5, "tokens": 5120}\n')
    for step in (20, 40):
        unit = {"suite": "needles", "source": "needles", "label": "DroPE", "phase": "only", "step": step, "length": 32}
        with pytest.raises(KeyboardInterrupt), announced(run / "evaluation", [unit]):
            raise KeyboardInterrupt
    first = collect(sweep)[0]
    longer, missing = first.remarks
    assert "It has been trained for longer" in longer and "1 of 1 measurements are missing" in missing
    assert "log perplexity stdlib (RoPE) at 32" in first.metrics


def test_scores_of_a_former_step_are_no_metric(sweep):
    run = sweep.directory / collect(sweep)[0].cell.name
    lines = (run / "evaluation" / "perplexity.jsonl").read_text().splitlines()
    (run / "evaluation" / "perplexity.jsonl").write_text(lines[1] + "\n")  # of step 5 of 20
    first = collect(sweep)[0]
    assert not any("perplexity" in name for name in first.metrics)
    table = shown(summarize(sweep, collect(sweep)))
    assert "(2 of 3)" in table and "1 more cells" not in table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found | {"cells": []}, "it has no cells"),
        (lambda found: found | {"cells": found["cells"][:1] * 2}, "two cells have one name"),
        (lambda found: found | {"cells": [found["cells"][0] | {"name": "../x"}]}, "no name that a directory can have"),
        (lambda found: found | {"cells": [found["cells"][0] | {"seed": math.inf}]}, "OverflowError"),
        (lambda found: found | {"cells": [found["cells"][0] | {"config": {"phases": []}}]}, "is damaged"),
        (lambda found: found | {"evaluation": 7}, "TypeError"),
        (lambda found: [found], "is damaged"),
    ],
)
def test_an_odd_sweep_file_is_one_message(sweep, change, words):
    from pe_lab.errors import DataError
    from pe_lab.lab.sweeps import load_sweep

    path = sweep.directory / "sweep.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=words):
        load_sweep(sweep.directory)
