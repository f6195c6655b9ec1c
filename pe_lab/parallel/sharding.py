"""The device mesh, the mesh axis of each logical axis, and arrays on the devices of several processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int

from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError, did_you_mean

AXES = ("data", "fsdp", "tensor", "context")
MeshAxes = str | tuple[str, ...] | None
AnyMesh = Mesh | AbstractMesh  # a partition depends on the axis sizes alone


def mesh_shape(config: MeshConfig, num_devices: int, slices: int = 1) -> tuple[int, int, int, int]:
    """The sizes of the mesh axes, with the one -1 of a mesh config resolved, for devices in `slices` TPU slices.

    `ConfigError` if their product is not the number of devices, or an axis other than data would cross slices.
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
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices if device.platform == "tpu"}) or 1
    shape = mesh_shape(config, len(devices), slices)
    if slices > 1:
        each, across = (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1)
        ordered = mesh_utils.create_hybrid_device_mesh(each, across, devices, allow_split_physical_axes=True)
    else:
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, where: str) -> None:
    """`ConfigError` unless a micro-batch divides evenly over the data and fsdp axes of the mesh."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
        if value < 1:
            raise ConfigError(f"{where}: {name} is {value}; it must be at least 1.")
    if batch_size % accumulate or (batch_size // accumulate) % parts:
        raise ConfigError(
            f"{where}: batch_size {batch_size} in {accumulate} micro-batches does not divide over the mesh's data x "
            f"fsdp = {parts} devices. Make batch_size a multiple of {accumulate * parts}, or give devices to "
            "mesh.context, which divides each sequence."
        )


def balanced_order(length: int, parts: int) -> Int[np.ndarray, " length"]:
    """The position in the sequence of the token in each slot, where `parts` devices hold equal slices of the slots.

    Under a causal mask a later token attends to more keys, so contiguous slices would leave the first device idle
    most of the time. The sequence is split into 2 * parts chunks (a `ConfigError` if its length does not divide), and
    device i gets the chunks i and 2 * parts - 1 - i, an early and a late one (zig-zag, as in Llama 3's training,
    arXiv:2407.21783, section 3.3.2). Tokens of a chunk stay in order.
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


# ---------------------------------------------------------------------------------------------------------------------
# Logical axes


@dataclass(frozen=True)
class AxisRules:
    """The mesh axis or axes that each logical axis is sharded over; None replicates.

    Parameters: `embed` (D) is sharded over fsdp; `heads`, `kv_heads`, `mlp` and `vocab` over tensor; `vector`, the D of
    norms' scales and of biases, is replicated.
    Activations: `batch` is sharded over data and fsdp; `length` and the `slots` of a KV cache over context;
    `activation_embed` is replicated. `context_attention` is no axis: as `MeshConfig` has it.
    """

    batch: MeshAxes = ("data", "fsdp")
    length: MeshAxes = "context"
    slots: MeshAxes = "context"
    activation_embed: MeshAxes = None
    embed: MeshAxes = "fsdp"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"
    vocab: MeshAxes = "tensor"
    layers: MeshAxes = None
    vector: MeshAxes = None
    context_attention: str = "auto"

    def spec(
        self,
        axes: Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: AnyMesh | None = None,
        name: str = "",
    ) -> PartitionSpec:
        """The partition of an array with these logical axes.

        With `shape` and `mesh`, the shards must be equal. `kv_heads` is the exception: where it does not divide,
        every device keeps all key-value heads.

        Raises:
          ConfigError: a logical axis is unknown, a mesh axis is used twice in an array, or the shards are not equal.
        """
        chosen: list[MeshAxes] = []
        for dimension, axis in enumerate(axes):
            if axis is not None and axis not in self.__dataclass_fields__:
                raise ConfigError(
                    f"{name or 'An array'}: no logical axis is called '{axis}'. "
                    + did_you_mean(axis, list(self.__dataclass_fields__))
                )
            mesh_axes = getattr(self, axis) if axis else None
            if mesh_axes is not None and shape is not None and mesh is not None:
                parts = _size(mesh, mesh_axes)
                if shape[dimension] % parts:
                    if axis != "kv_heads":
                        raise ConfigError(
                            f"{name or 'An array'} of shape {tuple(shape)}: dimension {dimension} ('{axis}', "
                            f"{shape[dimension]}) does not divide over {parts} devices of mesh axis {mesh_axes!r}. "
                            f"Choose a mesh whose {mesh_axes!r} divides {shape[dimension]}."
                        )
                    mesh_axes = None
            chosen.append(mesh_axes)
        used = [m for axis in chosen if axis for m in ((axis,) if isinstance(axis, str) else axis)]
        twice = sorted({m for m in used if used.count(m) > 1})
        if twice:
            raise ConfigError(
                f"{name or 'An array'} with axes {tuple(axes)} uses mesh axis {twice[0]!r} twice; "
                "change one of its rules in AxisRules."
            )
        return PartitionSpec(*chosen)

    def sharding(
        self, mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int] | None = None, name: str = ""
    ) -> NamedSharding:
        """`spec` on a mesh."""
        return NamedSharding(mesh, self.spec(axes, shape, mesh, name))


