"""The rotation: angles right at every position, norms kept, scores that depend on distance alone."""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
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
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    angles,
    apply_p_rope,
    apply_rope,
    build_schedule,
    frequencies,
    rotate,
    rotation_tables,
)
from pe_lab.positional.notebook import NotebookNTK
from pe_lab.positional.rotation import fixed_point_frequencies
from pe_lab.positional.scalings import SCALINGS

BOUND = 5e-7  # radians; a float32 near pi is itself only good to 1.2e-7
LENGTHS = {"8k": 2**13, "128k": 2**17, "1M": 2**20, "4M": 2**22, "2G": 2**31}
PI_50 = Decimal("3.14159265358979323846264338327950288419716939937511")
jit_angles, jit_tables = jax.jit(angles), jax.jit(rotation_tables)
FULL_ROTATION = 1 << 120  # the reference counts in this fraction of a full rotation, in Python's own integers


def exact_turns(base, head_dim):
    """base^(-2r/K) / 2 pi for every pair, from 45 digits, as integers over FULL_ROTATION."""
    with localcontext() as context:
        context.prec = 45
        logarithm = Decimal(base).ln()
        exact = [(-logarithm * 2 * r / head_dim).exp() / (2 * PI_50) for r in range(head_dim // 2)]
        return [int(fraction * FULL_ROTATION) for fraction in exact]


def worst_error(computed, positions, exact):
    """The largest distance, around the circle, of angles [T, R] in radians from the exact ones."""
    worst = 0.0
    for row, position in zip(np.asarray(computed, np.float64), positions, strict=True):
        for angle, fraction in zip(row, exact, strict=True):
            remainder = int(position) * fraction % FULL_ROTATION
            difference = abs(float(angle) - remainder / FULL_ROTATION * 2 * math.pi) % (2 * math.pi)
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
    ours = jit_angles(fixed_point_frequencies(inv_freq), positions[None])[0]
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
    cos, sin = jit_tables(fixed_point_frequencies(inv_freq), gain.astype(np.float32), positions[None])
    true = np.array([[int(p) * t % FULL_ROTATION / FULL_ROTATION * 2 * math.pi for t in exact] for p in positions])
    np.testing.assert_allclose(cos[0], np.cos(true), rtol=0, atol=BOUND)
    np.testing.assert_allclose(sin[0], np.sin(true), rtol=0, atol=BOUND)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 2 * math.pi, exclude_max=True), min_size=3, max_size=3),
    st.integers(0, 2**31 - 1),
)
def test_turns_hold_the_whole_float64(values, position):
    """Reassembled, the two words are inv_freq / 2 pi to 2^-64 of a full rotation."""
    fixed_freq = fixed_point_frequencies(np.array(values))
    assert fixed_freq.dtype == np.uint32 and fixed_freq.shape == (len(values), 2)
    for value, (high, low) in zip(values, fixed_freq.astype(object), strict=True):
        whole = high * 2**32 + low
        numerator, denominator = (value / (2 * math.pi)).as_integer_ratio()
        assert whole == numerator * 2**64 // denominator
    # And the wrapped 32-bit arithmetic on the device is the exact product, cut to 32 bits of a full rotation.
    computed = np.asarray(jit_angles(fixed_freq, np.full((1, 1), position, np.int32)))[0, 0]
    for angle, (high, low) in zip(computed, fixed_freq.astype(object), strict=True):
        fraction = position * (high * 2**32 + low) % 2**64 >> 32
        signed = fraction - 2**32 if fraction >= 2**31 else fraction
        assert angle == pytest.approx(signed / 2**32 * 2 * math.pi, rel=2e-7, abs=1e-30)


@pytest.mark.parametrize("bad", [-1e-9, 2 * math.pi, math.nan, math.inf])
def test_a_frequency_outside_one_turn_is_refused(bad):
    with pytest.raises(UserError, match="inv_freq has"):
        fixed_point_frequencies(np.array([0.5, bad]))


