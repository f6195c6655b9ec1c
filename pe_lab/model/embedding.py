"""The lookup of token embeddings in a sharded table, and its gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.parallel import current_mesh, sharding_axes


def embedding_lookup(table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
    """The rows of the tokens in `dtype`.

    On a mesh, each device looks up all tokens of its fsdp group in its own columns of the table, and the group
    exchanges the results. The gradient goes the same way back: no device has a gradient of the whole table. It is
    added up in float32, because a frequent token has thousands of terms, and reduced over the other axes in `dtype`,
    as the gradients of the layers are.
    """
    with jax.named_scope("embedding"):
        return _lookup(table, tokens, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(table, tokens, dtype):  # noqa: ANN001, ANN202
    return _forward_rule(table, tokens, dtype)[0]


def _forward_rule(table, tokens, dtype):  # noqa: ANN001, ANN202
    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if group:
            tokens = jax.lax.all_gather(tokens, group, axis=0, tiled=True)
        row, here = _row(tokens, table, vocab)
        x = jnp.where(here[..., None], table[row], 0).astype(dtype) if vocab else table[row].astype(dtype)
        if group:
            x = jax.lax.all_to_all(x, group, split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.psum(x, vocab) if vocab else x

    run, group, vocab, _ = _on_mesh(local, table.shape, tokens.shape, backward=False)
    return run(table, tokens), (table.shape, tokens)


def _backward_rule(dtype, saved, d_x):  # noqa: ANN001, ANN202
    shape, tokens = saved

    def local(d_x: jax.Array, tokens: jax.Array) -> jax.Array:
        if group:
            tokens = jax.lax.all_gather(tokens, group, axis=0, tiled=True)
            d_x = jax.lax.all_to_all(d_x, group, split_axis=2, concat_axis=0, tiled=True)
        rows = shape[0] // count
        d_table = jnp.zeros((rows, d_x.shape[-1]), jnp.float32)
        row, here = _row(tokens, d_table, vocab)
        d_x = jnp.where(here[..., None], d_x, 0) if vocab else d_x
        d_table = d_table.at[row].add(d_x.astype(jnp.float32))
        return jax.lax.psum(d_table.astype(dtype), others).astype(jnp.float32) if others else d_table

    run, group, vocab, (others, count) = _on_mesh(local, shape, tokens.shape, backward=True)
    return run(d_x, tokens), np.zeros(tokens.shape, jax.dtypes.float0)


_lookup.defvjp(_forward_rule, _backward_rule)


def _row(tokens, table, vocab):  # noqa: ANN001, ANN202
    """The row of each token in this device's part of the table, and whether it is there."""
    first = jax.lax.axis_index(vocab) * table.shape[0] if vocab else 0
    row = tokens - first
    return row.clip(0, table.shape[0] - 1), (row >= 0) & (row < table.shape[0])


def _on_mesh(local, table, tokens, backward):  # noqa: ANN001, ANN202
    """`local` over the mesh, the axes that shard D and the vocabulary, and those that the gradient is added over."""
    current = current_mesh()
    if current is None or current[0].size == 1:
        return local, (), (), ((), 1)
    mesh, rules = current
    by_token = rules.spec(("batch", "length"), tokens, mesh, "tokens")
    by_row = rules.spec(("vocab", "embed"), table, mesh, "embedding")
    vocab, group = (sharding_axes(mesh, axes) for axes in by_row)
    others = tuple(axis for axis in sharding_axes(mesh, *by_token) if axis not in group)
    count = int(np.prod([mesh.shape[axis] for axis in vocab], dtype=int))
    x = PartitionSpec(*by_token, None)
    specs = ((x, by_token), by_row) if backward else ((by_row, by_token), x)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return run, group, vocab, (others, count)
