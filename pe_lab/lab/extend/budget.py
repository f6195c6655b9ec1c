"""How much an extension may spend: tokens, FLOPs, or time on this machine."""

from __future__ import annotations

import argparse
import re
import subprocess
import time

import numpy as np

from pe_lab.errors import ConfigError, UnsupportedError

MFU = 0.4  # of the peak, or of what a matrix product reaches on a CPU
TOKENS = 50_000_000  # of an arm, where nothing is given
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0}


def amount(text: str) -> int:
    """A number of tokens: 50M, 1.5B, 300k, 2000000."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)([kmbt]?)", text.strip().lower())
    value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]] if found else 0
    if not 1 <= value < 1e15:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of tokens; write it as 50M, 1.5B or 2000000")
    return int(value)


def tokens_of(budget: str, flops_per_token: float, runs: int) -> int:
    """The tokens of one of `runs` runs that share a budget equally.

    Args:
      budget: tokens, as `300M`; FLOPs, as `2e18flops`; or time on this machine, as `3h` or `20min`.
      flops_per_token: of a train step.

    Raises:
      ConfigError: it is none of these.
      UnsupportedError: it is a time, and the speed of this machine is not known.
    """
    text = budget.strip().lower()
    if found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(h|min|s)", text):
        return max(1, int(float(found[1]) * _SECONDS[found[2]] * machine_flops() / flops_per_token / runs))
    if found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)flops", text):
        return max(1, int(float(found[1]) / flops_per_token / runs))
    try:
        return max(1, amount(text) // runs)
    except argparse.ArgumentTypeError:
        raise ConfigError(
            f"--budget='{budget}': give tokens, as 300M, FLOPs, as 2e18flops, or time on this machine, as 3h or 20min."
        ) from None


def machine_flops() -> float:
    """FLOP/s that training is expected to reach on the devices of this machine: `MFU` of their peak.

    The peak of a CPU is that of a matrix product in float32, which is timed.
    """
    from pe_lab.lab.sweeps.runners import visible_gpus, visible_tpus  # these load JAX
    from pe_lab.parallel.topology import CHIPS

    if gpus := visible_gpus():
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        known = [chip.peak for chip in CHIPS.values() if chip.name.split()[1] in name]
        if not known:
            raise UnsupportedError("The speed of this GPU is not known. Give --budget in tokens or FLOPs.")
        return MFU * known[0] * len(gpus)
    if visible_tpus():
        raise UnsupportedError("--budget as a time is for GPUs and CPUs. Give tokens or FLOPs; pe_lab.plan has hours.")
    matrix, seconds = np.ones((1024, 1024), np.float32), []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return MFU * 2 * 1024**3 / min(seconds)