def test_tables_follow_the_shapes_of_frequencies_and_positions():
    inv_freq = np.linspace(0, 1, 3 * 2 * 4).reshape(3, 2, 4)
    gain = np.linspace(1, 2, 24, dtype=np.float32).reshape(3, 2, 4)
    positions = np.array([[0, 5, 9, 100, 1], [7, 7, 2, 0, 3]])
    cos, sin = jit_tables(fixed_point_frequencies(inv_freq), gain, positions)
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


@jax.jit
def jit_rotate(x, fixed_freq, gain, positions):
    cos, sin = rotation_tables(fixed_freq, gain, positions)
    return rotate(x, cos[:, :, None], sin[:, :, None])


def rotated_at(x, encoding, at, length=None):
    """x [B, T, H, K] rotated by a description at B * T positions."""
    inv_freq, gain = frequencies(encoding, x.shape[-1], length)
    positions = np.array(at, np.int32).reshape(x.shape[:2])
    return jit_rotate(x, fixed_point_frequencies(inv_freq), gain.astype(np.float32), positions)


def rotated(x, encoding):
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    cos, sin = jit_tables(fixed_point_frequencies(inv_freq), gain.astype(np.float32), POSITIONS)
    return inv_freq, rotate(x, cos[:, :, None], sin[:, :, None])


def test_p_rope_of_one_is_rope_bit_for_bit(x):
    assert same_bits(apply_p_rope(x, POSITIONS, 32, rope_percentage=1.0), apply_rope(x, POSITIONS))
    assert not same_bits(apply_rope(x, POSITIONS), x)


def test_p_rope_of_zero_is_the_identity_bit_for_bit(x):
    assert same_bits(apply_p_rope(x, POSITIONS, 32, rope_percentage=0.0), x)


POSITION = st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1))


@settings(max_examples=40)
@given(base=st.floats(2, 1e8), seed=st.integers(0, 99), at=st.lists(POSITION, min_size=12, max_size=12))
def test_one_is_rope_and_zero_is_nope_bit_for_bit_at_any_base_and_position(base, seed, at):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 6, 3, 32)), jnp.float32)
    rope, one, zero, partial_one, partial_zero = (
        rotated_at(x, encoding, at)
        for encoding in (Rope(base), Rope(base, 1.0), Rope(base, 0.0), PartialRope(base, 1.0), PartialRope(base, 0.0))
    )
    assert same_bits(one, rope) and same_bits(partial_one, rope)
    assert same_bits(zero, x) and same_bits(partial_zero, x)
    if max(at) > 0:
        assert not same_bits(rope, x)


def test_a_fraction_of_zero_is_nope_for_the_compiled_program_too():
    """No rotation by nothing: none at all."""
    none = build_schedule([Layer(NoPE())], 2, 1, 32)
    for encoding in (Rope(fraction=0.0), PartialRope(fraction=0.0), Rope(fraction=0.0, scaling=Yarn(4.0, 64))):
        schedule = build_schedule([Layer(encoding)], 2, 1, 32)
        assert schedule.structure == none.structure and not schedule.structure[0].rotates
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(schedule), jax.tree.leaves(none), strict=True))


@settings(max_examples=40)
@given(
    inv_freq=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 6)), min_size=16, max_size=16),
    at=st.lists(POSITION, min_size=12, max_size=12),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
@pytest.mark.slow
def test_frequency_zero_is_no_rotation_bit_for_bit_whatever_the_other_pairs_do(inv_freq, at, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 6, 3, 32)), dtype)
    inv_freq = np.array(inv_freq)
    result = jit_rotate(
        x, fixed_point_frequencies(inv_freq), np.ones(16, np.float32), np.array(at, np.int32).reshape(2, 6)
    )
    still = np.flatnonzero(np.tile(inv_freq == 0, 2))
    assert result.dtype == dtype
    assert same_bits(result[..., still].astype(jnp.float32), x[..., still].astype(jnp.float32))


