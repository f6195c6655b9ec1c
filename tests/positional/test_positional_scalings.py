"""Ways of stretching frequencies: check values, identities, and what a wrong implementation would get away with."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYarn,
    Llama3,
    LongRope,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    frequencies,
)
from pe_lab.positional.notebook import NotebookNTK
from pe_lab.positional.scalings import SCALINGS

L = 1024
ONES = (1.0,) * 32  # a LongRoPE table for 64 channels
SHORT, LONG = tuple(np.linspace(1, 2, 32)), tuple(np.linspace(2, 40, 32))


def ratio(scaling, head_dim=64, base=1e4, length=None):
    """New frequency over old, per pair."""
    return frequencies(Rope(base, scaling=scaling), head_dim, length)[0] / frequencies(Rope(base), head_dim)[0]


def gain(scaling, length=None):
    """The factor on cos and sin, which all pairs share."""
    (factor,) = set(frequencies(Rope(scaling=scaling), 64, length)[1])
    return factor


def name(value):
    """Of a parametrized test: a LongRoPE's tables fill a screen."""
    return type(value).__name__ if type(value) in SCALINGS.values() else None


def same(a, b):
    """Frequencies and gains are equal to the bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


STATIC = [
    PI(4.0),
    NTK(4.0),
    NTKByParts(4.0, L),
    Yarn(4.0, L),
    Yarn(4.0, L, truncate=False, mscale=0.7, mscale_all_dim=1.0),
    Llama3(original_length=L),
    NotebookNTK(4.0),
]
DYNAMIC = [
    DynamicNTK(L),
    DynamicNTK(L, 2.0),
    DynamicYarn(L),
    DynamicYarn(L, beta_fast=16.0, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    LongRope(ONES, LONG, L, 1.0),
]


def test_every_scheme_is_here_and_says_whether_it_reads_the_length():
    assert {type(s) for s in STATIC + DYNAMIC} == set(SCALINGS.values())
    assert not any(Rope(scaling=s).follows_length for s in STATIC)
    assert all(kind(scaling=s).follows_length for s in DYNAMIC for kind in (Rope, PartialRope))
    assert not Rope().follows_length


# The lengths that models are asked for: below training, at it, just above, far above.
LENGTHS = [1, L // 2, L, L + 1, 2 * L, 100 * L]


@pytest.mark.parametrize("scaling", STATIC, ids=name)
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_static_schemes_do_not_read_the_length(scaling, base):
    encoding = Rope(base, scaling=scaling)
    assert not same(frequencies(encoding, 64), frequencies(Rope(base), 64))
    for length in LENGTHS:
        assert same(frequencies(encoding, 64, length), frequencies(encoding, 64))


def test_yarn_at_its_training_length_is_still_yarn():
    """YaRN applies at every length: code that compares the length of a sequence or a cache with L disables it."""
    encoding = Rope(1e6, scaling=Yarn(2.0, L))
    at_training = frequencies(encoding, 64, length=L)
    assert same(at_training, frequencies(encoding, 64)) and same(at_training, frequencies(encoding, 64, length=2 * L))
    rope = frequencies(Rope(1e6), 64)
    assert (at_training[0][12:] == rope[0][12:] / 2).all()
    assert (at_training[1] > 1.06).all()


@pytest.mark.parametrize("scaling", DYNAMIC, ids=name)
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_dynamic_schemes_are_rope_up_to_the_training_length_and_not_beyond(scaling, base):
    scaled, rope = Rope(base, scaling=scaling), frequencies(Rope(base), 64)
    for length in (None, 1, L // 2, L - 1, L):
        inv_freq, gains = frequencies(scaled, 64, length)
        np.testing.assert_array_equal(inv_freq, rope[0], err_msg=f"{length} tokens")
        np.testing.assert_array_equal(gains, 1.0)
    for length in (L + 1, 2 * L):
        assert not np.array_equal(frequencies(scaled, 64, length)[0], rope[0]), length


@pytest.mark.parametrize("scaling", [s for s in DYNAMIC if not isinstance(s, LongRope)], ids=name)
def test_what_follows_the_length_is_no_constant(scaling):
    """The field's "dynamic" NTK is often one fixed stretch: each of these lengths has its own."""
    slowest = [frequencies(Rope(scaling=scaling), 64, n)[0][-1] for n in (L, L + 1, 2 * L, 3 * L, 16 * L)]
    assert (np.diff(slowest) < 0).all()
    assert slowest[-1] < slowest[2] / 4


