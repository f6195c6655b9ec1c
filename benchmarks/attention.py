"""Attention against what else there is: on a GPU against cuDNN, tokamax, torch and the device's own limits, on a CPU
against torch; and what it takes of memory.

    python -m benchmarks.attention --peer-python=/path/to/venv/bin/python       # what this machine is for
    python -m benchmarks.attention --tiny --ours-only                           # a GPU's part, interpreted: does it run?

Parts on a GPU: `forward`, TFLOP/s of whole texts; `backward`, of training; `decode`, bytes/s of the cache that one
query reads; `train`, the step of configs/drope_16b.py's model. On a CPU: `speed`, `memory`, and `kernels`: are ours,
interpreted, right? All sides get the same arrays; before anything is timed, outputs of some queries are compared with
a reference in float64, and what is off is not timed. Sides take turns. The peer is torch in a process of its own
(another Python, perhaps: `--peer-python`, or the environment's PE_LAB_PEER).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # what is here; `train_step.py`, when imported, would say cpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory of the same GPU
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as `python benchmarks/attention.py` from a checkout that is not installed
sys.path.insert(0, str(HERE))

import jax  # noqa: E402
from attention_cases import Case  # noqa: E402
from attention_tools import Plan, Table, TorchPeer, judged, number, tell  # noqa: E402
from train_step import find_peer_python  # noqa: E402

from pe_lab.config import UserError, command, did_you_mean  # noqa: E402
from pe_lab.parallel import keep_freed_memory, start_processes  # noqa: E402
from pe_lab.training.machine import machine, versions  # noqa: E402

GPU_PARTS, CPU_PARTS = ("forward", "backward", "decode", "train"), ("speed", "memory", "kernels")
LENGTHS = {"gpu": (2048, 4096, 8192, 16384, 32768, 65536, 131072), "cpu": (512, 1024, 2048, 4096, 8192)}
SMALL = 1000  # tokens where every query is compared; no multiple of any block
CACHES = {"tokens": (8192, 32768, 131072), "rows": (1, 8)}
TRAINED = (1024, 4096)


def ratio(over: dict[str, Any] | None, under: dict[str, Any] | None) -> float | None:
    """How many times as fast one row is as another; None where one has no time."""
    if not over or not under or "seconds" not in over or "seconds" not in under:
        return None
    return under["seconds"] / over["seconds"]


def fastest(rows: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    timed = [rows[name] for name in names if "seconds" in rows.get(name, {})]
    return min(timed, key=lambda row: row["seconds"]) if timed else None


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """What did not run or was wrong, and on what; each reason once."""
    told: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, row in result["rows"].items():
            if "failure" in row:
                told.setdefault((name, row["failure"]), []).append(f"{result['case']['S']:,}")
    return [f"{name}, {' '.join(at)} tokens: {why}" for (name, why), at in told.items()]


def worst(results: Sequence[dict[str, Any]]) -> str:
    """The largest error of each row, in one line."""
    found: dict[str, float] = {}
    for result in results:
        for name, row in result["rows"].items():
            if "error" in row:
                found[name] = max(found.get(name, 0.0), row["error"])
    return "Largest error, of a query: " + "; ".join(f"{name} {value:.1e}" for name, value in found.items()) + "."


def by_length(results: Sequence[dict[str, Any]], value: Any) -> list[list[str]]:
    """A line for every name, a column for every result."""
    names = list(dict.fromkeys(name for result in results for name in result["rows"]))
    return [[name, *(number(value(result, result["rows"].get(name, {}))) for result in results)] for name in names]


def flops_table(title: str, results: list[dict[str, Any]], factor: float, matmul: float, tiny: bool) -> Table:
    """TFLOP/s of every row, and the ratios that have targets."""
    from attention_kernels import DISPATCHER, FROM, OURS, OURS_OVER_CUDNN

    def rate(result: dict[str, Any], row: dict[str, Any]) -> float | None:
        return factor * Case(**result["case"]).flops / row["seconds"] / 1e12 if "seconds" in row else None

    rows = [["tokens", *(f"{r['case']['S']:,}" for r in results)], *by_length(results, rate)]
    judgements: list[str] = []

    def add(what: str, of: Any, target: float = 0, above: int = 0) -> None:
        values = [of(result["rows"]) for result in results]
        rows.append([what, *map(number, values)])
        held = [v for v, r in zip(values, results, strict=True) if v is not None and r["case"]["S"] >= above]
        if target and held and not tiny:
            judgements.append(judged(f"{what} from {above:,} tokens on, lowest" if above else f"{what}, lowest", min(held), target))

    choices = (OURS, "cudnn", "tokamax", "chunked")
    peers = ("torch flash", "torch cudnn")
    add("auto / best", lambda r: ratio(r.get("auto"), fastest(r, choices)), DISPATCHER)
    add("auto / torch's best", lambda r: ratio(r.get("auto"), fastest(r, peers)))
    if any(OURS in result["rows"] for result in results):
        add(f"{OURS} / cudnn", lambda r: ratio(r.get(OURS), r.get("cudnn")), OURS_OVER_CUDNN, FROM)
        turn = "heads turn apart"
        add(f"{turn}: {OURS} / cudnn", lambda r: ratio(r.get(f"{OURS}, {turn}"), r.get(f"cudnn, {turn}")))
    for result, share in zip(results, zip(*(row[1:] for row in rows[1:2]), strict=True), strict=True):
        assert share  # one column a result
        best = fastest(result["rows"], list(result["rows"]))
        result["best_over_matmul"] = rate(result, best) * 1e12 / matmul if best else None
    rows.append(["best / matrix product", *(number(r["best_over_matmul"]) for r in results)])
    taken = ", ".join(dict.fromkeys(r["auto"] for r in results))
    notes = [f"auto takes {taken}. {worst(results)}", *judgements, *failures(results)]
    return Table(title, rows, notes)


def gpu_part(args: argparse.Namespace, plan: Plan, python: str | None, threads: int) -> tuple[dict[str, Any], list[Table]]:
    import attention_kernels as kernels
    from attention_train import train_step

    H, G = args.heads, args.kv_heads
    limits = kernels.ceilings(plan)
    found: dict[str, Any] = {"ceilings": limits}
    tables = [
        Table(
            "What the device does at best",
            [["matrix product, TFLOP/s", "copy, GB/s"], [f"{limits['matmul'] / 1e12:,.1f}", f"{limits['copy'] / 1e9:,.0f}"]],
            [f"A product of {limits['side']} x {limits['side']} matrices in bfloat16; a copy counts bytes read and written."],
        )
    ]  # fmt: skip

    def done(name: str, result: Any, *made: Table) -> None:
        found.setdefault(name, []).extend(result if isinstance(result, list) else [result])
        tables.extend(made)

    for K in args.head_dims:
        shape = f"{H} heads, {G} key heads, {K} channels, bfloat16"
        if "forward" in args.parts:
            lengths = (48, 96) if plan.tiny else args.lengths
            small = Case(1, 40 if plan.tiny else SMALL, 40 if plan.tiny else SMALL, H, G, K, "bfloat16")
            cases = [small] + [Case(max(1, (0 if plan.tiny else args.tokens) // T), T, T, H, G, K, "bfloat16") for T in lengths]
            results = [
                {"case": c._asdict(), "auto": kernels.taken(c), "rows": kernels.forward(c, plan, kernels.forward_entries(c, plan.tiny))}
                for c in cases
            ]  # fmt: skip
            title = f"TFLOP/s, forward, causal (4 B H T T K / 2 counted), B T = {args.tokens:,} or one text; {shape}"
            done("forward", results, flops_table(title, results, 1, limits["matmul"], plan.tiny))
        if "backward" in args.parts:
            cases = [Case(max(1, (0 if plan.tiny else args.tokens) // T), T, T, H, G, K, "bfloat16") for T in ((48,) if plan.tiny else TRAINED)]
            results = [
                {"case": c._asdict(), "auto": kernels.taken(c, backward=True), "rows": kernels.backward(c, plan, kernels.backward_runs(plan.tiny))}
                for c in cases
            ]  # fmt: skip
            title = f"TFLOP/s, forward and backward (3.5 times the forward's FLOPs counted); {shape}"
            done("backward", results, flops_table(title, results, 3.5, limits["matmul"], plan.tiny))
        if "decode" in args.parts:
            cases = [Case(B, 1, S, H, G, K, "bfloat16") for S in ((96,) if plan.tiny else CACHES["tokens"]) for B in CACHES["rows"]]
            results = [{"case": c._asdict(), "rows": kernels.decode(c, plan)} for c in cases]
            done("decode", results, decode_table(shape, results, limits["copy"], kernels.taken(cases[0], spans=True), plan.tiny))
    if "train" in args.parts:
        result, table = train_step(plan, python, threads, args.train_batch, args.remat, args.loss_chunks, limits["matmul"])
        done("train", result, table)
    return found, tables
