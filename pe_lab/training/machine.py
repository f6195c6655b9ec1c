"""What a run ran on: versions, hardware, and the peak that MFU is measured against."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pe_lab.parallel.topology import chip_of


class Peak(NamedTuple):
    """FLOP/s of all devices together, and where the number is from; 0 = unknown."""

    flops: float
    source: str


def peak_flops() -> Peak:
    """The data sheet's peak of the accelerators; on a CPU, what a matrix product reaches here and now."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Peak(_measured_matmul_flops(), "matrix product measured at the start, float32")
    chip = chip_of(device)
    if chip.peak:
        return Peak(chip.peak * jax.device_count(), f"{chip.name} data sheet, bf16")
    return Peak(0.0, f"unknown for {device.device_kind}")


def _measured_matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def versions() -> dict[str, str]:
    """Of Python and the packages that decide a result."""
    names = ("pe-lab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Hardware, for a person who reads a report a year later."""
    device = jax.devices()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
    }
