"""What each head attends to: attention by distance, on itself, the token before, the first token and a needle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.analysis.channel_pairs import bands, pair_norms
from pe_lab.analysis.sequences import Questions
from pe_lab.attention.statistics import attention_rows, attention_statistics
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers

NEAR = 32  # distances that have a bin each
SAMPLED = 512  # queries whose whole row of weights is binned by distance
MAP = 64  # rows and columns of a downsampled map of weights
AROUND = 32  # tokens before and after a needle's first token whose weights are kept

KINDS = ("diagonal", "previous token", "apostrophe-like", "retrieval", "sink", "semantic", "local", "mixed")
# What a kind means; the first that fits is a head's. `retrieval` needs prompts with needles.
THRESHOLDS = (
    "diagonal: mean weight on the token itself >= 0.5; previous token: on the token before >= 0.5; apostrophe-like: on "
    "the token before >= 0.5 for 2% to 50% of the queries, and the others' mean weight on the first token >= 0.5; "
    "retrieval: mean weight from the answer's queries to the needle's token >= 0.1; sink: on the first token >= 0.5; "
    f"semantic: on tokens {NEAR} or more away, the first one left out, >= 0.5; local: on the nearest {NEAR} tokens >= "
    "0.5; else mixed"
)


class Heads(NamedTuple):
    """What heads attend to; means over the queries of a sequence unless an axis of queries is named.

    Attributes:
      entropy: of the weights, nats.
      on_self, on_previous, on_first: weight of the token itself, the one before, and the first (of its document).
      largest: weight of the key with the largest.
      distance: weighted mean distance, tokens.
      previous_share: share of the queries whose weight on the token before is at least 0.5.
      first_elsewhere: mean weight on the first token of all other queries.
      far: weight on tokens at least NEAR away, without the first token.
      by_distance: weight by distance, in bins that begin at `edges`; estimated by `sampled_queries`, as is `far`.
      map: weights of these queries, summed over MAP ranges of keys and averaged over MAP ranges of queries.
      fast: the fastest quarter of pairs' share of the logits' bound, the sum over pairs of the product of their mean
        norms in query and key (p-RoPE, section 4).
      on_source, on_needle, needle_entropy, needle_first: of the queries that answer a question about a needle: weight
        on the token to repeat, on the whole needle, entropy, weight on the first token; NaN without needles.
      around: weight of these queries on the 2 * AROUND tokens around the needle's first.
    """

    entropy: Float[np.ndarray, "B L H"]
    on_self: Float[np.ndarray, "B L H"]
    on_previous: Float[np.ndarray, "B L H"]
    on_first: Float[np.ndarray, "B L H"]
    largest: Float[np.ndarray, "B L H"]
    distance: Float[np.ndarray, "B L H"]
    previous_share: Float[np.ndarray, "B L H"]
    first_elsewhere: Float[np.ndarray, "B L H"]
    far: Float[np.ndarray, "B L H"]
    by_distance: Float[np.ndarray, "B L H bins"]
    map: Float[np.ndarray, "B L H rows columns"]
    fast: Float[np.ndarray, "B L H"]
    on_source: Float[np.ndarray, "B L H"]
    on_needle: Float[np.ndarray, "B L H"]
    needle_entropy: Float[np.ndarray, "B L H"]
    needle_first: Float[np.ndarray, "B L H"]
    around: Float[np.ndarray, "B L H W"]


def edges(length: int) -> tuple[int, ...]:
    """Where bins of distance begin: 0, 1 .. NEAR - 1, then NEAR, 2 NEAR, 4 NEAR .. below the length."""
    octaves = []
    begin = NEAR
    while begin < length:
        octaves.append(begin)
        begin *= 2
    return (*range(min(NEAR, length)), *octaves)


def heads(
    lm: LanguageModel,
    tokens: Tokens,
    layers: Sequence[int] | None = None,
    *,
    questions: Questions | None = None,
    length: int | None = None,
    **places: Any,
) -> Heads:
    """What each head attends to on a batch of sequences. Memory is linear in the length.

    Args:
      tokens: as `lm.logits` takes them.
      layers: None: all.
      questions: about needles in the sequences.
      length: queries from here on are padding and do not count; None: there is none.
      places: `segments` and `positions` of the tokens, for packed documents.

    Raises:
      UserError: a layer that does not exist.
    """
    ids = lm.sequences(tokens)
    T = ids.shape[1] if length is None else length
    asked = None if questions is None else (questions.at, questions.source, questions.needle)
    measure, chosen = _Measure(T, ids.shape[1]), checked_layers(lm.config.layers, layers)
    found = lm.layer_pass(ids, measure, chosen, (*sampled_queries(T), asked), **places)
    return Heads(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


def sampled_queries(length: int) -> tuple[Int[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
    """At most SAMPLED queries, and how many of all queries each stands for, as shares that add up to 1.

    The first 2 * NEAR queries are all there: only they have the first token, where much attention goes, at a small
    distance. Of the others one is drawn from each of equal ranges. Even distances between them would make that token
    show at multiples of the distance.
    """
    if length <= SAMPLED:
        return np.arange(length, dtype=np.int32), np.full(length, 1 / length, np.float32)
    begins = np.linspace(2 * NEAR, length, SAMPLED - 2 * NEAR + 1).round().astype(np.int32)
    drawn = np.random.default_rng(0).integers(begins[:-1], begins[1:])
    queries = np.concatenate([np.arange(2 * NEAR), drawn]).astype(np.int32)
    return queries, (np.concatenate([np.ones(2 * NEAR), np.diff(begins)]) / length).astype(np.float32)


@dataclass(frozen=True)
class _Measure:
    """What `layer_pass` measures: queries up to `length` of sequences of `padded` tokens."""

    length: int
    padded: int

    def __call__(self, view: LayerView, data: Any) -> tuple[jax.Array, ...]:
        sampled, shares, asked = data
        common = dict(x=view.normed, positions=view.positions, segments=view.segments, window=view.window)
        every = None if self.length == self.padded else jnp.arange(self.length)
        found = attention_statistics(view.query, view.key, view.encoding, queries=every, block=view.block, **common)
        means = [getattr(found, name).mean(-1) for name in Heads._fields[:6]]
        at_previous = found.on_previous >= 0.5
        elsewhere = ~at_previous
        first = jnp.where(elsewhere, found.on_first, 0).sum(-1) / jnp.maximum(elsewhere.sum(-1), 1)
        binned = self._binned(view, sampled, shares, common)
        query, key = (pair_norms(x[:, : self.length]) for x in (view.query, view.key))
        bound = bands(query * jnp.repeat(key, query.shape[1] // key.shape[1], axis=1))
        fast = bound[..., 0] / jnp.maximum(bound.sum(-1), 1e-30)
        return *means, at_previous.mean(-1), first, *binned, fast, *self._needles(view, asked, common)

    def _binned(
        self, view: LayerView, sampled: jax.Array, shares: jax.Array, common: Mapping[str, Any]
    ) -> tuple[jax.Array, ...]:
        """`far`, `by_distance` and `map`, from rows of weights, NEAR queries at a time."""
        T, count = self.length, sampled.shape[0]
        ends = jnp.asarray([*edges(T)[1:], T])  # of the bins of distance
        size = min(NEAR, count)
        queries = jnp.pad(sampled, (0, -count % size), mode="edge").reshape(-1, size)
        weights = jnp.pad(shares, (0, -count % size)).reshape(queries.shape)
        column = jax.nn.one_hot(jnp.minimum(jnp.arange(self.padded) * MAP // T, MAP - 1), MAP)

        def of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            at, share = block
            rows = attention_rows(view.query, view.key, view.encoding, rows=at, **common) * share[:, None]
            # Weight up to each key, and of it what is nearer than the end of each bin.
            upto = jnp.pad(jnp.cumsum(rows, axis=-1), ((0, 0),) * 3 + ((1, 0),))
            before = jnp.maximum(at[:, None] + 1 - ends, 0)
            own = jnp.take_along_axis(upto, at[None, None, :, None] + 1, axis=-1)
            nearer = own - jnp.take_along_axis(upto, before[None, None], axis=-1)
            by_distance = jnp.diff(nearer, prepend=0, axis=-1)
            begin = jnp.zeros((1, size), jnp.int32) if view.segments is None else _document_begin(at, view.segments)
            begin = jnp.broadcast_to(begin, (rows.shape[0], size))
            first = jnp.take_along_axis(rows, begin[:, None, :, None], axis=-1)[..., 0]
            far = by_distance[..., NEAR:].sum(-1) - jnp.where((begin <= at - NEAR)[:, None], first, 0)
            return far.sum(-1), by_distance.sum(2), jnp.einsum("bhqs,sc->bhqc", rows, column, precision="highest")

        far, by_distance, maps = jax.lax.map(of_block, (queries, weights))
        maps = jnp.moveaxis(maps, 0, 2)
        maps = maps.reshape(*maps.shape[:2], -1, MAP)[:, :, :count]
        row = jax.nn.one_hot(jnp.minimum(sampled * MAP // T, MAP - 1), MAP)
        row = row / jnp.maximum((row * shares[:, None]).sum(0), 1e-30)
        return far.sum(0), by_distance.sum(0), jnp.einsum("bhqc,qr->bhrc", maps, row)

    def _needles(self, view: LayerView, asked: Any, common: Mapping[str, Any]) -> tuple[jax.Array, ...]:
        B, H = view.query.shape[0], view.query.shape[2]
        if asked is None:
            missing = jnp.full((B, H), jnp.nan)
            return *[missing] * 4, jnp.full((B, H, 2 * AROUND), jnp.nan)
        at, source, needle = asked
        # Each sequence has queries of its own; a batch has one sequence for each device.
        rows = [
            attention_rows(
                view.query[b : b + 1],
                view.key[b : b + 1],
                view.encoding,
                rows=at[b],
                **{**common, "x": view.normed[b : b + 1]},
            )
            for b in range(B)
        ]
        rows = jnp.concatenate(rows)  # [B, H, Q, T]
        index = jnp.arange(self.padded)
        on_source = jnp.take_along_axis(rows, source[:, None, :, None], axis=-1)[..., 0].mean(-1)
        within = (index >= needle[..., :1]) & (index < needle[..., 1:])  # [B, Q, T]
        on_needle = jnp.einsum("bhqs,bqs->bhq", rows, within.astype(jnp.float32), precision="highest").mean(-1)
        entropy = -jnp.where(rows > 0, rows * jnp.log(jnp.maximum(rows, 1e-37)), 0).sum(-1).mean(-1)
        places = needle[:, :, 0, None] + jnp.arange(-AROUND, AROUND)
        visible = (places >= 0) & (places < self.padded)
        around = jnp.take_along_axis(rows, jnp.clip(places, 0, self.padded - 1)[:, None], axis=-1)
        around = jnp.where(visible[:, None], around, jnp.nan).mean(2)
        return on_source, on_needle, entropy, rows[..., 0].mean(-1), around


def _document_begin(at: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, Q]: the index of the first token of each query's document."""
    return jnp.argmax(segments[:, at, None] == segments[:, None, :], axis=-1)


def kinds(means: Mapping[str, Float[np.ndarray, "L H"]]) -> np.ndarray:
    """The index in KINDS of each head's kind [L, H], by THRESHOLDS, from means over sequences."""
    m = means
    apostrophe = (m["previous_share"] >= 0.02) & (m["previous_share"] <= 0.5) & (m["first_elsewhere"] >= 0.5)
    near = m["by_distance"][..., :NEAR].sum(-1)
    rules = [
        m["on_self"] >= 0.5,
        m["on_previous"] >= 0.5,
        apostrophe,
        np.nan_to_num(m["on_source"]) >= 0.1,
        m["on_first"] >= 0.5,
        m["far"] >= 0.5,
        near >= 0.5,
        np.ones_like(near, bool),
    ]
    return np.argmax(np.stack(rules), axis=0)
