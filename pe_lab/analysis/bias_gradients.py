"""The positional bias of attention heads, its gradients, and the prefix spread of hidden states, of a loaded model.

DroPE (Gelberg et al. 2025), Definition 3.1, Figure 4, Propositions 3.2 and 3.3, Theorem 3.4.

The positional bias of one head with weights a_ij is A = (1/T) sum_i sum_{j<=i} c_ij a_ij, with centred c: for every
query i, sum_j c_ij = 0. For the pattern of a head that attends to one key p(i) of the n_i that query i sees (itself,
or the token before), c is 1 at p(i) and -1/(n_i - 1) at every other visible key. c is 0 for a query that sees no
other key, or does not see p(i): the first token, and the first of a document. As the weights of a query add up to 1,

  A = (1/T) sum_i [a_i - (1 - a_i) / (n_i - 1)] = (1/T) sum_i (n_i a_i - 1) / (n_i - 1),  a_i = a_{i,p(i)},

which needs one logit and one logsumexp of each query: no [T, T] array. A is 0 for uniform attention; 1, less the
share of queries with c = 0, for a head with all its weight on p(i).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention.hooks import refuse_hooks
from pe_lab.attention.key_block import FLOOR, AttentionInputs, masked_logits, padded
from pe_lab.attention.layer_encoding import LayerEncoding, encode_keys, encode_queries
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model import Model
from pe_lab.model.layer_pass import LayerView, checked_layers

PATTERNS = ("diagonal", "previous token")
LEAST = 3  # tokens: with fewer, no query can choose between its previous token and another one than itself
BLOCK = 128  # queries in a block of logits, which has all keys


class PositionalBias(NamedTuple):
    """The positional bias of each sequence, layer and head, toward each of the P = 2 `PATTERNS`; float32.

    Attributes:
      bias: A.
      query_gradient, key_gradient: Frobenius norms of the gradient of a head's A with respect to its own part [D, K]
        of W_Q, and the part of W_K that it reads. With grouped queries, that of W_K is of each query head apart. The
        input of the layer is fixed, so this is the direct path and not that through earlier layers.
      spread: the prefix spread of the layer's input, max_{j<=i} |mean_{k<=i} h_k - h_j|, within documents.
      hidden_norm: the root mean square of |h_j| over tokens.
    """

    bias: Float[np.ndarray, "B L H P"]
    query_gradient: Float[np.ndarray, "B L H P"]
    key_gradient: Float[np.ndarray, "B L H P"]
    spread: Float[np.ndarray, "B L"]
    hidden_norm: Float[np.ndarray, "B L"]


def positional_bias(
    lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any
) -> PositionalBias:
    """The positional bias of attention, its gradients, and the prefix spread, on a batch of sequences.

    From the input of each layer on, all is computed in float32, whatever the compute dtype: differences from uniform
    attention may be smaller than the rounding of bfloat16. Memory is linear in the length, time quadratic.

    Args:
      tokens: as `lm.logits` takes them, at least three.
      layers: None: all.
      places: `segments` and `positions` of the tokens, for packed documents.

    Raises:
      UserError: too few tokens, or a layer that does not exist.
    """
    ids = lm.sequences(tokens)
    if ids.shape[1] < LEAST:
        raise ConfigError(f"The positional bias needs sequences of at least {LEAST} tokens, not {ids.shape[1]}.")
    chosen = checked_layers(lm.config.layers, layers)
    measure = _Measure(_model(dataclasses.replace(lm.config, dtype="float32")))
    found = lm.layer_pass(ids, measure, chosen, **places)
    return PositionalBias(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


@functools.cache
def _model(config: ModelConfig) -> Model:
    """One model for each shape, so that measurements of equal shapes share compiled programs."""
    return Model(config)


@dataclasses.dataclass(frozen=True)
class _Measure:
    """The arrays of `PositionalBias` for one layer: [B, H, P] and [B]."""

    model: Model

    def __call__(self, view: LayerView, data: Any) -> tuple[jax.Array, ...]:
        # An accelerator would else round the operands of float32 products.
        with jax.default_matmul_precision("highest"):
            norm = jnp.sqrt((view.x.astype(jnp.float32) ** 2).sum(-1).mean(-1))
            return *self._bias_and_gradients(view), prefix_spread(view.x, view.segments), norm

    def _bias_and_gradients(self, view: LayerView) -> tuple[jax.Array, ...]:
        x, attention, encoding = view.x.astype(jnp.float32), view.params["attention"], view.encoding
        B, H, G = x.shape[0], view.query.shape[2], view.key.shape[2]
        refuse_hooks(encoding.hooks, "The gradient of the positional bias is measured")

        def encode(weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            block = self.model.block({**view.params, "attention": {**attention, **weights}})
            query, key, _ = block.attention.queries_keys_values(block.attention_norm(x))
            query = encode_queries(query, encoding, G) * encoding.scale(query.shape[-1])
            key = encode_keys(key, encoding, H)
            return query, jnp.repeat(key, H // key.shape[2], axis=2)

        weights = {name: attention[name].astype(jnp.float32) for name in ("query", "key")}
        (query, key), to_weights = jax.vjp(encode, weights)
        bias, to_encoded = jax.vjp(functools.partial(_biases, encoding=encoding, view=view), query, key)
        flat = self.model.config.qk_norm.endswith("flat")
        # Of each key head one query head at a time; with `flat`, one head, since others' queries depend on its weights.
        chosen = _selections(B, np.arange(H) % (H if flat else H // G))

        def of_pattern(pattern: jax.Array) -> jax.Array:
            only = jnp.zeros(bias.shape).at[pattern].set(1.0)
            d_encoded = to_encoded(only)

            def of_selection(selected: jax.Array) -> jax.Array:
                (d_weights,) = to_weights(tuple(d * selected[:, None, :, None] for d in d_encoded))
                squares = {name: (d**2).sum((0, 2)) for name, d in d_weights.items()}
                return jnp.stack([squares["query"], jnp.repeat(squares["key"], H // G)])

            squares = jax.lax.map(of_selection, chosen)
            return jnp.sqrt(jnp.einsum("cbh,cwh->wbh", chosen, squares))

        gradients = jax.lax.map(of_pattern, jnp.arange(len(PATTERNS)))  # [P, 2, B, H]
        return jnp.moveaxis(bias, 0, -1), *jnp.moveaxis(gradients, 0, -1)


def _selections(batch: int, kinds: Int[np.ndarray, " H"]) -> Float[Array, "C B H"]:
    """Parts of a batch differentiated at once: one sequence, and the heads of one kind. 1 for these, else 0."""
    of_heads = np.equal.outer(np.unique(kinds), kinds)
    both = np.eye(batch)[:, None, :, None] * of_heads[None, :, None, :]
    return jnp.asarray(both.reshape(-1, batch, len(kinds)), jnp.float32)


def _biases(
    query: Float[Array, "B T H K"], key: Float[Array, "B T H K"], encoding: LayerEncoding, view: LayerView
) -> Float[Array, "P B H"]:
    """A of every pattern, sequence and head, from encoded, scaled queries and encoded keys of every query head.

    Each block of queries is computed again for the gradient (Chen et al. 2016), so no more than a block of logits is
    ever stored.
    """
    B, T, H, K = query.shape
    t = min(BLOCK, T)
    index = jnp.arange(T, dtype=jnp.int32)
    positions = index[None] if view.positions is None else view.positions
    inputs = AttentionInputs(
        slope=encoding.slope,
        query_positions=positions,
        key_positions=positions,
        query_segments=view.segments,
        key_segments=view.segments,
        window=view.window,
    )
    keys = key.transpose(0, 2, 1, 3)
    blocks = jnp.moveaxis(padded(query.transpose(0, 2, 1, 3), 2, t).reshape(B, H, 1, -1, t, K), 3, 0)

    @jax.checkpoint
    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        begin, queries = block
        own = begin + jnp.arange(t, dtype=jnp.int32)
        these = inputs.of_tokens(lambda x: jnp.take(x, own, axis=1, mode="clip"), lambda x: x)
        logits = masked_logits(queries, keys, own[:, None] - index, these)[:, :, 0]
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        count = (logits[:, :1] > FLOOR).sum(-1).astype(jnp.float32)
        found = []
        for target in (own, own - 1):  # as in PATTERNS
            at = jnp.clip(target, 0, T - 1)[None, None, :, None]
            logit = jnp.take_along_axis(logits, at, axis=-1)[..., 0]
            counted = (logit > FLOOR) & (target >= 0) & (own < T) & (count > 1)
            weight = jnp.exp(logit - logsumexp)
            found.append(jnp.where(counted, (count * weight - 1) / jnp.maximum(count - 1, 1), 0).sum(-1))
        return jnp.stack(found)

    return jax.lax.map(of_block, (t * jnp.arange(len(blocks)), blocks)).sum(0) / T


def prefix_spread(x: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None) -> Float[Array, " B"]:
    """max_{j<=i} |mean_{k<=i} x_k - x_j| of each sequence, with j and k in the document of i; float32.

    DroPE, Theorem 3.4. Memory is linear in the length, time quadratic.
    """
    T = x.shape[1]
    t, index = min(BLOCK, T), jnp.arange(T, dtype=jnp.int32)
    x = x.astype(jnp.float32)
    x = x - x.mean(1, keepdims=True)  # changes no difference, and the rounding of their squares below
    squares = (x**2).sum(-1)

    def of_block(begin: jax.Array) -> jax.Array:
        own = jnp.minimum(begin + jnp.arange(t, dtype=jnp.int32), T - 1)
        seen = (own[:, None] >= index)[None]
        if segments is not None:
            seen = seen & (segments[:, own, None] == segments[:, None, :])
        seen = jnp.broadcast_to(seen, (len(x), t, T))
        mean = jnp.einsum("bts,bsd->btd", seen.astype(jnp.float32), x) / seen.sum(-1, keepdims=True)
        distance = (mean**2).sum(-1, keepdims=True) + squares[:, None] - 2 * jnp.einsum("btd,bsd->bts", mean, x)
        return jnp.where(seen, distance, 0).max((1, 2))

    with jax.default_matmul_precision("highest"):
        return jnp.sqrt(jax.lax.map(of_block, t * jnp.arange(-(-T // t))).max(0))
