"""pe_lab's kernels, interpreted, as training calls them: gradients of attention with hooks, also on a ring."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked import KeyBias, Sink, Table, hooked

from pe_lab.attention import IMPLEMENTATIONS, KeyRotation, attention
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.gpu_gradient import gpu_key_block_gradient
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.kernels.tpu_gradient import tpu_key_block_gradient
from pe_lab.attention.key_block import Pair, whole_sequence
from pe_lab.config import MeshConfig
from pe_lab.parallel import AxisRules, balanced_order, make_mesh, use_mesh
from pe_lab.positional import rotation_tables
from pe_lab.positional.rotation import fixed_point_frequencies

T, H, G, K = 96, 4, 2, 32
KERNELS = {
    "pallas_tpu": (tpu_key_block, tpu_key_block_gradient),
    "pallas_gpu": (gpu_key_block, gpu_key_block_gradient),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Registers the kernels, interpreted, for the CPU."""
    for name, kernels in KERNELS.items():
        pair = Pair(*(functools.partial(one, interpret=True) for one in kernels))
        one = IMPLEMENTATIONS[name]
        capabilities = one.capabilities._replace(platforms=("cpu",))
        new = dataclasses.replace(
            one, run=whole_sequence(pair), partial=pair.partial, gradient=pair.gradient, capabilities=capabilities
        )
        monkeypatch.setitem(IMPLEMENTATIONS, name, new)


def arrays(split: bool):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, n, K)), jnp.float32) for n in (H, G, G))
    x = jnp.asarray(rng.standard_normal((2, T, 8)), jnp.float32)
    encoding = hooked(Table(), KeyBias(), Sink())
    if split:
        frequencies = fixed_point_frequencies(rng.uniform(0, 1, (H, K // 2)))
        rotation = KeyRotation(jnp.asarray(frequencies), jnp.ones((H, K // 2)))
        cos, sin = rotation_tables(*rotation, jnp.arange(T, dtype=jnp.int32)[None])
        encoding = dataclasses.replace(encoding, cos=cos, sin=sin, rotation=rotation)
    return (q, k, v, x, encoding.hooks.params), encoding


def gradients(name, split, segments=None, order=None):
    given, encoding = arrays(split)
    if order is not None:
        given = (*(one[:, order] for one in given[:4]), given[4])

    def loss(given):
        q, k, v, x, params = given
        row = dataclasses.replace(encoding, hooks=dataclasses.replace(encoding.hooks, params=params))
        out = attention(q, k, v, row, x=x, segments=segments, window=50, implementation=name, chunk=32)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * (weights if order is None else weights[:, order])).sum()

    return jax.jit(jax.value_and_grad(loss))(given)


def assert_equal(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1.0, float(np.abs(b).max())))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", [False, True], ids=["no rotation", "keys rotated inside"])
def test_gradients_are_those_of_the_reference(name, split):
    segments = jnp.asarray([[0] * 40 + [1] * (T - 40)] * 2)
    assert_equal(gradients(name, split, segments), gradients("reference", split, segments))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_gradients_across_a_context_axis(name, way):
    """Of queries, keys, values, the table's and the sinks' parameters, and of the key bias that travels. 12 s each."""
    order = balanced_order(T, 2)
    wanted = gradients("reference", False)
    mesh = make_mesh(MeshConfig(data=2, context=2), jax.devices()[:4])
    with use_mesh(mesh, AxisRules(context_attention=way)):
        loss, found = gradients(name, False, order=order)
    back = np.argsort(order)
    found = (*(one[:, back] for one in found[:4]), found[4])
    assert_equal((loss, found), wanted)
