"""The training loop: one for every phase of every run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pe_lab.checkpoints import open_checkpoint
from pe_lab.checkpoints.qk_norm import change_qk_norm
from pe_lab.checkpoints.store import (
    DIRECTORY,
    Checkpoint,
    Store,
    first_line,
    new_id,
    templates,
)
from pe_lab.checkpoints.surgery import NOTHING, change, check_same_shape, lineage_entry
from pe_lab.data.pipeline import validation_batches
from pe_lab.errors import UserError
from pe_lab.model import train_flops_per_token
from pe_lab.positional import describe, label
from pe_lab.storage import write_json
from pe_lab.training.files import NoRows, Rows, TensorBoard
from pe_lab.training.machine import Peak
from pe_lab.training.optimizer import learning_rate, make_optimizer
from pe_lab.training.progress import TrainingProgress, console
from pe_lab.training.records import checkpoint_metadata, phase_facts
from pe_lab.training.run import PhasePlan, Run, attention_of
from pe_lab.training.step import (
    RandomPositions,
    TrainState,
    compile_loss,
    compile_train_step,
    init_state,
    make_shardings,
    place_batch,
)


class Stopped(Exception):
    """SIGTERM came: the state is saved, and the same command goes on from it."""


def train_phase(run: Run, phase: PhasePlan, previous: Path | None, peak: Peak) -> Path:
    """Trains one phase to its end, from wherever its files say it is; returns its last checkpoint.

    Args:
      run: the run.
      phase: one of `run.phases`.
      previous: the last checkpoint of the phase before, if there is one.
      peak: what MFU is measured against.

    Raises:
      Stopped: after SIGTERM, once everything is saved.
      UserError: the checkpoint to start from does not fit, the loss is not a number.
    """
    directory = run.workdir / phase.name
    store = Store(directory / DIRECTORY, keep=run.config.checkpoint.keep)
    try:
        if phase.config.steps in store.steps():
            console().print(f"[bold]{phase.name}[/]: complete at step {phase.config.steps}, nothing to do")
            _mark_complete(directory / "phase.json")
            return directory / DIRECTORY / str(phase.config.steps)
        return _PhaseTraining(run, phase, previous, peak, store).run()
    finally:
        store.close()


def _mark_complete(facts: Path) -> None:
    """For a process that died after its last checkpoint and before it could say so."""
    if jax.process_index() == 0 and facts.exists():
        known = json.loads(facts.read_text())
        if known["status"] != "complete":
            write_json(facts, {**known, "status": "complete"})


class _PhaseTraining:
    """The state of `train_phase`, split into steps that read in order: start, loop, save."""

    def __init__(self, run: Run, phase: PhasePlan, previous: Path | None, peak: Peak, store: Store):
        self.run_, self.phase, self.previous, self.peak, self.store = run, phase, previous, peak, store
        self.out = console()
        self.directory = run.workdir / phase.name
        self.model = run.models[phase.index]
        self.optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, self.model.axes)
        self.shardings = make_shardings(self.model, self.optimizer, run.mesh, run.rules)
        self.schedule = jax.device_put(phase.schedule, self.shardings.replicated)
        self.flops = train_flops_per_token(self.model.config, phase.config.sequence_length, phase.schedule.structure)
        self.rate = learning_rate(phase.config.optimizer, phase.config.steps)
        self.first = jax.process_index() == 0
        self.lineage: list[dict[str, Any]] = []  # of the phase's start
        self.saved_lineage: list[dict[str, Any]] | None = None  # of the checkpoint saved last

    # -- start ---------------------------------------------------------------------------------------------------

    def start(self) -> tuple[TrainState, list[dict[str, Any]], dict[str, Any] | None]:
        """The state to begin with, its lineage, and the data position (None: from the beginning)."""
        shapes = jax.eval_shape(lambda p: init_state(self.model, self.optimizer, p), self.model.shapes)
        template = templates(shapes, self.shardings.state)
        for step in reversed(self.store.steps()):
            try:
                metadata = self.store.metadata(step)
                params, optimizer = self.store.restore(step, template.params, template.optimizer if step else None)
            except Exception as error:
                # No markup: a reason may hold brackets of its own.
                said = f"checkpoint {step} of {self.phase.name} cannot be read, going back ({first_line(error)})"
                self.out.print(said, style="yellow", markup=False)
                continue
            self.store.set_aside_after(step)
            self.out.print(f"[bold]{self.phase.name}[/]: resuming at step {step}")
            if optimizer is None:
                return self._fresh(params), metadata["lineage"], None
            state = TrainState(jax.device_put(np.int32(step), self.shardings.replicated), params, optimizer)
            return state, metadata["lineage"][:-1], metadata["data_state"]
        if self.store.steps():
            raise UserError(
                f"No checkpoint of '{self.directory}' can be read. Delete that directory to train it again."
            )
        source = self.phase.config.init_from or self.previous
        if not source or source == "random":
            return self._random()
        parent = open_checkpoint(source, mesh=self.run_.mesh, rules=self.run_.rules)
        if source == self.previous:
            self._check_same_data(parent)
        return self._child(parent)

    def _check_same_data(self, parent: Checkpoint) -> None:
        """Refuses a corpus that has changed since the phase before: the pipeline itself looks within a phase only."""
        before = parent.metadata["data_state"]["data"]
        now = self.run_.pipeline(self.phase).get_state()["data"]
        for name in ("sources", "tokenizer"):
            if before[name] != now[name]:
                raise UserError(
                    f"The data has changed since '{parent.metadata['phase']}': {name} was {before[name]}, is "
                    f"{now[name]}. Bring it back as it was, or start a new workdir."
                )

    def _fresh(self, params: Any) -> TrainState:
        """A state at step 0 around given parameters."""
        make = jax.jit(lambda p: init_state(self.model, self.optimizer, p), out_shardings=self.shardings.state)
        return make(params)

    def _random(self) -> tuple[TrainState, list[dict[str, Any]], None]:
        make = jax.jit(
            lambda key: init_state(self.model, self.optimizer, self.model.init(key)),
            out_shardings=self.shardings.state,
        )
        what = f"initialized at random, seed {self.run_.config.seed}"
        return make(jax.random.key(self.run_.config.seed)), [lineage_entry(what, new_id(), "", 0)], None

    def _child(self, parent: Checkpoint) -> tuple[TrainState, list[dict[str, Any]], None]:
        """Surgery at the border of two phases: a child checkpoint with the new encodings, then a fresh optimizer."""
        own_norm = bool(self.phase.config.qk_norm)
        check_same_shape(parent.model, self.model.config, f"The checkpoint '{parent.path}'", own_norm)
        params, what = parent.params, change(parent.layers, self.phase.layers)
        if parent.model.qk_norm != self.model.config.qk_norm:
            params, told = self._change_qk_norm(parent)
            what = told if what == NOTHING else f"{what}; {told}"
        child = new_id()
        lineage = [*parent.metadata["lineage"], lineage_entry(what, child, str(self._path(0)), 0)]
        self.out.print(f"[bold]{self.phase.name}[/]: from {parent.path}: {what}")
        self._save(0, params, None, child, lineage, None)
        self.store.wait()
        return self._fresh(params), lineage, None

    def _change_qk_norm(self, parent: Checkpoint) -> tuple[Any, str]:
        """The parent's parameters under this phase's QK-norm, fitted on a batch of held-out text; what it did."""
        batches = self._held_out(count=1)
        batch = next((found[0] for found in batches.values() if found), None)
        if batch is None:
            raise UserError(f"Changing the QK-norm of '{parent.path}' needs held-out text; its data holds none out.")
        model = dataclasses.replace(self.model.config, qk_norm=parent.model.qk_norm)
        _, params, told = change_qk_norm(
            model,
            parent.params,
            self.phase.qk_norm,
            self.schedule,
            place_batch(batch, self.shardings.batch),
            lambda _: (self.shardings.state.params, self.shardings.replicated),
            self.phase.config.qk_norm_init,
        )
        return params, str(told)

    # -- loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        run, phase, config = self.run_, self.phase, self.run_.config
        self.directory.mkdir(parents=True, exist_ok=True)
        state, self.lineage, data_state = self.start()
        step = started = int(state.step)
        pipeline = run.pipeline(phase)
        if data_state is not None:
            pipeline.set_state(data_state)
        metrics, speed = (
            Rows(self.directory / f"{n}.jsonl", step) if self.first else NoRows() for n in ("metrics", "speed")
        )
        board = TensorBoard(self.directory / "tensorboard", step) if self.first else NoRows()
        self._write_facts("running", started, 0.0)
        self.out.print(describe(phase.schedule, phase.layers))
        self.out.print(f"attention: {attention_of(self.model, phase, config, run.mesh, run.rules)}")
        if phase.config.random_positions:
            self.out.print(f"positions drawn below {phase.config.random_positions:,}, anew each step")

        train_step = compile_train_step(
            self.model, self.optimizer, run.mesh, run.rules, phase.config.accumulate, self._random_positions()
        )
        validate = self._validation()
        steps, every = phase.config.steps, config.log.every_steps
        before = sum(p.config.steps for p in run.phases[: phase.index])
        last: dict[str, float] = {}
        pending: tuple[int, Any] | None = None
        clock, clock_step, began = time.perf_counter(), step, time.perf_counter()
        progress = TrainingProgress(self.out, phase.name, step, steps)

        def write(row: dict[str, Any]) -> None:
            metrics.write(row)
            board.write(row)

        def settle() -> None:
            """Writes the metrics of the step dispatched last; waits for it."""
            nonlocal pending
            if pending is None:
                return
            at, values = pending
            pending = None
            last.update({name: float(value) for name, value in jax.device_get(values).items()})
            if not all(map(math.isfinite, last.values())):
                raise UserError(
                    f"The loss is {last['loss']} and its gradient's norm {last['grad_norm']} at step {at} of "
                    f"'{phase.name}'. Checkpoints before it are in "
                    f"'{self.directory / DIRECTORY}'. Lower the learning rate, or set model.qk_norm=head."
                )
            if at % every == 0 or at == steps:
                rate = float(self.rate(at - 1))
                write({"step": at, "tokens": at * phase.tokens_per_step, **last, "learning_rate": rate})

        with _sigterm() as stop_requested:
            try:
                if step == 0:
                    write({"step": 0, "tokens": 0, **validate(state.params)})
                while step < steps:
                    batch = place_batch(next(pipeline), self.shardings.batch)
                    state, values = train_step(state, batch, self.schedule)
                    step += 1
                    settle()  # of the step before: this one is already under way
                    pending = (step, values)
                    now = time.perf_counter()
                    if step == started + 1:
                        jax.block_until_ready(values)  # the first step compiles; its time is not speed
                        clock, clock_step = time.perf_counter(), step
                    elif now - clock > 1.0 or step == steps:
                        row = self._speed(step, step - clock_step, now - clock, now - began)
                        speed.write(row)
                        board.write(row)
                        clock, clock_step = now, step
                        left = (steps - step) * phase.tokens_per_step / max(row["tokens_per_second"], 0.1)
                        progress.update(
                            step, last.get("loss", math.nan), row["tokens_per_second"], row["mfu_causal"], left
                        )
                    if step % config.log.validate_every_steps == 0 or step == steps:
                        settle()
                        write({"step": step, "tokens": step * phase.tokens_per_step, **validate(state.params)})
                    stopping = stop_requested(before + step)
                    if step % config.checkpoint.every_steps == 0 or step == steps or stopping:
                        settle()  # the log on disk is never behind the checkpoint
                        self._save(step, state.params, state.optimizer, new_id(), None, pipeline.get_state())
                    if stopping:
                        break
                self.store.wait()
                if step == steps:
                    self._write_facts("complete", started, time.perf_counter() - began)
                    stopping = stop_requested(before + step)  # asked for while the last checkpoint was written
                if stopping:
                    raise Stopped(
                        f"stopped at step {step} of {steps} of phase '{phase.name}', saved; the same command goes on"
                    )
            finally:
                progress.close()
                pipeline.close()
                for writer in (metrics, speed, board):
                    writer.close()
        return self._path(steps)

    def _random_positions(self) -> RandomPositions | None:
        if not self.phase.config.random_positions:
            return None
        return RandomPositions(self.phase.config.random_positions, (self.run_.config.seed, self.phase.index))

    def _speed(self, step: int, steps: int, seconds: float, total: float) -> dict[str, Any]:
        rate = steps * self.phase.tokens_per_step / seconds
        known = self.peak.flops > 0
        return {
            "step": step,
            "seconds": round(total, 3),
            "tokens_per_second": round(rate, 1),
            "mfu_full": round(rate * self.flops.full / self.peak.flops, 4) if known else None,
            "mfu_causal": round(rate * self.flops.causal / self.peak.flops, 4) if known else None,
        }

    def _validation(self) -> Any:
        """A function from parameters to {"validation_loss": ..., "validation_loss/SOURCE": ...}."""
        held_out = self._held_out(self.run_.config.log.validation_batches)
        loss = compile_loss(self.model, self.run_.mesh, self.run_.rules, self.shardings)

        def validate(params: Any) -> dict[str, float]:
            total, weight, row = 0.0, 0.0, {}
            for source, batches in held_out.items():
                sums = [loss(params, place_batch(b, self.shardings.batch), self.schedule) for b in batches]
                nats, weights = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
                row[f"validation_loss/{source}"] = float(nats / weights)
                total, weight = total + nats, weight + weights
            return {"validation_loss": float(total / weight), **row} if weight else {}

        return validate

    def _held_out(self, count: int) -> dict[str, list[Any]]:
        """Batches of held-out text by source, as many as there are up to `count`, shaped as in training."""
        phase, run = self.phase.config, self.run_
        return validation_batches(
            run.config.data,
            sequence_length=phase.sequence_length,
            batch_size=phase.batch_size // phase.accumulate,
            count=count,
            process_index=run.share[0],
            process_count=run.share[1],
        )

    # -- save ----------------------------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self.directory / DIRECTORY / str(step)

    def _save(self, step: int, params: Any, optimizer: Any, checkpoint_id: str, lineage: Any, data_state: Any) -> None:
        run, phase = self.run_, self.phase
        if lineage is None:
            encodings = ", ".join(dict.fromkeys(label(layer) for layer in phase.layers))
            what = f"trained {step} steps of '{phase.name}' with {encodings}"
            lineage = [*self.lineage, lineage_entry(what, checkpoint_id, str(self._path(step)), step)]
            self.saved_lineage = lineage
        metadata = checkpoint_metadata(run, phase, checkpoint_id, step, lineage, data_state)
        self.store.save(step, params, optimizer, metadata)

    def _write_facts(self, status: str, started: int, seconds: float) -> None:
        """phase.json, for the report."""
        if self.first:
            lineage = self.saved_lineage or self.lineage
            facts = phase_facts(self.run_, self.phase, status, started, seconds, self.flops, self.peak, lineage)
            write_json(self.directory / "phase.json", facts)


@contextlib.contextmanager
def _sigterm() -> Iterator[Any]:
    """Yields a function of the run's step: has a stop been asked for? All processes of a run hear the same answer.

    The step counts through all phases: processes agree on one to stop at, and it may lie in the next phase.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # jax.distributed catches SIGTERM on any host and agrees on a step that all of them reach.
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        yield lambda step: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)
