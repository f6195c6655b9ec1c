"""The gradient of the GPU kernel against float64 gradients of whole matrices, and lowered for CUDA, as in test_gpu."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from key_blocks import INTERPRET, LINES, QUICK, Case, an_h100, error, interpreter_only, request

from pe_lab.attention.bias import PositionBias
from pe_lab.attention.kernels import gpu_gradient
from pe_lab.attention.kernels.gpu import filled
from pe_lab.attention.kernels.gpu_gradient import distance_gradient, gpu_key_block_gradient, gradient_tiles
from pe_lab.attention.key_block import MASKED, AttentionInputs, KeyRotation
from pe_lab.errors import UnsupportedError

CLOSE = {"float32": 1e-5, "bfloat16": 2e-2}


def gradients(asked):
    run = jax.jit(functools.partial(gpu_key_block_gradient, interpret=INTERPRET), compiler_options=QUICK)
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
            assert error(one, wanted) < CLOSE[case.dtype], name
    assert not np.asarray(found.query)[asked.logsumexp == -1e30].any()
    for b, used in enumerate(case.used):
        assert not np.asarray(found.key)[b, :, used:].any()
        assert not np.asarray(found.value)[b, :, used:].any()


# As in test_gpu: two sequences, one begins before all of its keys, and one ends before the keys do.
BASE = Case(B=2, T=70, S=150, H=4, G=2, start=(-3, 75))
FEATURES = {
    "used": {"used": (61, 140)},
    "window": {"window": 37},
    "slopes": {"slopes": True},
    "positions": {"slopes": True, "positions": True},
    "segments": {"segments": True},
    "few": {"T": 3, "start": (-1, 130)},
    "distance bias": {"distance_bias": 41},
    "key bias": {"key_bias": 2},
}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if pair != ("slopes", "positions")]


def features(names):
    return dataclasses.replace(BASE, **{k: v for name in names for k, v in FEATURES[name].items()})


@pytest.mark.parametrize(
    "names",
    [
        (),
        pytest.param(("used", "window", "distance bias", "key bias"), marks=pytest.mark.slow),
        pytest.param(("slopes", "positions", "segments"), marks=pytest.mark.slow),
        ("few", "slopes", "distance bias", "key bias"),
    ],
    ids=" ".join,
)
def test_features_together(names):
    check(features(names))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [*((name,) for name in FEATURES), *PAIRS, *(line for line in LINES if not {"shared", "split"} & {*line})],
    ids=" ".join,
)
def test_features_alone_and_in_pairs(names):
    check(features(names))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 127, 129, 300])
def test_any_length(length):
    check(Case(T=length, distance_bias=max(1, length // 2), key_bias=1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 160, 256])
def test_any_head_dim(head_dim, dtype):
    check(Case(T=70, H=2, G=2, K=head_dim, dtype=dtype, slopes=True, distance_bias=50, key_bias=1))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
def test_everything_at_once_in_16_bits(heads):
    H, G = heads
    everything = dict(used=(300, 170), window=100, slopes=True, positions=True, segments=True)
    check(
        Case(2, 40, 310, H, G, 80, "bfloat16", start=(250, 150), distance_bias=60, key_bias=1, **everything),
    )


# The table is shorter than a block, as long as the largest distance, longer, or reaches only the first keys; the number
# of diagonals is bounded by the table, the sequence, the window, or the keys; the queries may be far behind all keys.
@pytest.mark.parametrize(
    "case",
    [
        Case(T=70, distance_bias=1),
        pytest.param(Case(T=70, distance_bias=2), marks=pytest.mark.slow),
        pytest.param(Case(T=70, distance_bias=70), marks=pytest.mark.slow),
        pytest.param(Case(T=70, distance_bias=500), marks=pytest.mark.slow),
        pytest.param(Case(T=70, distance_bias=500, window=33), marks=pytest.mark.slow),
        pytest.param(Case(T=70, S=40, start=(-60,), distance_bias=100), marks=pytest.mark.slow),
        pytest.param(Case(T=40, S=300, start=(259,), distance_bias=64), marks=pytest.mark.slow),
        pytest.param(Case(B=2, T=40, S=50, start=(500, 20), distance_bias=900), marks=pytest.mark.slow),
        Case(T=40, S=50, start=(500,), distance_bias=900),
        pytest.param(Case(T=40, S=50, start=(500,), distance_bias=510), marks=pytest.mark.slow),
        pytest.param(Case(T=40, S=50, start=(490,), distance_bias=520), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_distances_of_any_table(case):
    check(dataclasses.replace(case, H=2, G=1))


@interpreter_only
@pytest.mark.parametrize("K", [pytest.param(80, marks=pytest.mark.slow), 64])
def test_nothing_beyond_an_array_is_read(K, monkeypatch):
    """Beyond an array the interpreter has NaN: here, one NaN makes the whole block NaN."""

    def load(ref, *, mask, other):
        found = plgpu_load(ref, mask=mask, other=other)
        is_number = jnp.issubdtype(found.dtype, jnp.floating)
        return jnp.where(jnp.isnan(found).any(), jnp.nan, found) if is_number else found

    plgpu_load = gpu_gradient.plgpu.load
    monkeypatch.setattr(gpu_gradient.plgpu, "load", load)
    biases = dict(distance_bias=30, key_bias=2)
    check(Case(2, 40, 100, 4, 2, K, start=(30, 60), used=(41, 99), slopes=True, segments=True, **biases))


@interpreter_only
def test_nothing_beyond_an_array_is_written(monkeypatch):
    """Here, a store writes how many numbers of its block are stored."""

    def store(ref, value, *, mask):
        count = value.size if mask is None else jnp.broadcast_to(mask, value.shape).sum()
        plgpu_store(ref, jnp.full_like(value, count), mask=mask)

    plgpu_store = gpu_gradient.plgpu.store
    monkeypatch.setattr(gpu_gradient.plgpu, "store", store)
    asked = request(Case(T=40, K=80, slopes=True, key_bias=1))
    found = gradients(asked)
    assert {cut.rows for cut in gradient_tiles(40, 40, 80, 4, None, False).values()} == {32}
    there = np.repeat([32, 8], [32, 8])
    for one in (found.query, found.key, found.value):
        np.testing.assert_array_equal(one[0, 0], np.repeat(there[:, None] * 80, 80, axis=1))
    np.testing.assert_array_equal(found.key_bias[0, 0], there)
    assert found.slope[0] == 32 * 32 + 8 * 8


def test_queries_that_see_nothing_have_no_gradient():
    asked = request(Case(T=20, S=30, start=(-25,), distance_bias=9, key_bias=1, slopes=True))
    assert (asked.logsumexp <= MASKED).all()
    for gradient in gradients(asked):
        assert not np.asarray(gradient).any()


def test_what_the_forward_pass_alone_takes_is_refused():
    asked = request(Case())
    rotation = KeyRotation(jnp.zeros((2, 16, 2), jnp.uint32), jnp.ones((2, 16)))
    for refused in ({"rotation": rotation}, {"bias": PositionBias((), ())}):
        asked.inputs = AttentionInputs(**refused)
        with pytest.raises(UnsupportedError):
            gradients(asked)


def test_tiles_fit():
    """Shared memory of the resident blocks and of those that are loaded; an A100 has 163 KiB."""
    for K, itemsize, distances in itertools.product(range(32, 257, 16), (2, 4), (False, True)):
        cuts = gradient_tiles(4096, 4096, K, itemsize, None, distances)
        for name, cut in cuts.items():
            assert {bin(size).count("1") for size in (cut.rows, cut.keys)} == {1}
            assert min(cut.rows, cut.keys) >= 16
            resident = {"queries": cut.rows, "keys": cut.keys, "distances": 0}[name]
            loaded = {"queries": cut.keys, "keys": cut.rows, "distances": 2 * cut.rows}[name]
            size = itemsize * 2 * filled(K) * (resident + cut.stages * loaded)
            bias = 4 * cut.rows * cut.keys if distances and name != "distances" else 0
            assert size + bias <= 163 * 1024, (K, itemsize, name)
        assert cuts["distances"].rows == cuts["distances"].keys


def test_memory_is_linear_in_the_length():
    """No array of the program has more than a block's side times the tokens (and heads) as elements."""

    def largest(T):
        arguments = shapes(T=T, S=T, K=64, distances=T)
        jaxpr = jax.make_jaxpr(gpu_key_block_gradient)(*arguments)
        return max(int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars)

    assert largest(2**17) <= 2.1 * largest(2**16)


