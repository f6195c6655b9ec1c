"""Accelerators and slices by name, to plan and to compile for without having them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.parallel.mesh import AXES, mesh_shape

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as JAX counts them, from its data sheet; 0 = unknown.

    Attributes:
      memory: bytes.
      peak: dense bf16 FLOP/s.
      bandwidth: of its memory, bytes/s.
      ici: what it sends to the chips of its slice, or to the GPUs of its node, over all links together, bytes/s.
      dcn: its part of the network of its host, bytes/s.
    """

    name: str
    memory: int = 0
    peak: float = 0.0
    bandwidth: float = 0.0
    ici: float = 0.0
    dcn: float = 0.0


# TPUs: docs.cloud.google.com/tpu/docs, where ICI is the sum of both directions. A device of v4 and v5p is a chip with
# both of its cores, one of TPU7x is half a chip. GPUs: NVIDIA's data sheets, and 400 Gb/s of network (A100: 200).
CHIPS = {
    "v4": Chip("TPU v4", 32 * GIB, 275e12, 1228e9, 300e9, 6.25e9),
    "v5e": Chip("TPU v5e", 16 * GIB, 197e12, 819e9, 200e9, 3.125e9),
    "v5p": Chip("TPU v5p", 95 * GIB, 459e12, 2765e9, 600e9, 6.25e9),
    "v6e": Chip("TPU v6e", 32 * GIB, 918e12, 1638e9, 400e9, 12.5e9),
    "tpu7x": Chip("TPU7x", 96 * GIB, 1153.5e12, 3690e9, 300e9, 6.25e9),
    "a100": Chip("NVIDIA A100 80GB", 80 * GIB, 312e12, 2039e9, 300e9, 25e9),
    "h100": Chip("NVIDIA H100 80GB", 80 * GIB, 989e12, 3350e9, 450e9, 50e9),
    "h200": Chip("NVIDIA H200", 140 * GIB, 989e12, 4800e9, 450e9, 50e9),
    "b200": Chip("NVIDIA B200", 179 * GIB, 2250e12, 8000e9, 900e9, 50e9),
}


class Generation(NamedTuple):
    """A kind of TPU, as libtpu names its slices: dimensions of the shape, JAX devices of a chip, chip configuration."""

    dimensions: int
    devices: int = 1
    chip_config: str = ""