IDENTITIES = [
    PI(1.0),
    NTK(1.0),
    Yarn(1.0, 2048),
    Yarn(1.0, 2048, mscale=0.7, mscale_all_dim=1.0),
    NTKByParts(1.0, 2048),
    Llama3(factor=1.0),
    LongRope(ONES, ONES, L, 1.0),
    NotebookNTK(1.0),
    DynamicNTK(1 << 20),
    DynamicYarn(1 << 20),
]


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("scaling", IDENTITIES, ids=name)
@pytest.mark.parametrize("kind", [Rope, PartialRope])
def test_a_factor_of_one_changes_nothing(kind, scaling, base):
    if isinstance(scaling, LongRope) and kind is PartialRope:
        scaling = dataclasses.replace(scaling, short_factor=ONES[:16], long_factor=ONES[:16])
    plain, scaled = (frequencies(kind(base, 0.5, s), 64, 4 * L) for s in (None, scaling))
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-15, atol=0)
    np.testing.assert_array_equal(scaled[1], np.ones(32))


# PI and NTK.


@settings(max_examples=40)
@given(factor=st.floats(1, 1e6), base=st.floats(2, 1e8), head_dim=st.sampled_from([2, 64, 96, 128]))
def test_interpolation_divides_every_frequency(factor, base, head_dim):
    np.testing.assert_allclose(ratio(PI(factor), head_dim, base), 1 / factor, rtol=1e-14)
    assert gain(PI(factor)) == 1


def test_ntk_check_values():
    change = ratio(NTK(2.0))
    np.testing.assert_allclose(change[[1, 15, 30, 31]], [0.9779, 0.7151, 0.5113, 0.5], atol=5e-5)
    assert gain(NTK(2.0)) == 1


@settings(max_examples=60)
@given(factor=st.floats(1, 1e3), head_dim=st.sampled_from([4, 64, 96, 128]), base=st.floats(2, 1e8))
def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor(factor, head_dim, base):
    change = ratio(NTK(factor), head_dim, base)
    assert change[0] == 1
    assert change[-1] == pytest.approx(1 / factor, rel=1e-9)
    assert (np.diff(change) <= 1e-12).all()


@settings(max_examples=60)
@given(factor=st.floats(1, 1e3), head_dim=st.sampled_from([4, 64, 96, 128]), base=st.floats(2, 1e6))
def test_ntk_is_rope_of_a_larger_base(factor, head_dim, base):
    larger = base * factor ** (head_dim / (head_dim - 2))
    scaled = frequencies(Rope(base, scaling=NTK(factor)), head_dim)[0]
    np.testing.assert_allclose(scaled, frequencies(Rope(larger), head_dim)[0], rtol=1e-12)


def test_the_notebooks_ntk_speeds_slow_pairs_up_where_ntk_slows_them_down():
    theirs, real = ratio(NotebookNTK(8.0)), ratio(NTK(8.0))
    np.testing.assert_allclose(theirs, 8.0 ** (np.arange(32) / 32), rtol=1e-12)
    assert theirs[0] == real[0] == 1
    assert (np.diff(theirs) > 0).all() and theirs[-1] > 7
    assert (np.diff(real) < 0).all() and real[-1] == pytest.approx(1 / 8)
    assert gain(NotebookNTK(8.0)) == 1


# Dynamic NTK.


def base_in_use(scaling, length, head_dim=64, base=1e4):
    """The base that the frequencies have: w_1 = base^(-2/d)."""
    return frequencies(Rope(base, scaling=scaling), head_dim, length)[0][1] ** (-head_dim / 2)


