"""Running cells as processes: one cell under its lease, and all cells of a sweep by a runner."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pe_lab.errors import StoreError, UserError, excerpt, redacted
from pe_lab.identity import LEASE_FILE
from pe_lab.lab.sweeps.cells import Sweep, save_sweep
from pe_lab.lab.sweeps.stacking import Stacking, stack_cells
from pe_lab.lab.sweeps.state import (
    COMPLETE,
    FAILED,
    CellState,
    file_of,
    has_failed,
    is_complete,
    is_trained,
    phases_of,
    read_outcome,
    read_states,
)
from pe_lab.output import tell_at_once
from pe_lab.storage import (
    AnyPath,
    LeaseTaken,
    is_remote,
    lease,
    lease_is_live,
    path,
    read_bytes,
    read_json,
    write_file,
    write_json,
)

WAIT_SECONDS, LOOK_SECONDS = 0.2, 1.0
STORE_SECONDS = 30.0  # between two looks at cells on an object store, each of several requests
# Through these, JAX would take a cell for one process of several.
SEVERAL_PROCESSES = (
    *("COORDINATOR_ADDRESS", "PROCESS_COUNT", "PROCESS_INDEX", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class CellTask:
    """A cell as a worker gets it, perhaps on another host: plain data.

    Attributes:
      directory: of the sweep.
      phases: {name: steps}.
      train, evaluate: the commands; `evaluate` is None where nothing is evaluated.
      evaluation: the options of the evaluation.
      before: the outcome of its last process when the sweep began.
      cwd: where the commands run, and what `directory` is relative to.
    """

    directory: str
    name: str
    phases: Mapping[str, int]
    train: Sequence[str]
    evaluate: Sequence[str] | None = None
    evaluation: Sequence[str] | None = None
    before: Mapping[str, Any] = field(default_factory=dict)
    cwd: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The cell's name alone, as `StackTask` has several."""
        return (self.name,)

    @property
    def place(self) -> AnyPath:
        """The sweep's directory, which a worker finds from another cwd too."""
        directory = path("the sweep", self.directory)
        return directory if is_remote(directory) else Path(self.cwd) / directory


@dataclass(frozen=True)
class StackTask:
    """Cells that one worker trains as one program."""

    tasks: tuple[CellTask, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.tasks)


class Stop:
    """Requests to stop. At the first, cells save and end; at the second they end at once.

    A signal that comes again within `SAME_SECONDS` is the same request, as in the cells.

    Attributes:
      requests: how many there were.
      sends: whether a request is sent to the process of a cell as SIGTERM; a cluster signals it by itself.
      process: the process of a cell that was started last under this object.
      meaning: what the first request does, and what the second one does, for a line about it.
    """

    def __init__(self, sends: bool = True) -> None:
        self.requests, self.sends = 0, sends
        self.meaning = ("the cells save and end", "the cells end at once")
        self.process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Takes SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP for requests; in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        from pe_lab.parallel.stopping import SAME_SECONDS

        first: tuple[int, float] | None = None

        def request(number: int, frame: Any) -> None:
            nonlocal first
            now = time.monotonic()
            if first and number == first[0] and now < first[1] + SAME_SECONDS:
                return
            first = first or (number, now)
            self.requests += 1
            told = self.meaning[min(self.requests, 2) - 1]
            tell_at_once(f"{signal.Signals(number).name}: {told}")

        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        numbers = [signal.SIGINT, signal.SIGTERM, *hangup]
        before = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@runtime_checkable
class Runner(Protocol):
    """Something that runs cells: this machine, a SLURM cluster, a Ray cluster."""

    def run(self, tasks: Sequence[CellTask | StackTask], stop: Stop, look: Callable[..., None]) -> None:
        """Runs all tasks to their ends, or until a stop. Calls `look(running, queued)` with names now and then."""


# ---------------------------------------------------------------------------------------------------------------------
# One cell


