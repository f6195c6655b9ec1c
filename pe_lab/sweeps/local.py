"""Cells on this machine: one for each GPU, TPU chip or group of cores, several at once."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pe_lab.errors import ConfigError, UserError
from pe_lab.sweeps.running import LOOK_SECONDS, Stop, Task, run_task

CORES_OF_CELL = 2
AGAIN_SECONDS = 2.0  # between two looks at a cell that another sweep has claimed


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

    def run(self, tasks: Sequence[Task], stop: Stop, look: Callable[..., None]) -> None:
        """See `Runner`."""
        waiting = deque((0.0, task) for task in tasks)  # when to try it, and what
        running: set[str] = set()
        refused: list[UserError] = []  # the claim or the log of one cell cannot be written: the others go on
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
                task = ready[1]
                running.add(task.name)
                try:
                    ended = run_task(task, stop, slot.environment, slot.cpus, show=lambda line: None)
                except UserError as error:
                    refused.append(error)
                    continue
                except BaseException as error:
                    broken.append(error)
                    return
                finally:
                    running.discard(task.name)
                if ended is None:
                    with lock:
                        waiting.append((time.monotonic() + AGAIN_SECONDS, task))

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
