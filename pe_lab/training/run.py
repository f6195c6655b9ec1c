"""A config made ready to train: phases planned, data open, model and mesh chosen; nothing written yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from pe_lab.checkpoints import is_external, open_source
from pe_lab.checkpoints.store import DIRECTORY, steps_in
from pe_lab.checkpoints.surgery import check_same_shape
from pe_lab.config import Config, PhaseConfig
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.pipeline import build_pipeline
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError
from pe_lab.model import Model, complete
from pe_lab.parallel import AxisRules, balanced_order, check_batch, make_mesh, use_mesh
from pe_lab.positional import Layer, Schedule, build_schedule, layers
from pe_lab.positional.codec import ranges
from pe_lab.training.optimizer import learning_rate
from pe_lab.training.step import parameter_shardings


@dataclass(frozen=True)
class PhasePlan:
    """One phase, resolved: its place in the run, its encodings, and the schedule made of them."""

    index: int
    config: PhaseConfig
    layers: tuple[Layer, ...]
    schedule: Schedule
    qk_norm: str  # the phase's own, or what was before

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length


def plan_phases(config: Config) -> tuple[PhasePlan, ...]:
    """Resolves and checks every phase before anything runs; a `UserError` names the phase.

    Edits (`drop(...)`, `rescale(...)`) and an unset `qk_norm` refer to the phase or the checkpoint that a phase
    starts from.
    """
    names = [phase.name for phase in config.phases]
    if not names or len(set(names)) != len(names) or any("/" in n or n.startswith(".") or not n for n in names):
        raise UserError(f"config.phases: each phase needs a name of its own, a plain word; they are {names}.")
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or config.model.loss_chunks))
    plans: list[PhasePlan] = []
    for i, phase in enumerate(config.phases):
        try:
            for field in ("steps", "sequence_length", "batch_size", "accumulate"):
                if getattr(phase, field) < 1:
                    raise UserError(f"{field} is {getattr(phase, field)}; it must be positive.")
            if phase.random_positions and phase.random_positions < phase.sequence_length:
                raise UserError(
                    f"random_positions is {phase.random_positions}; {phase.sequence_length} different positions are "
                    "drawn below it, so it must be at least that (or 0: positions count)."
                )
            continues = plans[-1] if plans and not phase.init_from else None
            described = layers(phase.positional, model.layers, _layers_before(phase, continues))
            schedule = build_schedule(described, model.heads, model.kv_heads, model.head_dim, phase.sequence_length)
            learning_rate(phase.optimizer, phase.steps)
            qk_norm = phase.qk_norm or (continues.qk_norm if continues else model.qk_norm)
            complete(dataclasses.replace(model, qk_norm=qk_norm))
        except UserError as error:
            raise UserError(f"config.phases[{i}] ('{phase.name}'): {error}") from None
        plans.append(PhasePlan(i, phase, described, schedule, qk_norm))
    return tuple(plans)


def _layers_before(phase: PhaseConfig, continues: PhasePlan | None) -> tuple[Layer, ...] | None:
    """The layers that an edit of this phase would change; None where there are none to be found."""
    if continues is not None:
        return continues.layers
    if phase.init_from in ("", "random") or not (is_external(phase.init_from) or Path(phase.init_from).is_dir()):
        return None
    return open_source(phase.init_from).layers


@dataclass(frozen=True)
class Run:
    """Everything a run needs that is not in its checkpoints."""

    config: Config
    workdir: Path
    models: tuple[Model, ...]  # one a phase: they differ in their QK-norm at most
    mesh: Mesh
    rules: AxisRules
    phases: tuple[PhasePlan, ...]
    mixture: Sequence[dict[str, Any]]
    tokenizer: Tokenizer

    @property
    def share(self) -> tuple[int, int]:
        """See `batch_share`."""
        return batch_share(self.mesh)

    def pipeline(self, phase: PhasePlan) -> Any:
        """The batches of a phase. Later phases read on in an order of their own, not the same windows again."""
        return _pipeline(self.config, phase, self.mesh)


def open_run(config: Config, workdir: str | Path, devices: Sequence[Any] | None = None) -> Run:
    """Checks the whole config, opens (or prepares) its data, and builds the model; writes nothing to `workdir`.

    Raises:
      UserError: anything that would stop the run later: shapes, mesh, batch sizes, data, encodings.
    """
    workdir, rules = Path(workdir), AxisRules()
    check_intervals(config)
    phases = plan_phases(config)
    mesh = make_mesh(config.mesh, devices)
    for phase in phases:
        where = f"config.phases[{phase.index}] ('{phase.name}')"
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, where)
        for source in config.data.sources:
            if source.source == "needles":
                NeedleWindows(source.options, phase.config.sequence_length, 0, "train", 0)  # refuses short windows
    starts = {phase.name: open_source(phase.config.init_from) for phase in phases if _starts_elsewhere(phase, workdir)}
    # Of every phase, not of the first alone: a later one's windows may be longer than the text.
    pipelines = [_pipeline(config, phase, mesh) for phase in phases]
    for pipeline in pipelines:
        pipeline.close()
    first = pipelines[0]
    models = phase_models(config, phases, vocabulary(config, first.vocab_size))
    for phase, model in zip(phases, models, strict=True):
        parameter_shardings(model, mesh, rules)
        check_context(phase, mesh)
        attention_of(model, phase, config, mesh, rules)
        if phase.name in starts:
            parent = starts[phase.name]
            check_same_shape(
                parent.model, model.config, f"The checkpoint '{parent.display_name}'", bool(phase.config.qk_norm)
            )
    return Run(config, workdir, models, mesh, rules, phases, first.mixture, first.tokenizer)


def phase_models(config: Config, phases: Sequence[PhasePlan], vocab_size: int) -> tuple[Model, ...]:
    """The model of each phase; one object where they do not differ."""
    known: dict[str, Model] = {}
    for phase in phases:
        if phase.qk_norm not in known:
            shape = dataclasses.replace(config.model, vocab_size=vocab_size, qk_norm=phase.qk_norm)
            known[phase.qk_norm] = Model(shape)
    return tuple(known[phase.qk_norm] for phase in phases)


def check_intervals(config: Config) -> None:
    """`UserError` for an interval or a number of checkpoints that is not positive."""
    for name, value in {
        "log.every_steps": config.log.every_steps,
        "log.validate_every_steps": config.log.validate_every_steps,
        "log.validation_batches": config.log.validation_batches,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.keep": config.checkpoint.keep,
    }.items():
        if value < 1:
            raise UserError(f"config.{name} is {value}; it must be positive.")


def _starts_elsewhere(phase: PhasePlan, workdir: Path) -> bool:
    """Whether a phase has yet to start from a checkpoint that is there before this run."""
    if phase.config.init_from in ("", "random") or steps_in(workdir / phase.name / DIRECTORY):
        return False
    if is_external(phase.config.init_from):
        return True
    return not Path(phase.config.init_from).absolute().is_relative_to(workdir.absolute())


def attention_of(model: Model, phase: PhasePlan, config: Config, mesh: Mesh, rules: AxisRules) -> str:
    """What attention of a phase is computed by, `chunked on layers 0-23`.

    Raises:
      UserError: the config names an implementation that cannot serve a layer.
    """
    with use_mesh(mesh, rules):
        structure, length = phase.schedule.structure, phase.config.sequence_length
        chosen = model.attention_by_layer(structure, length, config.data.segments)
    layers = {name: [n for n, one in enumerate(chosen) if one == name] for name in dict.fromkeys(chosen)}
    return ", ".join(f"{name} on layers {ranges(where)}" for name, where in layers.items())


def check_context(phase: PhasePlan, mesh: Mesh) -> None:
    """`UserError` unless windows cut evenly, and in balance, over the mesh's context axis."""
    try:
        balanced_order(phase.config.sequence_length, mesh.shape["context"])
    except UserError as error:
        raise UserError(f"config.phases[{phase.index}] ('{phase.name}').sequence_length: {error}") from None


