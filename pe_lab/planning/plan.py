"""The plan of a recipe on a topology: its numbers, what the compiler makes of its steps, and what to change."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pe_lab.config import Config
from pe_lab.errors import ConfigError, UserError
from pe_lab.model import Flops, Model, model_schedule
from pe_lab.model.distillation import DistilledInputs, learns
from pe_lab.parallel import make_mesh
from pe_lab.parallel.compiler import compiler_name, topology_devices
from pe_lab.parallel.topology import CHIPS, Topology, placeholder_mesh
from pe_lab.planning.hlo import largest_buffers, parse
from pe_lab.planning.memory import Compiled, analyze, analyze_program
from pe_lab.planning.report import StepReport, report_step
from pe_lab.positional import Layer, Rope, label
from pe_lab.training.plan import Estimate, PhasePlan, RunPlan, plan_run, prepared_directories, read_given, step_shapes
from pe_lab.training.run import open_pipeline
from pe_lab.training.start import distilled_loss
from pe_lab.training.step import compile_train_step


@dataclass(frozen=True)
class PhaseNumbers:
    """The numbers of one phase, from its config and shapes."""

    plan: PhasePlan
    model: Model
    encoding: str
    flops: Flops  # per token
    memory: Estimate
    newton_schulz: float = 0.0  # FLOPs a step of Muon's iteration
    steps_assumed: bool = False  # whether the steps follow from epochs of data that is not prepared

    @property
    def tokens(self) -> int:
        return self.plan.config.steps * self.plan.tokens_per_step

    @property
    def total_flops(self) -> float:
        """FLOPs of all steps, with every query against every key, and of the optimizer's matrix products."""
        return self.flops.full * self.tokens + self.newton_schulz * self.plan.config.steps


@dataclass(frozen=True)
class Plan:
    """A recipe on a topology, with the numbers of its phases."""

    run: RunPlan
    topology: Topology
    phases: tuple[PhaseNumbers, ...]

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def model(self) -> Model:
        """Of the first phase."""
        return self.run.models[0]

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {axis: int(size) for axis, size in self.run.mesh.shape.items()}

    @property
    def embedding_parameters(self) -> int:
        model = self.model.config
        return model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)

    def chip_hours(self, peak: float, mfu: float) -> float:
        """Hours of one chip at `mfu` times `peak` FLOP/s, for all phases."""
        return sum(phase.total_flops for phase in self.phases) / (peak * mfu) / 3600


def make_plan(config: Config, topology: Topology) -> Plan:
    """The plan of a recipe on a topology; makes no arrays, and reads prepared data alone, for the steps of `epochs`.

    Raises:
      UserError: the recipe would not train: its shapes, encodings, mesh or batch sizes do not fit each other.
    """
    mesh, given = placeholder_mesh(config.mesh, topology.count, topology.slices), read_given(config)
    run = plan_run(config, mesh, given, topology.chip)
    prepared = bool(prepared_directories(config))
    if prepared and any(phase.epochs for phase in config.phases):
        run = plan_run(_with_steps(run), mesh, given, topology.chip)
    return Plan(run, topology, tuple(_numbers(run, phase, prepared) for phase in run.phases))


def _numbers(run: RunPlan, phase: PhasePlan, prepared: bool) -> PhaseNumbers:
    flops = run.flops(phase)
    if learns(phase.config.distill):  # a teacher of the model's own shape
        flops = flops.plus(flops.forward)
    names = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
    assumed = bool(phase.config.epochs) and not prepared
    model, memory = run.models[phase.index], run.memory(phase)
    return PhaseNumbers(phase, model, names, flops, memory, run.newton_schulz(phase), assumed)


def _with_steps(run: RunPlan) -> Config:
    """The config with the steps of phases that have `epochs`."""
    phases = []
    for phase in run.phases:
        if phase.config.epochs:
            steps = open_pipeline(run, phase).steps_of(phase.config.epochs)
            phases.append(dataclasses.replace(phase.config, steps=steps))
        else:
            phases.append(phase.config)
    return dataclasses.replace(run.config, phases=tuple(phases))


def compile_phase(plan: Plan, phase: PhaseNumbers) -> Compiled:
    """The memory that the compiler assigns to the train step of a phase. Raises `NoCompiler` or `OutOfMemory`."""
    lowered, start = _lower(plan, phase)
    return analyze(lowered, start)