GENERATIONS = {
    "v4": Generation(3, chip_config="megacore"),
    "v5e": Generation(2),
    "v5p": Generation(3),
    "v6e": Generation(2),
    "tpu7x": Generation(3, devices=2),
}
GPUS_OF_NODE = 8
_ALIASES = {"gpu": "h100", "v7x": "tpu7x", "tpuv7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
# device_kind of JAX -> chip
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
KNOWN = (
    "v4:4x4x4, v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:4x4x4 (--slices=N of them); "
    "a100:8, h100:8, h200:8, b200:8 (gpu:8 is h100:8); cpu:8; local"
)


class NoCompiler(Exception):
    """No compiler on this machine supports the topology. The message says how to get one."""


@dataclass(frozen=True)
class Topology:
    """`count` devices of one kind (tpu, gpu, cpu or local) in `slices` slices of `shape`, which the network joins."""

    text: str
    kind: str
    chip: Chip
    count: int
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def name(self) -> str:
        """`v5e:16x16`, or `4 x v5e:16x16`."""
        return self.text if self.slices == 1 else f"{self.slices} x {self.text}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """The topology named by `v5e:16x16`, `h100:8`, `cpu:8` or `local`; of a TPU, several slices of this shape.

    Raises:
      ConfigError: the chip is unknown, or its shape has another number of dimensions.
    """
    text = text.strip().lower()
    name, colon, shape = text.partition(":")
    name = _ALIASES.get(name, name)
    if slices < 1 or (slices > 1 and name not in GENERATIONS):
        raise ConfigError(f"--slices={slices}: it is the number of TPU slices, of --topology=v5e:16x16 for example.")
    if text == "local":
        devices = jax.devices()
        return Topology(text, "local", chip_of(devices[0]), len(devices))
    if name not in CHIPS and name != "cpu":
        near = did_you_mean(name, [*CHIPS, "gpu", "cpu", "local"])
        raise ConfigError(f"--topology: no chip is called '{name}'. {near} Examples: {KNOWN}.")
    generation = GENERATIONS.get(name, Generation(1))
    example = {1: f"{name}:8", 2: f"{name}:4x4", 3: f"{name}:2x2x1"}[generation.dimensions]
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        what = "number of chips" if generation.dimensions == 1 else "shape"
        raise ConfigError(f"--topology: '{text}' has no {what}. Write it as in {example}. Examples: {KNOWN}.")
    sizes = tuple(int(size) for size in shape.split("x"))
    if len(sizes) != generation.dimensions:
        numbers = "1 number" if generation.dimensions == 1 else f"{generation.dimensions} numbers"
        has = "1 dimension" if len(sizes) == 1 else f"{len(sizes)} dimensions"
        message = f"--topology: '{text}' has {has}; {name} takes {numbers}"
        if name in GENERATIONS and len(sizes) == generation.dimensions + 1:
            slice_of = "x".join(map(str, sizes[:-1]))
            raise ConfigError(
                f"{message}, as in {example}. For {sizes[-1]} slices of {slice_of}: "
                f"--topology={name}:{slice_of} --slices={sizes[-1]}."
            )
        raise ConfigError(f"{message}, as in {example}. Examples: {KNOWN}.")
    kind = "tpu" if name in GENERATIONS else "cpu" if name == "cpu" else "gpu"
    count = math.prod(sizes) * generation.devices * slices
    return Topology(f"{name}:{shape}", kind, CHIPS.get(name, Chip("CPU device")), count, sizes, slices)


def chip_of(device: Any) -> Chip:
    """The chip of a device of this machine; its memory and peak are 0 if unknown."""
    known = [name for kind, name in _KINDS.items() if device.device_kind == kind]
    known = known or [name for kind, name in _KINDS.items() if device.device_kind.startswith(kind)]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = int((stats or {}).get("bytes_limit", 0))
    chip = CHIPS[known[0]] if known else Chip(device.device_kind)
    # The runtime gives out less memory than the data sheet lists.
    return dataclasses.replace(chip, memory=memory or chip.memory)


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
    return _slice_devices(topology)


def libtpu_version() -> str:
    """The version of the TPU compiler on this machine, or "" where there is none."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _slice_devices(topology: Topology) -> list[Any]:
    if not libtpu_version():
        raise NoCompiler("libtpu is not installed: pip install 'pe-lab[aot]' (Linux), no TPU needed")
    from jax.experimental import topologies

    # Compiling uses no chip: several processes may do it at once, beside a run. Without a TPU, the other variables
    # keep libtpu from querying a metadata server and from printing warnings.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    name = topology.text.partition(":")[0]
    options: dict[str, Any] = {"wrap": wrap_around(topology)}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if config := GENERATIONS[name].chip_config:
        options["chip_config_name"] = config
    try:
        return list(topologies.get_topology_desc(topology.text, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in reason:
            raise ConfigError(f"--topology: no slice is '{topology.text}' ({reason}). Examples: {KNOWN}.") from None
        raise NoCompiler(f"libtpu does not start: {reason}") from None


def wrap_around(topology: Topology) -> tuple[bool, bool, bool]:
    """Whether the last chip of each physical axis of a TPU slice is linked to the first.

    libtpu leaves these links out by default, and then compiles gathers as all-reduces. v4, v5p and TPU7x: all axes wrap
    around if the slice consists of whole cubes of 4 x 4 x 4, which optical switches connect. v5e and v6e: an axis of 16
    wraps around. Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 2.
    """
    sizes = topology.shape
    if len(sizes) == 3:
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


def placeholder_mesh(config: MeshConfig, count: int, slices: int = 1) -> Mesh:
    """The mesh of a run over `count` devices that need not exist, for shardings and `jax.eval_shape`.

    Raises:
      ConfigError: the product of the axes is not `count`, or the data axis does not divide over the slices.
    """
    devices = np.empty(count, object)
    devices[:] = [_Placeholder(i) for i in range(count)]
    return Mesh(devices.reshape(mesh_shape(config, count, slices)), AXES)
