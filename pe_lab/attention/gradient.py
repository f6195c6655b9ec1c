"""Attention to a block of keys with its gradient, from a kernel for each; and attention of whole sequences by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pe_lab.attention.key_block import (
    RESIDUALS,
    AttentionInputs,
    KeyBlockGradient,
    KeyBlockGradients,
    KeyBlockKernel,
    Keys,
    Outputs,
    PartialAttention,
    Queries,
    Values,
    with_sink,
)
from pe_lab.errors import UnsupportedError
from pe_lab.positional import rotate, rotation_tables


class Pair(NamedTuple):
    """A kernel for a block of keys, and the kernel of its gradient; None: it has none."""

    partial: KeyBlockKernel
    gradient: KeyBlockGradient | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S V"],
    inputs: AttentionInputs,
    pair: Pair,
    wide: bool = False,
) -> PartialAttention:
    """`pair.partial`, with gradients of the output and of the logsumexp.

    Queries, keys, values, slopes and biases have gradients; rotations and everything else have none.
    """
    return pair.partial(query, key, value, inputs, wide=wide)


def _forward_rule(query, key, value, inputs, pair, wide):  # noqa: ANN001, ANN202
    out, logsumexp = checkpoint_name(tuple(pair.partial(query, key, value, inputs, wide=wide)), RESIDUALS)
    return PartialAttention(out, logsumexp), (query, key, value, inputs, out, logsumexp)


def _backward_rule(pair, wide, saved, d):  # noqa: ANN001, ANN202
    query, key, value, inputs, out, logsumexp = saved
    if pair.gradient is None:
        raise UnsupportedError("attention: this kernel has no gradient.")
    inner = (d.out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d.logsumexp
    rotated, unrotate, plain = key, None, inputs
    if inputs.rotation is not None:
        # Gradients of rotated keys are rotated back; where the heads of a group rotate differently, they are summed.
        (rotated, value), unrotate = jax.vjp(functools.partial(rotated_keys, inputs=inputs), key, value)
        plain = replace(inputs, rotation=None)
    found = pair.gradient(query, rotated, value, plain, logsumexp, inner, d.out)
    d_key, d_value = found.key.astype(key.dtype), found.value.astype(value.dtype)
    if unrotate is not None:
        d_key, d_value = unrotate((d_key, d_value))
    return found.query.astype(query.dtype), d_key, d_value, gradient_of_inputs(inputs, found)


attend.defvjp(_forward_rule, _backward_rule)


def rotated_keys(
    key: Float[Array, "B G S K"], value: Float[Array, "B G S V"], inputs: AttentionInputs
) -> tuple[Float[Array, "B heads S K"], Float[Array, "B heads S V"]]:
    """Keys rotated by their index, and their values; of H heads where the heads of a group rotate differently."""
    assert inputs.rotation is not None
    positions = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
    cos, sin = rotation_tables(inputs.rotation.fixed_freq, inputs.rotation.gain, positions)
    heads = cos.shape[2]
    if heads not in (1, key.shape[1]):
        key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    return rotate(key.swapaxes(1, 2), cos, sin).swapaxes(1, 2), value


def gradient_of_inputs(inputs: AttentionInputs, found: KeyBlockGradients) -> Any:
    """The cotangents of the inputs: those that a kernel found, and zeros."""
    zeros = jax.tree.map(no_gradient, inputs)
    learned = {name: getattr(found, name) for name in ("slope", "distance_bias", "key_bias", "bias")}
    given = {name: x for name, x in learned.items() if x is not None and getattr(inputs, name) is not None}
    typed = {
        name: jax.tree.map(lambda d, like: d.astype(like.dtype), x, getattr(inputs, name)) for name, x in given.items()
    }
    return replace(zeros, **typed)


def no_gradient(x: jax.Array) -> jax.Array | np.ndarray:
    """The zero cotangent of an array."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def whole_sequence(pair: Pair) -> Callable[..., jax.Array]:
    """Attention of whole sequences, [B, T, H, K] as `reference_attention`, by a pair of kernels for a block of keys."""

    def run(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        sink, inputs = inputs.sink, replace(inputs.for_every_sequence(query.shape[0]), sink=None)
        found = attend(q, k, v, inputs, pair)
        return with_sink(found, sink, query.dtype).transpose(0, 2, 1, 3)

    return run
