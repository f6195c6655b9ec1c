"""The part of each pair of channels in queries, keys and logits, and the logits' upper bounds.

p-RoPE (Barbero et al. 2024), sections 4 and D.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.hooks import refuse_hooks
from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.attention.statistics import ArrayLike
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers

BANDS = 4  # of pairs, from the fastest to the slowest
BAND_NAMES = ("fastest quarter", "second", "third", "slowest quarter")
FIRST = 8  # tokens of p-RoPE's Tables 3 to 5
TARGETS = ("self", "previous", "first")  # the keys whose logits are compared with their bounds


class FrequencyUse(NamedTuple):
    """The use of each pair of channels, by sequence, layer and head; means over the tokens of a sequence.

    Attributes:
      inv_freq: [L, H, R] radians per token; 0 for a pair that does not rotate.
      query, key, value: 2-norms of each pair. Values are not rotated; their pairs are for comparison (D.2).
      attended: each pair's part of the mean logit of the attended keys: sum over keys of weight * part.
      average: the same for equal weights on all visible keys. `attended - average` adds up over pairs to what makes
        attended keys stand out.
    """

    inv_freq: Float[np.ndarray, "L H R"]
    query: Float[np.ndarray, "B L H R"]
    key: Float[np.ndarray, "B L G R"]
    value: Float[np.ndarray, "B L G R"]
    attended: Float[np.ndarray, "B L H R"]
    average: Float[np.ndarray, "B L H R"]


def frequency_use(
    lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any
) -> FrequencyUse:
    """The use of the rotary frequencies on a batch of sequences.

    By Cauchy-Schwarz, a pair adds at most the product of its norms in query and key to a logit (section 4). Time is
    about that of two forward passes, and memory linear in the length.

    Args:
      tokens: as `lm.logits` takes them.
      layers: None: all.
      places: `segments` and `positions` of the tokens, for packed documents.

    Raises:
      UserError: a layer that does not exist.
    """
    ids = lm.sequences(tokens)
    chosen = checked_layers(lm.config.layers, layers)
    found = lm.layer_pass(ids, measure_frequency_use, chosen, **places)
    stacked = [np.stack(arrays, 1) for arrays in zip(*found, strict=True)]
    return FrequencyUse(np.asarray(lm.schedule_for(ids.shape[1]).inv_freq)[list(chosen)], *stacked)


def pair_norms(x: Float[jax.Array, "B T heads K"]) -> Float[jax.Array, "B heads R"]:
    """The 2-norm of each pair of channels, mean over tokens, float32. Pair i is channels i and i + K/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.sqrt(first**2 + second**2).mean(1)


def by_pair(x: Float[jax.Array, "... K"], y: Float[jax.Array, "... K"]) -> Float[jax.Array, "... R"]:
    """Each pair's part of the dot product of x and y, float32."""
    product = x.astype(jnp.float32) * y.astype(jnp.float32)
    first, second = jnp.split(product, 2, axis=-1)
    return first + second


