"""Checksums of arrays: they prove that a restored array has the values that were saved, on any sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from pe_lab.checkpoints.families import leaf_paths

# A CPU computes about 2 GB/s of checksums, a tenth of the time that saving takes; it saves larger states without them,
# and the digests of their files are compared. An accelerator computes them at the speed of its memory, in less than 1%.
CPU_BYTES = 2**28
# Odd, one for each axis: an element's index is hashed as the sum of its products, which wraps.
_AXES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)


@jax.jit
def checksum(array: jax.Array) -> UInt32[jax.Array, ""]:
    """The sum, modulo 2^32, of a hash of every element's bits and index.

    It does not depend on the sharding: XLA adds the sums of the shards. A change of a single element always changes it,
    any other change with probability 1 - 2^-32.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32)  # 8 bytes: two words, on one more axis
    key = jnp.uint32(0x5BD1E995)
    for axis in range(bits.ndim):
        key = key + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(_AXES[axis])
    # The finalizer of MurmurHash3, a bijection.
    h = bits ^ key
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return (h ^ (h >> 16)).sum(dtype=jnp.uint32)


def describe_arrays(tree: Any, always: bool = False) -> dict[str, dict[str, Any]]:
    """The shape, the dtype and the checksum of each leaf of a tree, by its path.

    Checksums are on the device, from which `received` fetches them; None if they would take too long on this platform
    (see `CPU_BYTES`), unless they are wanted `always`.
    """
    leaves = leaf_paths(tree)
    device_sets = [leaf.sharding.device_set for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    on_cpu = len(device_sets) < len(leaves) or any(next(iter(some)).platform == "cpu" for some in device_sets)
    # XLA's CPU devices may wait for each other for ever when programs with collectives run beside a step.
    alone = on_cpu and any(len(some) > 1 for some in device_sets)
    if alone:
        jax.block_until_ready(list(leaves.values()))
    size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    left_out = on_cpu and size > CPU_BYTES and not always
    sums = {name: None if left_out else checksum(leaf) for name, leaf in leaves.items()}
    if alone:
        jax.block_until_ready(list(sums.values()))
    return {
        name: {"shape": list(leaf.shape), "dtype": str(np.dtype(leaf.dtype)), "checksum": sums[name]}
        for name, leaf in leaves.items()
    }


def received(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The result of `describe_arrays` as JSON: checksums as 8 hex digits."""
    sums = jax.device_get({name: entry["checksum"] for name, entry in described.items()})
    return {
        name: {**entry, "checksum": None if sums[name] is None else f"{int(sums[name]):08x}"}
        for name, entry in described.items()
    }


def comparable(tree: Any, saved: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether all leaves of a tree, arrays or shapes, were saved with a checksum and in the dtype that they have."""
    return all(
        saved.get(name, {}).get("checksum") and saved[name]["dtype"] == str(np.dtype(leaf.dtype))
        for name, leaf in leaf_paths(tree).items()
    )


def differing(tree: Any, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The paths of the leaves of a restored tree whose checksums are not those of the saved arrays."""
    found = received(describe_arrays(tree, always=True))  # on a CPU, too: an accelerator may have saved them
    return [name for name, entry in found.items() if entry["checksum"] != saved[name]["checksum"]]
