"""What `pe_lab.plan` prints: tables, verdicts and reports."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pe_lab.config import MeshConfig
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.targets import weight_shards
from pe_lab.model import Model, model_schedule
from pe_lab.model.cache import cache_bytes_per_token
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.parallel.compiler import NoCompiler, compiler_name, topology_devices
from pe_lab.parallel.topology import CHIPS, GIB
from pe_lab.planning.memory import Compiled, OutOfMemory, compile_evaluation, longest, sequence_memory, weight_bytes
from pe_lab.planning.plan import PhaseNumbers, Plan, compile_phase, explain_phase, plan_json, ruled_out, step_advice
from pe_lab.planning.report import StepReport, compare, read_report, report_json, report_text
from pe_lab.results.formatting import count
from pe_lab.terminal import console, table, waiting


def training_text(plan: Plan, mfu: float) -> str:
    """Parameters, tokens, FLOPs, hours, and the estimated memory per chip."""
    model, topology = plan.model, plan.topology
    memory = f", {topology.chip.memory / GIB:.4g} GiB each" if topology.chip.memory else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh_shape.items())
    tied = "tied" if model.config.tie_embeddings else "in and out"
    work = []
    for phase in plan.phases:
        numbers = (phase.flops.full, phase.flops.causal, phase.total_flops)
        steps = f"{phase.plan.config.steps:,}"
        work.append((phase.plan.name, phase.encoding, steps, count(phase.tokens), *(f"{n:.4g}" for n in numbers)))
    if len(plan.phases) > 1:
        steps = f"{sum(phase.plan.config.steps for phase in plan.phases):,}"
        tokens, total = (sum(getattr(phase, name) for phase in plan.phases) for name in ("tokens", "total_flops"))
        work.append(("all", "", steps, count(tokens), "", "", f"{total:.4g}"))
    hours = [(chip.name, _hours(plan.chip_hours(chip.peak, mfu))) for chip in CHIPS.values()]
    lines = [
        f"{plan.config.name} on {topology.name}: {topology.count} x {topology.chip.name}{memory}, mesh {mesh}\n",
        f"parameters {model.num_parameters:,}: embedding {plan.embedding_parameters:,} ({tied}), "
        f"others {model.num_parameters - plan.embedding_parameters:,}\n",
        _indented(("phase", "encoding", "steps", "tokens", "FLOPs/token full", "causal", "FLOPs"), work, words=2),
        "  full: every query against every key; causal: the pairs under the mask.",
        "  Rematerialization is not counted.",
        *(
            f"  The steps of '{phase.plan.name}' follow from epochs of data that is not prepared here: "
            f"{phase.plan.config.steps:,} are assumed."
            for phase in plan.phases
            if phase.steps_assumed
        ),
        *(
            f"  Muon's Newton-Schulz iteration in '{phase.plan.name}': {phase.newton_schulz:.3g} FLOPs a step, "
            f"{phase.newton_schulz / (phase.flops.full * phase.plan.tokens_per_step):.2%} of the model's (counted)."
            for phase in plan.phases
            if phase.newton_schulz
        ),
        "",
        f"time at an assumed {mfu:.0%} MFU of bf16 peaks (full); not measured",
        _indented(("chip", "chip-hours"), hours),
    ]
    if topology.chip.peak:
        elapsed = _hours(plan.chip_hours(topology.chip.peak, mfu) / topology.count)
        lines.append(f"  {topology.name}: {elapsed} hours of {topology.count} x {topology.chip.name}")
    across = {phase.plan.name: plan.run.context(phase.plan) for phase in plan.phases}
    lines += [f"\nattention of '{name}' across the context axis: {text}" for name, text in across.items() if text]
    chunks = f"logits in {model.config.loss_chunks} chunk{'s' if model.config.loss_chunks > 1 else ''}"
    parts = {
        "parameters": "parameters, float32",
        "optimizer": "optimizer",
        "batch": "batch",
        "activations": f"kept activations, remat={model.config.remat}",
        "working": f"working set (gradients and a layer, or {chunks})",
        "total": "total",
    }
    estimates = [
        ("micro-batches", *(str(p.plan.config.accumulate) for p in plan.phases)),
        ("layers", *("in a scan" if p.model.config.scan else "unrolled" for p in plan.phases)),
        *((title, *(size(getattr(p.memory, part)) for p in plan.phases)) for part, title in parts.items()),
    ]
    header = ("per chip", *(phase.plan.name for phase in plan.phases))
    return "\n".join([*lines, "\nmemory, estimated from shapes", _indented(header, estimates), ""])


def evaluation_text(plan: Plan, phase: PhaseNumbers, length: int) -> str:
    """The estimated memory to evaluate one sequence: of `length`, and of powers of two up to a million tokens."""
    model, structure = phase.model, phase.plan.schedule.structure
    config, chip, chips = model.config, plan.topology.chip, plan.topology.count
    shards = weight_shards(model, chips, chip.memory)
    weights = weight_bytes(model, shards)
    available = chip.memory - weights
    windows = sorted({layer.window for layer in structure if layer.window is not None})
    unlimited = sum(layer.window is None for layer in structure)
    layers = f"{unlimited} layers" if unlimited else "no layer"
    if windows:
        last = " or ".join(map(str, windows))
        layers += f" keep all tokens, {config.layers - unlimited} the last {last}"

    def cell(needed: int) -> str:
        verdict = "" if not chip.memory else "  fits" if needed <= available else "  DOES NOT FIT"
        return size(needed) + verdict

    cached = [stack for stack in model.stacks if stack.keys_of is None]
    each = "; ".join(
        f"2 x {one.config.kv_heads} heads x {one.config.head_dim} channels, {config.dtype}: "
        f"{cache_bytes_per_token(one.config):,} bytes" + (f" ({len(one.layers)} layers)" if one.name else "")
        for one in cached
    )
    rows = []
    for tokens in sorted({length, *(2**n for n in range(13, 21)), phase.plan.config.sequence_length}):
        one = sequence_memory(model, structure, tokens, chips, shards)
        rows.append((f"{tokens:,}", size(one.cache), *map(cell, (one.at_once, one.in_chunks, one.decoding))))
    if chip.memory:
        names = ("at_once", "in_chunks", "decoding")
        modes = (longest(model, structure, chips, available, mode, shards) for mode in names)
        rows.append(("longest", "", *(f"{tokens:,} tokens" for tokens in modes)))
    header = ("tokens", "KV cache", f"at once, over {chips}", "in chunks, on one", f"decoding, over {chips}")
    over = f", sharded over {shards} chips" if shards > 1 else ""
    left = f", which leaves {size(available)}" if chip.memory else ""
    return "\n".join([
        f"evaluating one sequence on {plan.topology.name}, encoding {phase.encoding}, estimated",
        f"  weights, float32 and a copy in {config.dtype}{over}, on each chip: {size(weights)}{left}",
        f"  keys and values of a token on a layer: {each}; {layers}",
        _indented(header, rows, words=0),
        "  at once: activations of one pass over the sequence, sharded over the chips of a context axis.",
        "  in chunks: the KV cache and the activations of a chunk. decoding: the KV cache, sharded over the chips.",
        "",
    ])  # fmt: skip


def compiled_text(plan: Plan, program: str, compiled: Compiled, compiler: str) -> str:
    """The memory per chip that the compiler assigns to a program."""
    rows = [
        ("arguments", size(compiled.arguments)),
        ("outputs", size(compiled.outputs)),
        ("outputs in the memory of arguments", size(compiled.aliased)),
        ("temporaries", size(compiled.temporaries)),
        ("program", size(compiled.code)),
        ("needed", size(compiled.needed)),
    ]
    title = f"memory, compiled: {program}, for {plan.topology.name} by {compiler}, in {compiled.seconds:.0f} s"
    return f"{title}\n{_indented(('per chip', ''), rows)}\n"


def size(number: int) -> str:
    """Bytes: 3.79 GiB, 74.2 MiB."""
    if number >= 0.1 * GIB:
        return f"{number / GIB:.2f} GiB"
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2f}" if hours >= 0.01 else f"{hours:.1e}"


def _indented(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    return textwrap.indent(table(header, rows, words), "  ")


# ---------------------------------------------------------------------------------------------------------------------
# What the command prints

NOT_COMPILED = "not compiled: {}. The memory above is an estimate."


def print_training(
    args: argparse.Namespace, plan: Plan, phases: Sequence[PhaseNumbers]
) -> tuple[dict[str, Any], bool | None]:
    """Prints the plan and compiles the phases: (its JSON, whether all fit; None if unknown)."""
    print(training_text(plan, args.mfu), flush=True)
    compiled: dict[str, Any] = {}
    try:
        if args.no_compile:
            raise NoCompiler("--no-compile")
        for phase in phases:
            name, advice = phase.plan.name, partial(step_advice, plan, phase)
            if ruled_out(plan, phase) and not args.phase:
                needed = f"about {size(phase.memory.total)} of {size(plan.topology.chip.memory)} a chip"
                print(
                    f"DOES NOT FIT: by the estimate, the step that trains '{name}' needs {needed}, and is not compiled "
                    f"(--phase={name} compiles it all the same). {advice(None)}"
                )
                compiled[name] = {"fits": False, "needed": None}
                continue
            program = f"the step that trains '{name}'"
            compile = explain_phase if args.explain or args.against else compile_phase
            compiled[name], report = _compile(plan, program, partial(compile, plan, phase), advice)
            if report is not None:
                print(report_text(report, plan.topology.chip))
                compiled[name]["step"] = report_json(report)
                if args.against:
                    text, worse = compare(report, read_report(args.against))
                    print(text)
                    compiled[name]["fits"] = False if worse else compiled[name]["fits"]
        if others := [phase.plan.name for phase in plan.phases if phase not in phases]:
            names = ", ".join(others)
            print(f"Not compiled: {names}, estimated above; --phase={others[0]} or --phase=all compiles it.")
    except NoCompiler as reason:
        print(NOT_COMPILED.format(reason))
    verdicts = {result["fits"] for result in compiled.values()} or {None}
    fits = False if False in verdicts else None if None in verdicts else True
    numbers = plan_json(plan, args.mfu) | {"compiler": compiler_name(plan.topology) if compiled else None}
    return numbers | {"compiled": compiled, "fits": fits}, fits


def print_evaluation(
    args: argparse.Namespace, plan: Plan, phases: Sequence[PhaseNumbers]
) -> tuple[dict[str, Any], bool | None]:
    """Prints the memory of one sequence and compiles a pass over it: (its JSON, whether all fit; None if unknown)."""
    length, chips = parse_length("--evaluate-length", args.evaluate_length), plan.topology.count
    compiled: dict[str, Any] = {}
    for phase in phases:
        print(evaluation_text(plan, phase, length), flush=True)
        config = phase.model.config
        try:
            if args.no_compile:
                raise NoCompiler("--no-compile")
            shards = weight_shards(phase.model, chips, plan.topology.chip.memory)
            mesh = make_mesh(MeshConfig(data=1, tensor=shards, context=-1), topology_devices(plan.topology))
        except NoCompiler as reason:
            print(NOT_COMPILED.format(reason))
            continue
        schedule = model_schedule(config, phase.plan.layers, length)
        with use_mesh(mesh, AxisRules()):
            evaluated = Model(config, backward=False)
            attention = list(dict.fromkeys(evaluated.attention_by_layer(schedule.structure, length)))
        over = f"{chips // shards} chips and weights over {shards}" if shards > 1 else str(chips)
        program = f"a pass over {length:,} tokens, sharded over {over} (attention by {', '.join(attention)})"
        compile = partial(compile_evaluation, phase.model, schedule, length, mesh)
        result, _ = _compile(plan, program, compile, lambda _: "Use more chips, or evaluate in chunks.")
        compiled[phase.plan.name] = result | {"attention": attention}
    fits = False if any(result["fits"] is False for result in compiled.values()) else None
    return {"topology": plan.topology.text, "length": length, "compiled": compiled}, fits


def _compile(
    plan: Plan,
    program: str,
    compile: Callable[[], Compiled | tuple[Compiled, StepReport]],
    advice: Callable[[int | None], str],
) -> tuple[dict[str, Any], StepReport | None]:
    """Compiles a program, prints its memory and whether it fits, and returns both as JSON; and its report, if any.

    `advice` says what to change if it does not fit, from the bytes that it needs.
    """
    chip, capacity = plan.topology.chip, plan.topology.chip.memory
    try:
        with waiting(console(stderr=True), f"compiling {program}, for {plan.topology.count} x {chip.name}"):
            made = compile()
    except OutOfMemory as error:
        if error.used:
            message = f"{program} needs {size(error.used)} of {size(error.capacity or capacity)} a chip"
        else:
            message = f"the compiler refused {program}: {error}"
        print(f"DOES NOT FIT: {message}. {advice(error.used)}")
        return {"fits": False, "needed": error.used, "message": str(error)}, None
    compiled, report = made if isinstance(made, tuple) else (made, None)
    print(compiled_text(plan, program, compiled, compiler_name(plan.topology)))
    fits = compiled.needed <= capacity if capacity else None
    if fits is None:
        print(f"{program} needs {size(compiled.needed)} a device. The memory of the device is not known.")
    else:
        verdict, end = ("FITS", "") if fits else ("DOES NOT FIT", f" {advice(compiled.needed)}")
        print(f"{verdict}: {program} needs {size(compiled.needed)} of {size(capacity)} a chip.{end}")
    return {**dataclasses.asdict(compiled), "needed": compiled.needed, "fits": fits}, report
