"""AttentionStatistics of attention against all [T, T] weights in float64, and against known values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked import Diagonal

from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.hooks import Hooks
from pe_lab.attention.statistics import AttentionStatistics, attention_rows, attention_statistics
from pe_lab.errors import UserError
from pe_lab.positional import LayerHooks, alibi_slopes

B, H, G, K = 2, 4, 2, 8
FREQUENCIES = np.array([1.0, 0.3, 0.1, 0.01])


def queries_and_keys(T: int, seed: int = 0, heads: int = H, kv_heads: int = G, size: float = 1.5):
    """Wide enough for attention to be peaked, so that the highest logit of a query rises from block to block."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray((size * rng.standard_normal((B, T, n, K))).astype(np.float32)) for n in (heads, kv_heads))


def measure(*arguments, **options) -> AttentionStatistics:
    """The statistics on the host."""
    return jax.device_get(attention_statistics(*arguments, **options))


def full_weights(
    q, k, *, positions=None, inv_freq=None, gain=1.0, slope=None, beta=1.0, bias=None, segments=None,
    window=None,
):  # fmt: skip
    """Weights and logits [B, H, T, T] in float64, -inf where a key is not seen; inv_freq is [H, R]."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    T, heads = q.shape[1:3]
    at = np.broadcast_to(np.arange(T) if positions is None else positions, (B, T))
    k = np.repeat(k, heads // k.shape[2], axis=2)
    if inv_freq is not None:
        rotation = np.exp(1j * at[:, :, None, None] * inv_freq) * gain
        q, k = ((x[..., : K // 2] + 1j * x[..., K // 2 :]) * rotation for x in (q, k))
    logits = np.einsum("bthk,bshk->bhts", q, np.conj(k)).real * beta / K**0.5
    if slope is not None:
        logits = logits - slope[:, None, None] * (at[:, None, :, None] - at[:, None, None, :])
    if bias is not None:
        logits = logits + np.eye(T) * bias[:, None, :, None]
    seen = np.tri(T, dtype=bool)[None]
    if window is not None:
        seen = seen & (np.subtract.outer(np.arange(T), np.arange(T)) < window)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    logits = np.where(seen[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True), logits


def expected(weights, logits, segments=None) -> AttentionStatistics:
    T = weights.shape[-1]
    safe = np.where(weights > 0, weights, 1)
    index = np.arange(T)
    highest = logits.max(-1)
    on_first = weights[..., 0]
    if segments is not None:
        first = np.array([[list(text).index(one) for one in text] for text in segments])
        on_first = np.take_along_axis(weights, first[:, None, :, None], -1)[..., 0]
    return AttentionStatistics(
        logsumexp=highest + np.log(np.exp(logits - highest[..., None]).sum(-1)),
        entropy=-(weights * np.log(safe)).sum(-1),
        on_self=weights[..., index, index],
        on_previous=np.concatenate([np.zeros((*weights.shape[:2], 1)), weights[..., index[1:], index[:-1]]], -1),
        on_first=on_first,
        distance=(weights * (index[:, None] - index)).sum(-1),
        largest=weights.max(-1),
    )


def assert_equal(found: AttentionStatistics, wanted: AttentionStatistics, tolerance: float = 1e-5):
    for name, a, b in zip(AttentionStatistics._fields, found, wanted, strict=True):
        assert a.dtype == jnp.float32 and a.shape == b.shape, name
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


def rotations(inv_freq: np.ndarray, positions: np.ndarray, gain: float = 1.0) -> LayerEncoding:
    """A layer encoding with the rows of rotations of `inv_freq` [rows, R]."""
    angle = np.asarray(positions)[:, :, None, None] * inv_freq
    return LayerEncoding(*(jnp.asarray(np.float32(f(angle) * gain)) for f in (np.cos, np.sin)))


def spread(rows) -> np.ndarray:
    """[rows, 1] factors of FREQUENCIES as [H, R] frequencies of all query heads."""
    return np.repeat(FREQUENCIES * np.array(rows)[:, None], H // len(rows), axis=0)


T = 21  # no multiple of the block, 8
# Segments end within blocks and at their edges, and segment 1 occurs twice.
PACKED = np.array([[1] * 7 + [2] * 5 + [3] * 9, [1] * 2 + [2] * 14 + [1] * 5])
RESTARTED = np.array([[*range(7), *range(5), *range(9)], [*range(2), *range(14), *range(5)]])
CASES = {
    "window": dict(window=12),
    "window of one token": dict(window=1),
    "alibi at given positions, and beta": dict(
        slope=alibi_slopes(H), positions=np.cumsum(np.arange(T) % 3 + 1)[None], beta=1.3
    ),
    "rope with gain": dict(rows=[1], gain=1.1, beta=3.0),
    "groups that rotate differently": dict(rows=[1, 0]),
    "heads that rotate differently": dict(rows=[1, 0, 0.5, 2]),
    "segments": dict(segments=PACKED),
    "a bias by position": dict(bias=np.linspace(-3, 3, T)[None]),
    "everything": dict(
        rows=[1, 0, 0.5, 2],
        positions=RESTARTED,
        segments=PACKED,
        slope=alibi_slopes(H),
        beta=0.7,
        window=5,
        bias=np.linspace(-1, 1, T)[None],
    ),
}


def arguments_of(case: dict, length: int = T) -> tuple[dict, LayerEncoding, dict]:
    """The arguments of `full_weights`, and the encoding and other arguments of `attention_statistics`."""
    case = dict(case)
    rows, positions = case.pop("rows", None), case.get("positions", np.arange(length)[None])
    row = LayerEncoding()
    if rows is not None:
        row = rotations(FREQUENCIES * np.array(rows)[:, None], positions, case.get("gain", 1.0))
        case["inv_freq"] = spread(rows)
    if "bias" in case:
        diagonal = Hooks(({"w": jnp.asarray(np.float32(case["bias"][0]))},), (LayerHooks(Diagonal(), "w"),))
        row = dataclasses.replace(row, hooks=diagonal)
        case["bias"] = case["bias"][0][np.asarray(positions)]
    arrays = {"slope": "slope", "logit_scale": "beta"}
    row = dataclasses.replace(
        row, **{name: jnp.asarray(np.float32(case[of])) for name, of in arrays.items() if of in case}
    )
    other = {name: jnp.asarray(np.int32(case[name])) for name in ("positions", "segments") if name in case}
    return case, row, other | {"window": case.get("window"), "x": jnp.zeros((B, length, 8)) if "bias" in case else None}


@pytest.mark.parametrize("case", CASES.items(), ids=lambda case: case[0])
def test_equals_all_weights_in_float64(case):
    case, row, other = arguments_of(case[1])
    q, k = queries_and_keys(T)
    weights, logits = full_weights(q, k, **case)
    found = measure(q, k, row, block=8, **other)
    assert_equal(found, expected(weights, logits, case.get("segments")))


@pytest.mark.parametrize("case", ["groups that rotate differently", "everything"])
def test_rows_equal_all_weights_in_float64(case):
    case, row, other = arguments_of(CASES[case])
    q, k = queries_and_keys(T)
    asked = [20, 0, 13]
    found = attention_rows(q, k, row, rows=asked, **other)
    np.testing.assert_allclose(found, full_weights(q, k, **case)[0][:, :, asked], atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 127, 129])
def test_any_length_is_cut_into_blocks(length):
    case, row, other = arguments_of(dict(rows=[1, 0, 0.5, 2], beta=1.5), length)
    q, k = queries_and_keys(length, seed=length)
    found = measure(q, k, row, block=64, **other)
    assert_equal(found, expected(*full_weights(q, k, **case)))


def test_some_queries_are_as_they_are_among_all():
    case, row, other = arguments_of(CASES["everything"])
    q, k = queries_and_keys(T)
    asked = [20, 3, 3, 0, 12, 7, 8, 9, 19]  # in any order, more than a block
    some = measure(q, k, row, queries=asked, block=4, **other)
    every = expected(*full_weights(q, k, **case), case["segments"])
    assert_equal(some, jax.tree.map(lambda x: x[..., asked], every))


def test_statistics_are_of_what_attention_does():
    """Values that are the keys' indices make attention's own output a mean distance."""
    case, row, other = arguments_of(CASES["everything"])
    q, k = queries_and_keys(T)
    index = np.arange(T, dtype=np.float32)
    v = np.stack([index, *[0 * index] * (K - 1)], -1)
    v = jnp.asarray(np.broadcast_to(v[None, :, None], k.shape))
    by_hand = jax.jit(functools.partial(attention, window=other["window"], implementation="reference"))
    out = by_hand(q, k, v, row, positions=other["positions"], segments=other["segments"])
    out = np.asarray(out).transpose(0, 2, 1, 3)
    found = measure(q, k, row, block=8, **other)
    np.testing.assert_allclose(found.distance, index - out[..., 0], atol=1e-5)


def test_bfloat16_is_read_as_attention_reads_it():
    """Queries and keys are rounded; sums are float32."""
    case, row, other = arguments_of(dict(rows=[1, 0]))
    q, k = (x.astype(jnp.bfloat16) for x in queries_and_keys(T))
    found = measure(q, k, row, block=8, **other)
    assert_equal(found, expected(*full_weights(q, k, **case)), tolerance=0.06)


# --- What is known without computing it ------------------------------------------------------------------------------


def test_a_head_without_preferences_attends_to_all_it_sees_alike():
    """Queries of zeros: DoPE-by-all's uniform heads."""
    q, k = queries_and_keys(130)
    found = measure(jnp.zeros_like(q), k, LayerEncoding(), block=64)
    t = np.arange(130)
    for name, value in {
        "logsumexp": np.log(t + 1), "entropy": np.log(t + 1), "on_self": 1 / (t + 1), "on_first": 1 / (t + 1),
        "on_previous": (t > 0) / (t + 1), "distance": t / 2, "largest": 1 / (t + 1),
    }.items():  # fmt: skip
        np.testing.assert_allclose(getattr(found, name), np.broadcast_to(value, (B, H, 130)), rtol=2e-6, atol=1e-6)


