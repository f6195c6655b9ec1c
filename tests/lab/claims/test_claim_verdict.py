"""The statistics of claims: verdicts from differences over seeds. 5 s."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from pe_lab.errors import ConfigError
from pe_lab.lab.claims.claim import load_claim
from pe_lab.lab.claims.results import read_results, values_of
from pe_lab.lab.claims.verdict import (
    CONFIRMED,
    EQUIVALENT,
    OPEN,
    REFUTED,
    UNMEASURED,
    UNTESTABLE,
    Criterion,
    Precondition,
    differences_of,
    judge,
)
from pe_lab.results.statistics import student

GAIN = Criterion("a gain", of="ours: loss", over=("one: loss", "other: loss"), lower=True, by=0.01)


def values(**arms):
    """{arm: {"loss": {seed: value}}} from lists."""
    return {arm: {"loss": dict(enumerate(listed))} for arm, listed in arms.items()}


def at_most(count, draws, probability=0.05):
    """Whether a count of events is no more than their probability and three standard deviations of chance allow."""
    return count <= probability * draws + 3 * math.sqrt(draws * probability * (1 - probability))


def test_the_alternative_over_which_least_is_gained_decides():
    found = values(ours=[1.0, 2.0], one=[1.5, 2.1], other=[1.2, 2.9])
    assert differences_of(GAIN, found, "one: loss") == pytest.approx({0: 0.5, 1: 0.1})
    (judged,), _, _ = judge([GAIN], found)
    assert judged["against"] == "one: loss" and judged["mean"] == pytest.approx(0.3)


def test_seeds_that_one_number_lacks_are_left_out():
    found = values(ours=[1.0, 2.0, 3.0], one=[1.5, 2.1, 3.1], other=[1.2, 2.9])
    assert sorted(differences_of(GAIN, found, "other: loss")) == [0, 1]


def test_higher_is_better_unless_said_otherwise():
    criterion = Criterion("more", of="ours: loss", over=("one: loss",), by=0.1)
    assert differences_of(criterion, values(ours=[3.0], one=[1.0]), "one: loss") == {0: 2.0}
    assert differences_of(Criterion("some", of="ours: loss", by=0.1), values(ours=[3.0])) == {0: 3.0}


def test_the_interval_is_scipys():
    numbers = [0.1, 0.3, 0.2, 0.25]
    found = student(numbers, 0.95)
    expected = stats.ttest_1samp(numbers, 0.0).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(numbers), expected.low, expected.high))
    assert math.isnan(student([0.1], 0.95).low) and math.isnan(student([0.1], 0.95).high)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([1.0, 1.01, 0.99], CONFIRMED),
        ([2.0, 2.01, 1.99], REFUTED),
        ([1.0, 2.0, 1.2], OPEN),
        ([1.0], OPEN),  # one seed settles nothing
        ([1.195, 1.1951, 1.1949], EQUIVALENT),  # a gain of 0.005, certain, and smaller than what counts
        ([1.205, 1.2051, 1.2049], EQUIVALENT),
        ([1.18, 1.189, 1.171], OPEN),  # 0.02 on average, which is more than 0.01, and the interval begins below it
    ],
)
def test_verdicts(ours, verdict):
    found = values(ours=ours, one=[1.2] * len(ours), other=[1.3] * len(ours))
    judged, given, _ = judge([GAIN], found)
    assert given == verdict == judged[0]["outcome"]


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ([1.0, 1.001, 0.999], EQUIVALENT),
        ([0.9, 0.901, 0.899], REFUTED),  # better is not equal
        ([1.1, 1.101, 1.099], REFUTED),
        ([1.0, 1.02, 0.98], OPEN),
    ],
)
def test_a_claim_of_equality_is_two_one_sided_tests(ours, outcome):
    same = Criterion("same", of="ours: loss", over=("one: loss",), lower=True, within=0.01)
    (judged,), verdict, _ = judge([same], values(ours=ours, one=[1.0] * 3))
    assert judged["outcome"] == outcome
    assert verdict == (CONFIRMED if outcome == EQUIVALENT else outcome)  # what the claim says


def test_equivalence_is_that_of_scipys_one_sided_tests():
    rng, seen = np.random.default_rng(0), set()
    same = Criterion("same", of="ours: loss", within=1.0)
    for _ in range(200):
        draw = rng.normal(rng.uniform(-1.5, 1.5), 0.3, 4)
        above, below = (
            stats.ttest_1samp(draw, -1.0, alternative="greater"),
            stats.ttest_1samp(draw, 1.0, alternative="less"),
        )
        expected = max(above.pvalue, below.pvalue) < 0.025
        assert (judge([same], values(ours=draw))[0][0]["outcome"] == EQUIVALENT) == expected
        seen.add(expected)
    assert seen == {True, False}


def test_the_interval_that_decided_is_the_one_that_is_kept():
    """A claim of two criteria refutes by an interval of 97.5%; also where only that one keeps it from being refuted."""
    found = values(ours=[2.0, 2.01, 1.99], near=[1.22, 1.25, 1.19], one=[1.2] * 3, other=[1.2] * 3)
    worse, unclear = judge([GAIN, Criterion("near", "near: loss", ("one: loss",), lower=True, by=0.01)], found)[0]
    assert worse["outcome"] == REFUTED and worse["level"] == pytest.approx(1 - 0.05 / 3)
    of_worse = student([*differences_of(GAIN, found, worse["against"]).values()], worse["level"])
    assert (worse["mean"], worse["low"], worse["high"]) == of_worse.numbers
    assert unclear["outcome"] == OPEN and unclear["level"] == 0.95
    close = values(ours=[1.2, 1.21, 1.19], one=[1.165] * 3, other=[1.165] * 3)
    (judged,), verdict, _ = judge([GAIN], close)
    plain = student([*differences_of(GAIN, close, judged["against"]).values()], 0.95)
    assert verdict == OPEN and plain.high < -0.01 < judged["high"]


def test_a_precondition_that_is_not_met_leaves_the_question_open():
    found = values(ours=[1.0, 1.01, 0.99], one=[1.2] * 3, other=[1.3] * 3)
    near = Precondition("near one", "ours: loss - one: loss", least=-0.1)
    judged, verdict, (checked,) = judge([GAIN], found, [near])
    assert verdict == UNTESTABLE and judged[0]["outcome"] == CONFIRMED
    assert not checked["met"] and checked["mean"] == pytest.approx(-0.2)
    assert judge([GAIN], found, [Precondition("near", "ours: loss - one: loss", least=-0.3)])[1] == CONFIRMED
    with pytest.raises(ConfigError, match="give `least` or `most`"):
        Precondition("none", "ours: loss")
    with pytest.raises(ConfigError, match="no arm is called 'absent'"):
        judge([GAIN], found, [Precondition("absent", "absent: loss", most=0.0)])


def test_a_number_that_no_run_logged_confirms_nothing():
    found = values(ours=[1.0, 1.01, 0.99], one=[1.2] * 3, other=[1.3] * 3)
    unlogged = Criterion("spikes", "ours: spikes", ("one: spikes",), by=1.0)
    judged, verdict, _ = judge([GAIN, unlogged], found, missing_is_unmeasured=True)
    assert [one["outcome"] for one in judged] == [CONFIRMED, UNMEASURED] and verdict == OPEN


def test_a_claim_needs_all_criteria_and_fails_by_one():
    found = values(ours=[1.0, 1.01, 0.99], one=[1.2] * 3, other=[1.3] * 3, worse=[0.5] * 3, same=[1.0, 1.02, 0.98])
    against = Criterion("against", of="ours: loss", over=("worse: loss",), lower=True, by=0.01)
    unclear = Criterion("unclear", of="ours: loss", over=("same: loss",), lower=True, by=0.01)
    assert judge([GAIN, GAIN], found)[1] == CONFIRMED
    assert judge([GAIN, unclear], found)[1] == OPEN
    assert judge([GAIN, against], found)[1] == REFUTED


def test_at_least_as_good_allows_the_tolerance():
    found = values(ours=[1.01, 1.011, 1.009], one=[1.0] * 3)
    as_good = Criterion("as good", of="ours: loss", over=("one: loss",), lower=True, tolerance=0.05)
    (judged,), verdict, _ = judge([as_good], found)
    assert verdict == CONFIRMED and judged["mean"] == pytest.approx(-0.01)
    strict = Criterion("as good", of="ours: loss", over=("one: loss",), lower=True, tolerance=0.001)
    assert judge([strict], found)[1] == REFUTED


def verdicts_of_the_same_recipe(kind, margin, criteria, seeds, draws=1000):
    """{verdict: how often} of one recipe under two names, whose noise is 0.01, on `criteria` numbers."""
    rng, found = np.random.default_rng(0), Counter()
    rules = [Criterion("a", f"ours: {n}", (f"one: {n}",), lower=True, **{kind: margin}) for n in range(criteria)]
    for _ in range(draws):
        draw = {
            arm: {str(n): dict(enumerate(rng.normal(3.0, 0.01, seeds))) for n in range(criteria)}
            for arm in ("ours", "one")
        }
        found[judge(rules, draw)[1]] += 1
    return found


@pytest.mark.parametrize("margin", [1e-6, 0.01])  # one that hides no noise, and one as large as the noise
@pytest.mark.parametrize("criteria", [1, 4])
@pytest.mark.parametrize("seeds", [3, 6])
def test_a_gain_of_the_same_recipe_is_settled_less_than_5_times_of_100(criteria, seeds, margin):
    found = verdicts_of_the_same_recipe("by", margin, criteria, seeds)
    assert at_most(found[CONFIRMED] + found[REFUTED], 1000)


@pytest.mark.parametrize("kind", ["tolerance", "within"])
@pytest.mark.parametrize("margin", [0.01, 0.03])
@pytest.mark.parametrize("criteria", [1, 4])
@pytest.mark.parametrize("seeds", [3, 6])
def test_the_same_recipe_is_refuted_as_good_or_equal_less_than_5_times_of_100(criteria, seeds, margin, kind):
    """It is as good and equal: confirmed the more often, the wider the margin is beside the noise of the seeds."""
    assert at_most(verdicts_of_the_same_recipe(kind, margin, criteria, seeds, 400)[REFUTED], 400)


def test_the_same_recipe_is_confirmed_as_good_and_equal_where_the_margin_is_wide():
    for kind in ("tolerance", "within"):
        shares = [
            verdicts_of_the_same_recipe(kind, margin, 1, 6, 300)[CONFIRMED] / 300 for margin in (0.003, 0.01, 0.03)
        ]
        assert shares == sorted(shares) and shares[0] < 0.2 and shares[-1] > 0.9


def test_the_best_of_many_equal_recipes_refutes_none():
    """Compared with the best one of each seed, the same recipe would be worse, by the noise of the seeds."""
    rng, others, settled = np.random.default_rng(0), [f"other{n}: loss" for n in range(5)], 0
    rule = Criterion("a", of="ours: loss", over=tuple(others), by=1e-6)
    for _ in range(1000):
        draw = {arm: {"loss": dict(enumerate(rng.normal(3.0, 0.01, 3)))} for arm in ("ours", *(o[:6] for o in others))}
        settled += judge([rule], draw)[1] in (CONFIRMED, REFUTED)
    assert at_most(settled, 1000)


@pytest.mark.parametrize(
    ("kind", "difference", "outcome"),
    [
        ("by", 1.0, CONFIRMED),
        ("by", 1.0, EQUIVALENT),
        ("by", -1.0, REFUTED),
        ("tolerance", -1.0, CONFIRMED),
        ("tolerance", -1.0, REFUTED),
        ("within", 1.0, EQUIVALENT),
        ("within", -1.0, REFUTED),
    ],
)
def test_a_difference_that_is_the_margin_is_on_neither_side(kind, difference, outcome):
    """One-sided tests at 2.5%, with noise much smaller than the margin and as large."""
    rng, rule = np.random.default_rng(0), Criterion("a", of="ours: loss", **{kind: 1.0})
    for noise in (0.1, 1.0):
        draws = [values(ours=rng.normal(difference, noise, 3)) for _ in range(1000)]
        assert at_most(sum(judge([rule], draw)[0][0]["outcome"] == outcome for draw in draws), 1000, 0.025)


@pytest.mark.parametrize(("seeds", "gain", "loss", "margin"), [(3, 3.3, 8.0, 3.7), (5, 1.7, 2.8, 1.9)])
def test_power(seeds, gain, loss, margin):
    """In deviations of one seed's difference: what docs/claims.md says is shown in 8 of 10 claims."""
    rng = np.random.default_rng(0)
    better = Criterion("better", of="ours: loss", by=1.0)
    equal = Criterion("equal", of="ours: loss", within=margin)
    as_good = Criterion("as good", of="ours: loss", tolerance=gain)
    shares = {
        "confirmed": [
            judge([better], values(ours=rng.normal(1 + gain, 1, seeds)))[1] == CONFIRMED for _ in range(1000)
        ],
        "refuted": [
            judge([better] * 6, values(ours=rng.normal(-1 - loss, 1, seeds)))[1] == REFUTED for _ in range(500)
        ],
        "as good": [judge([as_good], values(ours=rng.normal(0, 1, seeds)))[1] == CONFIRMED for _ in range(1000)],
        "equal": [judge([equal], values(ours=rng.normal(0, 1, seeds)))[1] == CONFIRMED for _ in range(1000)],
    }
    assert {name: np.mean(shown) for name, shown in shares.items()} == pytest.approx(
        dict.fromkeys(shares, 0.8), abs=0.05
    )


