"""Running sums and earlier tokens: exact, by document, in order on a mesh, and from a cache's state on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention.running_sums import running_sum, tokens_before
from pe_lab.config import MeshConfig
from pe_lab.parallel import AxisRules, balanced_order, make_mesh, use_mesh

LONG = 131_072
summed = jax.jit(
    lambda terms, segments=None, angles=False: running_sum(terms, segments, None, angles)[0], static_argnums=2
)


def documents(lengths):
    return np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)[None]


def exact(terms, segments):
    """The sums in float64."""
    total = np.cumsum(np.asarray(terms, np.float64), axis=1)
    first = np.searchsorted(segments[0], segments[0])
    before = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1)[:, first]
    return total - before


def around(difference):
    """The size of angles, around the circle."""
    return np.abs((difference + np.pi) % (2 * np.pi) - np.pi)


def gates(length):
    return np.log(1 / (1 + np.exp(np.random.default_rng(0).standard_normal((1, length, 2))))).astype(np.float32)


def test_a_sum_has_the_precision_of_its_document():
    """131,072 tokens in documents of 64, where a sum over the whole row would be off by 0.01."""
    terms, segments = gates(LONG), documents([64] * (LONG // 64))
    assert np.abs(summed(terms, segments) - exact(terms, segments)).max() < 1e-5


@pytest.mark.parametrize("equal", [None, -0.0077, -5e-5])
def test_a_long_sum_is_off_by_one_rounding(equal):
    """Of gates of many sizes, with a sum of -106,000; and of equal ones, each smaller than 1/128 or 1/8192."""
    terms = gates(LONG) if equal is None else np.full((1, LONG, 2), equal, np.float32)
    true = exact(terms, documents([LONG]))
    rounding = np.abs(true.astype(np.float32) - true).max()
    assert equal or true.min() < -100_000
    assert np.abs(np.asarray(summed(terms), np.float64) - true).max() < max(1.3 * rounding, 1e-5) < 0.006


@pytest.mark.parametrize("term", [-np.inf, np.inf, np.nan, -1e37, 3e38])
def test_a_sum_has_the_large_terms_of_a_plain_one(term):
    """In its own document alone; and in a cache, from that token on."""
    terms = np.tile(np.float32([-0.5, -0.3]), (1, 12, 1))
    terms[0, 4], segments = term, documents([8, 4])
    plain = np.cumsum(terms[:, :8], axis=1)
    found = np.asarray(summed(terms, segments))
    np.testing.assert_allclose(found[:, :8], plain, rtol=1e-6)
    np.testing.assert_allclose(found[:, 8:], np.cumsum(terms[:, 8:], axis=1), rtol=1e-6)
    _, state = running_sum(jnp.asarray(terms[:, :3]))
    for at in range(3, 8):
        total, state = running_sum(jnp.asarray(terms[:, at : at + 1]), None, state[:, -1])
        np.testing.assert_allclose(total[:, 0], plain[:, at], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("term", [np.nan, np.inf, -np.inf])
def test_an_angle_that_is_not_finite_is_nan_at_its_token(term):
    terms = np.ones((1, 6, 1), np.float32)
    terms[0, 2] = term
    assert np.isnan(summed(terms, None, True)[0, :, 0]).tolist() == [False, False, True, False, False, False]
    _, state = running_sum(jnp.asarray(terms[:, :2]), None, None, True)
    total, _ = running_sum(jnp.asarray(terms[:, 2:3]), None, state[:, -1], True)
    assert np.isnan(total).all()


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_sum_of_angles_is_off_by_the_rounding_of_each(spread):
    """2^-33 of a rotation at most, which adds up over equal angles."""
    terms = (1 + spread * np.random.default_rng(0).standard_normal((1, LONG, 2))).astype(np.float32)
    error = around(np.asarray(summed(terms, None, True), np.float64) - exact(terms, documents([LONG])))
    assert error.max() < (2e-6 if spread else 1e-4)


@pytest.mark.parametrize("angles", [False, True])
def test_the_gradient_is_the_sum_over_later_tokens_of_the_document(angles):
    generator = np.random.default_rng(1)
    terms, weights = generator.standard_normal((2, 1, 30, 3)).astype(np.float32)
    segments = documents([7, 1, 22])
    found = jax.grad(lambda terms: (summed(terms, segments, angles) * weights).sum())(terms)
    later = exact(weights[:, ::-1], segments.max() - segments[:, ::-1])[:, ::-1]
    np.testing.assert_allclose(found, later, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_sums_and_earlier_tokens_on_a_ring(parts, packed):
    """Documents that end within and at the end of chunks, and one of several chunks."""
    length, order = 48, balanced_order(48, parts)
    terms = np.random.default_rng(2).standard_normal((1, length, 2)).astype(np.float32)
    segments = documents([5, 7, 24, 1, 11]) if packed else documents([length])
    given = segments[:, order] if packed else None

    @jax.jit
    def on_ring(terms, segments):
        with use_mesh(make_mesh(MeshConfig(data=1, context=parts), jax.devices()[:parts]), AxisRules()):
            sums = [running_sum(terms, segments, None, angles)[0] for angles in (False, True)]
            return sums, [tokens_before(terms, n, segments) for n in (1, 3, 8)]

    (plain, angles), before = jax.tree.map(
        lambda x: np.asarray(x)[:, np.argsort(order)], on_ring(terms[:, order], given)
    )
    true = exact(terms, segments)
    np.testing.assert_allclose(plain, true, atol=2e-6)
    assert around(angles - true).max() < 2e-6
    for n, found in zip((1, 3, 8), before, strict=True):
        same = np.pad(segments, ((0, 0), (n, 0)), constant_values=-1)[:, :-n] == segments
        wanted = np.where(same[..., None], np.pad(terms, ((0, 0), (n, 0), (0, 0)))[:, :-n], 0)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("angles", "gate"), [(False, 0.99), (False, 0.995), (True, 0.99)])
def test_a_sum_that_goes_on_from_its_state_is_the_whole_sum(angles, gate):
    """10,000 steps, as in decoding, of equal gates: a float32 sum that is rounded at each is off by 0.001."""
    terms = jnp.full((1, 10_000, 1), np.log(gate), jnp.float32)
    _, first = running_sum(terms[:, :1], None, None, angles)

    def step(state, term):
        total, state = running_sum(term[None, None], None, state, angles)
        return state[:, 0], total[0, 0]

    _, totals = jax.jit(lambda: jax.lax.scan(step, first[:, 0], terms[0, 1:]))()
    true = exact(terms, documents([10_000]))[0, 1:]
    error = np.asarray(totals, np.float64) - true
    assert (around(error) if angles else np.abs(error)).max() < 1e-5
