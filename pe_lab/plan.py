"""`python -m pe_lab.plan --config=configs/x.py --topology=v5e:16x16`: will it fit, and how long."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.evaluation import parse_length
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh, start_processes, use_mesh
from pe_lab.parallel.topology import (
    CHIPS,
    GIB,
    KNOWN,
    NoCompiler,
    Topology,
    libtpu_version,
    parse_topology,
    topology_devices,
)
from pe_lab.planning.evaluation_memory import cache_bytes_per_token, compile_long_text, long_text, longest, weight_bytes
from pe_lab.planning.plan import PhaseNumbers, Plan, choose_phases, compile_phase, make_plan, plan_json
from pe_lab.planning.step_memory import Compiled, OutOfMemory
from pe_lab.positional import build_schedule
from pe_lab.recipes import load_config, split_overrides
from pe_lab.terminal import command

DESCRIPTION = """\
Says of a recipe, without running it: parameters, tokens, FLOPs, hours, and the memory of one chip, estimated
from shapes and measured by the compiler. A TPU slice's compiler needs no TPU, only libtpu: pip install
'pe-lab[aot]'. It works for minutes on a model of half a billion parameters, so by default one phase is
compiled, the one whose estimate is largest; --phase=all compiles each."""

EPILOG = f"""\
topologies: {KNOWN}
GPUs are estimated only, except where they are: --topology=local compiles for the devices of this machine.
Any key of the recipe can be set: --config.model.remat=full --config.phases.0.accumulate=4

exit status: 0, or 1 if the compiled step does not fit the chip, or 2 for bad input"""


# ------------------------------------------------------------------------------------------------------------
# What a person reads


def _table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        lines.append(indent + "   ".join(cells).rstrip())
    return "\n".join(lines)


def _count(number: int) -> str:
    """1,234 or 14.68B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{name}"
    return f"{number:,.0f}"


def _size(size: int) -> str:
    """3.79 GiB or 74.2 MiB."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2f}" if hours >= 0.01 else f"{hours:.1e}"


def arithmetic_text(plan: Plan, mfu: float) -> str:
    """Parameters, tokens, FLOPs and hours."""
    model, chip, count = plan.model, plan.topology.chip, plan.topology.count
    memory = f", {chip.memory / GIB:.4g} GiB each" if chip.memory else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh_shape.items())
    embedding = plan.embedding_parameters
    tied = "tied" if model.config.tie_embeddings else "in and out"
    rows = [("phase", "encoding", "steps", "tokens", "FLOPs/token full", "causal", "FLOPs")]
    for phase in plan.phases:
        steps, flops = f"{phase.plan.config.steps:,}", phase.flops
        full, causal, total = f"{flops.full:.4g}", f"{flops.causal:.4g}", f"{phase.total_flops:.4g}"
        rows.append((phase.plan.name, phase.encoding, steps, _count(phase.tokens), full, causal, total))
    if len(plan.phases) > 1:
        steps = f"{sum(p.plan.config.steps for p in plan.phases):,}"
        total = f"{sum(p.total_flops for p in plan.phases):.4g}"
        rows.append(("all", "", steps, _count(sum(p.tokens for p in plan.phases)), "", "", total))
    hours = [("chip", "chip-hours")]
    hours += [(known.name, _hours(plan.chip_hours(known.peak, mfu))) for known in CHIPS.values()]
    text = (
        f"{plan.config.name} on {plan.topology.text}: {count} x {chip.name}{memory}, mesh {mesh}\n\n"
        f"parameters {model.num_parameters:,}: embedding {embedding:,} ({tied}), "
        f"others {model.num_parameters - embedding:,}\n\n{_table(rows)}\n"
        "  full: every query against every key; causal: what the mask leaves.\n"
        "  Rematerialization counts in neither.\n\n"
        f"time, supposing {mfu:.0%} MFU of bf16 peaks (full); not measured\n{_table(hours)}\n"
    )
    if chip.peak:
        alone = plan.chip_hours(chip.peak, mfu)
        text += f"  {plan.topology.text}: {_hours(alone / count)} hours of {count} x {chip.name}\n"
    return text


def estimate_text(plan: Plan) -> str:
    """The estimated memory per chip, a column a phase."""
    model = plan.model.config
    chunks = f"logits in {model.loss_chunks} chunk{'s' if model.loss_chunks > 1 else ''}"
    names = {
        "parameters": "parameters, float32",
        "optimizer": "optimizer",
        "batch": "batch",
        "gradients": "gradients",
        "activations": f"kept activations, remat={model.remat}",
        "working": f"working set (a layer, or {chunks})",
    }
    rows = [("per chip", *(phase.plan.name for phase in plan.phases))]
    for field, name in names.items():
        rows.append((name, *(_size(getattr(phase.memory, field)) for phase in plan.phases)))
    rows.append(("total", *(_size(phase.memory.total) for phase in plan.phases)))
    return f"memory, estimated from shapes: no compiler was asked\n{_table(rows)}\n"


def compiled_text(plan: Plan, what: str, compiled: Compiled, by: str) -> str:
    """The compiler's memory per chip, of `what` was compiled."""
    rows = [
        ("per chip", ""),
        ("arguments (state, batch)", _size(compiled.arguments)),
        ("outputs", _size(compiled.outputs)),
        ("of which in the place of arguments", _size(compiled.aliased)),
        ("temporaries", _size(compiled.temporaries)),
        ("program", _size(compiled.code)),
        ("needed", _size(compiled.needed)),
    ]
    return f"memory, compiled: {what}, for {plan.topology.text} by {by}, in {compiled.seconds:.0f} s\n{_table(rows)}\n"


