"""Several processes as one program: their start, and pieces of work whose results every process gets, in order.

Every process runs the same command with the same control flow. Results travel through the key-value store of
`jax.distributed`, which process 0 serves: a result of any size and form, no program to compile, and a process that
waits also learns of another one's failure. Only process 0 writes files and prints.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pickle
import re
import signal
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from pe_lab.errors import ConfigError, UserError

Piece = TypeVar("Piece")
Result = TypeVar("Result")
POLL_MILLISECONDS = 2000  # a waiting process looks for failures of others so often
EXCHANGE_MILLISECONDS = 3_600_000  # a process that is lost ends the others long before
FAILURE = "pe_lab/failure"
_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_GPU_DEVICES = ("/dev/nvidia0",)
# Of a GPU's memory, what JAX may use; the rest is for NCCL, cuDNN and the driver. JAX's own default is 0.75.
GPU_MEMORY_SHARE = 0.9


def start_processes() -> None:
    """Connects this process to the others of a TPU slice or a cluster. Call it before JAX starts a backend.

    This function finds out whether there are several processes on a TPU slice, under SLURM and under Open MPI, and
    `jax.distributed` finds their addresses. Elsewhere COORDINATOR_ADDRESS, PROCESS_COUNT and PROCESS_INDEX give them.
    A process that is alone on its node gets all devices of the node. One that ends without notice ends the others after
    100 seconds, or after HEARTBEAT_SECONDS; process 0 at once. On GPUs, JAX may use `GPU_MEMORY_SHARE` of the memory,
    or what XLA_PYTHON_CLIENT_MEM_FRACTION says.

    Raises:
      ConfigError: COORDINATOR_ADDRESS is set without the other two, or a number is none.
    """
    hide_absent_tpu()
    if _wants_any_of(_GPU_DEVICES):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    if jax.distributed.is_initialized():
        return
    if not has_accelerator():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # without it CPUs cannot communicate
    # Under SLURM and Open MPI, JAX gives a process one device unless it gets a list; an empty one restricts nothing.
    devices: dict[str, Any] = {"local_device_ids": []} if _alone_on_its_node() else {}
    if os.environ.get("COORDINATOR_ADDRESS"):
        count, index = os.environ.get("PROCESS_COUNT", ""), os.environ.get("PROCESS_INDEX", "")
        if not all(re.fullmatch("[0-9]{1,6}", text) for text in (count, index)):
            raise ConfigError(
                f"COORDINATOR_ADDRESS is set, but PROCESS_COUNT is '{count}' and PROCESS_INDEX '{index}'. Set them to "
                "whole numbers: the number of processes, and the index of this one, from 0."
            )
        options = {"num_processes": int(count), "process_id": int(index), **devices}
        if beats := os.environ.get("HEARTBEAT_SECONDS"):
            if not re.fullmatch("[0-9]{1,9}", beats) or int(beats) < 1:
                raise ConfigError(f"HEARTBEAT_SECONDS is '{beats}'; set it to a whole number of seconds, at least 1.")
            options["heartbeat_timeout_seconds"] = int(beats)
        jax.distributed.initialize(os.environ["COORDINATOR_ADDRESS"], **options)
    elif _one_of_several():
        jax.distributed.initialize(**devices)


def coordination() -> Any:
    """The state of `jax.distributed`: the client of its key-value store, this process's number, how many there are.

    JAX has no public way to the store, which takes values of any form from any thread, and serves processes that run no
    collective. This is the one place that needs it: pyproject.toml bounds the version of JAX for it.
    """
    from jax._src import distributed

    return distributed.global_state


def _one_of_several() -> bool:
    """Whether this process is one of several, by the environment or by the metadata of a TPU VM."""
    counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    if any(int(os.environ.get(name) or 1) > 1 for name in counts):
        return True
    if not _wants_any_of(_TPU_DEVICES):
        return False
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):  # set on GKE, and on hosts with a whole TPU
        if os.environ.get(name):
            return "," in os.environ[name]
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # JAX and libtpu do not query the metadata server either
        return False
    # libtpu connects the chips of a slice by itself. Saving a checkpoint and stopping at SIGTERM need `jax.distributed`
    # too, through which the hosts agree on a step.
    several_slices = re.search(r"MEGASCALE_NUM_SLICES: *'?([2-9]|[1-9][0-9])", _metadata("tpu-env"))
    return several_slices is not None or "," in _metadata("worker-network-endpoints")


def _alone_on_its_node() -> bool:
    """Whether SLURM or Open MPI started one process per node; SLURM writes '1(x4)' for four nodes."""
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):  # the user has divided the devices
        return False
    counts = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return any(re.fullmatch(r"1(\(x\d+\))?", os.environ.get(name, "")) for name in counts)


def _metadata(attribute: str) -> str:
    """An attribute that the metadata server of this TPU VM knows; empty without it, and without such a server."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return ""


