"""What a phase starts with: its state, and what its steps get beside state and batch: a moving schedule, a teacher."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint, open_source
from pe_lab.checkpoints.locating import DIRECTORY, FORMER, first_line
from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.checkpoints.store import Store, templates
from pe_lab.checkpoints.surgery import (
    FREE_FIELDS,
    NOTHING,
    carried,
    change,
    change_qk_norm,
    check_same_shape,
    lineage_entry,
)
from pe_lab.config import DistillConfig, ModelConfig, PhaseConfig, TransitionConfig
from pe_lab.errors import CheckpointError, ConfigError, DataError, EncodingError, StoreError, within
from pe_lab.identity import change_text, changed, may_change
from pe_lab.model import Flops, Model, Params, model_schedule, train_flops_per_token
from pe_lab.model.distillation import DistilledInputs, DistilledLoss, learns
from pe_lab.parallel import AxisRules
from pe_lab.positional import Schedule, check_sources, layer_hooks, layers
from pe_lab.positional.transition import ScheduleTransition
from pe_lab.storage import AnyPath, exists, read_bytes, write_file
from pe_lab.training.logs import checkpoint_metadata, mark_complete, write_phase
from pe_lab.training.plan import PhasePlan
from pe_lab.training.run import Run, held_out_batches, open_pipeline
from pe_lab.training.stability import Monitor
from pe_lab.training.step import Shardings, TrainState, init_state, place_batch


class Start(NamedTuple):
    """The state of a phase at the start of a session."""

    state: TrainState
    step: int
    tokens: int  # read in the phase up to `step`
    lineage: list[dict[str, Any]]  # of the phase's first state
    data_state: dict[str, Any] | None  # the position in the data; None: the beginning
    stability: dict[str, Any] | None = None  # the saved state of the `Monitor`; None: no step was judged
    log: dict[str, Any] | None = None  # the digest of metrics.jsonl at that step; None: not known

    def tokens_at(self, step: int, tokens_per_step: int) -> int:
        """The tokens read in the phase up to a step of this session; earlier ones may have had other batches."""
        return self.tokens + (step - self.step) * tokens_per_step


def is_complete(run: Run, phase: PhasePlan, store: Store) -> bool:
    """Whether a phase has its last checkpoint, whole; then phase.json says so too."""
    steps, show = phase.config.steps, run.out.print
    if steps not in store.steps():
        return False
    if damage := store.damage(steps) if run.config.checkpoint.verify else "":
        show(f"{phase.name}: checkpoint {steps} is damaged: {damage}")
        return False
    show(f"{phase.name}: complete at step {steps}, nothing to do")
    metadata = store.metadata(steps)
    if not mark_complete(run.directory(phase), metadata.get("log")):  # phase.json was lost
        write_phase(run, phase, run.plan.flops(phase), metadata["lineage"], "complete", 0, 0.0)
    return True


def start_phase(
    run: Run, phase: PhasePlan, previous: AnyPath | None, store: Store, shardings: Shardings, schedule: Schedule
) -> Start:
    """Reads or makes the state that a phase starts with; its schedule is on the devices.

    In this order: the last readable checkpoint in `store`, the phase's own; a child of `init_from` or of `previous`,
    the last checkpoint of the previous phase, which is saved as step 0; random parameters.

    Raises:
      CheckpointError: a checkpoint is damaged or does not fit.
      DataError: the data has changed since the previous phase.
    """
    model = run.models[phase.index]
    new_state = functools.partial(init_state, model, run.plan.optimizer(phase), policy=run.plan.policy)
    if store.steps():
        return _resume(run, phase, store, new_state, shardings)
    source = phase.config.init_from or previous
    if not source or source == "random":
        make = jax.jit(lambda key: new_state(model.init(key)), out_shardings=shardings.state)
        entry = lineage_entry(f"initialized at random, seed {run.config.seed}", "", 0)
        return Start(make(jax.random.key(run.config.seed)), 0, 0, [entry], None)

    parent = open_checkpoint(source, mesh=run.mesh, rules=run.rules)
    if source == previous:
        _check_same_data(run, phase, parent)
    check_same_shape(parent.model, model.config, f"The checkpoint '{parent.path}'", bool(phase.config.qk_norm))
    params, what = parent.params, change(parent.layers, phase.layers)
    params, learned = carried(
        params,
        layer_hooks(parent.layers, model.config.heads),
        schedule.hooks,
        model.config,
        run.config.seed,
        shardings.state.params if parent.model.qk_norm == model.config.qk_norm else None,
    )
    what = "; ".join(filter(None, [what, learned]))
    parent = dataclasses.replace(parent, params=params)
    if parent.model.qk_norm != model.config.qk_norm:
        params, changed = _change_qk_norm(run, phase, parent, shardings, schedule)
        what = changed if what == NOTHING else f"{what}; {changed}"
    path = run.workdir / phase.name / DIRECTORY / "0"
    lineage = [*parent.metadata["lineage"], lineage_entry(what, str(path), 0)]
    run.out.print(f"{phase.name}: from {parent.path}: {what}")
    store.save(0, params, None, checkpoint_metadata(run, phase, lineage, 0, None))
    store.wait()
    return Start(jax.jit(new_state, out_shardings=shardings.state)(params), 0, 0, lineage, None)


def _resume(
    run: Run, phase: PhasePlan, store: Store, new_state: Callable[[Params], TrainState], shardings: Shardings
) -> Start:
    """The state of the last whole checkpoint. Later ones are moved away, and their steps trained again."""
    show, shapes = run.out.print, run.models[phase.index].shapes
    template = templates(jax.eval_shape(new_state, shapes), shardings.state)
    if phase.config.prolonged:
        _set_former_aside(phase, store, show)
    without_manifest = store.uncommitted()
    for step in sorted({*store.steps(), *without_manifest}, reverse=True):
        try:
            if step in without_manifest:
                raise CheckpointError("It has no manifest.")
            metadata = store.metadata(step)
            check_sources(metadata.get("encodings", {}), f"Checkpoint {step} of {phase.name}")
            changes = _changes(run, phase, metadata)
            wanted = template.optimizer if step else None
            params, optimizer = store.restore(step, template.params, wanted, run.config.checkpoint.verify)
        except (EncodingError, StoreError):
            raise  # it tells nothing of the checkpoint
        except Exception as error:
            reason = first_line(error)
            show(f"CHECKPOINT {step} of {phase.name} cannot be read, going back: {reason}")
            continue
        store.set_aside_after(step)
        show(f"{phase.name}: resuming at step {step}, {store.verified}")
        if step == 0:  # a child, which has no optimizer state
            state = jax.jit(new_state, out_shardings=shardings.state)(params)
            return Start(state, 0, 0, metadata["lineage"], None)
        judged, tokens = metadata.get("stability"), metadata.get("tokens", step * phase.tokens_per_step)
        history = Monitor(run.config.stability, judged).history if shardings.state.history else ()
        step_and_history = jax.device_put((np.int32(step), history), shardings.replicated)
        state = TrainState(step_and_history[0], params, optimizer, step_and_history[1])
        lineage = metadata["lineage"][:-1]  # the last entry has the steps so far, and is written anew
        if changes:
            show(f"{phase.name}: {changes}")
            lineage = metadata["lineage"] + [lineage_entry(changes, metadata["lineage"][-1]["path"], step)]
        return Start(state, step, tokens, lineage, metadata["data_state"], judged, metadata.get("log"))
    raise CheckpointError(
        f"No checkpoint of '{store.directory.parent}' can be read. To train the phase again, rename that "
        f"directory. {reason}"
    )


def _changes(run: Run, phase: PhasePlan, metadata: Mapping[str, Any]) -> str:
    """What has changed in the config since a checkpoint, in words; `CheckpointError` for another run or phase."""
    if metadata["phase"] != phase.name:
        raise CheckpointError(f"It is of phase '{metadata['phase']}'.")
    before = metadata["config"]
    found = changed(before, run.config)
    other = [key for key in found if not may_change(key, len(before["phases"]))]
    if other:
        raise CheckpointError(
            f"It is of another run: its {other[0]} is {found[other[0]][0]}, not {found[other[0]][1]}."
        )
    text = _prolonged_text(before["phases"][phase.index], phase.config)
    planned = re.compile(rf"phases\.{phase.index}\.(prolonged\..*|steps)") if text else re.compile("$")
    others = change_text({key: values for key, values in found.items() if not planned.fullmatch(key)}, phase.index)
    return "; ".join(filter(None, [text, f"continued with {others}" if others else ""]))


def _prolonged_text(before: Mapping[str, Any], phase: PhaseConfig) -> str:
    """What a lineage has of the steps that were added since a checkpoint, whose phase had the config `before`."""
    totals = [*(one.steps for one in phase.prolonged[1:]), phase.steps]
    added = list(zip(phase.prolonged, totals, strict=False))[len(before.get("prolonged", ())) :]
    return "; ".join(f"prolonged from {one.steps} to {total} steps ({one.how})" for one, total in added)


def _set_former_aside(phase: PhasePlan, store: Store, show: Callable[[str], None]) -> None:
    """Moves the checkpoints that a phase with more steps does not go on from to `PHASE/former`, and copies the log."""
    at, times = phase.config.prolonged[-1].at, len(phase.config.prolonged)

    def former(step: int) -> bool:
        with contextlib.suppress(CheckpointError, LookupError):
            config = store.metadata(step)["config"]
            return len(config["phases"][phase.index].get("prolonged", ())) < times
        return False  # damaged: `_resume` sees to it

    if jax.process_index() == 0 and (later := [step for step in store.steps() if step > at and former(step)]):
        directory, log = store.directory.parent, "metrics.jsonl"
        copy = directory / FORMER / f"metrics-{later[-1]}.jsonl"
        if exists(directory / log) and not exists(copy):
            write_file(copy, read_bytes(directory / log))
        show(f"{phase.name}: going on from step {at}; later checkpoints and their log are in '{directory / FORMER}'")
    store.set_aside_after(at, FORMER, former)


def _check_same_data(run: Run, phase: PhasePlan, parent: Checkpoint) -> None:
    """Refuses data that has changed since the previous phase. Within a phase, the pipeline checks it."""
    before = dict(parent.metadata["data_state"]["data"])
    with contextlib.closing(open_pipeline(run.plan, phase)) as pipeline:
        now = dict(pipeline.get_state()["data"])
    for about in (before, now):
        about["sources"] = [fingerprint for _, _, fingerprint in about["sources"]]  # names and weights may change
    for name in ("sources", "tokenizer"):
        was, is_ = (_unweighted(about[name]) for about in (before, now))
        if was != is_:
            raise DataError(
                f"The data has changed since '{parent.metadata['phase']}': {name} was {was}, is {is_}. "
                "Restore it, or start a new workdir."
            )


def _unweighted(about: Any) -> Any:
    """What the pipeline says of its sources without their weights, which may change."""
    return [[name, *rest] for name, _, *rest in about] if isinstance(about, list) else about


def _change_qk_norm(
    run: Run, phase: PhasePlan, parent: Checkpoint, shardings: Shardings, schedule: Schedule
) -> tuple[Params, str]:
    """The parent's parameters under this phase's QK-norm, fitted on a held-out batch; what was changed."""
    held_out = held_out_batches(run.plan, phase, count=1)
    batch = next((batches[0] for batches in held_out.values() if batches), None)
    if batch is None:
        raise DataError(f"Changing the QK-norm of '{parent.path}' needs held-out text, and the data has none.")
    _, params, changed = change_qk_norm(
        dataclasses.replace(run.models[phase.index].config, qk_norm=parent.model.qk_norm),
        parent.params,
        phase.qk_norm,
        schedule,
        place_batch(batch, shardings.batch),
        (shardings.state.params, shardings.replicated),
        phase.config.qk_norm_init,
    )
    return params, str(changed)


# ---------------------------------------------------------------------------------------------------------------------
# What the steps get


@dataclass(frozen=True)
class StepInputs:
    """The third argument of a train step, by the step."""

    schedule: Schedule  # of the phase, on the devices
    shardings: Shardings
    distilled: tuple[DistilledLoss, DistilledInputs] | None = None  # of a teacher, as `compile_train_step` takes it
    flops: Flops = Flops(0.0, 0.0)  # per token, of the teacher's forward pass
    teacher: tuple[Params, Schedule] | None = None
    transition: ScheduleTransition | None = None  # of a phase whose encoding changes gradually
    until: float = 0.0  # the step at which the transition ends

    def at(self, step: int) -> Any:
        """The schedule of a step, counted from 0, or `DistilledInputs` of a phase that distils."""
        schedule = self.schedule
        if self.transition is not None:
            moved = self.transition.at(step / self.until if self.until else 1.0)
            schedule = jax.device_put(moved, self.shardings.replicated)
        return schedule if self.teacher is None else DistilledInputs(schedule, *self.teacher)


def step_inputs_of(
    run: Run, phase: PhasePlan, previous: AnyPath | None, schedule: Schedule, shardings: Shardings
) -> StepInputs:
    """What the steps of a phase get, whose schedule is on the devices; its teacher is opened.

    Raises:
      UserError: the teacher or the start of the transition cannot be read, or does not fit.
    """
    start: Any = phase.config.init_from or previous
    start = None if start == "random" else start
    found = StepInputs(schedule, shardings)
    if phase.config.transition is not None:
        moved, until = _transition(run, phase, phase.config.transition, start)
        found = dataclasses.replace(found, transition=moved, until=until)
    how, model = phase.config.distill, run.models[phase.index]
    if not learns(how):
        return found
    source = start if how.teacher == "init" else how.teacher
    if not source:
        raise ConfigError(
            f"{phase.where}: distill.teacher is 'init', the checkpoint that the phase starts from, and it starts at "
            "random. Name a teacher's checkpoint."
        )
    with within(f"{phase.where}.distill"):
        its = open_checkpoint(source, mesh=run.mesh, rules=run.rules)
        shape = dataclasses.replace(its.model, **{name: getattr(model.config, name) for name in FREE_FIELDS})
        length = phase.config.sequence_length
        schedule = model_schedule(shape, its.layers, length)
        distilled = distilled_loss(model, shape, schedule, how, run.mesh, run.rules)
    run.out.print(f"{phase.name}: learns from {its.path} too")
    flops = train_flops_per_token(shape, length, schedule.structure).forward
    schedule = jax.device_put(schedule, found.shardings.replicated)
    return dataclasses.replace(found, distilled=distilled, flops=flops, teacher=(its.params, schedule))


def distilled_loss(
    model: Model, shape: ModelConfig, schedule: Schedule, how: DistillConfig, mesh: Mesh, rules: AxisRules
) -> tuple[DistilledLoss, DistilledInputs]:
    """The loss of a model with a teacher, and its inputs' shardings; `ConfigError` if the teacher does not fit."""
    teacher = Model(shape, backward=False, hooks=schedule.hooks)
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = DistilledInputs(replicated, parameter_shardings(teacher, mesh, rules), replicated)
    return DistilledLoss(model, teacher, how), placed


def _transition(run: Run, phase: PhasePlan, how: TransitionConfig, start: Any) -> tuple[ScheduleTransition, float]:
    """The transition of a phase, and the step until which it lasts."""
    model = run.models[phase.index].config
    with within(f"{phase.where}.transition"):
        if how.start != "init":
            before = layers(how.start, model.layers)
        elif start:
            before = open_source(start).layers
        else:
            raise ConfigError("start is 'init', and the phase starts at random. Name an encoding.")
        first = model_schedule(model, before, phase.config.sequence_length)
        moved = ScheduleTransition(first, phase.schedule, how.how)
    until = how.until * phase.config.steps
    run.out.print(f"{phase.name}: the encoding changes gradually until step {until:.0f} ({how.how})")
    return moved, until