def explain_phase(plan: Plan, phase: PhaseNumbers) -> tuple[Compiled, StepReport]:
    """As `compile_phase`, with the report of the compiled step."""
    lowered, start = _lower(plan, phase)
    compiled, program = analyze_program(lowered, start, dump=plan.topology.chip.peak > 0)  # not for CPUs
    module = parse(program.text)
    config, model, devices = phase.plan.config, phase.model.config, plan.topology.count
    report = report_step(
        module,
        plan.mesh_shape,
        plan.topology.nodes,
        tokens=phase.plan.tokens_per_step // devices,
        flops=phase.flops,
        program=f"{plan.config.name}, phase '{phase.plan.name}', on {plan.topology.name}",
        settings={
            "mesh": " x ".join(f"{axis} {size}" for axis, size in plan.mesh_shape.items() if size > 1),
            "batch": config.batch_size,
            "length": config.sequence_length,
            "accumulate": config.accumulate,
            "remat": model.remat,
            "scan": model.scan,
            "loss_chunks": model.loss_chunks,
        },
        compiler=compiler_name(plan.topology),
        compile_seconds=compiled.seconds,
        peak_bytes=compiled.peak or compiled.needed,
        buffers=tuple(largest_buffers(program.assignment, program.live_ranges, module)),
    )
    return compiled, report


def _lower(plan: Plan, phase: PhaseNumbers) -> tuple[Any, float]:
    """The lowered train step of a phase, and when that began."""
    mesh = make_mesh(plan.config.mesh, topology_devices(plan.topology))
    config, model = phase.plan.config, phase.model
    optimizer = plan.run.optimizer(phase.plan)
    state, batch = step_shapes(model, optimizer, config, plan.config.data.segments)
    schedule = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), phase.plan.schedule)
    distilled = None
    if config.distill is not None and learns(config.distill):
        # The teacher's checkpoint is not opened: it has the model's shape, and the encoding before this phase,
        # or RoPE.
        index, shape = phase.plan.index, model.config
        layers = plan.phases[index - 1].plan.layers if index else (Layer(Rope()),) * shape.layers
        its = model_schedule(shape, layers, config.sequence_length)
        distilled = distilled_loss(model, shape, its, config.distill, mesh, plan.run.rules)
        schedule = DistilledInputs(schedule, distilled[0].teacher.shapes, its)
    start = time.perf_counter()
    options, rules = plan.config.compiler_options, plan.run.rules
    step = compile_train_step(model, optimizer, mesh, rules, config.accumulate, options=options, distilled=distilled)
    return step.lower(state, batch, schedule), start


def choose_phases(plan: Plan, chosen: str | None) -> list[PhaseNumbers]:
    """The phases to compile: one by name, `all`, or (None) the one with the largest estimate."""
    names = [phase.plan.name for phase in plan.phases]
    if chosen is None:
        # The estimate does not count the rotation: among equal phases, one that rotates is the largest.
        def size(phase: PhaseNumbers) -> tuple[int, bool]:
            return phase.memory.total, any(s.rotates for s in phase.plan.schedule.structure)

        return [max(plan.phases, key=size)]
    if chosen != "all" and chosen not in names:
        raise ConfigError(f"--phase={chosen}: the phases are {', '.join(names)}; or use all.")
    return [phase for phase in plan.phases if chosen in ("all", phase.plan.name)]


def plan_json(plan: Plan, mfu: float) -> dict[str, Any]:
    """The plan as JSON; memory in bytes per chip."""
    topology = plan.topology
    return {
        "name": plan.config.name,
        "topology": {
            "text": topology.text,
            "slices": topology.slices,
            "chips": topology.count,
            **dataclasses.asdict(topology.chip),
        },
        "mesh": plan.mesh_shape,
        "parameters": {"total": plan.model.num_parameters, "embedding": plan.embedding_parameters},
        "phases": [
            {
                "phase": phase.plan.name,
                "encoding": phase.encoding,
                "steps": phase.plan.config.steps,
                "tokens": phase.tokens,
                "flops_per_token_full": phase.flops.full,
                "flops_per_token_causal": phase.flops.causal,
                "flops": phase.total_flops,
                "newton_schulz_flops_per_step": phase.newton_schulz,
                "accumulate": phase.plan.config.accumulate,
                **{name: getattr(phase.model.config, name) for name in ("remat", "scan", "loss_chunks")},
                "memory_estimate": {**dataclasses.asdict(phase.memory), "total": phase.memory.total},
            }
            for phase in plan.phases
        ],
        "mfu": mfu,
        "chip_hours": {name: plan.chip_hours(chip.peak, mfu) for name, chip in CHIPS.items()},
    }


# ---------------------------------------------------------------------------------------------------------------------
# What to change in a recipe whose step does not fit

