"""Accelerators and slices by name, to plan for without having them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from pe_lab.config import TOPOLOGIES, MeshConfig
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.parallel.processes import GPU_MEMORY_SHARE
from pe_lab.parallel.sharding import AXES, mesh_shape

GIB = 2**30
MOST_CHIPS = 2**17


@dataclass(frozen=True)
class Chip:
    """One device as JAX counts them, from its data sheet; 0 = unknown."""

    name: str
    memory: int = 0  # bytes
    peak: float = 0.0  # dense bf16 FLOP/s
    bandwidth: float = 0.0  # of its memory, bytes/s
    ici: float = 0.0  # to the chips of its slice, or the GPUs of its node, over all links together, bytes/s
    dcn: float = 0.0  # its part of the network of its host, bytes/s


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


class TpuGeneration(NamedTuple):
    """A kind of TPU, as libtpu names its slices: dimensions of the shape, JAX devices of a chip, chip configuration."""

    dimensions: int
    devices: int = 1
    chip_config: str = ""


GENERATIONS = {
    "v4": TpuGeneration(3, chip_config="megacore"),
    "v5e": TpuGeneration(2),
    "v5p": TpuGeneration(3),
    "v6e": TpuGeneration(2),
    "tpu7x": TpuGeneration(3, devices=2),
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

    @property
    def nodes(self) -> int:
        """Groups of devices that the network joins: TPU slices, or nodes of GPUs."""
        return max(1, self.count // GPUS_OF_NODE) if self.kind == "gpu" else self.slices


def parse_topology(text: str, slices: int = 1) -> Topology:
    """The topology named by `v5e:16x16`, `h100:8`, `cpu:8` or `local`; of a TPU, several slices of this shape.

    The memory of a GPU is what JAX may use of it. `ConfigError` for an unknown chip, or a shape that it does not have.
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
        raise ConfigError(f"--topology: no chip is called '{name}'. {near} Examples: {TOPOLOGIES}.")
    generation = GENERATIONS.get(name, TpuGeneration(1))
    example = {1: f"{name}:8", 2: f"{name}:4x4", 3: f"{name}:2x2x1"}[generation.dimensions]
    if not colon or not re.fullmatch("[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", shape):
        what = "number of chips" if generation.dimensions == 1 else "shape"
        raise ConfigError(f"--topology: '{text}' has no {what}. Write it as in {example}. Examples: {TOPOLOGIES}.")
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
        raise ConfigError(f"{message}, as in {example}. Examples: {TOPOLOGIES}.")
    if math.prod(sizes) * slices > MOST_CHIPS:
        raise ConfigError(f"--topology: '{text}' is more than {MOST_CHIPS:,} chips.")
    kind = "tpu" if name in GENERATIONS else "cpu" if name == "cpu" else "gpu"
    if kind == "gpu" and sizes[0] > GPUS_OF_NODE and sizes[0] % GPUS_OF_NODE:
        raise ConfigError(f"--topology: '{text}' is no number of whole nodes. More than 8 GPUs are a multiple of 8.")
    count = math.prod(sizes) * generation.devices * slices
    chip = CHIPS.get(name, Chip("CPU device"))
    if kind == "gpu":
        chip = dataclasses.replace(chip, memory=int(chip.memory * GPU_MEMORY_SHARE))
    return Topology(f"{name}:{shape}", kind, chip, count, sizes, slices)


def chip_of(device: Any) -> Chip:
    """The chip of a device of this machine; its memory and peak are 0 if unknown."""
    known = [name for kind, name in _KINDS.items() if device.device_kind == kind]
    known = known or [name for kind, name in _KINDS.items() if device.device_kind.startswith(kind)]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = int((stats or {}).get("bytes_limit", 0))
    chip = CHIPS[known[0]] if known else Chip(device.device_kind)
    # The runtime gives out less memory than the data sheet lists.
    return dataclasses.replace(chip, memory=memory or chip.memory)


@dataclass(frozen=True)
class _Placeholder:
    """A device in a mesh that is used for shapes alone."""

    id: int
    platform: str = "placeholder"
    device_kind: str = "placeholder"
    process_index: int = 0


def placeholder_mesh(config: MeshConfig, count: int, slices: int = 1) -> Mesh:
    """The mesh of a run over `count` devices that need not exist, for shardings and `eval_shape`; see `mesh_shape`."""
    devices = np.empty(count, object)
    devices[:] = [_Placeholder(i) for i in range(count)]
    return Mesh(devices.reshape(mesh_shape(config, count, slices)), AXES)