def test_errors_name_what_is_missing():
    with pytest.raises(ConfigError, match="no arm is called 'ours'. Arms: one"):
        judge([GAIN], values(one=[1.0]))
    with pytest.raises(ConfigError, match="has no number 'loss'. It has: text"):
        judge([GAIN], {**values(one=[1.0], other=[1.0]), "ours": {"text": {0: 1.0}}})
    with pytest.raises(ConfigError, match="must be 'ARM: METRIC'"):
        Criterion("bad", of="loss", by=0.1)
    with pytest.raises(ConfigError, match="`by` is missing"):
        Criterion("bad", of="a: loss")
    with pytest.raises(ConfigError, match="give one of `by`, `tolerance` and `within`"):
        Criterion("bad", of="a: loss", by=0.1, within=0.1)


def noise_of(result):
    """The criteria of a result that can be resampled, and the deviations of one arm for all numbers of each."""
    deviations = {}
    for arm, metrics in result["values"].items():
        for metric, listed in metrics.items():
            known = [v for v in listed if v is not None]
            if len(known) > 2 and np.ptp(known) > 0:
                # Deviations from the mean of n are too small by the square root of (n - 1) / n.
                unbiased = math.sqrt(len(known) / (len(known) - 1))
                deviations[f"{arm}: {metric}"] = (np.asarray(known) - np.mean(known)) * unbiased
    usable = [
        one
        for one in load_claim(result["claim"]).criteria
        if one.over and all(term in deviations for term in (one.of, *one.over))
    ]
    noise: dict = {}
    for one in usable:
        source = next((noise[term] for term in one.terms if term in noise), deviations[one.of])
        noise |= {term: noise.get(term, source) for term in one.terms}
    return usable, noise


