"""Cells on a SLURM cluster: one array of jobs, through submitit. A job that is preempted saves, and is queued again."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pe_lab.errors import ConfigError, UnsupportedError, excerpt
from pe_lab.lab.sweeps.cells import LOGS
from pe_lab.lab.sweeps.running import Stop, Task, run_task
from pe_lab.storage import AnyPath, exists, is_remote, path, read_json, write_json

JOBS = "jobs.json"  # {cell: the job that trains it}
POLL_SECONDS = 2.0
MOST_TIMEOUTS = 10_000  # time limits after which a job is queued again: as often as it takes


class CellJob:
    """What a job does. submitit calls `checkpoint` at SIGUSR2, before a time limit and at some preemptions."""

    def __init__(self, task: Task):
        self.task = task
        self._stop: Stop | None = None

    def __call__(self) -> int | None:
        """Runs the cell; returns the status of its last process."""
        # SLURM sends a signal to all processes of a job. The SIGTERM of scancel or a preemption thus reaches the cell,
        # which saves; a second one from here would end it at once. Of SIGUSR2, the process of the cell would die.
        self._stop = stop = Stop(sends=False)

        def request(number: int, frame: Any) -> None:
            stop.requests += 1

        signal.signal(signal.SIGTERM, request)
        shield = ("sh", "-c", 'trap "" USR2; exec "$@"', "sh")
        evaluate = self.task.evaluate and [*shield, *self.task.evaluate]
        outcome = run_task(dataclasses.replace(self.task, train=[*shield, *self.task.train], evaluate=evaluate), stop)
        return None if outcome is None else outcome.status

    def checkpoint(self) -> Any:
        """Lets the cell save, and returns the same job, to be queued again."""
        import submitit

        # This is a signal's handler: the loop that waits for the process is further up on the stack.
        if self._stop is not None and (process := self._stop.process) is not None:
            process.send_signal(signal.SIGTERM)
            process.wait()
        return submitit.helpers.DelayedSubmission(CellJob(self.task))


class Slurm:
    """Runs cells as jobs of an array.

    Args:
      options: of sbatch, as `partition`, `time`, `gpus-per-node`; all jobs get them.
      jobs: how many run at once; None: as many as the cluster lets.
    """

    def __init__(self, options: Mapping[str, str], jobs: int | None = None):
        self._parameters = _parameters(options)
        if jobs is not None:
            self._parameters["array_parallelism"] = jobs

    def run(self, tasks: Sequence[Task], stop: Stop, look: Callable[..., None]) -> None:
        """See `Runner`. A stop ends the waiting and no job."""
        directory = path("the sweep", tasks[0].directory)
        if is_remote(directory):
            raise UnsupportedError(
                f"--on=slurm keeps what it submits in the sweep's directory, and '{directory}' is on an object store. "
                "Give a --workdir on the file system that the nodes share."
            )
        if "%" in str(directory):
            raise ConfigError(f"--workdir '{directory}': sbatch replaces % in a file's name. Choose another directory.")
        file = directory / LOGS / "slurm" / JOBS
        jobs = {str(k): str(v) for k, v in read_json(file).items()} if exists(file) else {}
        queue = _queue()
        new = [task for task in tasks if jobs.get(task.name) not in queue]
        if new:
            jobs |= self._submit(directory / LOGS / "slurm", new)
            write_json(file, jobs)
        mine = {task.name: jobs[task.name] for task in tasks}
        numbers = ", ".join(sorted({job.split("_")[0] for job in mine.values()}))
        print(f"SLURM jobs {numbers}; they go on without this command, and scancel ends them", flush=True)
        stop.meaning = ("the jobs go on", "the jobs go on")
        while not stop.requests:
            with contextlib.suppress(UnsupportedError):  # a controller that is busy; it is asked again
                queue = _queue()
            left = {name: queue[job] for name, job in mine.items() if job in queue}
            running = sorted(name for name, state in left.items() if state in ("RUNNING", "COMPLETING"))
            look(running, sorted(set(left) - set(running)))
            if not left:
                return
            deadline = time.monotonic() + POLL_SECONDS
            while time.monotonic() < deadline and not stop.requests:
                time.sleep(0.1)

    def _submit(self, folder: AnyPath, tasks: Sequence[Task]) -> dict[str, str]:
        """Submits an array; {cell: job}."""
        submitit = _submitit()
        try:
            executor = submitit.SlurmExecutor(folder=str(folder), max_num_timeout=MOST_TIMEOUTS)
            executor.update_parameters(job_name="pe_lab.sweep", **self._parameters)
            with executor.batch():  # an array
                submitted = [executor.submit(CellJob(task)) for task in tasks]
        except RuntimeError as error:  # no srun
            raise UnsupportedError(f"--on=slurm: {error} Run this on a login node of the cluster.") from None
        except submitit.core.utils.FailedJobError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--on=slurm: sbatch refuses the jobs ({reason[-400:]}). Check --slurm-...") from None
        return {task.name: str(job.job_id) for task, job in zip(tasks, submitted, strict=True)}


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise UnsupportedError(
            "--on=slurm needs submitit, which is not installed: pip install 'pe-lab[slurm]'."
        ) from None
    return submitit


def _parameters(options: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit; options of sbatch that it does not know are passed on."""
    import inspect

    _submitit()
    from submitit.slurm import slurm

    known = {*inspect.signature(slurm._make_sbatch_string).parameters} - {"command", "folder", "map_count"}
    if "time" not in options:
        raise ConfigError(
            "--on=slurm needs a time limit of each job, as --slurm-time=24:00:00. A job is queued again then."
        )
    found: dict[str, Any] = {"time": _minutes(options["time"]), "stderr_to_stdout": True}
    others: dict[str, str] = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key in ("nodes", "ntasks_per_node", "tasks_per_node", "array", "job_name"):
            raise ConfigError(
                f"--slurm-{name}: a cell is one process on one node, which uses all devices that it gets. Train a "
                "larger run with launch/slurm.sh."
            )
        if key in known and key != "time":
            found[key] = [value] if key in ("setup", "teardown") else _number(value)
        elif key != "time":
            others[name.replace("_", "-")] = value
    if others:
        found["additional_parameters"] = others
    return found


def _number(value: str) -> int | str:
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else value


def _minutes(text: str) -> int:
    """The minutes of a time limit as sbatch takes it: `90`, `90:00`, `24:00:00`, `2-12`, `2-12:00`, `2-12:00:00`."""
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    if not found:
        raise ConfigError(f"--slurm-time='{text}' is no time limit. Write minutes, as 90, or 24:00:00 or 2-12:00:00.")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None or third is not None:  # hours first
        seconds = (days or 0) * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    else:
        seconds = first * 60 + (second or 0)
    if seconds < 60:
        raise ConfigError(f"--slurm-time='{text}' is less than a minute, the shortest limit of SLURM.")
    return -(-seconds // 60)


def _queue() -> dict[str, str]:
    """{job: state} of the user's jobs that are not over; `12_3` is a job of an array."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UnsupportedError(
            "--on=slurm: this machine has no squeue. Run this on a login node of the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            "--on=slurm: squeue does not answer. The jobs go on; repeat the command later."
        ) from None
    if answer.returncode:
        raise UnsupportedError(
            f"--on=slurm: squeue fails ({excerpt(answer.stderr.strip())}). Jobs go on; repeat the command later."
        )
    return dict(line.split() for line in answer.stdout.splitlines() if line.strip())
