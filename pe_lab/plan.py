"""`python -m pe_lab.plan --config=configs/x.py --topology=v5e:16x16`: the time and the memory that a recipe needs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pe_lab.recipes import refuse_misspelt_keys

    refuse_misspelt_keys()

import jax

from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.targets import weight_shards
from pe_lab.model import Model
from pe_lab.output import work_on
from pe_lab.parallel import AxisRules, make_mesh, start_processes, use_mesh
from pe_lab.parallel.ahead_of_time import NoCompiler, compiler_name, topology_devices
from pe_lab.parallel.topology import KNOWN, parse_topology
from pe_lab.planning.advice import ruled_out, step_advice
from pe_lab.planning.compiled_memory import Compiled, OutOfMemory
from pe_lab.planning.evaluation_memory import compile_evaluation
from pe_lab.planning.plan import (
    PhaseNumbers,
    Plan,
    choose_phases,
    compile_phase,
    explain_phase,
    make_plan,
    plan_json,
)
from pe_lab.planning.report import StepReport, compare, read_report, report_json, report_text
from pe_lab.planning.tables import compiled_text, evaluation_text, size, training_text
from pe_lab.positional import build_schedule
from pe_lab.recipes import load_config, split_overrides
from pe_lab.storage import check_place, write_json
from pe_lab.terminal import argument_parser, bounded, command, console, waiting
from pe_lab.training.inheritance import inherit

DESCRIPTION = """\
Prints the parameters, tokens, FLOPs and hours of a recipe and the memory of one chip, without running it. Memory is
estimated from shapes, and measured by the compiler. Compiling for a TPU slice needs no TPU, only libtpu:
pip install 'pe-lab[aot]'. Compiling for GPUs needs no GPU, only JAX's CUDA plugin: pip install 'pe-lab[gpu]'. It takes
up to minutes, so by default only the phase with the largest estimate is compiled; --phase=all compiles every phase."""

EPILOG = f"""\
topologies: {KNOWN}
local compiles for the devices of this machine. More than 8 GPUs are nodes of 8. For GPUs that are not here, XLA does
not choose kernels by measuring them, and the workspace of cuDNN is not counted.
Any key of the recipe can be set: --config.model.remat=full --config.phases.0.accumulate=4

exit status: 0, or 1 if the program does not fit the chip, or a figure is over 1% worse than --against, or 2 for bad
input"""

NOT_COMPILED = "not compiled: {}. The memory above is an estimate."


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argument_parser("plan", DESCRIPTION, EPILOG)
    p.add_argument("--config", required=True, help="recipe, argument after a colon: configs/x.py:quick")
    p.add_argument("--topology", default="local", help="chips to plan for; local by default")
    p.add_argument(
        "--slices",
        type=bounded(int, 1, 2**20),
        default=1,
        metavar="N",
        help="that many such TPU slices, joined by the network",
    )
    p.add_argument("--phase", metavar="NAME", help="phase to compile, or all; the largest by default")
    p.add_argument(
        "--evaluate-length",
        metavar="TOKENS",
        help="plan evaluating a sequence of this length (such as 128k) instead: its KV cache, and one pass over all "
        "chips",
    )
    p.add_argument(
        "--explain",
        action="store_true",
        help="also print the largest buffers, collectives, kernels and the resource that bounds the compiled step",
    )
    p.add_argument(
        "--against", type=Path, metavar="FILE", help="compare the step with one that --explain --json wrote before"
    )
    p.add_argument("--no-compile", action="store_true", help="estimates only: seconds instead of minutes")
    p.add_argument(
        "--mfu", type=bounded(float, 1e-6, 1.0), default=0.4, help="assumed share of the peak (default: %(default)s)"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    return p


@command
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"--json={args.json}: there is no directory '{args.json.parent}'.")
    if args.json:
        check_place("--json", args.json, file=True)
        work_on()
    if args.topology == "local":
        start_processes()
    else:
        # Compiling for other devices uses none of this machine, so a run may go on beside it.
        jax.config.update("jax_platforms", "cpu")
    if (args.explain or args.against) and (args.no_compile or args.evaluate_length):
        raise ConfigError("--explain and --against compile a step: leave out --no-compile and --evaluate-length.")
    if args.against:
        read_report(args.against)  # before minutes of compilation
    topology = parse_topology(args.topology, args.slices)
    if topology.kind == "cpu":
        topology_devices(topology)  # before JAX starts with another number of them
    plan = make_plan(load_config(args.config, overrides, inherit), topology)
    planned = _plan_evaluation if args.evaluate_length else _plan_training
    numbers, fits = planned(args, plan, choose_phases(plan, args.phase))
    if args.json:
        write_json(args.json, numbers)
    return 1 if fits is False else 0


def _plan_training(
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
            if not (args.explain or args.against):
                compiled[name] = _compile(plan, program, partial(compile_phase, plan, phase), advice)
                continue
            reports: list[StepReport] = []

            def explained(phase: PhaseNumbers = phase, reports: list[StepReport] = reports) -> Compiled:
                compiled, report = explain_phase(plan, phase)
                reports.append(report)
                return compiled

            compiled[name] = _compile(plan, program, explained, advice)
            for report in reports:
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


def _plan_evaluation(
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
        schedule = build_schedule(phase.plan.layers, config.heads, config.kv_heads, config.head_dim, length)
        with use_mesh(mesh, AxisRules()):
            evaluated = Model(config, backward=False)
            attention = list(dict.fromkeys(evaluated.attention_by_layer(schedule.structure, length)))
        over = f"{chips // shards} chips and weights over {shards}" if shards > 1 else str(chips)
        program = f"a pass over {length:,} tokens, sharded over {over} (attention by {', '.join(attention)})"
        compile = partial(compile_evaluation, phase.model, schedule, length, mesh)
        result = _compile(plan, program, compile, lambda _: "Use more chips, or evaluate in chunks.")
        compiled[phase.plan.name] = result | {"attention": attention}
    fits = False if any(result["fits"] is False for result in compiled.values()) else None
    return {"topology": plan.topology.text, "length": length, "compiled": compiled}, fits


def _compile(
    plan: Plan, program: str, compile: Callable[[], Compiled], advice: Callable[[int | None], str]
) -> dict[str, Any]:
    """Compiles a program, prints its memory and whether it fits, and returns both as JSON.

    `advice` says what to change if it does not fit, from the bytes that it needs.
    """
    chip, capacity = plan.topology.chip, plan.topology.chip.memory
    try:
        with waiting(console(stderr=True), f"compiling {program}, for {plan.topology.count} x {chip.name}"):
            compiled = compile()
    except OutOfMemory as error:
        if error.used:
            message = f"{program} needs {size(error.used)} of {size(error.capacity or capacity)} a chip"
        else:
            message = f"the compiler refused {program}: {error}"
        print(f"DOES NOT FIT: {message}. {advice(error.used)}")
        return {"fits": False, "needed": error.used, "message": str(error)}
    print(compiled_text(plan, program, compiled, compiler_name(plan.topology)))
    fits = compiled.needed <= capacity if capacity else None
    if fits is None:
        print(f"{program} needs {size(compiled.needed)} a device. The memory of the device is not known.")
    else:
        verdict, end = ("FITS", "") if fits else ("DOES NOT FIT", f" {advice(compiled.needed)}")
        print(f"{verdict}: {program} needs {size(compiled.needed)} of {size(capacity)} a chip.{end}")
    return {**dataclasses.asdict(compiled), "needed": compiled.needed, "fits": fits}


if __name__ == "__main__":
    sys.exit(main())
