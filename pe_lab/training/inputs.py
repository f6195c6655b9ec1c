"""What a train step gets beside its state and batch: the schedule, which a path may move, and a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.checkpoint import open_checkpoint, open_source
from pe_lab.checkpoints.surgery import FREE_FIELDS
from pe_lab.config import DistillConfig, ModelConfig
from pe_lab.errors import ConfigError, UserError
from pe_lab.model import Flops, Model, Params, train_flops_per_token
from pe_lab.model.distillation import DistilledInputs, DistilledLoss, learns
from pe_lab.parallel import AxisRules
from pe_lab.positional import Schedule, build_schedule, layers
from pe_lab.positional.path import SchedulePath
from pe_lab.storage import AnyPath
from pe_lab.training.run import PhasePlan, Run
from pe_lab.training.step import Shardings, parameter_shardings


@dataclass(frozen=True)
class StepInputs:
    """The third argument of a train step, by the step.

    Attributes:
      schedule: of the phase, on the devices.
      distilled: as `compile_train_step` takes it; None without a teacher.
      flops: per token, of the teacher's forward pass.
      teacher: parameters and schedule of the teacher.
      path: of a phase whose encoding changes gradually.
      until: the step at which the path ends.
    """

    schedule: Schedule
    shardings: Shardings
    distilled: tuple[DistilledLoss, DistilledInputs] | None = None
    flops: Flops = Flops(0.0, 0.0)
    teacher: tuple[Params, Schedule] | None = None
    path: SchedulePath | None = None
    until: float = 0.0

    def at(self, step: int) -> Any:
        """The schedule of a step, counted from 0, or `DistilledInputs` of a phase that distils."""
        schedule = self.schedule
        if self.path is not None:
            moved = self.path.at(step / self.until if self.until else 1.0)
            schedule = jax.device_put(moved, self.shardings.replicated)
        return schedule if self.teacher is None else DistilledInputs(schedule, *self.teacher)


def step_inputs_of(
    run: Run,
    phase: PhasePlan,
    previous: AnyPath | None,
    schedule: Schedule,
    shardings: Shardings,
    show: Callable[[str], None],
) -> StepInputs:
    """What the steps of a phase get; its teacher is opened.

    Args:
      previous: the last checkpoint of the previous phase.
      schedule: of the phase, on the devices.
      shardings: of the phase's state.
      show: prints a line.

    Raises:
      UserError: the teacher or the start of the path cannot be read, or does not fit.
    """
    start: Any = phase.config.init_from or previous
    start = None if start == "random" else start
    found = StepInputs(schedule, shardings)
    if learns(phase.config.distill):
        found = _with_teacher(found, run, phase, start, show)
    if phase.config.path is not None:
        found = _with_path(found, run, phase, start, show)
    return found


def _with_teacher(found: StepInputs, run: Run, phase: PhasePlan, start: Any, show: Callable[[str], None]) -> StepInputs:
    how, model = phase.config.distill, run.models[phase.index]
    assert how is not None
    source = start if how.teacher == "init" else how.teacher
    if not source:
        raise ConfigError(
            f"{phase.where}: distill.teacher is 'init', the checkpoint that the phase starts from, and it starts at "
            "random. Name a teacher's checkpoint."
        )
    try:
        its = open_checkpoint(source, mesh=run.mesh, rules=run.rules)
        shape = dataclasses.replace(its.model, **{name: getattr(model.config, name) for name in FREE_FIELDS})
        length = phase.config.sequence_length
        schedule = build_schedule(its.layers, shape.heads, shape.kv_heads, shape.head_dim, length)
        distilled = distilled_loss(model, shape, schedule, how, run.mesh, run.rules)
    except UserError as error:
        raise type(error)(f"{phase.where}.distill: {error}") from None
    show(f"{phase.name}: learns from {its.path} too")
    flops = train_flops_per_token(shape, length, schedule.structure).forward
    schedule = jax.device_put(schedule, found.shardings.replicated)
    return dataclasses.replace(found, distilled=distilled, flops=flops, teacher=(its.params, schedule))


def distilled_loss(
    model: Model, shape: ModelConfig, schedule: Schedule, how: DistillConfig, mesh: Mesh, rules: AxisRules
) -> tuple[DistilledLoss, DistilledInputs]:
    """The loss of a model with a teacher of a shape and a schedule, and the shardings of its inputs.

    Raises:
      ConfigError: the teacher's shape does not fit.
    """
    teacher = Model(shape, backward=False, hooks=schedule.hooks)
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = DistilledInputs(replicated, parameter_shardings(teacher, mesh, rules), replicated)
    return DistilledLoss(model, teacher, how), placed


def _with_path(found: StepInputs, run: Run, phase: PhasePlan, start: Any, show: Callable[[str], None]) -> StepInputs:
    path, model = phase.config.path, run.models[phase.index].config
    assert path is not None
    try:
        if path.start != "init":
            before = layers(path.start, model.layers)
        elif start:
            before = open_source(start).layers
        else:
            raise ConfigError("start is 'init', and the phase starts at random. Name an encoding.")
        first = build_schedule(before, model.heads, model.kv_heads, model.head_dim, phase.config.sequence_length)
        moved = SchedulePath(first, phase.schedule, path.how)
    except UserError as error:
        raise type(error)(f"{phase.where}.path: {error}") from None
    until = path.until * phase.config.steps
    show(f"{phase.name}: the encoding changes gradually until step {until:.0f} ({path.how})")
    return dataclasses.replace(found, path=moved, until=until)
