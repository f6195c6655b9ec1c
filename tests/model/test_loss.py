"""The cross-entropy in chunks against the one everybody writes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.errors import UserError
from pe_lab.model import loss as losses
from pe_lab.model.loss import Head, _in_one_pass, _one_by_one

B, T, D, V = 2, 7, 8, 24


def cross_entropy(hidden, unembedding, *arguments):
    return losses.cross_entropy(hidden, Head(unembedding), *arguments)


def weighted_cross_entropy(hidden, unembedding, targets, weights, chunks=1):
    return losses.weighted_cross_entropy(hidden, Head(unembedding), targets, weights, chunks)


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


def exact(hidden, unembedding, targets, weights):
    """Loss and gradients by the formula, in float64."""
    h, u = np.asarray(hidden, np.float64), np.asarray(unembedding, np.float64)
    logits = h @ u.T
    highest = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(logits - highest).sum(-1, keepdims=True)) + highest
    hit = np.asarray(targets)[..., None] == np.arange(len(u))
    w = np.asarray(weights, np.float64)
    loss = ((logsumexp - logits)[hit].reshape(w.shape) * w).sum()
    d_logits = (np.exp(logits - logsumexp) - hit) * w[..., None]
    return loss, d_logits @ u, np.einsum("btv,btd->vd", d_logits, h)


@pytest.mark.parametrize("chunks", [1, 2, 3, 14])
def test_the_weighted_sum_and_its_gradients_are_exact(chunks):
    """14 tokens: 3 chunks are padded, 14 have one token each."""
    hidden, unembedding, targets, weights = case()
    loss, gradients = jax.jit(jax.value_and_grad(weighted_cross_entropy, (0, 1)), static_argnums=4)(
        hidden, unembedding, targets, weights, chunks
    )
    expected, d_hidden, d_unembedding = exact(hidden, unembedding, targets, weights)
    assert loss.dtype == jnp.float32 and loss == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradients[0], d_hidden, atol=2e-6)
    np.testing.assert_allclose(gradients[1], d_unembedding, atol=2e-6)
    alone = jax.jit(weighted_cross_entropy, static_argnums=4)(hidden, unembedding, targets, weights, chunks)
    assert alone == pytest.approx(expected, rel=1e-6)  # without its gradient


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("bias, soft_cap", [(True, 0.0), (False, 1.5), (True, 1.5)])
def test_a_bias_and_a_soft_cap_of_the_logits_have_their_gradients(bias, soft_cap, chunks):
    """Against JAX's gradient of the formula. The logits reach 10: a cap of 1.5 is felt."""
    hidden, unembedding, targets, weights = case()
    offset = jnp.linspace(-2, 2, V) if bias else None

    def formula(hidden, unembedding, offset):
        z = jnp.einsum("btd,vd->btv", hidden, unembedding, precision="highest") + (0 if offset is None else offset)
        log_probs = jax.nn.log_softmax(soft_cap * jnp.tanh(z / soft_cap) if soft_cap else z)
        return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]

    def of_formula(*arrays):
        return (formula(*arrays) * weights).sum()

    def in_chunks(hidden, unembedding, offset):
        return losses.weighted_cross_entropy(hidden, Head(unembedding, offset, soft_cap), targets, weights, chunks)

    arrays = hidden, unembedding, offset
    chosen = (0, 1, 2) if bias else (0, 1)
    expected = jax.jit(jax.value_and_grad(of_formula, chosen))(*arrays)
    found = jax.jit(jax.value_and_grad(in_chunks, chosen))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), found, expected)
    each = losses.cross_entropy(hidden, Head(unembedding, offset, soft_cap), targets, 1 if chunks == 1 else 4)
    np.testing.assert_allclose(each, formula(*arrays), rtol=1e-5, atol=1e-5)


