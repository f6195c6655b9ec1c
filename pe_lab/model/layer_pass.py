"""A forward pass, layer by layer, with a measurement inside each layer; memory does not grow with the depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.hooks import encoded
from pe_lab.attention.statistics import refuse_sharded_sequences
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model.decoder import Model, Params, layer_arrays
from pe_lab.model.learned import learned_of_layer, split_layers
from pe_lab.model.modules import KeysValues, LayerInputs
from pe_lab.model.shape import stacked_blocks
from pe_lab.positional import LayerStructure, Schedule


class LayerView(NamedTuple):
    """What a measurement sees of one layer; `positions`, `segments` and `window` as in `attention`.

    Attributes:
      x: the input of the layer, the residual stream.
      normed: the input of its attention, after the norm.
      query, key, value: projected and normalized, not rotated, not scaled.
      number: of the layer; traced, so that all layers of a structure share a program.
      block: tokens of a block, for measurements in blocks.
    """

    x: Float[Array, "B T D"]
    normed: Float[Array, "B T D"]
    query: Float[Array, "B T H K"]
    key: Float[Array, "B T G K"]
    value: Float[Array, "B T G K"]
    encoding: LayerEncoding
    positions: Int[Array, "#B T"] | None
    segments: Int[Array, "B T"] | None
    window: int | None
    params: Params
    number: Int[Array, ""]
    block: int


def hook_encoded(view: LayerView) -> tuple[Float[Array, "B T H any"], Float[Array, "B T heads any"]]:
    """The queries and keys of a layer after the `encode` hooks of its encodings, neither rotated nor scaled."""
    return encoded(view.encoding.hooks, view.query, view.key, view.normed, view.positions, view.segments)[:2]


Measure = Callable[[LayerView, Any], Any]


class Stream(NamedTuple):
    """What a layer takes from those before it.

    Attributes:
      x: the residual stream.
      keys_values: of the layers to whose keys later ones attend, by their number.
      embedded: what each layer takes of the tokens, where the model has such inputs.
    """

    x: Float[Array | np.ndarray, "B T D"]
    keys_values: dict[int, KeysValues] = {}  # noqa: RUF012
    embedded: tuple[Float[Array | np.ndarray, "B T P"], ...] = ()


@functools.cache
def forward_model(config: ModelConfig) -> Model:
    """One model without gradients for each shape, so that measurements of equal shapes share compiled programs."""
    return Model(config, backward=False)


def layer_pass(
    model: Model,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    schedule: Schedule,
    measure: Measure,
    *,
    layers: Sequence[int] | None = None,
    positions: Int[Array | np.ndarray, "#B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    data: Any = None,
) -> Iterator[tuple[int, Any]]:
    """Yields (n, what `measure` returned, as numpy arrays) for each chosen layer n, in order.

    All layers of one structure share a compiled program, whatever the depth. Layers above the last one are not
    computed.

    Args:
      params, tokens, schedule, positions, segments: as `Model.hidden` takes them.
      measure: (view, data) -> a pytree of arrays, in a compiled program. It is part of the program's identity: pass a
        function of a module or a frozen dataclass, not a new lambda for each call.
      layers: which to measure; None: all.
      data: arrays for `measure`, in any pytree.

    Raises:
      UserError: a schedule for another model, a layer that does not exist, or a mesh that shards sequences.
    """
    refuse_sharded_sequences()
    # Traced and not computed, for the errors of a schedule that does not fit.
    jax.eval_shape(functools.partial(model.hidden, schedule=schedule), params, tokens, positions, segments)
    chosen = checked_layers(model.config.layers, layers)
    run = _runner(model, params, schedule, positions, segments)
    return _measured(run, functools.partial(begin, model, params, tokens, schedule, positions), measure, chosen, data)


def advance(
    model: Model,
    params: Params,
    stream: Stream,
    schedule: Schedule,
    start: int,
    stop: int,
    *,
    positions: Int[Array | np.ndarray, "#B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
) -> Stream:
    """The stream at the input of layer `stop`, from that at the input of layer `start`.

    The input of layer 0 is `begin`'s, and that of layer N the output of the last layer. Layers of one structure share
    a compiled program. Other arguments as in `layer_pass`.
    """
    run = _runner(model, params, schedule, positions, segments)
    # A copy, because each layer's program reuses its input's memory.
    stream = stream._replace(x=jnp.array(stream.x))
    for n in range(start, stop):
        stream, _ = run(n, stream)
    return stream


def checked_layers(count: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The chosen layers, ascending, each once; None is all `count`. `ConfigError` for none or one that is not there."""
    chosen = tuple(sorted(set(range(count) if layers is None else layers)))
    if not chosen:
        raise ConfigError("There is no layer to measure: name at least one.")
    for n in chosen:
        if not 0 <= n < count:
            raise ConfigError(f"There is no layer {n} to measure; the model has {count}, counted from 0.")
    return chosen