def drawn_from(noise, rng, shifted=None):
    """Three seeds of each number, of deviations with random signs; `shifted` adds to some terms."""
    found: dict = {}
    for term, deviation in noise.items():
        arm, metric = term.split(": ", 1)
        draw = rng.choice(deviation, 3) * rng.choice([-1, 1], 3) + (shifted or {}).get(term, 0.0)
        found.setdefault(arm, {})[metric] = dict(enumerate(draw))
    return found


def test_committed_results_resampled_under_one_recipe_are_not_settled():
    """1 s. The noise of real seeds: all arms of each criterion drawn from one arm's own deviations, 25 times.

    All criteria of a claim are judged together, as its verdict is, with the noise of re-running that the result knows.
    Equal recipes are as good and equal, so that only a claim that claims a gain must not be confirmed.
    """
    rng, drawn, several, settled = np.random.default_rng(0), 0, 0, 0
    for result in read_results():
        usable, noise = noise_of(result)
        if not usable:
            continue
        several += len(usable) > 1
        for _ in range(25):
            drawn += 1
            wrong = {REFUTED, CONFIRMED} if any(one.by for one in usable) else {REFUTED}
            settled += judge(usable, drawn_from(noise, rng), reruns=result["reruns"])[1] in wrong
    assert several > 5 and at_most(settled, drawn)


