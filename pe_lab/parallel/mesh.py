"""Devices into a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from pe_lab.config import MeshConfig
from pe_lab.errors import UserError

AXES = ("data", "fsdp", "tensor", "context")


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, int, int, int]:
    """Resolves the one -1 of a mesh config; `UserError` where the axes do not make up the devices."""
    sizes = [config.data, config.fsdp, config.tensor, config.context]
    free = [i for i, size in enumerate(sizes) if size == -1]
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh {dict(zip(AXES, sizes, strict=True))}: axes are positive, and at most one is -1.")
    if free and num_devices % fixed == 0:
        sizes[free[0]] = num_devices // fixed
    if int(np.prod(sizes)) != num_devices:
        needed = f"a multiple of {fixed}" if free else str(fixed)
        raise UserError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {needed} devices, and there are {num_devices}. "
            f"Set config.mesh so that data * fsdp * tensor * context = {num_devices}."
        )
    return sizes[0], sizes[1], sizes[2], sizes[3]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run, over all devices of all processes (or those given, such as a compile-only topology's)."""
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(config, len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, where: str) -> None:
    """`UserError` unless a micro-batch cuts evenly over the mesh's data and fsdp axes."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
        if value < 1:
            raise UserError(f"{where}: {name} is {value}; it must be at least 1.")
    if batch_size % accumulate or (batch_size // accumulate) % parts:
        raise UserError(
            f"{where}: batch_size {batch_size} in {accumulate} micro-batches does not divide over the mesh's data x "
            f"fsdp = {parts} devices. Make batch_size a multiple of {accumulate * parts}."
        )