def _measured(run, first, measure, chosen, data):  # noqa: ANN001, ANN202
    stream, data = first(), jax.tree.map(jnp.asarray, data)
    for n in range(chosen[-1] + 1):
        stream, found = run(n, stream, measure if n in chosen else None, data)
        if n in chosen:
            yield n, jax.device_get(found)


def embed(
    model: Model,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    schedule: Schedule,
    positions: Int[Array | np.ndarray, "#B T"] | None = None,
) -> Float[jax.Array, "B T D"]:
    """The residual stream at the input of layer 0."""
    at = np.arange(tokens.shape[1], dtype=np.int32)[None] if positions is None else positions
    return _embed(model, params, jnp.asarray(tokens), jnp.asarray(at), schedule)


def begin(
    model: Model,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    schedule: Schedule,
    positions: Int[Array | np.ndarray, "#B T"] | None = None,
) -> Stream:
    """The stream at the input of layer 0."""
    x = embed(model, params, tokens, schedule, positions)
    return Stream(x, {}, tuple(_layer_inputs(model, params, tokens, x)) if model.config.per_layer_input else ())


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: Model, params: Params, tokens: Any, positions: Any, schedule: Schedule) -> jax.Array:
    return model.embed(params, tokens, positions, schedule, split_layers(params["layers"])[1])


@functools.partial(jax.jit, static_argnums=0)
def _layer_inputs(model: Model, params: Params, tokens: Any, x: jax.Array) -> Any:
    return model.layer_inputs(params, tokens, x)


def _runner(
    model: Model, params: Params, schedule: Schedule, positions: Any, segments: Any
) -> Callable[..., tuple[Stream, Any]]:
    """A function (n, stream, measure, data) -> the stream after layer n, and what was measured in it."""
    positions, segments = (None if x is None else jnp.asarray(x) for x in (positions, segments))
    blocks = stacked_blocks(split_layers(params["layers"])[0], model.stacks)
    arrays = layer_arrays(jax.tree.map(jnp.asarray, schedule))

    def run(n: int, stream: Stream, measure: Measure | None = None, data: Any = None) -> tuple[Stream, Any]:
        learned, structure = learned_of_layer(params["layers"], schedule.structure, n), schedule.structure[n]
        place = jnp.int32(model.stacks[structure.shape].layers.index(n))
        given = LayerInputs(stream.keys_values.get(structure.keys_of), stream.embedded[n] if stream.embedded else None)
        stacked = (blocks[structure.shape], place), (arrays, jnp.int32(n))
        x, own, found = _layer(model, structure, measure, stream.x, stacked, learned, given, positions, segments, data)
        shared = {**stream.keys_values, n: own} if structure.keys_of == n else stream.keys_values
        return Stream(x, shared, stream.embedded), found

    return run


# Each layer's output replaces its input in memory, whatever the depth of the model.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _layer(
    model: Model,
    structure: LayerStructure,
    measure: Measure | None,
    x: Float[jax.Array, "B T D"],
    stacked: tuple[tuple[Any, Int[jax.Array, ""]], ...],
    learned: dict[str, Params],
    given: LayerInputs,
    positions: Int[jax.Array, "#B T"] | None,
    segments: Int[jax.Array, "B T"] | None,
    data: Any,
) -> tuple[Float[jax.Array, "B T D"], Any, Any]:
    """The output of a layer, its keys and values if others attend to them, and what was measured in it.

    `stacked`: the blocks of its shape and its place among them, the arrays of the schedule and its number.
    """
    params, arrays = (
        jax.tree.map(lambda a, at=at: jax.lax.dynamic_index_in_dim(a, at, keepdims=False), one) for one, at in stacked
    )
    n = stacked[1][1]
    at = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
    encoding = model.layer_encoding(arrays, structure, at, learned=learned)
    chunk, window = model.config.attention_chunk, structure.window

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, normed: jax.Array) -> tuple[jax.Array, Any]:
        own = None if structure.keys_of is None or given.keys_values is not None else (k, v)
        common = dict(x=normed, positions=positions, segments=segments, window=window)
        out = attention(q, k, v, encoding, implementation=model.config.attention, chunk=chunk, backward=False, **common)
        if measure is None:
            return out, (own, None)
        view = LayerView(x, normed, q, k, v, encoding, positions, segments, window, params, n, chunk)
        return out, (own, measure(view, data))

    x, (own, found), _ = model.block(params, structure.shape).attend_by(x, attend, given)
    return x, own, found
