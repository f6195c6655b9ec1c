"""Attention on a mesh: kernels run on each device's part, and sequences may be sharded over several devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pe_lab.attention.gradient import Pair
from pe_lab.attention.key_block import AttentionInputs, KeyRotation, Keys, Outputs, Queries, Values
from pe_lab.attention.ring import ring_attention
from pe_lab.errors import UnsupportedError
from pe_lab.parallel import current_mesh

if TYPE_CHECKING:
    from pe_lab.attention.dispatch import Implementation


def on_mesh(
    implementation: Implementation, query: Queries, key: Keys, value: Values, inputs: AttentionInputs
) -> Outputs:
    """Attention of whole sequences on the mesh that is being traced for; without a mesh, on one device.

    Arguments as in `reference_attention`. Rows and heads are independent, and each device computes its own. Where the
    length is sharded over several devices, they call `ring_attention`.
    """
    current = current_mesh()
    if current is None:
        return implementation.run(query, key, value, inputs)
    mesh, rules = current
    batch, length, heads, _ = rules.spec(("batch", "length", "heads", "head_dim"), query.shape, mesh, "queries")
    kv_heads = rules.spec(("batch", "length", "kv_heads", "head_dim"), key.shape, mesh, "keys")[2]
    if heads is not None and kv_heads is None:
        # Key heads that do not divide over the devices of `tensor` are repeated for each query head.
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    tokens = PartitionSpec(batch, length, heads, None)

    if heads is not None and mesh.shape[heads] > 1 and inputs.bias is not None:
        raise UnsupportedError(
            "attention: a bias that is a function of positions serves all heads at once, and this mesh shards them "
            f"over {mesh.shape[heads]} devices: use mesh.tensor=1, or a relative bias."
        )
    size = mesh.shape[length] if length is not None else 1
    pair = Pair(implementation.partial, implementation.gradient)

    def ring(query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        inputs = inputs.for_every_row(len(query))
        out = ring_attention(q, k, v, inputs, axis=length, size=size, pair=pair)
        return out.transpose(0, 2, 1, 3)

    return jax.shard_map(
        ring if size > 1 else implementation.run,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, input_specs(inputs, batch, length, heads)),
        out_specs=tokens,
        check_vma=False,
    )(query, key, value, inputs)


def input_specs(inputs: AttentionInputs, batch: Any, length: Any, heads: Any) -> AttentionInputs:
    """How the inputs are sharded where rows, tokens and heads are sharded over these mesh axes."""

    def of_rows(x: jax.Array) -> PartitionSpec:  # [B or 1] or [B or 1, T]
        return PartitionSpec(batch if x.shape[0] > 1 else None, *[length] * (x.ndim - 1))

    learned = ("slope", "rotation", "distance_bias", "key_bias", "bias", "sink")
    key_bias = inputs.key_bias

    rotation = None
    if inputs.rotation is not None:
        rows = heads if inputs.rotation.fixed_freq.shape[0] > 1 else None
        rotation = KeyRotation(PartitionSpec(rows, None, None), PartitionSpec(rows, None))
    return replace(
        jax.tree.map(of_rows, replace(inputs, **dict.fromkeys(learned))),
        slope=None if inputs.slope is None else PartitionSpec(heads),
        distance_bias=None if inputs.distance_bias is None else PartitionSpec(heads, None),
        key_bias=None if key_bias is None else PartitionSpec(batch if key_bias.shape[0] > 1 else None, heads, length),
        bias=jax.tree.map(lambda _: PartitionSpec(), inputs.bias),
        sink=None if inputs.sink is None else PartitionSpec(heads),
        rotation=rotation,
    )
