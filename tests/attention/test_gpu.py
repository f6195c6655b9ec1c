"""The GPU kernel against whole matrices of logits in float64, interpreted on a CPU; lowered for CUDA without a GPU."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from key_blocks import INTERPRET, LINES, QUICK, Case, an_h100, error, interpreter_only, request

from pe_lab.attention.kernels import gpu as pallas_gpu
from pe_lab.attention.kernels.gpu import gpu_key_block, tiles
from pe_lab.attention.key_block import FLOOR, MASKED, AttentionInputs, KeyRotation, block_rotations, merge
from pe_lab.positional.rotation import fixed_point_frequencies

CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}


def attend(query, key, value, inputs, **settings):
    """The kernel in one jit, which compiles faster than operation by operation."""
    run = jax.jit(functools.partial(gpu_key_block, interpret=INTERPRET, **settings), compiler_options=QUICK)
    return run(query, key, value, inputs)


def check(case, **more):
    asked = request(case)
    found = attend(asked.query, asked.key, asked.value, asked.inputs, **more)
    assert found.out.dtype == (jnp.float32 if more.get("wide") else asked.query.dtype)
    assert error(found.out, asked.out) < CLOSE[case.dtype]
    unseen = asked.logsumexp == -1e30
    np.testing.assert_array_equal(np.asarray(found.logsumexp) == np.float32(MASKED), unseen)
    assert not np.asarray(found.out)[unseen].any()
    assert error(np.where(unseen, 0, found.logsumexp), np.where(unseen, 0, asked.logsumexp)) < CLOSE[case.dtype]
    return found


SLOW_LENGTHS = [pytest.param(length, marks=pytest.mark.slow) for length in (2, 127, 1000)]


@pytest.mark.parametrize("length", [1, 129, *SLOW_LENGTHS])
def test_any_length(length):
    check(Case(T=length))


SLOW_HEADS = [pytest.param(head_dim, marks=pytest.mark.slow) for head_dim in (32, 96, 128, 160)]


@pytest.mark.parametrize("head_dim", [64, 80, 256, *SLOW_HEADS])
def test_any_head_dim(head_dim):
    check(Case(T=70, K=head_dim, dtype="bfloat16" if head_dim % 64 else "float32", rotation="shared"))


# Two rows of a batch: one begins before all of its keys, and one ends before the keys do. Several blocks of queries and
# of keys in each.
BASE = Case(B=2, T=70, S=150, H=4, G=2, start=(-3, 75))
FEATURES = {
    "used": {"used": (61, 140)},
    "window": {"window": 37},
    "slopes": {"slopes": True},
    "positions": {"slopes": True, "positions": True},
    "segments": {"segments": True},
    "shared": {"rotation": "shared"},
    "split": {"rotation": "split"},
    "few": {"T": 3, "start": (-1, 130)},
    "distance bias": {"distance_bias": 33},
    "key bias": {"key_bias": 2},
}


ALONE = [pytest.param((name,), marks=pytest.mark.slow) for name in FEATURES]  # LINES has each of them, too
# The first four have every feature.
TOGETHER = [*LINES[:4], *(pytest.param(line, marks=pytest.mark.slow) for line in LINES[4:])]


@pytest.mark.parametrize("names", [(), *ALONE, *TOGETHER], ids=" ".join)
def test_features_alone_and_together(names):
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    check(dataclasses.replace(BASE, **changes))


# The table has one entry, ends within the keys (blocks beyond it load one entry), or is longer than the keys.
@pytest.mark.parametrize("entries", [1, 40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("T", [3, 70])
def test_distances_of_any_table(entries, T):
    check(dataclasses.replace(BASE, T=T, start=(-1, 130), distance_bias=entries, key_bias=1), splits=2)


@pytest.mark.parametrize(
    ("heads", "T"),
    [
        ((6, 3), 40),
        pytest.param((4, 1), 5, marks=pytest.mark.slow),
        pytest.param((6, 3), 5, marks=pytest.mark.slow),
        pytest.param((4, 1), 40, marks=pytest.mark.slow),
    ],
)
def test_heads_of_a_group_and_all_at_once_in_16_bits(heads, T):
    H, G = heads
    everything = dict(used=(300, 170), window=100, slopes=True, positions=True, segments=True)
    check(Case(2, T, 310, H, G, 80, "bfloat16", start=(250, 150), rotation="grouped", **everything), wide=T == 40)


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, database=None)
@given(st.data())
def test_random_cases(data):
    draw = data.draw
    T, S, G = draw(st.integers(1, 90)), draw(st.integers(1, 200)), draw(st.sampled_from([1, 2]))
    case = Case(
        B=2, T=T, S=S, G=G, H=G * draw(st.integers(1, 3)), K=draw(st.sampled_from([32, 48])),
        dtype=draw(st.sampled_from(sorted(CLOSE))),
        start=tuple(draw(st.tuples(*[st.integers(-T - 2, S + 2)] * 2))),
        used=draw(st.sampled_from([(), (S // 2, S), (0, max(1, S - 3))])),
        window=draw(st.none() | st.integers(1, S + T)),
        slopes=draw(st.booleans()),
        segments=draw(st.booleans()),
        rotation=draw(st.sampled_from(["", "shared", "grouped", "split"])),
        distance_bias=draw(st.sampled_from([0, 1, 30, 300])),
        key_bias=draw(st.sampled_from([0, 1, 2])),
        seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    check(case, splits=draw(st.integers(1, 3)))


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), {"window": 70}], ids=str)
def test_sections_meet_at_every_place_in_a_block(more):
    # One row of the batch for each first query, and one for each number of used keys.
    starts, ends = range(126, 126 + 66), range(130, 130 + 66)
    check(Case(B=66, T=2, S=200, start=tuple(starts), **more))
    check(Case(B=66, T=2, S=200, start=(190,) * 66, used=tuple(ends), **more))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Makes a read of NaN visible: one NaN beyond an array or beyond `used` becomes NaN in the whole block."""

    def load(ref, *, mask, other):
        found = plgpu_load(ref, mask=mask, other=other)
        is_number = jnp.issubdtype(found.dtype, jnp.floating)
        return jnp.where(jnp.isnan(found).any(), jnp.nan, found) if is_number else found

    def store(ref, value, *, mask):
        plgpu_store(ref, jnp.full_like(value, 0 if mask is None else mask.sum()) if counting else value, mask=mask)

    counting = []
    plgpu_load, plgpu_store = pallas_gpu.plgpu.load, pallas_gpu.plgpu.store
    monkeypatch.setattr(pallas_gpu.plgpu, "load", load)
    monkeypatch.setattr(pallas_gpu.plgpu, "store", store)
    return counting


