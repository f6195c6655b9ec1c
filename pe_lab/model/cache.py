"""The KV cache of a model: its layout, writing to it, and the forward pass of a chunk of tokens against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pe_lab.attention import CacheView, cached_attention, encode_keys, encode_queries
from pe_lab.attention.hooks import (
    CachedSizes,
    cached_sizes,
    distance_bias,
    encode,
    hook_features,
    hook_inputs,
    key_bias,
    logit_functions,
    output,
)
from pe_lab.attention.key_block import AttentionInputs, KeyBlockKernel, scaled
from pe_lab.attention.kv_cache import KVCache, attend_to_cache, write_and_attend
from pe_lab.config import ModelConfig
from pe_lab.model.decoder import Model, layer_arrays
from pe_lab.model.learned import learned_of_repetition, split_layers
from pe_lab.model.modules import KeysValues, LayerInputs
from pe_lab.model.shape import Repetition, Stack, head_shape, repetitions, stacked_blocks, stacks
from pe_lab.parallel import constrain, slots_are_sharded
from pe_lab.positional import LayerStructure, Schedule


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of a token's keys and values on a layer of this shape: 2 G K numbers in the compute dtype."""
    return 2 * config.kv_heads * config.head_dim * np.dtype(config.dtype).itemsize


def cache_bytes(config: ModelConfig, structure: Sequence[LayerStructure], length: int) -> int:
    """Bytes of the KV cache of one sequence; a layer with a window keeps at most that many tokens."""
    return sum(
        (length if structure[n].window is None else min(length, structure[n].window))
        * cache_bytes_per_token(stack.config)
        for stack in stacks(config)
        for n in stack.layers
        if stack.keys_of is None
    )


def slot_axes(ring: bool) -> tuple[str | None, ...]:
    """Logical axes of a cache. A ring is small: every device of a context axis has a whole copy."""
    return ("layers", "batch", "kv_heads", None if ring else "slots", "head_dim")


@dataclass(frozen=True)
class CachedLayer:
    """The KV cache of one layer.

    Attributes:
      structure: the compiled part of the layer's positional encoding.
      slots: S; the whole capacity, with token p in slot p, or a ring.
      ring: a layer with a window has a ring of the window's size, with token p in slot p % S.
      heads: of the cached keys: H if heads of a group are encoded differently, else G. (Rotating keys of G heads per
        query head on reading would need rotations of H heads, which are as large as the keys of H heads.)
      rotated: keys are cached rotated. False if the schedule follows the length: G unrotated heads are cached, and each
        reading rotates them by the present schedule. False also if a kernel rotates keys per query head as it reads
        them: the cache is then H / G times smaller.
      sizes: what the layer's hooks need.
      source: the layer whose cache it reads; None: it has its own.
    """

    structure: LayerStructure
    slots: int
    ring: bool
    heads: int
    rotated: bool
    sizes: CachedSizes
    source: int | None = None


@dataclass(frozen=True)
class CacheLayout:
    """The compiled part of a cache: its capacity in tokens, every layer's part, and what a scan repeats."""

    capacity: int
    layers: tuple[CachedLayer, ...]
    repetitions: tuple[Repetition, ...]


