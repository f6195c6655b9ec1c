"""The training loop: one function for every phase of every run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pe_lab.checkpoints.locating import DIRECTORY, lineage_entry
from pe_lab.checkpoints.store import Store
from pe_lab.data.pipeline import Pipeline
from pe_lab.errors import SaveFailed, TrainingDiverged
from pe_lab.model import Flops
from pe_lab.model.learned import split_layers
from pe_lab.parallel.stopping import Stopped, StopRequests, stop_requests
from pe_lab.positional import Schedule, describe, label
from pe_lab.storage import AnyPath
from pe_lab.terminal import Progress, waiting
from pe_lab.training.evaluators import Evaluator, suites, validation
from pe_lab.training.logs import PhaseLogs, Speed, checkpoint_metadata, speed_text, validation_text, write_phase
from pe_lab.training.plan import PhasePlan
from pe_lab.training.replay import Replay
from pe_lab.training.run import Run, keep_tokenizer, open_pipeline
from pe_lab.training.stability import MOST_REWINDS, MOST_SKIPS, Event, Monitor, Rewind, Rewinds
from pe_lab.training.start import Start, StepInputs, is_complete, start_phase, step_inputs_of
from pe_lab.training.step import RandomPositions, Shardings, TrainState, compile_train_step, make_shardings, place_batch
from pe_lab.training.step_call import StepCall, Steps
from pe_lab.training.trackers import Background, Session, open_trackers


class PhasePrograms(NamedTuple):
    """What a phase computes; a program is compiled when it is first called."""

    shardings: Shardings
    train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]  # (state, batch, inputs) -> (state, metrics)
    inputs: StepInputs  # the third argument, by the step
    replay: Replay | None  # computes gradients again, if the config asks for it
    evaluators: Sequence[Evaluator]  # what is measured between steps
    flops: Flops  # of a step, per token, with those of a teacher


def train_phase(run: Run, phase: PhasePlan, previous: AnyPath | None) -> Steps[AnyPath]:
    """Trains one phase from the state of its files, or `previous`'s, to its end, and returns its last checkpoint.

    It yields each step to whoever computes it: `step_call.alone`, or `stack.train_together` for several runs.

    Raises:
      Stopped: the process was asked to stop, and everything is saved.
      TrainingDiverged: the loss or its gradient is not finite, or skips and rewinds do not help.
      SilentCorruption: a gradient that was computed twice differs.
      CheckpointError: the checkpoint to start from is damaged or does not fit.
      DataError: the data has changed since the previous session.
      SaveFailed: a checkpoint could not be written.
    """
    config, ledger, out = run.config, run.ledger, run.out
    checkpoints = run.directory(phase) / DIRECTORY
    keep_tokenizer(run.workdir, run.tokenizer, out.print)
    store = Store(checkpoints, config.checkpoint.kept)
    with contextlib.closing(store), stop_requests() as stops:
        if is_complete(run, phase, store):
            return checkpoints / str(phase.config.steps)
        ledger.open()
        how = (run.models[phase.index], run.plan.optimizer(phase), run.mesh, run.rules)
        shardings = make_shardings(*how, run.plan.policy)
        schedule = jax.device_put(phase.schedule, shardings.replicated)

        def load() -> Start:
            with ledger.time("restore"), waiting(out, f"{phase.name}: placing the weights", at_once=False):
                return start_phase(run, phase, previous, store, shardings, schedule)

        start = load()
        # A killed process may have saved and not deleted. Before the newest checkpoint is known to be whole, an older
        # one may be all that can be read; a complete phase keeps what it has, also under another retention.
        if store.verified == "verified":
            store.delete_old()
        _describe(run, phase, start.state, shardings)
        programs = _programs(run, phase, previous, shardings, schedule)
        rewinds = Rewinds()
        try:
            while True:
                with contextlib.closing(open_pipeline(run.plan, phase, start.data_state)) as pipeline:
                    rewinds.leave_out(pipeline, start.step, config.stability.rewind_batches)
                    try:
                        yield from _train_steps(run, phase, programs, store, stops, start, pipeline, rewinds)
                        return checkpoints / str(phase.config.steps)
                    except Rewind as rewind:
                        rewinds.last = rewind.event
                # The arrays of the bad state went with the exception: there is memory for another one.
                stops.can_save = False
                _count_rewind(run, phase, rewinds)
                ledger.end_steps()
                with _save_may_fail(run, phase):
                    store.wait()
                start = load()
        finally:
            stops.can_save = False
            ledger.end_steps()


def _train_steps(
    run: Run,
    phase: PhasePlan,
    programs: PhasePrograms,
    store: Store,
    stops: StopRequests,
    start: Start,
    pipeline: Pipeline,
    rewinds: Rewinds,
) -> Steps[None]:
    """The loop: trains a phase from a state to its end, and saves.

    Raises `Rewind` where the policy says so, and otherwise as `train_phase`.
    """
    config, steps, directory = run.config, phase.config.steps, run.directory(phase)
    out, ledger, profiler = run.out, run.ledger, run.profiler
    left_out = pipeline.get_state().get("left_out", ())
    # All at once: computed at a step, a rate would wait behind that step on the device.
    rates = jax.device_get(jax.vmap(run.plan.learning_rate(phase))(jnp.arange(steps)))
    monitor = Monitor(config.stability, start.stability)
    state, lineage = start.state, start.lineage  # the lineage of the checkpoint read or saved last
    step = start.step
    encodings = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
    pending: list[tuple[int, dict[str, jax.Array]]] = []  # the step dispatched last, and its metrics
    last: dict[str, float] = {}  # the metrics received last
    validated = ""  # the validation loss measured last, to print
    speed = Speed(ledger, step, phase.tokens_per_step, programs.flops, run.peak.flops)
    write_phase(run, phase, programs.flops, lineage, "running", start.step, 0.0)  # a phase is never logs alone

    def trackers(skip: int) -> Sequence[Background]:
        return open_trackers(Session(directory, start.step, skip, config), out.print)

    with (
        contextlib.closing(PhaseLogs(directory, start.step, left_out, start.log, trackers)) as logs,
        Progress(out, phase.name, steps, step) as progress,
    ):
        ledger.reached(phase.name, logs.reached)
        if rewinds.last is not None:
            _log_event(phase, start, pipeline, logs, rewinds.last, rewinds.batches)

        def tokens(step: int) -> int:
            return start.tokens_at(step, phase.tokens_per_step)

        def settle() -> None:
            """Waits for the metrics of the step dispatched last, judges and logs them."""
            while pending:
                at, metrics = pending.pop()
                with speed.wait("device"):
                    received = jax.device_get(metrics)
                last.update({name: float(value) for name, value in received.items()})
                event = monitor.judge(at, last)
                last.pop("skipped", None)
                if event is not None and event.action == "rewind":
                    raise Rewind(event)
                if (at % config.log.every_steps == 0 or at == steps) and all(map(math.isfinite, last.values())):
                    learning_rate = float(rates[at - 1])
                    logs.write("metrics", {"step": at, "tokens": tokens(at), **last, "learning_rate": learning_rate})
                if event is not None:
                    _log_event(phase, start, pipeline, logs, event, [pipeline.batch_index(at - 1)])
                    _refuse_or_warn(run, phase, event, monitor)

        def evaluate(evaluator: Evaluator) -> dict[str, float]:
            with speed.wait(evaluator.name):
                found = evaluator.measure(step, state.params)
            read = pipeline.tokens_read() if step else {}
            logs.write("metrics", {"step": step, "tokens": tokens(step), **found, **read})
            return dict(found)

        progress.update(step, f"{step}/{steps}  compiling")
        if step == 0:
            for evaluator in programs.evaluators:
                compiling = f"{phase.name}: {evaluator.name} before the first step, which compiles it"
                with waiting(out, compiling, at_once=False):
                    validated = validation_text(evaluate(evaluator)) or validated

        stopping = False
        while step < steps and not stopping:
            ledger.begin_step(phase.name, step + 1)
            first = step == start.step
            with profiler.begin(step + 1), _compiling(run, phase, first):
                with speed.wait("input"):
                    batch = next(pipeline)
                    batch = batch if run.stacked else place_batch(batch, programs.shardings.batch)
                    inputs = programs.inputs.at(step)
                if programs.replay is not None:
                    programs.replay.check(step + 1, state, batch, inputs)
                with speed.dispatch():
                    yield (call := StepCall(run, phase, programs, step, state, batch, inputs))
                    state, metrics = call.take()
                if first:
                    jax.block_until_ready(metrics)  # the first step compiles: its time is no measure of speed
            step += 1
            stops.can_save = True
            settle()  # the metrics of the previous step, while this one runs
            pending.append((step, metrics))
            for source, epoch in pipeline.new_repeats():
                logs.write("metrics", {"step": step, "event": "epoch", "source": source, "epoch": epoch})
                if epoch == 2:
                    out.print(f"{phase.name}: step {step} reads data source '{source}' for the 2nd time")
            if profiled := profiler.end(metrics, directory):
                out.print(profiled)

            if first:
                speed.begin(step)
            elif record := speed.record(step, tokens(step), call.cells, at_once=step == steps):
                logs.write("speed", record)
                shown = f"loss {last.get('loss', math.nan):.4f}{validated}  {speed_text(record)}"
                progress.update(step, f"{step}/{steps}  {shown}")

            evaluated: dict[str, float] = {}
            for evaluator in programs.evaluators:
                if step % evaluator.every_steps == 0 or step == steps:
                    settle()
                    evaluated |= evaluate(evaluator)
                    validated = validation_text(evaluated) or validated

            stopping = stops.requested(profiler.trained)
            due = step % config.checkpoint.every_steps == 0 or step in config.checkpoint.milestones
            if due or step == steps or stopping:
                settle()
                what = f"trained {step} steps of '{phase.name}' with {encodings}"
                lineage = [*start.lineage, lineage_entry(what, str(directory / DIRECTORY / str(step)), step)]
                position = (tokens(step), pipeline.get_state())
                metadata = checkpoint_metadata(run, phase, lineage, *position, monitor.state(), logs.digest)
                with speed.wait("checkpoint"):
                    with _save_may_fail(run, phase):  # the one before
                        store.wait()
                    with _save_may_fail(run, phase, step < steps and not stopping):
                        # The log on disk is never behind the checkpoint, and what it holds was judged.
                        store.save(step, state.params, state.optimizer, metadata, last | evaluated, logs.flush)
                rewinds.in_a_row = 0

        with speed.wait("checkpoint"):
            store.wait()
        if profiled := profiler.close(directory):
            out.print(profiled)
        if step == steps:
            out.print(f"{phase.name}: complete at step {steps}, loss {last['loss']:.4f}{validated}")
            write_phase(run, phase, programs.flops, lineage, "complete", start.step, speed.seconds)
            stopping = stops.requested(profiler.trained)  # requested while the last checkpoint was written
    if stopping:
        raise Stopped(f"stopped at step {step} of {steps} of phase '{phase.name}', saved; run it again to continue")


# ---------------------------------------------------------------------------------------------------------------------
# Before the loop


def _describe(run: Run, phase: PhasePlan, state: TrainState, shardings: Shardings) -> None:
    """Prints the encodings, the attention, and what was chosen for the phase."""
    out, model, config = run.out, run.models[phase.index], run.config
    learned = jax.jit(lambda params: split_layers(params["layers"])[1], out_shardings=shardings.replicated)
    out.print(describe(phase.schedule, phase.layers, learned(state.params) if model.learned else None))
    out.print(f"attention: {run.plan.attention(phase)}")
    if across := run.plan.context(phase):
        out.print(f"attention across the context axis: {across}")
    for source in run.mixtures[phase.index]:
        if "packing_efficiency" in source:
            windows, filled = f"{source['windows']:,} windows", f"{source['packing_efficiency']:.2%}"
            out.print(f"best-fit packing of {source['name']}: {windows}, {filled} of their tokens no padding")
    given, found = config.model, model.config
    chosen = {name: getattr(found, name) for name in ("remat", "scan", "loss_chunks") if getattr(given, name) == "auto"}
    if config.phases[phase.index].accumulate == "auto":
        chosen["accumulate"] = phase.config.accumulate
    if chosen:
        out.print("chosen for these devices: " + ", ".join(f"{name} {value}" for name, value in chosen.items()))
    if phase.config.random_positions:
        out.print(f"positions drawn below {phase.config.random_positions:,}, anew each step")


def _programs(
    run: Run, phase: PhasePlan, previous: AnyPath | None, shardings: Shardings, schedule: Schedule
) -> PhasePrograms:
    """What the phase computes, from its schedule on the devices; opens its teacher."""
    config, positions = run.config, None
    if phase.config.random_positions:
        positions = RandomPositions(phase.config.random_positions, (config.seed, phase.index))
    inputs = step_inputs_of(run, phase, previous, schedule, shardings)
    how = (run.models[phase.index], run.plan.optimizer(phase), run.mesh, run.rules, phase.config.accumulate, positions)
    train_step = compile_train_step(*how, config.compiler_options, run.plan.policy, inputs.distilled)
    every, replay = config.stability.replay_every, None
    if every:
        replay = Replay(every, *how, config.compiler_options, run.out.print, inputs.distilled)
    evaluators = [validation(run, phase, shardings, schedule)]
    if config.evaluation.every_steps:
        evaluators.append(suites(run, phase))
    return PhasePrograms(shardings, train_step, inputs, replay, evaluators, run.plan.flops(phase).plus(inputs.flops))


@contextlib.contextmanager
def _compiling(run: Run, phase: PhasePlan, first: bool) -> Iterator[None]:
    """The context of a step, whose first one compiles."""
    if not first:
        yield
        return
    with run.ledger.time("compile"), waiting(run.out, f"{phase.name}: compiling the first step", at_once=False):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Failed saves and bad steps


@contextlib.contextmanager
def _save_may_fail(run: Run, phase: PhasePlan, may: bool = True) -> Iterator[None]:
    """Prints the failure of a save, and lets training go on, where `checkpoint.on_failure` says so and it `may`."""
    try:
        yield
    except SaveFailed as failure:
        if not may or run.config.checkpoint.on_failure == "stop":
            raise
        run.out.print(f"{phase.name}: {failure} Training goes on.")


def _count_rewind(run: Run, phase: PhasePlan, rewinds: Rewinds) -> None:
    """Prints a rewind; `TrainingDiverged` if there were too many."""
    event = rewinds.last
    run.out.print(f"{phase.name}: {event.sentence}")
    if rewinds.in_a_row == MOST_REWINDS:
        raise TrainingDiverged(
            f"At {event.sentence} of '{phase.name}' for the {MOST_REWINDS + 1}th time without a new one. The batches "
            f"that were left out are in '{run.directory(phase) / 'spikes.jsonl'}'. Lower the learning rate, save more "
            "often (checkpoint.every_steps), or raise stability.spike_sigma."
        )
    rewinds.in_a_row += 1


def _refuse_or_warn(run: Run, phase: PhasePlan, event: Event, monitor: Monitor) -> None:
    """Prints a step that was warned of or skipped; `TrainingDiverged` if the run ends with it."""
    checkpoints = run.directory(phase) / DIRECTORY
    if event.action == "stop":
        raise TrainingDiverged(
            f"The loss is {event.loss} and the norm of its gradient {event.grad_norm} at step {event.step} of "
            f"'{phase.name}'. Checkpoints of earlier steps are in '{checkpoints}': lower "
            f"config.phases.{phase.index}.optimizer.learning_rate, and the same command goes on from the last one."
        )
    run.out.print(f"{phase.name}: {event.sentence}")
    if monitor.skips_in_a_row == MOST_SKIPS:
        raise TrainingDiverged(
            f"{MOST_SKIPS} updates in a row were skipped, up to step {event.step} of '{phase.name}'. Their batches are "
            f"in '{run.directory(phase) / 'spikes.jsonl'}', checkpoints of earlier steps in '{checkpoints}'. Lower the "
            "learning rate, or raise stability.spike_sigma."
        )


def _log_event(
    phase: PhasePlan, start: Start, pipeline: Pipeline, logs: PhaseLogs, event: Event, batches: Sequence[int]
) -> None:
    """Writes an event to metrics.jsonl, and what is in batches that were left out to spikes.jsonl."""
    logs.write("metrics", event.record(start.tokens_at(event.step, phase.tokens_per_step), batches))
    if jax.process_index() == 0 and event.action in ("skip", "rewind"):
        for batch in batches:
            for sequence in pipeline.sequences(batch):
                logs.write("spikes", {"step": event.step, "event": event.action, **sequence})
