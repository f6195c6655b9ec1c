"""The TPU kernels, compiled by the real compiler for three generations of chips, up to a million tokens."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.kernels.tpu_gradient import tpu_key_block_gradient
from pe_lab.attention.key_block import AttentionInputs, KeyRotation
from pe_lab.parallel.compiler import libtpu_version, topology_devices
from pe_lab.parallel.topology import parse_topology

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import attention_compile  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not libtpu_version(), reason="libtpu is for Linux alone"),
]
KERNEL_KINDS = tuple(kind for kind in attention_compile.KINDS if kind != "splash")
# All rows of one chip; of the others, one width, since their memory differs by constants.
CELLS = [("v5e", kind, K, attention_compile.LENGTH) for kind in KERNEL_KINDS for K in attention_compile.HEADS]
CELLS += [(chip, kind, 128, attention_compile.LENGTH) for kind in KERNEL_KINDS for chip in ("v5p", "v6e")]
CELLS += [("v5e", "whole sequence", 64, attention_compile.LONG), ("v6e", "decode", 128, attention_compile.LONG)]


@pytest.mark.parametrize("chip, kind, K, length", CELLS)
def test_a_kernel_compiles_with_the_memory_on_the_page(chip, kind, K, length):
    one = attention_compile.compile_one(chip, kind, K, length)
    assert not one.refused
    assert 0 < one.vmem < 16 * 2**20  # the smallest default limit of a chip
    # No copies: only logsumexps, which XLA lays out as 8 numbers per token and key head; of a gradient also its inner
    # products. A bias by distance adds its table, and its gradient sums by distance: 8 bytes per head and token, and
    # the sums of neighbouring block-diagonals.
    assert one.hbm < 16 * 2**20 + (384 if kind == "gradient, distance bias" else 128) * length
    page = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    row = f"| {attention_compile.KINDS[kind]} | {K} | {length:,} |"
    (line,) = [line for line in page.splitlines() if line.startswith(row)]
    vmem, hbm = line.split("|")[4 + list(attention_compile.CHIPS).index(chip)].strip().split(", ")
    assert float(vmem) == pytest.approx(one.vmem / 2**20, abs=0.3), line
    assert float(hbm.replace(",", "")) == pytest.approx(one.hbm / 2**20, rel=0.1, abs=1), line


def _lowered(chip, function, arguments):
    """A function lowered for a chip; arguments are made by a function of shapes."""
    device = topology_devices(parse_topology(attention_compile.CHIPS[chip]))[0]
    mesh = Mesh(np.array([device]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())

    def shape(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*arguments(shape))


def _inputs(shape, H, T, S, **more):
    """All features that forward and gradient have."""
    return AttentionInputs(
        start=shape(2),
        used=shape(2),
        slope=shape(H, dtype=jnp.float32),
        query_positions=shape(2, T),
        key_positions=shape(2, S),
        query_segments=shape(2, T),
        key_segments=shape(2, S),
        distance_bias=shape(H, 300, dtype=jnp.float32),
        key_bias=shape(2 if T == 5 else 1, H, S, dtype=jnp.float32),
        window=300,
        **more,
    )


BOTH = [("v5e", 48, jnp.float32), ("v5e", 256, jnp.bfloat16), ("v5p", 96, jnp.bfloat16), ("v6e", 80, jnp.bfloat16)]


@pytest.mark.parametrize("chip, K, dtype", [*BOTH, ("v6e", 256, jnp.float32), ("v5e", 32, jnp.bfloat16)])
def test_all_features_at_once_compile(chip, K, dtype):
    H, G, S = 6, 2, 1000

    def arguments(shape, T):
        rotation = KeyRotation(shape(H, K // 2, 2, dtype=jnp.uint32), shape(H, K // 2, dtype=jnp.float32))
        keys = shape(3, 2, G, S, K, dtype=dtype)
        return shape(2, H, T, K, dtype=dtype), keys, keys, _inputs(shape, H, T, S, rotation=rotation)

    for T in (1, 5, 200, 1000):
        lowered = _lowered(chip, functools.partial(tpu_key_block, layer=1), functools.partial(arguments, T=T))
        assert "tpu_custom_call" in lowered.as_text()
        lowered.compile()


@pytest.mark.parametrize("chip, K, dtype", BOTH)
def test_the_gradient_of_all_features_at_once_compiles(chip, K, dtype):
    H, G = 6, 2

    def arguments(shape, T, S):
        query, keys = shape(2, H, T, K, dtype=dtype), shape(2, G, S, K, dtype=dtype)
        each = shape(2, H, T, dtype=jnp.float32)
        return query, keys, keys, _inputs(shape, H, T, S), each, each, query

    for T, S in ((5, 1000), (1000, 2000)):
        lowered = _lowered(chip, tpu_key_block_gradient, functools.partial(arguments, T=T, S=S))
        assert all(f"pe_lab_attention_gradient_{name}" in lowered.as_text() for name in ("query", "key", "diagonal"))
        lowered.compile()
