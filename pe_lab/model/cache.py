"""The cache of keys and values: what each layer keeps, how it is written, and the layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention import Past, Row, cached_attention, encode_keys, encode_queries
from pe_lab.attention.cached_span import Span, Stored, attend_to_cache, write_and_attend
from pe_lab.config import ModelConfig
from pe_lab.model.decoder import Model, layer_arrays
from pe_lab.model.pattern import Run, runs
from pe_lab.parallel import constrain, slots_are_cut
from pe_lab.positional import LayerStructure, Schedule


def slot_axes(ring: bool) -> tuple[str | None, ...]:
    """Logical axes of a cache. A ring is small: every device of a context axis holds it whole."""
    return ("layers", "batch", "kv_heads", None if ring else "slots", "head_dim")


@dataclass(frozen=True)
class CachedLayer:
    """What a layer keeps of the tokens it has read.

    Attributes:
      structure: what is compiled of its positional encoding.
      slots: S. A layer with a window keeps a ring of the window's size, where token p lies in slot p % S; others keep
        the capacity, where token p lies in slot p.
      heads: of the cached keys: H where heads of a group rotate differently, else G. (Keys of G heads that are turned
        per query head on the way would be read with rotations of H heads, which are as large as the keys of H heads.)
      rotated: keys are cached as this schedule turns them. False where the schedule follows the length of the text:
        they are then cached as projected, G heads, and turned by the schedule of the moment whenever they are read.
        False also where a kernel turns them for each query head as it reads them: H / G times less is kept and read.
    """

    structure: LayerStructure
    slots: int
    heads: int
    rotated: bool

    def is_ring(self, capacity: int) -> bool:
        return self.slots < capacity


@dataclass(frozen=True)
class Layout:
    """What is compiled of a cache: its capacity in tokens, every layer's part, and the runs that a scan repeats."""

    capacity: int
    layers: tuple[CachedLayer, ...]
    runs: tuple[Run, ...]


class Slots(NamedTuple):
    """One layer of the pattern of a run, over the run's R repetitions. In the compute dtype."""

    key: Float[Array, "R B heads S K"]
    value: Float[Array, "R B G S K"]


Cache = tuple[tuple[Slots, ...], ...]  # by run, by layer of its pattern


def plan(
    config: ModelConfig,
    structure: Sequence[LayerStructure],
    follows: Sequence[bool],
    capacity: int,
    scan: bool,
    turning: bool = False,
) -> Layout:
    """The layout of a cache for texts of at most `capacity` tokens.

    Args:
      config: a completed model config.
      structure: of the schedule, one per layer.
      follows: which layers' schedule may change as the text grows (`Layer.follows_length`).
      capacity: tokens per row.
      scan: repeat alike layers by a scan; else each is a run of its own.
      turning: there is a kernel that turns keys as it reads them.
    """
    kept = []
    for one, follow in zip(structure, follows, strict=True):
        slots = capacity if one.window is None else min(capacity, one.window)
        split = one.rotates and one.heads == "split"
        rotated = not follow and not (split and turning and _plain(one) and slots == capacity)
        kept.append(CachedLayer(one, slots, config.heads if split and rotated else config.kv_heads, rotated))
    found = runs(kept) if scan else [Run(n, 1, 1) for n in range(len(kept))]
    return Layout(capacity, tuple(kept), tuple(found))


def _plain(structure: LayerStructure) -> bool:
    """Whether a kernel knows all that is beside: noise, warps and a bias on oneself it does not."""
    return not structure.noisy and structure.warp is None and structure.diagonal_bias is None


def _served(span: Span | None, kept: CachedLayer, kv_heads: int, capacity: int, chunk: int) -> bool:
    """Whether a span's kernel reads this layer's cache. Of a ring, whose slots are out of order, only all at once."""
    if span is None or not _plain(kept.structure) or kept.heads != kv_heads:
        return False
    if kept.is_ring(capacity):
        return chunk == 1 and kept.rotated and not kept.structure.slopes
    return True


def allocate(config: ModelConfig, layout: Layout, batch: int) -> Cache:
    """An empty cache for so many rows, cut over the mesh as the heads and rows of activations are."""

    def empty(run: Run, heads: int, kept: CachedLayer) -> jax.Array:
        zeros = jnp.zeros((run.repeats, batch, heads, kept.slots, config.head_dim), jnp.dtype(config.dtype))
        return constrain(zeros, *slot_axes(kept.is_ring(layout.capacity)))

    return tuple(
        tuple(
            Slots(empty(run, kept.heads, kept), empty(run, config.kv_heads, kept))
            for kept in layout.layers[run.start : run.start + run.period]
        )
        for run in layout.runs
    )


