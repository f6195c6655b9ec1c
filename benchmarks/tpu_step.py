"""The train step in the TPU's own compiler, beside MaxText's of the same model, batch, mesh and slice. No TPU needed.

    python benchmarks/tpu_step.py --out=benchmarks/results/tpu                     # about 6 minutes on two cores
    python benchmarks/tpu_step.py --shape=494m-8 --shape=8b-8 --peer=DIR           # DIR: written by tpu_step_peer.py

A shape is a model on a slice, then the number of parts in which it computes the loss (`8b-8`). Each is compiled with
the matrix products of a layer kept (`dots`, which MaxText calls minimal) and with attention's results kept too
(`dots_attention`). What is compared is the compiler's: peak memory, FLOPs of matrix products, attention kernels, and
the bytes that a chip sends by the ring algorithm, counted as often as they run, by kind, with the share that is sent
beside computation. Seconds of a step need a TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import jax

from pe_lab.config import Config, from_dict
from pe_lab.errors import UserError, did_you_mean
from pe_lab.model import preset
from pe_lab.parallel.topology import parse_topology
from pe_lab.planning.hlo import parse
from pe_lab.planning.plan import Plan, explain_phase, make_plan
from pe_lab.planning.report import MIB, StepReport, report_json, report_step
from pe_lab.terminal import command, table

LLAMA_8B = preset("llama_8b_36", layers=32, vocab_size=128256)
QWEN_1_5B = preset("qwen2_0_5b", layers=28, d_model=1536, d_ff=8960, heads=12, kv_heads=2, head_dim=128)
# model, topology, sequence length, batch, mesh
SHAPES: dict[str, tuple[dict[str, Any], str, int, int, dict[str, int]]] = {
    "494m": (preset("drope_494m"), "v5e:16x16", 1024, 1024, {"data": 32, "fsdp": 8}),
    "1.5b": (QWEN_1_5B, "v6e:16x16", 4096, 1024, {"data": 16, "fsdp": 16}),
    "8b": (LLAMA_8B, "v5p:4x4x4", 8192, 128, {"data": 1, "fsdp": 64}),
    "7b": (preset("llama2_7b"), "v5p:4x4x8", 4096, 512, {"data": 2, "fsdp": 64}),
}
NAMES = ("494m-1", "494m-8", "1.5b-8", "8b-8", "7b-8")
REMATS = ("dots", "dots_attention")
PEER_NAMES = {"494m-1": "494m"}  # MaxText's files of an untiled loss have no number


def plan_of(name: str, remat: str = "dots") -> Plan:
    """The plan of a shape such as `8b-8`.

    Raises:
      UserError: there is no such shape.
    """
    shape, _, chunks = name.partition("-")
    if shape not in SHAPES or not chunks.isdigit():
        raise UserError(f"--shape={name}: {did_you_mean(name, NAMES)} (a shape and the parts of its loss)")
    model, topology, length, batch, mesh = SHAPES[shape]
    positional = "nope" if shape == "7b" else "rope"  # DroPE's recalibration of Llama2-7B
    phase = {"name": "step", "positional": positional, "sequence_length": length, "batch_size": batch}
    config = {"name": name, "model": model | {"remat": remat, "loss_chunks": int(chunks)}, "mesh": mesh}
    return make_plan(from_dict(Config, config | {"phases": [phase]}), parse_topology(topology))


def ours(name: str, remat: str) -> StepReport:
    """Compiles the step of a shape."""
    plan = plan_of(name, remat)
    return dataclasses.replace(explain_phase(plan, plan.phases[0])[1], program=f"{name}, {remat}")


def peer(name: str, directory: Path) -> StepReport | None:
    """The report of MaxText's program of the same shape, if tpu_step_peer.py has compiled it."""
    file = directory / f"{PEER_NAMES.get(name, name)}.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    if "memory" not in found:
        return None
    with gzip.open(file.with_suffix(".hlo.txt.gz"), "rt") as text:
        module = parse(text.read())
    plan = plan_of(name)
    (phase,) = plan.phases
    return report_step(
        module,
        plan.mesh_shape,
        1,
        tokens=phase.plan.tokens_per_step // plan.topology.count,
        flops=phase.flops,
        program=f"{name}, MaxText",
        settings={"remat": "minimal", "commit": found["maxtext"]["commit"][:12]},
        compiler=f"libtpu {found['versions']['libtpu']}",
        compile_seconds=found["seconds"]["compile"],
        peak_bytes=found["memory"]["peak"],
    )


def figures(report: StepReport, layers: int) -> dict[str, str]:
    """The column of a report."""
    wire: dict[str, int] = {}
    for row in report.traffic:
        wire[row.kind] = wire.get(row.kind, 0) + row.wire
    forward = sum(runs for name, runs in report.kernels.items() if "fwd" in name)
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    overlapped = report.wire(overlapped=True) / max(1, report.wire())
    return {
        "peak, GB": f"{report.peak_bytes / 1e9:.2f}",
        "FLOPs of matrix products": f"{report.product_flops:.4g}",
        "attention kernels of a layer, forward + backward": f"{forward // layers} + "
        f"{(sum(report.kernels.values()) - forward) // layers}"
        if forward <= layers
        else f"1 + {sum(report.kernels.values()) // layers - 1}",
        "sent, MiB": f"{report.wire() / MIB:,.0f}",
        **{f"  {kind}": f"{wire.get(kind, 0) / MIB:,.0f}" for kind in kinds},
        "sent beside computation": f"{overlapped:.0%}",
        "read and written in HBM, GB": f"{report.memory_bytes / 1e9:,.1f}",
        "compiled in, s": f"{report.compile_seconds:.0f}",
    }


def columns(names: Sequence[str], directory: Path | None) -> Iterator[tuple[str, StepReport]]:
    """(shape, report) of each program, as it is compiled."""
    for name in names:
        for remat in REMATS:
            yield name, ours(name, remat)
        if directory and (found := peer(name, directory)):
            yield name, found


@command
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", help=f"such as {', '.join(NAMES)}; all by default")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="programs of tpu_step_peer.py")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write tpu_step.json and tpu_step.md there")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    names = args.shape or NAMES
    for name in names:
        plan_of(name)
    by_shape: dict[str, list[StepReport]] = {}
    for name, report in columns(names, args.peer):
        print(f"{report.program}: {report.compile_seconds:.0f} s", file=sys.stderr, flush=True)
        by_shape.setdefault(name, []).append(report)
    text = []
    for name, reports in by_shape.items():
        _, topology, length, batch, mesh = SHAPES[name.partition("-")[0]]
        layers = plan_of(name).phases[0].model.config.layers
        cells = [figures(report, layers) for report in reports]
        header = ("per chip and step", *(report.program.partition(", ")[2] for report in reports))
        rows = [(key, *(cell[key] for cell in cells)) for key in cells[0]]
        over = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        compiler = reports[0].compiler
        text.append(f"{name} on {topology}, {batch} sequences of {length:,} tokens, {over}; {compiler}\n")
        text.append(table(header, rows) + "\n")
    print("\n".join(text))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        reports = {name: [report_json(one) for one in each] for name, each in by_shape.items()}
        (args.out / "tpu_step.json").write_text(json.dumps(reports, indent=1) + "\n")
        (args.out / "tpu_step.md").write_text("```\n" + "\n".join(text) + "```\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
