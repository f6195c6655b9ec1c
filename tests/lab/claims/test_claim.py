"""`python -m pe_lab.claims`: runs of arms, their order, verdicts, history and pages; the claims themselves. 20 s."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from tiny_runs import finish, start, write_recipe

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.claims import main
from pe_lab.config import Config, from_dict
from pe_lab.errors import ConfigError
from pe_lab.lab.claims import Arm, Claim, Criterion, load_claims
from pe_lab.lab.claims.claim import claim_names, load_claim
from pe_lab.lab.claims.page import BEGIN, END, TOP, TOP_END, draw, markdown, summary_table, with_generated
from pe_lab.lab.claims.results import (
    changes_after_runs,
    described,
    effect,
    leading,
    point,
    read_results,
    values_of,
)
from pe_lab.lab.claims.running import collect, make_stages, records_digest
from pe_lab.lab.claims.verdict import judge
from pe_lab.lab.sweeps.cells import SweepCell
from pe_lab.model import preset
from pe_lab.positional import Layer, Rope
from pe_lab.recipes import read_recipe

CLAIM = """
from pe_lab.lab.claims import Arm, Criterion, Claim, Rates, losses

BASE = Arm("base", "tiny.py")
CHILD = Arm("child", "again.py:{parent}", BASE)
CLAIM = Claim(
    sentence="A child is better.",
    paper="none",
    arms=(BASE, CHILD),
    criteria=(Criterion("lower loss", "child: validation", ("base: validation",), lower=True, by=0.01),),
    rates=Rates(apart="a stand-in has none"),
    evaluation=None,
    measure=losses,
    curves={"loss": {"base": "base: validation", "child": "child: validation"}},
    tried="Other settings.",
)
"""
AGAIN = """
from tiny import get_config as tiny


def get_config(arg=""):
    config = tiny()
    config.phases = config.phases[1:]
    config.phases[0]["init_from"] = arg
    return config
"""
# Writes what a run of the recipes would; `child` runs are better, and need their parents to be there.
STAND_IN = """
import json, pathlib, sys
run, start = pathlib.Path(sys.argv[1]), sys.argv[2]
child, seed = run.name.startswith("child"), int(run.name[-1])
if child and not pathlib.Path(start, "run.json").exists():
    sys.exit("error: no parent")
if pathlib.Path("broken").exists() and seed == 1:
    sys.exit("error: out of luck")
phases = (("recalibrate", 6),) if child else (("pretrain", 8), ("recalibrate", 6))
for name, steps in phases:
    (run / name).mkdir(parents=True, exist_ok=True)
    info = {"phase": name, "steps": steps, "tokens_per_step": 128, "status": "complete"}
    (run / name / "phase.json").write_text(json.dumps(info))
    loss = (2.0 if child else 3.0) + seed / 100
    logged = {"step": steps, "loss": loss, "validation_loss": loss}
    (run / name / "metrics.jsonl").write_text(json.dumps(logged) + chr(10))
    (run / name / "speed.jsonl").write_text(json.dumps({"step": steps, "seconds": 60.0}) + chr(10))
