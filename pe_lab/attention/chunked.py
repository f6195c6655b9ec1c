"""Attention in blocks, with memory linear in the length, forward and backward (Rabe & Staats 2021, Dao et al. 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.bias import (
    PositionBias,
    add_diagonal_sums,
    extended,
    table_gradient,
    toeplitz_block,
)
from pe_lab.attention.key_block import (
    FLOOR,
    MASKED,
    AttentionInputs,
    KeyBlockGradients,
    Keys,
    OnlineSoftmax,
    Outputs,
    Pair,
    PartialAttention,
    Queries,
    Values,
    attend,
    masked_logits,
    padded,
    rotated_keys,
    whole_sequence,
)
from pe_lab.attention.reference import attention_to_all
from pe_lab.errors import UnsupportedError


def chunked_attention(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
    """`reference_attention`, one [chunk, chunk] block of logits at a time; blocks without visible keys are skipped."""
    if inputs.logit_functions is not None:
        return attention_by_functions(query, key, value, inputs)
    return whole_sequence(PAIR)(query, key, value, inputs)


def chunked_key_block(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S V"],
    inputs: AttentionInputs,
    *,
    layer: Int[Array, ""] | int | None = None,
    wide: bool = False,
) -> PartialAttention:
    """Attention to a block of keys, computed by XLA; arguments as in `kernels.tpu.tpu_key_block`.

    Keys beyond `used` take as much time as others. Sequences with different `start` are computed one by one.
    """
    if inputs.logit_functions is not None:
        raise UnsupportedError("chunked attention to a block of keys has no functions of all logits.")
    if layer is not None:
        key, value = (jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in (key, value))
    if inputs.rotation is not None:
        key, value = rotated_keys(key, value, inputs)
        inputs = replace(inputs, rotation=None)
    if inputs.used is not None:
        value = jnp.where((jnp.arange(key.shape[2]) < inputs.used[:, None])[:, None, :, None], value, 0)
    if query.shape[0] == 1 or (inputs.start is None and inputs.used is None):
        return attend(query, key, value, inputs, PAIR, wide)

    shared = {"slope": inputs.slope, "distance_bias": inputs.distance_bias, "bias": inputs.bias}

    def of_sequence(q: jax.Array, k: jax.Array, v: jax.Array, inputs: AttentionInputs) -> PartialAttention:
        one = replace(jax.tree.map(lambda x: x[None], inputs), **shared)
        out, logsumexp = attend(q[None], k[None], v[None], one, PAIR, wide)
        return PartialAttention(out[0], logsumexp[0])

    inputs = replace(inputs, slope=None, distance_bias=None, bias=None)
    each = jax.tree.map(lambda x: jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])), inputs)
    return jax.vmap(of_sequence)(query, key, value, each)


class _Blocks(NamedTuple):
    """The arrays, padded to whole blocks. Padding is never visible."""

    q: Float[Array, "B G M T K"]
    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S V"]
    inputs: AttentionInputs
    table: Float[Array, "H extended"] | None  # `inputs.distance_bias`, extended
    keys: int  # before padding
    queries_per_block: int
    keys_per_block: int

    def first(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """The distance of the first query of block i from the first key of block j."""
        first = i * self.queries_per_block - j * self.keys_per_block
        return first if self.inputs.start is None else self.inputs.start[0] + first

    def positions(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Those of the queries and of the keys, [B or 1, tokens]."""
        inputs, t, s = self.inputs, self.queries_per_block, self.keys_per_block
        if inputs.query_positions is not None and inputs.key_positions is not None:
            return _part(inputs.query_positions, i, t, 1), _part(inputs.key_positions, j, s, 1)
        return (self.first(i, j) + j * s + jnp.arange(t))[None], (j * s + jnp.arange(s))[None]

    def bias(self, i: jax.Array, j: jax.Array, params: PositionBias | None) -> jax.Array | None:
        """What is added to the logits of a block, [B or 1, H, t, s]: from the table, and by a function."""
        terms = []
        if self.table is not None:
            t, s = self.queries_per_block, self.keys_per_block
            terms.append(toeplitz_block(self.table, self.first(i, j), t, s)[None])
        if params is not None:
            H = self.q.shape[1] * self.q.shape[2]
            terms.append(params.block(*self.positions(i, j), H))
        return sum(terms) if terms else None

    def logits(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Masked float32 logits [B, G, M, t, s] of query block i, `q`, against key block j, `k`."""
        inputs, t, s = self.inputs, self.queries_per_block, self.keys_per_block
        distance = self.first(i, j) + jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
        used = None
        if inputs.start is not None and self.keys < self.k.shape[2]:
            # Without `start`, padded keys are later than all queries.
            used = j * s + jnp.arange(s) < self.keys
        if inputs.used is not None:
            before_end = j * s + jnp.arange(s) < inputs.used[0]
            used = before_end if used is None else used & before_end
        block = inputs.of_tokens(lambda x: _part(x, i, t, 1), lambda x: _part(x, j, s, 1))
        return masked_logits(q, k, distance, block, used, self.bias(i, j, inputs.bias))

    def visible_keys(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The range of key blocks that contain visible keys of query block i."""
        start = 0 if self.inputs.start is None else self.inputs.start[0]
        t, s, count = self.queries_per_block, self.keys_per_block, self.k.shape[2] // self.keys_per_block
        last = start + (i + 1) * t - 1
        if self.inputs.used is not None:
            last = jnp.minimum(last, self.inputs.used[0] - 1)
        end = jnp.clip(last // s + 1, 0, count)
        if self.inputs.window is None:
            return jnp.zeros_like(end), end
        return jnp.clip((start + i * t - self.inputs.window + 1) // s, 0, end), end


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, inputs: AttentionInputs) -> _Blocks:
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    t, s = min(inputs.chunk, T), min(inputs.chunk, S)
    q = padded(q, 2, t).reshape(B, G, H // G, -1, K)
    inputs = inputs.of_tokens(lambda x: padded(x, 1, t), lambda x: padded(x, 1, s))
    table = None if inputs.distance_bias is None else extended(inputs.distance_bias, t, s)
    return _Blocks(q, padded(k, 2, s), padded(v, 2, s), inputs, table, S, t, s)


def _part(x: jax.Array, index: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _partial(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S V"],
    inputs: AttentionInputs,
    *,
    wide: bool = False,
) -> PartialAttention:
    """Attention to a block of keys; all sequences start at the same place. `wide`: `out` in float32."""
    B, H, T, K = q.shape
    blocks = _in_blocks(q, k, v, inputs)
    t, s, shape = blocks.queries_per_block, blocks.keys_per_block, blocks.q.shape[:3]

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_i = _part(blocks.q, i, t, 3)

        def key_block(j: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
            def weighted(weights: jax.Array) -> jax.Array:
                v_j = _part(blocks.v, j, s, 2)
                weights = weights.astype(v.dtype)
                return jnp.einsum("bgmts,bgsk->bgmtk", weights, v_j, preferred_element_type=jnp.float32)

            return softmax.add(blocks.logits(q_i, _part(blocks.k, j, s, 2), i, j), weighted)

        start = OnlineSoftmax(
            jnp.full((*shape, t), FLOOR, jnp.float32),
            jnp.zeros((*shape, t), jnp.float32),
            jnp.zeros((*shape, t, v.shape[-1]), jnp.float32),
        )
        highest, total, out = jax.lax.fori_loop(*blocks.visible_keys(i), key_block, start)
        some = total > 0
        logsumexp = jnp.where(some, highest + jnp.log(jnp.where(some, total, 1)), MASKED)
        out = out / jnp.where(some, total, 1)[..., None]
        return out if wide else out.astype(q.dtype), logsumexp

    out, logsumexp = jax.lax.map(query_block, jnp.arange(blocks.q.shape[3] // t))  # [T/t, B, G, M, t, ...]
    out = jnp.moveaxis(out, 0, 3).reshape(B, H, -1, v.shape[-1])[:, :, :T]
    return PartialAttention(out, jnp.moveaxis(logsumexp, 0, 3).reshape(B, H, -1)[:, :, :T])


def chunked_gradient(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S V"],
    inputs: AttentionInputs,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T V"],
) -> KeyBlockGradients:
    """The gradients that come from one block of keys, by XLA; all sequences start at the same place."""
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    blocks = _in_blocks(q, k, v, inputs)
    t, s, shape = blocks.queries_per_block, blocks.keys_per_block, blocks.q.shape[:3]
    # Padded queries get weight 0: with a logsumexp of 0, their weights could overflow.
    logsumexp = jnp.pad(logsumexp, ((0, 0), (0, 0), (0, -T % t)), constant_values=-MASKED).reshape(*shape, -1)
    inner = padded(inner, 2, t).reshape(*shape, -1)
    d_out = padded(d_out, 2, t).reshape(*blocks.q.shape[:-1], -1)

    def query_block(sums: KeyBlockGradients, i: jax.Array) -> tuple[KeyBlockGradients, jax.Array]:
        q_i, d_out_i = _part(blocks.q, i, t, 3), _part(d_out, i, t, 3)
        logsumexp_i, inner_i = _part(logsumexp, i, t, 3), _part(inner, i, t, 3)

        def key_block(j: jax.Array, sums: KeyBlockGradients) -> KeyBlockGradients:
            k_j, v_j = _part(blocks.k, j, s, 2), _part(blocks.v, j, s, 2)
            logits = blocks.logits(q_i, k_j, i, j)
            p = jnp.exp(logits - logsumexp_i[..., None])
            d_p = jnp.einsum("bgmtk,bgsk->bgmts", d_out_i, v_j, preferred_element_type=jnp.float32)
            d_wide = p * (d_p - inner_i[..., None])
            d_product = d_wide
            if inputs.soft_cap is not None:
                product = jnp.einsum("bgmtk,bgsk->bgmts", q_i, k_j, preferred_element_type=jnp.float32)
                d_product = d_wide * (1 - jnp.tanh(product / inputs.soft_cap) ** 2)
            d_logits, p = d_product.astype(q.dtype), p.astype(q.dtype)
            d_q = jnp.einsum("bgmts,bgsk->bgmtk", d_logits, k_j, preferred_element_type=jnp.float32)
            d_k = jnp.einsum("bgmts,bgmtk->bgsk", d_logits, q_i, preferred_element_type=jnp.float32)
            d_v = jnp.einsum("bgmts,bgmtk->bgsk", p, d_out_i, preferred_element_type=jnp.float32)
            return sums._replace(
                query=sums.query + d_q,
                key=_add_part(sums.key, d_k, j, s, 2),
                value=_add_part(sums.value, d_v, j, s, 2),
                **_learned(blocks, sums, d_wide.reshape(B, H, t, s), i, j),
            )

        start = sums._replace(query=jnp.zeros(q_i.shape, jnp.float32))
        sums = jax.lax.fori_loop(*blocks.visible_keys(i), key_block, start)
        return sums._replace(query=jnp.zeros(())), sums.query

    def zeros(x: Any) -> Any:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), x)

    start = KeyBlockGradients(
        jnp.zeros(()),
        zeros(blocks.k),
        zeros(blocks.v),
        zeros(inputs.slope),
        zeros(blocks.table),
        zeros(blocks.inputs.key_bias),
        zeros(inputs.bias),
    )
    sums, d_q = jax.lax.scan(query_block, start, jnp.arange(blocks.q.shape[3] // t))
    return sums._replace(
        query=jnp.moveaxis(d_q, 0, 3).reshape(B, H, -1, K)[:, :, :T],
        key=sums.key[:, :, :S],
        value=sums.value[:, :, :S],
        distance_bias=None if sums.distance_bias is None else table_gradient(sums.distance_bias, t, s),
        key_bias=None if sums.key_bias is None else sums.key_bias[:, :, :S],
    )


def _learned(
    blocks: _Blocks, sums: KeyBlockGradients, d_logits: Float[Array, "B H t s"], i: jax.Array, j: jax.Array
) -> dict[str, Any]:
    """The gradients of slopes and biases after one more block."""
    inputs, s, more = blocks.inputs, blocks.keys_per_block, {}
    if sums.slope is not None:
        queries, keys = blocks.positions(i, j)
        far = (queries[:, :, None] - keys[:, None, :]).astype(jnp.float32)
        more["slope"] = sums.slope - (d_logits * far[:, None]).sum((0, 2, 3))
    if sums.distance_bias is not None:
        more["distance_bias"] = add_diagonal_sums(sums.distance_bias, d_logits.sum(0), blocks.first(i, j))
    if sums.key_bias is not None:
        d_keys = d_logits.sum(2)
        d_keys = d_keys if sums.key_bias.shape[0] > 1 else d_keys.sum(0, keepdims=True)
        more["key_bias"] = _add_part(sums.key_bias, d_keys, j, s, 2)
    if inputs.bias is not None:
        H = d_logits.shape[1]
        found, pull = jax.vjp(lambda bias: bias.block(*blocks.positions(i, j), H), inputs.bias)
        d_bias = d_logits if found.shape[0] > 1 else d_logits.sum(0, keepdims=True)
        more["bias"] = jax.tree.map(jnp.add, sums.bias, pull(d_bias)[0])
    return more


def _add_part(x: jax.Array, part: jax.Array, index: jax.Array, size: int, axis: int) -> jax.Array:
    updated = _part(x, index, size, axis) + part
    return jax.lax.dynamic_update_slice_in_dim(x, updated, index * size, axis)


PAIR = Pair(_partial, chunked_gradient)


def attention_by_functions(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
    """`reference_attention`, one block of queries against all keys at a time.

    A block's logits are computed again for the gradient, so that memory is that of [chunk, T] logits.
    """
    B, T, H, K = query.shape
    chunk = min(inputs.chunk, T)
    functions = inputs.logit_functions
    raw, query = (padded(x, 1, chunk) for x in (functions.query, query))

    @jax.checkpoint
    def block(i: Int[Array, ""]) -> Queries:
        one = inputs.of_tokens(lambda x: _part(padded(x, 1, chunk), i, chunk, 1), lambda x: x)
        one = replace(one, logit_functions=replace(functions, query=_part(raw, i, chunk, 1)))
        return attention_to_all(_part(query, i, chunk, 1), key, value, one, i * chunk)

    out = jax.lax.map(block, jnp.arange(query.shape[1] // chunk))  # [blocks, B, chunk, H, V]
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, H, value.shape[-1])[:, :T]
