"""The cross-entropy in chunks against the one everybody writes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.errors import UserError
from pe_lab.model import cross_entropy

B, T, D, V = 2, 7, 8, 24


def case(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(2 * rng.standard_normal((B, T, D)), dtype)
    unembedding = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)
    targets = rng.integers(0, V, (B, T))
    targets[0, :3] = 0, V - 1, V // 2  # the ends of the vocabulary, and of chunks
    weights = rng.random((B, T))
    weights[1, 2:4] = 0
    return hidden, unembedding, jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32)


def plain(hidden, unembedding, targets):
    log_probabilities = jax.nn.log_softmax(hidden @ unembedding.T)
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("chunks", [1, 2, 3, V])
def test_values_and_weighted_gradients_are_those_of_log_softmax(chunks):
    hidden, unembedding, targets, weights = case()

    @jax.jit
    def both(hidden, unembedding):
        def weighted(f, *extra):
            def loss(hidden, unembedding):
                each = f(hidden, unembedding, targets, *extra)
                return (each * weights).sum(), each

            return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, unembedding)

        return weighted(cross_entropy, chunks), weighted(plain)

    ours, expected = both(hidden, unembedding)
    assert ours[0][1].dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, expected)


@pytest.mark.parametrize("chunks", [1, 4])
def test_large_logits_do_not_overflow(chunks):
    hidden, unembedding, targets, _ = case()
    loss, grad = jax.jit(jax.value_and_grad(lambda h: cross_entropy(h, unembedding, targets, chunks).mean()))(
        hidden * 1e4
    )
    exact = np.asarray(hidden, np.float64) * 1e4 @ np.asarray(unembedding, np.float64).T
    at_target = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (exact.max(-1) - at_target).mean(), rtol=1e-5)
    assert np.isfinite(grad).all()


def test_bfloat16_hidden_states_give_float32_losses_and_gradients_of_their_own_dtype():
    hidden, unembedding, targets, _ = case(jnp.bfloat16)
    loss, (of_hidden, of_unembedding) = jax.jit(
        jax.value_and_grad(lambda h, u: cross_entropy(h, u, targets, 4).sum(), (0, 1))
    )(hidden, unembedding)
    rounded = unembedding.astype(jnp.bfloat16).astype(jnp.float32)
    expected = plain(hidden.astype(jnp.float32), rounded, targets).sum()
    assert (loss.dtype, of_hidden.dtype, of_unembedding.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_in_chunks_no_float32_array_is_as_large_as_the_logits():
    """By every shape of the compiled value and gradient. One chunk does hold [B, T, V]: the test can fail."""

    def largest_float32(chunks: int) -> int:
        arguments = (
            jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16),
            jax.ShapeDtypeStruct((512, 32), jnp.float32),
            jax.ShapeDtypeStruct((4, 64), jnp.int32),
        )
        loss = jax.value_and_grad(lambda h, u, t: cross_entropy(h, u, t, chunks).mean(), (0, 1))
        text = jax.jit(loss).lower(*arguments).compile().as_text()
        return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text))

    assert largest_float32(1) >= 4 * 64 * 512
    assert largest_float32(8) <= 4 * 64 * 512 // 8


def test_chunks_that_do_not_divide_the_vocabulary_are_refused():
    hidden, unembedding, targets, _ = case()
    for chunks in (0, 5):
        with pytest.raises(UserError, match=f"loss_chunks is {chunks}; it must divide the vocabulary of {V}"):
            cross_entropy(hidden, unembedding, targets, chunks)
