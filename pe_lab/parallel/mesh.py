"""The device mesh of a run, and how batches and sequences divide over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jaxtyping import Int

from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "context")


def mesh_shape(config: MeshConfig, num_devices: int, slices: int = 1) -> tuple[int, int, int, int]:
    """The sizes of the mesh axes, with the one -1 of a mesh config resolved, for devices in `slices` TPU slices.

    Raises:
      ConfigError: the product of the axes is not the number of devices, or an axis other than data would cross slices.
    """
    if config.slices not in (0, slices):
        raise ConfigError(f"config.mesh.slices is {config.slices}; the devices are in {slices}. Set it to that, or 0.")
    sizes = [config.data, config.fsdp, config.tensor, config.context]
    shown = dict(zip(AXES, sizes, strict=True))
    free = [i for i, size in enumerate(sizes) if size == -1]
    fixed = math.prod(size for size in sizes if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"mesh {shown}: axes are positive, and at most one is -1.")
    if free and num_devices % fixed == 0:
        sizes[free[0]] = num_devices // fixed
    if math.prod(sizes) != num_devices:
        needed = f"a multiple of {fixed}" if free else str(fixed)
        raise ConfigError(
            f"mesh {shown} needs {needed} devices, and there are {num_devices}. "
            f"Set config.mesh so that data * fsdp * tensor * context = {num_devices}."
        )
    if sizes[0] % slices:
        raise ConfigError(
            f"mesh {shown}: {slices} slices do not divide data = {sizes[0]}. Only data parallelism crosses the network "
            f"between slices: fsdp * tensor * context must divide the {num_devices // slices} devices of a slice."
        )
    return sizes[0], sizes[1], sizes[2], sizes[3]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run over `devices`, by default all devices of all processes.

    On a TPU slice the devices are ordered so that neighbours on a mesh axis are neighbours in the slice. A mesh axis
    may take a part of a physical axis (8 of the 16 of v6e:16x16), which `jax.make_mesh` allows on v5e alone. Of several
    slices, each has a contiguous part of the data axis: what the other axes exchange stays within a slice.

    Raises:
      ConfigError: as `mesh_shape`.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({_slice_of(device) for device in devices})
    shape = mesh_shape(config, len(devices), slices)
    if slices > 1:
        each, across = (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1)
        ordered = mesh_utils.create_hybrid_device_mesh(each, across, devices, allow_split_physical_axes=True)
    else:
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slice_of(device: Any) -> int:
    """The TPU slice of a device; 0 on other platforms and where there is one."""
    return (getattr(device, "slice_index", None) or 0) if device.platform == "tpu" else 0


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, where: str) -> None:
    """Raises `ConfigError` unless a micro-batch divides evenly over the data and fsdp axes of the mesh."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
        if value < 1:
            raise ConfigError(f"{where}: {name} is {value}; it must be at least 1.")
    if batch_size % accumulate or (batch_size // accumulate) % parts:
        raise ConfigError(
            f"{where}: batch_size {batch_size} in {accumulate} micro-batches does not divide over the mesh's data x "
            f"fsdp = {parts} devices. Make batch_size a multiple of {accumulate * parts}."
        )


def balanced_order(length: int, parts: int) -> Int[np.ndarray, " length"]:
    """The position in the sequence of the token in each slot, where `parts` devices hold equal slices of the slots.

    Under a causal mask a later token attends to more keys, so contiguous slices would leave the first device idle
    most of the time. The sequence is split into 2 * parts chunks, and device i gets the chunks i and
    2 * parts - 1 - i, an early and a late one (zig-zag, as in Llama 3's training, arXiv:2407.21783, section 3.3.2).
    Tokens of a chunk stay in order.

    Raises:
      ConfigError: the length does not divide into 2 * parts chunks.
    """
    if parts == 1:
        return np.arange(length)
    if length % (2 * parts):
        raise ConfigError(
            f"A sequence of {length} tokens does not divide into {2 * parts} chunks, two for each of the {parts} "
            f"devices of mesh axis 'context'. Choose a length that is a multiple of {2 * parts}, or another "
            "mesh.context."
        )
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, 2 * parts - 1 - i]].reshape(-1) for i in range(parts)])


def padded_length(length: int, parts: int) -> int:
    """The smallest length of at least `length` that `balanced_order` accepts."""
    return length if parts == 1 else -(-length // (2 * parts)) * 2 * parts
