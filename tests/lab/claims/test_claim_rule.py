"""Preconditions, seeds by power, intervals of seeds and text, the noise of re-running, and the history. 30 s."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import integrate, stats

from pe_lab.errors import ConfigError
from pe_lab.lab.claims import Arm, Claim, Rates, WindowMean, scores
from pe_lab.lab.claims.claim import load_claim
from pe_lab.lab.claims.equal_help import help_of
from pe_lab.lab.claims.history import changes, continued
from pe_lab.lab.claims.page import draw
from pe_lab.lab.claims.power import LEAST_OF_ONE, POWER, beyond, inside, power, power_table, seeds_needed, seeds_of
from pe_lab.lab.claims.reruns import among, noise, rerun
from pe_lab.lab.claims.results import leading, outcome_text, read_results, verdict_text
from pe_lab.lab.claims.values import by_window
from pe_lab.lab.claims.verdict import (
    CONFIRMED,
    EQUIVALENT,
    OPEN,
    REFUTED,
    SEEDS_ALONE,
    UNTESTABLE,
    Criterion,
    Precondition,
    judge,
)
from pe_lab.results.statistics import Spread, crossed, spread, student

GAIN = Criterion("a gain", of="ours: loss", over=("one: loss",), lower=True, by=0.01)


def values(**arms):
    """{arm: {"loss": {seed: value}}} from lists."""
    return {arm: {"loss": dict(enumerate(listed))} for arm, listed in arms.items()}


def layout(rng, seeds, windows, of_seed, of_text, rest, mean=0.0):
    """Differences of seeds on the same windows, with standard deviations of their parts."""
    parts = rng.normal(size=(seeds, 1)) * of_seed, rng.normal(size=(1, windows)) * of_text
    return mean + sum(parts) + rng.normal(size=(seeds, windows)) * rest


def of_windows(differences):
    """Values of two arms whose differences by seed and window these are: ours is lower by them."""
    lower = {n: WindowMean(3 - each.mean(), 3 - each, "text") for n, each in enumerate(differences)}
    return {
        "ours": {"loss": lower},
        "one": {"loss": {n: WindowMean(3.0, np.full_like(each, 3.0), "text") for n, each in enumerate(differences)}},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Intervals of seeds and text


def test_mean_squares_are_those_of_the_two_way_layout():
    """By their definition, the residual as what is left of the sum of squares."""
    data = layout(np.random.default_rng(0), 4, 6, 1.0, 2.0, 0.5)
    found, grand = crossed(data), data.mean()
    of_seeds = 6 * ((data.mean(1) - grand) ** 2).sum() / 3
    of_windows_ = 4 * ((data.mean(0) - grand) ** 2).sum() / 5
    total = ((data - grand) ** 2).sum()
    residual = (total - 3 * of_seeds - 5 * of_windows_) / 15
    assert found.seed == pytest.approx(of_seeds / 6) and found.residual == pytest.approx(residual / 6)
    assert found.variance(4) == pytest.approx((of_seeds + of_windows_ - residual) / 24)
    parts = of_seeds**2 / 3 + of_windows_**2 / 5 + residual**2 / 15
    assert found.degrees(4) == pytest.approx((of_seeds + of_windows_ - residual) ** 2 / parts)


def test_one_window_a_seed_is_the_interval_of_seeds():
    numbers = [0.1, 0.3, 0.2, 0.25]
    assert spread(numbers).mean(0.2125, 4).numbers == pytest.approx(student(numbers).numbers)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("parts", [(1, 0, 0.3), (1, 2, 1), (1, 4, 1), (0, 4, 1), (0, 0, 1)])
def test_intervals_cover_seeds_and_text(seeds, parts):
    """0.3 s. 95% or more, where the interval of seeds alone covers 39% if text alone varies."""
    rng, inside_, alone = np.random.default_rng(0), 0, 0
    for _ in range(600):
        data = layout(rng, seeds, 16, *parts)
        both, one = crossed(data).mean(data.mean(), seeds), student(data.mean(1).tolist())
        inside_ += both.low < 0 < both.high
        alone += one.low < 0 < one.high
        assert both.high - both.low >= (one.high - one.low) * (1 - 1e-9)
    assert inside_ / 600 > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 600)
    assert parts != (0, 4, 1) or alone / 600 < 0.5


def test_a_difference_uses_windows_only_if_all_are_the_same():
    data = layout(np.random.default_rng(0), 3, 8, 0.001, 0.02, 0.001, mean=0.02)
    found = of_windows(data)
    np.testing.assert_allclose(by_window(found, "one: loss", "ours: loss", [0, 1, 2]), data)
    (both,), _, _ = judge([GAIN], found)
    assert both["covers"] == "seeds and 8 windows" and both["outcome"] == OPEN
    other = {"ours": found["ours"], "one": {"loss": dict.fromkeys(range(3), WindowMean(3.0, np.full(8, 3.0), "else"))}}
    for alone in (other, {**found, "one": {"loss": dict.fromkeys(range(3), 3.0)}}):
        (judged,), _, _ = judge([GAIN], alone)
        assert judged["covers"] == SEEDS_ALONE and judged["outcome"] == CONFIRMED  # which another text could refute


def test_evaluations_tell_their_windows(tmp_path):
    """Of text the tiles, which are the same at every length, and of needles the windows of one length and seed."""
    (tmp_path / "run.json").write_text('{"name": "run", "config": {}}')
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain/phase.json").write_text(
        json.dumps({"phase": "pretrain", "steps": 1, "tokens_per_step": 1, "status": "complete"})
    )
    about = {"phase": "pretrain", "step": 1, "variant": "as trained", "seed": 0}
    text = about | {"suite": "perplexity", "source": "prose", "nll": 3.0, "nll_by_tile": [2.5, 3.5], "tiles": [0, 4]}
    text |= {"settings": {"tile": 2048, "data": ["a"], "stride": 4}}
    needles = about | {"suite": "needles", "source": "needles", "accuracy": 0.5, "accuracy_by_window": [0.0, 1.0]}
    needles |= {"settings": {"windows": 2, "data": None}}
    records = {
        "perplexity": [text | {"factor": x, "length": 256 * x} for x in (1, 2)],
        "needles": [needles | {"factor": x, "length": 256 * x} for x in (1, 2)],
    }
    (tmp_path / "evaluation").mkdir()
    for suite, listed in records.items():
        (tmp_path / f"evaluation/{suite}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in listed))
    found = scores(tmp_path)
    assert found["text 2x"] == 3.0 and found["text 2x"].windows == (2.5, 3.5)
    assert found["text 1x"].text == found["text 2x"].text
    assert found["needles 2x"].windows == (0.0, 1.0) and found["needles 1x"].text != found["needles 2x"].text


# ---------------------------------------------------------------------------------------------------------------------
# Power


def test_power_is_that_of_other_code():
    """Of the t test by direct integration over the deviation, and of two one-sided tests by simulation."""
    for distance, seeds in ((3.3, 3), (1.7, 5), (1.0, 12)):
        t = stats.t.ppf(0.975, seeds - 1)

        def shown(s, distance=distance, seeds=seeds, t=t):
            scale = math.sqrt(seeds - 1)
            return stats.norm.sf(t * s - distance * math.sqrt(seeds)) * stats.chi.pdf(s * scale, seeds - 1) * scale

        assert beyond(distance, Spread(1.0), seeds) == pytest.approx(integrate.quad(shown, 0, 8)[0], abs=1e-4)
    rng = np.random.default_rng(0)
    for margin, seeds in ((3.7, 3), (1.9, 5), (1.0, 9)):
        drawn = rng.normal(size=(20_000, seeds))
        half = stats.t.ppf(0.975, seeds - 1) * drawn.std(1, ddof=1) / math.sqrt(seeds)
        share = (np.abs(drawn.mean(1)) + half < margin).mean()
        assert inside(margin, Spread(1.0), seeds) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("kind", ["by", "tolerance", "within"])
@pytest.mark.parametrize(("effect", "criteria"), [(2.5, 1), (3.5, 4)])
def test_claims_with_known_effects_have_the_stated_power(kind, effect, criteria):
    """1 s. Within 5 points, with the number of seeds that follows, to both sides; margin and deviation are 1."""
    rule = Criterion("a", of="ours: loss", effect=effect, **{kind: 1.0})
    seeds = seeds_needed(rule, Spread(1.0), criteria)
    stated = power(rule, Spread(1.0), seeds, criteria)
    assert min(stated) >= POWER and (seeds == 3 or min(power(rule, Spread(1.0), seeds - 1, criteria)) < POWER)
    rng, draws = np.random.default_rng(0), 1000
    true = effect if kind == "by" else 0.0

    def share(mean, outcome):
        drawn = (values(ours=rng.normal(mean, 1, seeds)) for _ in range(draws))
        return sum(judge([rule] * criteria, one)[0][0]["outcome"] == outcome for one in drawn) / draws

    assert share(true, EQUIVALENT if kind == "within" else CONFIRMED) == pytest.approx(stated[0], abs=0.05)
    assert share(-effect, REFUTED) == pytest.approx(stated[1], abs=0.05)


@pytest.mark.parametrize("parts", [(1.0, 0.5, 1.0), (0.5, 2.0, 1.0)])
def test_power_with_text_is_stated_too(parts):
    """1 s. More seeds do not make the variance of the text smaller. Within 5 points."""
    of_seed, of_text, rest = parts
    windows, seeds = 16, 6
    known = Spread(of_seed**2 + rest**2 / windows, of_text**2 / windows, rest**2 / windows, windows)
    rule = Criterion("a", of="ours: loss", over=("one: loss",), lower=True, by=1.0, effect=3.0)
    stated, _ = power(rule, known, seeds, 1)
    rng = np.random.default_rng(0)
    drawn = (of_windows(layout(rng, seeds, windows, *parts, mean=3.0)) for _ in range(800))
    share = sum(judge([rule], one)[1] == CONFIRMED for one in drawn) / 800
    assert share == pytest.approx(stated, abs=0.05)
    assert seeds_needed(rule, dataclasses.replace(known, text=9.0), 1) is None


def test_a_power_table_has_the_comparison_that_needs_most():
    rule = Criterion("more", of="ours: loss", over=("one: loss", "other: loss"), by=1.0, effect=2.0)
    found = values(ours=[3.0, 3.1, 3.2], one=[1.0, 1.1, 1.2], other=[1.0, 1.9, 1.2])
    (row,) = power_table([rule], found)
    assert row["deviation"] == pytest.approx(np.std([2.0, 1.2, 2.0], ddof=1)) and row["seeds"] >= LEAST_OF_ONE
    assert seeds_of([row], "a") == row["seeds"]
    (nothing,) = power_table([rule], values(ours=[3.0], one=[1.0], other=[1.0]))
    with pytest.raises(ConfigError, match="'more' has no deviation in its pilot. Give --seeds=N"):
        seeds_of([nothing], "a")
    wide = values(ours=[3.0, 9.0, 30.0], one=[1.0, 1.1, 1.2], other=[1.0, 1.9, 1.2])
    with pytest.raises(ConfigError, match="needs more than 64 seeds to see 2 beyond 1, with a deviation of"):
        seeds_of(power_table([rule], wide), "a")
    with pytest.raises(ConfigError, match="`effect` 0.5 is no more than the margin 1"):
        Criterion("bad", of="a: loss", by=1.0, effect=0.5)
    assert GAIN.sees == 0.02
    assert rule.rule.endswith(", by more than 1; sees 2")


# ---------------------------------------------------------------------------------------------------------------------
# The noise of re-running


def moved(arm, seed, by):
    return rerun(arm, seed, {"loss": 3.0 + by}, {"loss": 3.0}, {"machine": "another"})


def test_the_bound_is_what_a_mean_moves_by_if_all_runs_are_run_again():
    """2 s. Two arms, three seeds: with 95%, where the noise of a run is known from nine others."""
    rng, inside_ = np.random.default_rng(0), 0
    for _ in range(1500):
        known = [moved("ours", n, rng.normal(0, 0.005 * 2**0.5)) for n in range(9)]
        again = rng.normal(0, 0.005 * 2**0.5, (2, 3)).mean(1)
        inside_ += abs(again[0] - again[1]) < noise("ours: loss", "one: loss", 3, known)
    assert inside_ / 1500 == pytest.approx(0.95, abs=0.02)
    assert noise("ours: loss", "one: loss", 3, []) is None
    assert noise("ours: found", "", 3, [moved("ours", 0, 0.1)]) is None
    both = [{"difference": {"a": 0.1, "b": 0.1}}]  # numbers of one run move together
    assert noise("ours: a", "ours: b", 3, both) == 0


def test_a_difference_that_re_running_makes_settles_nothing():
    """A larger one does, in either direction; neither equality nor as good within less than the noise is shown."""
    known = [moved("ours", n, 0.03) for n in range(3)]
    bound = noise("ours: loss", "one: loss", 3, known)
    assert bound > 0.01
    near, far, below = (values(ours=[3.0 - by] * 3, one=[3.0] * 3) for by in (bound / 2, 2 * bound, -2 * bound))
    rules = {kind: dataclasses.replace(GAIN, **{"by": 0.0, kind: 0.01}) for kind in ("by", "tolerance", "within")}
    for kind, rule in rules.items():
        outcomes = [judge([rule], one, reruns=known)[1] for one in (near, far, below)]
        assert outcomes == [OPEN, REFUTED if kind == "within" else CONFIRMED, REFUTED]
    (judged,), _, _ = judge([GAIN], near, reruns=known)
    assert outcome_text(judged) == f"not settled: smaller than the noise of re-running, {bound:.2g}"
    result = {"verdict": OPEN, "criteria": [judged], "preconditions": []}
    assert verdict_text(result) == outcome_text(judged)
    assert judge([GAIN], near)[1] == CONFIRMED  # no re-run is known
    assert judge([rules["tolerance"]], values(ours=[3.0] * 3, one=[3.0] * 3), reruns=known)[1] == OPEN


def test_re_runs_are_found_among_other_results():
    """Of one recipe, trained again: by the seconds. Numbers of a text that was chosen otherwise are none."""

    def result(name, loss, seconds, text):
        arm = {"recipe": "a.py", "surgery": "", "seconds": seconds}
        numbers = {"a": {"validation": loss, "text 2x": text}}
        return {"claim": name, "size": "laptop", "seeds": [0, 1], "arms": {"a": arm}, "values": numbers}

    mine = result("mine", [3.0, 3.1], 10.0, [3.5, 3.6])
    others = [
        result("same", [3.0, 3.1], 10.0, [3.5, 3.6]),
        result("again", [3.01, 3.08], 11.0, [3.52, 3.6]),
        result("elsewhere", [3.01, 3.08], 11.0, [9.0, 9.0]),  # the same runs, on another text
    ]
    alike = {"again": {"validation", "text 2x"}, "elsewhere": {"validation"}, "same": {"validation"}}
    found = among(
        mine, others, lambda arm, other: alike[other["claim"]], lambda one, other: one["recipe"] == other["recipe"]
    )
    assert [(one["arm"], one["seed"], one["claim"]) for one in found] == [("a", 0, "again"), ("a", 1, "again")]
    assert found[0]["difference"] == pytest.approx({"validation": 0.01, "text 2x": 0.02})


# ---------------------------------------------------------------------------------------------------------------------
# Preconditions

ROPE = Arm("rope", "a.py:method=rope")
NOPE = Arm("nope", "a.py:method=nope,rate=1e-3")
LOWER = Criterion("lower", "rope: validation prose", ("nope: validation prose",), lower=True, by=0.01)
RATES = Rates(grid=(1e-3, 3e-3, 1e-2))


def of_rates(arm, losses):
    """Numbers of an arm at each rate of the grid."""
    arms = {RATES.at(arm, rate).name: loss for rate, loss in zip(RATES.grid, losses, strict=True)}
    return {name: {"validation prose": {0: loss}} for name, loss in arms.items()}


def test_every_rate_is_the_best_of_one_grid_and_not_at_its_end():
    claim = Claim("a", "ours", (ROPE, NOPE), (LOWER,), rates=RATES)
    assert [(arm.name, arm.recipe) for arm in claim.pilot] == [
        ("rope.rate_0.001", "a.py:method=rope,rate=0.001"),
        ("rope.rate_0.01", "a.py:method=rope,rate=0.01"),
        ("nope.rate_0.003", "a.py:method=nope,rate=0.003"),
        ("nope.rate_0.01", "a.py:method=nope,rate=0.01"),
    ]
    assert [len(claim.seeds_of(arm, range(5))) for arm in claim.all_arms] == [5, 5, 1, 1, 1, 1]
    rope, nope = claim.conditions
    best = rope.check(of_rates(ROPE, [3.2, 3.0, 3.1]))
    assert best["met"] and best["note"] == "best at 0.003 (0.001: 3.2, 0.003: 3, 0.01: 3.1)"
    assert not rope.check(of_rates(ROPE, [2.9, 3.0, 3.1]))["met"]
    edge = nope.check(of_rates(NOPE, [2.9, 3.0, 3.1]))
    assert not edge["met"] and edge["note"].endswith(", the lowest of the grid: a better one may lie beyond")
    assert rope.rule.startswith("if rope: validation prose at rate 0.003 is the lowest of 0.001, 0.003, 0.01")
    flat = [dataclasses.replace(one, within=0.001) for one in (rope, nope)]
    assert flat[0].rule.startswith(
        "if rope: validation prose at rate 0.003 is within 0.001 of the lowest of 0.001, 0.003"
    )
    for losses, met in (([3.0, 3.0005, 3.1], True), ([2.998, 3.0, 3.1], False)):
        assert flat[0].check(of_rates(ROPE, losses))["met"] is met
    assert not flat[1].check(of_rates(NOPE, [3.0005, 3.0, 3.1]))["met"]  # its own rate is at an end
    for bad in ((3e-3,), (1e-2, 3e-3, 1e-3), (0.0, 1e-3, 3e-3)):
        with pytest.raises(ConfigError, match="a grid has at least three rates above 0, ascending"):
            Rates(grid=bad)
    with pytest.raises(ConfigError, match="rate=fast is no number"):
        RATES.own(Arm("a", "a.py:rate=fast"))


def test_a_claim_that_compares_arms_without_a_grid_is_not_settled():
    claim = Claim("a", "ours", (ROPE, NOPE), (LOWER,))
    numbers = {
        name: {"validation prose": dict(enumerate(each))}
        for name, each in {"rope": [3.0] * 3, "nope": [4.0] * 3}.items()
    }
    criteria, verdict, checked = judge(claim.criteria, numbers, claim.conditions)
    assert verdict == OPEN and criteria[0]["outcome"] == CONFIRMED and checked[0]["met"] is None
    result = {"verdict": verdict, "criteria": criteria, "preconditions": checked}
    words = "every arm's learning rate is the best of one grid, the same for all arms: not measured"
    assert verdict_text(result) == f"not settled: {words}" and leading(result) == checked[0]
    apart = dataclasses.replace(claim, rates=Rates(apart="a reason"))
    assert judge(claim.criteria, numbers, apart.conditions)[1] == CONFIRMED
    within = dataclasses.replace(LOWER, over=("rope: other",))
    assert Claim("a", "ours", (ROPE,), (within,)).conditions == ()  # one arm


def test_the_best_alternative_is_bounded_and_its_number_stands_beside_the_verdict():
    bounded = Precondition("it can differ", "a: found", least=0.2, most=0.8, others=("b: found",))
    found = {"a": {"found": {0: 0.1, 1: 0.1}}, "b": {"found": {0: 0.5, 1: 0.6}}, "c": {"found": {0: 0.95, 1: 0.95}}}
    assert bounded.check(found)["met"] and bounded.check(found)["mean"] == pytest.approx(0.55)
    full = dataclasses.replace(bounded, others=("c: found",))
    criteria, verdict, checked = judge([Criterion("c", "a: found", by=0.01)], found, [full])
    result = {"verdict": verdict, "criteria": criteria, "preconditions": checked}
    assert verdict == UNTESTABLE and verdict_text(result) == "not testable here: it can differ: 0.95"
    assert full.rule == "if the best of (a: found; c: found) >= 0.2 and <= 0.8"


def test_compared_arms_have_the_same_help():
    assert [help_of(f"rope: {one}") for one in ("text 1x", "validation prose", "text 2x YaRN", "needles 8x beta")] == [
        None,
        None,
        "none",
        "fitted",
    ]
    assert help_of("rope: text 4x YaRN, constant") == help_of("rope: text 4x paper beta") == "constant"
    assert help_of("rope: passkeys 2x yarn:factor=2 + beta") == "fitted"
    assert help_of("rope: passkeys 2x cropped") is None  # it reads no more than the training length
    mixed = Criterion("mixed", "rope: text 2x beta", ("nope: text 2x",), lower=True, by=0.1)
    for given in ("none", "fitted", "constant"):
        with pytest.raises(ConfigError, match="'mixed': its numbers have help fitted and none at test time"):
            Claim("a", "ours", (ROPE, NOPE), (mixed,), help=given)
    with pytest.raises(ConfigError, match="help='fited'. Did you mean"):
        Claim("a", "ours", (ROPE, NOPE), (LOWER,), help="fited")


# ---------------------------------------------------------------------------------------------------------------------
# History and figures


def test_a_history_has_what_changed_from_to_and_why():
    first = {"recipe": {"a": "x.py (1)"}, "measure": {"name": "losses", "code": "1"}, "evaluation": None, "rule": ["a"]}
    history = continued(None, first, "confirmed", 3)
    assert [(one["verdict"], one["rule"]) for one in history] == [("confirmed", ["a"])]
    before = {"history": history, "conditions": first}
    assert continued(before, first, "confirmed", 5) == [history[0] | {"seeds": 5}]
    then = first | {"measure": {"name": "losses", "code": "2"}, "rule": ["a", "b"]}
    (_, entry) = continued(before, then, "refuted", 3, "b was missing")
    assert [one["what"] for one in entry["changed"]] == ["measure", "rule"] and entry["why"] == "b was missing"
    assert changes(entry) == ["measure: from code 1 to code 2", "rule: from nothing to b"]
    (_, again) = continued(before, {"rule": ["c"]}, "refuted", 3)  # judged again: no run, and no other measure
    assert changes(again) == ["rule: from a to c"]


def test_panels_of_one_unit_share_an_axis(monkeypatch):
    """Losses in nats of two panels; needles found have an axis from 0 to 1."""
    drawn = []
    monkeypatch.setattr("pe_lab.lab.claims.page.render_all", lambda groups, form, title: drawn.extend(groups) or b"")
    (result,) = (one for one in read_results() if one["claim"] == "distillation")
    draw(result, "png")
    first, second = drawn[0]
    assert first.y_limits == second.y_limits
    for figure in (first, second):
        for _, lines in figure.panels:
            for line in lines:
                assert np.nanmin(line.low) >= figure.y_limits[0] and np.nanmax(line.high) <= figure.y_limits[1]


def test_claims_of_models_without_positions_ask_whether_they_learned_order():
    for name in ("drop_needles", "drop_text", "after_the_papers", "recovery", "late_drop", "p_rope", "partial_rope"):
        rule = load_claim(name).rule
        assert any(re.fullmatch(r"if (\w+_)?nope: previous-token bias >= 0.3", one) for one in rule), name
        assert any(re.match(r"if (\w+_)?nope: .+ - trigram\d*: ", one) for one in rule), name
