"""The TPU kernel, interpreted, against float64: lengths, features alone and in pairs, NaN beyond the keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from key_blocks import LINES, QUICK, Case, error, request

from pe_lab.attention.kernels.tpu import TpuTiles, tiles, tpu_key_block
from pe_lab.attention.key_block import MASKED, PartialAttention, merge

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def check(case: Case, **options) -> None:
    asked = request(case)
    kernel = functools.partial(tpu_key_block, **options, interpret=True)
    run = jax.jit(kernel, compiler_options=QUICK)
    found = run(asked.query, asked.key, asked.value, asked.inputs)
    assert found.out.dtype == asked.query.dtype and found.logsumexp.dtype == jnp.float32
    assert error(found.out, asked.out) < TOLERANCE[case.dtype], str(case)
    hidden = asked.logsumexp <= MASKED
    logsumexp = np.asarray(found.logsumexp, np.float64)
    assert (logsumexp[hidden] == np.float32(MASKED)).all() and (np.asarray(found.out)[hidden] == 0).all()
    np.testing.assert_allclose(logsumexp[~hidden], asked.logsumexp[~hidden], atol=TOLERANCE[case.dtype], rtol=1e-5)


SLOW_LENGTHS = [pytest.param(length, marks=pytest.mark.slow) for length in (2, 127, 128, 1000)]


@pytest.mark.parametrize("T", [1, 129, *SLOW_LENGTHS])
def test_any_length(T):
    check(Case(T=T, H=4, G=2))


@pytest.mark.parametrize("K", [80, 256, *(pytest.param(K, marks=pytest.mark.slow) for K in (32, 48, 96, 128))])
def test_any_head(K):
    check(Case(T=140, K=K, H=4, G=2, rotation="split"))


# Small blocks, so that few tokens have many of them: queries of 128, of both heads; keys of 128.
SMALL = TpuTiles(heads=2, queries=128, keys=128, few=False)
# Two rows of a batch: one begins before all of its keys, and one ends before the keys do.
BASE = Case(B=2, T=140, S=300, H=4, G=2, start=(-3, 165))
FEATURES = {
    "used": dict(used=(61, 280)),
    "window": dict(window=70),
    "slopes": dict(slopes=True),
    "positions": dict(slopes=True, positions=True),
    "segments": dict(segments=True),
    "shared": dict(rotation="shared"),
    "split": dict(rotation="split"),
    "few": dict(T=3, start=(-1, 290)),
    "distance bias": dict(distance_bias=150),
    "key bias": dict(key_bias=2),
}


ALONE = [pytest.param((name,), marks=pytest.mark.slow) for name in FEATURES]  # LINES has each of them, too
# The first four have every feature.
TOGETHER = [*LINES[:4], *(pytest.param(line, marks=pytest.mark.slow) for line in LINES[4:])]


@pytest.mark.parametrize("names", [(), *ALONE, *TOGETHER], ids=" ".join)
def test_features_alone_and_together(names):
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    wide = len(names) < 3
    case = dataclasses.replace(BASE, **changes, dtype="float32" if wide else "bfloat16", K=32 if wide else 128)
    check(case, cut=None if "few" in names else SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"window": 70}], ids=str)
def test_whole_blocks_begin_and_end_where_all_queries_see_all_keys(more):
    """One row of the batch for each first query, and one for each number of used keys, in a block of 128 keys."""
    cut = TpuTiles(heads=2, queries=8, keys=128, few=True)
    check(Case(B=130, T=2, S=300, start=tuple(range(120, 250)), **more), cut=cut)
    check(Case(B=130, T=2, S=300, start=(290,) * 130, used=tuple(range(125, 255)), **more), cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 3])
def test_decoding_against_a_long_cache(T):
    """Rows of different lengths; keys beyond each length are NaN."""
    case = Case(B=3, T=T, S=1500, H=6, G=2, K=64, start=(1400, 5, 700), used=(1400 + T, 5 + T, 700 + T))
    small = dataclasses.replace(tiles(6, 2, T, 1500), keys=256)
    check(case, cut=small)
    for rotation in ("shared", "split"):
        check(dataclasses.replace(case, rotation=rotation, slopes=True))


# No shrinking, because an example takes a second.
@pytest.mark.slow
@settings(max_examples=10, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_random_shapes_and_features(data):
    draw = data.draw
    G, shared = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))
    T = draw(st.sampled_from([1, 2, 5, 31, 127, 129, 200, 513]))
    S = draw(st.sampled_from([0, 1, 130, 600]))
    B = draw(st.sampled_from([1, 2]))
    keys = S or T
    check(
        Case(
            B=B, T=T, S=S, H=G * shared, G=G,
            K=draw(st.sampled_from([32, 64, 128])),
            dtype=draw(st.sampled_from(["float32", "bfloat16"])),
            start=tuple(draw(st.integers(-T, keys)) for _ in range(B)) if draw(st.booleans()) else (),
            used=tuple(draw(st.integers(0, keys)) for _ in range(B)) if draw(st.booleans()) else (),
            window=draw(st.sampled_from([None, 1, 2, 100, 1000])),
            slopes=draw(st.booleans()),
            segments=draw(st.booleans()),
            rotation=draw(st.sampled_from(["", "shared", "grouped", "split"])),
            distance_bias=draw(st.sampled_from([0, 1, 128, 2000])),
            key_bias=draw(st.sampled_from([0, 1])),
            seed=draw(st.integers(0, 99)),
        ),
    )  # fmt: skip


@pytest.mark.slow
def test_a_million_tokens_from_the_first_key_angles_still_hold():
    """A query at position 2^20: the sum of two angles loses no precision."""
    case = Case(T=1, S=2**20, start=(2**20 - 1,), rotation="shared", H=1, window=64)
    check(case)


def test_all_rows_may_share_the_start_and_the_number_of_used_keys():
    check(Case(B=3, T=5, S=40, start=(30,), used=(33,)))


@pytest.mark.slow
def test_parts_merge_to_the_whole_and_empty_parts_stay_empty():
    asked = request(Case(T=100, H=2, G=2, K=32), garbage=False)
    halves = []
    for start, keys in ((0, slice(0, 64)), (-64, slice(64, 100))):
        inputs = dataclasses.replace(asked.inputs, start=jnp.full(1, start, jnp.int32))
        halves.append(
            tpu_key_block(
                asked.query, asked.key[:, :, keys], asked.value[:, :, keys], inputs, wide=True, interpret=True
            )
        )
    whole = merge(halves)
    assert error(whole.out, asked.out) < 1e-5 and error(whole.logsumexp, asked.logsumexp) < 1e-5
    nothing = PartialAttention(jnp.zeros((1, 1, 2, 4)), jnp.full((1, 1, 2), MASKED))
    assert (merge([nothing, nothing]).logsumexp == np.float32(MASKED)).all()
    assert (merge([nothing, nothing]).out == 0).all()


def test_blocks_hold_whole_groups_of_heads_and_few_rows():
    assert tiles(14, 2, 8192, 8192) == TpuTiles(7, 128, 512, False)
    assert tiles(32, 8, 2**20, 2**20) == TpuTiles(4, 256, 512, False)
    assert tiles(8, 8, 8192, 8192) == TpuTiles(1, 512, 512, False)
    assert tiles(32, 1, 8192, 8192).heads * tiles(32, 1, 8192, 8192).queries <= 1024  # one key head for 32
    assert tiles(14, 2, 1, 2**17) == TpuTiles(7, 1, 2048, True)
    assert tiles(14, 2, 1, 2**17, split_heads=True).queries == 8
    assert tiles(4, 4, 100, 100) == TpuTiles(1, 104, 128, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_multiplied_in_float32(dtype):
    """A TPU multiplies float32 in bfloat16 unless told otherwise. The interpreter never does: the program is read."""
    asked = request(Case(T=128, H=4, G=2, dtype=dtype))
    run = functools.partial(tpu_key_block, interpret=True)
    program = str(jax.make_jaxpr(run)(asked.query, asked.key, asked.value, asked.inputs))
    products = program.count("dot_general[")
    assert products >= 2  # logits and outputs
    assert program.count("precision=(Precision.HIGHEST") == (products if dtype == "float32" else 0)
