"""The train step on a GPU against transformers' Llama under torch.compile, in bfloat16.

    python -m benchmarks.train_step_gpu --json benchmarks/results/h100/train_step.json
    python -m benchmarks.train_step_gpu --tiny --ours-only                       # anywhere

SmolLM2-135M and 360M at 2,048 and 8,192 tokens, and the 494M model of configs/table1.py at 1,024; this also without
encoding, with p-RoPE, with windows and NoPE layers (RNoPE-SWA), and with packed documents, where torch has no side.
Both sides have the same weights, batch, float32 parameters and AdamW moments, products in bfloat16, and attention that
their library chooses (torch: flash attention by scaled_dot_product_attention). The losses of the first three steps must
agree before anything is timed. Sides alternate. Tokens/s, MFU with all pairs of tokens counted and with what causality
leaves, peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory of the same GPU
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import jax

platforms = os.environ.get("JAX_PLATFORMS")
import numpy as np
from attention_tools import Table, TorchPeer, number, ratios, reason, tell
from train_step import ROPE_BASE, Ours, Shape, find_peer_python, measure, peer_job, prepare

if platforms is None:
    os.environ.pop("JAX_PLATFORMS", None)  # `train_step.py` says cpu; JAX has read it before, the peer has not

from pe_lab.config import ModelConfig
from pe_lab.errors import UserError, did_you_mean
from pe_lab.identity import machine, versions
from pe_lab.model import Model, preset, train_flops_per_token
from pe_lab.parallel import keep_freed_memory, start_processes
from pe_lab.positional import NoPE, Rope
from pe_lab.recipes import load_config
from pe_lab.terminal import command
from pe_lab.training.run import peak_flops

CLOSE = 1e-2  # of the first losses, relative: products are rounded to 8 bits on both sides, each in its own order
DOCUMENTS = 8  # of a packed window
TINY = ModelConfig(640, 2, 64, 128, 4, 2, dtype="bfloat16")


class Cell(NamedTuple):
    """A model and a batch.

    Attributes:
      positional: of its layers; None: RoPE, which torch's side has, too.
      packed: windows hold several documents.
    """

    model: str
    length: int
    batch: int
    positional: Any = None
    packed: bool = False


def cells() -> dict[str, Cell]:
    """By name, in order of value."""
    found = {
        "135m@8192": Cell("smollm2_135m", 8192, 4),
        "135m@2048": Cell("smollm2_135m", 2048, 16),
        "494m@1024": Cell("494m", 1024, 16),
        "360m@8192": Cell("smollm_360m", 8192, 2),
        "360m@2048": Cell("smollm_360m", 2048, 8),
        "494m@1024, packed": Cell("494m", 1024, 16, packed=True),
        "494m@1024, NoPE": Cell("494m", 1024, 16, NoPE()),
        "494m@1024, p-RoPE": Cell("494m", 1024, 16, Rope(base=ROPE_BASE, fraction=0.75)),
    }
    swa = load_config(f"{HERE.parent}/configs/table1.py:method=rnope_swa").phases[0].positional
    return found | {"494m@1024, RNoPE-SWA": Cell("494m", 1024, 16, swa)}


def shape_of(cell: Cell, args: argparse.Namespace) -> Shape:
    """A cell's model with what a recipe's "auto" takes on a GPU where memory is enough; `--scan`: but for the scan."""
    how = {"remat": "dots_attention", "scan": args.scan, "loss_chunks": args.loss_chunks}
    if args.tiny:
        return Shape(dataclasses.replace(TINY, **how), 2, 64, 1)
    if cell.model == "494m":
        model = load_config(f"{HERE.parent}/configs/drope_16b.py").model
    else:
        model = ModelConfig(**preset(cell.model, dtype="bfloat16"))
    return Shape(dataclasses.replace(model, **how), cell.batch, cell.length, 10)


def packed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With ids of documents of different lengths."""
    B, T = batch["tokens"].shape
    cuts = np.sort(np.random.default_rng(0).integers(1, T, (B, DOCUMENTS - 1)), axis=1)
    return batch | {"segments": (np.arange(T)[None, :, None] >= cuts[:, None]).sum(-1).astype(np.int32) + 1}


def start_peer(python: str, shape: Shape, params: Any, batch: Any, threads: int, at: Path) -> TorchPeer:
    """transformers' Llama with the same weights, compiled."""
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    job = peer_job(shape, params, batch, threads, at) | {"device": device, "compile": True}
    peer = TorchPeer(python, job, at)
    peer.name = "torch compiled"
    return peer


