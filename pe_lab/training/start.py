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

from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.checkpoints.locating import DIRECTORY, FORMER, first_line, lineage_entry, new_id
from pe_lab.checkpoints.store import Store, templates
from pe_lab.checkpoints.surgery import NOTHING, change, change_qk_norm, check_same_shape
from pe_lab.errors import CheckpointError, DataError, EncodingError, StoreError
from pe_lab.identity import change_text, changed, may_change
from pe_lab.model import Model, Params
from pe_lab.model.learned import carried
from pe_lab.positional import Schedule, check_sources, layer_hooks
from pe_lab.storage import AnyPath, exists, read_bytes, write_file
from pe_lab.training.extension import extension_text
from pe_lab.training.logs import checkpoint_metadata
from pe_lab.training.run import PhasePlan, Run, held_out_batches, open_pipeline
from pe_lab.training.stability import Monitor, skip_policy
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
        model,
        run.config.seed,
        shardings.state.params if parent.model.qk_norm == model.config.qk_norm else None,
    )
    what = "; ".join(filter(None, [what, learned]))
    parent = dataclasses.replace(parent, params=params)
    if parent.model.qk_norm != model.config.qk_norm:
        params, changed = _change_qk_norm(run, phase, parent, shardings, schedule)
        what = changed if what == NOTHING else f"{what}; {changed}"
    path = run.workdir / phase.name / DIRECTORY / "0"
    lineage = [*parent.metadata["lineage"], lineage_entry(what, new_id(), str(path), 0)]
    show(f"{phase.name}: from {parent.path}: {what}")
    store.save(0, params, None, checkpoint_metadata(run, phase, lineage, 0, None))
    store.wait()
    return Start(jax.jit(new_state, out_shardings=shardings.state)(params), 0, 0, lineage, None)


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
    if phase.config.extensions:
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
            lineage = metadata["lineage"] + [lineage_entry(changes, new_id(), metadata["lineage"][-1]["path"], step)]
        return Start(state, step, tokens, lineage, metadata["data_state"], judged, metadata.get("log"))
    raise CheckpointError(
        f"No checkpoint of '{store.directory.parent}' can be read. To train the phase again, rename that "
        f"directory. {reason}"
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
    text = extension_text(before["phases"][phase.index], phase.config)
    planned = re.compile(rf"phases\.{phase.index}\.(extensions\..*|steps)") if text else re.compile("$")
    others = change_text({key: values for key, values in found.items() if not planned.fullmatch(key)}, phase.index)
    return "; ".join(filter(None, [text, f"continued with {others}" if others else ""]))


def _set_former_aside(phase: PhasePlan, store: Store, show: Callable[[str], None]) -> None:
    """Moves the checkpoints that an extension does not go on from to `PHASE/former`, with a copy of the log."""
    at, extensions = phase.config.extensions[-1].at, len(phase.config.extensions)

    def former(step: int) -> bool:
        with contextlib.suppress(CheckpointError, LookupError):
            config = store.metadata(step)["config"]
            return len(config["phases"][phase.index].get("extensions", ())) < extensions
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
    with contextlib.closing(open_pipeline(run.config, phase, run.mesh)) as pipeline:
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
