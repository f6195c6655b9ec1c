"""A run with what it opens: its data, its devices and the checkpoints that it starts from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import is_external, open_source
from pe_lab.checkpoints.locating import DIRECTORY, steps_in, stored_metadata
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.checkpoints.surgery import check_same_shape
from pe_lab.config import Config
from pe_lab.data.held_out import validation_batches
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.pipeline import Pipeline, build_pipeline
from pe_lab.data.tokenizers import KIND_FILE, Tokenizer, load_saved_tokenizer, load_tokenizer, same_ids, save_tokenizer
from pe_lab.errors import CheckpointError, ConfigError, UserError, within
from pe_lab.model import Model
from pe_lab.parallel import AxisRules
from pe_lab.parallel.topology import chip_of
from pe_lab.positional import label_layers
from pe_lab.storage import AnyPath, absolute, exists, move_tree, new_directory, read_records
from pe_lab.terminal import console
from pe_lab.training.ledger import Ledger
from pe_lab.training.optimizer import learning_rate
from pe_lab.training.plan import PhasePlan, RunPlan, plan_run, start_path, vocabulary
from pe_lab.training.profiling import Profiler
from pe_lab.training.step import Batch
from pe_lab.training.trackers import check_trackers

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel

METRICS = "metrics.jsonl"  # of a phase


class Peak(NamedTuple):
    """FLOP/s of all devices together, and the source of the number; 0 = unknown."""

    flops: float
    source: str


def peak_flops() -> Peak:
    """The data sheet's peak of the accelerators. Of a CPU it is unknown, so no MFU is shown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Peak(0.0, "unknown for a CPU")
    chip = chip_of(device)
    if chip.peak:
        return Peak(chip.peak * jax.device_count(), f"{chip.name} data sheet, bf16")
    return Peak(0.0, f"unknown for {device.device_kind}")


@dataclass(frozen=True, repr=False)
class Run:
    """A run that is open: its plan, with the steps of epochs, its data, and what this start of it measures with."""

    plan: RunPlan
    workdir: AnyPath
    mixtures: tuple[Sequence[dict[str, Any]], ...]  # of each phase, the sources of its data as JSON
    tokenizer: Tokenizer
    peak: Peak  # of the devices, of which MFU is a fraction
    ledger: Ledger  # of the time of all phases
    profiler: Profiler  # counts the steps of all phases, and traces some
    stacked: bool = False  # whether its steps may be computed with those of other runs, from batches on the host

    @functools.cached_property
    def out(self) -> Any:
        """The console of process 0; those of others are quiet."""
        return console(quiet=jax.process_index() != 0)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def phases(self) -> tuple[PhasePlan, ...]:
        return self.plan.phases

    @property
    def models(self) -> tuple[Model, ...]:
        """One for each phase."""
        return self.plan.models

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def rules(self) -> AxisRules:
        return self.plan.rules

    def directory(self, phase: PhasePlan) -> AnyPath:
        """Where a phase's checkpoints and logs are."""
        return self.workdir / phase.name

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl of all phases that have begun, each with the name of its `phase`."""
        found = []
        for phase in self.phases:
            if exists(path := self.directory(phase) / METRICS):
                found += [{"phase": phase.name, **record} for record in read_records(path, partial=True)]
        return found

    def language_model(self, phase: str = "") -> LanguageModel:
        """The `LanguageModel` of the last checkpoint, or of that of a phase; `CheckpointError` if none can be read."""
        from pe_lab.language_model import load

        return load(self.workdir / phase if phase else self.workdir)

    def __repr__(self) -> str:
        described = []
        for phase in self.phases:
            steps = steps_in(self.directory(phase) / DIRECTORY)
            described.append(
                f"{phase.name}: step {steps[-1] if steps else 0:,} of {phase.config.steps:,} with "
                f"{label_layers(phase.layers)}"
            )
        size = f"{self.models[0].num_parameters:,} parameters"
        return f"Run('{self.workdir}', {size}; {'; '.join(described)})"


def open_run(
    plan: RunPlan, workdir: str | AnyPath, ledger: Ledger | None = None, profiler: Profiler | None = None
) -> Run:
    """Opens (or prepares) the data of a plan, and checks the checkpoints that it starts from; writes to no workdir.

    Raises:
      UserError: the data or a checkpoint is missing, damaged, or does not fit; a tracker cannot be opened.
    """
    config, workdir = plan.config, storage.path("the workdir", workdir)
    check_trackers(config.log.trackers, config.log.wandb.mode, workdir)
    for phase in plan.phases:
        for source in config.data.sources:
            if source.source == "needles":
                NeedleWindows(source.options, phase.config.sequence_length, 0, "train", 0)  # refuses short windows
    starts = {
        phase.index: open_source(phase.config.init_from) for phase in plan.phases if _starts_elsewhere(phase, workdir)
    }
    for index, start in starts.items():
        its = bool(plan.phases[index].config.qk_norm)
        check_same_shape(start.model, plan.models[index].config, f"The checkpoint '{start.display_name}'", its)
    # A later phase may have windows that are longer than the corpus, so the data of every phase is opened.
    pipelines = [open_pipeline(plan, phase) for phase in plan.phases]
    config, tokens = _with_steps(plan, pipelines, workdir), pipelines[0].vocab_size
    vocabulary(config, tokens)
    given = plan.given._replace(vocab_size=config.model.vocab_size or tokens)
    if (config, given) != (plan.config, plan.given):
        plan = plan_run(config, plan.mesh, given, chip_of(plan.mesh.devices.flat[0]), must_fit=True)
    mixtures = tuple(p.describe(phase.config.steps) for p, phase in zip(pipelines, plan.phases, strict=True))
    tokenizer = pipelines[0].tokenizer
    for phase in plan.phases:
        plan.attention(phase)
    for index, start in starts.items():
        if not plan.phases[index].config.other_tokenizer:
            _check_tokenizer(start, tokenizer, plan.phases[index].where)
    return Run(plan, workdir, mixtures, tokenizer, peak_flops(), ledger or Ledger(), profiler or Profiler())


def _starts_elsewhere(phase: PhasePlan, workdir: AnyPath) -> bool:
    """Whether a phase has no checkpoint yet, and will start from one that this run does not write."""
    if phase.config.init_from in ("", "random") or steps_in(workdir / phase.name / DIRECTORY):
        return False
    if is_external(phase.config.init_from):
        return True
    return not absolute(start_path(phase.config)).is_relative_to(absolute(workdir))


def _check_tokenizer(source: CheckpointSource, tokenizer: Tokenizer, where: str) -> None:
    """`ConfigError` if a checkpoint was trained with another tokenizer than the data's; `where` names the phase."""
    if not source.tokenizer:
        return
    own = load_tokenizer(source.tokenizer)
    if not same_ids(own, tokenizer):
        raise ConfigError(
            f"{where}: the checkpoint '{source.display_name}' was trained with another tokenizer ({own.fingerprint}, "
            f"{own.vocab_size} ids) than the data have ({tokenizer.fingerprint}, {tokenizer.vocab_size} ids): its "
            "embeddings would mean other tokens. Leave data.tokenizer out, or prepare the data with "
            f"--tokenizer={source.tokenizer}. To train new meanings on purpose, set the phase's other_tokenizer=True."
        )


