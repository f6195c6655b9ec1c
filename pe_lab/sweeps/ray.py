"""Cells on a Ray cluster, or on this machine under Ray: a task of Ray for each cell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pe_lab.errors import ConfigError, DataError, UnsupportedError, UserError, did_you_mean, excerpt
from pe_lab.sweeps.running import LOOK_SECONDS, Stop, Task, run_task

OPTIONS = ("address", "cpus", "gpus", "tpus")
SAVE_SECONDS = 120.0  # that cells have to save


def run_in_worker(task: Task) -> int | None:
    """Runs a cell in a worker of Ray; a cancellation is a KeyboardInterrupt, at which the cell saves and ends."""
    outcome = run_task(task, Stop())
    return None if outcome is None else outcome.status


class Ray:
    """Runs cells as tasks of Ray.

    Args:
      options: `address` of the cluster (else RAY_ADDRESS, else Ray is started on this machine); `cpus`, `gpus` and
        `tpus` that each cell gets (by default 2 CPUs, and a GPU where the cluster has some).
      jobs: how many run at once; None: as many as the cluster's resources let.
    """

    def __init__(self, options: Mapping[str, str], jobs: int | None = None):
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(f"--ray-{name}: there is no such option. {did_you_mean(name, OPTIONS)}")
        self._address = options.get("address")
        self._wanted = {name: _amount(name, options[name]) for name in OPTIONS[1:] if name in options}
        self._jobs = jobs
        _ray()

    def run(self, tasks: Sequence[Task], stop: Stop, look: Callable[..., None]) -> None:
        """See `Runner`."""
        ray = _ray()
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

    def _run(self, ray: Any, waiting: list[Task], stop: Stop, look: Callable[..., None]) -> None:
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
        running: dict[Any, Task] = {}
        again: list[tuple[float, Task]] = []
        refused: list[UserError] = []  # the claim or the log of one cell cannot be written: the others go on
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
                    if ray.get(reference) is None:  # another sweep has claimed it
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


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UnsupportedError("--on=ray needs Ray, which is not installed: pip install 'pe-lab[ray]'.") from None
    return ray
