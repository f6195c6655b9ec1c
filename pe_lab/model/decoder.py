"""The decoder as pure functions over a plain pytree of parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import Array, Float, Int, Shaped

from pe_lab.attention import KeyRotation, LayerEncoding
from pe_lab.attention.capabilities import AttentionRequest
from pe_lab.attention.dispatch import choose, layer_request
from pe_lab.attention.hooks import Hooks, cached_sizes, index_positions
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError, call
from pe_lab.model.learned import (
    added_to_embeddings,
    check_learned,
    init_encoding,
    learned_encodings,
    learned_of_repetition,
    split_layers,
)
from pe_lab.model.loss import Head, cross_entropy, weighted_cross_entropy
from pe_lab.model.modules import Auxiliary, Block, Embedder, KeysValues, LayerInputs
from pe_lab.model.shape import (
    REMAT_POLICIES,
    Repetition,
    Stack,
    check_schedule,
    complete,
    from_stacks,
    head_shape,
    repetitions,
    sizes_for,
    stacked_blocks,
    stacks,
)
from pe_lab.parallel import balanced_order, constrain, context_size, current_mesh, padded_length
from pe_lab.positional import (
    LayerHooks,
    LayerStructure,
    Parameter,
    Schedule,
    rotation_tables,
)
from pe_lab.positional.hooks import has, parameter_settings

Params = dict[str, Any]
Tokens = Int[Array, "B T"]
Positions = Int[Array, "#B T"]


class Model:
    """A decoder of one shape: `init` makes parameters, and all other methods are pure functions of them.

    Parameters are nested dicts of float32 arrays: `token_embedder` (embedding, final norm) and `layers`, where every
    array has a leading axis over the N layers; in `layers.positional` are those of encodings that have some, by the
    names of `layer_hooks`, with a leading axis over the layers that have the encoding. Where layers differ in shape,
    `layers.shapes.NAME` has those of one shape, with a leading axis over its layers.

    Args:
      config: the shape.
      backward: gradients will be taken; False admits attention kernels that have none.
      hooks: those of every layer (`Schedule.hooks`, `layer_hooks`), whose parameters `init`, `axes` and `shapes`
        contain. All other methods read the encodings from the schedule.
    """

    def __init__(self, config: ModelConfig, backward: bool = True, hooks: Sequence[tuple[LayerHooks, ...]] = ()):
        self.config, self.backward = complete(config), backward
        if "auto" in (config.remat, config.loss_chunks, config.scan):
            raise ConfigError(
                "model.remat, model.scan and model.loss_chunks are 'auto' only in a recipe, for which pe_lab.train and "
                "pe_lab.plan choose them by its devices. Give values here."
            )
        self._embedder, embedder_state = nnx.split(nnx.eval_shape(lambda: Embedder(self.config, nnx.Rngs(0))))
        self.stacks = stacks(self.config)
        split = [nnx.split(nnx.eval_shape(functools.partial(_block, stack))) for stack in self.stacks]
        self._blocks = [definition for definition, _ in split]
        self.axes: Params = {
            "token_embedder": _axes(embedder_state, ()),
            "layers": from_stacks([_axes(state, ("layers",)) for _, state in split], self.stacks),
        }
        self.learned = learned_encodings(hooks)
        if self.learned:
            self.axes["layers"]["positional"] = {
                name: {field: ("layers", *one.axes) for field, one in settings.items()}
                for name, settings in self.encoding_settings.items()
            }

    @functools.cached_property
    def encoding_settings(self) -> dict[str, dict[str, Parameter]]:
        """The parameters of `layers.positional` on one layer: shapes, axes, and how they are trained."""
        return {
            name: parameter_settings(one, sizes_for(self.config, one, at)) for name, (one, at) in self.learned.items()
        }

    def init(self, key: jax.Array) -> Params:
        """Random parameters from one key. They are equal on any mesh, because no key depends on a device."""

        def blocks(stack: Stack, keys: jax.Array) -> Params:
            return jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(_block(stack, key))))(keys)

        embedder_key, layers_key = jax.random.split(key)
        keys = jax.random.split(layers_key, self.config.layers)
        layers = from_stacks([blocks(one, keys[np.asarray(one.layers)]) for one in self.stacks], self.stacks)
        if self.learned:
            layers["positional"] = {
                name: init_encoding(name, encoding, at, key, sizes_for(self.config, encoding, at), self.config.layers)
                for name, (encoding, at) in self.learned.items()
            }
        return {
            "token_embedder": nnx.to_pure_dict(nnx.state(Embedder(self.config, nnx.Rngs(params=embedder_key)))),
            "layers": layers,
        }

    @functools.cached_property
    def shapes(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s, without making any."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.shapes))

    def hidden(
        self, params: Params, tokens: Tokens, positions: Positions | None, segments: Tokens | None, schedule: Schedule
    ) -> Float[Array, "B T D"]:
        """The input of the head (`output` of the last layer), in the compute dtype.

        Args:
          params: as `init` makes them.
          tokens: token ids.
          positions: of the tokens, for rotation and ALiBi; None counts from 0.
          segments: document of each token; attention is within documents. None: one document.
          schedule: the positional encoding of all layers.
        """
        found = self.forward(params, tokens, positions, segments, schedule)
        return found.hidden if found.places is None else found.hidden[:, found.places]

    def forward(
        self,
        params: Params,
        tokens: Tokens,
        positions: Positions | None,
        segments: Tokens | None,
        schedule: Schedule,
        collect: bool = False,
    ) -> ForwardPass:
        """`hidden` in the order of tokens of a mesh with a context axis, and what layers give beside it.

        Losses are reordered after they are computed, because devices exchange less data for losses than for hidden
        states. `collect`: with the outputs of all layers.
        """
        config = self.config
        check_schedule(config, schedule)
        schedule.check_length(tokens.shape[1])
        tokens, positions, segments, places = _reordered(tokens, positions, segments)
        at = jnp.asarray(index_positions(tokens.shape[1])) if positions is None else positions
        schedule = jax.tree.map(lambda a: jax.lax.stop_gradient(jnp.asarray(a)), schedule)
        shared = self.shared_tables(schedule, at)  # outside the scan
        blocks, learned = split_layers(params["layers"])
        check_learned(learned, schedule.hooks)
        x = self.embed(params, tokens, at, schedule, learned)
        data = (stacked_blocks(blocks, self.stacks), (layer_arrays(schedule), self.layer_inputs(params, tokens, x)))
        keys_values: dict[int, KeysValues] = {}  # of the layers whose keys others attend to
        one_shape = len({stack.config.head_dim for stack in self.stacks}) == 1

        def layer(
            x: jax.Array, block_params: Params, data: Any, learned: Any, keys_values: Any, structure: LayerStructure
        ) -> tuple[jax.Array, Any, Auxiliary]:
            arrays, embedded = data
            # Again: the barrier between unrolled layers gives a tangent to every array, if one of them has it.
            arrays = jax.lax.stop_gradient(arrays)
            encoding = self.layer_encoding(arrays, structure, at, shared, learned)
            given = LayerInputs(keys_values.get(structure.keys_of), embedded)
            block = self.block(block_params, structure.shape)
            return block(x, encoding, positions, segments, structure.window, self.backward, given)

        policy, collected = REMAT_POLICIES[config.remat], []
        for repetition in repetitions(schedule.structure):
            pattern = schedule.structure[repetition.start : repetition.start + repetition.period]

            def group(
                keys_values: Any, x: jax.Array, data: Any, pattern: tuple[LayerStructure, ...] = pattern
            ) -> tuple[jax.Array, Any]:
                (blocks, stacked, learned), found = data, []
                for i, structure in enumerate(pattern):
                    place = [one.shape for one in pattern[:i]].count(structure.shape)
                    block_params = jax.tree.map(lambda a, at=place: a[at], blocks[structure.shape])
                    of_layer = jax.tree.map(lambda a, i=i: a[i], stacked)
                    x, (attended, own), auxiliary = layer(x, block_params, of_layer, learned[i], keys_values, structure)
                    found.append(((x, attended if one_shape else None) if collect else None, auxiliary))
                # A layer whose keys others attend to has no equal, and so is alone in its repetition.
                read = None if structure.keys_of is None or structure.keys_of in keys_values else own
                return x, (jax.tree.map(lambda *each: jnp.stack(each), *found), read)

            if policy is not None:
                group = jax.checkpoint(group, policy=policy, prevent_cse=not config.scan)
            with jax.named_scope("layers"):
                of_repetition = tuple(learned_of_repetition(learned, schedule.structure, repetition))
                run = functools.partial(group, keys_values)
                x, (found, own) = _repeat(run, x, data, of_repetition, repetition, schedule.structure, config.scan)
            if own is not None:
                keys_values = keys_values | {repetition.start: own}
            collected.append(found)
        streams, of_layers = jax.tree.map(lambda *each: jnp.concatenate(each), *collected)
        auxiliary = Auxiliary(
            {name: one.sum() for name, one in of_layers.losses.items()} | self.penalties(params),
            {name: one.mean() for name, one in of_layers.metrics.items()},
        )
        return ForwardPass(self.output(params, x), places, auxiliary, streams)

    def penalties(self, params: Params) -> dict[str, Float[Array, ""]]:
        """The penalties of encodings on their parameters by name, summed over layers; nats per token."""
        found = {}
        for name, (encoding, _) in self.learned.items():
            if has(encoding, "penalty"):
                of_layers = params["layers"]["positional"][name]
                found[f"{name}.penalty"] = jax.vmap(functools.partial(call, encoding, "penalty"))(of_layers).sum()
        return found

    def output(self, params: Params, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The input of the head, from the output of the last layer: the final norm, times the logit multiplier."""
        return nnx.merge(self._embedder, params["token_embedder"]).output(x)

    def embed(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "#B T"],
        schedule: Schedule,
        learned: Mapping[str, Params],
    ) -> Float[Array, "B T D"]:
        """The input of the first layer, in the compute dtype; `learned`: `layers.positional`."""
        x = nnx.merge(self._embedder, params["token_embedder"]).embed(tokens, jnp.dtype(self.config.dtype))
        x = added_to_embeddings(learned, schedule, x, positions)
        return constrain(x, "batch", "length", "activation_embed")

    def block(self, block_params: Params, shape: int = 0) -> Block:
        """One layer, from its part of the stacked parameters of its shape (`LayerStructure.shape`)."""
        return nnx.merge(self._blocks[shape], block_params)

    def shape_of(self, structure: LayerStructure) -> ModelConfig:
        """The config with the sizes of a layer."""
        return self.stacks[structure.shape].config

    def layer_inputs(self, params: Params, tokens: Tokens, x: Float[Array, "B T D"]) -> Float[Array, "N B T P"] | None:
        """The input of its own of each layer, from the tokens and their embedding; None: the model has none."""
        of_layers = nnx.merge(self._embedder, params["token_embedder"]).layer_inputs
        return None if of_layers is None else of_layers(tokens, x)

    def layer_encoding(
        self,
        arrays: tuple[jax.Array, ...],
        structure: LayerStructure,
        positions: Int[Array, "#B T"],
        tables: tuple[jax.Array, jax.Array] | None = None,
        learned: Mapping[str, Params] | None = None,
    ) -> LayerEncoding:
        """The positional encoding of one layer, for attention.

        Args:
          arrays, learned: the layer's part of `layer_arrays` and of `layers.positional`.
          tables: cos and sin, if they are computed already.
        """
        fixed_freq, gain, slope, logit_scale = arrays
        cos, sin, rotation = None, None, None
        if structure.rotates:
            rotation = self._rotation(fixed_freq, gain, structure)
            cos, sin = rotation_tables(*rotation, positions) if tables is None else tables
        slope = slope if structure.slopes else None
        if self.config.attention_scale:
            logit_scale = logit_scale * (self.config.attention_scale * self.shape_of(structure).head_dim ** 0.5)
        hooks = Hooks(tuple((learned or {}).get(one.parameters, {}) for one in structure.hooks), structure.hooks)
        return LayerEncoding(cos, sin, slope, logit_scale, hooks, rotation, self.config.attention_soft_cap or None)

    def shared_tables(self, schedule: Schedule, positions: Int[Array, "#B T"]) -> tuple[jax.Array, jax.Array] | None:
        """cos and sin [B or 1, T, rotations, R] of all layers that rotate; None if they may have several rotations."""
        if not schedule.same_rotation:
            return None
        n = next(i for i, s in enumerate(schedule.structure) if s.rotates)
        fixed_freq, gain = jnp.asarray(schedule.fixed_freq), jnp.asarray(schedule.gain)
        return rotation_tables(*self._rotation(fixed_freq[n], gain[n], schedule.structure[n]), positions)

    def _rotation(self, fixed_freq: jax.Array, gain: jax.Array, structure: LayerStructure) -> KeyRotation:
        """The distinct ones among the H rotations of a layer: one, one per key head, or all."""
        config = self.shape_of(structure)
        step = {"shared": config.heads, "grouped": config.heads // config.kv_heads, "split": 1}
        chosen = slice(None, None, step[structure.heads]), slice(structure.pairs)
        return KeyRotation(fixed_freq[chosen], gain[chosen])

    def attention_request(
        self,
        structure: LayerStructure,
        length: int,
        segments: bool = False,
        partial: bool | None = None,
        sequences: int | None = None,
    ) -> AttentionRequest:
        """The request of one layer for sequences of `length` tokens; other arguments as in `layer_request`."""
        config = self.shape_of(structure)
        channels = cached_sizes(structure.hooks, head_shape(config)).key_channels
        heads = config.heads, config.kv_heads, max(config.head_dim, channels)
        backward = self.backward and not partial  # only KV caches request `partial`
        return layer_request(
            structure, heads, config.dtype, length, segments=segments, sequences=sequences,
            soft_cap=config.attention_soft_cap > 0, backward=backward, partial=partial,
        )  # fmt: skip

    def attention_by_layer(
        self, structure: Sequence[LayerStructure], length: int, segments: bool = False, sequences: int | None = None
    ) -> tuple[str, ...]:
        """The name of each layer's attention implementation for so many sequences of `length`, on the current mesh.

        Raises:
          UnsupportedError: no implementation, or not the one in the config, serves a layer.
        """
        config = self.config
        requests = [self.attention_request(one, length, segments, sequences=sequences) for one in structure]
        return tuple(choose(config.attention, request, config.attention_chunk) for request in requests)

    def apply(
        self, params: Params, tokens: Tokens, positions: Positions | None, segments: Tokens | None, schedule: Schedule
    ) -> Float[Array, "B T V"]:
        """Next-token logits, float32. Arguments as in `hidden`."""
        return self.logits(params, self.hidden(params, tokens, positions, segments, schedule))

    def logits(self, params: Params, hidden: Float[Array, "*tokens D"]) -> Float[Array, "*tokens V"]:
        """Float32 logits from `output`."""
        return self.head(params).logits(hidden)

    def head(self, params: Params) -> Head:
        """What makes logits of `output`; its embedding is the input embedding if they are tied."""
        return nnx.merge(self._embedder, params["token_embedder"]).head()

    def token_loss(
        self, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule, chunks: int | None = None
    ) -> Float[Array, "B T"]:
        """Cross-entropy of each target of a batch in nats; `chunks` as in `cross_entropy`.

        Batch: tokens, targets, and optional positions, segments.
        """
        x, places, _, _ = self.forward(params, batch["tokens"], batch.get("positions"), batch.get("segments"), schedule)
        targets = in_order(batch["targets"], x.shape[1], places)
        loss = cross_entropy(x, self.head(params), targets, chunks)
        return loss if places is None else loss[:, places]

    def loss_sum(self, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> Float[Array, ""]:
        """The sum over tokens of weight times cross-entropy, in nats; float32. Its gradient is computed with it.

        Batch: tokens, targets, weights, and optional positions, segments.
        """
        return self.training_loss(params, batch, schedule)[1].loss

    def training_loss(
        self, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule
    ) -> tuple[Float[Array, ""], LossSums]:
        """What training minimizes, the sum over tokens of weight times all losses, and its parts; see `loss_sum`."""
        x, places, auxiliary, _ = self.forward(
            params, batch["tokens"], batch.get("positions"), batch.get("segments"), schedule
        )
        targets, weights = (in_order(batch[name], x.shape[1], places) for name in ("targets", "weights"))
        loss = weighted_cross_entropy(x, self.head(params), targets, weights, self.config.loss_chunks)
        return with_auxiliary(loss, auxiliary, batch["weights"])


def _block(stack: Stack, key: jax.Array | int = 0) -> Block:
    return Block(stack.config, nnx.Rngs(params=key), own_keys=stack.keys_of is None)


class ForwardPass(NamedTuple):
    """The result of `Model.forward`.

    Attributes:
      hidden: the input of the head, in the order of a mesh with a context axis.
      places: of each token in that order; None: tokens are in order.
      auxiliary: losses summed over layers, and metrics averaged over them.
      layers: outputs of the layers [N, B, places, D] and of their attention [N, B, places, H, K], where collected;
        None for the latter where layers differ in K.
    """

    hidden: Float[Array, "B places D"]
    places: Int[np.ndarray, " T"] | None
    auxiliary: Auxiliary
    layers: Any = None


class LossSums(NamedTuple):
    """Sums over a batch's tokens of weight times the logged loss, and times each auxiliary number."""

    loss: Float[Array, ""]
    auxiliary: dict[str, Float[Array, ""]]


RESERVED = ("loss", "grad_norm", "skipped", "step", "tokens", "learning_rate")  # names of the log of metrics


def with_auxiliary(
    loss: Float[Array, ""], auxiliary: Auxiliary, weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], LossSums]:
    """A sum over tokens of weight times loss with auxiliary losses added, and the parts to be logged.

    Raises:
      ConfigError: two numbers have one name, or that of another metric.
    """
    names = [*auxiliary.losses, *auxiliary.metrics]
    if taken := [name for name in names if name in RESERVED or names.count(name) > 1]:
        raise ConfigError(f"A layer gives '{taken[0]}' beside its output, and the log has another number of that name.")
    if not names:
        return loss, LossSums(loss, {})
    total = weights.astype(jnp.float32).sum()
    numbers = {name: total * one.astype(jnp.float32) for name, one in (auxiliary.losses | auxiliary.metrics).items()}
    return loss + sum(numbers[name] for name in auxiliary.losses), LossSums(loss, numbers)


def in_order(values: Shaped[Array, "B T"], length: int, places: Int[np.ndarray, " T"] | None) -> Array:
    """`values` of tokens, at their places in a sequence of `length`; 0 elsewhere."""
    if places is None:
        return values
    order = np.full(length, values.shape[1], np.int32)
    order[places] = np.arange(len(places))
    return constrain(jnp.pad(values, ((0, 0), (0, 1)))[:, order], "batch", "length")


def _reordered(
    tokens: Tokens, positions: Positions | None, segments: Tokens | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, np.ndarray | None]:
    """Tokens, positions and segments in the order of a context axis, and the place of each token."""
    # A sequence that does not divide is padded at its end, where causality hides the padding.
    parts, length = context_size(), tokens.shape[1]
    if parts == 1:
        return tokens, positions, segments, None
    whole = padded_length(length, parts)
    order = balanced_order(whole, parts)

    def arranged(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, whole - length)), mode="edge")[:, order]
        return constrain(x, "batch" if x.shape[0] == tokens.shape[0] else None, "length")

    positions, segments = (None if x is None else arranged(x) for x in (positions, segments))
    return arranged(tokens), positions, segments, np.argsort(order)[:length]


