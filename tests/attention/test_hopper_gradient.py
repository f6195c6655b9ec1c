"""The gradient of the kernel for Hopper GPUs against float64, interpreted and lowered for CUDA, as in test_hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("JAX has no interpreter for it before 0.11, which needs Python 3.12", allow_module_level=True)

from key_blocks import INTERPRET, LINES, Case, error, request
from test_gpu_gradient import BASE, EVERYTHING, FEATURES, KINDS, PAIRS, shapes
from test_hopper import lowered, slow

from pe_lab.attention.bias import PositionBias
from pe_lab.attention.kernels.hopper_gradient import hopper_key_block_gradient
from pe_lab.attention.key_block import MASKED, AttentionInputs, KeyRotation
from pe_lab.errors import UnsupportedError

CLOSE = 2e-2  # of bfloat16
BASE = dataclasses.replace(BASE, dtype="bfloat16")


def gradients(asked):
    run = jax.jit(functools.partial(hopper_key_block_gradient, interpret=INTERPRET))
    back = asked.backward
    return run(asked.query, asked.key, asked.value, asked.inputs, back.logsumexp, back.inner, back.d_out)


def check(case):
    asked = request(case)
    found = gradients(asked)
    for name, one, wanted in zip(found._fields, found, asked.backward.wanted, strict=True):
        assert (one is None) == (wanted is None), name
        if wanted is not None:
            assert one.dtype == jnp.float32
            assert one.shape == wanted.shape, name
            # Only the gradients of matrices go through products of 16 bits.
            assert error(one, wanted) < (CLOSE if name in ("query", "key", "value") else 1e-4), name
    assert not np.asarray(found.query)[asked.logsumexp == -1e30].any()
    for b, used in enumerate(case.used):
        assert not np.asarray(found.key)[b, :, used:].any()
        assert not np.asarray(found.value)[b, :, used:].any()


def features(names):
    return dataclasses.replace(BASE, **{k: v for name in names for k, v in FEATURES[name].items()})


TOGETHER = [line for line in LINES if not {"shared", "split"} & {*line}]


@pytest.mark.parametrize(
    "names", [*TOGETHER[:2], *slow((), *((name,) for name in FEATURES), *PAIRS, *TOGETHER[2:])], ids=" ".join
)
def test_features_alone_and_together(names):
    check(features(names))


@pytest.mark.parametrize(
    "names", [("slopes", "segments"), *slow((), ("distance bias", "key bias"), ("few",))], ids=" ".join
)
def test_a_soft_cap_with_other_features(names):
    check(dataclasses.replace(features(names), soft_cap=1.5, scale=3.0))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 127, 129, 300])
def test_any_length(length):
    check(Case(T=length, distance_bias=max(1, length // 2), key_bias=1, dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128, 160, 256])
def test_any_head_dim(head_dim):
    check(Case(T=70, H=2, G=2, K=head_dim, dtype="bfloat16", slopes=True, distance_bias=50, key_bias=1))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
def test_everything_at_once(heads):
    H, G = heads
    everything = dict(used=(300, 170), window=100, slopes=True, positions=True, segments=True)
    check(Case(2, 40, 310, H, G, 80, "bfloat16", start=(250, 150), distance_bias=60, key_bias=1, **everything))


# The table is shorter than a block, as long as the largest distance, longer, or reaches only the first keys; the number
# of diagonals is bounded by the table, the sequence, the window, or the keys; the queries may be far behind all keys.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(T=70, distance_bias=1),
        Case(T=70, distance_bias=2),
        Case(T=70, distance_bias=70),
        Case(T=70, distance_bias=500),
        Case(T=70, distance_bias=500, window=33),
        Case(T=200, distance_bias=200),
        Case(T=70, S=40, start=(-60,), distance_bias=100),
        Case(T=40, S=300, start=(259,), distance_bias=64),
        Case(B=2, T=40, S=50, start=(500, 20), distance_bias=900),
        Case(T=40, S=50, start=(500,), distance_bias=900),
        Case(T=40, S=50, start=(500,), distance_bias=510),
        Case(T=40, S=50, start=(490,), distance_bias=520),
    ],
    ids=str,
)
def test_distances_of_any_table(case):
    check(dataclasses.replace(case, H=2, G=1, dtype="bfloat16"))


def test_queries_that_see_nothing_have_no_gradient():
    asked = request(Case(T=20, S=30, start=(-25,), distance_bias=9, key_bias=1, slopes=True, dtype="bfloat16"))
    assert (asked.logsumexp <= MASKED).all()
    for gradient in gradients(asked):
        assert not np.asarray(gradient).any()


def test_what_the_forward_pass_alone_takes_is_refused():
    asked = request(Case(dtype="bfloat16"))
    rotation = KeyRotation(jnp.zeros((2, 16, 2), jnp.uint32), jnp.ones((2, 16)))
    for refused in ({"rotation": rotation}, {"bias": PositionBias((), ())}):
        asked.inputs = AttentionInputs(**refused)
        with pytest.raises(UnsupportedError):
            gradients(asked)


@pytest.mark.slow
def test_the_same_bits_every_time():
    asked = request(features(("distance bias", "key bias")))
    for one, other in zip(gradients(asked), gradients(asked), strict=True):
        np.testing.assert_array_equal(one, other)


def test_memory_is_linear_in_the_length():
    def largest(T):
        jaxpr = jax.make_jaxpr(hopper_key_block_gradient)(*shapes(T=T, S=T, K=64, distances=T))
        return max(int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars)

    assert largest(2**17) <= 2.1 * largest(2**16)


# ---------------------------------------------------------------------------------------------------------------------
# For CUDA


def lowers(**kind):
    arguments = shapes(**kind)
    text, out = lowered(hopper_key_block_gradient, arguments)
    wide = arguments[0].shape[3] > 128  # keys and values apart
    assert text.count("@mosaic_gpu_v2") == 2 + wide + bool(kind.get("distances"))
    assert "stablehlo.scatter" not in text
    assert [x.shape for x in out[:3]] == [x.shape for x in arguments[:3]]


@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_cuda(kind):
    lowers(**KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_lowers_for_cuda_at_any_head_dim(head_dim):
    lowers(K=head_dim)
    lowers(K=head_dim, **EVERYTHING)
