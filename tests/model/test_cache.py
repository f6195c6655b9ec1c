"""The layout of KV caches, the positions of slots, and writes, which never replace visible tokens by padding."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.attention.hooks import CachedSizes
from pe_lab.config import ModelConfig
from pe_lab.model import Model
from pe_lab.model import cache as module
from pe_lab.model.cache import CachedLayer, Chunk, Slots, allocate, arrange, plan
from pe_lab.model.shape import Repetition
from pe_lab.positional import Alibi, HeadEdit, Layer, LayerStructure, NoPE, Rope, build_schedule, layers

slot_positions = jax.jit(module.slot_positions, static_argnums=0)
write = jax.jit(module.write, static_argnums=2)
CONFIG = Model(ModelConfig(vocab_size=8, layers=4, d_model=32, d_ff=8, heads=4, kv_heads=2, dtype="bfloat16")).config
SPLIT = Layer(Rope(), heads=(HeadEdit((1,), NoPE()),))


def structure(*described):
    return build_schedule(layers(list(described), 4), 4, 2, 8).structure


def test_the_slots_and_heads_of_a_layer():
    layout = plan(CONFIG, structure(Layer(Rope(), 12), SPLIT, SPLIT, Alibi()), (False, False, True, False), 256, True)
    kept = [(one.slots, one.heads, one.rotated) for one in layout.layers]
    # A layer that follows the length caches unrotated keys of G heads.
    assert kept == [(12, 2, True), (256, 4, True), (256, 2, False), (256, 2, True)]
    assert [one.ring for one in layout.layers] == [True, False, False, False]
    wide = plan(CONFIG, structure(Layer(Rope(), 300)), (False,) * 4, 256, True)
    assert wide.layers[0].slots == 256 and not wide.layers[0].ring


def test_the_cache_is_grouped_as_the_layers_are():
    pattern = structure(Layer(Rope(), 12), Layer(NoPE()))
    scanned = plan(CONFIG, pattern, (False,) * 4, 256, True)
    assert scanned.repetitions == (Repetition(0, 2, 2),)
    cache = jax.eval_shape(lambda: allocate(CONFIG, scanned, 3))
    assert [[slots.key.shape for slots in repetition] for repetition in cache.repetitions] == [
        [(2, 3, 2, 12, 8), (2, 3, 2, 256, 8)]
    ]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {"bfloat16"}
    unrolled = plan(CONFIG, pattern, (False,) * 4, 256, False)
    cache = jax.eval_shape(lambda: allocate(CONFIG, unrolled, 3))
    assert [slots.key.shape[0] for repetition in cache.repetitions for slots in repetition] == [1] * 4
    # A layer that follows the length needs another program than one that does not.
    assert len(plan(CONFIG, pattern, (False, False, True, False), 256, True).repetitions) > 1
    stacked = {"w": np.arange(8).reshape(4, 2)}
    grouped = arrange(stacked, scanned.repetitions)
    np.testing.assert_array_equal(grouped[0][0]["w"], [[0, 1], [4, 5]])
    np.testing.assert_array_equal(grouped[0][1]["w"], [[2, 3], [6, 7]])


def kept(slots: int, capacity: int) -> CachedLayer:
    return CachedLayer(LayerStructure(), slots, slots < capacity, 2, True, CachedSizes(4, 2, False, ()))


def test_slot_positions():
    assert slot_positions(kept(4, 4), np.asarray([0, 3])).tolist() == [[-1] * 4, [0, 1, 2, -1]]
    ring = slot_positions(kept(4, 8), np.asarray([0, 3, 4, 10]))
    assert (np.asarray(ring)[0] < 0).all() and ring[1].tolist()[:3] == [0, 1, 2] and ring[1][3] < 0
    assert ring[2].tolist() == [0, 1, 2, 3] and ring[3].tolist() == [8, 9, 6, 7]


def put(slots, size, capacity, positions, counts, real):
    """Writes tokens whose key is their row and position, and NaN as padding."""
    B, C = len(counts), positions.shape[1]
    at = np.broadcast_to(positions, (B, C))
    new = (1000.0 * np.arange(B)[:, None] + at)[:, :, None, None] * np.ones((1, 1, 2, 4))
    new = np.where((np.arange(C) < real[:, None])[:, :, None, None], new, np.nan).astype(np.float32)
    chunk = Chunk(np.zeros((B, C), np.int32), positions, counts, real)
    return write(slots, 0, kept(size, capacity), new, new, chunk)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=2),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 9),
)
def test_slots_after_chunks_and_steps(lengths, size, steps):
    """Unequal rows in chunks of 16, then token by token: every slot with a position has its token, NaN never shows."""
    lengths, B = np.asarray(lengths, np.int32), len(lengths)
    empty = np.zeros((1, B, 2, size, 4), np.float32)
    slots = Slots(jax.numpy.asarray(empty), jax.numpy.asarray(empty))
    for start in range(0, int(lengths.max()), 16):
        positions = (start + np.arange(16, dtype=np.int32))[None]
        counts, real = np.minimum(start, lengths), np.clip(lengths - start, 0, 16)
        slots = put(slots, size, 64, positions, counts, real)
    for step in range(steps):
        now = lengths + step
        slots = put(slots, size, 64, now[:, None], now, np.ones(B, np.int32))
    at = np.asarray(slot_positions(kept(size, 64), lengths + steps))
    key = np.asarray(slots.key)[0]
    for b in range(B):
        expected = {p for p in range(lengths[b] + steps) if p >= lengths[b] + steps - size}
        assert set(at[b][at[b] >= 0]) == expected
        np.testing.assert_array_equal(key[b, 0, at[b] >= 0, 0], 1000 * b + at[b][at[b] >= 0])


@pytest.mark.parametrize("heads", [2, 4])
def test_one_layer_of_many_is_written(heads):
    """Repetition 1 of 3 changes, the others do not."""
    config = dataclasses.replace(CONFIG, dtype="float32")
    layout = plan(config, structure(SPLIT if heads == 4 else Layer(Rope())), (False,) * 4, 256, True)
    (slots,) = allocate(config, layout, 2).repetitions[0]
    key, value = np.ones((2, 1, heads, 8), np.float32), np.ones((2, 1, 2, 8), np.float32)
    counts = np.asarray([5, 9], np.int32)
    chunk = Chunk(np.zeros((2, 1), np.int32), counts[:, None], counts, np.ones(2, np.int32))
    after = write(slots, 1, layout.layers[0], key, value, chunk)
    for leaf in (after.key, after.value):
        written = np.asarray(leaf).sum((2, 4)) != 0  # repetition, row, slot
        assert np.argwhere(written).tolist() == [[1, 0, 5], [1, 1, 9]]
