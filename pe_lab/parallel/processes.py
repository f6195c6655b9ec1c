"""Processes into one program, and what kind of host this is, before JAX touches a device."""

from __future__ import annotations

import importlib.util
import os
import urllib.error
import urllib.request
from pathlib import Path

import jax

from pe_lab.errors import UserError

_TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_GPU_DEVICES = ("/dev/nvidia0",)


def start_processes() -> None:
    """Joins the processes of a pod slice or a cluster, where there are several.

    A TPU slice, SLURM and Open MPI are recognized: whether there are several processes is asked here, how they
    find each other is JAX's. Elsewhere, COORDINATOR_ADDRESS, PROCESS_COUNT and PROCESS_INDEX say it by hand. A
    single process does nothing. Call it before JAX touches a device.

    Raises:
      UserError: COORDINATOR_ADDRESS without the other two.
    """
    hide_absent_tpu()
    if os.environ.get("COORDINATOR_ADDRESS"):
        if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        count, index = os.environ.get("PROCESS_COUNT", ""), os.environ.get("PROCESS_INDEX", "")
        if not (count.isdigit() and index.isdigit()):
            raise UserError(
                f"COORDINATOR_ADDRESS is set, but PROCESS_COUNT is '{count}' and PROCESS_INDEX '{index}'. Set them to "
                "whole numbers: how many processes there are, and which of them, from 0, this is."
            )
        jax.distributed.initialize(os.environ["COORDINATOR_ADDRESS"], num_processes=int(count), process_id=int(index))
    elif _one_of_several():
        jax.distributed.initialize()


def _one_of_several() -> bool:
    """Whether the environment, or the metadata of a TPU VM, says that other processes belong to this one."""
    counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    if any(int(os.environ.get(name) or 1) > 1 for name in counts):
        return True
    if not _wants_any_of(_TPU_DEVICES):
        return False
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):  # GKE, and hosts with one machine's TPU
        if os.environ.get(name):
            return "," in os.environ[name]
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # JAX and libtpu then do not ask the metadata either
        return False
    return "," in _worker_endpoints()


def _worker_endpoints() -> str:
    """The hosts of the slice that this TPU VM is one of, as its metadata server lists them; empty elsewhere.

    The slice itself would run without joining (libtpu knows its neighbours), but saving a checkpoint and stopping
    at SIGTERM need the hosts to agree, and only joined ones do.
    """
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    attribute = f"http://{server}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    request = urllib.request.Request(attribute, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return ""  # no such server, or no such attribute: not a host of a slice


def has_accelerator() -> bool:
    """Whether this host has a TPU or a GPU that JAX would take, from its device files; JAX is not asked."""
    return _wants_any_of((*_TPU_DEVICES, *_GPU_DEVICES))


def _wants_any_of(devices: tuple[str, ...]) -> bool:
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return not wanted.startswith("cpu") and any(Path(device).exists() for device in devices)


def hide_absent_tpu() -> None:
    """Keeps JAX from starting a TPU that is not there; before JAX touches a device."""
    # libtpu may be installed for ahead-of-time compilation alone; on a machine without a TPU, JAX would try to
    # start it, wait for a metadata server, and print a page of warnings. With a GPU, JAX is left to choose.
    if "JAX_PLATFORMS" in os.environ or has_accelerator():
        return
    if importlib.util.find_spec("libtpu") is not None:
        jax.config.update("jax_platforms", "cpu")
