"""Attention on a mesh: kernels run on each device's part, and sequences may be sharded over several devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from pe_lab.attention.key_block import AttentionInputs, Noise, Rotation
from pe_lab.attention.ring import ring_attention
from pe_lab.parallel import AxisRules, current_mesh

if TYPE_CHECKING:
    from pe_lab.attention.dispatch import Implementation


def on_mesh(
    implementation: Implementation,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    inputs: AttentionInputs,
    *,
    window: int | None,
    chunk: int,
) -> Float[Array, "B T H K"]:
    """Attention of whole sequences on the mesh that is being traced for; without a mesh, on one device.

    Arguments as in `reference_attention`. Rows and heads are independent, and each device computes its own. Where the
    length is sharded over several devices, they call `ring_attention`.
    """
    current = current_mesh()
    if current is None:
        return implementation.run(query, key, value, inputs, window=window, chunk=chunk)
    specs = _Specs(*current, query.shape, key.shape)
    if specs.repeats > 1:
        key, value = (jnp.repeat(x, specs.repeats, axis=2) for x in (key, value))
    compute = functools.partial(_ring, implementation, *specs.ring) if specs.ring else implementation.run
    return jax.shard_map(
        functools.partial(compute, window=window, chunk=chunk),
        mesh=current[0],
        in_specs=(specs.tokens, specs.tokens, specs.tokens, specs.inputs(inputs)),
        out_specs=specs.tokens,
        check_vma=False,
    )(query, key, value, inputs)


def rotation_spec(rotation: Rotation | None, heads: Any) -> Rotation | None:
    """How a rotation is sharded where heads are sharded over mesh axis `heads`."""
    if rotation is None:
        return None
    rows = heads if rotation.fixed_freq.shape[0] > 1 else None
    return Rotation(PartitionSpec(rows, None, None), PartitionSpec(rows, None))


class _Specs:
    """Partition specs of the arrays of attention."""

    def __init__(self, mesh: Mesh, rules: AxisRules, query: tuple[int, ...], key: tuple[int, ...]):
        self.batch, self.length, self.heads, _ = rules.spec(
            ("batch", "length", "heads", "head_dim"), query, mesh, "queries"
        )
        kv_heads = rules.spec(("batch", "length", "kv_heads", "head_dim"), key, mesh, "keys")[2]
        # Key heads that do not divide over the devices of `tensor` are repeated for each query head.
        self.repeats = query[2] // key[2] if self.heads is not None and kv_heads is None else 1
        size = mesh.shape[self.length] if self.length is not None else 1
        self.ring = (self.length, size) if size > 1 else None
        self.tokens = PartitionSpec(self.batch, self.length, self.heads, None)

    def inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        def of_tokens(x: jax.Array | None) -> PartitionSpec | None:  # [B or 1, T]
            return None if x is None else PartitionSpec(self.batch if x.shape[0] > 1 else None, self.length)

        special = dict(
            slope=None if inputs.slope is None else PartitionSpec(self.heads),
            rotation=rotation_spec(inputs.rotation, self.heads),
            noise=inputs.noise and Noise(PartitionSpec(self.heads), PartitionSpec(self.batch, self.length)),
        )
        rest = {name: of_tokens(x) for name, x in inputs._asdict().items() if name not in special}
        return AttentionInputs(**special, **rest)


def _ring(
    implementation: Implementation,
    axis: str,
    size: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    inputs: AttentionInputs,
    *,
    window: int | None,
    chunk: int,
) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    if inputs.query_positions is not None:
        positions = jnp.broadcast_to(inputs.query_positions, query.shape[:2])
        inputs = inputs._replace(query_positions=positions, key_positions=positions)
    partial = implementation.partial
    if not implementation.kernel:
        partial = functools.partial(partial, chunk=chunk)
    out = ring_attention(q, k, v, inputs, axis=axis, size=size, partial=partial, window=window, chunk=chunk)
    return out.transpose(0, 2, 1, 3)
