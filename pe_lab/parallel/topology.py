"""Chips and how many of them: machines named in a text, to plan for or to compile for without having them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pe_lab.config import MeshConfig
from pe_lab.errors import UserError, did_you_mean
from pe_lab.parallel.mesh import AXES, mesh_shape

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator, from its data sheet. `memory` in bytes, `peak` in dense bf16 FLOP/s; 0 = unknown."""

    name: str
    memory: int
    peak: float


CHIPS = {
    "v5e": Chip("TPU v5e", 16 * GIB, 197e12),
    "v5p": Chip("TPU v5p", 95 * GIB, 459e12),
    "v6e": Chip("TPU v6e", 32 * GIB, 918e12),
    "a100": Chip("NVIDIA A100 80GB", 80 * GIB, 312e12),
    "h100": Chip("NVIDIA H100 80GB", 80 * GIB, 989e12),
    "h200": Chip("NVIDIA H200", 140 * GIB, 989e12),
    "b200": Chip("NVIDIA B200", 179 * GIB, 2250e12),
}
_TPU_DIMENSIONS = {"v5e": 2, "v5p": 3, "v6e": 2}
_ALIASES = {"gpu": "h100"}
# device_kind of a device that is here -> its chip
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
KNOWN = "v5e:16x16, v5p:4x4x4, v6e:8x8; a100:8, h100:8, h200:8, b200:8 (gpu:8 is h100:8); cpu:8; local"


class NoCompiler(Exception):
    """Nothing on this machine compiles for that topology. The message says what would."""


@dataclass(frozen=True)
class Topology:
    """`count` chips of one kind. `kind`: tpu, gpu, cpu or local."""

    text: str
    kind: str
    chip: Chip
    count: int


def parse_topology(text: str) -> Topology:
    """Reads `v5e:16x16`, `h100:8`, `cpu:8` or `local`.

    Raises:
      UserError: an unknown chip, or a shape that is not one of its.
    """
    name, colon, shape = text.strip().lower().partition(":")
    name = _ALIASES.get(name, name)
    if text == "local":
        devices = jax.devices()
        return Topology(text, "local", chip_of(devices[0]), len(devices))
    if name not in CHIPS and name != "cpu":
        near = did_you_mean(name, [*CHIPS, *_ALIASES, "cpu", "local"])
        raise UserError(f"--topology: no chip is called '{name}'. {near} Examples: {KNOWN}.")
    dimensions = _TPU_DIMENSIONS.get(name, 1)
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != dimensions:
        example = {1: "8", 2: "4x4", 3: "2x2x1"}[dimensions]
        raise UserError(
            f"--topology: '{text}' does not say how many; {name} takes {dimensions} "
            f"number{'s' if dimensions > 1 else ''}, as in {name}:{example}. Examples: {KNOWN}."
        )
    kind = "tpu" if name in _TPU_DIMENSIONS else "cpu" if name == "cpu" else "gpu"
    chip = CHIPS.get(name, Chip("CPU device", 0, 0.0))
    return Topology(text, kind, chip, math.prod(int(size) for size in shape.split("x")))


def chip_of(device: Any) -> Chip:
    """What is known of a device that is here; memory and peak are 0 where nothing is."""
    known = [name for kind, name in _KINDS.items() if device.device_kind == kind]
    known = known or [name for kind, name in _KINDS.items() if device.device_kind.startswith(kind)]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = int((stats or {}).get("bytes_limit", 0))
    chip = CHIPS[known[0]] if known else Chip(device.device_kind, 0, 0.0)
    # What the runtime may hand out here and now is less than the data sheet's.
    return Chip(chip.name, memory or chip.memory, chip.peak)


def topology_devices(topology: Topology) -> list[Any]:
    """Devices to compile for: this machine's, virtual CPUs, or a TPU slice that exists in the compiler only.

    Raises:
      NoCompiler: a TPU slice without libtpu, or GPUs that are not here.
      UserError: a slice of a shape that does not exist.
    """
    if topology.kind == "local":
        return list(jax.devices())
    if topology.kind == "cpu":
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX has started: it keeps the devices that it has
                jax.config.update("jax_num_cpu_devices", topology.count)
        devices = jax.devices("cpu")
        if len(devices) < topology.count:
            raise UserError(f"--topology={topology.text}: JAX has started with {len(devices)} CPU devices.")
        return list(devices[: topology.count])
    if topology.kind == "gpu":
        raise NoCompiler("a GPU's compiler needs the GPU: run this there with --topology=local")
    return _slice_devices(topology.text)


def libtpu_version() -> str:
    """The version of the TPU compiler on this machine, or "" where there is none."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _slice_devices(text: str) -> list[Any]:
    if not libtpu_version():
        raise NoCompiler("libtpu is not installed: pip install 'pe-lab[aot]' (Linux), no TPU needed")
    from jax.experimental import topologies

    # Compiling holds no chip: several may do it at once, beside a run that trains. The other variables keep
    # libtpu, where there is no TPU, from asking a metadata server who it is and filling the screen.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    try:
        return list(topologies.get_topology_desc(text, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in reason:
            raise UserError(f"--topology: no slice is '{text}' ({reason}). Examples: {KNOWN}.") from None
        raise NoCompiler(f"libtpu does not start: {reason}") from None


@dataclass(frozen=True)
class _Placeholder:
    """Stands where a device would, so that shapes can be cut without having one."""

    id: int
    platform: str = "placeholder"
    device_kind: str = "placeholder"
    process_index: int = 0


def placeholder_mesh(config: MeshConfig, count: int) -> Mesh:
    """The mesh of a run over `count` devices that need not exist: good for shardings and `jax.eval_shape`.

    Raises:
      UserError: the axes do not make up `count`.
    """
    devices = np.empty(count, object)
    devices[:] = [_Placeholder(i) for i in range(count)]
    return Mesh(devices.reshape(mesh_shape(config, count)), AXES)
