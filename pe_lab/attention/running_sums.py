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

# A term is a multiple of 1/64, one of 1/8192, and a rest. Float32 sums of multiples of 1 / n are exact up to 2^24 / n:
# of the first up to 2^18, and of the second, which are 1/128 at most, of 2^18 terms.
PARTS = (64.0, 8192.0)


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
    before: Shaped[Array, " B *state"] | None = None,
    angles: bool = False,
) -> tuple[Float[Array, "B T *sums"], Shaped[Array, "B T *state"]]:
    """The sum over all tokens of a document up to and including each, and the state from which a cache goes on.

    Sums begin anew at each document: their precision is that of the document, whatever stands before it. Up to 2^18
    terms and sums of 2^18, a sum is as exact as one rounding to float32, or to 1e-5 where that is coarser. Angles are
    off by 2^-33 of a rotation for each token at most: 1e-3 rad at a million.

    Args:
      terms: float32. Infinite and NaN ones, and sums that overflow, are as in a plain sum; an angle that is not finite
        is NaN at its own token alone.
      segments: document of each token; None: one document.
      before: the state after the token before the first; None: there is none.
      angles: terms are radians; the sum is one in [-pi, pi].
    """
    parts = _split(terms, angles)
    state = _totals(parts if before is None else parts.at[:, 0].add(before), segments)
    total = _differentiable(terms, segments, angles) if before is None else _joined(state, terms, angles)
    return total, state if angles else _carried(state)


def _split(terms: Float[Array, "B T *sums"], angles: bool) -> Shaped[Array, "B T *state"]:
    """Parts of terms whose sums lose nothing: fractions of a rotation, or [..., 3] by `PARTS`, the coarsest first."""
    if angles:
        high, low = fraction_of_rotation(terms)
        return jax.lax.bitcast_convert_type(high + (low >> 31), jnp.int32)
    parts = []
    for n in PARTS:
        whole, terms = _multiple(terms, n)
        parts.append(whole)
    return jnp.stack([*parts, terms], axis=-1)


def _multiple(x: Float[Array, "*shape"], n: float) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The multiple of 1 / n next to x, and the rest. All of an x that is infinite or NaN is in the former."""
    large = ~(jnp.abs(x) < 2.0**24 / n)  # such a number is a multiple, and times n it could overflow
    whole = jnp.where(large, x, jnp.round(x * n) / n)
    return whole, jnp.where(large, 0, x - whole)


def _carried(state: Float[Array, "B T *sums 3"]) -> Float[Array, "B T *sums 3"]:
    """The same sums: what has come together in a finer part is in the coarser ones."""
    coarse, middle, rest = (state[..., n] for n in range(3))
    more, rest = _multiple(rest, PARTS[1])
    up, middle = _multiple(middle + more, PARTS[0])
    return jnp.stack([coarse + up, middle, rest], axis=-1)


def _joined(
    state: Shaped[Array, "B T *state"], terms: Float[Array, "B T *sums"], angles: bool
) -> Float[Array, "B T *sums"]:
    if angles:
        return jnp.where(jnp.isfinite(terms), radians(state), jnp.nan)  # which no integer can say
    state = _carried(state)
    return state[..., 0] + (state[..., 1] + state[..., 2])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _differentiable(
    terms: Float[Array, "B T *sums"], segments: Int[Array, "#B T"] | None, angles: bool
) -> Float[Array, "B T *sums"]:
    return _joined(_totals(_split(terms, angles), segments), terms, angles)


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
