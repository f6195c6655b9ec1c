"""A run before training: its phases are planned, its data is open, its models and mesh are made."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints import is_external, open_source
from pe_lab.checkpoints.locating import DIRECTORY, steps_in, stored_metadata
from pe_lab.checkpoints.source import Source
from pe_lab.checkpoints.surgery import check_same_shape
from pe_lab.config import Config, PhaseConfig, check_bounds, check_name
from pe_lab.data.held_out import validation_batches
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.pipeline import Pipeline, build_pipeline
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, UserError
from pe_lab.model import Model, complete, least_parameters
from pe_lab.model.encoding_check import require_causal
from pe_lab.parallel import AxisRules, balanced_order, check_batch, check_memory, make_mesh, use_mesh
from pe_lab.parallel.topology import Chip, chip_of
from pe_lab.positional import Layer, Schedule, build_schedule, layers
from pe_lab.positional.codec import ranges_by
from pe_lab.storage import AnyPath, absolute
from pe_lab.training.inheritance import check_tokenizer
from pe_lab.training.memory import choose_settings
from pe_lab.training.optimizer import learning_rate
from pe_lab.training.step import Batch, parameter_shardings
from pe_lab.training.trackers import check_trackers


@dataclass(frozen=True)
class PhasePlan:
    """A phase with its index in the run, its layers, and their schedule."""

    index: int
    config: PhaseConfig
    layers: tuple[Layer, ...]
    schedule: Schedule
    qk_norm: str  # the phase's own, or the previous one

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def where(self) -> str:
        """Its place in the config, for messages."""
        return f"config.phases[{self.index}] ('{self.name}')"

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length


def plan_phases(config: Config) -> tuple[PhasePlan, ...]:
    """Resolves and checks every phase.

    Edits (`drop(...)`, `rescale(...)`) and an unset `qk_norm` refer to the phase or the checkpoint that a phase
    starts from.

    Raises:
      UserError: a key of a phase is wrong; names the phase.
    """
    names = [phase.name for phase in config.phases]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"config.phases: each phase needs a name of its own; they are {names}.")
    for what, name in [("config.name", config.name), *((f"config.phases[{i}].name", n) for i, n in enumerate(names))]:
        check_name(what, name)
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1))
    plans: list[PhasePlan] = []
    for i, phase in enumerate(config.phases):
        try:
            if phase.random_positions and phase.random_positions < phase.sequence_length:
                raise ConfigError(
                    f"random_positions is {phase.random_positions}; {phase.sequence_length} different positions are "
                    "drawn below it, so it must be at least that (or 0: positions 0, 1, 2, ...)."
                )
            continues = plans[-1] if plans and not phase.init_from else None
            described = layers(phase.positional, model.layers, _layers_before(phase, continues))
            schedule = build_schedule(described, model.heads, model.kv_heads, model.head_dim, phase.sequence_length)
            if not phase.epochs:  # whose steps the data tell
                learning_rate(phase.optimizer, phase.steps, phase.extensions)
            qk_norm = phase.qk_norm or (continues.qk_norm if continues else model.qk_norm)
            complete(dataclasses.replace(model, qk_norm=qk_norm))
        except UserError as error:
            raise type(error)(f"config.phases[{i}] ('{phase.name}'): {error}") from None
        plans.append(PhasePlan(i, phase, described, schedule, qk_norm))
    return tuple(plans)


def _layers_before(phase: PhaseConfig, continues: PhasePlan | None) -> tuple[Layer, ...] | None:
    """The layers that an edit of this phase changes; None if it starts at random or its checkpoint is missing."""
    if continues is not None:
        return continues.layers
    if phase.init_from in ("", "random") or not (is_external(phase.init_from) or _parent_path(phase).is_dir()):
        return None
    return open_source(phase.init_from).layers


@dataclass(frozen=True)
class Run:
    """Everything that a run needs beside its checkpoints."""

    config: Config
    workdir: AnyPath
    models: tuple[Model, ...]  # one per phase; they differ in their QK-norm at most
    mesh: Mesh
    rules: AxisRules
    phases: tuple[PhasePlan, ...]
    mixtures: tuple[Sequence[dict[str, Any]], ...]  # of each phase
    tokenizer: Tokenizer


def open_run(config: Config, workdir: str | AnyPath, devices: Sequence[Any] | None = None) -> Run:
    """Checks the config, opens (or prepares) its data, and builds the models; writes nothing to `workdir`.

    Raises:
      UserError: the shapes, mesh, batch sizes, data or encodings would stop the run later.
    """
    workdir, rules = storage.path("the workdir", workdir), AxisRules()
    check_bounds(config, "config")
    _check_retention(config)
    check_trackers(config.log, workdir)
    phases = plan_phases(config)
    mesh = make_mesh(config.mesh, devices)
    for phase in phases:
        _check_memory(config, phase, mesh)
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, phase.where)
        for source in config.data.sources:
            if source.source == "needles":
                NeedleWindows(source.options, phase.config.sequence_length, 0, "train", 0)  # refuses short windows
    parents = {phase.index: open_source(phase.config.init_from) for phase in phases if _has_parent(phase, workdir)}
    for index, parent in parents.items():
        _check_parent(config, phases[index], parent)
    # A later phase may have windows that are longer than the corpus, so the data of every phase is opened.
    pipelines = [open_pipeline(config, phase, mesh) for phase in phases]
    config = _with_steps(config, pipelines, workdir)
    phases = plan_phases(config)
    mixtures = tuple(p.describe(phase.config.steps) for p, phase in zip(pipelines, phases, strict=True))
    first = pipelines[0]
    vocab_size = vocabulary(config, first.vocab_size)
    models = phase_models(config, phases, vocab_size, mesh, rules, chip_of(mesh.devices.flat[0]), must_fit=True)
    for phase, model in zip(phases, models, strict=True):
        parameter_shardings(model, mesh, rules)
        try:
            balanced_order(phase.config.sequence_length, mesh.shape["context"])
        except UserError as error:
            raise type(error)(f"{phase.where}.sequence_length: {error}") from None
        attention_of(model, phase, config, mesh, rules)
        require_causal(phase.layers)
        if phase.index in parents:
            _check_parent(config, phase, parents[phase.index], vocab_size)
            if not phase.config.other_tokenizer:
                check_tokenizer(parents[phase.index], first.tokenizer, phase.where)
    return Run(config, workdir, models, mesh, rules, phases, mixtures, first.tokenizer)


def _with_steps(config: Config, pipelines: Sequence[Pipeline], workdir: AnyPath) -> Config:
    """The config with the steps of phases that have `epochs`; checks that no source runs dry in any phase.

    Both count from the last checkpoint on, because the batches before it may have had another size. An extended phase
    has the steps that `--extend` gave it.
    """
    phases = []
    for i, (phase, pipeline) in enumerate(zip(config.phases, pipelines, strict=True)):
        try:
            _set_position(pipeline, workdir / phase.name / DIRECTORY)
            if phase.epochs and not phase.extensions:
                phase = dataclasses.replace(phase, steps=pipeline.steps_of(phase.epochs))
            if phase.epochs:
                learning_rate(phase.optimizer, phase.steps, phase.extensions)
            pipeline.check_supply(phase.steps)
        except UserError as error:
            raise type(error)(f"config.phases[{i}] ('{phase.name}'): {error}") from None
        phases.append(phase)
    return dataclasses.replace(config, phases=tuple(phases))


def _set_position(pipeline: Pipeline, checkpoints: AnyPath) -> None:
    """Moves a pipeline to the position of a phase's last checkpoint, if there is one that can be read."""
    if kept := steps_in(checkpoints):
        with contextlib.suppress(CheckpointError, LookupError, TypeError):
            if (state := stored_metadata(checkpoints / str(kept[-1]))["data_state"]) is not None:
                pipeline.set_state(state)


