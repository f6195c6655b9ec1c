"""The rotation: angles right at every position, norms kept, scores that depend on distance alone."""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.config import UserError
from pe_lab.positional import (
    NTK,
    PI,
    PartialRope,
    Rope,
    Yarn,
    angles,
    apply_p_rope,
    apply_rope,
    frequencies,
    rotate,
    rotation_tables,
)
from pe_lab.positional.rotation import turns_per_position

BOUND = 5e-7  # radians; a float32 near pi is itself only good to 1.2e-7
LENGTHS = {"8k": 2**13, "128k": 2**17, "1M": 2**20, "4M": 2**22, "2G": 2**31}
PI_50 = Decimal("3.14159265358979323846264338327950288419716939937511")
jit_angles, jit_tables = jax.jit(angles), jax.jit(rotation_tables)
ONE_TURN = 1 << 120  # the reference counts in this fraction of a turn, in Python's own integers


def exact_turns(base, head_dim):
    """base^(-2r/K) / 2 pi for every pair, from 45 digits, as integers over ONE_TURN."""
    with localcontext() as context:
        context.prec = 45
        logarithm = Decimal(base).ln()
        exact = [(-logarithm * 2 * r / head_dim).exp() / (2 * PI_50) for r in range(head_dim // 2)]
        return [int(turn * ONE_TURN) for turn in exact]


def worst_error(computed, positions, exact):
    """The largest distance, around the circle, of angles [T, R] in radians from the exact ones."""
    worst = 0.0
    for row, position in zip(np.asarray(computed, np.float64), positions, strict=True):
        for angle, turn in zip(row, exact, strict=True):
            remainder = int(position) * turn % ONE_TURN
            difference = abs(float(angle) - remainder / ONE_TURN * 2 * math.pi) % (2 * math.pi)
            worst = max(worst, min(difference, 2 * math.pi - difference))
    return worst


def positions_below(length):
    drawn = np.random.default_rng(length).integers(length // 2, length, 40)
    return np.concatenate([[0, 1, length // 2, length - 2, length - 1], drawn]).astype(np.int32)


@pytest.mark.parametrize("base", [10_000, 5_000_000])
@pytest.mark.parametrize("name", LENGTHS)
def test_angles_are_right_at_every_position(name, base):
    positions, exact = positions_below(LENGTHS[name]), exact_turns(base, 64)
    inv_freq = frequencies(Rope(float(base)), 64)[0]
    ours = jit_angles(turns_per_position(inv_freq), positions[None])[0]
    assert ours.dtype == jnp.float32
    assert np.abs(ours).max() <= np.float32(math.pi)
    error = worst_error(ours, positions, exact)
    plain = worst_error(positions[:, None].astype(np.float32) * inv_freq.astype(np.float32), positions, exact)
    print(f"{name}, base {base}: {error:.2e} rad; float32 product {plain:.2e} rad")
    assert error < BOUND
    # The test can fail: the float32 product, which most code bases take, is far outside the bound.
    assert plain > 100 * BOUND


@pytest.mark.parametrize("length", [2**20, 2**31])
def test_tables_are_right_far_out(length):
    positions, exact = positions_below(length), exact_turns(10_000, 64)
    inv_freq, gain = frequencies(Rope(), 64)
    cos, sin = jit_tables(turns_per_position(inv_freq), gain.astype(np.float32), positions[None])
    true = np.array([[int(p) * t % ONE_TURN / ONE_TURN * 2 * math.pi for t in exact] for p in positions])
    np.testing.assert_allclose(cos[0], np.cos(true), rtol=0, atol=BOUND)
    np.testing.assert_allclose(sin[0], np.sin(true), rtol=0, atol=BOUND)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 2 * math.pi, exclude_max=True), min_size=3, max_size=3),
    st.integers(0, 2**31 - 1),
)
def test_turns_hold_the_whole_float64(values, position):
    """Reassembled, the two words are inv_freq / 2 pi to 2^-64 of a turn."""
    turns = turns_per_position(np.array(values))
    assert turns.dtype == np.uint32 and turns.shape == (len(values), 2)
    for value, (high, low) in zip(values, turns.astype(object), strict=True):
        whole = high * 2**32 + low
        numerator, denominator = (value / (2 * math.pi)).as_integer_ratio()
        assert whole == numerator * 2**64 // denominator
    # And the wrapped 32-bit arithmetic on the device is the exact product, cut to 32 bits of a turn.
    computed = np.asarray(jit_angles(turns, np.full((1, 1), position, np.int32)))[0, 0]
    for angle, (high, low) in zip(computed, turns.astype(object), strict=True):
        fraction = position * (high * 2**32 + low) % 2**64 >> 32
        signed = fraction - 2**32 if fraction >= 2**31 else fraction
        assert angle == pytest.approx(signed / 2**32 * 2 * math.pi, rel=2e-7, abs=1e-30)


@pytest.mark.parametrize("bad", [-1e-9, 2 * math.pi, math.nan, math.inf])
def test_a_frequency_outside_one_turn_is_refused(bad):
    with pytest.raises(UserError, match="inv_freq has"):
        turns_per_position(np.array([0.5, bad]))


def test_tables_follow_the_shapes_of_frequencies_and_positions():
    inv_freq = np.linspace(0, 1, 3 * 2 * 4).reshape(3, 2, 4)
    gain = np.linspace(1, 2, 24, dtype=np.float32).reshape(3, 2, 4)
    positions = np.array([[0, 5, 9, 100, 1], [7, 7, 2, 0, 3]])
    cos, sin = jit_tables(turns_per_position(inv_freq), gain, positions)
    angle = positions[:, :, None, None, None] * inv_freq
    assert cos.shape == (2, 5, 3, 2, 4)
    np.testing.assert_allclose(cos, np.cos(angle) * gain, atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angle) * gain, atol=2e-6)


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 3, 32)), jnp.float32)