# ---------------------------------------------------------------------------------------------------------------------
# For CUDA

LONG = 2**20


def shapes(B=1, T=4000, S=4000, H=8, G=2, K=128, dtype=jnp.bfloat16, bounds=False, slopes=False, positions=False,
           segments=False, window=None, distances=0, key_bias=0):  # fmt: skip
    """A call's arguments as shapes."""
    of = jax.ShapeDtypeStruct
    whole, real = functools.partial(of, dtype=jnp.int32), functools.partial(of, dtype=jnp.float32)
    bound = whole((B,)) if bounds else None
    inputs = AttentionInputs(
        bound,
        bound,
        real((H,)) if slopes else None,
        *([whole((B, T)), whole((B, S))] if positions else [None] * 2),
        *([whole((B, T)), whole((B, S))] if segments else [None] * 2),
        distance_bias=real((H, distances)) if distances else None,
        key_bias=real((key_bias, H, S)) if key_bias else None,
        window=window,
    )
    query, key, number = of((B, H, T, K), dtype), of((B, G, S, K), dtype), real((B, H, T))
    return query, key, key, inputs, number, number, query


EVERYTHING = dict(bounds=True, slopes=True, positions=True, segments=True, window=1000, distances=128, key_bias=1)
KINDS = {
    "everything, two sequences": dict(B=2, K=80, **EVERYTHING),
    "long": dict(K=64, T=LONG, S=LONG, distances=LONG),
    "one head of a group": dict(G=8, **EVERYTHING),
    "rows of more than 4 GiB": dict(B=3, T=LONG, S=LONG, distances=512),
    "few queries": dict(T=3, bounds=True, distances=4000),
}


def lowers(**kind):
    arguments = shapes(**kind)
    allowed = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with an_h100(), warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = export.export(jax.jit(gpu_key_block_gradient), platforms=["cuda"], disabled_checks=allowed)(
            *arguments
        )
    text = exported.mlir_module()
    assert text.count("@__gpu$xla.gpu.triton") == (3 if kind.get("distances") else 2)
    assert (distance_gradient.__name__ in text) == bool(kind.get("distances"))
    assert "stablehlo.scatter" not in text  # no atomic additions in XLA either
    assert [x.shape for x in exported.out_avals[:3]] == [x.shape for x in arguments[:3]]


@pytest.mark.parametrize(
    "kind", [name if i == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(KINDS)]
)
def test_lowers_for_cuda(kind):
    lowers(**KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_lowers_for_cuda_at_any_head_dim(head_dim, dtype):
    lowers(K=head_dim, dtype=jnp.dtype(dtype))
    lowers(K=head_dim, dtype=jnp.dtype(dtype), **EVERYTHING)