class Slots(NamedTuple):
    """One layer of a pattern, over its R repeats. Keys and values in the compute dtype.

    `key_bias` and `sums` are of layers whose hooks have them: the bias of every slot, in float32, and the states of
    the running sums after the last token.
    """

    key: Float[Array, "R B heads S K"]
    value: Float[Array, "R B G S K"]
    key_bias: Float[Array, "R B H S 1"] | None = None
    sums: tuple[Shaped[Array, "R B *state"], ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The KV caches of all layers, by repetition and by layer of its pattern. A pytree: `layout` is static.

    A layer that reads the cache of another one has None.
    """

    repetitions: tuple[tuple[Slots | None, ...], ...]
    layout: CacheLayout = field(metadata={"static": True})


class Chunk(NamedTuple):
    """C new tokens of each sequence.

    Attributes:
      tokens: padding last.
      positions: [1, C] if all sequences have the same positions, or [B, 1].
      counts: earlier tokens of each sequence, which are in the cache.
      real: how many of the C are tokens; the rest is padding.
    """

    tokens: Int[Array, "B C"]
    positions: Int[Array, "#B C"]
    counts: Int[Array, " B"]
    real: Int[Array, " B"]


def plan(
    config: ModelConfig,
    structure: Sequence[LayerStructure],
    follows: Sequence[bool],
    capacity: int,
    scan: bool,
    kernel_rotates: bool = False,
) -> CacheLayout:
    """The layout of a cache for sequences of at most `capacity` tokens.

    Args:
      config: completed.
      structure, follows: of each layer; `follows`: its schedule depends on the length (`Layer.follows_length`).
      scan: repeat equal layers by a scan; else each layer is its own pattern.
      kernel_rotates: a kernel reads caches, and it can rotate keys as it reads them.
    """
    found: list[CachedLayer] = []
    shapes = [head_shape(stack.config) for stack in stacks(config)]
    sizes = {kind: cached_sizes(kind[0], shapes[kind[1]]) for kind in {(one.hooks, one.shape) for one in structure}}
    for n, (one, follow) in enumerate(zip(structure, follows, strict=True)):
        slots = capacity if one.window is None else min(capacity, one.window)
        split = one.rotates and one.heads == "split"
        rotated = not follow and not (split and kernel_rotates and _plain(one) and slots == capacity)
        of_hooks = sizes[one.hooks, one.shape]
        heads = config.heads if split and rotated else of_hooks.key_heads
        source = None if one.keys_of in (None, n) else one.keys_of
        found.append(CachedLayer(one, slots, slots < capacity, heads, rotated, of_hooks, source))
    repeated = repetitions(found) if scan else [Repetition(n, 1, 1) for n in range(len(found))]
    return CacheLayout(capacity, tuple(found), tuple(repeated))


def _plain(structure: LayerStructure) -> bool:
    """Whether a kernel supports the layer's hooks: they change queries, keys and outputs, or add a relative bias."""
    return hook_features(structure.hooks, positions=False) <= {"distance bias"}


def _kernel_serves(cached: CachedLayer, config: ModelConfig, chunk: int) -> bool:
    """Whether a kernel can attend to this layer's cache; to a ring, whose slots are out of order, only unmasked."""
    structure = cached.structure
    if not _plain(structure) or (cached.heads, cached.sizes.key_channels) != (config.kv_heads, config.head_dim):
        return False
    by_distance = structure.slopes or hook_features(structure.hooks, positions=False)
    return not cached.ring or (chunk == 1 and cached.rotated and not by_distance)


def allocate(config: ModelConfig, layout: CacheLayout, batch: int) -> Cache:
    """An empty cache for `batch` sequences, sharded over the mesh like the heads and sequences of activations."""

    def empty(repetition: Repetition, heads: int, cached: CachedLayer, channels: int, dtype: str) -> jax.Array:
        zeros = jnp.zeros((repetition.repeats, batch, heads, cached.slots, channels), jnp.dtype(dtype))
        return constrain(zeros, *slot_axes(cached.ring))

    shapes = [stack.config for stack in stacks(config)]

    def slots(repetition: Repetition, cached: CachedLayer) -> Slots | None:
        if cached.source is not None:
            return None
        sizes, own = cached.sizes, shapes[cached.structure.shape]
        return Slots(
            empty(repetition, cached.heads, cached, sizes.key_channels, config.dtype),
            empty(repetition, own.kv_heads, cached, own.head_dim, config.dtype),
            empty(repetition, config.heads, cached, 1, "float32") if sizes.key_bias else None,
            tuple(jnp.zeros((repetition.repeats, batch, *shape), dtype) for shape, dtype in sizes.sums),
        )

    found = tuple(
        tuple(
            slots(repetition, cached)
            for cached in layout.layers[repetition.start : repetition.start + repetition.period]
        )
        for repetition in layout.repetitions
    )
    return Cache(found, layout)


def arrange(stacked: Any, found: Sequence[Repetition]) -> tuple[tuple[Any, ...], ...]:
    """Arrays [N, ...] in the structure of a cache: by repetition, by layer of its pattern, [R, ...] each."""

    def part(repetition: Repetition, i: int) -> Any:
        stop = repetition.start + repetition.period * repetition.repeats
        return jax.tree.map(lambda a: a[repetition.start + i : stop : repetition.period], stacked)

    return tuple(tuple(part(repetition, i) for i in range(repetition.period)) for repetition in found)


def arrange_layers(layers: Any, layout: CacheLayout, of_stacks: Sequence[Stack]) -> tuple[tuple[Any, ...], ...]:
    """The parameters of all layers in the structure of a cache: of each layer its block's, and its encodings'."""
    blocks, learned = split_layers(layers)
    stacked = stacked_blocks(blocks, of_stacks)
    structure = [cached.structure for cached in layout.layers]

    def block(repetition: Repetition, n: int) -> Any:
        """The parameters of layer n and of its repetitions, whose places in their stack are equally far apart."""
        shape, period = structure[n].shape, structure[repetition.start : repetition.start + repetition.period]
        step, first = [one.shape for one in period].count(shape), of_stacks[shape].layers.index(n)
        return jax.tree.map(lambda a: a[first : first + step * repetition.repeats : step], stacked[shape])

    return tuple(
        tuple(
            (block(repetition, repetition.start + i), of_layer)
            for i, of_layer in enumerate(learned_of_repetition(learned, structure, repetition))
        )
        for repetition in layout.repetitions
    )


def slot_positions(cached: CachedLayer, counts: Int[Array, " B"]) -> Int[Array, "B S"]:
    """The position of the token in each slot, after `counts` tokens of each sequence; negative for an empty slot."""
    slot = jnp.arange(cached.slots, dtype=jnp.int32)
    if cached.ring:
        last = counts[:, None] - 1
        return last - (last - slot) % cached.slots  # the latest token with this remainder; negative: none yet
    return jnp.where(slot < counts[:, None], slot, -1)


def write(
    slots: Slots,
    at: jax.Array | int,
    cached: CachedLayer,
    key: Float[Array, "B C heads K"],
    value: Float[Array, "B C G V"],
    chunk: Chunk,
    key_bias: Float[Array, "B H C"] | None = None,
    sums: Sequence[Shaped[Array, "B C *state"]] = (),
) -> Slots:
    """The slots with the new tokens of each sequence written to repetition `at`; keys and values as they are cached.

    Padding is not written to a ring, where it would replace visible tokens; elsewhere the sequence's next tokens will
    overwrite it.
    """
    B, C = key.shape[:2]
    positions, counts = chunk.positions, chunk.counts
    zero, at = jnp.zeros((), jnp.int32), jnp.asarray(at, jnp.int32)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if C == 1 and B > 1:
            # Index arrays beside a slice: the indexed axes come first, [B, heads, K].
            return old.at[at, jnp.arange(B), :, counts % cached.slots].set(new[:, 0])
        if C == 1 or not cached.ring:
            update = new.transpose(0, 2, 1, 3)[None]
            return jax.lax.dynamic_update_slice(old, update, (at, zero, zero, positions[0, 0] % cached.slots, zero))
        before = jax.lax.dynamic_index_in_dim(old, at, 0, keepdims=False)
        after = slot_positions(cached, counts + chunk.real) - counts[:, None]  # which token of the chunk
        taken = jnp.take_along_axis(new, jnp.clip(after, 0, C - 1)[:, :, None, None], axis=1).transpose(0, 2, 1, 3)
        fresh = jnp.where((after >= 0)[:, None, :, None], taken, before)
        return jax.lax.dynamic_update_slice_in_dim(old, fresh[None], at, 0)

    def put_sum(old: jax.Array, new: jax.Array) -> jax.Array:
        """The state after the last real token; the former one where there is none."""
        last = jnp.maximum(chunk.real - 1, 0)
        latest = jnp.take_along_axis(new, last.reshape(-1, *[1] * (new.ndim - 1)), axis=1)[:, 0]
        some = (chunk.real > 0).reshape(-1, *[1] * (latest.ndim - 1))
        before = jax.lax.dynamic_index_in_dim(old, at, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(old, jnp.where(some, latest, before), at, 0)

    axes = slot_axes(cached.ring)
    return Slots(
        constrain(put(slots.key, key), *axes),
        constrain(put(slots.value, value), *axes),
        None if key_bias is None else put(slots.key_bias, key_bias.swapaxes(1, 2)[..., None]),
        tuple(put_sum(old, new) for old, new in zip(slots.sums, sums, strict=True)),
    )


def forward_chunk(
    model: Model, params: Any, cache: Cache, chunk: Chunk, schedule: Schedule, kernel: KeyBlockKernel | None = None
) -> tuple[Float[Array, "B C D"], Cache]:
    """The output of the last layer for new tokens, and the cache after they are written.

    Args:
      params: {"token_embedder": as in the model, "positional": its `layers.positional`, "layers": from
        `arrange_layers`}.
      cache: from `allocate`.
      schedule: the positional encoding, of the structure in the cache's layout.
      kernel: attends to caches; None: XLA does.
    """
    B, C = chunk.tokens.shape
    layout, positions = cache.layout, chunk.positions
    sharded = slots_are_sharded()
    start = jnp.broadcast_to(positions[:, 0], (B,))
    # What layers share is computed once, outside the scans: the positions of slots, and rotations.
    kinds = {cached.slots: cached for cached in layout.layers}
    tokens_at = {slots: slot_positions(cached, chunk.counts) for slots, cached in kinds.items()}
    tables = model.shared_tables(schedule, positions)

    def rotated_to(cached: CachedLayer) -> jax.Array:
        """The position by which each slot is rotated; without a ring it is equal in all sequences."""
        if cached.ring:
            return jnp.maximum(tokens_at[cached.slots], 0)
        return jnp.arange(cached.slots, dtype=jnp.int32)[None]

    unrotated = {cached.slots: cached for cached in layout.layers if not cached.rotated}
    slot_tables = {slots: model.shared_tables(schedule, rotated_to(cached)) for slots, cached in unrotated.items()}

    def layer(
        x: jax.Array, slots: Slots | None, cached: CachedLayer, layer_params: Any, data: Any, at: Any
    ) -> tuple[jax.Array, Slots | None, Any]:
        """The output, the slots after the new tokens are written, and what layers that read them take."""
        structure, ring = cached.structure, cached.ring
        (block_params, learned), (arrays, embedded) = layer_params, data
        encoding = model.layer_encoding(arrays, structure, positions, tables, learned)
        hooks, config = encoding.hooks, model.shape_of(structure)
        by_kernel = kernel is not None and _kernel_serves(cached, config, C)
        scale = jnp.float32(config.head_dim**-0.5) * encoding.logit_scale
        inputs = AttentionInputs(
            start=start,
            slope=encoding.slope,
            distance_bias=distance_bias(hooks, layout.capacity, config.heads) if by_kernel else None,
            rotation=None if cached.rotated else encoding.rotation,
            window=structure.window,
            soft_cap=encoding.soft_cap,
        )

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, normed: jax.Array) -> tuple[jax.Array, Any]:
            functions = logit_functions(hooks, q)
            before = [jax.lax.dynamic_index_in_dim(one, at, 0, keepdims=False) for one in slots.sums] if slots else []
            inputs_of_hooks, sums = hook_inputs(hooks, normed, before or None)
            q, k = encode(hooks, q, k, positions, inputs_of_hooks)
            bias_of_keys = key_bias(hooks, inputs_of_hooks, config.heads)
            rotated = encode_keys(k, encoding, config.heads)
            new_key = rotated if cached.rotated else k
            if by_kernel and sharded and not ring and structure.keys_of is None:
                q = encode_queries(q, encoding, v.shape[2]) if cached.rotated else q
                cache = KVCache(slots.key, slots.value, at)
                out, *new = write_and_attend(kernel, q, new_key, v, cache, scale, inputs)
                summed = write(slots, at, cached, new_key, v, chunk, None, sums).sums if sums else ()
                return output(hooks, inputs_of_hooks, out, v), (Slots(*new, sums=summed), None)
            if cached.source is None:
                written, place = write(slots, at, cached, new_key, v, chunk, bias_of_keys, sums), at
                # If the cache is written before it is read, XLA updates it in place; else XLA copies it. But a chunk
                # that is written to a ring replaces tokens that its own queries still see: it is read first.
                now = slots if ring and C > 1 else written
            else:
                written, (now, _), place = None, read[cached.source], 0
            again = None if structure.keys_of is None or cached.source is not None else (now, (k, v))
            if by_kernel and not (sharded and structure.keys_of is not None):
                used, of_cache = start + C, inputs
                if ring:  # all tokens in it are visible
                    used, of_cache = jnp.minimum(used, cached.slots), replace(inputs, window=None)
                queries = scaled(encode_queries(q, encoding, k.shape[2]), scale)
                cache = KVCache(now.key, now.value, place)
                out = attend_to_cache(kernel, queries, cache, replace(of_cache, used=used))
                return output(hooks, inputs_of_hooks, out, v), (written, again)
            slots_encoding = None
            if not cached.rotated:
                at_slots = rotated_to(cached)
                slots_encoding = model.layer_encoding(arrays, structure, at_slots, slot_tables[cached.slots])
            used = jnp.minimum(chunk.counts.max(), cached.slots)
            view = CacheView(now.key, now.value, place, tokens_at[cached.slots], used, slots_encoding, now.key_bias)
            out = cached_attention(
                q,
                rotated,
                v,
                view,
                encoding,
                positions=positions,
                window=structure.window,
                key_bias=bias_of_keys,
                functions=functions,
            )
            return output(hooks, inputs_of_hooks, out, v), (written, again)

        shared = None if cached.source is None else read[cached.source][1]
        given = LayerInputs(shared, embedded)
        x, (new, again), _ = model.block(block_params, structure.shape).attend_by(x, attend, given)
        return x, new, again

    x = model.embed(params, chunk.tokens, positions, schedule, params["positional"])
    stacked = layer_arrays(schedule), model.layer_inputs(params, chunk.tokens, x)
    data = arrange(stacked, layout.repetitions)
    # Of each layer whose cache others read, the slots that its queries saw, and the chunk's keys and values. It has no
    # equal, and so is alone in its repetition.
    read: dict[int, tuple[Slots, KeysValues]] = {}
    after = []
    for repetition, slots, repeated_params, repeated_arrays in zip(
        layout.repetitions, cache.repetitions, params["layers"], data, strict=True
    ):
        pattern = layout.layers[repetition.start : repetition.start + repetition.period]

        def group(x: Any, slots: Any, parts: Any, at: Any, pattern: Any = pattern) -> Any:
            new = []
            for cached, one, (layer_params, data) in zip(pattern, slots, parts, strict=True):
                x, one, again = layer(x, one, cached, layer_params, data, at)
                new.append(one)
            return x, tuple(new), again

        parts = tuple(zip(repeated_params, repeated_arrays, strict=True))
        if repetition.repeats == 1:
            x, slots, again = group(x, slots, jax.tree.map(lambda a: a[0], parts), 0)
            if again is not None:
                read[repetition.start + repetition.period - 1] = again
        else:
            # The cache is part of the scan's carry and updated in place. As an input and an output of the scan, it
            # would be copied at every token.
            def step(carry: Any, data: Any, group: Any = group) -> Any:
                return group(*carry, *data)[:2], None

            (x, slots), _ = jax.lax.scan(step, (x, slots), (parts, jnp.arange(repetition.repeats)))
        after.append(slots)
    return x, Cache(tuple(after), layout)
