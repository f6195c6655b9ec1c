"""Statistics of attention weights, from one pass over blocks of keys with memory linear in the length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from pe_lab.attention.hooks import encoded, key_bias, position_bias, sink
from pe_lab.attention.key_block import FLOOR, MASKED, AttentionInputs, masked_logits, padded, scaled
from pe_lab.attention.layer_encoding import LayerEncoding, check_heads, encode_keys, encode_queries
from pe_lab.attention.reference import softmax
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.parallel import context_size

ArrayLike = jax.Array | np.ndarray
Indices = Sequence[int] | Int[ArrayLike, " Q"]


class AttentionStatistics(NamedTuple):
    """Statistics of attention weights; float32, one number per sequence, head and query, or a mean of such numbers.

    Attributes:
      logsumexp: log of the sum of exp(logit) over the keys that the query sees.
      entropy: of its weights, in nats; log(n) for n equal weights, 0 for a single key.
      on_self: weight of the query's own token.
      on_previous: weight of the token before; 0 if there is none, or if the query does not see it.
      on_first: weight of the first token of the sequence, or, with segments, of the query's document; 0 if it is
        outside the window.
      distance: weighted mean distance to the keys, in tokens (not in positions, which may have gaps).
      largest: the largest weight of a single key.
    """

    logsumexp: Float32[Array, "*axes"]
    entropy: Float32[Array, "*axes"]
    on_self: Float32[Array, "*axes"]
    on_previous: Float32[Array, "*axes"]
    on_first: Float32[Array, "*axes"]
    distance: Float32[Array, "*axes"]
    largest: Float32[Array, "*axes"]


def attention_statistics(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    encoding: LayerEncoding,
    *,
    x: Float[Array, "B T D"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    queries: Indices | None = None,
    block: int = 512,
) -> AttentionStatistics:
    """Statistics of the weights of `attention` for the same arguments, without a [T, T] array.

    A sink has its part of the weights, as a key at distance 0. One online softmax (Milakov & Gimelshein 2018) runs over
    the blocks of visible keys.

    Args:
      query, key, encoding, x, positions, segments, window: as in `attention`: not rotated, not scaled.
      queries: indices of the Q queries to measure; time is linear in their number. None: all T.
      block: queries and keys in a block of logits.

    Returns:
      arrays [B, H, Q].

    Raises:
      ConfigError: a query outside the sequence (unless they are traced arrays), heads that do not divide, or rotations
        that fit no heads.
      UnsupportedError: a mesh that shards sequences, or hooks that replace logits.
    """
    T = query.shape[1]
    refuse_sharded_sequences()
    queries = None if queries is None else checked_indices(queries, T, "queries")
    return _statistics(query, key, encoding, x, positions, segments, queries, window, block)


def attention_rows(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    encoding: LayerEncoding,
    *,
    rows: Indices,
    x: Float[Array, "B T D"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
) -> Float32[Array, "B H Q T"]:
    """The rows of the weight matrix with indices `rows`; other arguments as in `attention_statistics`.

    Raises:
      ConfigError, UnsupportedError: as in `attention_statistics`.
    """
    refuse_sharded_sequences()
    rows = checked_indices(rows, query.shape[1], "rows")
    return _rows(query, key, encoding, x, positions, segments, rows, window)


def refuse_sharded_sequences() -> None:
    """Raises an `UnsupportedError` on a mesh with a context axis, where tokens are reordered."""
    if context_size() > 1:
        raise UnsupportedError(
            f"Attention is not measured on sequences sharded over {context_size()} devices: use a mesh with "
            "mesh.context=1."
        )


def checked_indices(indices: Indices, length: int, what: str) -> Int[Array, " Q"]:
    """Indices of tokens as an array. Raises a `ConfigError` that names an index outside the sequence."""
    if not isinstance(indices, jax.core.Tracer):
        known = np.asarray(indices)
        if known.ndim != 1 or not known.size or known.dtype.kind not in "iu":
            raise ConfigError(f"{what}: give at least one index of a token, in a list.")
        outside = known[(known < 0) | (known >= length)]
        if outside.size:
            raise ConfigError(f"{what}: there is no token {outside[0]} in a sequence of {length}, counted from 0.")
        indices = known.astype(np.int32)
    return jnp.asarray(indices, jnp.int32)


class _EncodedAttention(NamedTuple):
    """Queries and keys, encoded, scaled and rounded as in `attention`, and what blocks of logits need of them."""

    query: Float[Array, "B G M Q K"]
    key: Float[Array, "B G T K"]
    index: Int[Array, " Q"]  # of each query in its sequence
    first: Int[Array, "#B Q"]  # the index of the first token of its segment
    inputs: AttentionInputs

    def of_queries(self, f: Callable[[jax.Array, int], jax.Array]) -> _EncodedAttention:
        """With f(array, axis of the queries) of every array of queries."""
        inputs = self.inputs.of_tokens(lambda x: f(x, 1), lambda x: x)
        return _EncodedAttention(f(self.query, -2), self.key, f(self.index, 0), f(self.first, 1), inputs)

    def of_keys(self, f: Callable[[jax.Array, int], jax.Array]) -> _EncodedAttention:
        """With f(array, axis of the keys) of every array of keys."""
        return self._replace(key=f(self.key, -2), inputs=self.inputs.of_tokens(lambda x: x, lambda x: f(x, 1)))

    def logits(self, first_key: jax.Array | int) -> Float32[Array, "B G M Q S"]:
        """The logit of every query with every key, MASKED for keys that it does not see."""
        inputs, bias = self.inputs, None
        distance = self.index[:, None] - first_key - jnp.arange(self.key.shape[2], dtype=jnp.int32)
        if inputs.bias is not None:
            H = self.query.shape[1] * self.query.shape[2]
            bias = inputs.bias.block(inputs.query_positions, inputs.key_positions, H)
        return masked_logits(self.query, self.key, distance, inputs, bias=bias)


def _encoded(
    query: jax.Array,
    key: jax.Array,
    encoding: LayerEncoding,
    x: jax.Array | None,
    positions: jax.Array | None,
    segments: jax.Array | None,
    window: int | None,
) -> _EncodedAttention:
    B, T, H, K = query.shape
    G, hooks = key.shape[2], encoding.hooks
    check_heads(H, G)
    if refused := hooks.having("logits"):
        name = type(refused[0][1].encoding).__name__
        raise UnsupportedError(f"The attention of {name} is not measured: it replaces all logits of a query.")
    index = jnp.arange(T, dtype=jnp.int32)
    at = index[None] if positions is None else positions
    query, key, inputs_of_hooks = encoded(hooks, query, key, x, at, segments)
    query = scaled(encode_queries(query, encoding, G), encoding.scale(K))
    key = encode_keys(key, encoding, H)
    G, bias = key.shape[2], position_bias(hooks)
    used = at if encoding.slope is not None or bias is not None else None
    inputs = AttentionInputs(
        slope=encoding.slope,
        query_positions=used,
        key_positions=used,
        query_segments=segments,
        key_segments=segments,
        key_bias=key_bias(hooks, inputs_of_hooks, H),
        bias=bias,
        window=window,
        soft_cap=encoding.soft_cap,
    )
    query = query.reshape(B, T, G, H // G, -1).transpose(0, 2, 3, 1, 4)
    return _EncodedAttention(query, key.transpose(0, 2, 1, 3), index, _first_of_segment(index, segments), inputs)


def _first_of_segment(index: jax.Array, segments: jax.Array | None) -> Int[Array, "#B T"]:
    """The first token with the same segment, anywhere in the row."""
    if segments is None:
        return jnp.zeros_like(index)[None]

    def of_row(segments: jax.Array) -> jax.Array:
        order = jnp.argsort(segments, stable=True)
        grouped = segments[order]
        begins = jnp.concatenate([jnp.ones(1, bool), grouped[1:] != grouped[:-1]])
        leader = jax.lax.cummax(jnp.where(begins, index, 0))
        return jnp.zeros_like(index).at[order].set(order[leader].astype(index.dtype))

    return jax.vmap(of_row)(segments)


@functools.partial(jax.jit, static_argnames="window")
def _rows(query, key, encoding, x, positions, segments, rows, window):  # noqa: ANN001, ANN202
    B, T, H = query.shape[:3]
    found = _encoded(query, key, encoding, x, positions, segments, window)
    logits = found.of_queries(lambda x, axis: jnp.take(x, rows, axis)).logits(0)
    return softmax(logits, sink(encoding.hooks, H)).reshape(B, H, len(rows), T)


@functools.partial(jax.jit, static_argnames=("window", "block"))
def _statistics(query, key, encoding, x, positions, segments, queries, window, block):  # noqa: ANN001, ANN202
    B, T, H = query.shape[:3]
    chosen = _encoded(query, key, encoding, x, positions, segments, window)
    of_sink = sink(encoding.hooks, H)
    if queries is not None:
        chosen = chosen.of_queries(lambda x, axis: jnp.take(x, queries, axis))
    Q = len(chosen.index)
    t, s = min(block, Q), min(block, T)
    # Queries are padded by copies of the last one, keys by tokens that are later than all queries.
    chosen = chosen.of_queries(lambda x, axis: padded(x, axis, t, "edge"))
    chosen = chosen.of_keys(lambda x, axis: padded(x, axis, s))

    def of_block(i: jax.Array) -> AttentionStatistics:
        asking = chosen.of_queries(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, i * t, t, axis))
        first = jnp.broadcast_to(asking.first, (asking.first.shape[0], t))
        own = jnp.broadcast_to(asking.index, first.shape)
        targets = jnp.stack([own, own - 1, first], -1)[:, None, None]  # [B or 1, 1, 1, t, 3]
        rows = asking.query.shape[:4]

        def add_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, found, weighted, sums = carry
            block = asking.of_keys(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, j * s, s, axis))
            logits = block.logits(j * s)
            here = targets - j * s
            there = jnp.take_along_axis(logits, jnp.clip(here, 0, s - 1), axis=-1)
            found = jnp.where((here >= 0) & (here < s), there, found)
            new_highest = jnp.maximum(highest, logits.max(-1))
            above = logits - new_highest[..., None]
            weights = jnp.exp(above)
            lower = highest - new_highest  # the old highest logit relative to the new one
            shrink = jnp.exp(lower)
            # A dot product, because a sum of products takes XLA on a CPU three times as long.
            add = jnp.einsum("bgmts,bgmts->bgmt", weights, above, precision="highest")
            weighted = shrink * (weighted + lower * sums[..., 0]) + add
            features = jnp.stack([jnp.ones(s), jnp.arange(s, dtype=jnp.float32)], axis=-1)
            new = jnp.einsum("bgmts,sf->bgmtf", weights, features, precision="highest")
            # Sums of places within the block are exact, where sums of indices would be rounded.
            far = (asking.index - j * s).astype(jnp.float32) * new[..., 0] - new[..., 1]
            return new_highest, found, weighted, sums * shrink[..., None] + new.at[..., 1].set(far)

        start = jnp.full(rows, FLOOR), jnp.full((*rows, 3), MASKED), jnp.zeros(rows), jnp.zeros((*rows, 2))
        if of_sink is not None:
            highest = jnp.broadcast_to(of_sink.reshape(rows[1], rows[2], 1), rows)
            start = (highest, *start[1:3], start[3].at[..., 0].set(1.0))
        lowest = first.min() if window is None else jnp.maximum(first.min(), own.min() - window + 1)
        highest, found, weighted, sums = jax.lax.fori_loop(
            jnp.maximum(lowest, 0) // s, own.max() // s + 1, add_block, start
        )
        total = sums[..., 0]
        logsumexp = highest + jnp.log(total)
        on = jnp.exp(found - logsumexp[..., None])
        entropy = jnp.maximum(jnp.log(total) - weighted / total, 0)
        return AttentionStatistics(
            logsumexp, entropy, on[..., 0], on[..., 1], on[..., 2], sums[..., 1] / total, 1 / total
        )

    def joined(x: jax.Array) -> jax.Array:  # [blocks, B, G, M, t] -> [B, H, Q]
        return jnp.moveaxis(x, 0, -2).reshape(B, H, -1)[..., :Q]

    return jax.tree.map(joined, jax.lax.map(of_block, jnp.arange(len(chosen.index) // t)))
