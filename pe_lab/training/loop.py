"""The training loop: one function for every phase of every run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pe_lab.checkpoints.checkpoint import new_id
from pe_lab.checkpoints.locating import DIRECTORY
from pe_lab.checkpoints.retention import Retention
from pe_lab.checkpoints.store import Store
from pe_lab.checkpoints.surgery import lineage_entry
from pe_lab.data.pipeline import Pipeline
from pe_lab.errors import SaveFailed, TrainingDiverged
from pe_lab.model import Flops, Model, Params, train_flops_per_token
from pe_lab.model.learned import learned_values, split_layers
from pe_lab.parallel.stopping import Stopped, StopRequests, stop_requests
from pe_lab.positional import Schedule, describe, label
from pe_lab.storage import AnyPath
from pe_lab.terminal import Progress, console, waiting
from pe_lab.training.inputs import StepInputs, step_inputs_of
from pe_lab.training.ledger import Ledger
from pe_lab.training.logs import (
    PhaseLogs,
    checkpoint_metadata,
    mark_complete,
    speed_record,
    speed_text,
    validation_text,
    write_phase,
)
from pe_lab.training.machine import Peak
from pe_lab.training.optimizer import learning_rate, make_optimizer
from pe_lab.training.profiling import Profiler, StepTimes
from pe_lab.training.replay import Replay
from pe_lab.training.run import PhasePlan, Run, attention_of, held_out_batches, open_pipeline
from pe_lab.training.stability import MOST_REWINDS, MOST_SKIPS, Event, Monitor, Rewind, Rewinds, skip_policy
from pe_lab.training.start import Start, start_phase
from pe_lab.training.step import (
    RandomPositions,
    Shardings,
    TrainState,
    compile_loss,
    compile_train_step,
    make_shardings,
    place_batch,
)
from pe_lab.training.workdir import keep_tokenizer


@dataclass(frozen=True)
class _Work:
    """What the loop needs of a phase beside its state."""

    run: Run
    phase: PhasePlan
    store: Store
    peak: Peak
    flops: Flops
    profiler: Profiler
    ledger: Ledger
    stops: StopRequests
    shardings: Shardings
    inputs: StepInputs
    train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    validate: Callable[[Params], dict[str, float]]
    learned: Callable[[Params], dict[str, float]]
    replay: Replay | None
    out: Any

    @property
    def directory(self) -> AnyPath:
        return self.run.workdir / self.phase.name


def train_phase(
    run: Run, phase: PhasePlan, previous: AnyPath | None, peak: Peak, profiler: Profiler, ledger: Ledger | None = None
) -> AnyPath:
    """Trains one phase from the state of its files to its end, and returns its last checkpoint.

    `previous` is the last checkpoint of the previous phase, if there is one; MFU is a fraction of `peak`. The profiler
    counts the steps of all phases, the ledger their time.

    Raises:
      Stopped: the process was asked to stop, and everything is saved.
      TrainingDiverged: the loss or its gradient is not finite, or skips and rewinds do not help.
      SilentCorruption: a gradient that was computed twice differs.
      CheckpointError: the checkpoint to start from is damaged or does not fit.
      DataError: the data has changed since the previous session.
      SaveFailed: a checkpoint could not be written.
    """
    config, steps, directory = run.config, phase.config.steps, run.workdir / phase.name
    out, ledger = console(quiet=jax.process_index() != 0), ledger or Ledger()
    if jax.process_index() == 0:
        keep_tokenizer(run.workdir, run.tokenizer, out.print)
    model, saved = run.models[phase.index], config.checkpoint
    flops = train_flops_per_token(model.config, phase.config.sequence_length, phase.schedule.structure)
    store = Store(directory / DIRECTORY, Retention(saved.keep, saved.keep_every, saved.milestones, saved.best))
    with contextlib.closing(store), stop_requests() as stops:
        if steps in store.steps():
            damage = store.damage(steps) if config.checkpoint.verify else ""
            if not damage:
                out.print(f"{phase.name}: complete at step {steps}, nothing to do")
                metadata = store.metadata(steps)
                if not mark_complete(directory, metadata.get("log")):  # phase.json was lost
                    write_phase(run, phase, flops, peak, metadata["lineage"], "complete", 0, 0.0)
                return directory / DIRECTORY / str(steps)
            out.print(f"{phase.name}: checkpoint {steps} is damaged: {damage}")

        ledger.open()
        policy = skip_policy(config.stability)
        optimizer = make_optimizer(
            phase.config.optimizer, steps, model.axes, phase.config.extensions, model.encoding_settings
        )
        shardings = make_shardings(model, optimizer, run.mesh, run.rules, policy)
        schedule = jax.device_put(phase.schedule, shardings.replicated)

        def load() -> Start:
            with ledger.time("restore"), waiting(out, f"{phase.name}: placing the weights", at_once=False):
                return start_phase(run, phase, previous, store, optimizer, shardings, schedule, out.print)

        start = load()
        # A killed process may have saved and not deleted. Before the newest checkpoint is known to be whole, an older
        # one may be all that can be read; a complete phase keeps what it has, also under another retention.
        if store.verified == "verified":
            store.delete_old()
        learned = jax.jit(lambda params: split_layers(params["layers"])[1], out_shardings=shardings.replicated)
        out.print(describe(phase.schedule, phase.layers, learned(start.state.params) if model.learned else None))
        out.print(f"attention: {attention_of(model, phase, config, run.mesh, run.rules)}")
        for source in run.mixtures[phase.index]:
            if "packing_efficiency" in source:
                windows, filled = f"{source['windows']:,} windows", f"{source['packing_efficiency']:.2%}"
                out.print(f"best-fit packing of {source['name']}: {windows}, {filled} of their tokens no padding")
        if "auto" in (config.model.remat, config.model.loss_chunks):
            out.print(f"chosen for these devices: remat {model.config.remat}, loss_chunks {model.config.loss_chunks}")
        positions = None
        if phase.config.random_positions:
            positions = RandomPositions(phase.config.random_positions, (config.seed, phase.index))
            out.print(f"positions drawn below {phase.config.random_positions:,}, anew each step")
        inputs = step_inputs_of(run, phase, previous, schedule, shardings, out.print)
        flops = flops.plus(inputs.flops)
        how = (model, optimizer, run.mesh, run.rules, phase.config.accumulate, positions, config.compiler_options)
        every = config.stability.replay_every
        work = _Work(
            run,
            phase,
            store,
            peak,
            flops,
            profiler,
            ledger,
            stops,
            shardings,
            inputs,
            compile_train_step(*how, policy, inputs.distilled),
            _validation(run, phase, shardings, schedule),
            _learned(model, shardings),
            Replay(every, *how, out.print, inputs.distilled) if every else None,
            out,
        )
        rewinds = Rewinds()
        try:
            while True:
                with contextlib.closing(open_pipeline(config, phase, run.mesh, start.data_state)) as pipeline:
                    rewinds.leave_out(pipeline, start.step, config.stability.rewind_batches)
                    try:
                        _train_steps(work, start, pipeline, rewinds)
                        return directory / DIRECTORY / str(steps)
                    except Rewind as rewind:
                        rewinds.last = rewind.event
                # The arrays of the bad state went with the exception: there is memory for another one.
                out.print(f"{phase.name}: {rewinds.last.sentence}")
                if rewinds.in_a_row == MOST_REWINDS:
                    raise TrainingDiverged(
                        f"At {rewinds.last.sentence} of '{phase.name}' for the {MOST_REWINDS + 1}th time without a new "
                        f"one. The batches that were left out are in '{directory / 'spikes.jsonl'}'. Lower the "
                        "learning rate, save more often (checkpoint.every_steps), or raise stability.spike_sigma."
                    )
                rewinds.in_a_row += 1
                stops.can_save = False
                ledger.end_steps()
                try:
                    store.wait()
                except SaveFailed as failure:
                    if config.checkpoint.on_failure == "stop":
                        raise
                    out.print(f"{phase.name}: {failure} Training goes on from the checkpoint before it.")
                start = load()
        finally:
            stops.can_save = False
            ledger.end_steps()


def _train_steps(work: _Work, start: Start, pipeline: Pipeline, rewinds: Rewinds) -> None:
    """The loop: trains a phase from a state to its end, and saves.

    Raises `Rewind` where the policy says so, and otherwise as `train_phase`.
    """
    run, phase, store = work.run, work.phase, work.store
    directory, ledger, stops = work.directory, work.ledger, work.stops
    config, steps = run.config, phase.config.steps
    rate = learning_rate(phase.config.optimizer, steps, phase.config.extensions)
    each = phase.tokens_per_step
    encodings = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
    state, lineage = start.state, start.lineage  # the lineage of the checkpoint read or saved last
    monitor = Monitor(config.stability, start.stability)
    started = step = timed_step = start.step
    pending: list[tuple[int, dict[str, jax.Array]]] = []  # the step dispatched last, and its metrics
    last: dict[str, float] = {}  # the metrics received last
    validated = ""  # the validation loss measured last, to print
    times = StepTimes(ledger)
    left_out = pipeline.get_state().get("left_out", ())
    began = timer = time.perf_counter()
    write_phase(run, phase, work.flops, work.peak, lineage, "running", started, 0.0)  # a phase is never logs alone
    with (
        contextlib.closing(PhaseLogs(directory, step, left_out, start.log, config)) as logs,
        Progress(work.out, phase.name, steps, step) as progress,
    ):
        ledger.reached(phase.name, logs.reached)
        if rewinds.last is not None:
            _log(work, start, pipeline, logs, rewinds.last, rewinds.batches)

        def settle() -> None:
            """Waits for the metrics of the step dispatched last, judges and logs them."""
            while pending:
                at, metrics = pending.pop()
                with times.wait("device"):
                    received = jax.device_get(metrics)
                last.update({name: float(value) for name, value in received.items()})
                event = monitor.judge(at, last)
                last.pop("skipped", None)
                if event is not None and event.action == "rewind":
                    raise Rewind(event)
                if (at % config.log.every_steps == 0 or at == steps) and all(map(math.isfinite, last.values())):
                    record = {"step": at, "tokens": start.tokens_at(at, each), **last}
                    logs.write("metrics", {**record, "learning_rate": float(rate(at - 1))})
                if event is not None:
                    _act(work, start, event, monitor, pipeline, logs)

        progress.update(step, f"{step}/{steps}  compiling")
        if step == 0:
            compiling = f"{phase.name}: validation before the first step, which compiles it"
            with times.wait("validation"), waiting(work.out, compiling, at_once=False):
                initial = work.validate(state.params) | work.learned(state.params)
            logs.write("metrics", {"step": 0, "tokens": 0, **initial})
            validated = validation_text(initial)
        stopping = False
        while step < steps and not stopping:
            ledger.begin_step(phase.name, step + 1)
            first = step == started
            slow = contextlib.ExitStack()
            if first:
                slow.enter_context(ledger.time("compile"))
                slow.enter_context(waiting(work.out, f"{phase.name}: compiling the first step", at_once=False))
            with work.profiler.begin(step + 1), slow:
                with times.wait("input"):
                    batch = place_batch(next(pipeline), work.shardings.batch)
                    schedule = work.inputs.at(step)
                if work.replay is not None:
                    work.replay.check(step + 1, state, batch, schedule)
                with times.dispatch():
                    state, metrics = work.train_step(state, batch, schedule)
                if first:
                    jax.block_until_ready(metrics)  # the first step compiles: its time is no measure of speed
            step += 1
            stops.can_save = True
            settle()  # the metrics of the previous step, while this one runs
            _log_epochs(work, step, pipeline, logs)
            pending.append((step, metrics))
            if profiled := work.profiler.end(metrics, directory):
                work.out.print(profiled)

            now = time.perf_counter()
            if first:
                timer, timed_step = now, step
                times = StepTimes(ledger)
            elif now - timer > 1.0 or step == steps:
                split = times.split(step - timed_step, now - timer)
                tokens = start.tokens_at(step, each)
                speed = speed_record(
                    phase, work.flops, work.peak, step, tokens, step - timed_step, now - timer, now - began, split
                )
                logs.write("speed", speed)
                shown = f"loss {last.get('loss', math.nan):.4f}{validated}  {speed_text(speed)}"
                progress.update(step, f"{step}/{steps}  {shown}")
                timer, timed_step = now, step

            losses: dict[str, float] = {}
            if step % config.log.validate_every_steps == 0 or step == steps:
                settle()
                with times.wait("validation"):
                    losses = work.validate(state.params)
                record = {"step": step, "tokens": start.tokens_at(step, each), **losses, **work.learned(state.params)}
                logs.write("metrics", record | pipeline.tokens_read())
                validated = validation_text(losses)

            stopping = work.stops.requested(work.profiler.trained)
            due = step % config.checkpoint.every_steps == 0 or step in config.checkpoint.milestones
            if due or step == steps or stopping:
                settle()
                what = f"trained {step} steps of '{phase.name}' with {encodings}"
                path = directory / DIRECTORY / str(step)
                lineage = [*start.lineage, lineage_entry(what, new_id(), str(path), step)]
                position = (start.tokens_at(step, each), pipeline.get_state())
                metadata = checkpoint_metadata(run, phase, lineage, *position, monitor.state(), logs.digest)
                with times.wait("checkpoint"):
                    # The log on disk is never behind the checkpoint, and what it holds was judged.
                    _save(work, step, state, metadata, {**last, **losses}, logs.flush, step == steps or stopping)
                rewinds.in_a_row = 0
        with times.wait("checkpoint"):
            store.wait()
        if profiled := work.profiler.close(directory):
            work.out.print(profiled)
        if step == steps:
            work.out.print(f"{phase.name}: complete at step {steps}, loss {last['loss']:.4f}{validated}")
            write_phase(run, phase, work.flops, work.peak, lineage, "complete", started, time.perf_counter() - began)
            stopping = work.stops.requested(work.profiler.trained)  # requested while the last checkpoint was written
    if stopping:
        raise Stopped(f"stopped at step {step} of {steps} of phase '{phase.name}', saved; run it again to continue")


def _save(
    work: _Work,
    step: int,
    state: TrainState,
    metadata: Mapping[str, Any],
    metrics: Mapping[str, float],
    before: Callable[[], None],
    ends: bool,
) -> None:
    """Starts to save. The failure of this save or the one before stops the run, or is printed: `checkpoint.on_failure`.

    `before` is that of `Store.save`. If the loop `ends` with this save, its failure stops the run in any case.
    """

    def save() -> None:
        work.store.save(step, state.params, state.optimizer, metadata, metrics, before)

    for action in (work.store.wait, save):
        try:
            action()
        except SaveFailed as failure:
            if (ends and action is save) or work.run.config.checkpoint.on_failure == "stop":
                raise
            work.out.print(f"{work.phase.name}: {failure} Training goes on.")


def _act(work: _Work, start: Start, event: Event, monitor: Monitor, pipeline: Pipeline, logs: PhaseLogs) -> None:
    """Logs a step that was warned of, skipped, or ends the run."""
    _log(work, start, pipeline, logs, event, [pipeline.batch_index(event.step - 1)])
    name, checkpoints = work.phase.name, work.directory / DIRECTORY
    if event.action == "stop":
        raise TrainingDiverged(
            f"The loss is {event.loss} and the norm of its gradient {event.grad_norm} at step {event.step} of "
            f"'{name}'. Checkpoints of earlier steps are in '{checkpoints}': lower "
            f"config.phases.{work.phase.index}.optimizer.learning_rate, and the same command goes on from the last one."
        )
    work.out.print(f"{name}: {event.sentence}")
    if monitor.skips_in_a_row == MOST_SKIPS:
        raise TrainingDiverged(
            f"{MOST_SKIPS} updates in a row were skipped, up to step {event.step} of '{name}'. Their batches are in "
            f"'{work.directory / 'spikes.jsonl'}', checkpoints of earlier steps in '{checkpoints}'. Lower the learning "
            "rate, or raise stability.spike_sigma."
        )


def _log(work: _Work, start: Start, pipeline: Pipeline, logs: PhaseLogs, event: Event, batches: Sequence[int]) -> None:
    """Writes an event to metrics.jsonl, and what is in batches that were left out to spikes.jsonl."""
    logs.write("metrics", event.record(start.tokens_at(event.step, work.phase.tokens_per_step), batches))
    if jax.process_index() == 0 and event.action in ("skip", "rewind"):
        for batch in batches:
            for sequence in pipeline.sequences(batch):
                logs.write("spikes", {"step": event.step, "event": event.action, **sequence})


def _log_epochs(work: _Work, step: int, pipeline: Pipeline, logs: PhaseLogs) -> None:
    """Writes an event for each source that a step has begun to read anew; the first one is told."""
    for source, epoch in pipeline.new_repeats():
        logs.write("metrics", {"step": step, "event": "epoch", "source": source, "epoch": epoch})
        if epoch == 2:
            work.out.print(f"{work.phase.name}: step {step} reads data source '{source}' for the 2nd time")


def _validation(
    run: Run, phase: PhasePlan, shardings: Shardings, schedule: Schedule
) -> Callable[[Params], dict[str, float]]:
    """A function from parameters to {"validation_loss": ..., "validation_loss/SOURCE": ...}, in nats per token."""
    held_out = held_out_batches(run.config, phase, run.mesh, run.config.log.validation_batches)
    loss = compile_loss(run.models[phase.index], run.mesh, run.rules, shardings)

    def validate(params: Params) -> dict[str, float]:
        total, weight, losses = 0.0, 0.0, {}
        for source, batches in held_out.items():
            sums = [loss(params, place_batch(batch, shardings.batch), schedule) for batch in batches]
            nats, weights = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
            losses[f"validation_loss/{source}"] = float(nats / weights)
            total, weight = total + nats, weight + weights
        return {"validation_loss": float(total / weight), **losses} if weight else {}

    return validate


def _learned(model: Model, shardings: Shardings) -> Callable[[Params], dict[str, float]]:
    """A function from parameters to the learned values of encodings, by layer, for the log.

    `learned/wave.height/3` is the mean of that parameter in layer 3; where it has several values in a layer, the lowest
    and the highest one follow as `learned/wave.height/3/low` and `/high`. Values that are not finite are left out.
    """
    values = jax.jit(
        lambda params: learned_values(split_layers(params["layers"])[1]), out_shardings=shardings.replicated
    )

    def numbers(params: Params) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, of_layers in jax.device_get(values(params)).items() if model.learned else ():
            encoding, parameter = name.split(".")
            several = math.prod(model.encoding_settings[encoding][parameter].value.shape) > 1
            for n, three in zip(model.learned[encoding][1], of_layers.T, strict=True):
                for part, value in zip(("", "/low", "/high")[: 3 if several else 1], three, strict=False):
                    if math.isfinite(value):
                        found[f"learned/{name}/{n}{part}"] = float(value)
        return found

    return numbers
