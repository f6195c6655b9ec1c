"""The plan of a recipe on a topology: its numbers before anything is compiled or run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.config import Config, DataConfig
from pe_lab.data.needles import NeedleOptions, place_symbols
from pe_lab.data.shards import METADATA_FILE, read_metadata
from pe_lab.data.tokenizers import load_tokenizer, training_size
from pe_lab.errors import ConfigError, UserError
from pe_lab.model import Flops, Model, train_flops_per_token
from pe_lab.model.distillation import DistilledInputs, learns
from pe_lab.parallel import AxisRules, check_batch, make_mesh
from pe_lab.parallel.compiler import compiler_name, topology_devices
from pe_lab.parallel.topology import CHIPS, Topology, placeholder_mesh
from pe_lab.planning.buffers import largest_buffers
from pe_lab.planning.compiled_memory import Compiled, analyze, analyze_program
from pe_lab.planning.hlo import parse
from pe_lab.planning.report import StepReport, report_step
from pe_lab.positional import Layer, Rope, build_schedule, label
from pe_lab.storage import AnyPath, is_file
from pe_lab.training.inputs import distilled_loss
from pe_lab.training.memory import Estimate, estimate_memory, step_inputs
from pe_lab.training.muon import newton_schulz_flops
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.run import PhasePlan, open_pipeline, phase_models, plan_phases, vocabulary
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
    """A recipe on a topology: its phases, mesh and first model."""

    config: Config
    topology: Topology
    model: Model
    mesh_shape: dict[str, int]
    phases: tuple[PhaseNumbers, ...]

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
    phases = plan_phases(config)
    mesh = placeholder_mesh(config.mesh, topology.count, topology.slices)
    prepared = bool(_prepared(config.data))
    if prepared and any(phase.epochs for phase in config.phases):
        phases = plan_phases(config := _with_steps(config, phases, mesh))
    for phase in phases:
        where = f"config.phases[{phase.index}] ('{phase.name}')"
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, where)
    needed = config.model.vocab_size or _data_vocabulary(config)
    models = phase_models(config, phases, vocabulary(config, needed), mesh, AxisRules(), topology.chip)
    numbers = []
    for phase, model in zip(phases, models, strict=True):
        flops = train_flops_per_token(model.config, phase.config.sequence_length, phase.schedule.structure)
        if learns(phase.config.distill):  # a teacher of the model's own shape
            flops = flops.plus(flops.forward)
        memory = estimate_memory(model, phase.config, phase.schedule, config.data.segments, mesh, AxisRules())
        names = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
        optimizer, products = phase.config.optimizer, 0.0
        if optimizer.name == "muon":
            products = newton_schulz_flops(optimizer.muon, model.shapes, model.axes)
        assumed = bool(phase.config.epochs) and not prepared
        numbers.append(PhaseNumbers(phase, model, names, flops, memory, products, assumed))
    return Plan(config, topology, models[0], {k: int(v) for k, v in mesh.shape.items()}, tuple(numbers))


def _with_steps(config: Config, phases: Sequence[PhasePlan], mesh: Mesh) -> Config:
    """The config with the steps of phases that have `epochs`."""
    found = []
    for phase in phases:
        if phase.config.epochs:
            steps = open_pipeline(config, phase, mesh).steps_of(phase.config.epochs)
            phase = dataclasses.replace(phase, config=dataclasses.replace(phase.config, steps=steps))
        found.append(phase.config)
    return dataclasses.replace(config, phases=tuple(found))


def _prepared(data: DataConfig) -> list[AnyPath]:
    """The prepared directories of a recipe's text; [] if some text is not prepared, or is not here."""
    text = [source.source for source in data.sources if source.source != "needles"]
    text = [f"prepared:{data.prepared}"] if data.prepared else text
    found = [storage.path("data", name.removeprefix("prepared:")) for name in text if name.startswith("prepared:")]
    return found if len(found) == len(text) and all(is_file(path / METADATA_FILE) for path in found) else []


def _data_vocabulary(config: Config) -> int:
    """The size of the vocabulary of a recipe's data, from the name or the file of its tokenizer."""
    data = config.data
    needles = [NeedleOptions.from_mapping(s.options) for s in data.sources if s.source == "needles"]
    size = training_size(data.tokenizer)
    try:
        if prepared := _prepared(data):
            size = read_metadata(prepared[0]).vocab_size
        elif data.prepared:
            size = read_metadata(storage.path("data.prepared", data.prepared)).vocab_size
        elif size is None:
            size = load_tokenizer(data.tokenizer).vocab_size
    except UserError as error:
        raise type(error)(f"The tokenizer determines the vocabulary. {error} Or set model.vocab_size.") from None
    return place_symbols(dict(enumerate(needles)), size)[1]


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
    optimizer = make_optimizer(config.optimizer, config.steps, model.axes, learned=model.encoding_settings)
    state, batch, schedule = step_inputs(model, optimizer, config, phase.plan.schedule, plan.config.data.segments)
    distilled = None
    if config.distill is not None and learns(config.distill):
        # The teacher's checkpoint is not opened: it has the model's shape, and the encoding before this phase,
        # or RoPE.
        index, shape = phase.plan.index, model.config
        layers = plan.phases[index - 1].plan.layers if index else (Layer(Rope()),) * shape.layers
        heads = shape.heads, shape.kv_heads, shape.head_dim
        its = build_schedule(layers, *heads, config.sequence_length)
        distilled = distilled_loss(model, shape, its, config.distill, mesh, AxisRules())
        schedule = DistilledInputs(schedule, distilled[0].teacher.shapes, its)
    start = time.perf_counter()
    options, rules = plan.config.compiler_options, AxisRules()
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
                "memory_estimate": {**dataclasses.asdict(phase.memory), "total": phase.memory.total},
            }
            for phase in plan.phases
        ],
        "mfu": mfu,
        "chip_hours": {name: plan.chip_hours(chip.peak, mfu) for name, chip in CHIPS.items()},
    }
