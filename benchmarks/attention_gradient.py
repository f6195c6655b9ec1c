"""Part of `attention.py`: the forward and backward pass of pe_lab's GPU kernel, with and without a bias by distance.

Before anything is timed, outputs and gradients are compared with a reference in float64: all of them for a short
sequence, and for a long one those that depend on the last queries alone (outputs and gradients of these queries,
gradients of as many last keys and values, and of as many of the largest distances).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, bias_table, error
from attention_kernels import OURS, placed, rounded, runs
from attention_tools import Contestant, Plan, compare

from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.gpu_gradient import gpu_key_block_gradient
from pe_lab.attention.key_block import AttentionInputs, scaled

CHUNKED_UP_TO = 8192  # tokens: it takes seconds beyond
LAST = 16  # queries that are compared in a long sequence
SHORT_TABLE = 128
Training = Callable[..., tuple[jax.Array, ...]]


class Entry(NamedTuple):
    """One way to compute attention and its gradients.

    Attributes:
      run: attention of queries, keys and values [B, T, H, K], and a table of biases or None.
      entries: of the table of biases by distance; 0: no table.
    """

    name: str
    run: Callable[..., jax.Array]
    entries: int = 0


def ours(tiny: bool) -> Callable[..., jax.Array]:
    """pe_lab's kernel with the gradient of its own kernels."""

    @jax.custom_vjp
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> jax.Array:
        return forward(query, key, value, table)[0]

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> tuple[Any, Any]:
        inputs = AttentionInputs(distance_bias=table)
        out, logsumexp = gpu_key_block(query, key, value, inputs, interpret=tiny)
        return out, (query, key, value, inputs, out, logsumexp)

    def backward(saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
        query, key, value, inputs, out, logsumexp = saved
        inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        found = gpu_key_block_gradient(query, key, value, inputs, logsumexp, inner, d_out, interpret=tiny)
        gradients = zip((found.query, found.key, found.value), (query, key, value), strict=True)
        return *(one.astype(x.dtype) for one, x in gradients), found.distance_bias

    attend.defvjp(forward, backward)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> jax.Array:
        query = scaled(query, jnp.float32(query.shape[-1] ** -0.5))
        return attend(*(x.swapaxes(1, 2) for x in (query, key, value)), table).swapaxes(1, 2)

    return run


def library(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An implementation of `IMPLEMENTATIONS`."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> jax.Array:
        query = scaled(query, jnp.float32(query.shape[-1] ** -0.5))
        return run(query, key, value, AttentionInputs(distance_bias=table))

    return call


def entries(case: Case, tiny: bool) -> list[Entry]:
    made, mine = runs(tiny), ours(tiny)
    found = [
        Entry(OURS, mine),
        Entry(f"{OURS}, a bias for every distance", mine, case.T),
        Entry(f"{OURS}, a bias for {SHORT_TABLE} distances", mine, SHORT_TABLE),
        Entry("cudnn", library(made["cudnn"])),
    ]
    if tiny or case.T <= CHUNKED_UP_TO:
        chunked = library(made["chunked"])
        found += [Entry("chunked", chunked), Entry("chunked, a bias for every distance", chunked, case.T)]
    return found


def table_of(case: Case, size: int) -> jax.Array | None:
    """A table of so many entries for each head; None for no entries."""
    return jnp.asarray(bias_table(case, size)) if size else None


def right_answer(given: list[np.ndarray], table: np.ndarray | None, last: int) -> list[np.ndarray]:
    """In float64 from the last queries: the output, the gradients of queries, keys and values, and of the table.

    The gradient of the output is the queries. Each but the table's is [B, last, heads, K]; that of the table has the
    entries of distances that no earlier query has, and is None where there are none.
    """
    query, key, value = (x.astype(np.float64) for x in given)
    B, T, H, K = query.shape
    G, rows = key.shape[2], np.arange(T - last, T)
    distance = rows[:, None] - np.arange(T)
    found = [np.zeros((B, last, n, K)) for n in (H, H, G, G)]
    size = 0 if table is None else table.shape[1]
    d_table = np.zeros((H, size))
    for b, h in np.ndindex(B, H):
        g = h * G // H
        q, k, v = query[b, rows, h] * K**-0.5, key[b, :, g], value[b, :, g]
        logits = q @ k.T
        if size:
            entry = np.clip(distance, 0, size - 1)
            logits += table[h].astype(np.float64)[entry]
        logits = np.where(distance >= 0, logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out, d_out = p @ v, query[b, rows, h]
        d_logits = p * (d_out @ v.T - (d_out * out).sum(-1, keepdims=True))
        found[0][b, :, h], found[1][b, :, h] = out, d_logits @ k * K**-0.5
        found[2][b, :, g] += (d_logits.T @ q)[T - last :]
        found[3][b, :, g] += (p.T @ d_out)[T - last :]
        if size:
            np.add.at(d_table[h], entry, d_logits)
    # Earlier queries have distances up to T - last - 1. Their distances share the last entry of a short table.
    whole = last == T
    if size == T or (size and whole):
        found.append(d_table if whole else d_table[:, T - last :])
    return found


def training(case: Case, plan: Plan) -> dict[str, dict[str, Any]]:
    """Forward and backward pass together; the gradient of the output is the queries."""
    inputs = placed(case)
    last = case.T if case.T <= 1000 else LAST
    given = [rounded(x) for x in inputs]

    @functools.cache
    def right(size: int) -> list[np.ndarray]:
        table = table_of(case, size)
        return right_answer(given, None if table is None else np.asarray(table), last)

    def off(found: np.ndarray, expected: np.ndarray) -> float:
        # Over all at once: the gradient of a key that few queries see is small, and rounding is relatively large.
        return error(found.reshape(1, -1, 1), expected.reshape(1, -1, 1))

    def contestant(entry: Entry) -> Contestant:
        table = table_of(case, entry.entries)

        def run(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> tuple[Any, ...]:
            out, gradients = jax.vjp(entry.run, query, key, value, table)
            return out, *gradients(query)

        call = functools.partial(jax.jit(run), *inputs, table)

        def check() -> float:
            *found, d_table = call()
            found = [rounded(x[:, case.T - last :]) for x in found]
            wanted = right(entry.entries)
            if len(wanted) > len(found):
                found.append(rounded(d_table if last == case.T else d_table[:, case.T - last :]))
            return max(off(x, y) for x, y in zip(found, wanted, strict=True))

        return Contestant(call, check)

    sides = {entry.name: contestant(entry) for entry in entries(case, plan.tiny)}
    return compare(case, replace(plan, peer=None), "forward and backward", sides, lambda how: float("nan"))