POSITIONS = jnp.asarray([[0, 1, 2, 500, 131072, 2**31 - 1], [9, 8, 7, 6, 5, 1 << 20]], jnp.int32)


def rotated(x, encoding):
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    cos, sin = jit_tables(turns_per_position(inv_freq), gain.astype(np.float32), POSITIONS)
    return inv_freq, rotate(x, cos[:, :, None], sin[:, :, None])


def test_p_rope_of_one_is_rope_bit_for_bit(x):
    assert same_bits(apply_p_rope(x, POSITIONS, 32, rope_percentage=1.0), apply_rope(x, POSITIONS))
    assert not same_bits(apply_rope(x, POSITIONS), x)


def test_p_rope_of_zero_is_the_identity_bit_for_bit(x):
    assert same_bits(apply_p_rope(x, POSITIONS, 32, rope_percentage=0.0), x)


@pytest.mark.parametrize("encoding", [Rope(fraction=0.25), PartialRope(fraction=0.25)], ids=repr)
def test_a_pair_of_frequency_zero_is_left_alone_bit_for_bit(x, encoding):
    inv_freq, turned = rotated(x, encoding)
    still = np.flatnonzero(np.tile(inv_freq == 0, 2))
    assert len(still) == 24
    assert same_bits(turned[..., still], x[..., still])
    moving = np.flatnonzero(np.tile(inv_freq != 0, 2))
    assert (np.asarray(turned[0, 3:])[..., moving] != np.asarray(x[0, 3:])[..., moving]).all()


def test_position_zero_is_the_identity_bit_for_bit(x):
    assert same_bits(apply_rope(x, jnp.zeros((2, 6), jnp.int32)), x)


def test_apply_rope_interpolates_positions(x):
    near = POSITIONS % 1024
    interpolated = apply_rope(x, 4 * near, scale_factor=4.0)
    np.testing.assert_allclose(interpolated, apply_rope(x, near), rtol=0, atol=5e-6)


def test_the_rotation_keeps_the_norm_of_every_pair(x):
    def pair_norms(array):
        first, second = np.split(np.asarray(array, np.float64), 2, axis=-1)
        return np.hypot(first, second)

    np.testing.assert_allclose(pair_norms(apply_rope(x, POSITIONS)), pair_norms(x), rtol=1e-6)


