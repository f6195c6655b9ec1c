"""Statistics of the attention of every layer and head of a model over a sequence, of any length."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.attention import attention
from pe_lab.attention.statistics import (
    ArrayLike,
    Indices,
    Ranges,
    Statistics,
    Summary,
    attention_rows,
    attention_statistics,
    checked_indices,
    checked_ranges,
    octaves,
    refuse_sharded_sequences,
    summarize,
)
from pe_lab.errors import ConfigError
from pe_lab.model import Model, Params
from pe_lab.model.decoder import layer_arrays
from pe_lab.positional import LayerStructure, Schedule


class AttentionUse(NamedTuple):
    """Statistics of layers and heads, averaged over sequences and queries; numpy, float32.

    Attributes:
      layers: the L layers measured, in order.
      mean: arrays [L, H], `in_ranges` [S, L, H].
      by_octave: arrays [L, H, O], `in_ranges` [S, L, H, O], by the query's index; NaN in an octave without any query.
      octaves: O + 1 indices, where octaves of queries begin and the last one ends: 0, 2, 4, 8, .. T.
      rows: by layer, the weights [B, H, Q, T] of the queries asked for.
    """

    layers: tuple[int, ...]
    mean: Statistics
    by_octave: Statistics
    octaves: tuple[int, ...]
    rows: dict[int, Float[np.ndarray, "B H Q T"]]


def attention_use(
    model: Model,
    params: Params,
    tokens: Int[ArrayLike, "B T"],
    schedule: Schedule,
    *,
    positions: Int[ArrayLike, "#B T"] | None = None,
    segments: Int[ArrayLike, "B T"] | None = None,
    spans: Ranges = (),
    queries: Indices | None = None,
    layers: Sequence[int] | None = None,
    rows: Mapping[int, Indices] | None = None,
) -> AttentionUse:
    """Computes the attention statistics of every layer over a batch of sequences.

    All layers of one structure share a compiled program, whatever the depth. Only the means of a layer leave the
    device, and no [T, T] array is made: memory is linear in T.

    Args:
      model, params, tokens, positions, segments, schedule: as `Model.hidden` takes them.
      spans: ranges of token indices (a needle, the question), first and last + 1, whose weights are added up.
      queries: indices of the queries that are averaged over; None: all. Few cost less than all.
      layers: which to measure; None: all. Those above the last one are not computed.
      rows: layer -> indices of queries, whose weights to all T tokens are returned: B * H * T numbers each. These
        layers are measured, too.

    Raises:
      UserError: a schedule for another model; a span, query or row outside the sequence; a layer that does not exist;
        a mesh that shards sequences.
    """
    T = tokens.shape[1]
    refuse_sharded_sequences()
    # Traced and not computed, for the errors of a schedule that does not fit.
    jax.eval_shape(functools.partial(model.hidden, schedule=schedule), params, tokens, positions, segments)
    rows = {n: checked_indices(at, T, "rows") for n, at in (rows or {}).items()}
    measured = sorted({*(range(model.config.layers) if layers is None else layers), *rows})
    for n in measured:
        if not 0 <= n < model.config.layers:
            raise ConfigError(f"There is no layer {n} to measure; the model has {model.config.layers}, counted from 0.")
    if not measured:
        raise ConfigError("There is no layer to measure: name one in layers or in rows.")
    spans = checked_ranges(spans, T)
    queries = None if queries is None else checked_indices(queries, T, "queries")
    positions, segments = (None if x is None else jnp.asarray(x) for x in (positions, segments))
    stacked = (params["layers"], layer_arrays(jax.tree.map(jnp.asarray, schedule)))

    x = _embed(model, params, jnp.asarray(tokens))
    found, weights = [], {}
    for n in range(measured[-1] + 1):
        at, measure = (jnp.int32(n), positions, segments, spans, queries, rows.get(n)), n in measured
        x, summary, at_rows = _layer(model, schedule.structure[n], measure, x, stacked, *at)
        if summary is not None:
            found.append(summary)
        if at_rows is not None:
            weights[n] = np.asarray(at_rows)
    mean, by_octave = (_stacked([getattr(one, name) for one in found]) for name in Summary._fields)
    return AttentionUse(tuple(measured), mean, by_octave, tuple(octaves(T)), weights)


def _stacked(statistics: Sequence[Statistics]) -> Statistics:
    """One set of statistics with an axis over layers before that over heads."""
    columns = zip(Statistics._fields, zip(*jax.device_get(statistics), strict=True), strict=True)
    return Statistics(*(np.stack(column, int(name == "in_ranges")) for name, column in columns))


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    return model.embed(params, tokens)


# Each layer's output replaces its input in memory, whatever the depth of the model.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _layer(
    model: Model,
    structure: LayerStructure,
    measure: bool,
    x: Float[jax.Array, "B T D"],
    stacked: tuple[Params, tuple[jax.Array, ...]],
    n: Int[jax.Array, ""],
    positions: Int[jax.Array, "#B T"] | None,
    segments: Int[jax.Array, "B T"] | None,
    spans: Int[jax.Array, "S 2"],
    queries: Int[jax.Array, " Q"] | None,
    rows: Int[jax.Array, " Q2"] | None,
) -> tuple[Float[jax.Array, "B T D"], Summary | None, Float[jax.Array, "B H Q2 T"] | None]:
    """The output of layer n, the summary of its statistics if `measure`, and the attention weights of `rows`."""
    # The layer's number is data, so that all layers of a structure share a program.
    params, arrays = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, n, keepdims=False), stacked)
    at = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
    row = model.layer_encoding(arrays, structure, at)
    common = dict(positions=positions, segments=segments, window=structure.window)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[Summary | None, jax.Array | None]]:
        chunk = model.config.attention_chunk
        out = attention(q, k, v, row, implementation="auto", chunk=chunk, backward=False, **common)
        summary = weights = None
        if measure:
            statistics = attention_statistics(q, k, row, ranges=spans, queries=queries, block=chunk, **common)
            summary = summarize(statistics, x.shape[1], queries)
        if rows is not None:
            weights = attention_rows(q, k, row, rows=rows, **common)
        return out, (summary, weights)

    x, (summary, weights) = model.block(params).attend_by(x, attend)
    return x, summary, weights