def run_task(
    task: CellTask,
    stop: Stop,
    environment: Mapping[str, str | None] | None = None,
    cpus: frozenset[int] | None = None,
    show: Callable[[str], None] = print,
) -> int | None:
    """Trains a cell, or continues it, and evaluates it; returns the status of its last process.

    None if another sweep holds its lease.

    A cell that is complete, or that another sweep has seen fail meanwhile, is left alone. If a process whose sweep was
    killed still trains the cell, this waits until it has ended.

    Args:
      environment: variables that the processes get, None to remove one.
      cpus: the cores that they may use; None: all.

    Raises:
      UserError: the files of the sweep cannot be written.
    """
    directory, begun, lost = task.place, time.monotonic(), Stop()

    def lose(message: str) -> None:
        lost.requests = 1
        show(message)

    try:
        with lease(file_of(directory, task.name, "lease"), show, lose):
            outcome = read_outcome(directory, task.name)
            status = _ended(task, outcome)
            if status is not None:
                return status
            if not _is_free(task, stop, show):
                return os.EX_TEMPFAIL
            return _run_stages(task, directory, begun, outcome, (stop, lost), environment or {}, cpus)
    except LeaseTaken:
        return None


def _ended(task: CellTask, outcome: Mapping[str, Any]) -> int | None:
    """The status of a cell that is complete, or has failed under another sweep meanwhile; None: it is to be run."""
    if is_complete(task.place, task.name, task.phases, task.evaluation, outcome):
        return 0
    return outcome["status"] if outcome != task.before and has_failed(outcome) else None


def _is_free(task: CellTask, stop: Stop, show: Callable[[str], None]) -> bool:
    """Waits until no process trains the cell, which a killed sweep may have left; False at a request to stop."""
    while lease_is_live(task.place / task.name / LEASE_FILE, show):
        if stop.requests:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _run_stages(
    task: CellTask,
    directory: AnyPath,
    begun: float,
    before: Mapping[str, Any],
    stops: Sequence[Stop],
    environment: Mapping[str, str | None],
    cpus: frozenset[int] | None,
    trained: tuple[int, str] | None = None,
) -> int:
    """Trains and evaluates, and writes the outcome. `trained` is the status of a training in a stack, and its error."""
    evaluated, (status, error) = list(before.get("evaluated") or []), trained or (0, "")
    kept = _variables(environment)
    with _log(file_of(directory, task.name, "log")) as log:
        for stage, command in (("train", None if trained else task.train), ("evaluate", task.evaluate)):
            if command is None or status != 0:
                continue
            if any(stop.requests for stop in stops):
                status, error = os.EX_TEMPFAIL, ""
                break
            start = log.stat().st_size
            status = _process(command, log, kept, task.cwd or None, cpus, stops)
            error = "" if status in (0, os.EX_TEMPFAIL) else _reason(log, start, status, stage)
        if status == 0 and task.evaluation is not None and list(task.evaluation) not in evaluated:
            evaluated.append(list(task.evaluation))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    record = {"status": status, "error": error, "seconds": round(time.monotonic() - begun, 1), "time": now}
    write_json(file_of(directory, task.name, "json"), {**record, "evaluated": evaluated})
    return status


def _variables(environment: Mapping[str, str | None]) -> dict[str, str]:
    """The variables of a process that trains or evaluates."""
    variables = {**os.environ, **environment, **dict.fromkeys(SEVERAL_PROCESSES)}
    return {key: value for key, value in variables.items() if value is not None} | {"PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _log(log: AnyPath) -> Iterator[Path]:
    """A local file that the processes of a cell append to; the log of a sweep on a store is copied back at the end."""
    if not is_remote(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        yield log
        return
    with tempfile.TemporaryDirectory(prefix="pe_lab_log_") as directory:
        local = Path(directory) / "log"
        with contextlib.suppress(FileNotFoundError):
            local.write_bytes(read_bytes(log))
        local.touch()
        try:
            yield local
        finally:
            write_file(log, local.read_bytes())


def _process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    cwd: str | None,
    cpus: frozenset[int] | None,
    stops: Sequence[Stop],
) -> int:
    """Runs a command to its end, and returns its status. SIGTERM at a request to stop, SIGINT at the second.

    A second SIGTERM might come within the second in which it is the same request.

    It has a session of its own: Ctrl-C in a terminal goes to the sweep alone, which passes on one signal and not two.
    """
    with open(log, "ab") as file:
        shown = redacted(shlex.join(["python", *command[command.index("-m") :]] if "-m" in command else command))
        file.write(f"== {shown}\n".encode("utf-8", "backslashreplace"))
        file.flush()
        # Only of this thread; the process inherits them, and JAX on the CPU has as many threads as cores.
        own = os.sched_getaffinity(0) if cpus else None
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            if own:
                os.sched_setaffinity(0, own)
    sent, stops[0].process = 0, process
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(WAIT_SECONDS)
            if sent < min(max(stop.requests for stop in stops if stop.sends), 2):
                process.send_signal((signal.SIGTERM, signal.SIGINT)[sent])
                sent += 1
    except BaseException:  # such as KeyboardInterrupt in a worker of Ray, or submitit's request to end
        process.send_signal(signal.SIGTERM)
        try:
            while process.poll() is None:  # `wait` would not be interrupted by Ray
                time.sleep(WAIT_SECONDS)
        except BaseException:  # the second request
            process.send_signal(signal.SIGINT)
            raise
        raise


def _reason(log: Path, start: int, status: int, stage: str) -> str:
    """The line of a log, from `start` on, that says why a process ended; or the signal that ended it."""
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - 2**16))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("== python -m")]
    told = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "no output")
    if status < 0:
        told = f"ended by {signal.Signals(-status).name}"
    return excerpt(f"{'' if stage == 'train' else 'the evaluation: '}{told.removeprefix('error: ')}", 500)


