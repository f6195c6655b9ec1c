"""Scores of former checkpoints, of an evaluation that is not complete, and on other samples: marked, and not judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_directories import WINNING, make_run

from pe_lab.page.document import HOW_THE_VERDICT_IS_MADE, build_page, headline, joint_headline
from pe_lab.page.run_section import work_out
from pe_lab.results.comparison import paired_differences
from pe_lab.results.groups import pooled
from pe_lab.results.records import UNFINISHED, announced
from pe_lab.results.runs import PhaseFiles, RunFiles, read_run, read_runs
from pe_lab.results.standing import former_models
from pe_lab.storage.manifest import MANIFEST

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
        return record | {"step": 60 if record["variant"] == "as trained" or record["phase"] != "pretrain" else 30}

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
    rewrite(run, lambda record: None if (record["variant"], record["factor"]) == ("YaRN", 8) else record, ["needles"])
    found = work_out(read_run(run)).verdict
    assert found.cautions == [
        "The evaluation is not complete: 1 of 28 measurements are missing (needles at 8×). The same command goes on "
        "with it. Lengths with a gap do not count in the verdict."
    ]
    assert "at 4× DroPE, β finds 54%" in found.headline and [d.column.key for d in found.duels[0][1]] == [1, 2, 4]
    with announced(run / "evaluation", records):
        assert len(list((run / "evaluation" / UNFINISHED).iterdir())) == 1
    assert not (run / "evaluation" / UNFINISHED).exists() and not work_out(read_run(run)).verdict.cautions


def test_variants_on_other_samples_are_not_compared(tmp_path):
    def settings(record):
        tokens = 512 if (record["variant"], record["factor"]) == ("YaRN", 8) else 65_536
        return record | {
            "settings": {"tokens": tokens, "data": ["a"], "stride": 8 if record["variant"] == "cropped" else 0}
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


ROPE = {key: value for key, value in WINNING.items() if key[0] == "RoPE"}


def with_tokens(tokens, factors=(1, 2, 4, 8)):
    def settings(record):
        return record | {"settings": {"tokens": tokens if record["factor"] in factors else 65_536}}

    return settings


def test_runs_on_other_samples_are_not_compared(tmp_path):
    """At 8× one of two runs has read other text: perplexities are compared at 4×, needles, which have not, at 8×."""
    runs = [make_run(tmp_path, name, methods=ROPE, phases=STEPS) for name in ("one", "two")]
    for run, tokens in zip(runs, (512, 65_536), strict=True):
        rewrite(run, with_tokens(tokens, (8,)), ["perplexity"])
    worked = [work_out(run) for run in read_runs(runs)]
    assert not any(results.verdict.cautions for results in worked)
    words = "Measured under different settings, so on different samples, and not compared: perplexity on stdlib at 8×."
    found = joint_headline(worked)
    assert "At 8× the training length one finds" in found and "At 4× the training length one has perplexity" in found
    assert found.endswith(words) and build_page(read_runs(runs)).count(words) == 2  # in the title and at the tables
    for run, tokens in zip(runs, (512, 65_536), strict=True):
        rewrite(run, with_tokens(tokens), ["perplexity", "needles"])
    found = joint_headline([work_out(run) for run in read_runs(runs)])
    assert "perplexity 1" not in found and "lowest last validation loss of 2 runs" in found
    assert found.endswith("compared: needles at 1×, 2×, 4× and 8×; perplexity on stdlib at 1×, 2×, 4× and 8×.")


def test_a_dropped_model_and_rope_in_runs_apart_are_compared_on_the_same_samples(tmp_path):
    dropped = {key: value for key, value in WINNING.items() if key[0] == "DroPE"}
    runs = [make_run(tmp_path, name, methods=of, phases=STEPS) for name, of in (("rope", ROPE), ("drope", dropped))]
    assert joint_headline([work_out(run) for run in read_runs(runs)]).startswith("Across runs: Without its positional")
    rewrite(runs[0], with_tokens(512, (4, 8)), ["perplexity", "needles"])
    rewrite(runs[1], with_tokens(65_536), ["perplexity", "needles"])
    found = joint_headline([work_out(run) for run in read_runs(runs)])
    assert "at 2× drope: DroPE, β finds" in found
    assert found.endswith("not compared: needles at 4× and 8×; perplexity on stdlib at 4× and 8×.")


def test_of_groups_the_members_are_compared_on_the_same_samples(tmp_path):
    """The means of a group have the settings of its first member; the second one read other samples."""
    groups = []
    for name, seeds in (("one", (512, 65_536)), ("two", (512, 512))):
        members = [make_run(tmp_path, name, directory=f"{name}-{n}", methods=ROPE, phases=STEPS) for n in range(2)]
        for member, tokens in zip(members, seeds, strict=True):
            rewrite(member, with_tokens(tokens), ["perplexity"])
        runs = read_runs(members)
        runs = [replace(run, info=run.info | {"config": {"seed": n}}) for n, run in enumerate(runs)]
        groups += pooled(runs)
    assert [one.what for one in paired_differences(groups, ["perplexity", "needles"]) if one.column] == ["needles"] * 20
    found = joint_headline([work_out(group) for group in groups])
    assert "perplexity on stdlib at 1×, 2×, 4× and 8×." in found and "has perplexity" not in found


def trained(name, losses, **info):
    """A group of runs: {seed: the last validation loss}; of one seed a run."""
    phase = {"phase": "pretrain", "sequence_length": 64, "status": "complete"} | info
    runs = [
        RunFiles(f"{name}-{seed}", Path(name), {"config": {"seed": seed}},
            [PhaseFiles("pretrain", phase, [{"step": 1, "validation_loss": loss}])], {}, [])
        for seed, loss in losses.items()
    ]  # fmt: skip
    return replace(runs[0], name=name, members=tuple(runs) if len(runs) > 1 else ())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("best", ["rope", "rope long"])
def test_the_lowest_loss_is_below_the_next_whatever_their_names(best, order):
    """In pairs 0.1 and 0.3: 0.2, with Student's t of one degree of freedom 12.706 · 0.1 = 1.271 to both sides."""
    losses = {name: {1: 3.0, 2: 3.0} if name == best else {1: 3.1, 2: 3.3} for name in ("rope", "rope long")}
    other = next(name for name in losses if name != best)
    worked = [work_out(trained(name, losses[name])) for name in [*losses][::order]]
    assert joint_headline(worked) == (
        f"{best} has the lowest last validation loss of 2 groups of runs: 3.000, 0.200 [-1.071, 1.471] below {other} "
        "in 2 pairs of seeds."
    )


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        ({1: 3.0}, {2: 3.1}, "One seed each"),
        ({1: 3.0, 2: 3.0}, {3: 3.1, 4: 3.1}, "They have no two finished seeds in common"),
        ({1: 3.0, 2: 3.0}, {1: 3.1}, "They have no two finished seeds in common"),
    ],
)
def test_why_the_luck_of_training_is_not_known(one, two, why):
    found = joint_headline([work_out(trained("a", one)), work_out(trained("b", two))])
    assert found.endswith(f"the next is b (3.100). {why}: the luck of training is not known.")


