"""A rare feature of attention: a diagonal bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked import DIAGONAL

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, attention

B, T, H, K = 2, 21, 4, 16
HERE = [
    name
    for name, one in IMPLEMENTATIONS.items()
    if "cpu" in one.capabilities.platforms and one.capabilities.honours >= {"position bias"}
]


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