def test_dynamic_ntk_check_values():
    """1e4 g^(64/62), for growths g of 1, 2, 3 and 7 by hand: g = f n / L - (f - 1)."""
    bases = {
        (1.0, None): 10000.0,
        (1.0, L // 2): 10000.0,
        (1.0, L): 10000.0,
        (1.0, 2 * L): 20452.2287,
        (2.0, L): 10000.0,
        (2.0, 2 * L): 31082.2367,
        (2.0, 4 * L): 74534.8303,
        (1.0, 7 * L): 74534.8303,
    }
    for (factor, length), base in bases.items():
        assert base_in_use(DynamicNTK(L, factor), length) == pytest.approx(base, rel=1e-8), (factor, length)


@pytest.mark.parametrize(
    "length, alpha, growth", [(65536, 8.0, 57.0), (24756, 24756 / 8192, 7.1103), (16384, 2.0, 3.0)]
)
def test_dynamic_ntk_at_its_target_is_sglangs_table(length, alpha, growth):
    """SGLang 0.5.3, which DoPE used, makes one table: base (alpha^2 - alpha + 1)^(d / (d - 2)); by hand."""
    dynamic = frequencies(Rope(5e5, scaling=DynamicNTK(8192, alpha)), 128, length)[0]
    np.testing.assert_allclose(dynamic, frequencies(Rope(5e5, scaling=NTK(growth)), 128)[0], rtol=1e-4)
    factor_one = frequencies(Rope(5e5, scaling=DynamicNTK(8192)), 128, length)[0]
    assert (factor_one[1:] > 1.001 * dynamic[1:]).all()


@settings(max_examples=80)
@given(
    length=st.integers(1, 1 << 24),
    training=st.integers(1, 1 << 20),
    factor=st.one_of(st.sampled_from([1.0, 2.0]), st.floats(1, 64)),
    base=st.floats(2, 1e7),
    head_dim=st.sampled_from([4, 64, 80, 128]),
)
def test_dynamic_ntk_follows_its_formula_below_at_and_above_the_training_length(
    length, training, factor, base, head_dim
):
    n = max(length, training)
    enlarged = base * (factor * n / training - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq, gains = frequencies(Rope(base, scaling=DynamicNTK(training, factor)), head_dim, length)
    np.testing.assert_allclose(inv_freq, enlarged ** (-2 * np.arange(head_dim // 2) / head_dim), rtol=1e-9)
    assert (gains == 1).all()


@settings(max_examples=60)
@given(length=st.integers(1, 1 << 24), training=st.integers(1, 1 << 20), base=st.floats(2, 1e7))
def test_dynamic_ntk_of_factor_one_is_ntk_to_the_bit(length, training, base):
    dynamic = frequencies(Rope(base, scaling=DynamicNTK(training)), 64, length)
    assert same(dynamic, frequencies(Rope(base, scaling=NTK(max(1.0, length / training))), 64))


def test_a_larger_factor_stretches_faster():
    slowest = [frequencies(Rope(scaling=DynamicNTK(L, f)), 64, 4 * L)[0][-1] for f in (1.0, 2.0, 4.0)]
    np.testing.assert_allclose(slowest[0] / np.array(slowest), [1, 7 / 4, 13 / 4], rtol=1e-9)


# YaRN, its frequencies without its factor, its factor with the text.


def test_yarn_check_values():
    yarn = Yarn(factor=2.0, original_length=2048)
    change = ratio(yarn)
    np.testing.assert_array_equal(change[:9], 1)
    np.testing.assert_allclose(change[[9, 10, 20]], [0.9615, 0.9231, 0.5385], atol=5e-5)
    np.testing.assert_allclose(change[21:], 0.5, rtol=1e-12)
    assert gain(yarn) == pytest.approx(1.069315, abs=5e-7)


RAW_BOUNDS = [
    (64, 1e4, 2048, (8.064, 20.105)),
    (64, 1e6, 1024, (3.7705, 11.798)),
    (128, 1e4, 4096, (20.944, 45.027)),
]


@pytest.mark.parametrize(("head_dim", "base", "length", "raw"), RAW_BOUNDS)
def test_yarn_ramp_is_rounded_outwards(head_dim, base, length, raw):
    bounds = Yarn(factor=2.0, original_length=length).ramp_bounds(base, head_dim)
    assert bounds == (math.floor(raw[0]), math.ceil(raw[1]))


@pytest.mark.parametrize(("head_dim", "base", "length", "raw"), RAW_BOUNDS)
def test_yarn_ramp_without_rounding(head_dim, base, length, raw):
    yarn = Yarn(factor=2.0, original_length=length, truncate=False)
    low, high = yarn.ramp_bounds(base, head_dim)
    np.testing.assert_allclose((low, high), raw, atol=5e-4 if raw[0] > 4 else 5e-5)
    # The pairs at the bounds make 32 rotations and one within the training length.
    fixed_freq = [length / (2 * math.pi) * base ** (-2 * i / head_dim) for i in (low, high)]
    np.testing.assert_allclose(fixed_freq, [32, 1], rtol=1e-9)
    # And the ramp runs between them, not between rounded ones.
    slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(ratio(yarn, head_dim, base), 1 - slow / 2, rtol=1e-12)
    rounded = ratio(dataclasses.replace(yarn, truncate=True), head_dim, base)
    assert np.abs(rounded - ratio(yarn, head_dim, base)).max() > 0.005


def test_yarn_ramp_bounds_stay_apart_and_inside():
    assert Yarn(factor=2.0, original_length=6).ramp_bounds(1e4, 64) == (0, 0.001)
    assert Yarn(factor=2.0, original_length=1000).ramp_bounds(10.0, 64)[1] == 63


def test_a_ramp_over_frequencies_is_position_interpolation_and_ours_is_not():
    """DroPE's eq. 11 has kappa_m = 0 where omega_m < p = 1, and no frequency is above 1."""
    inv_freq = frequencies(Rope(), 64)[0]
    kept = np.clip((inv_freq - 1) / (32 - 1), 0, 1)
    literal = (1 - kept) * inv_freq / 2 + kept * inv_freq
    interpolated = frequencies(Rope(scaling=PI(2.0)), 64)[0]
    np.testing.assert_array_equal(literal, interpolated)
    ours = frequencies(Rope(scaling=Yarn(2.0, 2048)), 64)[0]
    assert (ours[:9] == 2 * interpolated[:9]).all()
    assert (ours[:21] > 1.05 * interpolated[:21]).all()


@settings(max_examples=60)
@given(factor=st.floats(1, 1e3), base=st.floats(1e2, 1e8), length=st.integers(64, 1 << 20))
def test_yarn_lies_between_rope_and_interpolation(factor, base, length):
    encoding = Rope(base, scaling=Yarn(factor, length))
    inv_freq, gains = frequencies(encoding, 64)
    rope = frequencies(Rope(base), 64)[0]
    assert (inv_freq <= rope * (1 + 1e-12)).all()
    assert (inv_freq >= rope / factor * (1 - 1e-12)).all()
    assert (np.diff(inv_freq / rope) <= 1e-12).all()
    np.testing.assert_allclose(gains, 0.1 * math.log(factor) + 1, rtol=1e-12)


@settings(max_examples=60)
@given(
    factor=st.floats(1, 1e3),
    base=st.floats(1e4, 1e8),
    length=st.integers(64, 1 << 20),
    fast=st.floats(4, 64),
    slow=st.floats(0.5, 3),
    truncate=st.booleans(),
)
def test_ntk_by_parts_is_yarn_without_its_attention_factor(factor, base, length, fast, slow, truncate):
    parts = frequencies(Rope(base, scaling=NTKByParts(factor, length, fast, slow, truncate)), 64)
    yarn = frequencies(Rope(base, scaling=Yarn(factor, length, fast, slow, truncate=truncate)), 64)
    np.testing.assert_array_equal(parts[0], yarn[0])
    np.testing.assert_array_equal(parts[1], 1)


@settings(max_examples=60)
@given(
    length=st.integers(1, 1 << 24),
    training=st.integers(64, 1 << 20),
    base=st.floats(1e2, 1e8),
    mscales=st.sampled_from([(0.0, 0.0), (0.707, 1.0), (1.0, 1.0)]),
    truncate=st.booleans(),
)
def test_dynamic_yarn_is_yarn_by_how_much_longer_the_text_is(length, training, base, mscales, truncate):
    rest = {"mscale": mscales[0], "mscale_all_dim": mscales[1], "truncate": truncate}
    dynamic = frequencies(Rope(base, scaling=DynamicYarn(training, **rest)), 64, length)
    static = frequencies(Rope(base, scaling=Yarn(max(1.0, length / training), training, **rest)), 64)
    assert same(dynamic, static)


def test_dynamic_yarns_gain_grows_with_the_logarithm_of_the_text():
    gains = [gain(DynamicYarn(L), n) for n in (None, L, 2 * L, 8 * L)]
    np.testing.assert_allclose(gains, [1, 1, 1.069315, 1.207944], atol=5e-7)


def test_deepseeks_two_mscales():
    """DeepSeek-V2 asks for 0.707 and 0.707, and so for no gain; (1 + .0707 ln 40) / (1 + .1 ln 40) is by hand."""
    assert gain(Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)) == 1
    assert gain(Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0)) == pytest.approx(0.921042, abs=5e-7)
    assert gain(Yarn(40.0, 4096)) == pytest.approx(1.368888, abs=5e-7)
    assert gain(Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0, attention_factor=1.5)) == 1.5
    assert gain(Yarn(1.0, 4096, attention_factor=1.5)) == 1.5
    assert gain(DynamicYarn(L, mscale=0.707, mscale_all_dim=1.0), 40 * L) == pytest.approx(0.921042, abs=5e-7)


# Llama 3.


def test_llama3_check_values():
    """Published: 8, 1, 4, 8192 at base 500000 and 128 channels. Pair i's wavelength is 2 pi 500000^(i / 64)."""
    change = ratio(Llama3(), 128, 5e5)
    wavelength = 2 * math.pi * 5e5 ** (np.arange(64) / 64)
    assert wavelength[28] < 8192 / 4 < wavelength[29] and wavelength[34] < 8192 < wavelength[35]
    np.testing.assert_array_equal(change[:29], 1)
    np.testing.assert_allclose(change[35:], 1 / 8, rtol=1e-12)
    # Pair 32: 2 pi sqrt(500000) = 4442.88 tokens, 1.84384 rotations, (1.84384 - 1) / 3 = .28128 of it kept.
    assert change[32] == pytest.approx(0.71872 / 8 + 0.28128, abs=5e-5)
    assert (np.diff(change[28:36]) < 0).all()
    assert gain(Llama3()) == 1


@settings(max_examples=80)
@given(
    factor=st.floats(1, 100),
    low=st.floats(0.25, 4),
    width=st.floats(0.1, 8),
    training=st.integers(16, 1 << 18),
    base=st.floats(10, 1e8),
    head_dim=st.sampled_from([16, 64, 128]),
)
def test_llama3_is_its_three_cases_by_wavelength(factor, low, width, training, base, head_dim):
    high = low + width

    def one(frequency):
        wavelength = 2 * math.pi / frequency
        if wavelength > training / low:
            return frequency / factor
        if wavelength < training / high:
            return frequency
        kept = (training / wavelength - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    expected = [one(w) for w in frequencies(Rope(base), head_dim)[0]]
    ours = frequencies(Rope(base, scaling=Llama3(factor, low, high, training)), head_dim)[0]
    # The ramp meets both ends, so that an ulp at a threshold does not matter.
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


# LongRoPE.


def test_longrope_reads_the_long_table_for_texts_beyond_training_and_the_short_one_else():
    scaling = LongRope(SHORT, LONG, L, 8.0)
    for length, table in [(None, SHORT), (1, SHORT), (L, SHORT), (L + 1, LONG), (8 * L, LONG), (100 * L, LONG)]:
        np.testing.assert_allclose(ratio(scaling, length=length), 1 / np.array(table), rtol=1e-12)


def test_longropes_gain_is_the_same_at_every_length():
    """Phi-3's factor is 131072 / 4096 = 32: sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5 / 12)."""
    scaling = LongRope(SHORT, LONG, 4096, 32.0)
    assert {gain(scaling, n) for n in (None, 1, 4096, 4097, 131072)} == {gain(scaling)}
    assert gain(scaling) == pytest.approx(math.sqrt(17 / 12), rel=1e-12)
    assert gain(dataclasses.replace(scaling, attention_factor=1.25), 131072) == 1.25
    assert gain(dataclasses.replace(scaling, factor=1.0)) == 1


@pytest.mark.usefixtures("as_users_run_it")
def test_longrope_reads_lists_as_json_has_them():
    assert LongRope(list(SHORT), list(LONG), L, 2.0) == LongRope(SHORT, LONG, L, 2.0)
    assert len({LongRope(list(SHORT), list(LONG), L, 2.0), LongRope(SHORT, LONG, L, 2.0)}) == 1


# What all have in common.


@pytest.mark.parametrize("scaling", STATIC + DYNAMIC[:-1], ids=name)
def test_partial_rope_is_scaled_as_a_head_of_the_rotated_width(scaling):
    """Whose ramp, base exponent and pair count are those of 16 channels, not of the head's 64."""
    partial = frequencies(PartialRope(1e4, 0.25, scaling), 64, 4 * L)
    narrow = frequencies(Rope(1e4, scaling=scaling), 16, 4 * L)
    np.testing.assert_array_equal(partial[0][:8], narrow[0])
    np.testing.assert_array_equal(partial[1][:8], narrow[1])
    assert (partial[0][8:] == 0).all() and (partial[1][8:] == 1).all()


@pytest.mark.parametrize("scaling", STATIC + DYNAMIC, ids=name)
def test_p_rope_is_scaled_as_the_full_spectrum_and_then_cut(scaling):
    full, kept = (frequencies(Rope(1e4, fraction, scaling), 64, 4 * L) for fraction in (1.0, 0.25))
    np.testing.assert_array_equal(kept[0][:8], full[0][:8])
    assert (kept[0][8:] == 0).all()
    np.testing.assert_array_equal(kept[1], full[1])


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PI(0.5), "PI.factor is 0.5; it must be at least 1"),
        (lambda: PI(NAN), "PI.factor is nan"),
        (lambda: NTK(0.99), "NTK.factor is 0.99"),
        (lambda: NotebookNTK(0.0), "NotebookNTK.factor is 0.0"),
        (lambda: DynamicNTK(L, 0.5), "DynamicNTK.factor is 0.5"),
        (lambda: DynamicNTK(0), "DynamicNTK.original_length is 0; give the training length"),
        (lambda: DynamicNTK(-1), "DynamicNTK.original_length is -1"),
        (lambda: DynamicYarn(0), "DynamicYarn.original_length is 0"),
        (lambda: DynamicYarn(L, 1.0, 32.0), "DynamicYarn needs beta_fast > beta_slow >= 1e-6, and has 1.0 and 32.0"),
        (lambda: DynamicYarn(L, mscale=1.0), "DynamicYarn.mscale is 1.0 and mscale_all_dim 0.0; give both, or neither"),
        (lambda: Yarn(0.5, 1024), "Yarn.factor is 0.5"),
        (lambda: Yarn(math.inf, 1024), "Yarn.factor is inf"),
        (lambda: Yarn(2.0, 0), "Yarn.original_length is 0"),
        (lambda: Yarn(2.0, 1024.5), "Yarn.original_length is 1024.5"),
        (lambda: Yarn(2.0, 1024, beta_fast=1, beta_slow=1), "beta_fast > beta_slow"),
        (lambda: Yarn(2.0, 1024, beta_slow=0), "beta_slow >= 1e-6"),
        (lambda: Yarn(2.0, 1024, beta_fast=math.inf), "beta_fast is inf; it must be a number"),
        (lambda: Yarn(2.0, 1024, mscale=1.0), "Yarn.mscale is 1.0 and mscale_all_dim 0.0; give both, or neither"),
        (lambda: Yarn(2.0, 1024, mscale_all_dim=1.0), "mscale_all_dim 1.0; give both, or neither"),
        (lambda: Yarn(2.0, 1024, mscale=-1.0, mscale_all_dim=1.0), "finite and not negative"),
        (lambda: Yarn(2.0, 1024, mscale=NAN, mscale_all_dim=1.0), "Yarn.mscale is nan; it must be a number"),
        (lambda: Yarn(2.0, 1024, attention_factor=0.0), "Yarn.attention_factor is 0.0; it must lie in [1e-6, 1e6]"),
        (lambda: Yarn(2.0, 1024, attention_factor=math.inf), "Yarn.attention_factor is inf"),
        (lambda: Yarn(1e308, 1024), "Yarn.factor is 1e+308; it must be at least 1, and below 2^31"),
        (lambda: PI(1e32), "PI.factor is 1e+32; it must be at least 1, and 1e31 at most"),
        (lambda: Rope(base=1e308), "Rope.base is 1e+308; it must be above 1, and 1e18 at most"),
        (
            lambda: Llama3(high_freq_factor=1e25),
            "Llama3.high_freq_factor is 1e+25; it must be a number of at most 4,294",
        ),
        (lambda: NTKByParts(0.5, 1024), "NTKByParts.factor is 0.5"),
        (lambda: NTKByParts(2.0, 0), "NTKByParts.original_length is 0"),
        (lambda: NTKByParts(2.0, 1024, 1.0, 2.0), "NTKByParts needs beta_fast > beta_slow"),
        (lambda: Llama3(0.5), "Llama3.factor is 0.5"),
        (lambda: Llama3(8.0, 4.0, 4.0), "Llama3 needs high_freq_factor > low_freq_factor >= 1e-6, and has 4.0 and 4.0"),
        (lambda: Llama3(8.0, 0.0, 4.0), "and has 4.0 and 0.0"),
        (lambda: Llama3(original_length=0), "Llama3.original_length is 0"),
        (lambda: LongRope(SHORT, LONG, L, 0.5), "LongRope.factor is 0.5"),
        (lambda: LongRope(SHORT, LONG, 0, 2.0), "LongRope.original_length is 0"),
        (lambda: LongRope(SHORT, LONG, 1, 2.0), "LongRope.original_length is 1"),
        (lambda: LongRope(SHORT, LONG, L, 2.0, -1.0), "LongRope.attention_factor is -1.0"),
        (lambda: LongRope((1.0, 0.0), LONG, L, 2.0), "LongRope.short_factor holds [0.0]"),
        (lambda: LongRope(SHORT, (1.0, NAN), L, 2.0), "LongRope.long_factor holds [nan]"),
        (
            lambda: frequencies(Rope(scaling=LongRope(SHORT[:16], LONG, L, 2.0)), 64),
            "LongRope.short_factor has 16 numbers; 64 rotated channels need 32",
        ),
        # The table that is not read at this length is as wrong.
        (
            lambda: frequencies(Rope(scaling=LongRope(SHORT, (*LONG, 1.0), L, 2.0)), 64, 1),
            "LongRope.long_factor has 33 numbers; 64 rotated channels need 32",
        ),
        (
            lambda: frequencies(PartialRope(fraction=0.25, scaling=LongRope(SHORT, LONG, L, 2.0)), 64),
            "32 numbers; 16 rotated channels need 8",
        ),
        (lambda: frequencies(Rope(scaling=NTK(2.0)), 2), "NTK needs at least 4 rotated channels"),
        (lambda: frequencies(Rope(scaling=DynamicNTK(L)), 2, 2 * L), "DynamicNTK needs at least 4 rotated channels"),
        (lambda: frequencies(PartialRope(fraction=0.01, scaling=NTK(2.0)), 256), "and there are 2"),
        (lambda: frequencies(Rope(scaling=Yarn(2.0, 2)), 64), "nothing to interpolate. Check original_length"),
        (lambda: frequencies(Rope(scaling=DynamicYarn(L)), 64, 0), "length is 0"),
        (lambda: frequencies(Rope(scaling=DynamicYarn(L)), 64, -5), "length is -5"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_scalings_name_the_field(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


@pytest.mark.parametrize("kind", [Yarn, NTKByParts])
def test_yarn_does_not_guess_the_training_length(kind):
    with pytest.raises(TypeError, match="original_length"):
        kind(factor=2.0)