@interpreter_only
@pytest.mark.parametrize("changes", [{"K": 64}, {"K": 80, "rotation": "shared"}, {"K": 80, "T": 2}], ids=str)
def test_nothing_beyond_an_array_is_read(changes, on_a_gpu):
    case = Case(B=2, T=40, S=100, H=4, G=2, start=(30, 60), used=(41, 99), slopes=True, segments=True)
    check(dataclasses.replace(case, **changes))


@interpreter_only
def test_nothing_beyond_an_array_is_written(on_a_gpu):
    on_a_gpu.append("mask")
    asked = request(Case(T=40, K=80))
    found = attend(asked.query, asked.key, asked.value, asked.inputs)
    assert tiles(2, 1, 40, 40, 80, 4).rows == 32
    there = np.repeat([32, 8], [32, 8])
    np.testing.assert_array_equal(found.logsumexp[0, 0], there)
    np.testing.assert_array_equal(found.out[0, 0], np.repeat(there[:, None] * 80, 80, axis=1))


@pytest.mark.parametrize("dtype", CLOSE)
def test_products_of_float32_stay_off_tensor_cores(dtype):
    asked = request(Case(dtype=dtype, rotation="shared"))
    text = str(jax.make_jaxpr(gpu_key_block)(asked.query, asked.key, asked.value, asked.inputs))
    exact = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert text.count("dot_general[") == 6  # two halves and the values, in whole blocks and in the others
    assert exact == (6 if dtype == "float32" else 0)