def test_large_logits_do_not_overflow_or_lose_precision():
    """Adding the same to all logits changes only logsumexp, by the same; exp(300) overflows in float32."""
    q, k = queries_and_keys(T)
    ones = np.ones((B, T, H, 1), np.float32)
    far = np.concatenate([q, ones * np.float32(300 * K**0.5)], -1), np.concatenate([k, ones[:, :, :G]], -1)
    scale = LayerEncoding(logit_scale=jnp.float32(((K + 1) / K) ** 0.5))  # K + 1 channels are scaled by another factor
    lifted = jax.jit(functools.partial(attention_statistics, block=8))(*map(jnp.asarray, far), scale)
    lifted, plain = jax.device_get(lifted), expected(*full_weights(q, k))
    assert_equal(lifted._replace(logsumexp=lifted.logsumexp - 300), plain, tolerance=3e-4)


def test_packed_documents_equal_single_ones():
    q, k = queries_and_keys(20)
    segments = jnp.asarray([[4] * 10 + [1] * 10] * B)
    packed = measure(q, k, LayerEncoding(), segments=segments, block=8)
    alone = [expected(*full_weights(q[:, part], k[:, part])) for part in (slice(10), slice(10, 20))]
    assert_equal(packed, jax.tree.map(lambda a, b: np.concatenate([a, b], -1), *alone))


