"""Kernels that rotate keys inside, called by the dispatcher: heads that rotate differently, and heads of noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from key_blocks import an_h100

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, Rotation, attention
from pe_lab.attention.gradient import Pair, whole_sequence
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.key_block import AttentionInputs, Noise
from pe_lab.attention.noise import KEYS, gaussian
from pe_lab.config import MeshConfig
from pe_lab.errors import UnsupportedError
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
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


def request_of(seeds=None, T=T, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, n, K)), dtype) for n in (H, G, G))
    frequencies = rng.uniform(0, 1, (H, K // 2))
    rotation = Rotation(
        jnp.asarray(fixed_point_frequencies(frequencies)), jnp.asarray(rng.uniform(0.8, 1.2, (H, K // 2)), jnp.float32)
    )
    cos, sin = rotation_tables(rotation.fixed_freq, rotation.gain, jnp.arange(T, dtype=jnp.int32)[None])
    noise = None if seeds is None else jnp.asarray(seeds, jnp.uint32)
    return q, k, v, LayerEncoding(cos, sin, noise=noise, rotation=rotation)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(None, id="no noise", marks=pytest.mark.slow),
        pytest.param([0, 7, 0, 9], id="two heads"),
        pytest.param([3, 0, 0, 0], id="one head", marks=pytest.mark.slow),
    ],
)
def test_inside_as_outside(name, seeds):
    q, k, v, row = request_of(seeds)
    compute = jax.jit(functools.partial(attention, backward=False), static_argnames="implementation")
    wanted = compute(q, k, v, row, implementation="reference")
    np.testing.assert_allclose(compute(q, k, v, row, implementation=name), wanted, atol=2e-5)
    plain = compute(q, k, v, row._replace(noise=None), implementation="reference")
    changed = np.abs(np.asarray(wanted - plain)).max((0, 1, 3)) > 0.01
    assert changed.tolist() == [bool(seed) for seed in seeds or [0] * H]


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
    """With 4 devices for 2 key heads, keys, rotations and seeds are sharded per query head."""
    q, k, v, row = request_of([0, 7, 0, 9])
    mesh = make_mesh(MeshConfig(data=2, tensor=tensor), jax.devices()[: 2 * tensor])

    @jax.jit
    def compute(q, k, v, row):
        with use_mesh(mesh, AxisRules()):
            return attention(q, k, v, row, implementation="pallas_tpu", backward=False)

    wanted = attention(q, k, v, row, implementation="reference")
    np.testing.assert_allclose(compute(q, k, v, row), wanted, atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_noise_without_a_rotation_of_each_head_is_refused(kernel):
    q, k, v, row = request_of()
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    inputs = AttentionInputs(noise=Noise(jnp.ones(H, jnp.uint32), jnp.ones((2, T))))
    with pytest.raises(UnsupportedError, match="noise"):
        kernel(q, k, v, inputs, interpret=True)


def test_the_noise_is_standard_normal_and_independent():
    seeds, positions = jnp.asarray([5, 6], jnp.uint32), jnp.arange(4000)
    drawn = np.asarray(gaussian(seeds[:, None, None], KEYS, positions[:, None], jnp.arange(64)))
    assert drawn.mean() == pytest.approx(0, abs=0.01) and drawn.std() == pytest.approx(1, abs=0.01)
    assert (drawn**3).mean() == pytest.approx(0, abs=0.03) and (drawn**4).mean() == pytest.approx(3, abs=0.1)
    flat = drawn.reshape(2, -1)
    for lagged in (flat[0, :-1] * flat[0, 1:], flat[0, :-64] * flat[0, 64:], flat[0] * flat[1]):
        assert lagged.mean() == pytest.approx(0, abs=0.01)  # channels, tokens and heads are independent
    other = np.asarray(gaussian(seeds[:, None, None], 0, positions[:, None], jnp.arange(64)))
    assert (drawn * other).mean() == pytest.approx(0, abs=0.01)


def test_noise_lowers_for_cuda():
    q, k, v, row = request_of([0, 7, 0, 9], T=256, dtype=jnp.bfloat16)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    inputs = AttentionInputs(rotation=row.rotation, noise=Noise(row.noise, jnp.ones((2, 256))))
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with an_h100():
        lowered = export.export(jax.jit(gpu_key_block), platforms=["cuda"], disabled_checks=[check])(q, k, v, inputs)
    assert "__gpu$xla.gpu.triton" in lowered.mlir_module()