def arrange(stacked: Any, found: Sequence[Run]) -> tuple[tuple[Any, ...], ...]:
    """Arrays [N, ...] grouped as a cache is: by run, by layer of its pattern, [R, ...] each."""

    def part(run: Run, i: int) -> Any:
        stop = run.start + run.period * run.repeats
        return jax.tree.map(lambda a: a[run.start + i : stop : run.period], stacked)

    return tuple(tuple(part(run, i) for i in range(run.period)) for run in found)


def held(kept: CachedLayer, capacity: int, counts: Int[Array, " B"]) -> Int[Array, "B S"]:
    """The position of the token in each slot, after `counts` tokens of each row; negative where there is none."""
    slot = jnp.arange(kept.slots, dtype=jnp.int32)
    if kept.is_ring(capacity):
        last = counts[:, None] - 1
        return last - (last - slot) % kept.slots  # the latest token of this remainder; below 0: none yet
    return jnp.where(slot < counts[:, None], slot, -1)


def write(
    slots: Slots,
    at: jax.Array | int,
    kept: CachedLayer,
    capacity: int,
    key: Float[Array, "B C heads K"],
    value: Float[Array, "B C G K"],
    positions: Int[Array, "#B C"],
    counts: Int[Array, " B"],
    real: Int[Array, " B"],
) -> Slots:
    """The slots of repetition `at` with C new tokens of each row.

    Args:
      slots, at, kept, capacity: of the layer.
      key, value: as the cache holds them.
      positions: [1, C] for all rows alike, or [B, 1].
      counts: tokens of each row before these.
      real: how many of the C are tokens; the rest is padding. In a ring padding is not written, for it would push out
        tokens that are still seen; elsewhere it lies where the row's next tokens will.
    """
    B, C = key.shape[:2]
    ring = kept.is_ring(capacity)
    zero, at = jnp.zeros((), jnp.int32), jnp.asarray(at, jnp.int32)

    def put(cached: jax.Array, new: jax.Array) -> jax.Array:
        if C == 1 and B > 1:
            # Index arrays beside a slice: the indexed axes come first, [B, heads, K].
            return cached.at[at, jnp.arange(B), :, counts % kept.slots].set(new[:, 0])
        if C == 1 or not ring:
            update = new.transpose(0, 2, 1, 3)[None]
            return jax.lax.dynamic_update_slice(cached, update, (at, zero, zero, positions[0, 0] % kept.slots, zero))
        before = jax.lax.dynamic_index_in_dim(cached, at, 0, keepdims=False)
        after = held(kept, capacity, counts + real) - counts[:, None]  # which token of the chunk
        taken = jnp.take_along_axis(new, jnp.clip(after, 0, C - 1)[:, :, None, None], axis=1).transpose(0, 2, 1, 3)
        fresh = jnp.where((after >= 0)[:, None, :, None], taken, before)
        return jax.lax.dynamic_update_slice_in_dim(cached, fresh[None], at, 0)

    axes = slot_axes(ring)
    return Slots(constrain(put(slots.key, key), *axes), constrain(put(slots.value, value), *axes))


