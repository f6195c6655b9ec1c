"""Attention of a sequence sharded over devices, in a ring or by heads (Ulysses), equals attention on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, attention
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.key_block import AttentionInputs, Pair
from pe_lab.attention.ring import ring_attention
from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.parallel import AxisRules, balanced_order, make_mesh, use_mesh
from pe_lab.positional import alibi_slopes

T = 96


def qkv(B=2, H=4, G=2, K=8, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((B, T, n, K)), jnp.float32) for n in (H, G, G))


def rope(positions, heads=1):
    angle = positions[:, :, None, None] * np.array([1.0, 0.3, 0.1, 0.01]) / np.arange(1, heads + 1)[:, None]
    return LayerEncoding(jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32))


def encoding(positions, heads, case):
    row = rope(positions, heads if case.get("split") else 1) if case.get("rope") else LayerEncoding()
    if case.get("slopes"):
        row = dataclasses.replace(row, slope=jnp.asarray(alibi_slopes(heads), jnp.float32))
    return row


SEGMENTS = np.sort(np.random.default_rng(1).integers(1, 5, (2, T)), axis=1)
CASES = {
    "plain": {},
    "window of 5": dict(window=5),
    "window of a chunk": dict(window=24),
    "window longer than a chunk": dict(window=37),
    "documents": dict(segments=SEGMENTS),
    "alibi, window, documents": dict(slopes=True, window=30, segments=SEGMENTS),
    "alibi": dict(slopes=True),
    "rope": dict(rope=True),
    "a rotation for each head": dict(rope=True, split=True, window=30),
}


def on_mesh(mesh, q, k, v, case, way, implementation="chunked"):
    """Value and gradients on a mesh, in the order of the sequence."""
    order = balanced_order(T, mesh.shape["context"])
    back = np.argsort(order)
    positions = np.arange(T)[order][None]
    row = encoding(positions, q.shape[2], case)
    segments = jnp.asarray(case["segments"][:, order]) if "segments" in case else None

    @jax.jit
    def compute(q, k, v):
        def loss(q, k, v):
            with use_mesh(mesh, AxisRules(context_attention=way)):
                out = attention(
                    q, k, v, row, positions=jnp.asarray(positions), segments=segments, window=case.get("window"),
                    implementation=implementation, chunk=8,
                )  # fmt: skip
            return (out * direction[:, order]).sum(), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    direction = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)
    (_, out), gradients = compute(q[:, order], k[:, order], v[:, order])
    return [np.asarray(x)[:, back] for x in (out, *gradients)]


def on_one_device(q, k, v, case):
    row = encoding(np.arange(T)[None], q.shape[2], case)
    segments = jnp.asarray(case["segments"]) if "segments" in case else None
    direction = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)

    def loss(q, k, v):
        out = attention(q, k, v, row, segments=segments, window=case.get("window"), implementation="reference")
        return (out * direction).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x) for x in (out, *gradients)]


ALL = "alibi, window, documents"
WAYS = ("ring", "ulysses")
SIZES = [pytest.param(name, 4, way, marks=pytest.mark.slow) for name in CASES for way in WAYS]
SIZES += [(ALL, 2, "ring"), (ALL, 2, "ulysses"), pytest.param(ALL, 8, "ring", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "parts", "way"), SIZES)
def test_several_devices_are_one_in_value_and_gradient(name, parts, way):
    """With ulysses, 4 devices have a query head each, and share 2 key heads."""
    case = CASES[name]
    mesh = make_mesh(MeshConfig(data=1, context=parts), jax.devices()[:parts])
    q, k, v = qkv()
    for found, wanted in zip(on_mesh(mesh, q, k, v, case, way), on_one_device(q, k, v, case), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "way"),
    [
        (dict(data=1, context=2, tensor=4), "ring"),
        (dict(data=2, context=2, tensor=2), "ring"),
        (dict(data=1, fsdp=2, context=4), "ring"),
        (dict(data=1, context=2, tensor=2), "ulysses"),
        (dict(data=2, context=2), "ulysses"),
    ],
    ids=str,
)
def test_a_context_axis_beside_others(shape, way):
    """Rows over data and fsdp, heads over tensor: with 4 devices for 2 key heads, keys are repeated per query head."""
    mesh = make_mesh(MeshConfig(**shape), jax.devices()[: np.prod(list(shape.values()))])
    q, k, v = qkv()
    case = dict(slopes=True, window=30, segments=SEGMENTS)
    for found, wanted in zip(on_mesh(mesh, q, k, v, case, way), on_one_device(q, k, v, case), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_key_heads_that_several_devices_need(kv_heads):
    """6 query heads over 2 devices: 1 key head is on both, and 3 are twice as many, for the second group is split."""
    mesh = make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    q, k, v = qkv(H=6, G=kv_heads)
    case = CASES["documents"]
    for found, wanted in zip(on_mesh(mesh, q, k, v, case, "ulysses"), on_one_device(q, k, v, case), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
def test_a_kernel_in_the_ring():
    """The TPU kernel computes the partial results of the ring, interpreted."""
    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    q, k, v = (x.transpose(0, 2, 1, 3) for x in qkv(K=32))
    order = balanced_order(T, 4)
    spec = jax.sharding.PartitionSpec(None, None, "context", None)
    positions = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (2, T))
    slope = jnp.asarray(alibi_slopes(4), jnp.float32)
    kernel = functools.partial(tpu_key_block, interpret=True)

    def part(q, k, v, positions):
        inputs = AttentionInputs(slope=slope, query_positions=positions, key_positions=positions, window=50)
        return ring_attention(q, k, v, inputs, axis="context", size=4, pair=Pair(kernel, None))

    found = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(spec, spec, spec, jax.sharding.PartitionSpec(None, "context")),
            out_specs=spec,
            check_vma=False,
        )
    )(q[:, :, order], k[:, :, order], v[:, :, order], positions)
    whole = IMPLEMENTATIONS["reference"].run(
        *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), AttentionInputs(slope=slope, window=50)
    )
    np.testing.assert_allclose(np.asarray(found)[:, :, np.argsort(order)], whole.transpose(0, 2, 1, 3), atol=1e-5)


def test_every_device_has_equal_work():
    """Visible pairs of tokens on each device, over all steps of the ring."""
    for parts in (2, 4, 8):
        of_devices = balanced_order(T, parts).reshape(parts, -1)
        pairs = [(tokens[:, None] >= np.arange(T)).sum() for tokens in of_devices]
        assert len(set(pairs)) == 1, pairs
        contiguous = [(tokens[:, None] >= np.arange(T)).sum() for tokens in np.arange(T).reshape(parts, -1)]
        assert max(contiguous) / min(contiguous) > parts  # the reason for the order


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="90 tokens does not divide into 8 chunks.*multiple of 8"):
        balanced_order(90, 4)


def test_a_context_axis_that_does_not_divide_the_devices_is_refused():
    with pytest.raises(UserError, match="'context': 3.*8.*data \\* fsdp \\* tensor \\* context = 8"):
        make_mesh(MeshConfig(context=3))