@pytest.mark.parametrize("encoding", [Rope(fraction=0.25), PartialRope(fraction=0.25)], ids=repr)
def test_a_pair_of_frequency_zero_is_left_alone_bit_for_bit(x, encoding):
    inv_freq, result = rotated(x, encoding)
    still = np.flatnonzero(np.tile(inv_freq == 0, 2))
    assert len(still) == 24
    assert same_bits(result[..., still], x[..., still])
    moving = np.flatnonzero(np.tile(inv_freq != 0, 2))
    assert (np.asarray(result[0, 3:])[..., moving] != np.asarray(x[0, 3:])[..., moving]).all()


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
    _, result = rotated(x, Rope(scaling=Yarn(8.0, 1024)))
    norm, before = (np.linalg.norm(np.asarray(a, np.float64), axis=-1) for a in (result, x))
    np.testing.assert_allclose(norm, before * (0.1 * math.log(8) + 1), rtol=1e-6)


TABLES = tuple(np.linspace(1, 3, 32)), tuple(np.linspace(1, 30, 32))
# Whatever rotates, and the length of the text where a scheme reads it: below and above training.
ROTARY = [
    (Rope(), None),
    (Rope(fraction=0.5), None),
    (PartialRope(), None),
    (PartialRope(5e5, 0.5, NTK(4.0)), None),
    (Rope(1e6, scaling=PI(4.0)), None),
    (Rope(scaling=NTK(8.0)), None),
    (Rope(scaling=DynamicNTK(1024)), 1000),
    (Rope(scaling=DynamicNTK(1024, 2.0)), 1 << 20),
    (Rope(scaling=NTKByParts(4.0, 2048)), None),
    (Rope(scaling=Yarn(2.0, 2048)), None),
    (Rope(1e6, scaling=Yarn(32.0, 4096, mscale=0.7, mscale_all_dim=1.0, truncate=False)), None),
    (Rope(fraction=0.25, scaling=Yarn(8.0, 1024)), None),
    (Rope(1e6, scaling=DynamicYarn(1024)), 1 << 20),
    (Rope(5e5, scaling=Llama3()), None),
    (Rope(scaling=LongRope(*TABLES, 1024, 8.0)), 1024),
    (Rope(scaling=LongRope(*TABLES, 1024, 8.0)), 8192),
    (Rope(scaling=NotebookNTK()), None),
]
KEEPS_NORMS = [(e, n) for e, n in ROTARY if (frequencies(e, 64, n)[1] == 1).all()]


def test_every_scaling_is_among_those_that_rotate():
    assert {type(e.scaling) for e, _ in ROTARY} == {type(None), *SCALINGS.values()}
    gained = {type(e.scaling) for e, n in ROTARY if (e, n) not in KEEPS_NORMS}
    assert gained == {Yarn, DynamicYarn, LongRope}


def pair_norms(x):
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.hypot(first, second)


@settings(max_examples=60)
@given(rotary=st.sampled_from(ROTARY), at=st.lists(POSITION, min_size=8, max_size=8), seed=st.integers(0, 99))
def test_norms_are_kept_where_there_is_no_gain_and_grow_by_the_gain_where_there_is(rotary, at, seed):
    encoding, length = rotary
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((1, 8, 2, 64)), jnp.float32)
    result, gain = rotated_at(x, encoding, at, length), frequencies(encoding, 64, length)[1]
    if rotary in KEEPS_NORMS:
        np.testing.assert_allclose(pair_norms(result), pair_norms(x), rtol=1e-6)
        lengths = (np.linalg.norm(np.asarray(a, np.float64), axis=-1) for a in (result, x))
        np.testing.assert_allclose(*lengths, rtol=1e-6)
    else:
        assert abs(gain.max() - 1) > 0.01
        np.testing.assert_allclose(pair_norms(result), pair_norms(x) * gain, rtol=1e-6)


@jax.jit
def scores(fixed_freq, gain, query, key, at):
    """The logits of one query and one key at pairs of positions `at` [B, 2]."""
    cos, sin = rotation_tables(fixed_freq, gain, at)
    result = rotate(jnp.stack([query, key])[None].repeat(len(at), 0)[:, :, None], cos[:, :, None], sin[:, :, None])
    return jnp.einsum("bhk,bhk->b", result[:, 0], result[:, 1])


