"""Where cells run: this machine, a SLURM cluster or a Ray cluster; chosen by `--on`, `--jobs` and their options."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError, UnsupportedError, UserError, did_you_mean, excerpt
from pe_lab.lab.sweeps.cells import LOGS
from pe_lab.lab.sweeps.running import LOOK_SECONDS, CellTask, Runner, StackTask, Stop, run_stack, run_task
from pe_lab.storage import AnyPath, exists, is_remote, path, read_json, write_json

PASSED_ON = ("evaluate.", "slurm-", "ray-")  # --evaluate.lengths=1x,2x is --lengths=1x,2x of pe_lab.evaluate


def split_passed_on(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Splits a command line into the other arguments and the options of pe_lab.evaluate, SLURM and Ray.

    Raises:
      ConfigError: an option has no value.
    """
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {prefix: {} for prefix in PASSED_ON}
    for item in argv:
        prefix = next((one for one in PASSED_ON if item.startswith(f"--{one}")), None)
        if prefix is None:
            rest.append(item)
            continue
        name, equals, value = item.removeprefix(f"--{prefix}").partition("=")
        if not name or (not value and (equals or prefix != "evaluate.")):
            raise ConfigError(f"{item}: give a value, as in --{prefix}{name or 'NAME'}=VALUE.")
        found[prefix][name] = value
    return rest, found


def make_runner(on: str, jobs: int | None, passed_on: Mapping[str, dict[str, str]]) -> Runner:
    """The runner of `--on`: this machine, SLURM or Ray, with the options of the command line.

    Raises:
      ConfigError: there is no such place, or an option is another one's.
    """
    kinds = {"local": "", "slurm": "slurm-", "ray": "ray-"}
    if on not in kinds:
        raise ConfigError(f"--on='{on}': there is no such place. {did_you_mean(on, [*kinds])}")
    for prefix in ("slurm-", "ray-"):
        if passed_on[prefix] and kinds[on] != prefix:
            raise ConfigError(f"--{prefix}{next(iter(passed_on[prefix]))} is an option of --on={prefix[:-1]}.")
    if on == "slurm":
        return Slurm(passed_on["slurm-"], jobs)
    return Ray(passed_on["ray-"], jobs) if on == "ray" else Local(jobs)


def check_stack(stack: int, on: str) -> None:
    """`ConfigError` for `--stack` on a cluster, where a cell is a task."""
    if stack > 1 and on != "local":
        raise ConfigError(f"--stack={stack} trains on this machine: leave out --on={on}, or run the command on a node.")


