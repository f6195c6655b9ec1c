"""Attention to a block of keys in XLA, without a kernel, against float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from key_blocks import LINES, QUICK, Case, error, request

from pe_lab.attention.chunked import chunked_gradient, chunked_key_block
from pe_lab.attention.key_block import MASKED

BASE = Case(B=2, T=70, S=150, H=4, G=2, K=16, start=(-3, 75))
FEATURES = {
    "used": dict(used=(61, 140)),
    "window": dict(window=37),
    "slopes": dict(slopes=True),
    "positions": dict(slopes=True, positions=True),
    "segments": dict(segments=True),
    "shared": dict(rotation="shared"),
    "split": dict(rotation="split"),
    "few": dict(T=3, start=(-1, 130)),
    "distance bias": dict(distance_bias=90),
    "key bias": dict(key_bias=2),
    "soft cap": dict(soft_cap=1.5, scale=3.0),
}


@pytest.mark.parametrize("names", [(), *LINES, ("soft cap", "slopes", "segments", "used")], ids=" ".join)
def test_features_together(names):
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    asked = request(dataclasses.replace(BASE, **changes))
    kernel = functools.partial(chunked_key_block, wide=True)
    found = jax.jit(kernel, compiler_options=QUICK)(asked.query, asked.key, asked.value, asked.inputs)
    assert error(found.out, asked.out) < 1e-5
    unseen = asked.logsumexp <= MASKED
    assert (np.asarray(found.logsumexp)[unseen] == np.float32(MASKED)).all()
    np.testing.assert_allclose(np.asarray(found.logsumexp)[~unseen], asked.logsumexp[~unseen], atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        ("distance bias", "window", "segments"),
        ("key bias", "slopes", "positions"),
        ("distance bias", "key bias"),
        ("soft cap", "distance bias", "slopes"),
    ],
    ids=" ".join,
)
def test_gradients_together(names):
    """Of queries, keys, values, slopes and both biases, from one block of keys; 3 s in all."""
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    asked = request(dataclasses.replace(BASE, start=(75, 75), **changes))
    inputs = dataclasses.replace(asked.inputs, chunk=32)
    saved = asked.backward
    run = jax.jit(chunked_gradient, compiler_options=QUICK)
    found = run(asked.query, asked.key, asked.value, inputs, saved.logsumexp, saved.inner, saved.d_out)
    for name, got, wanted in zip(saved.wanted._fields, found, saved.wanted, strict=False):
        assert (got is None) == (wanted is None), name
        assert got is None or error(got, wanted) < 1e-5, name
