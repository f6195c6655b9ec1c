"""How far each cell of a sweep is, read from its files, and what a sweep shows while it runs."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab import terminal
from pe_lab.config import Config
from pe_lab.errors import UserError
from pe_lab.lab.sweeps.cells import LOGS, Sweep, SweepCell
from pe_lab.results.formatting import count, shortened
from pe_lab.results.records import number
from pe_lab.storage import AnyPath, is_remote, json_object, owner_lives, read_bytes, read_log

# complete, and evaluated if that was asked for; running, here or elsewhere; queued on a cluster; stopped or killed, and
# resumed by the same command; failed, and trained again with --retry; not begun
COMPLETE, RUNNING, QUEUED, STOPPED, FAILED, WAITING = "complete", "running", "queued", "stopped", "FAILED", "waiting"
# Statuses of a process that was asked to end, or ended from outside: SIGHUP, SIGINT, SIGKILL, SIGTERM.
_FROM_OUTSIDE = (1, 2, 9, 15)
INTERRUPTED = frozenset({os.EX_TEMPFAIL, *(-n for n in _FROM_OUTSIDE), *(128 + n for n in _FROM_OUTSIDE)})
RENEWED_LATELY = 600.0  # seconds, by the clocks of two hosts; a lease is renewed every 15
_TAIL = 2**14  # bytes of a log that has the last records


@dataclass(frozen=True)
class CellState:
    """A cell's state, one of the constants above; how far it is; and why it failed.

    Attributes:
      step, steps: trained, and to be trained, over all phases.
      loss: the last training loss that was logged, in nats per token.
      error: the last line of an error; "" without one.
      status: of the process that failed or was stopped; None if none has ended.
    """

    cell: SweepCell
    state: str
    step: int = 0
    steps: int = 0
    loss: float | None = None
    error: str = ""
    status: int | None = None


def file_of(directory: AnyPath, name: str, kind: str) -> AnyPath:
    """The file of a cell in the sweep's logs: its `log`, the `json` of its last outcome, or its `lease`."""
    return directory / LOGS / f"{name}.{kind}"


def read_outcome(directory: AnyPath, name: str) -> dict[str, Any]:
    """How the last process of a cell ended; {} if none has, or the file is damaged."""
    with contextlib.suppress(FileNotFoundError):
        return json_object(read_bytes(file_of(directory, name, "json"))) or {}
    return {}


def has_failed(outcome: Mapping[str, Any]) -> bool:
    """Whether the last process of a cell ended with a failure, and was not interrupted."""
    status = outcome.get("status")
    return isinstance(status, int) and status != 0 and status not in INTERRUPTED


def is_trained(directory: AnyPath, phases: Mapping[str, int]) -> bool:
    """Whether all phases, {name: steps}, of a run are complete; one that was trained until a later step has more."""
    for name, steps in phases.items():
        try:
            found = json_object(read_bytes(directory / name / "phase.json")) or {}
        except (FileNotFoundError, NotADirectoryError):
            return False
        if found.get("status") != "complete" or (number(found, "steps") or 0) < steps:
            return False
    return True


def is_complete(
    directory: AnyPath, name: str, phases: Mapping[str, int], evaluation: Collection[str] | None, outcome: Mapping
) -> bool:
    """Whether a cell is trained, and evaluated with these options if any."""
    evaluated = evaluation is None or list(evaluation) in (outcome.get("evaluated") or [])
    return evaluated and is_trained(directory / name, phases)


def phases_of(cell: SweepCell) -> dict[str, int]:
    """{name: steps} of the phases of a cell; 0 where the data decide, as the steps of an epoch."""
    return {phase.name: 0 if phase.epochs else phase.steps for phase in cell.config.phases}


def read_states(
    sweep: Sweep,
    running: Collection[str] = (),
    queued: Collection[str] = (),
    known: Mapping[str, CellState] | None = None,
) -> list[CellState]:
    """The states of all cells of a sweep.

    Args:
      running: the names of cells that this process knows to run; other processes' leases are read.
      queued: those that wait in a cluster's queue.
      known: states that are final, and not read again.
    """
    known = known or {}
    return [known.get(cell.name) or _read_state(sweep, cell, running, queued) for cell in sweep.cells]


def _read_state(sweep: Sweep, cell: SweepCell, running: Collection[str], queued: Collection[str]) -> CellState:
    outcome, phases = read_outcome(sweep.directory, cell.name), phases_of(cell)
    step, loss = _progress(sweep.directory / cell.name, phases)
    steps = max(step, sum(phases.values()))
    status = outcome.get("status") if isinstance(outcome.get("status"), int) else None
    evaluation = sweep.evaluation if cell.name in sweep.names else None
    if cell.name in running or _is_held(file_of(sweep.directory, cell.name, "lease")):
        return CellState(cell, RUNNING, step, steps, loss)
    if is_complete(sweep.directory, cell.name, phases, evaluation, outcome):
        return CellState(cell, COMPLETE, steps, steps, loss)
    if cell.name in queued:
        return CellState(cell, QUEUED, step, steps, loss)
    if has_failed(outcome):
        return CellState(cell, FAILED, step, steps, loss, str(outcome.get("error", "")), status)
    if status is not None or step:
        return CellState(cell, STOPPED, step, steps, loss, str(outcome.get("error", "")), status)
    return CellState(cell, WAITING, 0, steps)


