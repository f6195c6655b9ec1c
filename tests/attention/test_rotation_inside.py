"""Kernels that rotate keys inside, called by the dispatcher: heads that rotate differently."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention import IMPLEMENTATIONS, KeyRotation, LayerEncoding, attention
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.key_block import Pair, whole_sequence
from pe_lab.config import MeshConfig
from pe_lab.parallel import AxisRules, balanced_order, make_mesh, use_mesh
from pe_lab.positional import rotation_tables
from pe_lab.positional.rotation import fixed_point_frequencies

T, H, G, K = 150, 4, 2, 32
KERNELS = {"pallas_tpu": tpu_key_block, "pallas_gpu": gpu_key_block}


@pytest.fixture
def interpreted(monkeypatch):
    """Registers the kernels, interpreted, for the CPU."""
    for name, kernel in KERNELS.items():
        kernel = functools.partial(kernel, interpret=True)
        one = IMPLEMENTATIONS[name]
        capabilities = one.capabilities._replace(platforms=("cpu",))
        monkeypatch.setitem(
            IMPLEMENTATIONS,
            name,
            dataclasses.replace(one, run=whole_sequence(Pair(kernel, None)), partial=kernel, capabilities=capabilities),
        )


def request_of():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, n, K)), jnp.float32) for n in (H, G, G))
    frequencies = rng.uniform(0, 1, (H, K // 2))
    rotation = KeyRotation(
        jnp.asarray(fixed_point_frequencies(frequencies)), jnp.asarray(rng.uniform(0.8, 1.2, (H, K // 2)), jnp.float32)
    )
    cos, sin = rotation_tables(rotation.fixed_freq, rotation.gain, jnp.arange(T, dtype=jnp.int32)[None])
    return q, k, v, LayerEncoding(cos, sin, rotation=rotation)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", KERNELS)
def test_inside_as_outside(name):
    q, k, v, row = request_of()
    compute = jax.jit(functools.partial(attention, backward=False), static_argnames="implementation")
    wanted = compute(q, k, v, row, implementation="reference")
    np.testing.assert_allclose(compute(q, k, v, row, implementation=name), wanted, atol=2e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", KERNELS)
def test_keys_are_not_repeated(name):
    """No array of H key heads is an input of the kernel."""
    q, k, v, row = request_of()
    compute = functools.partial(attention, backward=False, implementation=name)
    text = str(jax.make_jaxpr(compute)(q, k, v, row))
    call = next(line for line in text.splitlines() if "pallas_call" in line)
    assert call
    assert f"f32[2,{T},{G},2,{K}]" not in text  # an intermediate of jnp.repeat of the keys
    repeated = str(jax.make_jaxpr(functools.partial(attention, implementation="chunked"))(q, k, v, row))
    assert f"f32[2,{T},{G},2,{K}]" in repeated


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.slow
def test_on_a_mesh_each_device_has_its_heads(tensor):
    """With 4 devices for 2 key heads, keys and rotations are sharded per query head."""
    q, k, v, row = request_of()
    mesh = make_mesh(MeshConfig(data=2, tensor=tensor), jax.devices()[: 2 * tensor])

    @jax.jit
    def compute(q, k, v, row):
        with use_mesh(mesh, AxisRules()):
            return attention(q, k, v, row, implementation="pallas_tpu", backward=False)

    wanted = attention(q, k, v, row, implementation="reference")
    np.testing.assert_allclose(compute(q, k, v, row), wanted, atol=2e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.slow
def test_across_a_context_axis_by_heads(context):
    """Each device rotates the keys of its heads by their index in the whole sequence. 5 s."""
    q, k, v, row = request_of()
    q, k, v = (x[:, :144] for x in (q, k, v))  # of which there are eight chunks
    order = balanced_order(144, context)
    tables = rotation_tables(row.rotation.fixed_freq, row.rotation.gain, jnp.asarray(order, jnp.int32)[None])
    sharded = dataclasses.replace(row, cos=tables[0], sin=tables[1])
    mesh = make_mesh(MeshConfig(data=1, context=context), jax.devices()[:context])

    @jax.jit
    def compute(q, k, v, row):
        with use_mesh(mesh, AxisRules(context_attention="ulysses")):
            return attention(q, k, v, row, implementation="pallas_tpu", backward=False)

    first = dataclasses.replace(row, cos=row.cos[:, :144], sin=row.sin[:, :144])
    wanted = attention(q, k, v, first, implementation="reference")
    np.testing.assert_allclose(compute(*(x[:, order] for x in (q, k, v)), sharded), wanted[:, order], atol=2e-5)