@pytest.mark.parametrize("splits", [1, 3, *(pytest.param(splits, marks=pytest.mark.slow) for splits in (2, 4, 5))])
def test_splits_of_the_keys_agree(splits):
    case = Case(B=2, T=2, S=700, H=4, G=2, start=(690, 90), used=(692, 92), window=650, rotation="shared")
    check(case, splits=splits)


@pytest.fixture
def merged(monkeypatch):
    """A list of the partial results that are merged."""
    kept = []
    monkeypatch.setattr(pallas_gpu, "merge", lambda parts: kept.extend(parts) or merge(parts))
    return kept


def test_splits_share_the_visible_blocks(merged):
    # Half of the keys are used, and half of those are outside the window: still, each of four splits has a block.
    asked = request(Case(T=1, S=1024, start=(511,), used=(512,), window=256))
    assert tiles(2, 1, 1, 1024, 32, 4).keys == 64

    def parts(*arguments):
        gpu_key_block(*arguments, splits=4, interpret=INTERPRET)
        return jnp.stack([part.logsumexp for part in merged])

    logsumexps = jax.jit(parts, compiler_options=QUICK)(asked.query, asked.key, asked.value, asked.inputs)
    assert logsumexps.shape == (4, 1, 2, 1)
    assert (logsumexps > FLOOR).all()


def test_key_blocks_merge_as_in_a_ring():
    asked = request(Case(B=2, T=60, S=130, H=2, start=(70, 20), slopes=True), garbage=False)
    parts = []
    for first, last in ((0, 50), (50, 130)):
        inputs = dataclasses.replace(asked.inputs, start=asked.inputs.start - first)
        key, value = asked.key[:, :, first:last], asked.value[:, :, first:last]
        parts.append(attend(asked.query, key, value, inputs))
    both = merge(parts)
    assert error(both.out, asked.out) < 1e-5
    assert error(both.logsumexp, asked.logsumexp) < 1e-5


def test_rotations_are_right_at_every_position():
    frequencies = 10000.0 ** -np.linspace(0, 1, 16)[None]
    rotation = KeyRotation(jnp.asarray(fixed_point_frequencies(frequencies)), jnp.full((1, 16), 2.0))
    parts = jax.jit(block_rotations, static_argnums=(1, 2))(rotation, 2**14 + 1, 64)
    block_cos, block_sin, place_cos, place_sin = (np.asarray(x, np.float64)[0] for x in parts)
    places = 2**20 + np.arange(64)
    wanted = 2 * np.exp(1j * places[:, None] * frequencies)
    last = block_cos[-1] + 1j * block_sin[-1]
    np.testing.assert_allclose(last * (place_cos + 1j * place_sin), wanted, atol=4e-6)


def test_tiles_fit():
    for K, itemsize, T, M, distances in itertools.product(
        (32, 64, 80, 96, 128, 160, 256), (2, 4), (1, 3, 16, 100, 4096), (1, 4, 7), (False, True)
    ):
        cut = tiles(2 * M, 2, T, 2**20, K, itemsize, distances=distances)
        assert M % cut.heads == 0
        assert cut.heads == 1 or cut.heads * T <= cut.rows
        assert {bin(inputs).count("1") for inputs in (cut.rows, cut.keys)} == {1}
        assert min(cut.rows, cut.keys) >= 16
        wide = 1 << (K - 1).bit_length()
        size = itemsize * wide * (cut.rows + 2 * cut.stages * cut.keys) + 2048
        size += 4 * cut.rows * cut.keys * (cut.stages - 1) if distances else 0
        assert size <= 163 * 1024  # an A100's
        if cut.rows == 16:
            assert 2 * size <= 227 * 1024  # two programs on an H100
    assert tiles(8, 2, 1, 4096, 64, 2).heads == 4
    assert tiles(8, 2, 1, 4096, 64, 2, alone=True).heads == 1


# ---------------------------------------------------------------------------------------------------------------------
# For CUDA