def _pipeline(config: Config, phase: PhasePlan, mesh: Mesh) -> Any:
    index, count = batch_share(mesh)
    return build_pipeline(
        config.data,
        sequence_length=phase.config.sequence_length,
        batch_size=phase.config.batch_size,
        process_index=index,
        process_count=count,
        seed=config.data.seed + phase.index,
    )


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """(index, count): which of how many equal parts of a batch this process feeds to its devices.

    Processes that differ only along `tensor` or `context` hold the same rows of a batch, so they read the same part.
    """
    if jax.process_count() == 1:
        return 0, 1
    rows = mesh.devices.reshape(-1, mesh.shape["tensor"] * mesh.shape["context"])
    held = {device.process_index: set() for device in rows.flat}
    for row, devices in enumerate(rows):
        for device in devices:
            held[device.process_index].add(row)
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, parts)) != len(rows) or len({len(part) for part in parts}) != 1:
        raise UserError(
            f"mesh {dict(mesh.shape)}: the {len(held)} processes hold parts of a batch that overlap. Choose tensor "
            "and context so that their product divides the devices of one process, or is a multiple of them."
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def vocabulary(config: Config, needed: int) -> int:
    """The model's vocabulary: the config's, or what the data needs, rounded up to a multiple of 128."""
    given = config.model.vocab_size
    if given == 0:
        step = 128 * config.model.loss_chunks
        return -(-needed // step) * step
    if given < needed:
        raise UserError(
            f"config.model.vocab_size is {given}, but the data has {needed} tokens; set it to at least that, or 0."
        )
    return given