def _size(mesh: AnyMesh, axes: MeshAxes) -> int:
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    size = 1
    for axis in names:
        if axis not in mesh.shape:
            raise ConfigError(f"AxisRules name a mesh axis '{axis}'; the mesh has {', '.join(mesh.shape)}.")
        size *= mesh.shape[axis]
    return size


_current: ContextVar[tuple[Mesh, AxisRules] | None] = ContextVar("mesh_and_rules", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: AxisRules) -> Iterator[None]:
    """Sets the mesh and the rules for the functions below, while a program is traced."""
    token = _current.set((mesh, rules))
    try:
        yield
    finally:
        _current.reset(token)


def current_mesh() -> tuple[Mesh, AxisRules] | None:
    """The mesh and the rules of `use_mesh`; None outside."""
    return _current.get()


def context_size() -> int:
    """The number of devices that `length` is sharded over, under `use_mesh`; 1 outside."""
    current = _current.get()
    return 1 if current is None else _size(current[0], current[1].length)


def slots_are_sharded() -> bool:
    """Whether the slots of a KV cache are sharded over several devices, under `use_mesh`."""
    current = _current.get()
    return current is not None and _size(current[0], current[1].slots) > 1


def sharding_axes(mesh: AnyMesh, *parts: MeshAxes) -> tuple[str, ...]:
    """The names of mesh axes in parts of a `PartitionSpec`, without those of one device."""
    names = [name for part in parts if part for name in ((part,) if isinstance(part, str) else part)]
    return tuple(name for name in names if mesh.shape[name] > 1)


def platform() -> str:
    """The platform of the mesh of `use_mesh`, else of this machine: cpu, gpu or tpu."""
    current = _current.get()
    found = "" if current is None else str(current[0].devices.flat[0].platform)
    return found if found in ("cpu", "gpu", "tpu") else jax.default_backend()


def compute_capability() -> float:
    """Of the GPUs of the mesh of `use_mesh`, else of this machine, as 9.0 for an H100; 0 without NVIDIA's."""
    if platform() != "gpu":
        return 0.0
    current = _current.get()
    device = jax.local_devices()[0] if current is None else current[0].devices.flat[0]
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # not NVIDIA's
        return 0.0


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation by its logical axes, under `use_mesh`; the identity outside."""
    current = _current.get()
    if current is None:
        return x
    mesh, rules = current
    return jax.lax.with_sharding_constraint(x, rules.sharding(mesh, axes, x.shape, "activation"))


# ---------------------------------------------------------------------------------------------------------------------
# Arrays of several processes


def put(tree: Any, sharding: Sharding) -> Any:
    """Arrays on the devices of a sharding. Of arrays on the host, every process has the same one.

    `jax.device_put` takes no array of one process for devices of several, and sends arrays of the host between them.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def fetch(array: Any) -> np.ndarray:
    """An array on the host of every process; if it is sharded over devices of several, all must call it."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
