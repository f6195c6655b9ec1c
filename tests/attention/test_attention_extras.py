"""Rare features of attention: heads of noise, and a diagonal bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked import DIAGONAL

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, attention
from pe_lab.attention.noise import KEYS, QUERIES, replace_heads_by_noise
from pe_lab.errors import UserError

B, T, H, K = 2, 21, 4, 16
HERE = [name for name, one in IMPLEMENTATIONS.items() if "cpu" in one.capabilities.platforms]


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run(implementation, q, k, v, row, **arrays):
    f = functools.partial(attention, implementation=implementation, chunk=8)
    return np.asarray(jax.jit(f)(q, k, v, row, **arrays))


# --- Diagonal bias -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", HERE)
def test_a_self_bias_is_added_to_a_tokens_logit_with_itself(implementation):
    q, k, v = (draw(B, T, 2, K, seed=i) for i in range(3))
    bias = np.where(np.arange(T) < 11, 2.5, 0.0).astype(np.float32)[None]
    out = run(implementation, q, k, v, DIAGONAL, x=draw(B, T, 8))
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    logits = np.einsum("bthk,bshk->bhts", *wide[:2]) / K**0.5 + np.diag(bias[0])
    logits = np.where(np.tri(T), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), wide[2])
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert np.abs(out - run(implementation, q, k, v, LayerEncoding())).max() > 0.1


@pytest.mark.parametrize("implementation", [name for name in HERE if name != "reference"])
def test_gradients_under_a_self_bias_are_the_references(implementation):
    q, k, v = (draw(B, T, 2, K, seed=i) for i in range(3))

    def gradients(name):
        def loss(q, k, v):
            return (attention(q, k, v, DIAGONAL, x=q[:, :, 0], implementation=name, chunk=8) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    for a, b in zip(gradients(implementation), gradients("reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


# --- Heads of noise --------------------------------------------------------------------------------------------------

SEEDS = jnp.asarray([0, 11, 0, 12], jnp.uint32)


@jax.jit
def replaced(q, k, seeds, positions):
    return replace_heads_by_noise(q, seeds, positions, QUERIES), replace_heads_by_noise(k, seeds, positions, KEYS)


def test_noise_replaces_the_chosen_heads_and_no_others():
    q, k = draw(B, T, H, K, seed=1), 3 * draw(B, T, H, K, seed=2)
    new_q, new_k = replaced(q, k, SEEDS, jnp.arange(T)[None])
    for new, old in ((new_q, q), (new_k, k)):
        np.testing.assert_array_equal(new[:, :, [0, 2]], old[:, :, [0, 2]])
        assert (np.asarray(new[:, :, [1, 3]]) != np.asarray(old[:, :, [1, 3]])).all()


def test_noise_is_gaussian_and_as_large_as_the_kept_heads():
    """Its variance is that of the kept heads' components, per token; queries, keys and heads are independent."""
    size = np.linspace(0.5, 4, 300)[:, None, None]  # a token's own
    q, k = (jnp.asarray(size * np.asarray(draw(1, 300, H, 64, seed=i))) for i in (1, 2))
    q = q.at[:, :, [1, 3]].multiply(100.0)  # replaced heads do not influence the size
    new_q, new_k = (np.asarray(x) for x in replaced(q, k, SEEDS, jnp.arange(300)[None]))
    for new, old in ((new_q, np.asarray(q)), (new_k, np.asarray(k))):
        scaled = new[0, :, [1, 3]] / np.std(old[0][:, [0, 2]], axis=(-2, -1))[None, :, None]
        assert abs(scaled.mean()) < 0.02 and abs(scaled.std() - 1) < 0.02
        assert abs((scaled**4).mean() - 3) < 0.15  # a Gaussian's kurtosis
        assert abs(np.corrcoef(scaled[0].ravel(), scaled[1].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(new_q[0, :, 1].ravel(), new_k[0, :, 1].ravel())[0, 1]) < 0.03


def test_noise_is_a_function_of_seed_and_position():
    q, k = draw(1, T, H, K, seed=1), draw(1, T, H, K, seed=2)
    positions = jnp.arange(T)[None]
    whole = replaced(q, k, SEEDS, positions)
    np.testing.assert_array_equal(whole[0], replaced(q, k, SEEDS, positions)[0])
    # A part of the sequence, at its own positions, has the same noise: a cached decode equals a full pass.
    part = replaced(q[:, 5:9], k[:, 5:9], SEEDS, positions[:, 5:9])
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_allclose(a[:, 5:9], b, rtol=1e-6)
    other = replaced(q, k, SEEDS.at[1].set(13), positions)
    assert (np.asarray(other[0])[:, :, 1] != np.asarray(whole[0])[:, :, 1]).all()
    np.testing.assert_array_equal(other[0][:, :, 3], whole[0][:, :, 3])


def test_if_no_head_is_kept_noise_is_as_large_as_all_heads():
    q, k = 5 * draw(1, 400, H, K, seed=1), draw(1, 400, H, K, seed=2)
    new_q, new_k = replaced(q, k, jnp.asarray([1, 2, 3, 4], jnp.uint32), jnp.arange(400)[None])
    assert float(np.std(new_q)) == pytest.approx(float(np.std(q)), rel=0.02)
    assert float(np.std(new_k)) == pytest.approx(float(np.std(k)), rel=0.02)


@pytest.mark.slow
def test_noise_needs_keys_of_each_query_head():
    q, k, v = draw(1, T, 4, K), draw(1, T, 2, K), draw(1, T, 2, K)
    with pytest.raises(UserError, match="keys are rotated per query head"):
        attention(q, k, v, LayerEncoding(noise=SEEDS))