def _check_parent(config: Config, phase: PhasePlan, parent: Source, vocab_size: int = 0) -> None:
    """`ConfigError` if a phase's model has another shape than the checkpoint that it starts from.

    The vocabulary is the checkpoint's where it is not known yet: 0.
    """
    vocab_size = vocab_size or config.model.vocab_size or parent.model.vocab_size
    mine = complete(dataclasses.replace(config.model, vocab_size=vocab_size, qk_norm=phase.qk_norm))
    check_same_shape(parent.model, mine, f"The checkpoint '{parent.display_name}'", bool(phase.config.qk_norm))


def phase_models(
    config: Config,
    phases: Sequence[PhasePlan],
    vocab_size: int,
    mesh: Mesh,
    rules: AxisRules,
    chip: Chip,
    must_fit: bool = False,
) -> tuple[Model, ...]:
    """The model of each phase, with `remat` and `loss_chunks` chosen for the mesh and its chips where they are "auto".

    Phases with the same QK-norm, settings and learned encodings share one. Raises `ConfigError` as `choose_settings`.
    """
    known: dict[Any, Model] = {}
    models = []
    for phase in phases:
        shape = dataclasses.replace(config.model, vocab_size=vocab_size, qk_norm=phase.qk_norm)
        shape = choose_settings(shape, phase.config, phase.schedule, config.data.segments, mesh, rules, chip, must_fit)
        hooks = phase.schedule.hooks
        if (shape, hooks) not in known:
            known[shape, hooks] = Model(shape, hooks=hooks)
        models.append(known[shape, hooks])
    return tuple(models)


def _check_retention(config: Config) -> None:
    """`ConfigError` for a metric that no checkpoint is chosen by."""
    saved = config.checkpoint
    if saved.best and saved.best not in ("loss", "grad_norm") and not saved.best.startswith("validation_loss"):
        raise ConfigError(
            f"config.checkpoint.best is '{saved.best}'; it must be loss, validation_loss or validation_loss/SOURCE."
        )
    if saved.best.startswith("validation_loss") and saved.every_steps % config.log.validate_every_steps:
        raise ConfigError(
            f"config.checkpoint.best is '{saved.best}', which is measured every {config.log.validate_every_steps} "
            f"steps, and checkpoints are saved every {saved.every_steps}: make checkpoint.every_steps a multiple of "
            "log.validate_every_steps."
        )


