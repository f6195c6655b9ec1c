"""What each scheme does to the frequencies: check values, identities, published formulas that are wrong."""

import math

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.config import UserError
from pe_lab.positional import NTK, PI, Alibi, NoPE, PartialRope, Rope, Yarn, alibi_slopes, frequencies


def ratio(scaling, head_dim=64, base=1e4):
    """New frequency over old, per pair."""
    return frequencies(Rope(base, scaling=scaling), head_dim)[0] / frequencies(Rope(base), head_dim)[0]


def test_yarn_check_values():
    yarn = Yarn(factor=2.0, original_length=2048)
    change = ratio(yarn)
    np.testing.assert_array_equal(change[:9], 1)
    np.testing.assert_allclose(change[[9, 10, 20]], [0.9615, 0.9231, 0.5385], atol=5e-5)
    np.testing.assert_allclose(change[21:], 0.5, rtol=1e-12)
    np.testing.assert_allclose(frequencies(Rope(scaling=yarn), 64)[1], 1.069315, atol=5e-7)


@pytest.mark.parametrize(
    ("head_dim", "base", "length", "raw"),
    [
        (64, 1e4, 2048, (8.064, 20.105)),
        (64, 1e6, 1024, (3.7705, 11.798)),
        (128, 1e4, 4096, (20.944, 45.027)),
    ],
)
def test_yarn_ramp_is_rounded_outwards(head_dim, base, length, raw):
    bounds = Yarn(factor=2.0, original_length=length).ramp_bounds(base, head_dim)
    assert bounds == (math.floor(raw[0]), math.ceil(raw[1]))


def test_yarn_ramp_bounds_stay_apart_and_inside():
    assert Yarn(factor=2.0, original_length=6).ramp_bounds(1e4, 64) == (0, 0.001)
    assert Yarn(factor=2.0, original_length=1000).ramp_bounds(10.0, 64)[1] == 63


def test_drope_equation_11_taken_literally_is_position_interpolation_and_ours_is_not():
    """It thresholds the frequency between 1 and 32, and no frequency is above 1."""
    inv_freq = frequencies(Rope(), 64)[0]
    kept = np.clip((inv_freq - 1) / (32 - 1), 0, 1)
    literal = (1 - kept) * inv_freq / 2 + kept * inv_freq
    interpolated = frequencies(Rope(scaling=PI(2.0)), 64)[0]
    np.testing.assert_array_equal(literal, interpolated)
    ours = frequencies(Rope(scaling=Yarn(2.0, 2048)), 64)[0]
    assert (ours[:9] == 2 * interpolated[:9]).all()
    assert (ours[:21] > 1.05 * interpolated[:21]).all()


def test_ntk_check_values():
    change = ratio(NTK(2.0))
    np.testing.assert_allclose(change[[1, 15, 30, 31]], [0.9779, 0.7151, 0.5113, 0.5], atol=5e-5)


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(1, 1e3), head_dim=st.sampled_from([4, 64, 96, 128]), base=st.floats(2, 1e8))
def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor(factor, head_dim, base):
    change = ratio(NTK(factor), head_dim, base)
    assert change[0] == 1
    assert change[-1] == pytest.approx(1 / factor, rel=1e-9)
    assert (np.diff(change) <= 1e-12).all()


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(1, 1e3), base=st.floats(1e2, 1e8), length=st.integers(64, 1 << 20))
def test_yarn_lies_between_rope_and_interpolation(factor, base, length):
    encoding = Rope(base, scaling=Yarn(factor, length))
    inv_freq, gain = frequencies(encoding, 64)
    rope = frequencies(Rope(base), 64)[0]
    assert (inv_freq <= rope * (1 + 1e-12)).all()
    assert (inv_freq >= rope / factor * (1 - 1e-12)).all()
    assert (np.diff(inv_freq / rope) <= 1e-12).all()
    np.testing.assert_allclose(gain, 0.1 * math.log(factor) + 1, rtol=1e-12)


@pytest.mark.parametrize("scaling", [PI(1.0), NTK(1.0), Yarn(1.0, 2048)], ids=repr)
@pytest.mark.parametrize("kind", [Rope, PartialRope])
def test_a_factor_of_one_changes_nothing(scaling, kind):
    plain, scaled = frequencies(kind(fraction=0.5), 64), frequencies(kind(fraction=0.5, scaling=scaling), 64)
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-15)
    np.testing.assert_array_equal(scaled[1], np.ones(32))


def test_p_rope_keeps_the_fastest_pairs_of_the_full_spectrum():
    full, kept = frequencies(Rope(), 64)[0], frequencies(Rope(fraction=0.25), 64)[0]
    np.testing.assert_array_equal(kept[:8], full[:8])
    assert (kept[8:] == 0).all()


