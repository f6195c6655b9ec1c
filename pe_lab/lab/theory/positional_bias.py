"""DroPE's attention positional bias A^c (Definition 3.1), with its gradients, measured in small pe_lab models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.attention.statistics import attention_rows
from pe_lab.config import ModelConfig
from pe_lab.model import Model, Params
from pe_lab.model.decoder import layer_arrays
from pe_lab.positional import Encoding, Layer, LayerStructure, Schedule, build_schedule

ArrayLike = jax.Array | np.ndarray
VOCABULARY, LAYERS, WIDTH, HEADS, LENGTH = 32, 3, 32, 2, 256


@functools.cache
def small_model() -> Model:
    """A pre-norm decoder in float32 whose weight matrices keep the norm of a vector on average."""
    return Model(
        ModelConfig(
            vocab_size=VOCABULARY,
            layers=LAYERS,
            d_model=WIDTH,
            d_ff=2 * WIDTH,
            heads=HEADS,
            kv_heads=HEADS,
            dtype="float32",
            init_std=WIDTH**-0.5,
            scaled_residual_init=False,
            attention="reference",
        )
    )


def schedule_of(encoding: Encoding) -> Schedule:
    """The schedule of `small_model` with this encoding in all layers."""
    return jax.tree.map(jnp.asarray, build_schedule([Layer(encoding)] * LAYERS, HEADS, HEADS, WIDTH // HEADS))


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Model, key: jax.Array) -> Params:
    return model.init(key)


@functools.cache
def initial_parameters(seed: int) -> Params:
    """The parameters of `small_model` at initialization."""
    return _init(small_model(), jax.random.key(seed))


def positional_weights(length: int, pattern: Literal["diagonal", "previous"]) -> Float[np.ndarray, "T T"]:
    """The weights c_ij of a pattern: 1 at its key and -1/(i - 1) at the i - 1 others (Definition 3.1).

    The first row is 0: the first query has one key only, and no other weight is centred.
    """
    rows = np.arange(1, length + 1)[:, None]
    weights = np.tril(np.broadcast_to(-1.0 / np.maximum(rows - 1, 1), (length, length)))
    offset = 0 if pattern == "diagonal" else -1
    np.fill_diagonal(weights[-offset:], 1.0)
    weights[0] = 0.0
    return weights


def positional_bias(
    weights: Float[np.ndarray, "*batch T T"], c: Float[np.ndarray, "T T"]
) -> Float[np.ndarray, "*batch"] | float:
    """A^c of attention weights: the mean over queries of sum_j c_ij alpha_ij (Definition 3.1)."""
    return (np.asarray(weights, np.float64) * c).sum((-2, -1)) / len(c)


def prefix_spread(hidden: Float[np.ndarray, "*batch T D"]) -> Float[np.ndarray, "*batch"] | float:
    """The largest distance between a hidden state and the mean of a prefix that contains it (Theorem 3.4), in float64.

    Spreads of 1e-9 are measured here. `prefix_spread` of `pe_lab.analysis.positional_bias` is float32, with memory
    linear in the length.
    """
    h = np.asarray(hidden, np.float64)
    h = h - h[..., :1, :]  # so that small differences are not lost in squares
    means = np.cumsum(h, axis=-2) / np.arange(1, h.shape[-2] + 1)[:, None]
    squares = (means**2).sum(-1)[..., :, None] + (h**2).sum(-1)[..., None, :] - 2 * means @ np.swapaxes(h, -1, -2)
    return np.sqrt(np.maximum(np.where(np.tri(h.shape[-2], dtype=bool), squares, 0), 0).max((-2, -1)))


class LayerMeasurement(NamedTuple):
    """What one attention block did to a batch of B sequences, for C sets of positional weights c.

    Attributes:
      hidden: [B, T, D], the input of the projections (after the norm).
      weights: [B, H, T, T], the attention weights.
      bias: [B, C, H], the sum over i, j of c_ij alpha_ij.
      query_gradient, key_gradient: [B, C, H], norms of its gradients by the head's own projections; `hidden` is fixed.
    """

    hidden: Float[ArrayLike, "B T D"]
    weights: Float[ArrayLike, "B H T T"]
    bias: Float[ArrayLike, "B C H"]
    query_gradient: Float[ArrayLike, "B C H"]
    key_gradient: Float[ArrayLike, "B C H"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def measured_layer(
    model: Model,
    structure: LayerStructure,
    block_params: Params,
    arrays: tuple[jax.Array, ...],
    x: Float[Array, "B T D"],
    c: Float[Array, "C T T"],
) -> tuple[Float[Array, "B T D"], LayerMeasurement]:
    """The output of a layer, and the measurement of its attention."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    encoding = model.layer_encoding(arrays, structure, positions)
    block = model.block(block_params)
    hidden = block.attention_norm(x)
    query, key, _ = block.attention.queries_keys_values(hidden)
    every = jnp.arange(x.shape[1], dtype=jnp.int32)
    weights = attention_rows(query, key, encoding, rows=every)

    def bias(projections: Mapping[str, jax.Array], one: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A^c of every head of one sequence; heads have separate projections, so the sum separates their gradients."""
        changed = {**block_params, "attention": {**block_params["attention"], **projections}}
        q, k, _ = model.block(changed).attention.queries_keys_values(one[None])
        by_head = jnp.einsum("hts,ts->h", attention_rows(q, k, encoding, rows=every)[0], c, precision="highest")
        return by_head.sum(), by_head

    both = jax.vmap(jax.grad(bias, has_aux=True), (None, None, 0))
    projections = {name: block_params["attention"][name] for name in ("query", "key")}
    gradients, biases = jax.vmap(both, (None, 0, None))(projections, hidden, c)
    norms = {name: jnp.sqrt((g**2).sum((-3, -1))) for name, g in gradients.items()}  # [B, C, D, H, K]
    output, *_ = block(x, encoding, positions, None, structure.window)
    return output, LayerMeasurement(hidden, weights, biases, norms["query"], norms["key"])


def measured_layers(
    params: Params, encoding: Encoding, embedded: Float[np.ndarray, "B T D"], c: Float[np.ndarray, "C T T"]
) -> list[LayerMeasurement]:
    """Every layer's measurement in NumPy, from the input of the first one; at most 5 sequences and 6 matrices.

    `c` includes the factor 1 / T of A^c.
    """
    model, schedule = small_model(), schedule_of(encoding)
    # One program serves all: fewer sequences and matrices are padded with copies.
    inputs = (jnp.asarray(np.resize(a, (size, *a.shape[1:])), jnp.float32) for a, size in ((embedded, 5), (c, 6)))
    x, c_padded = inputs
    found = []
    for n in range(LAYERS):
        data = jax.tree.map(lambda a, n=n: jnp.asarray(a[n]), (params["layers"], layer_arrays(schedule)))
        x, measured = measured_layer(model, schedule.structure[n], *data, x, c_padded)
        measured = [np.asarray(a)[: len(embedded)] for a in measured]
        found.append(LayerMeasurement(*measured[:2], *(a[:, : len(c)] for a in measured[2:])))
    return found


def embeddings_near_one_vector(
    seed: int, deviations: Float[np.ndarray, " B"], tokens: int = LENGTH
) -> Float[np.ndarray, "B T D"]:
    """Embedded random tokens: one common vector plus `deviation` times a vector of each token of the vocabulary."""
    rng = np.random.default_rng((seed, 34))
    common, own = rng.standard_normal(WIDTH), rng.standard_normal((VOCABULARY, WIDTH))
    chosen = own[rng.integers(0, VOCABULARY, tokens)]
    return (common + np.asarray(deviations)[:, None, None] * chosen).astype(np.float32)