(run / "run.json").write_text(json.dumps({"name": run.name, "config": {}}))
"""


@pytest.fixture
def claim(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    (tmp_path / "again.py").write_text(AGAIN.replace("from tiny", "from .tiny"))
    (tmp_path / "better.py").write_text(CLAIM)

    def command(cell, where):
        start = cell.config.phases[0].init_from or "-"
        return [sys.executable, "-S", "-c", STAND_IN, str(where / cell.name), start]

    monkeypatch.setattr(SweepCell, "command", command)
    # The stand-in leaves no checkpoints, of which only an edit of the encodings would need one.
    monkeypatch.setattr("pe_lab.training.plan.given_layers", lambda config: {})
    monkeypatch.setattr("pe_lab.lab.claims.page.draw", lambda result, form: b"drawn elsewhere")
    return tmp_path


def test_a_claim_is_run_continued_and_judged(claim, capsys):
    command = ["better.py", "--seeds=2", "--jobs=2"]
    assert main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "base    0 of 2" in out and "child   0 of 2" in out and "stack" not in out
    assert main([*command, "--dry-run", "--stack=2"]) == 0
    out = capsys.readouterr().out
    assert all(f"stack of 2: {arm}__seed=0, {arm}__seed=1\n" in out for arm in ("base", "child"))
    assert not (claim / "runs").exists()

    (claim / "broken").touch()
    assert main(command) == 1
    assert "FAILED base__seed=1" in (out := capsys.readouterr().out) and "out of luck" in out
    assert not (claim / "runs/claims/laptop/child__seed=0").exists()  # its stage waits for all parents

    (claim / "broken").unlink()
    assert main([*command, "--retry"]) == 0
    out = capsys.readouterr().out
    assert "better: CONFIRMED" in out and "+1 [+1, +1]" in out
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert result["seeds"] == [0, 1] and result["values"]["base"]["validation"] == [3.0, 3.01]
    assert result["arms"]["base"]["seconds"] == 120 and result["minutes"] == pytest.approx(2 * 3)
    assert result["command"] == "python -m pe_lab.claims better.py --size=laptop --seeds=2"
    assert effect(result["criteria"][0]) == "+1 [+1, +1]"
    assert point(result, "child: validation").mean == pytest.approx(2.005)
    assert point(result, "base: validation - child: validation").mean == pytest.approx(1.0)
    assert point(result, "child: nothing") is None
    cells = json.loads((claim / "runs/claims/laptop/sweep.json").read_text())["cells"]
    # A child reads other windows than its parent; each seed has an order of its own.
    assert {one["name"]: one["config"]["data"]["seed"] for one in cells} == {
        "base__seed=0": 0, "base__seed=1": 1, "child__seed=0": 1000, "child__seed=1": 1001
    }  # fmt: skip


def test_a_rule_that_changes_after_a_run_is_in_the_history(claim, capsys):
    assert main(["better.py", "--seeds=2"]) == 0
    path = claim / "better.py"
    path.write_text(path.read_text().replace("by=0.01", "by=2.0"))
    assert main(["better.py", "--seeds=2"]) == 0
    assert "better: EQUIVALENT" in capsys.readouterr().out
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert changes_after_runs(result) == 1
    assert [one["verdict"] for one in result["history"]] == ["confirmed", "equivalent"]
    assert main(["--out=runs/claims/laptop/results", "--write=claims.md", "--report=claims.html"]) == 0
    page = (claim / "claims.md").read_text()
    assert "Changed after a run, 1 time:" in page and "by more than 0.01" in page
    assert "| [better](#better) | A child is better. | none | equivalent | lower loss: +1 [+1, +1] | laptop |" in page
    assert "![better](runs/claims/laptop/results/better.png)" in page and "Other settings." in page
    assert "A child is better." in (claim / "claims.html").read_text()


@pytest.mark.slow
def test_a_history_goes_on_from_the_committed_result(claim):
    """1 s. Another machine has the result that was committed, and none of its runs."""
    assert main(["better.py", "--seeds=2"]) == 0
    (claim / "runs/claims/laptop/results").rename(claim / "results")
    path = claim / "better.py"
    path.write_text(path.read_text().replace("by=0.01", "by=2.0"))
    assert main(["better.py", "--seeds=2"]) == 0
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert [one["verdict"] for one in result["history"]] == ["confirmed", "equivalent"]


@pytest.mark.slow  # 4 s
def test_seeds_by_power(claim, capsys):
    """2 s. A pilot of three seeds, then as many others as show the effect; the same command again chooses the same."""
    path = claim / "better.py"
    path.write_text(path.read_text().replace("by=0.01)", "by=0.01, effect=0.02)"))
    assert main(["better.py", "--dry-run"]) == 0
    assert "No result tells the deviation yet: --seeds=auto trains a pilot of 3 seeds." in capsys.readouterr().out
    assert main(["better.py", "--seeds=auto", "--jobs=2"]) == 0
    out = capsys.readouterr().out
    assert "seeds needed" in out and "better: CONFIRMED" in out
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert result["seeds"] == [3, 4, 5, 6, 7]  # five of one criterion, and none of the pilot's
    assert (
        result["pilot"][0]["seeds"] == 5 and result["pilot"][0]["effect"] == 0.02 and result["power"][0]["pilot"] == 5
    )
    assert main(["better.py", "--seeds=auto"]) == 0
    assert "(0 runs to train in" in capsys.readouterr().out
    assert read_results(claim / "runs/claims/laptop/results")[0]["seeds"] == [3, 4, 5, 6, 7]


def test_a_run_that_is_run_again_is_a_record_of_the_result(claim, capsys):
    """2 s. With its parents, in a directory of its own; what it moved by may leave the claim open."""
    again = ["better.py", "--rerun=child", "--seeds=1,"]
    assert main(again) == 2
    assert "has no result of 'better' at this size to compare a re-run with" in capsys.readouterr().err
    assert main(["better.py", "--seeds=3"]) == 0
    assert main(again) == 0
    where = claim / "runs/claims/laptop"
    assert (where / "reruns/child__seed=1__1/base__seed=1").is_dir()
    (result,) = read_results(where / "results")
    (record,) = result["reruns"]
    assert (record["arm"], record["seed"], record["difference"]) == ("child", 1, {"validation": 0.0})
    assert record["machine"] and result["verdict"] == "confirmed"
    assert "Run again: child (seed 1)." in capsys.readouterr().out

    result["values"]["child"]["validation"][1] += 0.9  # as if the first run had been another one
    (where / "results/better.json").write_text(json.dumps(result))
    assert main(again) == 0
    assert "better: NOT SETTLED: smaller than the noise of re-running" in capsys.readouterr().out
    (result,) = read_results(where / "results")
    assert len(result["reruns"]) == 2 and (where / "reruns/child__seed=1__2").is_dir()
    assert result["history"][-1]["why"] == "child (seed 1) was run again"
    assert [one["verdict"] for one in result["history"]] == ["confirmed", "not settled"]
    assert main(["better.py", "--seeds=3"]) == 0  # they stay with the result
    assert len(read_results(where / "results")[0]["reruns"]) == 2
    assert main(["better.py", "--rerun=chld"]) == 2
    assert "claim 'better' has no arm 'chld'. Did you mean 'child'" in capsys.readouterr().err


def test_rates_are_a_grid_that_is_trained_for_the_first_seeds(claim, capsys):
    """2 s. The stand-in's losses do not depend on the rate: the first one is the best, at the grid's end."""
    for recipe in ("tiny.py", "again.py"):
        source = (claim / recipe).read_text()
        (claim / recipe).write_text(
            source.replace(
                'def get_config(arg=""):',
                'def get_config(arg=""):\n    arg = arg.partition(",rate=")[0].partition("rate=")[0]',
            )
        )
    path = claim / "better.py"
    path.write_text(path.read_text().replace('apart="a stand-in has none"', 'grid=(1e-3, 3e-3, 1e-2), of="validation"'))
    assert main(["better.py", "--seeds=2", "--jobs=2"]) == 0
    out = capsys.readouterr().out
    assert "better: NOT TESTABLE HERE: base: its learning rate is the best of the grid" in out
    assert "best at 0.001 (0.001: 3, 0.003: 3, 0.01: 3), the lowest of the grid" in out
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert result["values"]["base.rate_0.01"]["validation"] == [3.0, None]
    assert [one["met"] for one in result["preconditions"]] == [False, False]


def test_a_changed_recipe_is_not_taken_for_the_run_that_is_there(claim):
    assert main(["better.py", "--seeds=1,"]) == 0
    again = claim / "again.py"
    again.write_text(again.read_text().replace("config.phases[1:]", "config.phases[1:]\n    config.model.layers = 4"))
    assert main(["better.py", "--seeds=1,"]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "There is no claim 'nothing'."),
        (["better.py", "--all"], "--all is all claims"),
        (["better.py", "--budget=long"], "'long' is no time"),
        (["better.py", "--size=paper"], "claim 'better' has no recipes at paper size"),
        (["better.py", "--seeds=0"], "--seeds=0: it is the number of seeds"),
        (["better.py", "--seeds=some"], "--seeds='some': give a number of seeds"),
        (["better.py", "--rerun=child", "--seeds=2"], "--rerun is of one seed"),
        (["--rerun=child"], "--rerun is of one claim"),
        (["--write=claims.md", "--out=empty"], "'empty' has no results"),
        (["better.py", "--write=claims.md"], "leave the names out"),
        (["better.py", "--evaluate.lengths=1x"], "--evaluate.lengths: a claim's file says"),
        (["tiny.py"], "defines no CLAIM"),
    ],
)
def test_bad_input_is_one_message(claim, capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (claim / "runs").exists()


def test_the_made_parts_of_a_page_are_replaced():
    results = read_results()
    once = with_generated("# Title\n\nText.\n", results[:1], "one")
    assert once.startswith(f"# Title\n\n{TOP}\n\n|") and f"{TOP_END}\n\nText.\n\n{BEGIN}" in once
    assert once.endswith(END + "\n") and "](one/" in once
    assert with_generated(once, results[:1], "two") == once.replace("](one/", "](two/")


def test_the_page_begins_with_the_papers_claims_in_their_words():
    results = read_results()
    rows = summary_table(results).splitlines()[2:]
    assert 8 < len(rows) <= 12
    assert all(any(result["quote"] in row for result in results if result["quote"]) for row in rows)


def test_arms_and_claims_refuse_what_makes_no_sense():
    base = Arm("a", "x.py")
    with pytest.raises(ConfigError, match="lower-case letters"):
        Arm("A b", "x.py")
    with pytest.raises(ConfigError, match="go together"):
        Arm("b", "x.py:{parent}")
    with pytest.raises(ConfigError, match="surgery needs a parent"):
        Arm("b", "x.py", surgery="--drop")
    with pytest.raises(ConfigError, match="'c'. Did you mean|'c'. Allowed: a"):
        Claim("c", "p", (base,), (Criterion("t", "c: m", by=1.0),))
    with pytest.raises(ConfigError, match="two arms are called 'a'"):
        child = Arm("b", "x.py:{parent}", Arm("a", "y.py"))
        Claim("c", "p", (base, child), (Criterion("t", "a: m", by=1.0),)).all_arms  # noqa: B018


def test_arms_that_a_paper_does_not_have_are_left_out_at_its_size():
    """Of the curves too; every arm that the rule names needs a recipe."""
    rope, control = Arm("rope", "x.py"), Arm("control", "x.py:{parent}", Arm("rope", "x.py"))
    kept = {"panel": {"both": "rope: m - control: m", "one": "rope: m"}, "control": {"one": "control: m"}}
    rule = (Criterion("t", "rope: m", by=1.0),)
    claim = Claim("c", "p", (rope, control), rule, curves=kept, recipes={"rope": "configs/drope_16b.py:drop=16000"})
    there = claim.at("paper")
    assert [arm.name for arm in there.arms] == ["rope"] and there.curves == {"panel": {"one": "rope: m"}}
    with pytest.raises(ConfigError, match="for the arms that the rule names, or for none: control, rope"):
        dataclasses.replace(claim, criteria=(Criterion("t", "rope: m", ("control: m",), by=1.0),))


def _with_shape(tree):
    """A tree whose model comes from a checkpoint that is not here, with that of SmolLM2."""
    if tree["phases"][0].get("init_from") and "layers" not in tree["model"]:
        tree["model"] = preset("smollm2_135m") | tree["model"]
    return tree


def test_every_claim_loads_and_their_arms_agree():
    names = claim_names()
    assert {"drop_needles", "late_drop", "p_rope", "distillation"} <= set(names)
    for claim in load_claims(names):
        assert claim.sentence.endswith(".") and claim.paper
        for recipe in claim.recipes.values():
            assert from_dict(Config, _with_shape(read_recipe(recipe))).phases
        assert claim.quote or claim.paper.startswith("ours"), claim.name  # a paper's claim is in its own words
    assert load_claim("p_rope").rule[0] == "p_rope_75: validation prose < rope: validation prose + 0.01"


def test_a_claim_at_its_papers_size():
    """Arms keep their parents where recipes name them, and rules the numbers that are measured there."""
    recovery = load_claim("recovery").at("paper")
    child = next(arm for arm in recovery.arms if arm.name == "drope_250")
    assert child.parent is not None and child.parent.recipe == "configs/drope_16b.py:drop=16000"
    assert recovery.rule[0] == "drope: validation < rope: validation + 0.05" and recovery.evaluation is None
    needles = load_claim("drop_needles").at("paper")
    assert [arm.parent for arm in needles.arms] == [None] * 3 and "--variants=all" in needles.evaluation
    assert "drope: niah 2x > each of (rope: niah 2x; rope: niah 2x PI" in needles.rule[0]
    assert any(one.endswith("rope: niah 2x cropped) >= 0.2 and <= 0.8") for one in needles.rule)
    assert "if nope: validation - trigram: validation <= 0" in needles.rule
    assert "rope: needles key 8 descending" in load_claim("dope").at("paper").rule[0]  # of a measure of its own
    alone = (Criterion("t", "drope_250: m", by=1.0),)
    kept = {"criteria": alone, "preconditions": (), "references": {}, "recipes": {child.name: child.recipe}}
    with pytest.raises(ConfigError, match="'rope', which others start from, has no recipe"):
        dataclasses.replace(recovery, arms=(child,), **kept).at("paper")


GATES = """
from pe_lab.lab.claims import Arm, Criterion, Claim, losses, scores, together

