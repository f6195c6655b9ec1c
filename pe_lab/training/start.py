"""The state that a phase starts with: its own last checkpoint, a child of another one, or random parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from pe_lab.checkpoints import open_checkpoint
from pe_lab.checkpoints.checkpoint import Checkpoint, new_id
from pe_lab.checkpoints.locating import DIRECTORY, first_line
from pe_lab.checkpoints.qk_norm import change_qk_norm
from pe_lab.checkpoints.store import Store, templates
from pe_lab.checkpoints.surgery import NOTHING, change, check_same_shape, lineage_entry
from pe_lab.config import changed, may_change
from pe_lab.errors import CheckpointError, DataError, StoreError
from pe_lab.model import Model, Params
from pe_lab.positional import Schedule
from pe_lab.storage import AnyPath
from pe_lab.training.logs import checkpoint_metadata
from pe_lab.training.run import PhasePlan, Run, held_out_batches, open_pipeline
from pe_lab.training.stability import Monitor, skip_policy
from pe_lab.training.step import Shardings, TrainState, init_state, place_batch


class Start(NamedTuple):
    """The state of a phase at the start of a session."""

    state: TrainState
    lineage: list[dict[str, Any]]  # of the phase's first state
    data_state: dict[str, Any] | None  # the position in the data; None: the beginning
    stability: dict[str, Any] | None = None  # the saved state of the `Monitor`; None: no step was judged
    log: dict[str, Any] | None = None  # the digest of metrics.jsonl at that step; None: not known


def start_phase(
    run: Run,
    phase: PhasePlan,
    previous: AnyPath | None,
    store: Store,
    optimizer: optax.GradientTransformation,
    shardings: Shardings,
    schedule: Schedule,
    show: Callable[[str], None],
) -> Start:
    """Reads or makes the state that a phase starts with.

    In this order: the last readable checkpoint in `store`, the phase's own; a child of `init_from` or of `previous`,
    the last checkpoint of the previous phase, which is saved as step 0; random parameters. The schedule is on the
    devices; `show` prints a line.

    Raises:
      CheckpointError: a checkpoint is damaged or does not fit.
      DataError: the data has changed since the previous phase.
    """
    model = run.models[phase.index]
    policy = skip_policy(run.config.stability)
    new_state = functools.partial(init_state, model, optimizer, policy=policy)  # from parameters
    if store.steps():
        return _resume(run, phase, store, model, new_state, shardings, show)
    source = phase.config.init_from or previous
    if not source or source == "random":
        make = jax.jit(lambda key: new_state(model.init(key)), out_shardings=shardings.state)
        entry = lineage_entry(f"initialized at random, seed {run.config.seed}", new_id(), "", 0)
        return Start(make(jax.random.key(run.config.seed)), [entry], None)

    parent = open_checkpoint(source, mesh=run.mesh, rules=run.rules)
    if source == previous:
        _check_same_data(run, phase, parent)
    check_same_shape(parent.model, model.config, f"The checkpoint '{parent.path}'", bool(phase.config.qk_norm))
    params, what = parent.params, change(parent.layers, phase.layers)
    if parent.model.qk_norm != model.config.qk_norm:
        params, changed = _change_qk_norm(run, phase, parent, shardings, schedule)
        what = changed if what == NOTHING else f"{what}; {changed}"
    path = run.workdir / phase.name / DIRECTORY / "0"
    lineage = [*parent.metadata["lineage"], lineage_entry(what, new_id(), str(path), 0)]
    show(f"{phase.name}: from {parent.path}: {what}")
    store.save(0, params, None, checkpoint_metadata(run, phase, lineage, None))
    store.wait()
    return Start(jax.jit(new_state, out_shardings=shardings.state)(params), lineage, None)


def _resume(
    run: Run,
    phase: PhasePlan,
    store: Store,
    model: Model,
    new_state: Callable[[Params], TrainState],
    shardings: Shardings,
    show: Callable[[str], None],
) -> Start:
    """The state of the last whole checkpoint. Later ones are moved away, and their steps trained again."""
    template = templates(jax.eval_shape(new_state, model.shapes), shardings.state)
    without_manifest = store.uncommitted()
    for step in sorted({*store.steps(), *without_manifest}, reverse=True):
        try:
            if step in without_manifest:
                raise CheckpointError("It has no manifest.")
            metadata = store.metadata(step)
            changes = _changes(run, phase, metadata)
            wanted = template.optimizer if step else None
            params, optimizer = store.restore(step, template.params, wanted, run.config.checkpoint.verify)
        except StoreError:
            raise  # it tells nothing of the checkpoint
        except Exception as error:
            reason = first_line(error)
            show(f"CHECKPOINT {step} of {phase.name} cannot be read, going back: {reason}")
            continue
        store.set_aside_after(step)
        show(f"{phase.name}: resuming at step {step}, {store.verified}")
        if step == 0:  # a child, which has no optimizer state
            return Start(jax.jit(new_state, out_shardings=shardings.state)(params), metadata["lineage"], None)
        judged = metadata.get("stability")
        history = Monitor(run.config.stability, judged).history if shardings.state.history else ()
        step_and_history = jax.device_put((np.int32(step), history), shardings.replicated)
        state = TrainState(step_and_history[0], params, optimizer, step_and_history[1])
        lineage = metadata["lineage"][:-1]  # the last entry has the steps so far, and is written anew
        if changes:
            show(f"{phase.name}: {changes}")
            lineage = metadata["lineage"] + [lineage_entry(changes, new_id(), metadata["lineage"][-1]["path"], step)]
        return Start(state, lineage, metadata["data_state"], judged, metadata.get("log"))
    raise CheckpointError(
        f"No checkpoint of '{store.directory.parent}' can be read. Delete that directory to train it again. {reason}"
    )


def _changes(run: Run, phase: PhasePlan, metadata: Mapping[str, Any]) -> str:
    """What has changed in the config since a checkpoint was written, as far as training goes on with it; "" if nothing.

    Raises:
      CheckpointError: the checkpoint is of another run, or of another phase.
    """
    if metadata["phase"] != phase.name:
        raise CheckpointError(f"It is of phase '{metadata['phase']}'.")
    before = metadata["config"]
    found = changed(before, run.config)
    other = [key for key in found if not may_change(key, len(before["phases"]))]
    if other:
        raise CheckpointError(
            f"It is of another run: its {other[0]} is {found[other[0]][0]}, not {found[other[0]][1]}."
        )
    mine = re.compile(rf"model\.|phases\.{phase.index}\.")
    texts = [f"{key} {old} -> {new}" for key, (old, new) in found.items() if mine.match(key)]
    return f"continued with {', '.join(texts)}" if texts else ""


def _check_same_data(run: Run, phase: PhasePlan, parent: Checkpoint) -> None:
    """Refuses data that has changed since the previous phase. Within a phase, the pipeline checks it."""
    before = dict(parent.metadata["data_state"]["data"])
    with contextlib.closing(open_pipeline(run.config, phase, run.mesh)) as pipeline:
        now = dict(pipeline.get_state()["data"])
    for about in (before, now):
        about["sources"] = [fingerprint for _, _, fingerprint in about["sources"]]  # names and weights may change
    for name in ("sources", "tokenizer"):
        if before[name] != now[name]:
            raise DataError(
                f"The data has changed since '{parent.metadata['phase']}': {name} was {before[name]}, is {now[name]}. "
                "Restore it, or start a new workdir."
            )


def _change_qk_norm(
    run: Run, phase: PhasePlan, parent: Checkpoint, shardings: Shardings, schedule: Schedule
) -> tuple[Params, str]:
    """The parent's parameters under this phase's QK-norm, fitted on a held-out batch; what was changed."""
    held_out = held_out_batches(run.config, phase, run.mesh, count=1)
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
