"""The caches of many layers lie in one array: each kernel reads its layer where it lies, and no other."""

import functools

import jax
import jax.numpy as jnp
import pytest
from spans import Case, error, request

from pe_lab.attention.chunked import chunked_span
from pe_lab.attention.kernels.gpu import gpu_span
from pe_lab.attention.kernels.tpu import tpu_span

SPANS = {
    "chunked": functools.partial(chunked_span, chunk=64),
    "tpu": functools.partial(tpu_span, interpret=True),
    "gpu": functools.partial(gpu_span, interpret=True),
}


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("T", [1, 70])
def test_one_layer_of_three(span, T):
    asked = request(Case(B=2, T=T, S=200, H=4, G=2, start=(100, 7), used=(100 + T, 7 + T), rotation="split"))
    stack = lambda x: jnp.stack([jnp.full_like(x, jnp.nan), x, x * 0 + 5])  # noqa: E731
    read = jax.jit(lambda q, k, v, side, layer: span(q, k, v, side, layer=layer))
    found = read(asked.query, stack(asked.key), stack(asked.value), asked.side, jnp.int32(1))
    assert error(found.out, asked.out) < 1e-5
    found = read(asked.query, stack(asked.key), stack(asked.value), asked.side, jnp.int32(2))
    assert error(found.out, asked.out) > 0.1
