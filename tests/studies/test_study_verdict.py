"""The statistics of studies: verdicts from differences over seeds. 2 s."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pe_lab.errors import ConfigError
from pe_lab.studies.results import read_results
from pe_lab.studies.study import load_study
from pe_lab.studies.verdict import CONFIRMED, OPEN, REFUTED, Criterion, differences_of, judge, student

GAIN = Criterion("a gain", of="ours: loss", over=("one: loss", "other: loss"), lower=True, by=0.01)


def values(**arms):
    """{arm: {"loss": {seed: value}}} from lists."""
    return {arm: {"loss": dict(enumerate(listed))} for arm, listed in arms.items()}


def test_the_best_alternative_of_each_seed_counts():
    found = values(ours=[1.0, 2.0], one=[1.5, 2.1], other=[1.2, 2.9])
    assert differences_of(GAIN, found) == pytest.approx({0: 0.2, 1: 0.1})


def test_seeds_that_one_number_lacks_are_left_out():
    found = values(ours=[1.0, 2.0, 3.0], one=[1.5, 2.1, 3.1], other=[1.2, 2.9])
    assert sorted(differences_of(GAIN, found)) == [0, 1]


def test_higher_is_better_unless_said_otherwise():
    criterion = Criterion("more", of="ours: loss", over=("one: loss",), by=0.1)
    assert differences_of(criterion, values(ours=[3.0], one=[1.0])) == {0: 2.0}
    assert differences_of(Criterion("some", of="ours: loss", by=0.1), values(ours=[3.0])) == {0: 3.0}


def test_the_interval_is_scipys():
    numbers = [0.1, 0.3, 0.2, 0.25]
    mean, low, high = student(numbers, 0.95)
    expected = stats.ttest_1samp(numbers, 0.0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((np.mean(numbers), expected.low, expected.high))
    assert all(map(math.isnan, student([0.1], 0.95)[1:]))


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([1.0, 1.01, 0.99], CONFIRMED),
        ([2.0, 2.01, 1.99], REFUTED),
        ([1.0, 2.0, 1.2], OPEN),
        ([1.0], OPEN),  # one seed settles nothing
        ([1.195, 1.1951, 1.1949], OPEN),  # certain, and smaller than what counts
    ],
)
def test_verdicts(ours, verdict):
    found = values(ours=ours, one=[1.2] * len(ours), other=[1.3] * len(ours))
    judged, given = judge([GAIN], found)
    assert given == verdict == judged[0].outcome


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
    (judged,), verdict = judge([as_good], found)
    assert verdict == CONFIRMED and judged.mean == pytest.approx(-0.01)
    strict = Criterion("as good", of="ours: loss", over=("one: loss",), lower=True, tolerance=0.001)
    assert judge([strict], found)[1] == REFUTED


@pytest.mark.parametrize("criteria", [1, 4])
@pytest.mark.parametrize("seeds", [3, 6])
def test_the_same_recipe_twice_is_not_settled_95_times_of_100(criteria, seeds):
    """Noise of seeds that `by` does not hide: an error of the statistics would show."""
    rng, rules = np.random.default_rng(0), []
    for n in range(criteria):
        rules.append(Criterion("a", of=f"ours: {n}", over=(f"one: {n}",), lower=True, by=1e-6))
    settled = 0
    for _ in range(2000):
        draw = {
            arm: {str(n): dict(enumerate(rng.normal(3.0, 0.01, seeds))) for n in range(criteria)}
            for arm in ("ours", "one")
        }
        settled += judge(rules, draw)[1] != OPEN
    # 5% of 2,000, and three standard deviations of chance.
    assert settled <= 0.05 * 2000 + 3 * math.sqrt(2000 * 0.05 * 0.95)


def test_errors_name_what_is_missing():
    with pytest.raises(ConfigError, match="no arm is called 'ours'. Arms: one"):
        judge([GAIN], values(one=[1.0]))
    with pytest.raises(ConfigError, match="has no number 'loss'. It has: text"):
        judge([GAIN], {**values(one=[1.0], other=[1.0]), "ours": {"text": {0: 1.0}}})
    with pytest.raises(ConfigError, match="must be 'ARM: METRIC'"):
        Criterion("bad", of="loss", by=0.1)
    with pytest.raises(ConfigError, match="`by` is missing"):
        Criterion("bad", of="a: loss")


def test_committed_results_resampled_under_one_recipe_are_not_settled():
    """The noise of real seeds: both arms of every criterion drawn from one arm's own deviations, 100 times."""
    rng, drawn, settled = np.random.default_rng(0), 0, 0
    for result in read_results():
        study = load_study(result["study"])
        deviations = {}
        for arm, metrics in result["values"].items():
            for metric, listed in metrics.items():
                known = [v for v in listed if v is not None]
                if len(known) > 2 and np.ptp(known) > 0:
                    # Deviations from the mean of n are too small by the square root of (n - 1) / n.
                    deviations[arm, metric] = (np.asarray(known) - np.mean(known)) * math.sqrt(
                        len(known) / (len(known) - 1)
                    )
        rules = [one for one in study.criteria if not one.tolerance and one.over]
        terms = {term for one in rules for term in (one.of, *one.over) if " - " not in term}
        usable = [one for one in rules if all(tuple(t.split(": ", 1)) in deviations for t in (one.of, *one.over))]
        if not usable:
            continue
        for _ in range(100):
            values: dict = {}
            for term in terms:
                arm, metric = term.split(": ", 1)
                noise = deviations[tuple(usable[0].of.split(": ", 1))]
                values.setdefault(arm, {})[metric] = dict(enumerate(rng.choice(noise, 3) * rng.choice([-1, 1], 3)))
            drawn += 1
            settled += judge([usable[0]], values)[1] != OPEN
    assert settled <= 0.05 * drawn + 3 * math.sqrt(0.0475 * drawn)
