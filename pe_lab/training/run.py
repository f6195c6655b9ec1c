"""A config made ready to train: phases planned, data open, model and mesh chosen; nothing written yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from pe_lab.config import Config, PhaseConfig, UserError
from pe_lab.data.pipeline import build_pipeline
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.model import Model, complete
from pe_lab.parallel import AxisRules, check_batch, make_mesh
from pe_lab.positional import Layer, Schedule, build_schedule, layers
from pe_lab.training.optimizer import learning_rate


@dataclass(frozen=True)
class PhasePlan:
    """One phase, resolved: its place in the run, its encodings, and the schedule made of them."""

    index: int
    config: PhaseConfig
    layers: tuple[Layer, ...]
    schedule: Schedule

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length


def plan_phases(config: Config) -> tuple[PhasePlan, ...]:
    """Resolves and checks every phase before anything runs; a `UserError` names the phase."""
    names = [phase.name for phase in config.phases]
    if not names or len(set(names)) != len(names) or any("/" in n or n.startswith(".") or not n for n in names):
        raise UserError(f"config.phases: each phase needs a name of its own, a plain word; they are {names}.")
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or config.model.loss_chunks))
    plans = []
    for i, phase in enumerate(config.phases):
        try:
            for field in ("steps", "sequence_length", "batch_size", "accumulate"):
                if getattr(phase, field) < 1:
                    raise UserError(f"{field} is {getattr(phase, field)}; it must be positive.")
            described = layers(phase.positional, model.layers)
            schedule = build_schedule(described, model.heads, model.kv_heads, model.head_dim, phase.sequence_length)
            learning_rate(phase.optimizer, phase.steps)
        except UserError as error:
            raise UserError(f"config.phases[{i}] ('{phase.name}'): {error}") from None
        plans.append(PhasePlan(i, phase, described, schedule))
    return tuple(plans)


@dataclass(frozen=True)
class Run:
    """Everything a run needs that is not in its checkpoints."""

    config: Config
    workdir: Path
    model: Model
    mesh: Mesh
    rules: AxisRules
    phases: tuple[PhasePlan, ...]
    mixture: Sequence[dict[str, Any]]
    tokenizer: Tokenizer

    def pipeline(self, phase: PhasePlan) -> Any:
        """The batches of a phase. Later phases read on in an order of their own, not the same windows again."""
        return build_pipeline(
            self.config.data,
            sequence_length=phase.config.sequence_length,
            batch_size=phase.config.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            seed=self.config.data.seed + phase.index,
        )


def open_run(config: Config, workdir: str | Path, devices: Sequence[Any] | None = None) -> Run:
    """Checks the whole config, opens (or prepares) its data, and builds the model; writes nothing to `workdir`.

    Raises:
      UserError: anything that would stop the run later: shapes, mesh, batch sizes, data, encodings.
    """
    phases = plan_phases(config)
    mesh = make_mesh(config.mesh, devices)
    for phase in phases:
        where = f"config.phases[{phase.index}] ('{phase.name}')"
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, where)
    first = phases[0].config
    pipeline = build_pipeline(
        config.data,
        sequence_length=first.sequence_length,
        batch_size=first.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    model = Model(dataclasses.replace(config.model, vocab_size=vocabulary(config, pipeline.vocab_size)))
    mixture, tokenizer = pipeline.mixture, pipeline.tokenizer
    pipeline.close()
    return Run(config, Path(workdir), model, mesh, AxisRules(), phases, mixture, tokenizer)


def vocabulary(config: Config, needed: int) -> int:
    """The model's vocabulary: the config's, or what the data needs, rounded up to a multiple of 128."""
    given = config.model.vocab_size
    if given == 0:
        step = 128 * config.model.loss_chunks
        return -(-needed // step) * step
    if given < needed:
        raise UserError(f"config.model.vocab_size is {given}, but the data has {needed} tokens; set it to at least that, or 0.")
    return given
