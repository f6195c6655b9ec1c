"""Devices into a mesh, and processes into one program."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from pe_lab.config import MeshConfig, UserError

AXES = ("data", "fsdp", "tensor")
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_GPU_DEVICES = ("/dev/nvidia0",)


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """Resolves the one -1 of a mesh config; `UserError` where the axes do not make up the devices."""
    sizes = [config.data, config.fsdp, config.tensor]
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
            f"Set config.mesh so that data * fsdp * tensor = {num_devices}."
        )
    return sizes[0], sizes[1], sizes[2]


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


def start_processes() -> None:
    """Joins the processes of a pod slice or a cluster, where the environment says there are several.

    A TPU slice, SLURM and Open MPI are recognized by JAX. Elsewhere, COORDINATOR_ADDRESS, PROCESS_COUNT and
    PROCESS_INDEX say so by hand. A single process does nothing. Call it before JAX touches a device.
    """
    hide_absent_tpu()
    if os.environ.get("COORDINATOR_ADDRESS"):
        if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        count, index = os.environ.get("PROCESS_COUNT", ""), os.environ.get("PROCESS_INDEX", "")
        if not (count.isdigit() and index.isdigit()):
            raise UserError(
                f"COORDINATOR_ADDRESS is set, but PROCESS_COUNT is '{count}' and PROCESS_INDEX '{index}'. Set them to "
                "whole numbers: how many processes there are, and which of them, from 0, this is."
            )
        jax.distributed.initialize(os.environ["COORDINATOR_ADDRESS"], num_processes=int(count), process_id=int(index))
    elif os.environ.get("TPU_WORKER_HOSTNAMES", "").count(",") or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


def has_accelerator() -> bool:
    """Whether this host has a TPU or a GPU that JAX would take, from its device files; JAX is not asked."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return not wanted.startswith("cpu") and any(Path(device).exists() for device in (*_TPU_DEVICES, *_GPU_DEVICES))


def hide_absent_tpu() -> None:
    """Keeps JAX from starting a TPU that is not there; before JAX touches a device."""
    # libtpu may be installed for ahead-of-time compilation alone; on a machine without a TPU, JAX would try to
    # start it, wait for a metadata server, and print a page of warnings. With a GPU, JAX is left to choose.
    if "JAX_PLATFORMS" in os.environ or has_accelerator():
        return
    if importlib.util.find_spec("libtpu") is not None:
        jax.config.update("jax_platforms", "cpu")