def _with_steps(plan: RunPlan, pipelines: Sequence[Pipeline], workdir: AnyPath) -> Config:
    """The config with the steps of phases that have `epochs`; checks that no source runs dry in any phase.

    Both count from the last checkpoint on, because the batches before it may have had another size.
    """
    phases = []
    for i, (phase, pipeline) in enumerate(zip(plan.config.phases, pipelines, strict=True)):
        with within(f"config.phases[{i}] ('{phase.name}')"):
            if kept := steps_in(checkpoints := workdir / phase.name / DIRECTORY):
                with contextlib.suppress(CheckpointError, LookupError, TypeError):
                    if (state := stored_metadata(checkpoints / str(kept[-1]))["data_state"]) is not None:
                        pipeline.set_state(state)
            if phase.epochs and not phase.prolonged:
                phase = dataclasses.replace(phase, steps=pipeline.steps_of(phase.epochs))
            if phase.epochs:
                learning_rate(phase.optimizer, phase.steps, phase.prolonged)
            pipeline.check_supply(phase.steps)
        phases.append(phase)
    return dataclasses.replace(plan.config, phases=tuple(phases))


def open_pipeline(plan: RunPlan, phase: PhasePlan, state: Mapping[str, Any] | None = None) -> Pipeline:
    """The training batches of a phase from the position `state`. Each phase has its own order of the windows."""
    config = plan.config
    try:
        pipeline = build_pipeline(
            config.data,
            sequence_length=phase.config.sequence_length,
            batch_size=phase.config.batch_size,
            seed=config.data.seed + phase.index,
            weights=phase.config.weights,
            vocab_size=config.model.vocab_size,
            **batch_share(plan.mesh),
        )
        if state is not None:
            pipeline.set_state(state)
            pipeline.check_supply(phase.config.steps)
    except ConfigError as error:
        raise ConfigError(f"{phase.where}: {error}") from None
    return pipeline


def held_out_batches(plan: RunPlan, phase: PhasePlan, count: int) -> dict[str, list[Batch]]:
    """At most `count` batches of held-out text for each source, in parts with the shape of a micro-batch."""
    return validation_batches(
        plan.config.data,
        sequence_length=phase.config.sequence_length,
        batch_size=phase.config.batch_size // phase.config.accumulate,
        count=count * phase.config.accumulate,
        vocab_size=plan.config.model.vocab_size,
        **batch_share(plan.mesh),
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


def keep_tokenizer(workdir: AnyPath, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
    """Writes the tokenizer to the workdir, where its checkpoints are read with it, unless it is there and whole."""
    if jax.process_index() != 0 or tokenizer.kind == "none":
        return
    directory = workdir / "tokenizer"
    if exists(directory / KIND_FILE):
        try:
            if load_saved_tokenizer(directory).fingerprint == tokenizer.fingerprint:
                return
        except UserError:
            pass
        aside = directory.with_name(f"tokenizer.damaged-{secrets.token_hex(2)}")
        move_tree(directory, aside, first=KIND_FILE)
        show(f"'{directory}' is damaged; it is now '{aside.name}', and is written anew")
    with new_directory(directory, marker=KIND_FILE) as building:
        save_tokenizer(tokenizer, building)
