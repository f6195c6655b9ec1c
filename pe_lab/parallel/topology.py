"""Accelerators and slices by name, to plan and to compile for without having them."""

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
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
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
# device_kind of JAX -> chip
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
    """No compiler on this machine supports the topology. The message says how to get one."""


@dataclass(frozen=True)
class Topology:
    """`count` chips of one kind. `kind`: tpu, gpu, cpu or local."""

    text: str
    kind: str
    chip: Chip
    count: int


def parse_topology(text: str) -> Topology:
    """The topology named by `v5e:16x16`, `h100:8`, `cpu:8` or `local`.

    Raises:
      ConfigError: the chip is unknown, or its shape has another number of dimensions.
    """
    text = text.strip().lower()
    name, colon, shape = text.partition(":")
    name = _ALIASES.get(name, name)
    if text == "local":
        devices = jax.devices()
        return Topology(text, "local", chip_of(devices[0]), len(devices))
    if name not in CHIPS and name != "cpu":
        near = did_you_mean(name, [*CHIPS, *_ALIASES, "cpu", "local"])
        raise ConfigError(f"--topology: no chip is called '{name}'. {near} Examples: {KNOWN}.")
    dimensions = _TPU_DIMENSIONS.get(name, 1)
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != dimensions:
        example = {1: "8", 2: "4x4", 3: "2x2x1"}[dimensions]
        raise ConfigError(
            f"--topology: '{text}' has no number of chips; {name} takes {dimensions} "
            f"number{'s' if dimensions > 1 else ''}, as in {name}:{example}. Examples: {KNOWN}."
        )
    kind = "tpu" if name in _TPU_DIMENSIONS else "cpu" if name == "cpu" else "gpu"
    chip = CHIPS.get(name, Chip("CPU device", 0, 0.0))
    return Topology(text, kind, chip, math.prod(int(size) for size in shape.split("x")))


def chip_of(device: Any) -> Chip:
    """The chip of a device of this machine; its memory and peak are 0 if unknown."""
    known = [name for kind, name in _KINDS.items() if device.device_kind == kind]
    known = known or [name for kind, name in _KINDS.items() if device.device_kind.startswith(kind)]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = int((stats or {}).get("bytes_limit", 0))
    chip = CHIPS[known[0]] if known else Chip(device.device_kind, 0, 0.0)
    # The runtime gives out less memory than the data sheet lists.
    return Chip(chip.name, memory or chip.memory, chip.peak)


def topology_devices(topology: Topology) -> list[Any]:
    """Devices to compile for: this machine's, virtual CPUs, or a TPU slice that only the compiler knows.

    Raises:
      NoCompiler: a TPU slice without libtpu, or GPUs of another machine.
      ConfigError: there is no slice of this shape.
      UnsupportedError: JAX has started with fewer CPU devices.
    """
    if topology.kind == "local":
        return list(jax.devices())
    if topology.kind == "cpu":
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX has started, and keeps its devices
                jax.config.update("jax_num_cpu_devices", topology.count)
        devices = jax.devices("cpu")
        if len(devices) < topology.count:
            raise UnsupportedError(f"--topology={topology.text}: JAX has started with {len(devices)} CPU devices.")
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

    # Compiling uses no chip: several processes may do it at once, beside a run. Without a TPU, the other variables
    # keep libtpu from querying a metadata server and from printing warnings.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    try:
        return list(topologies.get_topology_desc(text, platform="tpu", wrap=wrap_around(text)).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in reason:
            raise ConfigError(f"--topology: no slice is '{text}' ({reason}). Examples: {KNOWN}.") from None
        raise NoCompiler(f"libtpu does not start: {reason}") from None


def wrap_around(text: str) -> tuple[bool, bool, bool]:
    """Whether the last chip of each physical axis of a TPU slice (`v5p:4x4x4`) is linked to the first.

    libtpu leaves these links out by default, and then compiles gathers as all-reduces. v5p: all axes wrap around if
    the slice consists of whole cubes of 4 x 4 x 4, which optical switches connect. v5e and v6e: an axis of 16 wraps
    around. Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 2.
    """
    name, _, shape = text.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    if _TPU_DIMENSIONS[name] == 3:
        whole = all(size % 4 == 0 for size in sizes)
        return whole, whole, whole
    return sizes[0] == 16, sizes[1] == 16, False


@dataclass(frozen=True)
class _Placeholder:
    """A device in a mesh that is used for shapes alone."""

    id: int
    platform: str = "placeholder"
    device_kind: str = "placeholder"
    process_index: int = 0


def placeholder_mesh(config: MeshConfig, count: int) -> Mesh:
    """The mesh of a run over `count` devices that need not exist, for shardings and `jax.eval_shape`.

    Raises:
      ConfigError: the product of the axes is not `count`.
    """
    devices = np.empty(count, object)
    devices[:] = [_Placeholder(i) for i in range(count)]
    return Mesh(devices.reshape(mesh_shape(config, count)), AXES)