def advice(plan: Plan) -> str:
    """What makes a step smaller, of what this recipe has not used up."""
    model, mesh = plan.model.config, plan.mesh_shape
    parts = []
    if model.remat != "full":
        parts.append("--config.model.remat=full")
    if mesh["data"] > 1:
        parts.append("a larger --config.mesh.fsdp")
    devices = mesh["data"] * mesh["fsdp"]
    if any(p.plan.config.batch_size // p.plan.config.accumulate > devices for p in plan.phases):
        parts.append("--config.phases.N.accumulate (smaller micro-batches)")
    if model.loss_chunks < 8:
        parts.append("--config.model.loss_chunks=8")
    return "Try " + ", ".join(parts or ["more chips"]) + "."


def _compiler(topology: Topology) -> str:
    return f"libtpu {libtpu_version()}" if topology.kind == "tpu" else f"XLA of jax {jax.__version__}"


@contextlib.contextmanager
def _telling_time(what: str, every: float = 15.0) -> Iterator[None]:
    """A line on stderr now and every few seconds: a compiler is silent for minutes."""
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(every):
            print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    print(f"{what} ...", file=sys.stderr, flush=True)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


# ------------------------------------------------------------------------------------------------------------
# Reading long texts


def reading_text(plan: Plan, phase: PhaseNumbers, length: int) -> str:
    """Weights, cache and activations of texts up to a million tokens, and whether they fit a chip."""
    model, structure = phase.model, phase.plan.schedule.structure
    config, chip, count = model.config, plan.topology.chip, plan.topology.count
    weights = weight_bytes(model, "float32")
    room = chip.memory - weights
    windows = sorted({one.window for one in structure if one.window is not None})
    kept = sum(one.window is None for one in structure)
    layers = f"{kept} layers" if kept else "no layer"
    if windows:
        layers += f" keep all tokens, {config.layers - kept} the last {' or '.join(map(str, windows))}"

    def cell(size: int) -> str:
        verdict = "" if not chip.memory else "  fits" if size <= room else "  DOES NOT FIT"
        return _size(size) + verdict

    lengths = sorted({length, *(2**n for n in range(13, 21)), phase.plan.config.sequence_length})
    rows = [("tokens", "cache of the text", f"at once, over {count}", "in chunks, on one", f"decoding, over {count}")]
    for tokens in lengths:
        text = long_text(model, structure, tokens, count)
        rows.append((f"{tokens:,}", _size(text.cache), *map(cell, (text.at_once, text.in_chunks, text.decoding))))
    if chip.memory:
        ways = (longest(model, structure, count, room, way) for way in ("at_once", "in_chunks", "decoding"))
        rows.append(("longest", "", *(f"{_count(tokens)} tokens" for tokens in ways)))
    return (
        f"reading one text of many tokens on {plan.topology.text}, encoding {phase.encoding}, estimated\n"
        f"  weights, float32, on each chip: {_size(weights)}"
        f"{f', which leaves {_size(room)}' if chip.memory else ''}\n"
        f"  keys and values of a token on a layer: 2 x {config.kv_heads} heads x {config.head_dim} channels, "
        f"{config.dtype}: {cache_bytes_per_token(config):,} bytes; {layers}\n{_table(rows)}\n"
        "  at once: activations of a pass over the whole text, cut over the chips of a context axis.\n"
        "  in chunks: the cache, and the activations of a chunk. decoding: the cache, cut over the chips.\n"
    )


def compile_reading(plan: Plan, phase: PhaseNumbers, length: int) -> tuple[dict[str, Any], bool | None]:
    """Compiles the pass over a text of `length` tokens cut over all chips, and prints: (its JSON, whether it fits)."""
    chip, count = plan.topology.chip, plan.topology.count
    try:
        mesh = make_mesh(MeshConfig(data=1, context=count), topology_devices(plan.topology))
    except NoCompiler as reason:
        print(f"not compiled: {reason}. The memory above is an estimate.")
        return {}, None
    config = phase.model.config
    schedule = build_schedule(phase.plan.layers, config.heads, config.kv_heads, config.head_dim, length)
    with use_mesh(mesh, AxisRules()):
        reader = Model(config, backward=False)
        chosen = dict.fromkeys(reader.attention_by_layer(schedule.structure, length))
    what = f"a pass over {length:,} tokens"
    try:
        with _telling_time(f"compiling {what} for {count} x {chip.name}, attention by {', '.join(chosen)}"):
            compiled = compile_long_text(phase.model, schedule, length, mesh)
    except OutOfMemory as error:
        print(f"DOES NOT FIT: {what} needs {_size(error.used or 0)} a chip. More chips, or read it in chunks.")
        return {"fits": False, "needed": error.used, "message": str(error)}, False
    print(compiled_text(plan, what, compiled, _compiler(plan.topology)))
    fits = compiled.needed <= chip.memory if chip.memory else None
    verdict = "" if fits is None else "FITS: " if fits else "DOES NOT FIT: "
    of = f" of {_size(chip.memory)}" if chip.memory else ""
    print(f"{verdict}{what}, cut over {count}, needs {_size(compiled.needed)}{of} a chip.")
    return {**dataclasses.asdict(compiled), "needed": compiled.needed, "fits": fits, "attention": list(chosen)}, fits


# ------------------------------------------------------------------------------------------------------------
# The verb


def compile_and_tell(plan: Plan, phases: Sequence[PhaseNumbers]) -> tuple[dict[str, Any], bool | None]:
    """Compiles and prints: ({phase: its JSON}, whether all fit; None if that is not known)."""
    results: dict[str, Any] = {}
    chip, capacity = plan.topology.chip, plan.topology.chip.memory
    for phase in phases:
        name, of = phase.plan.name, f" of {_size(capacity)}" if capacity else ""
        try:
            with _telling_time(f"compiling '{name}' for {plan.topology.count} x {chip.name}"):
                compiled = compile_phase(plan, phase)
        except NoCompiler as reason:
            print(f"not compiled: {reason}. The memory above is an estimate.")
            return results, None
        except OutOfMemory as error:
            numbers = f"{_size(error.used or 0)} of {_size(error.capacity or capacity)} a chip"
            results[name] = {"fits": False, "needed": error.used, "message": str(error)}
            said = f"'{name}' needs {numbers}" if error.used else f"the compiler refused '{name}': {error}"
            print(f"DOES NOT FIT: {said}. {advice(plan)}")
            continue
        fits = compiled.needed <= capacity if capacity else None
        results[name] = {**dataclasses.asdict(compiled), "needed": compiled.needed, "fits": fits}
        print(compiled_text(plan, f"the step that trains '{name}'", compiled, _compiler(plan.topology)))
        if fits is None:
            print(f"'{name}' needs {_size(compiled.needed)} a device. How much there is, is not known.")
        elif fits:
            print(f"FITS: '{name}' needs {_size(compiled.needed)}{of} a chip.")
        else:
            print(f"DOES NOT FIT: '{name}' needs {_size(compiled.needed)}{of} a chip. {advice(plan)}")
    others = [p.plan.name for p in plan.phases if p not in phases]
    if others:
        names = ", ".join(others)
        print(f"Not compiled: {names}, estimated above; --phase={others[0]} or --phase=all compiles it.")
    verdicts = {result["fits"] for result in results.values()}
    return results, False if False in verdicts else None if None in verdicts else True


def parser() -> argparse.ArgumentParser:
    """The command line of this verb."""
    p = argparse.ArgumentParser(
        prog="python -m pe_lab.plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--config", required=True, help="recipe, argument after a colon: configs/x.py:quick")
    p.add_argument("--topology", default="local", help="chips to plan for; local by default")
    p.add_argument("--phase", metavar="NAME", help="phase to compile, or all; the largest by default")
    p.add_argument(
        "--evaluate-length",
        metavar="TOKENS",
        help="plan reading a text of so many tokens (such as 128k) instead: its cache, and one pass over all chips",
    )
    p.add_argument("--no-compile", action="store_true", help="estimates only: seconds instead of minutes")
    p.add_argument("--mfu", type=float, default=0.4, help="supposed share of the peak (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return p


def plan_reading(args: argparse.Namespace, plan: Plan, phases: Sequence[PhaseNumbers]) -> int:
    """What `--evaluate-length` does; the exit status."""
    length = parse_length("--evaluate-length", args.evaluate_length)
    found: dict[str, Any] = {}
    fits: list[bool | None] = []
    for phase in phases:
        print(reading_text(plan, phase, length), flush=True)
        if args.no_compile:
            print("not compiled: --no-compile. The memory above is an estimate.")
            continue
        found[phase.plan.name], fit = compile_reading(plan, phase, length)
        fits.append(fit)
    if args.json:
        numbers = {"topology": plan.topology.text, "length": length, "compiled": found}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if False in fits else 0


@command
def main(argv: Sequence[str] | None = None) -> int:
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else list(argv))
    args = parser().parse_args(rest)
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu={args.mfu}: a share of the peak lies above 0 and is at most 1.")
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json={args.json}: there is no directory '{args.json.parent}'.")
    if args.topology == "local":
        start_processes()
    else:
        # Compiling for a slice holds no device of this machine, so it can go on beside a run.
        jax.config.update("jax_platforms", "cpu")
    config = load_config(args.config, overrides)
    plan = make_plan(config, parse_topology(args.topology))
    phases = choose_phases(plan, args.phase)
    if args.evaluate_length:
        return plan_reading(args, plan, phases)
    print(arithmetic_text(plan, args.mfu))
    print(estimate_text(plan), flush=True)
    numbers = plan_json(plan, args.mfu)
    if args.no_compile:
        print("not compiled: --no-compile. The memory above is an estimate.")
        compiled, fits = {}, None
    else:
        compiled, fits = compile_and_tell(plan, phases)
    if args.json:
        numbers["compiler"] = _compiler(plan.topology) if compiled else None
        numbers |= {"compiled": compiled, "fits": fits}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if fits is False else 0


if __name__ == "__main__":
    sys.exit(main())