LONG = 2**20
KINDS = {
    "prefill 64": dict(K=64),
    "prefill 128": dict(K=128),
    "prefill 256": dict(K=256),
    "prefill 128 float32": dict(K=128, dtype=jnp.float32),
    "prefill 80 rotated": dict(K=80, rotation=1),
    "prefill 128 rotated": dict(K=128, T=LONG, S=LONG, rotation=1),
    "prefill 256 rotated float32": dict(K=256, dtype=jnp.float32, rotation=2),
    "prefill 128 split, rows of more than 4 GiB": dict(B=3, K=128, T=LONG, S=LONG, rotation=8),
    "slopes, positions": dict(slopes=True, positions=True),
    "segments, window": dict(segments=True, window=4096, T=LONG, S=LONG),
    "chunk": dict(T=512, S=LONG, bounds=True, rotation=1),
    "decode": dict(T=1, S=LONG, bounds=True),
    "biases": dict(distances=4000, key_bias=1),
    "biases, few distances": dict(K=64, T=LONG, S=LONG, distances=128, key_bias=1),
    "biases, decode": dict(B=2, T=1, S=LONG, bounds=True, distances=LONG, key_bias=2),
    "decode rotated": dict(T=1, S=LONG, bounds=True, rotation=1),
    "decode split float32": dict(T=1, S=LONG, bounds=True, rotation=8, dtype=jnp.float32),
    "decode, everything": dict(
        B=2, T=3, S=5000, K=96, bounds=True, rotation=2, slopes=True, positions=True, segments=True,
        window=1000, splits=3,
    ),
}  # fmt: skip


def shapes(B=1, T=4000, S=4000, H=8, G=2, K=128, dtype=jnp.bfloat16, rotation=0, bounds=False, slopes=False,
           positions=False, segments=False, window=None, distances=0, key_bias=0, **settings):  # fmt: skip
    """A call's arguments as shapes, and its settings."""
    of = jax.ShapeDtypeStruct
    whole = functools.partial(of, dtype=jnp.int32)
    bound = whole((B,)) if bounds else None
    fixed_freq = KeyRotation(of((rotation, K // 2, 2), jnp.uint32), of((rotation, K // 2), jnp.float32))
    inputs = AttentionInputs(
        bound,
        bound,
        of((H,), jnp.float32) if slopes else None,
        *([whole((B, T)), whole((B, S))] if positions else [None] * 2),
        *([whole((B, T)), whole((B, S))] if segments else [None] * 2),
        distance_bias=of((H, distances), jnp.float32) if distances else None,
        key_bias=of((key_bias, H, S), jnp.float32) if key_bias else None,
        rotation=fixed_freq if rotation else None,
        window=window,
    )
    return (of((B, H, T, K), dtype), of((B, G, S, K), dtype), of((B, G, S, K), dtype), inputs), settings


@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_cuda(kind):
    arguments, settings = shapes(**KINDS[kind])
    allowed = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with an_h100(), warnings.catch_warnings():
        warnings.simplefilter("error")  # including that of the deprecation of Triton
        exported = export.export(
            jax.jit(functools.partial(gpu_key_block, **settings)), platforms=["cuda"], disabled_checks=allowed
        )(*arguments)
    text = exported.mlir_module()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    query = arguments[0]
    assert [x.shape for x in exported.out_avals] == [query.shape, query.shape[:3]]
    assert exported.out_avals[0].dtype == query.dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_biases_lower_for_cuda_at_any_head_dim(head_dim, dtype):
    for rotation in (0, 1):
        KINDS["here"] = dict(
            K=head_dim, dtype=jnp.dtype(dtype), distances=128, key_bias=1, rotation=rotation, bounds=True
        )
        test_lowers_for_cuda("here")
    del KINDS["here"]


@pytest.mark.parametrize(
    ("kind", "splits"),
    [
        (dict(T=1, S=LONG), 128),
        (dict(T=1, S=LONG, G=8), 33),
        (dict(T=1, S=LONG, B=8, G=8), 4),
        (dict(T=1, S=300), 1),
        (dict(T=1, S=LONG, G=8, window=1024), 4),
        (dict(T=LONG, S=LONG), 1),
        (dict(T=1, S=100, splits=9), 2),
    ],
)
def test_long_keys_are_split_for_few_queries(kind, splits, merged):
    arguments, settings = shapes(**kind)
    jax.eval_shape(functools.partial(gpu_key_block, **settings), *arguments)
    assert len(merged) == (splits if splits > 1 else 0)
