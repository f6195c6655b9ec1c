"""Laws of a gap by size: their fits, and how often their intervals hold what they promise; 6 s."""

import dataclasses
import math

import numpy as np
import pytest

from pe_lab.errors import DataError
from pe_lab.lab.claims.laws import Size, by_onset_law, by_power_law, fit_line, onset_lines, power_line, predictions

PARAMETERS, SEEDS = (3.3e5, 7.4e5, 1.31e6), (5, 3, 3)


def made(rng, law: str, noise: float = 0.03, parameters=PARAMETERS, seeds=SEEDS) -> list[Size]:
    found = []
    for N, S in zip(parameters, seeds, strict=True):
        onset, tokens = 4e6 * (N / 3.3e5) ** 0.6, 2.5 * N
        logarithm = math.log(0.6) - 0.135 * math.log(N / 3.3e5) if law == "power" else 0.3 - 2.5 * tokens / onset
        gaps = np.exp(logarithm + noise * rng.standard_normal(S))
        onsets = onset * np.exp(noise * rng.standard_normal(S))
        found.append(Size(N, tokens, tuple(gaps), tuple(onsets)))
    return found


def test_a_line_is_scipys():
    from scipy.stats import linregress

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 9)).tolist()
    line, other = fit_line(x, y), linregress(x, y)
    assert (line.a, line.b) == pytest.approx((other.intercept, other.slope))
    assert line.slope().high - line.b == pytest.approx(2.364624 * other.stderr, rel=1e-5)  # t of 7 degrees


def test_without_noise_both_laws_say_what_is_true():
    rng = np.random.default_rng(0)
    sizes = made(rng, "power", noise=0)
    assert power_line(sizes).b == pytest.approx(-0.135)
    assert by_power_law(sizes, 5.2e6, 3).middle == pytest.approx(0.6 * (5.2e6 / 3.3e5) ** -0.135)
    sizes = made(rng, "onset", noise=0)
    gap, onset = onset_lines(sizes)
    assert (gap.b, onset.b) == pytest.approx((-2.5, 0.6))
    (larger,) = made(rng, "onset", 0, (5.2e6,), (1,))
    found = by_onset_law(sizes, 5.2e6, larger.tokens, 3)
    assert (found.low, found.middle, found.high) == pytest.approx((larger.gaps[0],) * 3)


@pytest.mark.parametrize("law", ["power", "onset"])
def test_intervals_hold_what_they_promise(law: str):
    """Of studies in which the law is true, the mean of three new seeds at 2.95M parameters lies inside in 95 of 100."""
    rng, inside, studies = np.random.default_rng(0), 0, 300
    for _ in range(studies):
        sizes = made(rng, law)
        (larger,) = made(rng, law, parameters=(2.95e6,), seeds=(3,))
        measured = float(np.exp(np.mean(np.log(larger.gaps))))
        known = (sizes, larger.parameters)
        found = by_power_law(*known, 3) if law == "power" else by_onset_law(*known, larger.tokens, 3)
        inside += found.holds(measured)
    assert 0.91 < inside / studies < 0.985


def test_predictions_say_where_the_laws_differ():
    found = predictions(made(np.random.default_rng(1), "onset", 0.02), {"192": (2.95e6, 7.4e6)}, 3)
    assert found["onset law"]["gaps"]["192"]["high"] < found["power law"]["gaps"]["192"]["low"]
    assert 1.31e6 < found["apart from"] < 2.95e6
    assert found["power law"]["exponent"]["low"] < found["power law"]["exponent"]["high"] < 0


def test_a_size_that_never_reached_its_onset_has_that_of_the_line():
    """Without noise the line has the onset of the size that is taken away."""
    first, *others = made(np.random.default_rng(1), "onset", noise=0)
    gap, onset = onset_lines([dataclasses.replace(first, onsets=()), *others])
    assert (gap.b, onset.b) == pytest.approx((-2.5, 0.6))


def test_onsets_of_one_size_leave_the_power_law():
    *others, last = made(np.random.default_rng(1), "power")
    short = [dataclasses.replace(one, onsets=()) for one in others]
    found = predictions([*short, last], {"192": (2.95e6, 7.4e6)}, 3)
    assert "onset law" not in found and found["power law"]["gaps"]["192"]["low"] > 0
    with pytest.raises(DataError, match="at two sizes"):
        onset_lines([*short, last])


def test_what_has_no_law_is_refused():
    with pytest.raises(DataError, match="has no logarithm"):
        power_line([Size(1e5, 1e5, (0.1, -0.01), (1e6,)), Size(1e6, 1e6, (0.1,), (1e6,))])
    with pytest.raises(DataError, match="at two sizes"):
        power_line([Size(1e5, 1e5, (0.1, 0.2, 0.3), (1e6,))])