def test_one_pass_over_the_logits_gives_what_three_give():
    """What GPUs compute, in float64 by numpy; 0.3 s."""
    random, at = np.random.default_rng(0), np.arange(7)
    logits = random.normal(size=(7, 1000)) * np.array([1, 10, 100, 1e-3, 1e4, 1, 1])[:, None]
    logits[5, ::2] = -np.inf  # a masked vocabulary
    logits[6, 3] = np.nan
    logits, targets = logits.astype(np.float32), random.integers(500, size=7) * 2 + 1
    exact = logits.astype(np.float64)
    highest = exact.max(-1)
    total, at_target = np.exp(exact - highest[:, None]).sum(-1), exact[at, targets]
    hit = jnp.asarray(targets)[:, None] == jnp.arange(1000)
    for function in (_in_one_pass, _one_by_one):
        found = jax.jit(function)(logits, hit)
        np.testing.assert_array_equal(found[0][:6], highest[:6].astype(np.float32))
        np.testing.assert_allclose(found[1], total, rtol=3e-6)
        np.testing.assert_array_equal(found[2], at_target.astype(np.float32))


def test_a_gpu_reads_the_logits_once_for_the_loss():
    shapes = jnp.zeros((1, 8, 16)), jnp.zeros((64, 16)), jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8))
    traced = jax.jit(weighted_cross_entropy).trace(*shapes)

    def reductions(platform: str) -> list[int]:
        """Of each reduction over the vocabulary, how many it computes at once."""
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return [line.count("init:") for line in text.splitlines() if "dimensions = [1]" in line and "reduce(" in line]

    assert reductions("cuda") == [3] and reductions("tpu") == [1, 1, 1]


def test_the_gradient_is_multiplied_by_that_of_the_loss():
    hidden, unembedding, targets, weights = case()
    once, thrice = (
        jax.jit(jax.grad(lambda h, u, f=f: f * weighted_cross_entropy(h, u, targets, weights, 2), (0, 1)))(
            hidden, unembedding
        )
        for f in (1.0, 3.0)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(3 * a, b, rtol=1e-6), once, thrice)


def test_the_weighted_sum_of_bfloat16_hidden_states():
    """Logits and sums are float32; the gradient of the logits is rounded to bfloat16 before the products."""
    hidden, unembedding, targets, weights = case(jnp.bfloat16)
    loss, gradients = jax.jit(jax.value_and_grad(weighted_cross_entropy, (0, 1)), static_argnums=4)(
        hidden, unembedding, targets, weights, 2
    )
    expected = exact(hidden, unembedding.astype(jnp.bfloat16), targets, weights)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    assert loss == pytest.approx(expected[0], rel=1e-6)
    for found, right in zip(gradients, expected[1:], strict=True):
        assert np.abs(np.asarray(found, np.float64) - right).max() < 0.01 * np.abs(right).max()


def test_no_logits_are_kept_or_computed_twice():
    """By the compiled value and gradient: three matrix products, and no array of all logits."""
    arguments = (
        jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((512, 32), jnp.float32),
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        jax.ShapeDtypeStruct((4, 64), jnp.float32),
    )

    def program(chunks: int) -> str:
        loss = jax.value_and_grad(functools.partial(weighted_cross_entropy, chunks=chunks), (0, 1))
        return jax.jit(loss).lower(*arguments).compile().as_text()

    def largest(text: str) -> int:
        return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text))

    whole, parts = program(1), program(8)
    assert largest(whole) >= 4 * 64 * 512 and largest(parts) <= 4 * 64 * 512 // 8
    assert len(re.findall(r" dot\(", whole)) == len(re.findall(r" dot\(", parts)) == 3


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
        with pytest.raises(UserError, match=f"{chunks} chunks of the logits do not divide a vocabulary of {V}"):
            cross_entropy(hidden, unembedding, targets, chunks)
    with pytest.raises(UserError, match="model.loss_chunks is 0; it must be positive"):
        weighted_cross_entropy(hidden, unembedding, targets, jnp.ones(targets.shape), 0)