@settings(max_examples=120)
@given(
    rotary=st.sampled_from(ROTARY),
    i=st.integers(0, 2**20),
    j=st.integers(0, 2**20),
    shift=st.one_of(st.integers(1, 1000), st.integers(2**20, 2**31 - 2**20 - 1)),
    seed=st.integers(0, 9),
)
def test_scores_depend_on_the_distance_alone(rotary, i, j, shift, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32)
    inv_freq, gain = frequencies(rotary[0], 64, rotary[1])
    at = np.array([[i, j], [i + shift, j + shift]], np.int32)
    here, there = scores(fixed_point_frequencies(inv_freq), gain.astype(np.float32), query, key, at)
    assert abs(here - there) < 3e-6 * gain.max() ** 2 * np.linalg.norm(query) * np.linalg.norm(key)


@pytest.mark.parametrize(("encoding", "length"), ROTARY, ids=lambda e: type(getattr(e, "scaling", e)).__name__)
def test_scores_do_depend_on_the_distance(encoding, length):
    query, key = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    inv_freq, gain = frequencies(encoding, 64, length)
    at = np.array([[100, 100], [116, 100], [164, 100], [356, 100]], np.int32)
    apart = np.asarray(scores(fixed_point_frequencies(inv_freq), gain.astype(np.float32), query, key, at))
    assert np.ptp(apart) > 0.5


def test_bfloat16_stays_bfloat16_and_loses_one_rounding_only():
    generator = np.random.default_rng(2)
    x = jnp.asarray(generator.standard_normal((1, 3, 2, 64)), jnp.bfloat16)
    positions = np.array([131072, 131073, 131199])
    result = apply_rope(x, jnp.asarray(positions)[None])
    assert result.dtype == jnp.bfloat16
    angle = (positions[:, None] * frequencies(Rope(), 64)[0])[:, None]  # float64: good to 1e-11 here

    def rotated(angle):
        first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    true = rotated(angle)
    bound = 2.0**-8 * np.abs(true) + 2e-6  # half a unit in the last of 8 bits, and float32's own error
    assert (np.abs(np.asarray(result, np.float64) - true) <= bound).all()
    # Counting the position in bfloat16 (131073 becomes 131072) breaks the bound.
    counted = np.asarray(jnp.asarray(positions, jnp.bfloat16), np.float64)
    coarse = rotated((counted[:, None] * frequencies(Rope(), 64)[0])[:, None])
    assert (np.abs(coarse - true) > bound).mean() > 0.3


def turned_64(x, angle, cast=lambda table: table):
    """x [S, K] rotated by angles [S, R] in float64; `cast` is what is done to cos and sin."""
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = cast(np.cos(angle)), cast(np.sin(angle))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def in_bfloat16(values):
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float64)


def score_errors(way, first_position, seed=0):
    """Of 2048 scores of bfloat16 queries and keys within 128 tokens of each other, from `first_position` on.

    Returns:
      The errors as parts of |q| |k|, and their rms as a part of what one rounding to bfloat16 can do, 2^-8 of a
      component, to all components alike.
    """
    generator, inv_freq = np.random.default_rng(seed), frequencies(Rope(), 64)[0]
    ways = {
        "ours": None,
        "positions in bfloat16": lambda x, at: turned_64(x, in_bfloat16(at) * inv_freq),
        "angles in bfloat16": lambda x, at: turned_64(x, in_bfloat16(at * inv_freq)),
        "tables in bfloat16": lambda x, at: turned_64(x, at * inv_freq, in_bfloat16),
    }
    true, computed = [], []
    for _ in ("query", "key"):
        x = jnp.asarray(generator.standard_normal((2048, 64)), jnp.bfloat16)
        at = generator.integers(first_position, first_position + 128, (2048, 1))
        true.append(turned_64(x, at * inv_freq))  # of the bfloat16 inputs; float64 is good to 1e-11 here
        if way == "ours":
            result = rotated_at(x[:, None, None], Rope(), at)
            assert result.dtype == jnp.bfloat16
            computed.append(np.asarray(result[:, 0, 0], np.float64))
        else:
            computed.append(in_bfloat16(ways[way](x, at)))
    error = (computed[0] * computed[1]).sum(-1) - (true[0] * true[1]).sum(-1)
    norms = np.linalg.norm(true[0], axis=-1) * np.linalg.norm(true[1], axis=-1)
    components = np.sqrt(((true[0] * true[1]) ** 2).sum(-1).mean())
    return np.abs(error / norms), np.sqrt((error**2).mean()) / components * 2**8


