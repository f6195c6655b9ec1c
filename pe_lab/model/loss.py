"""Cross-entropy without an array of the logits of the whole vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.errors import ConfigError
from pe_lab.parallel import constrain


def cross_entropy(
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    chunks: int = 1,
) -> Float[Array, "B T"]:
    """-log softmax(hidden @ unembedding.T)[target], in nats per token; float32.

    A loop over `chunks` parts of the vocabulary computes a running logsumexp, and a second loop the gradient. The
    output layer then needs a quarter more arithmetic and 1 / chunks of its memory. Chunk c has the tokens c,
    c + chunks, c + 2 chunks ..., so that an unembedding sharded over the vocabulary is not moved. A loop over tokens
    would save the arithmetic, but all-reduce the unembedding's gradient once per chunk.

    With one chunk, the logits [B, T, V] are kept for the gradient.
    """
    V = unembedding.shape[0]
    if chunks < 1 or V % chunks:
        raise ConfigError(f"model.loss_chunks is {chunks}; it must divide the vocabulary of {V}.")
    return _cross_entropy(hidden, unembedding, targets, chunks)


def _chunk_logits(hidden: jax.Array, weights: jax.Array) -> Float[Array, "B T Vc"]:
    logits = jnp.einsum("btd,vd->btv", hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return constrain(logits, "batch", "length", "vocab")


def _is_target(targets: jax.Array, chunk: jax.Array | int, chunks: int, width: int) -> jax.Array:
    place = jnp.where(targets % chunks == chunk, targets // chunks, -1)
    return place[..., None] == jnp.arange(width)


def _split(unembedding: jax.Array, chunks: int) -> Float[Array, "C Vc D"]:
    return jnp.moveaxis(unembedding.reshape(-1, chunks, unembedding.shape[-1]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(hidden, unembedding, targets, chunks):  # noqa: ANN001, ANN202
    return _forward_rule(hidden, unembedding, targets, chunks)[0]


def _forward_rule(hidden, unembedding, targets, chunks):  # noqa: ANN001, ANN202
    if chunks == 1:
        logits = _chunk_logits(hidden, unembedding)
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        # A comparison, because a gather from a sharded vocabulary would first collect the logits.
        at_target = jnp.where(_is_target(targets, 0, 1, logits.shape[-1]), logits, 0).sum(-1)
        return logsumexp - at_target, (hidden, unembedding, targets, logsumexp, logits)

    def step(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        highest, total, at_target = carry
        index, weights = chunk
        logits = _chunk_logits(hidden, weights)
        new_highest = jnp.maximum(highest, logits.max(-1))
        total = total * jnp.exp(highest - new_highest) + jnp.exp(logits - new_highest[..., None]).sum(-1)
        at_target += jnp.where(_is_target(targets, index, chunks, logits.shape[-1]), logits, 0).sum(-1)
        return (new_highest, total, at_target), None

    shape = targets.shape
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(shape))
    (highest, total, at_target), _ = jax.lax.scan(step, start, (jnp.arange(chunks), _split(unembedding, chunks)))
    logsumexp = highest + jnp.log(total)
    return logsumexp - at_target, (hidden, unembedding, targets, logsumexp, None)


def _backward_rule(chunks, saved, d_loss):  # noqa: ANN001, ANN202
    hidden, unembedding, targets, logsumexp, logits = saved

    def of_chunk(index: jax.Array | int, logits: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        softmax = jnp.exp(logits - logsumexp[..., None])
        d_logits = (softmax - _is_target(targets, index, chunks, logits.shape[-1])) * d_loss[..., None]
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = jnp.einsum("btv,vd->btd", d_logits, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
        # This is the transpose of the result. Without the barrier, XLA on a CPU would transpose d_logits, the largest
        # array, before the product.
        d_weights = jnp.einsum("btd,btv->dv", hidden, d_logits, preferred_element_type=jnp.float32)
        return d_hidden, jax.lax.optimization_barrier(d_weights).T

    if chunks == 1:
        d_hidden, d_unembedding = of_chunk(0, logits, unembedding)
    else:

        def step(d_hidden: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, weights = chunk
            more, d_weights = of_chunk(index, _chunk_logits(hidden, weights), weights)
            return d_hidden + more, d_weights

        start = jnp.zeros(hidden.shape, jnp.float32)
        d_hidden, parts = jax.lax.scan(step, start, (jnp.arange(chunks), _split(unembedding, chunks)))
        d_unembedding = jnp.moveaxis(parts, 0, 1).reshape(unembedding.shape)
    nothing = np.zeros(targets.shape, jax.dtypes.float0)
    return d_hidden.astype(hidden.dtype), d_unembedding.astype(unembedding.dtype), nothing


_cross_entropy.defvjp(_forward_rule, _backward_rule)