def test_partial_rope_squeezes_a_whole_spectrum_into_the_first_pairs():
    squeezed = frequencies(PartialRope(fraction=0.25), 64)[0]
    np.testing.assert_array_equal(squeezed[:8], frequencies(Rope(), 16)[0])
    assert (squeezed[8:] == 0).all()
    p_rope = frequencies(Rope(fraction=0.25), 64)[0]
    assert np.count_nonzero(squeezed) == np.count_nonzero(p_rope) == 8
    assert squeezed[7] < p_rope[7] / 100


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [
        (256, {0.0: 0, 0.01: 2, 0.10: 26, 0.25: 64, 0.50: 128, 0.75: 192, 1.0: 256}),
        (64, {0.0: 0, 0.04: 2, 0.10: 6, 0.25: 16, 0.50: 32, 0.75: 48, 1.0: 64}),
        (128, {0.0: 0, 0.10: 12, 0.25: 32, 0.50: 64, 0.75: 96, 1.0: 128}),
    ],
)
def test_partial_rope_widths_of_the_paper(head_dim, widths):
    for fraction, channels in widths.items():
        assert PartialRope(fraction=fraction).rotated_channels(head_dim) == channels
        assert np.count_nonzero(frequencies(PartialRope(fraction=fraction), head_dim)[0]) == channels // 2


@pytest.mark.parametrize(
    "encoding",
    [
        NoPE(),
        Alibi(),
        Rope(fraction=0.0),
        PartialRope(fraction=0.0),
        Rope(fraction=0.0, scaling=Yarn(4.0, 1024)),
    ],
    ids=repr,
)
def test_what_does_not_rotate_has_no_frequency_and_no_gain(encoding):
    inv_freq, gain = frequencies(encoding, 32)
    assert (inv_freq == 0).all() and (gain == 1).all()


def test_yarns_gain_covers_the_rotary_width_and_nothing_beyond():
    p_rope = frequencies(Rope(fraction=0.25, scaling=Yarn(2.0, 2048)), 64)[1]
    np.testing.assert_array_equal(p_rope, np.full(32, 0.1 * math.log(2) + 1))
    partial = frequencies(PartialRope(fraction=0.25, scaling=Yarn(2.0, 2048)), 64)[1]
    assert (partial[:8] > 1).all() and (partial[8:] == 1).all()


def test_alibi_slopes_of_fourteen_heads_are_eight_and_six():
    slopes = alibi_slopes(14)
    np.testing.assert_array_equal(slopes[:8], 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(slopes[8:], 2.0 ** -np.arange(0.5, 6))


@settings(max_examples=50, deadline=None)
@given(heads=st.integers(1, 200))
def test_alibi_slopes_are_distinct_penalties(heads):
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == heads
    assert (slopes > 0).all() and (slopes < 1).all()


@pytest.fixture
def as_users_run_it():
    """Without the test suite's checks of annotations, which would speak before our own messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rope(base=1.0), "Rope.base is 1.0"),
        (lambda: Rope(base=math.inf), "Rope.base is inf"),
        (lambda: Rope(fraction=1.01), "Rope.fraction is 1.01"),
        (lambda: Rope(fraction=-0.1), "Rope.fraction is -0.1"),
        (lambda: Rope(fraction=NAN), "Rope.fraction is nan"),
        (lambda: Rope(scaling=2.0), "Rope.scaling is 2.0"),
        (lambda: PartialRope(base=0.5), "PartialRope.base is 0.5"),
        (lambda: PartialRope(fraction=2), "PartialRope.fraction is 2"),
        (lambda: PI(0.5), "PI.factor is 0.5"),
        (lambda: PI(NAN), "PI.factor is nan"),
        (lambda: NTK(0.99), "NTK.factor is 0.99"),
        (lambda: Yarn(0.5, 1024), "Yarn.factor is 0.5"),
        (lambda: Yarn(math.inf, 1024), "Yarn.factor is inf"),
        (lambda: Yarn(2.0, 0), "Yarn.original_length is 0"),
        (lambda: Yarn(2.0, 1024.5), "Yarn.original_length is 1024.5"),
        (lambda: Yarn(2.0, 1024, beta_fast=1, beta_slow=1), "beta_fast > beta_slow"),
        (lambda: frequencies(Rope(), 63), "head_dim is 63"),
        (lambda: frequencies(NoPE(), 0), "head_dim is 0"),
        (lambda: frequencies("rope", 64), "'rope' is not a positional encoding"),
        (lambda: frequencies(Rope(scaling=NTK(2.0)), 2), "NTK needs at least 4 rotated channels"),
        (lambda: frequencies(PartialRope(fraction=0.01, scaling=NTK(2.0)), 256), "here there are 2"),
        (lambda: alibi_slopes(0), "num_heads is 0"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_descriptions_name_the_field(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


def test_yarn_does_not_guess_the_training_length():
    with pytest.raises(TypeError, match="original_length"):
        Yarn(factor=2.0)