def test_yarns_gain_multiplies_cos_and_sin_and_so_every_norm(x):
    _, turned = rotated(x, Rope(scaling=Yarn(8.0, 1024)))
    norm, before = (np.linalg.norm(np.asarray(a, np.float64), axis=-1) for a in (turned, x))
    np.testing.assert_allclose(norm, before * (0.1 * math.log(8) + 1), rtol=1e-6)


ENCODINGS = [
    Rope(),
    Rope(1e6, scaling=PI(4.0)),
    Rope(scaling=NTK(8.0)),
    Rope(scaling=Yarn(2.0, 2048)),
    Rope(fraction=0.5),
    PartialRope(),
]


@jax.jit
def scores(turns, gain, query, key, at):
    """The logits of one query and one key at two pairs of positions `at` [2, 2]."""
    cos, sin = rotation_tables(turns, gain, at)
    turned = rotate(jnp.stack([query, key])[None].repeat(2, 0)[:, :, None], cos[:, :, None], sin[:, :, None])
    return jnp.einsum("bhk,bhk->b", turned[:, 0], turned[:, 1])


@settings(max_examples=60, deadline=None)
@given(
    encoding=st.sampled_from(ENCODINGS),
    i=st.integers(0, 2**20),
    j=st.integers(0, 2**20),
    shift=st.one_of(st.integers(1, 1000), st.integers(2**20, 2**31 - 2**20 - 1)),
    seed=st.integers(0, 9),
)
def test_scores_depend_on_the_distance_alone(encoding, i, j, shift, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    inv_freq, gain = frequencies(encoding, 64)
    at = np.array([[i, j], [i + shift, j + shift]], np.int32)
    here, there = scores(turns_per_position(inv_freq), gain.astype(np.float32), query, key, at)
    assert abs(here - there) < 3e-6 * np.linalg.norm(query) * np.linalg.norm(key)


def test_scores_do_depend_on_the_distance():
    query, key = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    inv_freq, gain = frequencies(Rope(), 64)
    at = np.array([[100, 50], [101, 50]], np.int32)
    here, there = scores(turns_per_position(inv_freq), gain.astype(np.float32), query, key, at)
    assert abs(here - there) > 0.5


def test_bfloat16_stays_bfloat16_and_loses_one_rounding_only():
    generator = np.random.default_rng(2)
    x = jnp.asarray(generator.standard_normal((1, 3, 2, 64)), jnp.bfloat16)
    positions = np.array([131072, 131073, 131199])
    turned = apply_rope(x, jnp.asarray(positions)[None])
    assert turned.dtype == jnp.bfloat16
    angle = (positions[:, None] * frequencies(Rope(), 64)[0])[:, None]  # float64: good to 1e-11 here

    def rotated(angle):
        first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    true = rotated(angle)
    bound = 2.0**-8 * np.abs(true) + 2e-6  # half a unit in the last of 8 bits, and float32's own error
    assert (np.abs(np.asarray(turned, np.float64) - true) <= bound).all()
    # Counting the position in bfloat16 (131073 becomes 131072) breaks the bound.
    counted = np.asarray(jnp.asarray(positions, jnp.bfloat16), np.float64)
    coarse = rotated((counted[:, None] * frequencies(Rope(), 64)[0])[:, None])
    assert (np.abs(coarse - true) > bound).mean() > 0.3


def test_apply_p_rope_refuses_another_head_dim(x):
    with pytest.raises(UserError, match="head_dim is 64, but the inputs have 32 channels"):
        apply_p_rope(x, POSITIONS, 64)


@pytest.mark.parametrize("percentage", [-0.1, 1.5])
def test_apply_p_rope_refuses_a_percentage_outside_zero_and_one(x, percentage):
    with pytest.raises(UserError, match="fraction is"):
        apply_p_rope(x, POSITIONS, 32, rope_percentage=percentage)


def test_apply_rope_refuses_odd_heads_and_factors_below_one(x):
    with pytest.raises(UserError, match="head_dim is 31"):
        apply_rope(x[..., :31], POSITIONS)
    with pytest.raises(UserError, match="PI.factor is 0.5"):
        apply_rope(x, POSITIONS, scale_factor=0.5)