RECIPE = "configs/claims.py"
ROPE = Arm("rope", f"{RECIPE}:method=rope,layers=2")
GATED = Arm("gated", f"{RECIPE}:from={{parent}},layers=2,method='gated_rope:base=500,penalty_per_head=0.01'", ROPE)
DROPPED = Arm("dropped", f"{RECIPE}:from={{parent}},layers=2,method=kept,qk_norm=head", GATED, surgery="--drop=gates")
CLAIM = Claim(
    sentence="It runs.",
    paper="none",
    arms=(DROPPED,),
    criteria=(Criterion("few needles", "dropped: needles 2x", lower=True, by=1.0),),
    evaluation=("--suite=needles", "--lengths=2x", "--variants=as-trained"),
    measure=together(scores, losses),
    curves={"needles": {"found": "dropped: needles {x}x"}},
)
"""


@pytest.mark.slow
def test_a_claim_runs_whole_at_quick_size(tmp_path):
    """4 minutes: trains, makes gates, edits, evaluates, measures, judges, draws; real processes."""
    (tmp_path / "gates.py").write_text(GATES)
    argv = ["pe_lab.claims", "gates.py", "--size=quick", "--seeds=1", "--jobs=1"]
    (out,) = finish([start(argv, tmp_path)])
    assert "surgery --drop=gates for dropped__seed=0" in out and "gates: NOT SETTLED" in out
    quick = tmp_path / "runs/claims/quick"
    (result,) = read_results(quick / "results")
    assert {"needles 2x", "validation prose"} <= set(result["values"]["dropped"])
    assert (quick / "results/gates.png").stat().st_size > 10_000
    assert open_source(quick / "edited/dropped__seed=0").layers == (Layer(Rope(base=500.0)),) * 2  # 20 steps close none
    (again,) = finish([start(argv, tmp_path)])
    assert "(0 runs to train in runs/claims/quick)" in again


def test_committed_results_follow_from_their_numbers_and_rules():
    """A result whose verdict its own numbers do not give, or whose claim has another rule now, is out of date."""
    for result in read_results():
        claim = load_claim(result["claim"])
        values, reruns = values_of(result), result["reruns"]
        judged, verdict, checked = judge(claim.criteria, values, claim.conditions, True, reruns)
        assert verdict == result["verdict"], result["claim"]
        assert [one["outcome"] for one in judged] == [one["outcome"] for one in result["criteria"]]
        assert [one["met"] for one in checked] == [one["met"] for one in result["preconditions"]]
        assert result["history"][-1]["rule"] == claim.rule, result["claim"]
        assert {key: result[key] for key in ("sentence", "paper", "quote")} == {
            key: getattr(claim, key) for key in ("sentence", "paper", "quote")
        }
        for arm, about in result["arms"].items():
            assert about["paper"] == claim.recipes.get(arm, ""), result["claim"]
        json.dumps(result, allow_nan=False)
        assert (Path(__file__).parents[3] / "claims/results" / f"{result['claim']}.png").is_file()


def test_the_committed_page_is_the_one_of_the_committed_results():
    root = Path(__file__).parents[3]
    page = (root / "docs/claims.md").read_text()
    assert with_generated(page, read_results(), "../claims/results") == page


def test_arms_that_are_compared_have_the_same_help():
    """A fitted logit scale is given to all arms of a comparison or to none, and another model's constant to none."""
    for claim in load_claims(claim_names()):
        for one in claim.criteria:
            # A cropped context never reads more than the training length, where no scale is needed.
            scaled = [term for term in one.terms if not term.endswith(" cropped")]
            fitted = {"fitted" in term or term.endswith(" beta") for term in scaled}
            assert len(fitted) == 1, one.rule
            assert not any("paper beta" in term for term in one.terms), one.rule
        assert not any("paper beta" in term for lines in claim.curves.values() for term in lines.values()), claim.name