# Each component of a rotated query and key is rounded by at most 2^-8 of itself; Cauchy-Schwarz gives |q| |k|.
SCORE_BOUND = 2.0**-7 + 2.0**-16 + 1e-6
# The rms of one rounding, mantissas being log-uniform, is 2^-7 / sqrt(12) sqrt(3 / (8 ln 2)) = .4247 2^-8; two: .6006.
SCORE_RMS = 1.1 * 0.6006


def test_bfloat16_scores_are_as_good_at_131072_as_at_zero():
    near, far = (score_errors("ours", first) for first in (0, 131072 - 64))
    for worst, rms in (near, far):
        assert worst.max() < SCORE_BOUND
        assert rms < SCORE_RMS
    assert far[1] < 1.5 * near[1]


@pytest.mark.parametrize(
    ("way", "beyond"), [("positions in bfloat16", 0.9), ("angles in bfloat16", 0.9), ("tables in bfloat16", None)]
)
def test_bfloat16_within_the_rotation_would_be_seen(way, beyond):
    worst, rms = score_errors(way, 131072 - 64)
    assert rms > SCORE_RMS
    if beyond:
        assert (worst > SCORE_BOUND).mean() > beyond
        assert rms > 100 * SCORE_RMS


def matrix(inv_freq, gain, position):
    """The rotation at one position as a float64 matrix [K, K]: out = matrix @ x."""
    cos, sin = (np.diag(f(position * inv_freq) * gain) for f in (np.cos, np.sin))
    return np.block([[cos, -sin], [sin, cos]])


@pytest.mark.parametrize(
    "encoding",
    [Rope(), Rope(scaling=Yarn(8.0, 1024)), PartialRope(fraction=0.5, scaling=Yarn(8.0, 1024)), Rope(fraction=0.25)],
    ids=repr,
)
def test_the_gradient_is_the_transposed_rotation_with_its_gain(encoding):
    generator = np.random.default_rng(5)
    at = [0, 1, 77, 5000]
    x, weights = (generator.standard_normal((1, 4, 2, 16)).astype(np.float32) for _ in range(2))
    inv_freq, gain = frequencies(encoding, 16)
    matrices = [matrix(inv_freq, gain, position) for position in at]
    out = np.einsum("tij,bthj->bthi", matrices, x)
    np.testing.assert_allclose(rotated_at(x, encoding, at), out, rtol=0, atol=2e-5)
    gradient = jax.grad(lambda x: (rotated_at(x, encoding, at) * weights).sum())(x)
    transposed = np.einsum("tji,bthj->bthi", matrices, weights)
    np.testing.assert_allclose(gradient, transposed, rtol=0, atol=2e-5)
    # The test can fail: rotating on, not back, or back without the gain (its inverse), is another gradient.
    inverse = np.einsum("tij,bthj->bthi", np.linalg.inv(matrices), weights)
    assert np.abs(np.einsum("tij,bthj->bthi", matrices, weights) - transposed).max() > 0.1
    assert (np.abs(inverse - transposed).max() > 0.1) == bool((gain != 1).any())


def test_the_gradient_of_a_bfloat16_rotation_is_bfloat16():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((1, 4, 2, 16)), jnp.bfloat16)
    d_x = jax.grad(lambda x: apply_rope(x, jnp.arange(4)[None]).astype(jnp.float32).sum())(x)
    assert d_x.dtype == jnp.bfloat16 and (d_x != 0).all()


# --- Learned rotations ---