def test_memory_is_linear_in_the_length():
    def needed(length: int) -> int:
        shapes = (jax.ShapeDtypeStruct((1, length, n, K), jnp.float32) for n in (H, G))
        table = jax.ShapeDtypeStruct((1, length, 1, K // 2), jnp.float32)

        def f(q, k, table):
            return attention_statistics(q, k, LayerEncoding(table, table), block=128)

        memory = jax.jit(f).lower(*shapes, table).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    # Below 8,192 tokens, the constant size of blocks of logits dominates.
    one, two, four = (needed(n * 8192) for n in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)
    # A few arrays of queries and keys; one of [H, T, T] would be 131,072 * 4 * 4 bytes per token.
    assert (four - two) / 16384 < 4 * (H + G) * K * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(queries=[0, 21]), "there is no token 21 in a sequence of 21, counted from 0"),
        (dict(queries=[-1]), "there is no token -1"),
        (dict(queries=[]), "at least one index"),
    ],
)
def test_an_index_outside_the_sequence_is_an_error(arguments, message):
    with pytest.raises(UserError, match=message):
        attention_statistics(*queries_and_keys(T), LayerEncoding(), **arguments)
    with pytest.raises(UserError, match=message):
        attention_rows(*queries_and_keys(T), LayerEncoding(), rows=arguments["queries"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "row", "message"),
    [
        (3, 2, LayerEncoding(), "3 query heads do not divide"),
        (4, 2, rotations(FREQUENCIES * np.ones((3, 1)), np.arange(T)[None]), "3 rotations fit neither"),
    ],
)
def test_statistics_refuse_the_arguments_that_attention_refuses(heads, kv_heads, row, message):
    q, k = queries_and_keys(T, heads=heads, kv_heads=kv_heads)
    for f in (attention_statistics, functools.partial(attention_rows, rows=[0])):
        with pytest.raises(UserError, match=message):
            f(q, k, row)
    with pytest.raises(UserError, match=message):
        attention(q, k, k, row)