def _installed(package: str, on: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UnsupportedError(
            f"--on={on} needs {package}, which is not installed: pip install 'pe-lab[{on}]'."
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# This machine: a cell for each GPU, TPU chip or group of cores, several at once

CORES_OF_CELL = 2
AGAIN_SECONDS = 2.0  # between two looks at a cell whose lease another sweep holds


@dataclass(frozen=True)
class Slot:
    """Where one cell at a time runs: variables of its processes, and their cores (None: all)."""

    environment: Mapping[str, str]
    cpus: frozenset[int] | None = None


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() and name != "-1"]
    found = [re.fullmatch("nvidia([0-9]+)", file.name) for file in Path("/dev").glob("nvidia*")]
    return [str(n) for n in range(sum(match is not None for match in found))]


def visible_tpus() -> list[str]:
    """The TPU chips of this host, as TPU_VISIBLE_CHIPS names them."""
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        if name in os.environ:
            return [chip for chip in os.environ[name].split(",") if chip.strip()]
    found = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return [str(n) for n in range(len(found))]


def slots(jobs: int | None = None) -> list[Slot]:
    """The slots of this machine: by default one for each device, or for each `CORES_OF_CELL` cores.

    With other `jobs` each slot gets an equal part of the devices, or of the cores; cells share cores where there are
    more of them than cores.

    Raises:
      ConfigError: there are fewer devices than jobs, or they have no equal parts for a TPU.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "")
    gpus = [] if wanted.startswith(("cpu", "tpu")) else visible_gpus()
    tpus = [] if gpus or wanted.startswith(("cpu", "cuda", "gpu")) else visible_tpus()
    if not (gpus or tpus):
        bound = hasattr(os, "sched_getaffinity")  # macOS binds no process to cores
        cores = sorted(os.sched_getaffinity(0)) if bound else [*range(os.cpu_count() or 1)]
        count = jobs or max(len(cores) // CORES_OF_CELL, 1)
        if count == 1:
            return [Slot({})]
        each = max(len(cores) // count, 1)
        parts = [frozenset(cores[(n * each + i) % len(cores)] for i in range(each)) for n in range(count)]
        return [Slot({"OMP_NUM_THREADS": str(each)}, part if bound else None) for part in parts]
    devices = gpus or tpus
    count = jobs or len(devices)
    if count > len(devices):
        what = "GPU" if gpus else "TPU chip"
        raise ConfigError(
            f"--jobs={count}: this machine has {len(devices)} {what}{'s' * (len(devices) > 1)}, and a cell needs one "
            f"of its own. Give at most --jobs={len(devices)}."
        )
    each = len(devices) // count
    groups = [devices[n * each : (n + 1) * each] for n in range(count)]
    if gpus:
        return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]
    if count == 1:
        return [Slot({})]
    return [_tpu_slot(group, n) for n, group in enumerate(groups)]


def _tpu_slot(chips: Sequence[str], number: int) -> Slot:
    """Some chips of a host for a process of its own; libtpu needs the shape that they form."""
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}.get(len(chips))
    if bounds is None:
        raise ConfigError(f"A cell would get {len(chips)} TPU chips; libtpu takes 1, 2 or 4. Choose another --jobs.")
    port = str(8476 + number)
    chosen = ",".join(chips)
    return Slot(
        {
            "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_CHIPS": chosen,
            "TPU_VISIBLE_DEVICES": chosen,  # the name in older versions of libtpu
            "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
            "TPU_MESH_CONTROLLER_PORT": port,
        }
    )


class Local:
    """Runs cells on this machine, `jobs` at once (None: by its devices)."""

    def __init__(self, jobs: int | None = None):
        self.slots = slots(jobs)

    def run(self, tasks: Sequence[CellTask | StackTask], stop: Stop, look: Callable[..., None]) -> None:
        """See `Runner`."""
        waiting = deque((0.0, task) for task in tasks)  # when to try it, and what
        running: set[str] = set()
        refused: list[UserError] = []  # the lease or the log of one cell cannot be written: the others go on
        broken: list[BaseException] = []
        lock = threading.Lock()

        def work(slot: Slot) -> None:
            while not stop.requests and not broken:
                with lock:
                    ready = next((item for item in waiting if item[0] <= time.monotonic()), None)
                    if ready is None and not waiting:
                        return
                    if ready is not None:
                        waiting.remove(ready)
                if ready is None:
                    time.sleep(LOOK_SECONDS / 4)
                    continue
                task, how = ready[1], (stop, slot.environment, slot.cpus, lambda line: None)
                running.update(task.names)
                try:
                    if isinstance(task, StackTask):
                        taken = run_stack(task, *how)
                    else:
                        taken = (task,) if run_task(task, *how) is None else ()
                except UserError as error:
                    refused.append(error)
                    continue
                except BaseException as error:
                    broken.append(error)
                    return
                finally:
                    running.difference_update(task.names)
                with lock:
                    waiting.extend((time.monotonic() + AGAIN_SECONDS, one) for one in taken)

        workers = [threading.Thread(target=work, args=(slot,), daemon=True) for slot in self.slots[: len(tasks)]]
        for worker in workers:
            worker.start()
        try:
            while any(worker.is_alive() for worker in workers):
                look(sorted(running))
                deadline = time.monotonic() + LOOK_SECONDS
                while time.monotonic() < deadline and any(worker.is_alive() for worker in workers):
                    time.sleep(0.05)
        except BaseException:
            stop.requests += 1  # no cell goes on without its sweep
            for worker in workers:
                worker.join()
            raise
        for error in (*broken, *refused):
            raise error


# ---------------------------------------------------------------------------------------------------------------------
# A SLURM cluster: one array of jobs, through submitit. A job that is preempted saves, and is queued again

JOBS = "jobs.json"  # {cell: the job that trains it}
POLL_SECONDS = 2.0
MOST_TIMEOUTS = 10_000  # time limits after which a job is queued again: as often as it takes


class CellJob:
    """What a job does. submitit calls `checkpoint` at SIGUSR2, before a time limit and at some preemptions."""

    def __init__(self, task: CellTask):
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
        return run_task(dataclasses.replace(self.task, train=[*shield, *self.task.train], evaluate=evaluate), stop)

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

    def run(self, tasks: Sequence[CellTask], stop: Stop, look: Callable[..., None]) -> None:
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

    def _submit(self, folder: AnyPath, tasks: Sequence[CellTask]) -> dict[str, str]:
        """Submits an array; {cell: job}."""
        submitit = _installed("submitit", "slurm")
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


def _parameters(options: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit; options of sbatch that it does not know are passed on."""
    import inspect

    _installed("submitit", "slurm")
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


# ---------------------------------------------------------------------------------------------------------------------
# A Ray cluster, or this machine under Ray: a task of Ray for each cell

RAY_OPTIONS = ("address", "cpus", "gpus", "tpus")
SAVE_SECONDS = 120.0  # that cells have to save


def run_in_worker(task: CellTask) -> int | None:
    """Runs a cell in a worker of Ray; a cancellation is a KeyboardInterrupt, at which the cell saves and ends."""
    return run_task(task, Stop())


class Ray:
    """Runs cells as tasks of Ray.

    Args:
      options: `address` of the cluster (else RAY_ADDRESS, else Ray is started on this machine); `cpus`, `gpus` and
        `tpus` that each cell gets (by default 2 CPUs, and a GPU where the cluster has some).
      jobs: how many run at once; None: as many as the cluster's resources let.
    """

    def __init__(self, options: Mapping[str, str], jobs: int | None = None):
        for name in options:
            if name not in RAY_OPTIONS:
                raise ConfigError(f"--ray-{name}: there is no such option. {did_you_mean(name, RAY_OPTIONS)}")
        self._address = options.get("address")
        self._wanted = {name: _amount(name, options[name]) for name in RAY_OPTIONS[1:] if name in options}
        self._jobs = jobs
        _installed("ray", "ray")

    def run(self, tasks: Sequence[CellTask], stop: Stop, look: Callable[..., None]) -> None:
        """See `Runner`."""
        ray = _installed("ray", "ray")
        started = not ray.is_initialized()
        if started:
            # Else Ray would take CUDA_VISIBLE_DEVICES from the processes of tasks that have no GPU, and warn of it.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level="error", configure_logging=True)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"--on=ray: there is no cluster at '{self._address or os.environ.get('RAY_ADDRESS')}' "
                    f"({excerpt(' '.join(str(error).split()))}). Check --ray-address."
                ) from None
        try:
            self._run(ray, list(tasks), stop, look)
        finally:
            if started:
                ray.shutdown()

    def _run(self, ray: Any, waiting: list[CellTask], stop: Stop, look: Callable[..., None]) -> None:
        resources = ray.cluster_resources()
        cpus = self._wanted.get("cpus", min(2.0, resources.get("CPU", 1.0)))
        gpus = self._wanted.get("gpus", min(1.0, resources.get("GPU", 0.0)))
        tpus = self._wanted.get("tpus", 0.0)
        for name, amount, key in (("cpus", cpus, "CPU"), ("gpus", gpus, "GPU"), ("tpus", tpus, "TPU")):
            if amount > resources.get(key, 0.0):
                raise ConfigError(
                    f"--ray-{name}={amount:g}: the cluster has {resources.get(key, 0.0):g} {key}s in all, so no cell "
                    "would ever run."
                )
        # A worker that dies with its node is replaced by another one, which resumes the cell.
        remote = ray.remote(
            num_cpus=cpus, num_gpus=gpus, resources={"TPU": tpus} if tpus else None, max_retries=-1
        )(run_in_worker)  # fmt: skip
        running: dict[Any, CellTask] = {}
        again: list[tuple[float, CellTask]] = []
        refused: list[UserError] = []  # the lease or the log of one cell cannot be written: the others go on
        while waiting or running or again:
            if stop.requests:
                return _cancel(ray, list(running), stop)
            waiting += [task for at, task in again if at <= time.monotonic()]
            again = [(at, task) for at, task in again if at > time.monotonic()]
            while waiting and (self._jobs is None or len(running) < self._jobs):
                task = waiting.pop(0)
                running[remote.remote(task)] = task
            look([], [task.name for task in running.values()])
            ended, _ = ray.wait(list(running), timeout=LOOK_SECONDS) if running else ([], [])
            for reference in ended:
                task = running.pop(reference)
                try:
                    if ray.get(reference) is None:  # another sweep holds its lease
                        again.append((time.monotonic() + LOOK_SECONDS, task))
                except UserError as error:  # Ray raises what the task has raised, as a class of its own below it
                    refused.append(error)
            if not running:
                time.sleep(0.1)
        for error in refused:
            raise DataError(str(error.cause))


def _cancel(ray: Any, running: list[Any], stop: Stop) -> None:
    """Asks the workers to end, again at the next request to stop, and waits for them: their cells save."""
    asked, deadline = 0, time.monotonic() + SAVE_SECONDS
    while running and time.monotonic() < deadline:
        for reference in running if asked < min(stop.requests, 2) else ():
            ray.cancel(reference)
        asked = min(stop.requests, 2)
        _, running = ray.wait(running, num_returns=len(running), timeout=LOOK_SECONDS)


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount <= 10_000:
        raise ConfigError(f"--ray-{name}='{text}': give how many each cell gets, as --ray-{name}=2.")
    return amount