def test_results_are_judged_again_without_their_runs(claim, capsys):
    """1 s. The numbers stay; a precondition's come from another result, or from the config of an arm."""
    assert main(["better.py", "--seeds=2"]) == 0
    where = claim / "runs/claims/laptop/results"
    (before,) = read_results(where)
    path = claim / "better.py"
    source = path.read_text().replace("import Arm,", "import Arm, Precondition, Reference, shape,")
    source = source.replace(
        "    evaluation=None,",
        """    preconditions=(
        Precondition("other is near", "other: validation - base: validation", most=0.5),
        Precondition("two heads", "size: heads", least=2),
    ),
    references={"size": Reference("base", shape)},
    quote="A child is better.",
    evaluation=None,""",
    )
    source = source.replace("arms=(BASE, CHILD)", 'arms=(BASE, CHILD, Arm("other", "tiny.py:x"))')
    path.write_text(source)
    other = {**before, "claim": "another", "values": {"other": {"validation": [4.0, 4.0]}}}
    other["arms"] = {"other": {**before["arms"]["base"], "recipe": "tiny.py:x"}}
    (where / "another.json").write_text(json.dumps(other))
    capsys.readouterr()
    assert main(["better.py", "--judge=A precondition was missing.", f"--out={where}"]) == 0
    assert capsys.readouterr().out == "better: confirmed -> not testable here: other is near: 0.995 [0.931, 1.06]\n"
    (result,) = (one for one in read_results(where) if one["claim"] == "better")
    assert {arm: result["values"][arm] for arm in before["values"]} == before["values"]
    assert result["taken_from"] == {
        "other": {"claim": "another", "numbers": ["validation"], "same_runs": False}  # they have no number in common
    }
    assert result["values"]["size"]["heads"] == [4.0, 4.0]
    assert [one["met"] for one in result["preconditions"]] == [False, True]
    assert [one["verdict"] for one in result["history"]] == ["confirmed", "not testable here"]
    assert result["history"][-1]["why"] == "A precondition was missing."
    assert described(leading(result)).startswith("0.995")
    page = markdown([result], "results")
    assert (
        "> A child is better." in page and "| other is near | `if other: validation - base: validation <= 0.5`" in page
    )
    assert "(A precondition was missing.), then not testable here" in page

    assert main(["better.py", "--judge= ", f"--out={where}"]) == 2
    assert main(["--judge=why", "--out=nowhere"]) == 2
    assert "'nowhere' has no results" in capsys.readouterr().err


