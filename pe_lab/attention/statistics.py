"""What heads attend to, measured in one pass over blocks of keys: memory is linear in the length, as attention's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from pe_lab.attention.key_block import FLOOR, MASKED
from pe_lab.attention.layer_encoding import Row, encode_keys, encode_queries
from pe_lab.errors import UserError
from pe_lab.parallel import context_size

ArrayLike = jax.Array | np.ndarray
Spans = Sequence[tuple[int, int]] | Int[ArrayLike, "S 2"]
Indices = Sequence[int] | Int[ArrayLike, " Q"]


class Statistics(NamedTuple):
    """What queries attend to; float32, one number per text, head and query, or a mean of such numbers.

    Attributes:
      log_sum: log of the sum of exp(logit) over the keys that the query sees.
      entropy: of its weights, in nats; log(n) where it attends to n keys alike, 0 where to a single one.
      on_self: weight of the query's own token.
      on_previous: weight of the token before; 0 where there is none, or the query does not see it.
      on_first: weight of the first token of the text, or with segments of the query's own; 0 beyond a window.
      in_spans: weights of the keys of each span, added up.
      distance: mean distance to what it attends to, in tokens of the text (not in positions, which may be spread).
      largest: the largest weight of a single key.
    """

    logsumexp: Float32[Array, "*axes"]
    entropy: Float32[Array, "*axes"]
    on_self: Float32[Array, "*axes"]
    on_previous: Float32[Array, "*axes"]
    on_first: Float32[Array, "*axes"]
    in_spans: Float32[Array, "S *axes"]
    distance: Float32[Array, "*axes"]
    largest: Float32[Array, "*axes"]


class Summary(NamedTuple):
    """Means over texts and queries.

    Attributes:
      mean: arrays [H], `in_spans` [S, H].
      by_octave: arrays [H, O], `in_spans` [S, H, O], by the query's index (see `octaves`); NaN in an octave without
        any query.
    """

    mean: Statistics
    by_octave: Statistics


def attention_statistics(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    row: Row,
    *,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    spans: Spans = (),
    queries: Indices | None = None,
    block: int = 512,
) -> Statistics:
    """Statistics of the weights that `attention` gives to the same arguments, without a [T, T] array.

    One online softmax (Milakov & Gimelshein 2018) per query, over the blocks of keys that it may see. Sums of
    weights, of weighted logits and of weighted distances are kept relative to the highest logit so far.

    Args:
      query, key, row, positions, segments, window: as `attention` takes them: not rotated, not scaled.
      soft_cap: logits become soft_cap * tanh(logit / soft_cap), before slopes and masks.
      spans: ranges of key indices, first and last + 1, alike for all texts; they may overlap.
      queries: indices of the Q queries to look at; time follows their number. None: all T.
      block: queries and keys in a block of logits.

    Returns:
      arrays [B, H, Q], `in_spans` [S, B, H, Q].

    Raises:
      UserError: a span or a query outside the text (where they are no traced arrays), heads that do not divide,
        rotations that fit no heads, or a mesh that cuts texts.
    """
    T = query.shape[1]
    refuse_cut_texts()
    spans = checked_spans(spans, T)
    queries = None if queries is None else checked_indices(queries, T, "queries")
    return _statistics(query, key, row, positions, segments, spans, queries, window, soft_cap, block)


def attention_rows(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    row: Row,
    *,
    rows: Indices,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float32[Array, "B H Q T"]:
    """The weights of a few queries, of indices `rows`, to all keys; other arguments as in `attention_statistics`.

    Raises:
      UserError: a row outside the text, and what `attention_statistics` raises.
    """
    refuse_cut_texts()
    rows = checked_indices(rows, query.shape[1], "rows")
    return _rows(query, key, row, positions, segments, rows, window, soft_cap)


def octaves(length: int) -> list[int]:
    """Where octaves of query indices begin, and where the last one ends: 0, 2, 4, 8, .. length. Octave 0 is 0 and 1."""
    return [0, *(2**k for k in range(1, length.bit_length()) if 2**k < length), length]


def summarize(statistics: Statistics, length: int, queries: Int[ArrayLike, " Q"] | None = None) -> Summary:
    """Means over texts and queries, of all of them and by octave.

    Args:
      statistics: of B texts and Q queries.
      length: T of the texts.
      queries: the indices they are of; None: all T.
    """
    begins = jnp.asarray(octaves(length))
    queries = jnp.arange(length) if queries is None else jnp.asarray(queries)
    within = ((queries[:, None] >= begins[:-1]) & (queries[:, None] < begins[1:])).astype(jnp.float32)
    count = within.sum(0)

    def by_octave(x: jax.Array) -> jax.Array:
        total = jnp.einsum("...bhq,qo->...ho", x, within, precision="highest")
        return jnp.where(count > 0, total / (x.shape[-3] * jnp.maximum(count, 1)), jnp.nan)

    return Summary(jax.tree.map(lambda x: x.mean((-3, -1)), statistics), jax.tree.map(by_octave, statistics))


def refuse_cut_texts() -> None:
    """A `UserError` on a mesh with a context axis, where tokens do not lie in the order of the text."""
    if context_size() > 1:
        raise UserError(
            f"Attention is not measured on texts cut over {context_size()} devices: use a mesh with mesh.context=1."
        )


def checked_spans(spans: Any, length: int) -> Int[Array, "S 2"]:
    """Spans as an array, or a `UserError` that names the one that is no range within the text."""
    if not isinstance(spans, jax.core.Tracer):
        known = np.asarray(spans)
        if known.size and (known.ndim != 2 or known.shape[1] != 2 or known.dtype.kind not in "iu"):
            raise UserError("spans: give pairs of whole numbers: the first key of a span, and the last plus one.")
        for first, end in known.reshape(-1, 2).tolist():
            if not 0 <= first < end <= length:
                raise UserError(f"spans: {first} to {end} is no range within a text of {length} tokens.")
        spans = known.astype(np.int32).reshape(-1, 2)
    return jnp.asarray(spans, jnp.int32)


def checked_indices(indices: Indices, length: int, what: str) -> Int[Array, " Q"]:
    """Indices of tokens as an array, or a `UserError` that names the one outside the text."""
    if not isinstance(indices, jax.core.Tracer):
        known = np.asarray(indices)
        if known.ndim != 1 or not known.size or known.dtype.kind not in "iu":
            raise UserError(f"{what}: give at least one index of a token, in a list.")
        outside = known[(known < 0) | (known >= length)]
        if outside.size:
            raise UserError(f"{what}: there is no token {outside[0]} in a text of {length}, counted from 0.")
        indices = known.astype(np.int32)
    return jnp.asarray(indices, jnp.int32)


class _Tokens(NamedTuple):
    """Queries or keys, and what blocks need beside them. None = absent.

    Attributes:
      vectors: rotated; queries [B, G, M, T, K], scaled, where M share a key head; keys [B, G, T, K].
      index: [T] of the token in its text.
      positions, segments: [B or 1, T].
      self_bias, first: [B or 1, T] of queries only; `first` is the index of the first token of their segment.
    """

    vectors: jax.Array
    index: jax.Array
    positions: jax.Array | None = None
    segments: jax.Array | None = None
    diagonal_bias: jax.Array | None = None
    first: jax.Array | None = None

    def each(self, f: Callable[[jax.Array, int], jax.Array]) -> _Tokens:
        """f(array, axis of the tokens) of every array."""
        return _Tokens(f(self.vectors, -2), *(None if x is None else f(x, -1) for x in self[1:]))


def _queries_and_keys(
    query: jax.Array, key: jax.Array, row: Row, positions: jax.Array | None, segments: jax.Array | None
) -> tuple[_Tokens, _Tokens]:
    """All tokens as `attention` would multiply them."""
    B, T, H, K = query.shape
    if H % key.shape[2]:
        raise UserError(f"attention: {H} query heads do not divide into {key.shape[2]} key-value heads.")
    query, key = encode_queries(query, row, key.shape[2], positions), encode_keys(key, row, H, positions)
    G, index = key.shape[2], jnp.arange(T, dtype=jnp.int32)
    if positions is None:
        positions = index[None]
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    # Rounded as attention rounds it.
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    queries = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    positions = positions if row.slope is not None else None
    return (
        _Tokens(queries, index, positions, segments, row.diagonal_bias, _first_of_segment(index, segments)),
        _Tokens(key.transpose(0, 2, 1, 3), index, positions, segments),
    )


def _first_of_segment(index: jax.Array, segments: jax.Array | None) -> Int[Array, "#B T"]:
    """The first token with the same segment, wherever in the row it lies."""
    if segments is None:
        return jnp.zeros_like(index)[None]

    def of_text(segments: jax.Array) -> jax.Array:
        order = jnp.argsort(segments, stable=True)
        grouped = segments[order]
        begins = jnp.concatenate([jnp.ones(1, bool), grouped[1:] != grouped[:-1]])
        leader = jax.lax.cummax(jnp.where(begins, index, 0))
        return jnp.zeros_like(index).at[order].set(order[leader].astype(index.dtype))

    return jax.vmap(of_text)(segments)


def _logits(
    queries: _Tokens, keys: _Tokens, slope: jax.Array | None, window: int | None, soft_cap: float | None
) -> Float32[Array, "B G M T S"]:
    """Every query's logit with every key, MASKED where it does not see it."""
    logits = jnp.einsum("bgmtk,bgsk->bgmts", queries.vectors, keys.vectors, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    distance = queries.index[:, None] - keys.index[None, :]
    if slope is not None and queries.positions is not None and keys.positions is not None:
        far = queries.positions[:, :, None] - keys.positions[:, None, :]
        logits -= slope.reshape(*logits.shape[1:3], 1, 1) * far[:, None, None].astype(jnp.float32)
    if queries.diagonal_bias is not None:
        logits += jnp.where(distance == 0, queries.diagonal_bias[:, :, None], 0)[:, None, None]
    mask = (distance >= 0)[None] if window is None else ((distance >= 0) & (distance < window))[None]
    if queries.segments is not None and keys.segments is not None:
        mask = mask & (queries.segments[:, :, None] == keys.segments[:, None, :])
    return jnp.where(mask[:, None, None], logits, MASKED)


@functools.partial(jax.jit, static_argnames=("window", "soft_cap"))
def _rows(query, key, row, positions, segments, rows, window, soft_cap):  # noqa: ANN001, ANN202
    B, T, H = query.shape[:3]
    queries, keys = _queries_and_keys(query, key, row, positions, segments)
    queries = queries.each(lambda x, axis: jnp.take(x, rows, axis))
    logits = _logits(queries, keys, row.slope, window, soft_cap)
    return jax.nn.softmax(logits, axis=-1).reshape(B, H, len(rows), T)


@functools.partial(jax.jit, static_argnames=("window", "soft_cap", "block"))
def _statistics(query, key, row, positions, segments, spans, queries, window, soft_cap, block):  # noqa: ANN001, ANN202
    B, T, H = query.shape[:3]
    chosen, keys = _queries_and_keys(query, key, row, positions, segments)
    if queries is not None:
        chosen = chosen.each(lambda x, axis: jnp.take(x, queries, axis))
    Q = len(chosen.index)
    t, s = min(block, Q), min(block, T)
    # Queries are padded by the last one again, keys by what is later than all queries.
    chosen = chosen.each(lambda x, axis: _padded(x, axis, t, "edge"))
    keys = keys.each(lambda x, axis: _padded(x, axis, s, "constant"))._replace(index=jnp.arange(T + -T % s))

    def of_block(i: jax.Array) -> Statistics:
        asking = chosen.each(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, i * t, t, axis))
        first = jnp.broadcast_to(asking.first, (asking.first.shape[0], t))
        own = jnp.broadcast_to(asking.index, first.shape)
        targets = jnp.stack([own, own - 1, first], -1)[:, None, None]  # [B or 1, 1, 1, t, 3]
        rows = asking.vectors.shape[:4]

        def add_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, found, weighted, sums = carry
            seen = keys.each(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, j * s, s, axis))
            logits = _logits(asking, seen, row.slope, window, soft_cap)
            here = targets - j * s
            there = jnp.take_along_axis(logits, jnp.clip(here, 0, s - 1), axis=-1)
            found = jnp.where((here >= 0) & (here < s), there, found)
            new_highest = jnp.maximum(highest, logits.max(-1))
            above = logits - new_highest[..., None]
            weights = jnp.exp(above)
            lower = highest - new_highest  # what old logits now are, relative to the highest
            shrink = jnp.exp(lower)
            # As a dot product: a sum of products made XLA on a CPU take three times as long over a block.
            add = jnp.einsum("bgmts,bgmts->bgmt", weights, above, precision="highest")
            weighted = shrink * (weighted + lower * sums[..., 0]) + add
            in_spans = (seen.index[:, None] >= spans[:, 0]) & (seen.index[:, None] < spans[:, 1])
            one, place = jnp.ones((s, 1)), jnp.arange(s, dtype=jnp.float32)[:, None]
            features = jnp.concatenate([one, place, in_spans], axis=-1)
            new = jnp.einsum("bgmts,sf->bgmtf", weights, features, precision="highest")
            # Places within the block are small numbers, whose sums are exact where those of indices would round.
            far = (asking.index - j * s).astype(jnp.float32) * new[..., 0] - new[..., 1]
            return new_highest, found, weighted, sums * shrink[..., None] + new.at[..., 1].set(far)

        start = (
            jnp.full(rows, FLOOR),
            jnp.full((*rows, 3), MASKED),
            jnp.zeros(rows),
            jnp.zeros((*rows, 2 + len(spans))),
        )
        lowest = first.min() if window is None else jnp.maximum(first.min(), own.min() - window + 1)
        highest, found, weighted, sums = jax.lax.fori_loop(
            jnp.maximum(lowest, 0) // s, own.max() // s + 1, add_block, start
        )
        total = sums[..., 0]
        logsumexp = highest + jnp.log(total)
        on = jnp.exp(found - logsumexp[..., None])
        entropy = jnp.maximum(jnp.log(total) - weighted / total, 0)
        in_spans = jnp.moveaxis(sums[..., 2:] / total[..., None], -1, 0)
        return Statistics(
            logsumexp, entropy, on[..., 0], on[..., 1], on[..., 2], in_spans, sums[..., 1] / total, 1 / total
        )

    def joined(x: jax.Array, axis: int) -> jax.Array:  # [blocks, (S,) B, G, M, t] -> [(S,) B, H, Q]
        x = jnp.moveaxis(x, 0, -2)
        return x.reshape(*x.shape[: axis + 1], H, x.shape[-2] * t)[..., :Q]

    found = jax.lax.map(of_block, jnp.arange(len(chosen.index) // t))
    return Statistics(*(joined(x, name == "in_spans") for name, x in zip(Statistics._fields, found, strict=True)))


def _padded(x: jax.Array, axis: int, size: int, mode: str) -> jax.Array:
    axis %= x.ndim
    return jnp.pad(x, [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)], mode=mode)
