"""The decoder as pure functions over a plain pytree of parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from pe_lab.attention import IMPLEMENTATIONS, Rotation, Row
from pe_lab.attention.api import request
from pe_lab.attention.dispatch import choose
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError, did_you_mean
from pe_lab.model.loss import cross_entropy
from pe_lab.model.modules import ACTIVATIONS, NORMS, QK_NORMS, Block, Embedder
from pe_lab.model.pattern import Run, runs
from pe_lab.parallel import balanced_order, constrain, context_size, padded_length
from pe_lab.positional import LayerStructure, Schedule, rotation_tables

Params = dict[str, Any]

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def complete(config: ModelConfig) -> ModelConfig:
    """The config with head_dim filled in, or a `UserError` that names the field that cannot be."""
    for field in ("layers", "d_model", "d_ff", "attention_chunk", "loss_chunks"):
        if getattr(config, field) < 1:
            raise UserError(f"model.{field} is {getattr(config, field)}; it must be positive.")
    if config.heads < 1 or config.kv_heads < 1 or config.heads % config.kv_heads:
        raise UserError(
            f"model.heads is {config.heads} and model.kv_heads {config.kv_heads}; kv_heads must divide heads."
        )
    if config.head_dim == 0:
        if config.d_model % config.heads:
            raise UserError(
                f"model.d_model {config.d_model} does not divide into {config.heads} heads; set model.head_dim."
            )
        config = dataclasses.replace(config, head_dim=config.d_model // config.heads)
    if config.head_dim < 2 or config.head_dim % 2:
        raise UserError(f"model.head_dim is {config.head_dim}; it must be even, since channels rotate in pairs.")
    if config.vocab_size < 1:
        raise UserError(f"model.vocab_size is {config.vocab_size}; it must be positive.")
    if config.vocab_size % config.loss_chunks:
        raise UserError(
            f"model.loss_chunks is {config.loss_chunks}; it must divide model.vocab_size {config.vocab_size}."
        )
    for field, allowed in (("norm", NORMS), ("activation", ACTIVATIONS), ("qk_norm", QK_NORMS)):
        value = getattr(config, field)
        if value not in allowed:
            raise UserError(f"model.{field} is '{value}'. " + did_you_mean(str(value), list(allowed)))
    if config.remat not in REMAT_POLICIES:
        raise UserError(f"model.remat is '{config.remat}'; it must be one of {', '.join(REMAT_POLICIES)}.")
    if config.attention not in ("auto", *IMPLEMENTATIONS):
        raise UserError(
            f"model.attention is '{config.attention}'. " + did_you_mean(config.attention, ["auto", *IMPLEMENTATIONS])
        )
    if config.dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.dtype is '{config.dtype}'; it must be float32 or bfloat16.")
    return config


class Model:
    """A decoder of one shape: `init` makes its parameters, everything else is a pure function of them.

    Parameters are nested dicts of float32 arrays: `token_embedder` (embedding, final norm) and `layers`, where every
    array has a leading axis over the N layers, whatever the positional encodings on them.

    Args:
      config: the shape.
      backward: gradients will be taken; False admits attention kernels that have none.
    """

    def __init__(self, config: ModelConfig, backward: bool = True):
        self.config, self.backward = complete(config), backward
        self._embedder, embedder_state = nnx.split(nnx.eval_shape(lambda: Embedder(self.config, nnx.Rngs(0))))
        self._block, block_state = nnx.split(nnx.eval_shape(lambda: Block(self.config, nnx.Rngs(0))))
        self.axes: Params = {
            "token_embedder": _axes(embedder_state, ()),
            "layers": _axes(block_state, ("layers",)),
        }

    def init(self, key: jax.Array) -> Params:
        """Random parameters from one key. The same on any mesh: no key depends on a device."""

        def block(key: jax.Array) -> Params:
            return nnx.to_pure_dict(nnx.state(Block(self.config, nnx.Rngs(params=key))))

        embedder_key, layers_key = jax.random.split(key)
        return {
            "token_embedder": nnx.to_pure_dict(nnx.state(Embedder(self.config, nnx.Rngs(params=embedder_key)))),
            "layers": jax.vmap(block)(jax.random.split(layers_key, self.config.layers)),
        }

    @functools.cached_property
    def shapes(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s, without making any."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.shapes))

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        schedule: Schedule,
    ) -> Float[Array, "B T D"]:
        """The output of the final norm, in the compute dtype.

        Args:
          params: as `init` makes them.
          tokens: token ids.
          positions: what the rotation and ALiBi take for positions; None counts from 0.
          segments: document of each token, attended within; None is one document.
          schedule: the positional encoding, of as many layers as the model.
        """
        x, places = self.hidden_in_order(params, tokens, positions, segments, schedule)
        return x if places is None else x[:, places]

    def hidden_in_order(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        schedule: Schedule,
    ) -> tuple[Float[Array, "B places D"], Int[np.ndarray, " T"] | None]:
        """`hidden` as a mesh with a context axis has it: its second result says at which place each token stands.

        None: at its own. To put a whole text back into order, devices must exchange it; losses are smaller.
        """
        config = self.config
        if schedule.num_layers != config.layers:
            raise UserError(f"The schedule has {schedule.num_layers} layers and the model {config.layers}.")
        if schedule.inv_freq.shape[1:] != (config.heads, config.head_dim // 2):
            raise UserError(
                f"The schedule is for {schedule.inv_freq.shape[1]} heads of {2 * schedule.inv_freq.shape[2]} "
                f"channels, and the model has {config.heads} of {config.head_dim}."
            )
        tokens, positions, segments, places = _over_context(tokens, positions, segments)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        schedule = jax.tree.map(lambda a: jax.lax.stop_gradient(jnp.asarray(a)), schedule)
        x = self.embed(params, tokens)
        shared = None
        if schedule.same_rotation:
            # Equal on all layers that rotate: made once, above them.
            n = next(i for i, s in enumerate(schedule.structure) if s.rotates)
            shared = self.tables(schedule.fixed_freq[n], schedule.gain[n], schedule.structure[n], at)
        data = (params["layers"], layer_arrays(schedule))

        def layer(x: jax.Array, data: Any, structure: LayerStructure) -> jax.Array:
            block_params, arrays = data
            row = self.row(arrays, structure, at, shared)
            return self.block(block_params)(x, row, positions, segments, structure.window, self.backward)

        policy = REMAT_POLICIES[config.remat]
        for run in runs(schedule.structure):
            pattern = schedule.structure[run.start : run.start + run.period]

            def group(x: jax.Array, data: Any, pattern: tuple[LayerStructure, ...] = pattern) -> jax.Array:
                for i, structure in enumerate(pattern):
                    x = layer(x, jax.tree.map(lambda a, i=i: a[i], data), structure)
                return x

            if policy is not None:
                group = jax.checkpoint(group, policy=policy, prevent_cse=not config.scan)
            x = _repeat(group, x, data, run, config.scan)
        return self.final_norm(params, x), places

    def final_norm(self, params: Params, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What the unembedding reads, of what the last layer wrote."""
        return nnx.merge(self._embedder, params["token_embedder"]).final_norm(x)

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer reads, in the compute dtype."""
        x = nnx.merge(self._embedder, params["token_embedder"]).embed(tokens, jnp.dtype(self.config.dtype))
        return constrain(x, "batch", "length", "activation_embed")

    def block(self, block_params: Params) -> Block:
        """One layer, from its part of the stacked parameters."""
        return nnx.merge(self._block, block_params)

    def row(
        self,
        arrays: tuple[jax.Array, ...],
        structure: LayerStructure,
        positions: Int[Array, "#B T"],
        tables: tuple[jax.Array, jax.Array] | None = None,
    ) -> Row:
        """A layer's row of the schedule, as attention takes it.

        Args:
          arrays: the layer's part of `layer_arrays`.
          structure: what is compiled of it.
          positions: of the tokens.
          tables: cos and sin where they are made already.
        """
        fixed_freq, gain, slope, logit_scale, noise, noise_sigma = arrays
        cos, sin, diagonal_bias, rotation = None, None, None, None
        if structure.rotates:
            cos, sin = self.tables(fixed_freq, gain, structure, positions) if tables is None else tables
            if structure.warp is None:
                chosen = self._rows(structure)
                rotation = Rotation(fixed_freq[chosen], gain[chosen])
        if structure.diagonal_bias:
            strength, length = structure.diagonal_bias
            diagonal_bias = jnp.where(positions < length, jnp.float32(strength), 0)
        slope = slope if structure.slopes else None
        noise, noise_sigma = (noise, noise_sigma) if structure.noisy else (None, None)
        return Row(cos, sin, slope, logit_scale, noise, noise_sigma, diagonal_bias, rotation)

    def tables(
        self, fixed_freq: jax.Array, gain: jax.Array, structure: LayerStructure, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """cos and sin [B or 1, T, rows, R] with one row per layer, key head or query head, as the layer needs."""
        chosen = self._rows(structure)
        return rotation_tables(fixed_freq[chosen], gain[chosen], positions, structure.warp)

    def _rows(self, structure: LayerStructure) -> slice:
        """Of H rows of a rotation, those that differ: one, one per key head, or all."""
        step = {"shared": self.config.heads, "grouped": self.config.heads // self.config.kv_heads, "split": 1}
        return slice(None, None, step[structure.heads])

    def attention_by_layer(
        self, structure: Sequence[LayerStructure], length: int, segments: bool = False
    ) -> tuple[str, ...]:
        """The implementation of attention that each layer takes for texts of `length`, on the mesh of the moment.

        Raises:
          UserError: where none can, or the one that the config names cannot.
        """
        config = self.config

        def of(one: LayerStructure) -> str:
            asked = request(
                (1, length, config.heads, config.head_dim),
                config.dtype,
                slopes=one.slopes,
                segments=segments,
                window=one.window,
                diagonal_bias=one.diagonal_bias is not None,
                soft_cap=None,
                split_heads=one.rotates and one.heads == "split" and config.heads != config.kv_heads,
                backward=self.backward,
            )
            return choose(config.attention, asked, config.attention_chunk)

        return tuple(of(one) for one in structure)

    def apply(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        schedule: Schedule,
    ) -> Float[Array, "B T V"]:
        """Next-token logits, float32. Arguments as in `hidden`."""
        x = self.hidden(params, tokens, positions, segments, schedule)
        weights = self.unembedding(params).astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, weights, preferred_element_type=jnp.float32)

    def unembedding(self, params: Params) -> Float[Array, "V D"]:
        """The output embedding: the input's where they are tied."""
        return nnx.merge(self._embedder, params["token_embedder"]).output_embedding()

    def token_loss(self, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> Float[Array, "B T"]:
        """Cross-entropy of each target of a batch (tokens, targets, and positions and segments where given), nats."""
        x, places = self.hidden_in_order(
            params, batch["tokens"], batch.get("positions"), batch.get("segments"), schedule
        )
        if places is None:
            return cross_entropy(x, self.unembedding(params), batch["targets"], self.config.loss_chunks)
        order = np.zeros(x.shape[1], np.int32)  # where nothing real stands: any target
        order[places] = np.arange(len(places))
        targets = constrain(batch["targets"][:, order], "batch", "length")
        return cross_entropy(x, self.unembedding(params), targets, self.config.loss_chunks)[:, places]


def _over_context(
    tokens: Int[Array, "B T"], positions: Int[Array, "#B T"] | None, segments: Int[Array, "B T"] | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, np.ndarray | None]:
    """Tokens, positions and segments as the devices of a context axis share them, and where each token then stands.

    A text that does not divide is padded at its end, where causality hides what is there.
    """
    parts, length = context_size(), tokens.shape[1]
    if parts == 1:
        return tokens, positions, segments, None
    whole = padded_length(length, parts)
    order = balanced_order(whole, parts)

    def arranged(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, whole - length)), mode="edge")[:, order]
        return constrain(x, "batch" if x.shape[0] == tokens.shape[0] else None, "length")

    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)[None]
    segments = None if segments is None else arranged(segments)
    return arranged(tokens), arranged(positions), segments, np.argsort(order)[:length]