def _check_memory(config: Config, phase: PhasePlan, mesh: Mesh) -> None:
    """`UnsupportedError` if not even the state and one hidden state of a micro-batch fit this machine.

    The state is the parameters and the two moments of AdamW, in float32; Muon has one moment of its matrices. The
    vocabulary is left out where it is not known yet; `choose_settings` has the exact figures.
    """
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1))
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    moments = least_parameters(model) + (
        embeddings if phase.config.optimizer.name == "muon" else least_parameters(model)
    )
    state, hidden = (
        4 * (least_parameters(model) + moments),
        2 * model.d_model * phase.tokens_per_step // phase.config.accumulate,
    )
    needed = int((state + hidden + 12 * phase.tokens_per_step) * len(here) / mesh.size)
    what = f"{phase.where}: training {least_parameters(model):,} parameters on {phase.tokens_per_step:,} tokens a step"
    check_memory(needed, what, here)


def _has_parent(phase: PhasePlan, workdir: AnyPath) -> bool:
    """Whether a phase has no checkpoint yet, and will start from one that this run does not write."""
    if phase.config.init_from in ("", "random") or steps_in(workdir / phase.name / DIRECTORY):
        return False
    if is_external(phase.config.init_from):
        return True
    return not absolute(_parent_path(phase.config)).is_relative_to(absolute(workdir))


def _parent_path(phase: PhaseConfig) -> AnyPath:
    """The path of the checkpoint that a phase starts from."""
    return storage.path(f"init_from of phase '{phase.name}'", phase.init_from)


def attention_of(model: Model, phase: PhasePlan, config: Config, mesh: Mesh, rules: AxisRules) -> str:
    """The attention implementations of a phase, such as `chunked on layers 0-23`.

    Raises:
      UserError: the config names an implementation that cannot compute a layer.
    """
    with use_mesh(mesh, rules):
        structure, length = phase.schedule.structure, phase.config.sequence_length
        chosen = model.attention_by_layer(structure, length, config.data.segments)
    return ", ".join(f"{name} on layers {where}" for name, where in ranges_by(chosen).items())


def open_pipeline(config: Config, phase: PhasePlan, mesh: Mesh, state: Mapping[str, Any] | None = None) -> Pipeline:
    """The training batches of a phase from the position `state`. Each phase has its own order of the windows."""
    try:
        pipeline = build_pipeline(
            config.data,
            sequence_length=phase.config.sequence_length,
            batch_size=phase.config.batch_size,
            seed=config.data.seed + phase.index,
            weights=phase.config.weights,
            vocab_size=config.model.vocab_size,
            **batch_share(mesh),
        )
        if state is not None:
            pipeline.set_state(state)
            pipeline.check_supply(phase.config.steps)
    except ConfigError as error:
        raise ConfigError(f"{phase.where}: {error}") from None
    return pipeline


def held_out_batches(config: Config, phase: PhasePlan, mesh: Mesh, count: int) -> dict[str, list[Batch]]:
    """At most `count` batches of held-out text for each source, with the shape of a micro-batch of the phase."""
    return validation_batches(
        config.data,
        sequence_length=phase.config.sequence_length,
        batch_size=phase.config.batch_size // phase.config.accumulate,
        count=count,
        vocab_size=config.model.vocab_size,
        **batch_share(mesh),
    )


def batch_share(mesh: Mesh) -> dict[str, int]:
    """This process feeds part `process_index` of `process_count` equal parts of a batch to its devices.

    Processes that differ only along `tensor` or `context` have the same sequences of a batch, so they read one part.
    """
    if jax.process_count() == 1:
        return {"process_index": 0, "process_count": 1}
    rows = mesh.devices.reshape(-1, mesh.shape["tensor"] * mesh.shape["context"])
    by_process: dict[int, set[int]] = defaultdict(set)
    for row, devices in enumerate(rows):
        for device in devices:
            by_process[device.process_index].add(row)
    parts = sorted({tuple(sorted(rows)) for rows in by_process.values()})
    if sum(map(len, parts)) != len(rows) or len({len(part) for part in parts}) != 1:
        raise ConfigError(
            f"mesh {dict(mesh.shape)}: the {len(by_process)} processes have parts of a batch that overlap. Choose "
            "tensor and context so that their product divides the devices of one process, or is a multiple of them."
        )
    index = parts.index(tuple(sorted(by_process[jax.process_index()])))
    return {"process_index": index, "process_count": len(parts)}


def vocabulary(config: Config, needed: int) -> int:
    """The size of the model's vocabulary: the config's, or else `needed`, rounded up to a multiple of 128."""
    given = config.model.vocab_size
    if given == 0:
        return -(-needed // 128) * 128
    if given < needed:
        raise ConfigError(
            f"config.model.vocab_size is {given}, but the data has {needed} tokens; set it to at least that, or 0."
        )
    return given
