"""The gradient kernels for TPUs, interpreted, against float64: lengths, features alone and in pairs, NaN keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from key_blocks import LINES, QUICK, Case, error, request

from pe_lab.attention.bias import PositionBias
from pe_lab.attention.kernels.tpu_gradient import tpu_key_block_gradient
from pe_lab.attention.key_block import AttentionInputs, KeyRotation
from pe_lab.errors import UnsupportedError

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def gradients(case: Case, **options):
    asked = request(case)
    run = jax.jit(functools.partial(tpu_key_block_gradient, interpret=True, **options), compiler_options=QUICK)
    saved = asked.backward
    return run(asked.query, asked.key, asked.value, asked.inputs, saved.logsumexp, saved.inner, saved.d_out), asked


def check(case: Case, **options) -> None:
    found, asked = gradients(case, **options)
    for name, got, wanted in zip(found._fields, found, asked.backward.wanted, strict=True):
        assert (got is None) == (wanted is None), name
        if got is not None:
            assert got.dtype == jnp.float32 and got.shape == wanted.shape, name
            assert error(got, wanted) < TOLERANCE[case.dtype], f"{name}: {case}"
    hidden = asked.logsumexp <= -1e29
    assert (np.asarray(found.query)[hidden] == 0).all()


@pytest.mark.parametrize("T", [1, 129, *(pytest.param(T, marks=pytest.mark.slow) for T in (2, 127, 128, 600, 1000))])
def test_any_length(T):
    check(Case(T=T, H=4, G=2))


@pytest.mark.parametrize("K", [*(pytest.param(K, marks=pytest.mark.slow) for K in (48, 64, 96, 256)), 128])
def test_any_head(K):
    check(Case(T=140, K=K, H=3, G=1))


# Two rows of a batch: one begins before all of its keys, and one ends before the keys do. Blocks are of 128.
BASE = Case(B=2, T=140, S=300, H=4, G=2, start=(-3, 165))
FEATURES = {
    "used": dict(used=(61, 280)),
    "window": dict(window=70),
    "slopes": dict(slopes=True),
    "positions": dict(slopes=True, positions=True),
    "segments": dict(segments=True),
    "few": dict(T=3, start=(-1, 290)),
    "distance bias": dict(distance_bias=150),
    "key bias": dict(key_bias=2),
}
# Lines without the rotations, which have no gradient here, and without lines that others contain.
_SETS = {frozenset(line) - {"shared", "split"} for line in LINES}
TOGETHER = sorted(tuple(sorted(one)) for one in _SETS if not any(one < other for other in _SETS))
FAST = (("distance bias", "positions", "segments", "slopes"),)
ALL = ("positions", "segments", "used", "window", "distance bias", "key bias")


def _case(names: tuple[str, ...], **changes) -> Case:
    features = {name: value for feature in names for name, value in FEATURES[feature].items()}
    return dataclasses.replace(BASE, **features, **changes)


@pytest.mark.parametrize(
    "names",
    [
        *(line if line in FAST else pytest.param(line, marks=pytest.mark.slow) for line in TOGETHER),
        *(pytest.param((name,), marks=pytest.mark.slow) for name in FEATURES),
        pytest.param(("slopes", "distance bias", "key bias"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_features_alone_and_together(names):
    check(_case(names), block=128)


@pytest.mark.slow
@pytest.mark.parametrize("K", [64, 128])
def test_all_features_in_bfloat16(K):
    check(_case(ALL, dtype="bfloat16", K=K), block=128)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [1, 40, 128, 700])
@pytest.mark.parametrize("window", [None, 100])
def test_biases_by_distance_of_blocks_anywhere(entries, window):
    """Keys that are all later, all earlier, or about as late as queries; tables shorter and longer than distances."""
    for start in ((-400, -128, -127, -1, 0), (1, 127, 128, 129, 500, 3000)):
        check(Case(B=len(start), T=200, S=300, start=start, distance_bias=entries, window=window), block=128)
    check(Case(B=1, T=200, S=300, start=(3000,), distance_bias=entries, window=window), block=128)


def test_all_rows_may_share_the_start_and_the_number_of_used_keys():
    check(Case(B=3, T=5, S=40, start=(30,), used=(33,)))


@pytest.mark.slow
def test_a_whole_sequence_has_biases_by_distance_of_blocks_on_and_under_the_diagonal():
    check(Case(T=300, distance_bias=200, K=128), block=128)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"window": 300}, {"distance_bias": 2000, "key_bias": 1, "slopes": True}], ids=str)
def test_blocks_of_512_and_many_heads(more):
    check(Case(T=1100, H=12, G=1, K=64, **more))


# No shrinking, because an example takes seconds.
@pytest.mark.slow
@settings(max_examples=20, derandomize=True, phases=[Phase.explicit, Phase.generate])
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
            distance_bias=draw(st.sampled_from([0, 1, 128, 2000])),
            key_bias=draw(st.sampled_from([0, 1, B])),
            seed=draw(st.integers(0, 99)),
        ),
        block=draw(st.sampled_from([None, 128])),
    )  # fmt: skip


def test_what_has_no_gradient_is_refused():
    asked = request(Case(T=4, H=2))
    saved = asked.backward
    rotation = KeyRotation(jnp.zeros((2, 16, 2), jnp.uint32), jnp.ones((2, 16)))
    for inputs in (
        AttentionInputs(rotation=rotation),
        AttentionInputs(bias=PositionBias((), ())),
    ):
        with pytest.raises(UnsupportedError):
            tpu_key_block_gradient(
                asked.query, asked.key, asked.value, inputs, saved.logsumexp, saved.inner, saved.d_out, interpret=True
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_multiplied_in_float32(dtype):
    """A TPU multiplies float32 in bfloat16 unless told otherwise. The interpreter never does: the program is read."""
    asked = request(Case(T=128, H=4, G=2, dtype=dtype, distance_bias=8))
    saved = asked.backward
    program = str(
        jax.make_jaxpr(functools.partial(tpu_key_block_gradient, interpret=True))(
            asked.query, asked.key, asked.value, asked.inputs, saved.logsumexp, saved.inner, saved.d_out
        )
    )
    products = program.count("dot_general[")
    assert products >= 3 + 4 + 2  # of the kernels of queries, of keys and values, and of the bias
    assert program.count("precision=(Precision.HIGHEST") == (products if dtype == "float32" else 0)