def peak_memory(side: Any) -> int | None:
    """Bytes of the device that a side took at most."""
    if isinstance(side, TorchPeer):
        return side.ask({"do": "peak"})["bytes"]
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measured(name: str, cell: Cell, args: argparse.Namespace, python: str | None) -> dict[str, Any]:
    """Both sides' results of one cell."""
    shape = shape_of(cell, args)
    tell(f"  train step: {name}, {shape.batch} x {shape.length} tokens")
    params, batch = prepare(shape)
    if cell.packed:
        batch = packed(batch)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        sides: list[Any] = [Ours(shape, params, batch, positional=cell.positional or Rope(base=ROPE_BASE))]
        if python and cell.positional is None and not cell.packed:
            try:
                sides.append(start_peer(python, shape, params, batch, args.threads, Path(folder)))
                running.callback(sides[1].stop)
            except UserError as failure:
                notes.append(reason(failure))
        del params
        first = {side.name: side.run(3)["losses"] for side in sides}
        for side in sides[1:]:
            if side.parameters != sides[0].parameters:
                raise UserError(f"{side.name} has {side.parameters} parameters, pe_lab {sides[0].parameters}.")
            if not np.allclose(first[side.name], first["pe_lab"], rtol=CLOSE):
                raise UserError(f"{name}: the first losses differ: {first}.")
        spent = measure(sides, args.rounds, shape.steps)
        peaks = {side.name: peak_memory(side) for side in sides}
    model, tokens = Model(shape.model).config, shape.batch * shape.length
    flops, peak = train_flops_per_token(model, shape.length), peak_flops()
    seconds = {name: [one["seconds"] for one in each] for name, each in spent.items()}
    rows = {}
    for side, each in seconds.items():
        rate = tokens / statistics.median(each)
        shares = [x * rate / peak.flops if peak.flops else None for x in flops]
        rows[side] = {
            "tokens_per_second": rate,
            "ours_over_this": ratios(each, seconds["pe_lab"]),
            "mfu_full": shares[0],
            "mfu_causal": shares[1],
            "peak_bytes": peaks[side],
            "first_losses": first[side],
            "seconds": each,
        }
    return {
        "cell": name,
        "model": dataclasses.asdict(model),
        "batch": shape.batch,
        "length": shape.length,
        "parameters": sides[0].parameters,
        "peak": peak._asdict(),
        "rows": rows,
        "notes": notes,
    }


def table_of(results: list[dict[str, Any]]) -> Table:
    lines = [["", "side", "tokens/s", "MFU full", "MFU causal", "peak GiB", "ours / this", "spread"]]
    for one in results:
        for side, row in one["rows"].items():
            ratio, memory = row["ours_over_this"], row["peak_bytes"]
            lines.append([
                f"{one['cell']}, {one['batch']} windows", side, f"{row['tokens_per_second']:,.0f}",
                number(row["mfu_full"]), number(row["mfu_causal"]), f"{memory / 2**30:,.1f}" if memory else "–",
                f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            ])  # fmt: skip
    peak = results[0]["peak"]
    notes = [f"Peak: {peak['flops'] / 1e12:,.1f} TFLOP/s ({peak['source']})."]
    return Table("Train step, bfloat16", lines, notes + [note for one in results for note in one["notes"]])


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="names with semicolons (default: all, in order of value)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of each")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--ours-only", action="store_true", help="no peer")
    parser.add_argument("--loss-chunks", type=int, default=8, help="of our train step")
    parser.add_argument("--scan", action="store_true", help="our layers in a scan")
    parser.add_argument("--rounds", type=int, default=3, help="of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU")
    parser.add_argument("--json", default="", help="a file for all that is found; a table in .md beside it")
    args = parser.parse_args(argv)
    known = cells()
    chosen = [name.strip() for name in args.cells.split(";")] if args.cells else list(known)
    for name in chosen:
        if name not in known:
            raise UserError(f"--cells: there is no '{name}'. {did_you_mean(name, known)}")
    python = None if args.ours_only else find_peer_python(args.peer_python)
    keep_freed_memory()
    start_processes()
    given = shlex.join(["python", "-m", "benchmarks.train_step_gpu", *(sys.argv[1:] if argv is None else argv)])
    found: dict[str, Any] = {"command": given, "versions": versions(), "machine": machine(), "results": []}
    for name in chosen:
        found["results"].append(measured(name, known[name], args, python))
        table = table_of(found["results"])
        if args.json:  # one by one, because a machine may be lent for minutes only
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
            Path(args.json).with_suffix(".md").write_text(f"`{given}`\n\n{table.markdown()}\n")
    print(table.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
