"""Who runs the steps of a preparation, shard after shard: this process, processes of this machine, or a Ray cluster.

The steps write the same bytes everywhere, each file whole or not at all, so that a step may be repeated or run twice.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pe_lab.data.shard_preparation import PlanAddress, Report, run_step
from pe_lab.errors import DataError, UnsupportedError, excerpt

# Runs a step of a plan for some shards, each with its ending, and yields numbers of shards that were finished.
Executor = Callable[[PlanAddress, str, Mapping[int, str], Report], Iterator[int]]
POLL_SECONDS = 0.5


def in_this_process(address: PlanAddress, step: str, shards: Mapping[int, str], report: Report) -> Iterator[int]:
    """Runs the shards one after another; the tokenizer uses all cores."""
    for shard, ending in shards.items():
        run_step(address, step, shard, report, ending)
        yield 1


def in_processes(workers: int) -> Executor:
    """Runs up to `workers` shards at a time, each in a process of its own that was spawned.

    Where there are fewer shards than workers, the tokenizer of each process uses several threads.
    """

    def run(address: PlanAddress, step: str, shards: Mapping[int, str], report: Report) -> Iterator[int]:
        processes = min(workers, len(shards))
        if processes <= 1:
            yield from in_this_process(address, step, shards, report)
            return
        context = multiprocessing.get_context("spawn")
        counters = context.Array("q", 3)  # documents, tokens, whether to stop
        threads = max(1, workers // processes)
        pool = ProcessPoolExecutor(processes, context, _start_worker, (counters, threads))
        told = [0, 0]
        try:
            left = {pool.submit(_run_in_worker, address, step, s, ending) for s, ending in shards.items()}
            while left:
                done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                now = counters[:2]
                report(now[0] - told[0], now[1] - told[1])
                told = now
                yield len(done)
        except BrokenProcessPool:
            raise DataError(
                "A worker process has ended: perhaps the memory of this machine does not suffice. Repeat the command, "
                f"which goes on with the shards that are left, with --workers below {workers}."
            ) from None
        finally:
            counters[2] = 1
            pool.shutdown(wait=True, cancel_futures=True)

    return run


_counters: Any = None


def _start_worker(counters: Any, threads: int) -> None:
    """Prepares a worker: it ends with its parent, whose interruption from the keyboard it leaves to it."""
    global _counters
    _counters = counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(TOKENIZERS_PARALLELISM="true" if threads > 1 else "false", RAYON_NUM_THREADS=str(threads))
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class _Stopped(Exception):
    """The parent stops: the shard is left as it was."""


def _run_in_worker(address: PlanAddress, step: str, shard: int, ending: str) -> None:
    def report(documents: int, tokens: int) -> None:
        with _counters.get_lock():
            _counters[0] += documents
            _counters[1] += tokens
        if _counters[2]:
            raise _Stopped

    run_step(address, step, shard, report, ending)


def on_ray(address: PlanAddress, step: str, shards: Mapping[int, str], report: Report) -> Iterator[int]:
    """Runs the shards as tasks of the Ray cluster at RAY_ADDRESS, or of one that is started on this machine.

    All machines of the cluster see the directory and the corpus under the same paths.

    Raises:
      UnsupportedError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("--engine=ray needs Ray: pip install 'pe-lab[ray]'.") from error
    started = not ray.is_initialized()
    if started:
        alone = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="ERROR", **alone)
    environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}}
    task = ray.remote(num_cpus=1, runtime_env=environment)(_run_counted)
    queue, left = list(shards.items())[::-1], []
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # tasks that are submitted at a time
    try:
        while queue or left:
            while queue and len(left) < most:
                left.append(task.remote(os.getcwd(), address, step, *queue.pop()))
            done, left = ray.wait(left)
            for documents, tokens in ray.get(done):
                report(documents, tokens)
            yield len(done)
    except ray.exceptions.RayTaskError as error:
        raise getattr(error, "cause", error) from None
    except ray.exceptions.RayError as error:
        raise DataError(
            f"Ray could not run a task: {excerpt(str(error).strip().splitlines()[0], 200)}. Repeat the command, which "
            "goes on with the shards that are left."
        ) from None
    finally:
        for one in left:
            ray.cancel(one)
        if started:
            ray.shutdown()


def _run_counted(current: str, address: PlanAddress, step: str, shard: int, ending: str) -> tuple[int, int]:
    """Runs a step in a directory, from which its paths are, and returns the numbers of its documents and tokens."""
    os.chdir(current)
    counts = [0, 0]

    def report(documents: int, tokens: int) -> None:
        counts[0] += documents
        counts[1] += tokens

    run_step(address, step, shard, report, ending)
    return counts[0], counts[1]
