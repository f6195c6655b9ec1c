"""Part of `attention.py`: the train step of configs/drope_16b.py's model on an accelerator, against torch.

`train_step.py` measures small shapes in float32 on a CPU; this is the same contest in bfloat16 (float32 parameters and
AdamW moments on both sides) on a device, with model FLOPs utilization in both conventions.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attention_tools import Plan, Table, TorchPeer, number, ratios, reason, tell
from train_step import HERE, OPTIMIZER, Ours, Shape, llama_config, llama_names, measure, prepare

from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model, train_flops_per_token
from pe_lab.recipes import load_config
from pe_lab.training.run import peak_flops

TINY = ModelConfig(640, 2, 64, 128, 4, 2, dtype="bfloat16", loss_chunks=8)
LENGTH = 1024
CLOSE = 1e-2  # of the first losses, relative: products are rounded to 8 bits on both sides, each in its own order


def shape_of(tiny: bool, batch: int, remat: str, loss_chunks: int) -> Shape:
    """The recipe's model; batches of `batch` windows of 1024 tokens."""
    if tiny:
        return Shape(TINY, 2, 64, 1)
    model = load_config(f"{HERE.parent}/configs/drope_16b.py").model
    model = dataclasses.replace(model, remat=remat, loss_chunks=loss_chunks)
    return Shape(model, batch, LENGTH, 10)


def start_peer(python: str, plan: Plan, shape: Shape, params: Any, batch: Any, threads: int, at: Path) -> TorchPeer:
    """transformers' Llama with the same weights, compiled."""
    np.savez(at / "weights.npz", **llama_names(params))
    np.savez(at / "batch.npz", tokens=batch["tokens"], targets=batch["targets"])
    job = {
        "device": "cpu" if jax.default_backend() == "cpu" else "cuda",
        "config": llama_config(shape),
        "weights": str(at / "weights.npz"),
        "batch": str(at / "batch.npz"),
        "threads": threads,
        "optimizer": dataclasses.asdict(OPTIMIZER),
        "optimizer_kind": "fused",
        "compile": True,
    }
    peer = TorchPeer(python, job, at)
    peer.name = "torch compiled"
    return peer


def train_step(
    plan: Plan, python: str | None, threads: int, batch: int, remat: str, loss_chunks: int, matmul: float
) -> tuple[dict[str, Any], Table]:
    """Tokens/s and MFU of both sides, by turns. `matmul`: FLOP/s that the device reached in a product of matrices."""
    shape = shape_of(plan.tiny, batch, remat, loss_chunks)
    tell(f"  train step: {shape.batch} x {shape.length} tokens")
    params, data = prepare(shape)
    model = Model(shape.model).config
    notes: list[str] = []
    sides: list[Any] = [Ours(shape, params, data)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if python:
                try:
                    sides.append(start_peer(python, plan, shape, params, data, threads, Path(folder)))
                except UserError as failure:
                    notes.append(reason(failure))
            del params
            first = {side.name: side.run(3)["losses"] for side in sides}
            for side in sides[1:]:
                if side.parameters != sides[0].parameters:
                    raise UserError(f"{side.name} has {side.parameters} parameters, pe_lab {sides[0].parameters}.")
                if not np.allclose(first[side.name], first["pe_lab"], rtol=CLOSE):
                    raise UserError(f"The first losses differ: {first}.")
            turns = measure(sides, plan.rounds, shape.steps)
        finally:
            for side in sides[1:]:
                side.stop()
    tokens, flops, peak = shape.batch * shape.length, train_flops_per_token(model, shape.length), peak_flops()
    seconds = {side.name: [turn["seconds"] for turn in turns[side.name]] for side in sides}
    rows: dict[str, Any] = {}
    table = [
        ["", "tokens/s", "best", "MFU full", "MFU causal", "of a product, full", "causal", "ours / this", "spread"]
    ]
    for name, spent in seconds.items():
        rate, ratio = tokens / statistics.median(spent), ratios(spent, seconds["pe_lab"])
        shares = [x * rate / ceiling if ceiling else None for ceiling in (peak.flops, matmul) for x in flops]
        names = ("mfu_full", "mfu_causal", "of_product_full", "of_product_causal")
        row = {"tokens_per_second": rate, "ours_over_this": ratio} | dict(zip(names, shares, strict=True))
        rows[name] = row | {"turns": spent, "first_losses": first[name]}
        table.append([
            name, f"{rate:,.0f}", f"{tokens / min(spent):,.0f}", *map(number, shares), f"{ratio['median']:.2f}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        ])  # fmt: skip
    notes.append(f"Peak: {peak.flops / 1e12:,.1f} TFLOP/s ({peak.source}). full counts every query against every key.")
    title = (
        f"Train step: {sides[0].parameters:,} parameters, {shape.batch} x {shape.length} tokens, bfloat16, "
        f"remat={model.remat}, loss_chunks={model.loss_chunks}"
    )
    result = {
        "model": dataclasses.asdict(model),
        "batch": shape.batch,
        "length": shape.length,
        "parameters": sides[0].parameters,
        "flops_per_token": flops._asdict(),
        "peak": peak._asdict(),
        "rows": rows,
        "versions": {key: value for side in sides for key, value in side.versions.items()},
    }
    return result, Table(title, table, notes)
