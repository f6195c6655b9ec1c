"""Attention on a mesh: kernels on each device's part, and texts that lie on several devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from pe_lab.attention.key_block import Noise, Rotation
from pe_lab.attention.ring import RingSide, ring_attention
from pe_lab.parallel import AxisRules, current_mesh

if TYPE_CHECKING:
    from pe_lab.attention.dispatch import Implementation


def on_mesh(
    implementation: Implementation,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    arrays: dict[str, Any],
    static: dict[str, Any],
) -> Float[Array, "B T H K"]:
    """Attention of a text to itself on the mesh that is being traced for; without one, on the one device.

    Rows and heads are independent, so each device computes its own. Tokens that lie on several devices meet by
    `ring_attention`.

    Args:
      query, key, value, scale: as `reference_attention` takes them.
      arrays: its slope, positions, segments, self_bias, and perhaps rotation and noise.
      static: its window, soft_cap and chunk.
    """
    current = current_mesh()
    if current is None:
        return implementation.run(query, key, value, scale, **arrays, **static)
    mesh, rules = current
    cut = _Cut(mesh, rules, query.shape, key.shape)
    if cut.repeats > 1:
        key, value = (jnp.repeat(x, cut.repeats, axis=2) for x in (key, value))
    specs = {name: cut.of(name, x) for name, x in arrays.items()}
    tokens = PartitionSpec(cut.batch, cut.length, cut.heads, None)
    compute = functools.partial(_ring, implementation, mesh, cut) if cut.ring else implementation.run

    def part(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array, arrays: dict[str, Any]) -> jax.Array:
        return compute(q, k, v, scale, **arrays, **static)

    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, PartitionSpec(), specs),
        out_specs=tokens,
        check_vma=False,
    )(query, key, value, scale, arrays)


class _Cut:
    """How the arrays of attention are cut over a mesh."""

    def __init__(self, mesh: Mesh, rules: AxisRules, query: tuple[int, ...], key: tuple[int, ...]):
        spec = rules.spec(("batch", "length", "heads", "head_dim"), query, mesh, "queries")
        self.batch, self.length, self.heads, _ = spec
        kv_heads = rules.spec(("batch", "length", "kv_heads", "head_dim"), key, mesh, "keys")[2]
        # Few key heads do not divide over the devices of `tensor`: each query head then brings its own.
        self.repeats = query[2] // key[2] if self.heads is not None and kv_heads is None else 1
        self.ring = self.length is not None and mesh.shape[self.length] > 1

    def of(self, name: str, x: Any) -> Any:
        if x is None:
            return None
        if name == "slope":
            return PartitionSpec(self.heads)
        if isinstance(x, Noise):
            return Noise(PartitionSpec(self.heads), PartitionSpec(self.batch, self.length))
        if isinstance(x, Rotation):
            rows = self.heads if x.fixed_freq.shape[0] > 1 else None
            return Rotation(PartitionSpec(rows, None, None), PartitionSpec(rows, None))
        # [B or 1, T]
        return PartitionSpec(self.batch if x.shape[0] > 1 else None, self.length)


def _ring(
    implementation: Implementation,
    mesh: Mesh,
    cut: _Cut,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    *,
    slope: jax.Array | None,
    positions: jax.Array | None,
    segments: jax.Array | None,
    diagonal_bias: jax.Array | None,
    window: int | None,
    soft_cap: float | None,
    chunk: int,
) -> jax.Array:
    if diagonal_bias is not None:
        raise NotImplementedError("attention of a text on several devices has no diagonal bias.")
    q = (query.astype(jnp.float32) * scale).astype(query.dtype)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, key, value))
    if positions is not None:
        positions = jnp.broadcast_to(positions, query.shape[:2])
    side = RingSide(slope, positions, segments)
    span = implementation.span
    if not implementation.kernel:
        span = functools.partial(span, chunk=chunk)
    out = ring_attention(
        q,
        k,
        v,
        side,
        axis=cut.length,
        size=mesh.shape[cut.length],
        span=span,
        window=window,
        soft_cap=soft_cap,
        chunk=chunk,
    )
    return out.transpose(0, 2, 1, 3)
