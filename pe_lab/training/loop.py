"""The training loop: one function for every phase of every run."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pe_lab.checkpoints.locating import DIRECTORY
from pe_lab.checkpoints.store import Retention, Store, new_id
from pe_lab.checkpoints.surgery import lineage_entry
from pe_lab.errors import TrainingDiverged
from pe_lab.model import Params, train_flops_per_token
from pe_lab.positional import Schedule, describe, label
from pe_lab.terminal import Progress, console
from pe_lab.training.logs import PhaseLogs, checkpoint_metadata, mark_complete, speed_record, speed_text, write_phase
from pe_lab.training.machine import Peak
from pe_lab.training.optimizer import learning_rate, make_optimizer
from pe_lab.training.profiling import Profiler, StepTimes
from pe_lab.training.run import PhasePlan, Run, attention_of, held_out_batches, open_pipeline
from pe_lab.training.start import start_phase
from pe_lab.training.step import (
    RandomPositions,
    Shardings,
    compile_loss,
    compile_train_step,
    make_shardings,
    place_batch,
)


class Stopped(Exception):
    """A SIGTERM was received. The state is saved, and the same command continues from it."""


def train_phase(run: Run, phase: PhasePlan, previous: Path | None, peak: Peak, profiler: Profiler) -> Path:
    """Trains one phase from the state of its files to its end, and returns its last checkpoint.

    `previous` is the last checkpoint of the previous phase, if there is one; MFU is a fraction of `peak`. The profiler
    counts the steps of all phases.

    Raises:
      Stopped: a SIGTERM was received, and everything is saved.
      TrainingDiverged: the loss or its gradient is not finite.
      CheckpointError: the checkpoint to start from is damaged or does not fit.
      DataError: the data has changed since the previous session.
    """
    config, steps, directory = run.config, phase.config.steps, run.workdir / phase.name
    out = console(quiet=jax.process_index() != 0)
    saved = config.checkpoint
    store = Store(directory / DIRECTORY, Retention(saved.keep, saved.keep_every, saved.milestones, saved.best))
    with contextlib.closing(store):
        if steps in store.steps():
            damage = store.damage(steps) if config.checkpoint.verify else ""
            if not damage:
                out.print(f"{phase.name}: complete at step {steps}, nothing to do")
                mark_complete(directory)
                return directory / DIRECTORY / str(steps)
            out.print(f"{phase.name}: checkpoint {steps} is damaged: {damage}")

        model = run.models[phase.index]
        optimizer = make_optimizer(phase.config.optimizer, steps, model.axes)
        rate = learning_rate(phase.config.optimizer, steps)
        shardings = make_shardings(model, optimizer, run.mesh, run.rules)
        schedule = jax.device_put(phase.schedule, shardings.replicated)
        flops = train_flops_per_token(model.config, phase.config.sequence_length, phase.schedule.structure)
        state, start_lineage, data_state = start_phase(
            run, phase, previous, store, optimizer, shardings, schedule, out.print
        )
        lineage = start_lineage  # of the checkpoint read or saved last
        out.print(describe(phase.schedule, phase.layers))
        out.print(f"attention: {attention_of(model, phase, config, run.mesh, run.rules)}")
        if "auto" in (config.model.remat, config.model.loss_chunks):
            out.print(f"chosen for these devices: remat {model.config.remat}, loss_chunks {model.config.loss_chunks}")
        positions = None
        if phase.config.random_positions:
            positions = RandomPositions(phase.config.random_positions, (config.seed, phase.index))
            out.print(f"positions drawn below {phase.config.random_positions:,}, anew each step")
        train_step = compile_train_step(
            model, optimizer, run.mesh, run.rules, phase.config.accumulate, positions, config.compiler_options
        )
        validate = _validation(run, phase, shardings, schedule)
        encodings = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
        earlier_steps = sum(p.config.steps for p in run.phases[: phase.index])

        started = step = timed_step = int(state.step)
        pending: list[tuple[int, dict[str, jax.Array]]] = []  # the step dispatched last, and its metrics
        last: dict[str, float] = {}  # the metrics received last
        times = StepTimes()
        began = timer = time.perf_counter()
        with (
            _stop_requests() as stop_requested,
            contextlib.closing(open_pipeline(config, phase, run.mesh, data_state)) as pipeline,
            contextlib.closing(PhaseLogs(directory, step)) as logs,
            Progress(out, phase.name, steps, step) as progress,
        ):
            write_phase(run, phase, flops, peak, lineage, "running", started, 0.0)

            def settle() -> None:
                """Waits for the metrics of the step dispatched last, and logs them."""
                while pending:
                    at, metrics = pending.pop()
                    with times.wait("device"):
                        received = jax.device_get(metrics)
                    last.update({name: float(value) for name, value in received.items()})
                    if not all(map(math.isfinite, last.values())):
                        raise TrainingDiverged(
                            f"The loss is {last['loss']} and the norm of its gradient {last['grad_norm']} at step {at} "
                            f"of '{phase.name}'. Checkpoints of earlier steps are in '{directory / DIRECTORY}': lower "
                            f"config.phases.{phase.index}.optimizer.learning_rate, and the same command goes on from "
                            "the last one."
                        )
                    if at % config.log.every_steps == 0 or at == steps:
                        record = {"step": at, "tokens": at * phase.tokens_per_step, **last}
                        logs.write("metrics", {**record, "learning_rate": float(rate(at - 1))})

            progress.update(step, f"{step}/{steps}  compiling")
            if step == 0:
                logs.write("metrics", {"step": 0, "tokens": 0, **validate(state.params)})
            stopping = False
            while step < steps and not stopping:
                with profiler.begin(step + 1):
                    with times.wait("input"):
                        batch = place_batch(next(pipeline), shardings.batch)
                    state, metrics = train_step(state, batch, schedule)
                step += 1
                settle()  # the metrics of the previous step, while this one runs
                pending.append((step, metrics))
                if profiled := profiler.end(metrics, directory):
                    out.print(profiled)

                now = time.perf_counter()
                if step == started + 1:
                    jax.block_until_ready(metrics)  # the first step compiles: its time is no measure of speed
                    timer, timed_step = time.perf_counter(), step
                    times = StepTimes()
                elif now - timer > 1.0 or step == steps:
                    split = times.split(step - timed_step, now - timer)
                    speed = speed_record(phase, flops, peak, step, step - timed_step, now - timer, now - began, split)
                    logs.write("speed", speed)
                    shown = f"loss {last.get('loss', math.nan):.4f}  {speed_text(speed)}"
                    progress.update(step, f"{step}/{steps}  {shown}")
                    timer, timed_step = now, step

                if step % config.log.validate_every_steps == 0 or step == steps:
                    settle()
                    with times.wait("validation"):
                        losses = validate(state.params)
                    logs.write("metrics", {"step": step, "tokens": step * phase.tokens_per_step, **losses})

                stopping = stop_requested(earlier_steps + step)
                due = step % config.checkpoint.every_steps == 0 or step in config.checkpoint.milestones
                if due or step == steps or stopping:
                    settle()  # the log on disk is never behind the checkpoint
                    what = f"trained {step} steps of '{phase.name}' with {encodings}"
                    path = directory / DIRECTORY / str(step)
                    lineage = [*start_lineage, lineage_entry(what, new_id(), str(path), step)]
                    metadata = checkpoint_metadata(run, phase, lineage, pipeline.get_state())
                    with times.wait("checkpoint"):
                        store.save(step, state.params, state.optimizer, metadata)
            store.wait()
            if profiled := profiler.close(directory):
                out.print(profiled)
            if step == steps:
                out.print(f"{phase.name}: complete at step {steps}, loss {last['loss']:.4f}")
                write_phase(run, phase, flops, peak, lineage, "complete", started, time.perf_counter() - began)
                stopping = stop_requested(earlier_steps + step)  # requested while the last checkpoint was written
        if stopping:
            raise Stopped(f"stopped at step {step} of {steps} of phase '{phase.name}', saved; run it again to continue")
    return directory / DIRECTORY / str(steps)


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


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[int], Any]]:
    """Yields a function of the run's step that tells whether a SIGTERM was received, alike on all processes.

    The step counts through all phases: processes agree on a step to stop at, and it may lie in the next phase.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # jax.distributed catches SIGTERM on any host and agrees on a step that all of them reach.
        yield multihost_utils.reached_preemption_sync_point
        return
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    try:
        yield lambda step: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)