def measure_frequency_use(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    encoding, H, G = view.encoding, view.query.shape[2], view.key.shape[2]
    refuse_hooks(encoding.hooks, "The use of frequencies is measured")
    query = encode_queries(view.query, encoding, G)
    keys = encode_keys(view.key, encoding, H)
    common = dict(positions=view.positions, segments=view.segments, window=view.window)
    run = dict(implementation="chunked", chunk=view.block, backward=False, **common)
    # Attention whose values are the rotated keys: the mean attended key of every query.
    raw = jnp.repeat(view.key, keys.shape[2] // G, axis=2)
    attended = attention(view.query, raw, keys, encoding, **run)
    if view.window is None and view.segments is None:
        count = jnp.arange(1, keys.shape[1] + 1, dtype=jnp.float32)[None, :, None, None]
        average = jnp.cumsum(keys.astype(jnp.float32), axis=1) / count
        average = jnp.repeat(average, H // keys.shape[2], axis=2)
    else:
        average = attention(jnp.zeros_like(view.query), raw, keys, LayerEncoding(), **run)
    scale = encoding.scale(query.shape[-1])
    parts = (scale * by_pair(query, mean).mean(1) for mean in (attended, average))
    return pair_norms(view.query), pair_norms(view.key), pair_norms(view.value), *parts


def bands(values: Float[ArrayLike, "*axes R"]) -> Float[ArrayLike, "*axes 4"]:
    """Sums over four bands of pairs, from the fastest to the slowest."""
    np_ = jnp if isinstance(values, jax.Array) else np
    return np_.stack([part.sum(-1) for part in np_.array_split(values, BANDS, axis=-1)], -1)


class LogitBounds(NamedTuple):
    """Logits of each query with three keys: its own token's, the previous token's, and the first token's.

    Logits are those of the softmax, scaled, without ALiBi's penalty. The bound of query i with key j is |q_i| |k_j|,
    scaled alike. A token without a previous one does not count there.

    Attributes:
      logit, bound: means over the tokens of a sequence; the axis of 3 is (self, previous, first).
      alignment: mean of logit / bound, the cosine of query and key, -1 to 1.
      tightest: the largest logit / bound of any token; above 1 by rounding alone.
      parts: means of each pair's part of the logit; they add up to `logit`.
      tokens: logits and bound of the first FIRST tokens, (bound with itself, self, previous): Tables 3 to 5.
    """

    logit: Float[np.ndarray, "B L H 3"]
    bound: Float[np.ndarray, "B L H 3"]
    alignment: Float[np.ndarray, "B L H 3"]
    tightest: Float[np.ndarray, "B L H 3"]
    parts: Float[np.ndarray, "B L H 3 R"]
    tokens: Float[np.ndarray, "B L H 3 first"]


def logit_bounds(lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any) -> LogitBounds:
    """The logits of each head against their Cauchy-Schwarz bounds, on a batch of sequences of at least two tokens.

    Args:
      tokens: as `lm.logits` takes them.
      layers: None: all.
      places: `segments` and `positions` of the tokens, for packed documents, where the first token is the document's.

    Raises:
      UserError: a layer that does not exist.
    """
    found = lm.layer_pass(
        lm.sequences(tokens), measure_logit_bounds, checked_layers(lm.config.layers, layers), **places
    )
    return LogitBounds(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


def measure_logit_bounds(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    B, T, H, K = view.query.shape
    refuse_hooks(view.encoding.hooks, "Bounds of logits are measured")
    query = encode_queries(view.query, view.encoding, view.key.shape[2])
    query = query.astype(jnp.float32) * view.encoding.scale(K)
    key = encode_keys(view.key, view.encoding, H)
    key = jnp.repeat(key.astype(jnp.float32), H // key.shape[2], axis=2)
    index = jnp.arange(T)
    if view.segments is None:
        begin = jnp.zeros((B, T), jnp.int32)
    else:
        new = view.segments != jnp.pad(view.segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        begin = jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    visible = jnp.full((B, T), True) if view.window is None else index - begin < view.window
    own = jnp.full((B, T), True)
    previous = index - 1 >= begin if view.window is None else (index - 1 >= begin) & (view.window > 1)
    others = (key, jnp.roll(key, 1, axis=1), jnp.take_along_axis(key, begin[..., None, None], axis=1))
    columns = [_against(query, other, counts) for other, counts in zip(others, (own, previous, visible), strict=True)]
    logit, bound, alignment, tightest, parts, shown, shown_bound = (
        jnp.stack(column, 2) for column in zip(*columns, strict=True)
    )
    tokens = jnp.stack([shown_bound[:, :, 0], shown[:, :, 0], shown[:, :, 1]], 2)
    return logit, bound, alignment, tightest, parts, tokens


def _against(query: jax.Array, key: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
    """Means over the tokens that count, of the logits of each query with one key, and their bounds."""
    parts = by_pair(query, key)  # [B, T, H, R]
    logit = parts.sum(-1)
    bound = jnp.linalg.norm(query, axis=-1) * jnp.linalg.norm(key, axis=-1)
    cosine = logit / jnp.maximum(bound, 1e-30)
    weight = counts[..., None] / jnp.maximum(counts.sum(1), 1)[:, None, None]

    def mean(x: jax.Array) -> jax.Array:
        return (x * weight).sum(1)

    shown = jnp.where(counts[:, :FIRST, None], logit[:, :FIRST], jnp.nan).swapaxes(1, 2)
    tightest = jnp.where(counts[..., None], cosine, -jnp.inf).max(1)
    by_part = (parts * weight[..., None]).sum(1)
    return mean(logit), mean(bound), mean(cosine), tightest, by_part, shown, bound[:, :FIRST].swapaxes(1, 2)
