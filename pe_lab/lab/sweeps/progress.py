"""What a sweep shows while it runs, and the list of its cells before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab import terminal
from pe_lab.errors import UserError
from pe_lab.lab.sweeps.cells import Sweep
from pe_lab.lab.sweeps.state import COMPLETE, FAILED, QUEUED, RUNNING, STOPPED, WAITING, CellState, file_of
from pe_lab.results.formatting import count, shortened

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


def cost(sweep: Sweep, states: Sequence[CellState]) -> str:
    """The cells that are asked for, with parameters, training tokens and FLOPs, and the sum of what is not complete."""
    from pe_lab.parallel.topology import parse_topology
    from pe_lab.planning.plan import make_plan

    rows, known, total = [], True, Counter()
    for state in (state for state in states if state.cell.name in sweep.names):
        numbers: Mapping[str, float] = {}
        try:
            plan = make_plan(state.cell.config, parse_topology("cpu:1"))
        except UserError:  # its data is not prepared yet, or its mesh needs more devices
            known = False
        else:
            numbers = {
                "parameters": plan.model.num_parameters,
                "tokens": sum(phase.tokens for phase in plan.phases),
                "FLOPs": sum(phase.total_flops for phase in plan.phases),
            }
            if state.state != COMPLETE:
                total.update({key: numbers[key] for key in ("tokens", "FLOPs")})
        shown = [count(numbers[key]) if key in numbers else "?" for key in ("parameters", "tokens")]
        flops = f"{numbers['FLOPs']:.2e}" if numbers else "?"
        rows.append([state.cell.name, state.state, *shown, flops])
    left = sum(row[1] != COMPLETE for row in rows)
    least = "" if known else "at least "
    tail = f"{left} cells to train: {least}{count(total['tokens'])} tokens, {least}{total['FLOPs']:.2e} FLOPs"
    return f"{terminal.table(['cell', 'state', 'parameters', 'tokens', 'FLOPs'], rows, words=2)}\n{tail}"