def layer_arrays(schedule: Schedule) -> tuple[jax.Array | np.ndarray, ...]:
    """The arrays of a schedule that `Model.layer_encoding` reads, stacked over layers."""
    return schedule.fixed_freq, schedule.gain, schedule.alibi_slope, schedule.logit_scale


def _repeat(
    group: Any,
    x: jax.Array,
    data: Any,
    learned: Any,
    repetition: Repetition,
    structure: Sequence[LayerStructure],
    scan: bool,
) -> tuple[jax.Array, Any]:
    """Applies `group`, one period of layers, to each of its parts of `data`; what it returns beside x is stacked."""

    def part(stacked: Any, start: int, period: int) -> Any:
        stop = start + period * repetition.repeats
        return jax.tree.map(lambda a: a[start:stop].reshape(repetition.repeats, period, *a.shape[1:]), stacked)

    (blocks, stacked), shapes = data, [one.shape for one in structure]
    pattern = shapes[repetition.start : repetition.start + repetition.period]
    own = {
        shape: part(blocks[shape], shapes[: repetition.start].count(shape), pattern.count(shape)) for shape in pattern
    }
    part = (own, part(stacked, repetition.start, repetition.period), learned)
    if scan and repetition.repeats > 1:
        x, found = jax.lax.scan(group, x, part)
        return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)
    # The gradient of a split is one concatenation; that of indexing would be a sum of N arrays of the full size.
    leaves, tree = jax.tree.flatten(part)
    pieces, found = [jax.lax.split(jnp.asarray(leaf), (1,) * repetition.repeats) for leaf in leaves], []
    parts = [jax.tree.unflatten(tree, [p[i][0] for p in pieces]) for i in range(repetition.repeats)]
    current = current_mesh()
    for i in range(repetition.repeats):
        # On several devices, XLA would gather the weights of many layers before they are used. In the backward pass, it
        # would compute the gradients of many layers' weights together, and keep until then what they need.
        if i + 1 < len(parts) and current is not None and current[0].size > 1:
            x, parts[i + 1] = jax.lax.optimization_barrier((x, parts[i + 1]))
        x, one = group(x, parts[i])
        found.append(one)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *found)


def _axes(state: Any, leading: tuple[str, ...]) -> Params:
    flat = nnx.to_flat_state(state)
    return traverse_util.unflatten_dict({path: (*leading, *v.get_metadata()["logical_axes"]) for path, v in flat})
