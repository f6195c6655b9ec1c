"""Kernels read one layer of a KV cache of several layers in one array."""

import functools

import jax
import jax.numpy as jnp
import pytest
from key_blocks import Case, error, request

from pe_lab.attention.chunked import chunked_key_block
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.tpu import tpu_key_block

KERNELS = {
    "chunked": chunked_key_block,
    "tpu": functools.partial(tpu_key_block, interpret=True),
    "gpu": functools.partial(gpu_key_block, interpret=True),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("T", [1, pytest.param(70, marks=pytest.mark.slow)])
def test_one_layer_of_three(kernel, T):
    asked = request(Case(B=2, T=T, S=200, H=4, G=2, start=(100, 7), used=(100 + T, 7 + T), rotation="split"))
    stack = lambda x: jnp.stack([jnp.full_like(x, jnp.nan), x, x * 0 + 5])  # noqa: E731
    read = jax.jit(lambda q, k, v, inputs, layer: kernel(q, k, v, inputs, layer=layer))
    found = read(asked.query, stack(asked.key), stack(asked.value), asked.inputs, jnp.int32(1))
    assert error(found.out, asked.out) < 1e-5
    found = read(asked.query, stack(asked.key), stack(asked.value), asked.inputs, jnp.int32(2))
    assert error(found.out, asked.out) > 0.1
