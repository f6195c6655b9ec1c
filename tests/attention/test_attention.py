"""Attention against loops in float64, and its implementations against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, attention
from pe_lab.errors import UserError
from pe_lab.positional import alibi_slopes

HERE = [
    name
    for name, one in IMPLEMENTATIONS.items()
    if "cpu" in one.capabilities.platforms and one.capabilities.honours >= {"slopes", "segments", "windows"}
]
OTHERS = [name for name in HERE if name != "reference"]


def qkv(B: int, T: int, H: int, G: int, K: int, seed: int = 0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((B, T, n, K)), dtype) for n in (H, G, G))


def rotation_row(inv_freq: np.ndarray, positions: np.ndarray, gain: np.ndarray | None = None) -> LayerEncoding:
    """A layer encoding with these frequencies [rows, R]; positions [B or 1, T]."""
    angle = positions[:, :, None, None] * inv_freq
    gain = np.ones(inv_freq.shape) if gain is None else gain
    return LayerEncoding(jnp.asarray(np.cos(angle) * gain, jnp.float32), jnp.asarray(np.sin(angle) * gain, jnp.float32))


def naive(q, k, v, *, positions=None, inv_freq=None, gain=None, slope=None, beta=1.0, segments=None, window=None):
    """The expected attention, one query at a time, in float64; inv_freq and gain are [H, R]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    positions = np.broadcast_to(np.arange(T) if positions is None else positions, (B, T))
    out = np.zeros((B, T, H, K))

    def rotated(x, position, h):
        if inv_freq is None:
            return x
        z = x[: K // 2] + 1j * x[K // 2 :]
        z = z * np.exp(1j * position * inv_freq[h]) * (1 if gain is None else gain[h])
        return np.concatenate([z.real, z.imag])

    for b, t, h in np.ndindex(B, T, H):
        g = h * k.shape[2] // H
        seen = [
            s
            for s in range(t + 1)
            if (window is None or t - s < window) and (segments is None or segments[b, s] == segments[b, t])
        ]
        query = rotated(q[b, t, h], positions[b, t], h)
        logits = np.array([query @ rotated(k[b, s, g], positions[b, s], h) for s in seen]) * beta / K**0.5
        if slope is not None:
            logits -= slope[h] * (positions[b, t] - positions[b, seen])
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights / weights.sum() @ v[b, seen, g]
    return out


def run(implementation: str, q, k, v, row, *, window=None, chunk=8, **arrays):
    f = functools.partial(attention, window=window, implementation=implementation, chunk=chunk)
    return jax.jit(f)(q, k, v, row, **arrays)


FREQUENCIES = np.array([1.0, 0.3, 0.1, 0.01])  # K = 8
# T = 21: no multiple of the chunk, 8.
PACKED = np.array([[1] * 7 + [2] * 5 + [3] * 9, [1] * 2 + [2] * 18 + [0]])
RESTARTED = np.array([[*range(7), *range(5), *range(9)], [*range(2), *range(18), 0]])


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(
    "case",
    {
        "plain": {},
        "window": dict(window=5),
        "window of one token": dict(window=1),
        "alibi and beta": dict(slope=alibi_slopes(4), beta=1.3),
        "rope": dict(inv_freq=np.tile(FREQUENCIES, (4, 1))),
        "p-rope with gain": dict(inv_freq=np.tile([1.0, 0.3, 0, 0], (4, 1)), gain=np.tile([1.1, 1.1, 1.1, 0], (4, 1))),
        "groups that differ": dict(inv_freq=FREQUENCIES * np.array([1, 1, 0, 0])[:, None]),
        "heads of a group that differ": dict(inv_freq=FREQUENCIES * np.array([1, 0, 0.5, 0])[:, None]),
        "everything in packed documents": dict(
            inv_freq=FREQUENCIES * np.array([1, 0, 0.5, 2])[:, None],
            slope=alibi_slopes(4),
            beta=0.7,
            window=6,
            segments=PACKED,
            positions=RESTARTED,
        ),
    }.items(),
    ids=lambda case: case[0],
)
def test_equals_a_loop_in_float64(implementation, case):
    case = case[1]
    q, k, v = qkv(2, 21, 4, 2, 8)
    positions = np.broadcast_to(case.get("positions", np.arange(21)), (2, 21))
    row = LayerEncoding()
    if "inv_freq" in case:
        # One row where all heads agree; one per key head where its group agrees; else one per query head.
        freq, gain = case["inv_freq"], case.get("gain", np.ones((4, 4)))
        step = 4 if (freq == freq[0]).all() else 2 if (freq[::2] == freq[1::2]).all() else 1
        row = rotation_row(freq[::step], positions, gain[::step])
    row = dataclasses.replace(
        row,
        slope=jnp.asarray(case["slope"], jnp.float32) if "slope" in case else None,
        logit_scale=jnp.float32(case.get("beta", 1.0)),
    )
    segments = jnp.asarray(case["segments"]) if "segments" in case else None
    at, window = jnp.asarray(positions), case.get("window")
    out = run(implementation, q, k, v, row, positions=at, segments=segments, window=window)
    np.testing.assert_allclose(out, naive(q, k, v, **case), atol=3e-6)


@pytest.mark.parametrize("implementation", HERE)
def test_a_head_beside_a_rotating_one_is_nope(implementation):
    """Without its rotation, query head 1 has no position in its scores, though its key head still rotates."""
    q, k, v = qkv(1, 12, 2, 1, 8)
    row = rotation_row(FREQUENCIES * np.array([[1.0], [0.0]]), np.arange(12)[None])
    split = np.asarray(run(implementation, q, k, v, row))
    nope = np.asarray(run(implementation, q, k, v, LayerEncoding()))
    np.testing.assert_allclose(split[:, :, 1], nope[:, :, 1], atol=1e-6)
    assert np.abs(split[:, :, 0] - nope[:, :, 0]).max() > 0.1


@pytest.mark.parametrize("implementation", HERE)
def test_grouped_queries_equal_repeated_key_value_heads(implementation):
    q, k, v = qkv(2, 19, 6, 2, 8)
    row = rotation_row(FREQUENCIES[None], np.arange(19)[None])
    repeated = run(implementation, q, *(jnp.asarray(np.repeat(x, 3, axis=2)) for x in (k, v)), row)
    np.testing.assert_allclose(run(implementation, q, k, v, row), repeated, atol=1e-6)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("window", [None, 1, 7, 8, 100])
def test_gradient_flows_from_the_past_and_the_window_only(implementation, window):
    T = 21
    q, k, v = qkv(1, T, 2, 1, 4)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def sources(t, k, v):  # which keys and values output t depends on: [T, T]
        def at(k, v):
            out = attention(q, k, v, LayerEncoding(), window=window, implementation=implementation, chunk=8)
            # Weights, since the outputs of a softmax over equal values would not depend on the keys.
            return (out[0, t] * jnp.arange(1.0, 5)).sum()

        of_k, of_v = jax.grad(at, (0, 1))(k, v)
        return jnp.abs(of_k).sum((0, 2, 3)), jnp.abs(of_v).sum((0, 2, 3))

    of_k, of_v = (np.asarray(x) for x in sources(jnp.arange(T), k, v))
    distance = np.arange(T)[:, None] - np.arange(T)[None]
    visible = (distance >= 0) & (distance < (window or T))
    assert (of_v[~visible] == 0).all() and (of_k[~visible] == 0).all()
    assert (of_v[visible] > 0).all()
    several = visible & (visible.sum(1, keepdims=True) > 1)  # the weight of a single key is always 1
    assert (of_k[several] > 0).all()


@pytest.mark.parametrize("implementation", HERE)
def test_padding_cannot_reach_an_output_whatever_it_holds(implementation):
    """Segment 0 holds huge queries, keys and values; no real token's output changes by a bit."""
    q, k, v = qkv(2, 21, 4, 2, 8)
    segments = np.where(np.arange(21) < 13, 1, 0)[None].repeat(2, 0)
    pad = (segments == 0)[:, :, None, None]
    row = LayerEncoding(slope=jnp.asarray(alibi_slopes(4), jnp.float32))

    @jax.jit
    def real(q, k, v):
        out = attention(q, k, v, row, segments=jnp.asarray(segments), implementation=implementation, chunk=8)
        return jnp.where(pad, 0, out)

    spoilt = (jnp.asarray(np.where(pad, 1e6, x), jnp.float32) for x in (q, k, v))
    np.testing.assert_array_equal(real(*spoilt), real(q, k, v))


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_nan_in_padding_stays_there(implementation):
    """NaN in queries and keys, whose logits are masked. (A NaN in values would spread: 0 times NaN is NaN.)"""
    q, k, v = qkv(1, 21, 2, 2, 8)
    pad = (np.arange(21) >= 13)[None, :, None, None]
    segments = jnp.asarray(np.where(pad[:, :, 0, 0], 0, 1))
    spoilt = (jnp.asarray(np.where(pad, np.nan, x), jnp.float32) for x in (q, k))
    dirty = np.asarray(run(implementation, *spoilt, v, LayerEncoding(), segments=segments))
    clean = np.asarray(run(implementation, q, k, v, LayerEncoding(), segments=segments))
    np.testing.assert_array_equal(dirty[:, :13], clean[:, :13])


ODD = [(1, 8), (2, 8), (65, 64), *(pytest.param(T, 16, marks=pytest.mark.slow) for T in (63, 129))]


@pytest.mark.parametrize("T, chunk", ODD)
def test_every_implementation_is_the_reference_in_value_and_gradient(T, chunk):
    """At lengths around the block size, with groups, slopes, documents and a window."""
    q, k, v = qkv(2, T, 4, 2, 8, seed=T)
    rng = np.random.default_rng(T)
    segments = np.sort(rng.integers(1, 4, (2, T)), axis=1)
    row = LayerEncoding(slope=jnp.asarray(alibi_slopes(4), jnp.float32), logit_scale=jnp.float32(1.2))
    direction = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)
    settings = [dict(), dict(window=max(1, T // 3), segments=jnp.asarray(segments))]

    @jax.jit
    def evaluate(q, k, v):
        def one(implementation, setting):
            def loss(q, k, v):
                out = attention(q, k, v, row, implementation=implementation, chunk=chunk, **setting)
                return (out * direction).sum(), out

            return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

        return {name: [one(name, setting) for setting in settings] for name in HERE}

    results = evaluate(q, k, v)
    for name in OTHERS:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
            results[name],
            results["reference"],
        )


def test_bfloat16_stays_near_float32():
    """For the same rounded inputs. Logits and sums are float32; only the last roundings differ."""
    q, k, v = qkv(2, 129, 4, 2, 16, dtype=jnp.bfloat16)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    exact = np.asarray(run("reference", *wide, LayerEncoding()))
    for implementation in HERE:
        out = run(implementation, q, k, v, LayerEncoding(), chunk=32)
        assert out.dtype == jnp.bfloat16
        assert np.abs(np.asarray(out, np.float32) - exact).max() < 0.02


def test_chunked_holds_memory_linear_in_the_length():
    """Temporary bytes of the compiled gradient at T, 2T and 4T; those of the reference are quadratic."""

    def temporary_bytes(implementation: str, T: int) -> int:
        q, k, v = (jax.ShapeDtypeStruct((1, T, n, 16), jnp.float32) for n in (2, 1, 1))

        def loss(q, k, v):
            return attention(q, k, v, LayerEncoding(), implementation=implementation, chunk=64).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunked = [temporary_bytes("chunked", T) for T in (2048, 4096, 8192)]
    assert chunked[1] / chunked[0] < 2.2 and chunked[2] / chunked[1] < 2.2, chunked
    reference = [temporary_bytes("reference", T) for T in (512, 2048)]
    assert reference[1] / reference[0] > 8, reference
    assert chunked[0] < reference[1] / 8


def test_auto_takes_the_chunked_one_beyond_a_chunk():
    q, k, v = qkv(1, 16, 2, 2, 4)

    def program(implementation: str, chunk: int) -> str:
        f = functools.partial(attention, implementation=implementation, chunk=chunk)
        return jax.jit(f).lower(q, k, v, LayerEncoding()).as_text()

    assert program("auto", 16) == program("dense", 16) != program("chunked", 16)
    assert program("auto", 8) == program("chunked", 8) != program("dense", 8)


def test_bad_calls_say_what_is_wrong():
    q, k, v = qkv(1, 4, 3, 2, 4)
    with pytest.raises(UserError, match="3 query heads do not divide into 2"):
        attention(q, k, v, LayerEncoding())
    q, k, v = qkv(1, 4, 4, 2, 4)
    with pytest.raises(UserError, match="'chunkd'.*Did you mean 'chunked'"):
        attention(q, k, v, LayerEncoding(), implementation="chunkd")
    with pytest.raises(UserError, match="3 rotations fit neither 2 key heads nor 4 query heads"):
        attention(q, k, v, rotation_row(np.ones((3, 2)), np.arange(4)[None]))