def layer_arrays(schedule: Schedule) -> tuple[jax.Array, ...]:
    """What `Model.row` reads of a schedule, stacked over layers."""
    return (
        schedule.fixed_freq,
        schedule.gain,
        schedule.alibi_slope,
        schedule.logit_scale,
        schedule.noise,
        schedule.noise_sigma,
    )


def _repeat(group: Any, x: jax.Array, data: Any, run: Run, scan: bool) -> jax.Array:
    """Applies `group` (one period of layers) `run.repeats` times to the run's part of the stacked `data`."""
    stop = run.start + run.period * run.repeats
    part = jax.tree.map(lambda a: a[run.start : stop].reshape(run.repeats, run.period, *a.shape[1:]), data)
    if scan and run.repeats > 1:
        return jax.lax.scan(lambda x, d: (group(x, d), None), x, part)[0]
    # A split's gradient is one concatenation; that of indexing would be a sum of N arrays of the full size.
    leaves, tree = jax.tree.flatten(part)
    pieces = [jax.lax.split(jnp.asarray(leaf), (1,) * run.repeats) for leaf in leaves]
    for i in range(run.repeats):
        x = group(x, jax.tree.unflatten(tree, [p[i][0] for p in pieces]))
    return x


def _axes(state: nnx.State, leading: tuple[str, ...]) -> Params:
    flat = {path: (*leading, *v.get_metadata()["logical_axes"]) for path, v in nnx.to_flat_state(state)}
    nested: Params = {}
    for path, axes in flat.items():
        at = nested
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = axes
    return nested