def test_kept_numbers_are_measured_again_when_code_or_records_change(claim, monkeypatch):
    """2 s. `losses` is of pe_lab/lab/claims/measures.py, and a claim may import from the files beside it."""
    (claim / "shared.py").write_text("END = 'pretrain'\n")
    path = claim / "better.py"
    path.write_text("from .shared import END\n" + path.read_text())
    assert main(["better.py", "--seeds=1,"]) == 0

    def measured():
        shown, loaded = [], load_claim("better.py")
        stages = make_stages(loaded, "laptop", [1], Path("runs/claims/laptop"))
        return collect(loaded, stages, shown.append)["child"]["validation"][1], len(shown)

    assert measured() == (2.01, 0)
    (claim / "shared.py").write_text("END = 'recalibrate'\n")
    assert measured() == (2.01, 2)
    log = claim / "runs/claims/laptop/child__seed=1/recalibrate/metrics.jsonl"
    log.write_text(log.read_text().replace("2.01", "2.5"))
    assert measured() == (2.5, 1)
    changed = claim / "changed.py"
    changed.write_text("# other code\n")
    monkeypatch.setattr("pe_lab.lab.claims.running.inspect.getfile", lambda of: str(changed))
    assert measured() == (2.5, 2)


def test_records_of_evaluations_are_part_of_what_numbers_depend_on(tmp_path):
    """A run that is evaluated again has other numbers; one whose claim evaluates nothing has not."""
    for name, content in {
        "run.json": {"name": "run", "config": {}},
        "pretrain/phase.json": {"phase": "pretrain", "steps": 1, "tokens_per_step": 1, "status": "complete"},
        "evaluation/niah.jsonl": {"suite": "niah", "source": "multi_key", "score": 0.5},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    before = [records_digest(tmp_path, evaluated) for evaluated in (True, False)]
    (tmp_path / "evaluation/niah.jsonl").write_text(
        json.dumps({"suite": "niah", "source": "multi_key", "score": 0.75}) + "\n"
    )
    after = [records_digest(tmp_path, evaluated) for evaluated in (True, False)]
    assert before[0] != after[0] and before[1] == after[1]


def test_claims_of_the_papers_on_prose_ask_whether_the_model_predicts_it():
    """A verdict on what the model does with prose needs one that a table of three tokens does not match."""
    for claim in load_claims(claim_names()):
        terms = [term for one in claim.criteria for term in one.terms]
        if not claim.paper.startswith("ours") and any(re.search(": (text |validation)", term) for term in terms):
            asked = any(re.search(r"trigram\d*: ", one.of) for one in claim.preconditions)
            # Instability is asked of the recalibration itself.
            assert asked or claim.name == "qk_norm_rate", claim.name


@pytest.mark.slow
def test_a_reference_is_measured_beside_the_runs(claim, capsys):
    """1 s. Of the config of each seed's run, and kept as other measures are."""
    path = claim / "better.py"
    source = path.read_text().replace("import Arm,", "import Arm, Precondition, Reference, shape,")
    stated = """    preconditions=(Precondition("a hundred heads", "size: heads", least=100),),
    references={"size": Reference("base", shape)},
    evaluation=None,"""
    path.write_text(source.replace("    evaluation=None,", stated))
    assert main(["better.py", "--seeds=2"]) == 0
    out = capsys.readouterr().out
    assert "measuring base__seed=1: size" in out and "not met" in out
    assert "better: NOT TESTABLE HERE: a hundred heads: 4" in out
    (result,) = read_results(claim / "runs/claims/laptop/results")
    assert result["values"]["size"] == {"heads": [4.0, 4.0], "rotated pairs": result["values"]["size"]["rotated pairs"]}
    assert main(["better.py", "--seeds=2"]) == 0
    assert "measuring" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"CLAIM = Claim(", "mine.py, line 1: SyntaxError"),
        (b"import pe_lab\n1 / 0\n", "mine.py, line 2: ZeroDivisionError: division by zero"),
        (b"from pe_lab.lab.claims import Nothing\n", "mine.py, line 1: ImportError: cannot import name 'Nothing'"),
        (b"raise SystemExit(3)\n", "mine.py, line 1: SystemExit: 3"),
        (bytes(range(256)) * 8, "claim: "),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "claim: "),
    ],
)
def test_a_claim_file_that_cannot_be_executed_is_one_message(tmp_path, monkeypatch, capsys, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_bytes(content)
    assert main(["mine.py"]) == 2
    err = capsys.readouterr().err
    assert message in err and "mine.py" in err and err.count("\n") <= 3 and "Traceback" not in err


def test_a_measure_that_raises_is_one_message(claim, capsys):
    path = claim / "better.py"
    path.write_text(path.read_text().replace("measure=losses", "measure=lambda run: {'loss': run.missing}"))
    assert main(["better.py", "--seeds=1,"]) == 2
    err = capsys.readouterr().err
    assert "better.py, line" in err and "AttributeError" in err


def test_an_axis_is_shared_by_differences_of_one_unit(monkeypatch):
    """The interval that decided is drawn in its units, with its numbers."""
    drawn = []
    monkeypatch.setattr("pe_lab.lab.claims.page.render_all", lambda groups, form, title: drawn.extend(groups) or b"")
    (result,) = (one for one in read_results() if one["claim"] == "after_the_papers")
    draw(result, "png")
    share, nats = (group[0] for group in drawn[-2:])
    assert [one.x_label.partition(":")[0] for one in (share, nats)] == ["share of the needles", "nats"]
    for one, criteria in ((share, result["criteria"][:3]), (nats, result["criteria"][3:])):
        assert [(row.low, row.high) for row in one.rows] == [(each["low"], each["high"]) for each in criteria]