def test_after_a_kill_the_log_is_ahead_of_the_checkpoint_that_was_measured(tmp_path):
    """The log of recalibration has 40 steps, its newest checkpoint 30; an unfinished save of step 40 does not count."""
    run = make_run(tmp_path, phases=STEPS, status="running")
    for step in (20, 30, 40):
        checkpoint = run / "recalibrate" / "checkpoints" / str(step)
        checkpoint.mkdir(parents=True)
        if step < 40:
            (checkpoint / MANIFEST).write_text("{}")
    rewrite(run, lambda record: record | {"step": {"pretrain": 60, "recalibrate": 30}[record["phase"]]})
    assert work_out(read_run(run)).verdict.cautions == []
    rewrite(run, lambda record: record | {"step": {"pretrain": 60, "recalibrate": 20}[record["phase"]]})
    assert "recalibrate are of step 20; it has been trained to step 30 since." in str(
        work_out(read_run(run)).verdict.cautions
    )
    about = {"models": [{"phase": "recalibrate", "step": 30}]}
    assert former_models(read_run(run), about) == ""
    info = json.loads((run / "recalibrate" / "phase.json").read_text())
    (run / "recalibrate" / "phase.json").write_text(json.dumps(info | {"status": "complete"}))
    assert "trained to step 40 since" in former_models(read_run(run), about)


def test_the_words_on_the_verdict_are_those_of_the_code():
    assert "at all lengths of a table" in HOW_THE_VERDICT_IS_MADE and "fitted to it" in HOW_THE_VERDICT_IS_MADE


def test_an_analysis_of_a_former_step_says_so(tmp_path):
    run = read_run(make_run(tmp_path, phases=STEPS))
    about = {"models": [{"phase": "pretrain", "step": 20}, {"phase": "recalibrate", "step": 40}]}
    assert former_models(run, about) == "This is of pretrain (step 20); trained to step 60 since."
    assert former_models(run, {"models": about["models"][1:]}) == former_models(run, {}) == ""