def test_tables_that_are_learned_have_their_gradient():
    """Each table entry serves all heads and rows that share it."""
    generator = np.random.default_rng(5)
    x, weights = (generator.standard_normal((3, 4, 2, 16)).astype(np.float32) for _ in range(2))
    for shape in ((1, 4, 1, 8), (3, 4, 2, 8), (1, 4, 2, 8)):
        cos, sin = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
        found = jax.grad(lambda *tables: (rotate(x, *tables) * weights).sum(), (0, 1))(cos, sin)
        (a, b), (d_a, d_b) = (np.split(one.astype(np.float64), 2, -1) for one in (x, weights))
        shared = tuple(n for n in range(4) if shape[n] == 1)
        for ours, true in zip(found, (a * d_a + b * d_b, a * d_b - b * d_a), strict=True):
            np.testing.assert_allclose(ours, true.sum(shared, keepdims=True), rtol=0, atol=1e-5)


def test_a_rotation_of_the_schedule_keeps_no_queries_for_its_gradient():
    x = jnp.ones((2, 4, 3, 16))
    tables = jit_tables(
        fixed_point_frequencies(frequencies(Rope(), 16)[0]), np.ones(8, np.float32), jnp.arange(4)[None]
    )
    cos, sin = (table[:, :, None] for table in tables)
    fixed = jax.vjp(lambda x: rotate(x, cos, sin), x)[1]
    learned = jax.vjp(lambda cos: rotate(x, cos, sin), cos)[1]
    assert x.shape not in [kept.shape for kept in jax.tree.leaves(fixed)]
    assert x.shape in [kept.shape for kept in jax.tree.leaves(learned)]


@pytest.mark.parametrize("length", LENGTHS.values())
def test_learned_frequencies_are_exact_at_every_position(length):
    """Of the float32 frequencies, which may be negative or above a full rotation."""
    drawn = np.random.default_rng(0).uniform(-9, 9, 20)
    learned = np.concatenate([drawn, 10.0 ** -np.arange(9), [0, 8000]]).astype(np.float32)
    positions = positions_below(length)
    with localcontext() as context:
        context.prec = 60
        exact = [int(Decimal(float(one)) / (2 * PI_50) * FULL_ROTATION) for one in learned]
    assert worst_error(jit_angles(learned, positions[None])[0], positions, exact) < BOUND
    assert np.isnan(jit_angles(np.float32([np.nan, np.inf]), positions[None])).all()


@pytest.mark.parametrize("first", [0, 131_072 - 500, 1_000_000])
def test_the_gradient_of_learned_frequencies_is_that_of_finite_differences(first):
    """Of scores, in float64: frequencies that are moved by 1e-7 and back."""
    generator = np.random.default_rng(0)
    query, key = (generator.standard_normal((2, 5, 2, 8)).astype(np.float32) for _ in range(2))
    weights, at = generator.standard_normal((2, 2, 5, 5)), first + np.array([[0, 3, 9, 100, 499]])
    learned = np.float32([1.0, 0.7, 0.02, 1e-4])

    def score(freq):
        cos, sin = rotation_tables(freq, jnp.ones(4), jnp.asarray(at, jnp.int32))
        q, k = (rotate(one, cos[:, :, None], sin[:, :, None]) for one in (query, key))
        return (jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") * weights).sum()

    def exact(freq):
        wave = np.exp(1j * at[..., None] * freq)[:, :, None]
        q, k = (wave * (one[..., :4].astype(np.float64) + 1j * one[..., 4:]) for one in (query, key))
        return (np.einsum("bthk,bshk->bhts", q, k.conj()).real * weights).sum()

    found, middle, step = jax.jit(jax.grad(score))(learned), learned.astype(np.float64), 1e-7
    differences = [(exact(middle + step * one) - exact(middle - step * one)) / (2 * step) for one in np.eye(4)]
    # A gradient of float32 is position times a sum that cancels: queries and keys rotate by the same amount.
    np.testing.assert_allclose(found, differences, rtol=1e-6, atol=2e-3 + 5e-6 * first)
    assert np.abs(differences).min() > 20


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