def has_accelerator() -> bool:
    """Whether this host has a TPU or a GPU that JAX would use, from its device files and JAX_PLATFORMS."""
    return _wants_any_of((*_TPU_DEVICES, *_GPU_DEVICES))


def _wants_any_of(devices: tuple[str, ...]) -> bool:
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return not wanted.startswith("cpu") and any(Path(device).exists() for device in devices)


def hide_absent_tpu() -> None:
    """Sets JAX to the CPU on a host with libtpu and without an accelerator. Call it before JAX starts a backend."""
    # libtpu may be installed only to compile for TPUs elsewhere. On a machine without a TPU, JAX would try to start
    # it, wait for a metadata server, and print a page of warnings.
    if os.environ.get("JAX_PLATFORMS") or has_accelerator():
        return
    if importlib.util.find_spec("libtpu") is not None:
        jax.config.update("jax_platforms", "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Shared work


class _SharedProgram:
    """This process among the others of the program."""

    def __init__(self) -> None:
        self.client: Any = None  # of the key-value store; None: there is one process
        self.index, self.count = 0, 1
        self.together = False  # whether all processes compute every piece together
        self.busy = False  # whether this process computes a piece, so that the lists inside it are its own
        self.exchanges = itertools.count()  # alike on all processes, which open them in the same order

    def connect(self, together: bool) -> None:
        """Takes the processes that `start_processes` has connected."""
        state = coordination()
        self.client, self.together = state.client, together
        if self.client is not None:
            self.index, self.count = state.process_id, state.num_processes


_program = _SharedProgram()


class Exchange:
    """The results of one list of pieces in the key-value store; `owners` has the process of each."""

    def __init__(self, owners: Sequence[int]):
        self._client, self._owners = _program.client, owners
        self._name = f"pe_lab/{next(_program.exchanges)}"
        self._digest = f"{len(owners)}-{zlib.crc32(repr(list(owners)).encode())}"
        self._client.key_value_set(f"{self._name}/dealt/{_program.index}", self._digest)

    def publish(self, piece: int, result: Any) -> None:
        """Gives a result to the other processes."""
        self._client.key_value_set_bytes(f"{self._name}/{piece}", pickle.dumps(result))

    def take(self, piece: int, wait: bool = True) -> tuple[bool, Any]:
        """(whether it is there, the result) of another process's piece; raises if that failed or deals other pieces."""
        while True:
            try:
                if wait:
                    found = self._client.blocking_key_value_get_bytes(f"{self._name}/{piece}", POLL_MILLISECONDS)
                else:
                    found = self._client.key_value_try_get_bytes(f"{self._name}/{piece}")
                return True, pickle.loads(found)
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                    raise
                if not wait:
                    return False, None
            owner = self._owners[piece]
            if failure := _stored(self._client, FAILURE):
                raise pickle.loads(failure)
            dealt = _stored(self._client, f"{self._name}/dealt/{owner}")
            if dealt and dealt.decode() != self._digest:
                raise RuntimeError(
                    f"Processes {_program.index} and {owner} have different work: their files or arguments differ."
                )

    def close(self) -> None:
        """Ends the exchange for this process, which has all results; the last process removes them."""
        if self._client.key_value_increment(f"{self._name}-read", 1) == _program.count:
            self._client.key_value_delete(self._name)
            self._client.key_value_delete(f"{self._name}-read")


def _stored(client: Any, key: str) -> bytes | None:
    """The value of a key if it is set."""
    try:
        return client.key_value_try_get_bytes(key)
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith("NOT_FOUND"):
            return None
        raise


@contextlib.contextmanager
def one_program(together: bool = False) -> Iterator[None]:
    """Connects this process to the others, if there are any, for the block of a command.

    Only process 0 prints to stdout. An error of one process ends the others with the same error as soon as they wait
    for it; a process that is killed ends them through the heartbeats of `jax.distributed`. SIGTERM ends the process.
    With `together` all processes compute every piece together, on a mesh of all devices (`compute_devices`).
    """
    start_processes()
    _program.connect(together)
    if _program.client is None:
        try:
            yield
        finally:
            _program.together = False
        return
    if threading.current_thread() is threading.main_thread():
        # `jax.distributed` takes SIGTERM for a notice to a training loop, and the process would go on.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.ExitStack() as stack:
        if not is_first():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except BaseException as error:
            # Of several failures the first one counts: the later set is refused.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                where = f"Process {_program.index} of {_program.count}"
                known = isinstance(error, UserError)
                text = f"{where}: {error}" if known else f"{where} ended with {type(error).__name__}: {error}"
                failure = type(error)(text) if known else RuntimeError(text)
                _program.client.key_value_set_bytes(FAILURE, pickle.dumps(failure))
            raise


def is_first() -> bool:
    """Whether this process writes files and prints: process 0."""
    return _program.index == 0


def computes_together() -> bool:
    """Whether the command was asked to compute every piece on the devices of all processes."""
    return _program.together


def compute_devices() -> list[Any]:
    """The devices that compute a piece: of all processes if they compute together, else of this process."""
    return list(jax.devices() if _program.together else jax.local_devices())


def on_first(function: Callable[[], Result]) -> Result:
    """What a function returns on process 0, on every process; the others do not call it, and wait.

    Files that decide what is measured are read in this way: other hosts need not see them, nor see them change.
    """
    if _program.client is None:
        return function()
    if _program.busy:
        raise RuntimeError("on_first() inside a piece of work, which other processes do not compute")
    exchange = Exchange([0])
    if is_first():
        found = function()
        exchange.publish(0, found)
    else:
        _, found = exchange.take(0)
    exchange.close()
    return found


def first_then_others(function: Callable[[], Result]) -> Result:
    """What a function returns, called by process 0 first: it makes files that the others then find, or make too."""
    if _program.client is None or not is_first():
        on_first(lambda: None)
        return function()
    found = function()
    on_first(lambda: None)
    return found


def shared(
    pieces: Sequence[Piece],
    compute: Callable[[Iterable[Piece]], Iterable[Result]],
    costs: Sequence[float] | None = None,
) -> Iterator[Result]:
    """The results of all pieces, in their order, on every process; each process computes those dealt to it.

    A process that lacks the next result computes its own next piece first, and waits when it has none left. A list
    inside a piece is computed by the process of the piece. With one process this is `compute(pieces)`.

    Args:
      pieces: the same on every process; a result depends on its piece alone.
      compute: yields a result, which is pickled, for each piece that it is given, in order.
      costs: of the pieces, in any unit; None: all alike.
    """
    if _program.client is None or _program.together or _program.busy:
        yield from compute(pieces)
        return
    if not len(pieces):
        return
    owners = deal([1.0] * len(pieces) if costs is None else costs, _program.count)
    exchange = Exchange(owners)
    mine = [n for n, owner in enumerate(owners) if owner == _program.index]
    own = zip(mine, _busy(iter(compute(pieces[n] for n in mine))), strict=True)
    found: dict[int, Any] = {}
    for n, owner in enumerate(owners):
        others = owner != _program.index
        while n not in found:
            there, result = exchange.take(n, wait=False) if others else (False, None)
            if not there:
                computed, result = next(own, (None, None))
                if computed is not None:
                    exchange.publish(computed, result)
                    found[computed] = result
                    continue
                there, result = exchange.take(n)
            found[n] = result
        if n == len(owners) - 1:
            exchange.close()
        yield found.pop(n)


def _busy(own: Iterator[Result]) -> Iterator[Result]:
    """The results, with `busy` set while each is computed."""
    while True:
        _program.busy = True
        try:
            result = next(own)
        except StopIteration:
            return
        finally:
            _program.busy = False
        yield result


def all_values(name: str, value: bytes, done: Sequence[str] = ()) -> list[bytes]:
    """The value of every process, in their order, on every process: for threads that may run no collective on devices.

    `name` is that of this exchange alone. `done` are names of earlier ones, which all processes have left; their values
    are removed.
    """
    state = coordination()
    if state.client is None:
        return [value]
    client = state.client
    give_value(name, value)
    keys = [_key(name, process) for process in range(state.num_processes)]
    values = [client.blocking_key_value_get_bytes(key, EXCHANGE_MILLISECONDS) for key in keys]
    for earlier in done:
        client.key_value_delete(_key(earlier, state.process_id))
    return values


def give_value(name: str, value: bytes) -> None:
    """Gives this process's value of an exchange, and does not wait for those of the others; see `all_values`."""
    state = coordination()
    if state.client is not None:
        state.client.key_value_set_bytes(_key(name, state.process_id), value)


def _key(name: str, process: int) -> str:
    return f"pe_lab/{name}/{process}"


def deal(costs: Sequence[float], processes: int) -> list[int]:
    """The process of each piece, so that the first results are ready first and loads are about equal.

    Of every `processes` consecutive pieces each process gets one: the costliest goes to the process whose pieces so far
    cost least.
    """
    owners, loads = [0] * len(costs), [0.0] * processes
    for start in range(0, len(costs), processes):
        pieces = sorted(range(start, min(start + processes, len(costs))), key=lambda n: -costs[n])
        free = sorted(range(processes), key=loads.__getitem__)
        for n, process in zip(pieces, free, strict=False):
            owners[n] = process
            loads[process] += costs[n]
    return owners