def _is_held(path: AnyPath) -> bool:
    """Whether a lease looks live: its process is alive or, where that cannot be told, has renewed it lately."""
    try:
        owner = json_object(read_bytes(path)) or {}
    except FileNotFoundError:
        return False
    if (lives := owner_lives(owner)) is not None:
        return lives
    with contextlib.suppress(TypeError, ValueError):
        renewed = datetime.datetime.fromisoformat(owner.get("time"))
        return (datetime.datetime.now(datetime.UTC) - renewed).total_seconds() < RENEWED_LATELY
    return False


def _progress(directory: AnyPath, phases: Mapping[str, int]) -> tuple[int, float | None]:
    """(the last step over all phases, its loss) by the logs of a run."""
    before = sum(phases.values())
    for name, steps in reversed(phases.items()):
        before -= steps
        for line in reversed(_last_lines(directory / name / "metrics.jsonl")):
            record = json_object(line) or {}
            step, loss = number(record, "step"), number(record, "loss")
            if step is not None and loss is not None and "event" not in record:
                return before + int(step), loss
    return 0, None


def _last_lines(path: AnyPath) -> list[bytes]:
    """The last whole lines of a log."""
    try:
        if is_remote(path):
            content = read_log(path)
        else:
            with open(path, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
                content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return content[: content.rfind(b"\n") + 1].splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

ORDER = (RUNNING, FAILED, STOPPED, QUEUED, WAITING, COMPLETE)
NAME = 72  # characters of a cell's name in a table


class Board:
    """Shows the states of the cells: a table in a terminal, elsewhere a line for each change and every ten seconds."""

    def __init__(self, out: Any, live: terminal.LiveText):
        self._out, self._live = out, live
        self._before: dict[str, str] | None = None

    def __call__(self, states: Sequence[CellState]) -> None:
        """Shows these states."""
        now = {state.cell.name: state.state for state in states}
        for state in states:
            name = state.cell.name
            if self._before is not None and self._before.get(name) != state.state:
                self._out.print(line(state))
        self._before = now
        running = [state for state in states if state.state == RUNNING]
        self._live.update(
            f"{counts(states)}\n{table(states)}",
            f"{counts(states)}{': ' if running else ''}{'; '.join(map(short, running[:4]))}",
        )


def counts(states: Sequence[CellState]) -> str:
    """`3 of 12 cells complete, 2 running`."""
    found = Counter(state.state for state in states)
    others = [f"{found[state]} {state}" for state in ORDER if found[state] and state != COMPLETE]
    return ", ".join([f"{found[COMPLETE]} of {len(states)} cells complete", *others])


def short(state: CellState) -> str:
    """`NAME step 120/300 loss 3.21`."""
    loss = "" if state.loss is None else f" loss {state.loss:.4g}"
    return f"{state.cell.name} step {state.step}/{state.steps}{loss}"


def line(state: CellState) -> str:
    """A line about a cell whose state has changed."""
    return f"{state.state:8}  {short(state)}{f': {state.error}' if state.error else ''}"


def table(states: Sequence[CellState]) -> str:
    """All cells, those that run first."""
    rows = [
        [
            shortened(state.cell.name, NAME),
            state.state,
            f"{state.step}/{state.steps}",
            "" if state.loss is None else f"{state.loss:.4f}",
        ]
        for state in sorted(states, key=lambda state: ORDER.index(state.state))
    ]
    return terminal.table(["cell", "state", "step", "loss"], rows, words=2)


def failures(sweep: Sweep, states: Sequence[CellState]) -> list[str]:
    """A line for each cell that has failed: the status, the error, and the file of its log."""
    return [
        f"FAILED {state.cell.name}, status {state.status}: {state.error} "
        f"(log: {file_of(sweep.directory, state.cell.name, 'log')})"
        for state in states
        if state.state == FAILED
    ]


def planned(config: Config) -> dict[str, float]:
    """Parameters, tokens and FLOPs of a run; NaN where they cannot be known yet, since data are not prepared."""
    from pe_lab.parallel.sharding import AXES
    from pe_lab.parallel.topology import parse_topology
    from pe_lab.planning.plan import make_plan

    fixed = math.prod(max(getattr(config.mesh, axis), 1) for axis in AXES)  # the fewest devices that the mesh divides
    try:
        plan = make_plan(config, parse_topology(f"h100:{fixed}" if fixed > 1 else "cpu:1"))
    except UserError:
        return dict.fromkeys(("parameters", "tokens", "flops"), math.nan)
    return {
        "parameters": plan.model.num_parameters,
        "tokens": sum(phase.tokens for phase in plan.phases),
        "flops": sum(phase.total_flops for phase in plan.phases),
    }


def planned_texts(numbers: Mapping[str, float]) -> list[str]:
    """The numbers of `planned` for a table."""
    if math.isnan(numbers["flops"]):
        return ["?"] * 3
    return [count(numbers["parameters"]), count(numbers["tokens"]), f"{numbers['flops']:.2e}"]


def cost(sweep: Sweep, states: Sequence[CellState]) -> str:
    """The cells that are asked for, with parameters, training tokens and FLOPs, and the sum of what is not complete."""
    asked = [(state, planned(state.cell.config)) for state in states if state.cell.name in sweep.names]
    rows = [[state.cell.name, state.state, *planned_texts(numbers)] for state, numbers in asked]
    left = [numbers for state, numbers in asked if state.state != COMPLETE]
    known = [numbers for numbers in left if not math.isnan(numbers["flops"])]
    tokens, flops = (sum(numbers[key] for numbers in known) for key in ("tokens", "flops"))
    least = "" if len(known) == len(left) else "at least "
    tail = f"{len(left)} cells to train: {least}{count(tokens)} tokens, {least}{flops:.2e} FLOPs"
    return f"{terminal.table(['cell', 'state', 'parameters', 'tokens', 'FLOPs'], rows, words=2)}\n{tail}"
