"""Scores of former checkpoints, of an evaluation that is not complete, and on other samples: marked, and not judged."""

from __future__ import annotations

import json

import pytest
from run_directories import make_run

from pe_lab.analysis.runs import read_run, read_runs
from pe_lab.analysis.standing import former_models
from pe_lab.page.document import build_page, headline, joint_headline
from pe_lab.page.run_section import work_out
from pe_lab.results.unfinished import FOLDER, announced

STEPS = (("pretrain", "rope(base=10000)", 60), ("recalibrate", "nope", 40))


def rewrite(run, change, suites=("needles", "perplexity", "beta")):
    """Changes the records of a run; those for which `change` gives None are gone."""
    for suite in suites:
        path = run / "evaluation" / f"{suite}.jsonl"
        records = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(one) + "\n" for one in records if one is not None))


def run_with(parent, change, name="demo"):
    run = make_run(parent, name, phases=STEPS)
    rewrite(run, change)
    return run


def test_scores_of_a_former_step_are_marked_above_the_headline(tmp_path):
    steps = {"pretrain": 60, "recalibrate": 20}  # 40 were trained
    run = run_with(tmp_path, lambda record: record | {"step": steps[record["phase"]]})
    page, words = build_page(read_runs([run])), "recalibrate are of step 20; it has been trained to step 40 since."
    assert page.index(words) < page.index("<h1") and "<h1>Preliminary: " in page.replace('<h1 class="long"', "<h1")
    assert f"python -m pe_lab.evaluate --from={run}" in page
    assert words in headline(read_runs([run])) and "Preliminary: At 2×" in headline(read_runs([run]))
    rewrite(run, lambda record: record | {"step": {"pretrain": 60, "recalibrate": 40}[record["phase"]]})
    assert "Preliminary" not in build_page(read_runs([run]))


def test_of_one_variant_that_was_measured_again_the_others_are_named(tmp_path):
    def step(record):
        return record | {"step": 60 if record["method"] == "as trained" or record["phase"] != "pretrain" else 30}

    (first, *_) = work_out(read_run(run_with(tmp_path, step))).verdict.cautions
    assert first.startswith("Of pretrain, the scores of ") and "RoPE + YaRN (needles)" in first
    assert "RoPE (needles)" not in first and first.endswith("are of step 30; it has been trained to step 60 since.")


def test_scores_of_weights_that_were_replaced_are_marked(tmp_path):
    def name(record):
        return record | {"checkpoint": "recalibrate/checkpoints/40", "checkpoint_id": "old", "step": 40}

    run = run_with(tmp_path, lambda record: name(record) if record["phase"] == "recalibrate" else record)
    only, _ = work_out(read_run(run)).verdict.cautions
    assert only == "The scores of recalibrate are of other weights than those that are here under the same name."


def test_an_interrupted_evaluation_is_marked_and_its_gaps_are_not_judged(tmp_path):
    """RoPE + YaRN at 8×, which would win there, was planned and is not measured: 8× is no part of the verdict."""
    run = make_run(tmp_path, phases=STEPS)
    records = [json.loads(line) for line in (run / "evaluation" / "needles.jsonl").read_text().splitlines()]
    with pytest.raises(KeyboardInterrupt), announced(run / "evaluation", records):
        raise KeyboardInterrupt
    assert not work_out(read_run(run)).verdict.cautions  # all of it is there
    rewrite(run, lambda record: None if (record["method"], record["factor"]) == ("YaRN", 8) else record, ["needles"])
    found = work_out(read_run(run)).verdict
    assert found.cautions == [
        "The evaluation is not complete: 1 of 28 measurements are missing (needles at 8×). The same command goes on "
        "with it. Lengths with a gap do not count in the verdict."
    ]
    assert "at 4× DroPE, β finds 54%" in found.headline and [d.column.key for d in found.duels[0][1]] == [1, 2, 4]
    with announced(run / "evaluation", records):
        assert len(list((run / "evaluation" / FOLDER).iterdir())) == 1
    assert not (run / "evaluation" / FOLDER).exists() and not work_out(read_run(run)).verdict.cautions


def test_variants_on_other_samples_are_not_compared(tmp_path):
    def settings(record):
        tokens = 512 if (record["method"], record["factor"]) == ("YaRN", 8) else 65_536
        return record | {
            "settings": {"tokens": tokens, "data": ["a"], "stride": 8 if record["method"] == "cropped" else 0}
        }

    found = work_out(read_run(run_with(tmp_path, settings))).verdict
    assert "perplexity on stdlib: the variants were measured under different settings at 1 length, so" in str(
        found.cautions
    )
    assert "at 4× DroPE, β finds 54%" in found.headline


def test_of_several_runs_those_with_a_caution_do_not_count(tmp_path):
    old = run_with(tmp_path, lambda record: record | {"step": 1}, "old")
    worked = [work_out(run) for run in read_runs([old, make_run(tmp_path, "new", phases=STEPS)])]
    assert joint_headline(worked).startswith("new: Without its positional encoding the model works")
    assert joint_headline(worked).endswith(" Left out, see its remarks: old.")


def test_a_study_of_a_former_step_says_so(tmp_path):
    run = read_run(make_run(tmp_path, phases=STEPS))
    about = {"models": [{"phase": "pretrain", "step": 20}, {"phase": "recalibrate", "step": 40}]}
    assert former_models(run, about) == "This is of pretrain (step 20); trained to step 60 since."
    assert former_models(run, {"models": about["models"][1:]}) == former_models(run, {}) == ""