def test_committed_results_resampled_at_the_margin_are_not_equivalent():
    """2 s. A difference that is the margin is found to be smaller in fewer than 2.5 of 100, by real seeds' noise."""
    rng, drawn, wrong = np.random.default_rng(0), 0, 0
    for result in read_results():
        usable, noise = noise_of(result)
        for one in usable:
            if one.tolerance or len(one.over) > 1 or " - " in one.of:
                continue
            for sign in (-1, 1):
                for _ in range(25):
                    draw = drawn_from(noise, rng, {one.of: sign * one.margin})
                    drawn += 1
                    wrong += judge([one], draw, reruns=result["reruns"])[0][0]["outcome"] == EQUIVALENT
    assert drawn > 500 and at_most(wrong, drawn, 0.025)


def test_resampled_results_are_testable_where_their_preconditions_are_met():
    """The fifth verdict: whatever the criteria show, and by the precondition's numbers alone."""
    rng, seen = np.random.default_rng(0), set()
    for result in read_results():
        usable, noise = noise_of(result)
        claim, real = load_claim(result["claim"]), values_of(result)
        for _ in range(3):
            draw = drawn_from(noise, rng)
            for arm, metrics in real.items():
                draw[arm] = {**metrics, **draw.get(arm, {})}
            # Numbers of preconditions stay what they are; those of criteria are noise.
            for term in (term for one in claim.conditions for term in one.terms):
                arm, _, metric = term.partition(": ")
                if metric in real.get(arm, {}):
                    draw[arm][metric] = real[arm][metric]
            _, verdict, checked = judge(usable or claim.criteria, draw, claim.conditions, True)
            failed = {one["met"] for one in checked}
            assert (verdict == UNTESTABLE) == (False in failed), result["claim"]
            assert False in failed or None not in failed or verdict == OPEN
            seen.add(verdict == UNTESTABLE)
    assert seen == {True, False}
