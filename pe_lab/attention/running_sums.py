"""Sums along a sequence and tokens before a token: within documents, and in order on a mesh with a context axis."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from pe_lab.parallel import balanced_order, context_size
from pe_lab.positional.rotation import fraction_of_rotation, radians

COARSE = 64.0  # the coarse parts of terms are multiples of 1 / COARSE: their float32 sum is exact up to 2^24 / COARSE


def _chunks(length: int) -> tuple[Int[np.ndarray, " chunks"], Int[np.ndarray, " chunks"]]:
    """Which part of the sequence each equal part of the slots is, and the slots of each part of the sequence."""
    parts = context_size()
    order = np.zeros(1, np.int32) if parts == 1 else balanced_order(2 * parts, parts)
    if length % len(order):
        balanced_order(length, parts)  # says which lengths there are
    return order, np.argsort(order)


def tokens_before(
    x: Shaped[Array, "B T *axes"], n: int, segments: Int[Array, "#B T"] | None = None
) -> Shaped[Array, "B T *axes"]:
    """x of the token n places earlier in the same document; 0 where there is none.

    On a mesh with a context axis, devices exchange the n last tokens of each chunk.
    """
    order, place = _chunks(x.shape[1])
    by_chunk = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    size = by_chunk.shape[2]
    if n > size:
        return tokens_before(tokens_before(x, size, segments), n - size, segments)
    ends = by_chunk[:, :, size - n :]
    if len(order) > 1:
        ends = ends[:, place[order - 1]]
    ends = jnp.where((order > 0).reshape(-1, *[1] * (ends.ndim - 2)), ends, jnp.zeros((), x.dtype))
    found = jnp.concatenate([ends, by_chunk[:, :, : size - n]], axis=2).reshape(x.shape)
    if segments is None:
        return found
    same = tokens_before(segments, n) == segments
    return jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), found, jnp.zeros((), x.dtype))


def running_sum(
    terms: Float[Array, "B T *sums"],
    segments: Int[Array, "#B T"] | None = None,
    before: Shaped[Array, "B *state"] | None = None,
    angles: bool = False,
) -> tuple[Float[Array, "B T *sums"], Shaped[Array, "B T *state"]]:
    """The sum over all tokens of a document up to and including each, and the state from which a cache goes on.

    Sums begin anew at each document: their precision is that of the document, whatever stands before it. A sum is as
    exact as one rounding to float32, up to 2^18; angles to 2^-32 of a rotation a token, at any length.

    Args:
      terms: float32.
      segments: document of each token; None: one document.
      before: the state after the token before the first; None: there is none.
      angles: terms are radians; the sum is one in [-pi, pi].
    """
    parts = _split(terms, angles)
    state = _totals(parts if before is None else parts.at[:, 0].add(before), segments)
    total = _differentiable(terms, segments, angles) if before is None else _joined(state, angles)
    if not angles:  # what has come together of the rest belongs to the coarse part
        rest = _split(state[..., 1], angles)
        state = rest.at[..., 0].add(state[..., 0])
    return total, state


def _split(terms: Float[Array, "B T *sums"], angles: bool) -> Shaped[Array, "B T *state"]:
    """Parts of terms whose sums lose nothing: fractions of a rotation, or a coarse part [..., 0] and the rest."""
    if angles:
        high, low = fraction_of_rotation(terms)
        return jax.lax.bitcast_convert_type(high + (low >> 31), jnp.int32)
    coarse = jnp.round(terms * COARSE) / COARSE
    return jnp.stack([coarse, terms - coarse], axis=-1)


def _joined(state: Shaped[Array, "B T *state"], angles: bool) -> Float[Array, "B T *sums"]:
    return radians(state) if angles else state[..., 0] + state[..., 1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _differentiable(
    terms: Float[Array, "B T *sums"], segments: Int[Array, "#B T"] | None, angles: bool
) -> Float[Array, "B T *sums"]:
    return _joined(_totals(_split(terms, angles), segments), angles)


@_differentiable.defjvp
def _derivative(angles, primals, tangents):  # noqa: ANN001, ANN202
    # Of the plain sum: rounding, and the remainder modulo 2 pi, have no derivative of their own.
    return _differentiable(*primals, angles), _totals(tangents[0], primals[1])


def _totals(x: Shaped[Array, "B T *state"], segments: Int[Array, "#B T"] | None) -> Shaped[Array, "B T *state"]:
    """Sums of one dtype: within chunks, and of the chunks before in the order of the sequence."""
    order, place = _chunks(x.shape[1])
    split = lambda a: a.reshape(a.shape[0], len(order), -1, *a.shape[2:])  # noqa: E731
    begins = None if segments is None else split(tokens_before(segments, 1) != segments)
    total = _scanned(split(x), begins, axis=2)
    if len(order) > 1:
        closes = None if begins is None else begins.any(2)[:, place]
        upto = _scanned(total[:, :, -1][:, place], closes, axis=1)
        carried = jnp.pad(upto, ((0, 0), (1, 0), *[(0, 0)] * (upto.ndim - 2)))[:, order][:, :, None]
        if begins is not None:  # the chunk's first tokens, which go on with a document
            goes_on = ~jax.lax.associative_scan(jnp.logical_or, begins, axis=2)
            carried = jnp.where(goes_on.reshape(*goes_on.shape, *[1] * (x.ndim - 2)), carried, 0)
        total = total + carried
    return total.reshape(x.shape)


def _scanned(x: Shaped[Array, "*axes"], begins: Bool[Array, "*some"] | None, axis: int) -> Shaped[Array, "*axes"]:
    """Sums along an axis, which begin anew where `begins` is True: no large sum is taken from another one."""
    if begins is None:
        return jnp.cumsum(x, axis=axis, dtype=x.dtype)

    def joined(left: Any, right: Any) -> Any:
        (left_begins, a), (right_begins, b) = left, right
        kept = jnp.where(right_begins.reshape(*right_begins.shape, *[1] * (b.ndim - right_begins.ndim)), 0, a)
        return left_begins | right_begins, kept + b

    return jax.lax.associative_scan(joined, (jnp.broadcast_to(begins, x.shape[: begins.ndim]), x), axis=axis)[1]
