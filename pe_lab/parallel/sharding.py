"""The mesh axis of each logical axis, in one dataclass, for any model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pe_lab.errors import ConfigError, did_you_mean

MeshAxes = str | tuple[str, ...] | None
AnyMesh = Mesh | AbstractMesh  # a partition depends on the axis sizes alone


@dataclass(frozen=True)
class AxisRules:
    """The mesh axis or axes that each logical axis is sharded over; None replicates.

    Parameters: `embed` (D) is sharded over fsdp; `heads`, `kv_heads`, `mlp` and `vocab` over tensor; `vector`, the D of
    norms' scales and of biases, is replicated.
    Activations: `batch` is sharded over data and fsdp; `length` and the `slots` of a KV cache over context;
    `activation_embed` is replicated.
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


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation by its logical axes, under `use_mesh`; the identity outside."""
    current = _current.get()
    if current is None:
        return x
    mesh, rules = current
    return jax.lax.with_sharding_constraint(x, rules.sharding(mesh, axes, x.shape, "activation"))
