"""Attention to a KV cache equals `attention` over the whole sequence, for any content of empty slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.attention import CacheView, LayerEncoding, attention, cached_attention, encode_keys, kv_cache
from pe_lab.attention.hooks import Hooks
from pe_lab.errors import UserError
from pe_lab.positional import LayerHooks
from pe_lab.positional.notebook import NotebookBias

B, H, G, K, SLOTS = 2, 4, 2, 8, 20
LENGTHS = np.asarray([13, 5])  # cached tokens of each row
C = 4


def rotations(rows: int, positions):
    """cos and sin of arbitrary angles with a gain, different for each row."""
    frequency = 0.7 ** np.arange(rows * K // 2).reshape(rows, K // 2)
    angle = np.asarray(positions)[..., None, None] * frequency
    return jnp.asarray(1.1 * np.cos(angle), jnp.float32), jnp.asarray(1.1 * np.sin(angle), jnp.float32)


def row_at(kind: str, positions) -> LayerEncoding:
    """A layer encoding of this `kind`, at these positions [B, T]."""
    row = LayerEncoding()
    for rows, name in ((1, "shared"), (G, "grouped"), (H, "split")):
        if kind == name:
            row = dataclasses.replace(row, **dict(zip(("cos", "sin"), rotations(rows, positions), strict=True)))
    if kind == "slopes":
        row = dataclasses.replace(row, slope=jnp.asarray([0.5, 0.25, 0.1, 0.02]))
    if kind == "scale":
        row = dataclasses.replace(row, logit_scale=jnp.float32(1.7))
    if kind == "position bias":
        row = dataclasses.replace(row, hooks=Hooks(({},), (LayerHooks(NotebookBias(2.0, 7)),)))
    return row


@functools.partial(jax.jit, static_argnames=("window", "block", "rotated"))
def cached(q, k, v, past_key, past_value, at, used, row, slots_row, positions, window, block, rotated):
    past = CacheView(past_key[None], past_value[None], 0, at, used, None if rotated else slots_row)
    seen = encode_keys(k, row, H)
    return cached_attention(q, seen, v, past, row, positions=positions, window=window, block=block)


@functools.partial(jax.jit, static_argnames="window")
def whole(q, k, v, row, positions, window):
    return attention(q, k, v, row, x=q[:, :, 0], positions=positions, window=window)


encoded = jax.jit(encode_keys, static_argnums=2)


def both(kind, window=None, block=6, rotated=True, garbage=0.0, order=None, capacity=SLOTS):
    """Outputs for C tokens after LENGTHS cached ones: by the cache, and by full attention over each row."""
    rng = np.random.default_rng(1)
    T = LENGTHS.max() + C
    q, k, v = (rng.standard_normal((B, T, heads, K)).astype(np.float32) for heads in (H, G, G))
    every = np.broadcast_to(np.arange(T), (B, T))
    # Slots in a given order: visibility depends on positions, not on slots.
    order = np.arange(capacity) if order is None else order
    at = np.where(order < LENGTHS[:, None], order, -1).astype(np.int32)
    heads = H if rotated and kind == "split" else G
    keys = np.asarray(encoded(k, row_at(kind, every), H)) if rotated else k
    past_key = np.full((B, capacity, heads, K), garbage, np.float32)
    past_value = np.full((B, capacity, G, K), garbage, np.float32)
    for b in range(B):
        filled = at[b] >= 0
        past_key[b, filled], past_value[b, filled] = keys[b, at[b, filled]], v[b, at[b, filled]]
    used = np.int32(max(np.flatnonzero((at >= 0).any(0)), default=-1) + 1)
    new = (LENGTHS[:, None] + np.arange(C)).astype(np.int32)
    take = lambda x: np.take_along_axis(x, new[:, :, None, None], 1)  # noqa: E731
    out = cached(
        take(q),
        take(k),
        take(v),
        past_key.transpose(0, 2, 1, 3),
        past_value.transpose(0, 2, 1, 3),
        at,
        used,
        row_at(kind, new),
        row_at(kind, np.maximum(at, 0)),
        new,
        window,
        block,
        rotated,
    )
    full = whole(q, k, v, row_at(kind, every), every, window)
    return np.asarray(out), take(np.asarray(full))


KINDS = ["none", "shared", "grouped", "split", "slopes", "scale", "position bias"]


@pytest.mark.parametrize(
    ("kind", "window"), [(kind, 6) for kind in KINDS] + [("shared", None), ("shared", 1), ("slopes", None)]
)
def test_it_equals_attention_over_the_whole_sequence(kind, window):
    found, full = both(kind, window)
    np.testing.assert_allclose(found, full, atol=2e-5)
    assert np.abs(full).max() > 0.3


@pytest.mark.parametrize("kind", ["shared", "grouped", "split"])
def test_unrotated_keys(kind):
    found, full = both(kind, window=9, rotated=False)
    np.testing.assert_allclose(found, full, atol=2e-5)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_the_content_of_empty_slots_changes_nothing(garbage, rotated):
    clean, _ = both("shared", rotated=rotated)
    np.testing.assert_array_equal(both("shared", garbage=garbage, rotated=rotated)[0], clean)


@settings(max_examples=10)
@given(st.permutations(range(SLOTS)), st.sampled_from([1, 7, 64]))
def test_neither_the_order_of_slots_nor_the_block_matters(order, block):
    found, full = both("shared", window=11, block=block, order=np.asarray(order), garbage=np.nan)
    np.testing.assert_allclose(found, full, atol=2e-5)


def test_blocks_beyond_used_are_not_computed():
    """A key that is marked as filled beyond `used` is not read: the loop ends before it."""
    shape = (1, 1, 1, 32, K)
    past = CacheView(jnp.ones(shape), jnp.ones(shape), 0, jnp.arange(32)[None], jnp.int32(8), None)
    one = jnp.zeros((1, 1, 1, K))
    out = cached_attention(one, one, one, past, LayerEncoding(), positions=jnp.asarray([[32]]), block=8)
    np.testing.assert_allclose(out, np.full((1, 1, 1, K), 8 / 9), rtol=1e-6)  # 8 ones of 9 equal weights


def test_heads_that_do_not_fit():
    past = CacheView(jnp.zeros((1, 1, 2, 4, K)), jnp.zeros((1, 1, 2, 4, K)), 0, -jnp.ones((1, 4), int), jnp.int32(0))
    new = jnp.zeros((1, 1, 2, K))
    with pytest.raises(UserError, match="3 query heads do not divide into 2"):
        cached_attention(jnp.zeros((1, 1, 3, K)), new, new, past, LayerEncoding(), positions=jnp.zeros((1, 1), int))
    cos = jnp.ones((1, 1, 3, K // 2))
    with pytest.raises(UserError, match="3 rotations fit neither 2 key heads nor 4"):
        encode_keys(new, LayerEncoding(cos, cos), 4)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("starts", [(0, 2), (-1, 3), (4, -3), (-9, 9)])
def test_a_device_writes_the_new_tokens_of_its_own_slots(new, starts):
    """Rows may begin before its range of four slots, or beyond it; other layers stay."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((3, 2, G, 4, K)).astype(np.float32)
    tokens = rng.standard_normal((2, new, G, K)).astype(np.float32)
    expected = cache.copy()
    for row, start in enumerate(starts):
        for i in range(new):
            if 0 <= start + i < 4:
                expected[1, row, :, start + i] = tokens[row, i]
    found = jax.jit(kv_cache._written)(cache, 1, tokens, np.asarray(starts, np.int32))
    np.testing.assert_array_equal(found, expected)