def read_on(
    model: Model,
    params: Any,
    cache: Cache,
    layout: Layout,
    tokens: Int[Array, "B C"],
    positions: Int[Array, "#B C"],
    counts: Int[Array, " B"],
    real: Int[Array, " B"],
    schedule: Schedule,
    block: int,
    span: Span | None = None,
) -> tuple[Float[Array, "B C D"], Cache]:
    """What the last layer writes for C new tokens of each row, and the cache with them.

    Args:
      params: {"token_embedder": as the model's, "layers": as `arrange` groups the stacked ones}.
      cache, layout: as `allocate` and `plan` make them.
      tokens: new ones of each row, real ones first.
      positions: [1, C] where all rows are read at the same place, or [B, 1].
      counts, real: tokens of each row in the cache, and among the new ones.
      schedule: the positional encoding, of the structure that the layout was planned for.
      block: slots that attention reads at once.
      span: a kernel that reads caches, where there is one.
    """
    B, C = tokens.shape
    cut = slots_are_cut()
    start = jnp.broadcast_to(positions[:, 0], (B,))
    tables = _Tables(model, schedule, layout, positions, counts)
    data = arrange(layer_arrays(schedule), layout.runs)

    def layer(x: jax.Array, slots: Slots, kept: CachedLayer, block_params: Any, arrays: Any, at: Any) -> Any:
        structure = kept.structure
        row = model.row(arrays, structure, positions, tables.of_chunk)
        ring = kept.is_ring(layout.capacity)
        by_span = _served(span, kept, model.config.kv_heads, layout.capacity, C)
        scale = jnp.float32(model.config.head_dim**-0.5) * row.logit_scale

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Slots]:
            if by_span and cut and not ring:
                if kept.rotated:
                    q, k = encode_queries(q, row, k.shape[2], positions), encode_keys(k, row, q.shape[2], positions)
                stored = Stored(slots.key, slots.value, at, None if kept.rotated else row.rotation)
                out, key, value = write_and_attend(
                    span, q, k, v, stored, scale, row.slope, start, window=structure.window
                )
                return out, Slots(key, value)
            where = tables.held(kept)
            turned = None if kept.rotated else tables.of_slots(kept, arrays)
            seen = encode_keys(k, row, model.config.heads, positions)

            def written() -> Slots:
                key = seen if kept.rotated else k
                return write(slots, at, kept, layout.capacity, key, v, positions, counts, real)

            # Written before it is read, a cache is updated in place; XLA would copy one that is read first. A chunk
            # that goes into a ring overwrites tokens which its own queries still see: that one is read first.
            early = not ring or C == 1
            after = written() if early else None
            now = after or slots
            if by_span:
                full = jnp.minimum(start + C, kept.slots) if ring else start + C
                stored = Stored(now.key, now.value, at, row.rotation if not kept.rotated else None)
                window = None if ring else structure.window  # a ring's tokens are all seen, wherever they lie
                queries = encode_queries(q, row, k.shape[2], positions)
                return attend_to_cache(span, queries, stored, scale, row.slope, start, full, window=window), now
            past = Past(now.key, now.value, at, where, jnp.minimum(counts.max(), kept.slots), turned)
            out = cached_attention(q, seen, v, past, row, positions=positions, window=structure.window, block=block)
            return out, after or written()

        return model.block(block_params).attend_by(x, attend)

    x = model.embed(params, tokens)
    after = []
    for run, slots, run_params, run_arrays in zip(layout.runs, cache, params["layers"], data, strict=True):
        pattern = layout.layers[run.start : run.start + run.period]

        def group(x: Any, slots: Any, parts: Any, at: Any, pattern: Any = pattern) -> Any:
            new = []
            for kept, one, (block_params, arrays) in zip(pattern, slots, parts, strict=True):
                x, one = layer(x, one, kept, block_params, arrays, at)
                new.append(one)
            return x, tuple(new)

        parts = tuple(zip(run_params, run_arrays, strict=True))
        if run.repeats == 1:
            x, slots = group(x, slots, jax.tree.map(lambda a: a[0], parts), 0)
        else:
            # The cache goes along as what the loop carries, and is updated in place: as an input and an output of the
            # scan, all of it would be copied at every token.
            def step(carry: Any, data: Any, group: Any = group) -> Any:
                return group(*carry, *data), None

            (x, slots), _ = jax.lax.scan(step, (x, slots), (parts, jnp.arange(run.repeats)))
        after.append(slots)
    return x, tuple(after)


class _Tables:
    """Positions and rotations that layers share, made once while a forward pass is traced."""

    def __init__(self, model: Model, schedule: Schedule, layout: Layout, positions: jax.Array, counts: jax.Array):
        self._model, self._layout, self._counts = model, layout, counts
        self._held: dict[int, jax.Array] = {}
        self.of_chunk: tuple[jax.Array, jax.Array] | None = None
        self._shared: tuple[jax.Array, jax.Array, LayerStructure] | None = None
        self._slots: dict[int, tuple[jax.Array, jax.Array]] = {}
        for kept in layout.layers:
            self._held.setdefault(kept.slots, held(kept, layout.capacity, counts))
        if schedule.same_rotation:
            n = next(i for i, s in enumerate(schedule.structure) if s.rotates)
            structure = schedule.structure[n]
            fixed_freq, gain = jnp.asarray(schedule.fixed_freq)[n], jnp.asarray(schedule.gain)[n]
            self.of_chunk = model.tables(fixed_freq, gain, structure, positions)
            for kept in layout.layers:
                if not kept.rotated and kept.slots not in self._slots:
                    self._slots[kept.slots] = model.tables(fixed_freq, gain, structure, self._turned_at(kept))

    def held(self, kept: CachedLayer) -> jax.Array:
        return self._held[kept.slots]

    def _turned_at(self, kept: CachedLayer) -> jax.Array:
        """Where slots are turned to: of a cache that is no ring, alike in all rows, whatever they hold."""
        if kept.is_ring(self._layout.capacity):
            return jnp.maximum(self._held[kept.slots], 0)
        return jnp.arange(kept.slots, dtype=jnp.int32)[None]

    def of_slots(self, kept: CachedLayer, arrays: Any) -> Row:
        """What turns the keys of a layer that caches them as they were projected."""
        return self._model.row(arrays, kept.structure, self._turned_at(kept), self._slots.get(kept.slots))
