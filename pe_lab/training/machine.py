"""The machine of a run: versions, hardware, and the peak that MFU is a fraction of."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from typing import Any, NamedTuple

import jax

from pe_lab.parallel import host_memory
from pe_lab.parallel.topology import chip_of


class Peak(NamedTuple):
    """FLOP/s of all devices together, and the source of the number; 0 = unknown."""

    flops: float
    source: str


def peak_flops() -> Peak:
    """The data sheet's peak of the accelerators. Of a CPU it is unknown, so no MFU is shown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Peak(0.0, "unknown for a CPU")
    chip = chip_of(device)
    if chip.peak:
        return Peak(chip.peak * jax.device_count(), f"{chip.name} data sheet, bf16")
    return Peak(0.0, f"unknown for {device.device_kind}")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    names = ("pe-lab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """The platform, devices, memory and host of this process."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
    }
