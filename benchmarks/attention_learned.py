"""Part of `attention.py`: attention with a learned bias by distance on a CPU, forward and backward, against torch's.

The bias is a table with an entry for every head and distance, and has a gradient. torch computes it densely: as matrix
products and a softmax, and as the mask of scaled_dot_product_attention. Its flex_attention is asked, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, bias_table, error
from attention_cpu import FIT, line
from attention_gradient import LAST, library, right_answer
from attention_kernels import placed, rounded
from attention_tables import failures
from attention_tools import Contestant, Plan, Table, compare, number, ratios, tell

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.api import CPU_BLOCK

HEADS, KV_HEADS, CHANNELS = 4, 2, 64  # torch's tensors of [heads, tokens, tokens] must fit a small machine
PEERS = ("bias products", "bias sdpa", "bias flex")
DENSE = tuple(f"torch {how}" for how in PEERS[:2])
BIASED, PLAIN = "chunked", "chunked, no bias"


def with_gradients(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array | None) -> tuple[Any, ...]:
    """The output and all gradients, that of the table included; the output's gradient is the queries."""
    chunked = library(lambda q, k, v, inputs: IMPLEMENTATIONS["chunked"].run(q, k, v, replace(inputs, chunk=CPU_BLOCK)))
    out, pull = jax.vjp(chunked, query, key, value, table)
    return out, *pull(query)


def training(case: Case, plan: Plan) -> dict[str, dict[str, Any]]:
    """Forward and backward pass together; the last outputs and their gradients are compared with float64 before."""
    inputs, last = placed(case), min(LAST, case.T)
    given, table = [rounded(x) for x in inputs], bias_table(case, case.T)
    rows = list(range(case.T - last, case.T))

    @functools.cache
    def right(biased: bool) -> list[np.ndarray]:
        return right_answer(given, table if biased else None, last)

    def off(found: np.ndarray, expected: np.ndarray) -> float:
        return error(found.reshape(1, -1, 1), expected.reshape(1, -1, 1))

    def contestant(biased: bool) -> Contestant:
        call = functools.partial(jax.jit(with_gradients), *inputs, jnp.asarray(table) if biased else None)

        def check() -> float:
            *found, d_table = call()
            found = [rounded(x[:, case.T - last :]) for x in found]
            found += [rounded(d_table[:, case.T - last :])] if biased else []
            return max(off(x, y) for x, y in zip(found, right(biased), strict=True))

        return Contestant(call, check)

    def torch_is_off(how: str) -> float:
        whats = ("out", "gradient", "table gradient")
        expected = (*right(True)[:2], right(True)[-1])
        return max(off(plan.peer.rows(case, how, rows, what), one) for what, one in zip(whats, expected, strict=True))

    sides = {BIASED: contestant(True), PLAIN: contestant(False)}
    return compare(case, replace(plan, backends=PEERS), "biased", sides, torch_is_off)


def speed(plan: Plan, lengths: Sequence[int]) -> tuple[list[Any], Table]:
    """Chunked attention with a learned bias against the faster of torch's dense ones, by length; and a table."""
    found: list[dict[str, Any]] = []
    rows = [["tokens", PLAIN, BIASED, *DENSE, "torch / chunked", "spread", "torch's peak MiB"]]
    for T in lengths:
        case = Case(1, T, T, HEADS, KV_HEADS, CHANNELS, "float32")
        result: dict[str, Any] = {"case": case._asdict(), "rows": training(case, plan)}
        timed = result["rows"]
        peers = [timed[name] for name in DENSE if "seconds" in timed.get(name, {})]
        ratio = None
        if peers and "seconds" in timed.get(BIASED, {}):
            ratio = ratios(min(peers, key=lambda row: row["seconds"])["turns"], timed[BIASED]["turns"])
            result |= {"torch_over_ours": ratio, "torch_peak": plan.peer.ask({"do": "peak"})["bytes"]}
        found.append(result)
        shown = [number(timed.get(name, {}).get("seconds")) for name in (PLAIN, BIASED, *DENSE)]
        spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}" if ratio else "–"
        peak = f"{result['torch_peak'] / 2**20:,.0f}" if ratio else "–"
        rows.append([f"{T:,}", *shown, number(ratio and ratio["median"]), spread, peak])
    title = f"Seconds, forward and backward, with a learned bias by distance; 1 x tokens, {HEADS} heads, "
    notes = [
        "Medians. torch / chunked: the faster of torch's two over ours, in each round; above 1, pe_lab is faster. "
        "torch has a key head for every query head and the indices of distances, made beforehand. The peak is the "
        "resident memory that its process has had so far."
    ]
    return found, Table(f"{title}{KV_HEADS} key heads, {CHANNELS} channels, float32", rows, notes + failures(found))


def memory(lengths: Sequence[int] = FIT) -> tuple[dict[str, Any], Table]:
    """Bytes of the compiled forward and backward pass without its arguments and results, and a line fitted to them."""
    taken = []
    for T in lengths:
        tell(f"  memory with a learned bias: {T:,} tokens")
        shapes = [(1, T, HEADS, CHANNELS), *[(1, T, KV_HEADS, CHANNELS)] * 2, (HEADS, T)]
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        taken.append(jax.jit(with_gradients).lower(*given).compile().memory_analysis().temp_size_in_bytes)
    fit = line(lengths, taken)
    rows = [
        [*(f"{T:,}" for T in lengths), "bytes a token", "plus MiB", "R²"],
        [*(f"{n / 2**20:,.1f}" for n in taken), f"{fit['slope']:,.0f}", f"{fit['intercept'] / 2**20:.2f}",
         f"{fit['r2']:.6f}"],
    ]  # fmt: skip
    title = "MiB of the same pass without arguments and results, by tokens"
    return {"tokens": list(lengths), "bytes": taken, **fit}, Table(title, rows)
