"""The notebook's YaRN: a position-dependent multiplier of the angles, right at every position."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.positional import angles
from pe_lab.positional.notebook import NotebookYarn, warped_angles
from pe_lab.positional.rotation import fixed_point_frequencies

jit_warped = jax.jit(warped_angles, static_argnums=2)


def warped_and_true(encoding, at):
    """Our angles and n * m(n) * w in float64 around the circle, as errors [T, R]; and the multipliers [T]."""
    at, inv_freq = np.array(at), encoding.spectrum(64)
    ours = jit_warped(fixed_point_frequencies(inv_freq), at[None], encoding)[0]
    assert ours.dtype == jnp.float32
    start = encoding.original_length - encoding.blend
    blended = np.clip((at - start) / (2 * encoding.blend), 0, 1)
    multiplier = encoding.alpha * (1 - blended) + encoding.beta * blended
    difference = np.abs(np.asarray(ours, np.float64) - (at * multiplier)[:, None] * inv_freq) % (2 * math.pi)
    return np.minimum(difference, 2 * math.pi - difference), multiplier


def warped_positions(encoding):
    """Below, within and above the blend, as far as good angles are promised."""
    length, blend = encoding.original_length, encoding.blend
    below = np.unique(np.linspace(0, length - blend, 30).astype(int))
    within = np.unique(np.linspace(length - blend + 1, length + blend - 1, 30).astype(int))
    above = np.unique(np.geomspace(length + blend, 2**27 - 1, 60).round().astype(int))
    return below, within, above


WARPS = [(0.85, 1.25), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (0.5, 16.0), (0.3, 3.7), (1.1, 0.99)]


@pytest.mark.parametrize(("length", "blend"), [(128, 16), (2048, 2048), (1 << 17, 1000)])
@pytest.mark.parametrize(("alpha", "beta"), WARPS)
def test_warped_angles_are_right_below_within_and_above_the_blend(alpha, beta, length, blend):
    encoding = NotebookYarn(alpha=alpha, beta=beta, original_length=length, blend=blend)
    below, within, above = warped_positions(encoding)
    for at, multiplier in ((below, alpha), (above, beta)):
        error, multipliers = warped_and_true(encoding, at)
        assert (multipliers == multiplier).all()
        assert error.max() < 1e-6, f"{error.max():.2e} rad at a multiplier of {multiplier}"
    error, multipliers = warped_and_true(encoding, within)
    # A float32 multiplier and its product: four roundings of 6e-8, of the position in radians.
    assert (error.max(-1) < 1e-6 + 2.4e-7 * within * max(alpha, beta)).all()
    # The test can fail: a float32 product, exact for 2 and 1.25, is elsewhere for most multipliers.
    if np.float32(beta) != beta:
        product = (np.float32(beta) * above.astype(np.float32)).astype(np.float64)
        assert np.abs(product - above * beta).max() > 1e-2


def warped_scores(encoding, at):
    """The logits of one query and one key at pairs of positions `at` [B, 2]."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 1, 64)), jnp.float32).repeat(len(at), 0)

    @jax.jit
    def scores(x, at):
        query, key = encoding.encode({}, x, x, at, x[:, :, 0])
        return jnp.einsum("bhk,bhk->b", query[:, 0], key[:, 1])

    return np.asarray(scores(x, jnp.asarray(at, jnp.int32)))


def test_the_notebooks_yarn_does_not_depend_on_the_distance_alone():
    """What RoPE is for: it is lost where the query and the key do not lie on the same side of the blend."""
    at = [[100, 60], [140, 100], [160, 120], [200, 160], [5000, 4960]]  # 40 tokens apart; the blend is 112 .. 144
    scores = warped_scores(NotebookYarn(), at)
    across = scores[1:3]
    assert np.abs(across - scores[0]).min() > 0.5
    assert abs(scores[3] - scores[0]) > 0.5  # before and after, the multipliers differ
    assert scores[4] == pytest.approx(scores[3], abs=1e-4)  # beyond it, positions are merely scaled
    flat = warped_scores(NotebookYarn(alpha=1.0, beta=1.0), at)
    np.testing.assert_allclose(flat, flat[0], atol=1e-4)


def test_a_warp_of_one_is_rope():
    encoding, at = NotebookYarn(alpha=1.0, beta=1.0), np.array([[0, 1, 111, 112, 113, 128, 144, 145, 4096, 2**20]])
    fixed_freq = fixed_point_frequencies(encoding.spectrum(64))
    np.testing.assert_allclose(jit_warped(fixed_freq, at, encoding), jax.jit(angles)(fixed_freq, at), rtol=0, atol=1e-6)