# ---------------------------------------------------------------------------------------------------------------------
# Several cells as one program


def run_stack(
    stack: StackTask,
    stop: Stop,
    environment: Mapping[str, str | None] | None = None,
    cpus: frozenset[int] | None = None,
    show: Callable[[str], None] = print,
) -> tuple[CellTask, ...]:
    """Trains cells in one process, each under its lease, and evaluates each; as `run_task` does with one.

    Returns the cells whose lease another sweep holds.

    Raises:
      UserError: the lease of a cell cannot be written; the others are trained.
    """
    begun, lost = time.monotonic(), Stop()
    refused: list[CellTask] = []
    failures: list[UserError] = []  # the lease of one cell cannot be written: the others go on
    mine: list[tuple[CellTask, dict[str, Any]]] = []  # with their outcomes before

    def lose(message: str) -> None:
        lost.requests = 1
        show(message)

    with contextlib.ExitStack() as leases:
        for task in stack.tasks:
            try:
                leases.enter_context(lease(file_of(task.place, task.name, "lease"), show, lose))
            except (LeaseTaken, UserError) as error:
                refused += [task] if isinstance(error, LeaseTaken) else []
                failures += [error] if isinstance(error, UserError) else []
                continue
            outcome = read_outcome(task.place, task.name)
            if _ended(task, outcome) is None:
                mine.append((task, outcome))
        if mine and all(_is_free(task, stop, show) for task, _ in mine) and not stop.requests:
            stops, variables = (stop, lost), environment or {}
            trained = _train_stack([task for task, _ in mine], stops, variables, cpus)
            for task, outcome in mine:
                _run_stages(task, task.place, begun, outcome, stops, variables, cpus, trained[task.name])
    if failures:
        raise failures[0]
    return tuple(refused)


def _train_stack(
    tasks: Sequence[CellTask],
    stops: Sequence[Stop],
    environment: Mapping[str, str | None],
    cpus: frozenset[int] | None,
) -> dict[str, tuple[int, str]]:
    """Trains cells as one process, whose own output is in the log FIRST.stack.log; {cell: status and error}."""
    names = ", ".join(task.name for task in tasks)
    with contextlib.ExitStack() as opened:
        own = opened.enter_context(_log(file_of(tasks[0].place, tasks[0].name, "stack.log")))
        file = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="pe_lab_stack_"))) / "stack.json"
        runs, starts = {}, {task.name: 0 for task in tasks}
        for task in tasks:
            log = opened.enter_context(_log(file_of(task.place, task.name, "log")))
            with open(log, "a", encoding="utf-8", errors="backslashreplace") as written:
                written.write(f"== {redacted(shlex.join(['python', *task.train[1:]]))}\n== stacked: {names}\n")
            starts[task.name] = log.stat().st_size
            runs[task.name] = {"arguments": task.train[task.train.index("pe_lab.train") + 1 :], "log": str(log)}
        write_json(file, runs)
        start = own.stat().st_size
        command = [sys.executable, "-m", "pe_lab.train", f"--stack={file}"]
        of_process = _process(command, own, _variables(environment), tasks[0].cwd or None, cpus, stops)
        known = read_json(file.with_suffix(".status")) if file.with_suffix(".status").exists() else {}
        found = {}
        for task in tasks:
            # Without a status of its own, a cell has that of the process, which was killed, say.
            status, log, begin = known.get(task.name, of_process), Path(runs[task.name]["log"]), starts[task.name]
            if task.name not in known:
                log, begin = own, start
            error = "" if status in (0, os.EX_TEMPFAIL) else _reason(log, begin, status, "train")
            found[task.name] = status, error
        return found


