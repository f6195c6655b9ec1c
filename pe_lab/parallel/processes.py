"""The start of several processes as one program, and the accelerators of this host, before JAX starts a backend."""

from __future__ import annotations

import importlib.util
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jax

from pe_lab.errors import ConfigError

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