RULED_OUT = 1.3  # an estimate that exceeds the memory by this factor is not compiled: estimates are within a quarter


def ruled_out(plan: Plan, phase: PhaseNumbers) -> bool:
    """Whether the estimate leaves no doubt that the step does not fit the chip."""
    return 0 < plan.topology.chip.memory * RULED_OUT < phase.memory.total


def step_advice(plan: Plan, phase: PhaseNumbers, needed: int | None) -> str:
    """The smallest changes, each alone or else together, with which the step of `phase` would fit; by the estimate.

    `needed`: bytes that the compiler found, by which the estimate is corrected.
    """
    memory = plan.topology.chip.memory
    factor = max(1.0, (needed or 0) / phase.memory.total)

    def first_fitting(changes: list[dict[str, Any]], others: dict[str, Any]) -> dict[str, Any] | None:
        """The first change with which the step fits, beside the others; None without one."""
        for change in changes:
            changed = _estimate(plan, phase, others | change)
            if changed is not None and changed * factor <= memory:
                return change
        return None

    def flags(changes: dict[str, Any]) -> str:
        return " ".join(f"--config.{key}={value}" for key, value in changes.items())

    found = []
    for changes in _settings(plan, phase, {}):
        if (change := first_fitting(changes, {})) is not None:
            where = f" (phase '{phase.plan.name}')" if any(key.startswith("phases.") for key in change) else ""
            found.append(flags(change) + where)
    if found:
        return "Try " + ", or ".join(found) + "."
    together: dict[str, Any] = {}
    for changes in _settings(plan, phase, together):
        change = first_fitting(changes, together)
        if changes:
            together |= changes[-1] if change is None else change
        if change is not None:
            return "Try " + flags(together) + "."
    return "Use more chips."


def _settings(plan: Plan, phase: PhaseNumbers, others: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Changes of the recipe that reduce the memory of a step: of one kind after the other, in descending need.

    `others`: what is changed besides, at the time when a kind is asked for.
    """
    model, mesh, config = phase.model.config, plan.mesh_shape, phase.plan.config
    remats = ["none", "dots_attention", "dots", "full"]
    at = remats.index(model.remat) if model.remat in remats else len(remats)
    yield [{"model.remat": one} for one in remats[at + 1 :]]
    yield [{"model.loss_chunks": n} for n in (2, 4, 8, 16, 32, 64) if n > model.loss_chunks]
    shards = mesh["data"] // plan.topology.slices
    yield [{"mesh.fsdp": mesh["fsdp"] * n} for n in range(2, shards + 1) if shards % n == 0]
    each = config.batch_size // config.accumulate // (mesh["data"] * mesh["fsdp"])
    steps = [config.accumulate * n for n in range(2, each + 1) if each % n == 0]
    key = f"phases.{phase.plan.index}.accumulate"
    yield [{key: n} for n in steps]
    accumulate, fsdp = others.get(key, config.accumulate), others.get("mesh.fsdp", mesh["fsdp"])
    shards = shards * mesh["fsdp"] // fsdp
    # With one sequence a device, a context axis divides it: it takes devices of data, and then of fsdp.
    if config.batch_size // accumulate == mesh["data"] * mesh["fsdp"]:
        chosen = plan.config.phases[phase.plan.index].accumulate == "auto"
        taken = {n: n // math.gcd(n, shards) for n in range(2, shards * fsdp + 1)}
        yield [
            {"mesh.context": mesh["context"] * n, "mesh.fsdp": fsdp // of_fsdp}
            | ({} if chosen else {key: accumulate * n})
            for n, of_fsdp in taken.items()
            if fsdp % of_fsdp == 0
        ]


def _estimate(plan: Plan, phase: PhaseNumbers, changes: dict[str, Any]) -> int | None:
    """The estimate of the phase with these keys changed; None if they do not fit each other."""
    try:
        changed = make_plan(_changed(plan.config, changes), plan.topology)
    except UserError:
        return None
    return changed.phases[phase.plan.index].memory.total


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        part, *rest = key.split(".")
        if part == "phases":
            phases = list(config.phases)
            phases[int(rest[0])] = dataclasses.replace(phases[int(rest[0])], **{rest[1]: value})
            config = dataclasses.replace(config, phases=tuple(phases))
        else:
            section = dataclasses.replace(getattr(config, part), **{rest[0]: value})
            if key in ("mesh.fsdp", "mesh.context"):  # what they take, data gives
                section = dataclasses.replace(section, data=-1)
            config = dataclasses.replace(config, **{part: section})
    return config