# ---------------------------------------------------------------------------------------------------------------------
# All cells


def tasks_of(sweep: Sweep, retry: bool = False) -> list[CellTask]:
    """What is to be done of the cells that a sweep asks for: not what is complete, or has failed without `retry`."""
    ended = {COMPLETE} | (set() if retry else {FAILED})
    asked = [state for state in read_states(sweep) if state.cell.name in sweep.names and state.state not in ended]
    return [
        CellTask(
            str(sweep.directory),
            state.cell.name,
            phases_of(state.cell),
            state.cell.command(sweep.directory),
            None if sweep.evaluation is None else sweep.evaluate_command(state.cell),
            sweep.evaluation,
            read_outcome(sweep.directory, state.cell.name),
            os.getcwd(),
        )
        for state in asked
    ]


def stacking_of(sweep: Sweep, tasks: Sequence[CellTask], most: int) -> Stacking:
    """How the cells of tasks are stacked, those that are still to be trained."""
    names = {task.name for task in tasks if not is_trained(sweep.directory / task.name, task.phases)}
    return stack_cells([cell for cell in sweep.cells if cell.name in names], most)


def stacked(tasks: Sequence[CellTask], stacking: Stacking) -> list[CellTask | StackTask]:
    """The tasks, those of a stack as one, which come first: they take longest."""
    by_name = {task.name: task for task in tasks}
    stacks = [StackTask(tuple(by_name.pop(cell.name) for cell in cells)) for cells in stacking.stacks]
    return [*stacks, *by_name.values()]


def run_sweep(
    sweep: Sweep,
    runner: Runner,
    retry: bool = False,
    command: str = "",
    look: Callable[[Sequence[CellState]], None] = lambda states: None,
    stack: int = 1,
    show: Callable[[str], None] = print,
) -> tuple[Sweep, list[CellState], bool]:
    """Runs the cells of a sweep that are not complete.

    Args:
      sweep: of `make_sweep`.
      runner: where the cells run, such as `runners.Local()`, this machine.
      retry: whether cells that have failed are trained again.
      command: recorded in sweep.json.
      look: called with the states of all cells every second or so.
      stack: how many cells may train as one program; above 1, `show` gets a line for each stack, and for each cell
        that trains alone. The runner gets `StackTask`s then, which `Local` takes.

    Returns:
      The sweep with the cells that others have added, the states of all cells, and whether it was stopped.

    Raises:
      UserError: the directory cannot be written, or the runner cannot run.
    """
    sweep = save_sweep(sweep, command)
    stop, known, looked = Stop(), {}, -STORE_SECONDS

    def watch(running: Sequence[str] = (), queued: Sequence[str] = ()) -> None:
        nonlocal looked
        if is_remote(sweep.directory) and time.monotonic() < looked + STORE_SECONDS:
            return
        looked = time.monotonic()
        with contextlib.suppress(StoreError):  # it is asked again
            states = read_states(sweep, running, queued, known)
            known.update({state.cell.name: state for state in states if state.state == COMPLETE})
            look(states)

    tasks: Sequence[CellTask | StackTask] = tasks_of(sweep, retry)
    if tasks and stack > 1:
        stacking = stacking_of(sweep, tasks, stack)
        show(str(stacking))
        tasks = stacked(tasks, stacking)
    with stop.signals():
        watch()
        if tasks:
            runner.run(tasks, stop, watch)
    states = read_states(sweep)
    look(states)
    return sweep, states, stop.requests > 0


def exit_status(sweep: Sweep, states: Sequence[CellState], stopped: bool) -> int:
    """0 if all cells that a sweep asks for are complete, 1 if one has failed, 75 if one was stopped or waits."""
    found = {state.state for state in states if state.cell.name in sweep.names}
    if stopped and found != {COMPLETE}:
        return os.EX_TEMPFAIL
    return 1 if FAILED in found else 0 if found <= {COMPLETE} else os.EX_TEMPFAIL
