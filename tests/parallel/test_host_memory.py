"""Freed memory is kept: fewer page faults, and False where the C library has no such setting."""

import subprocess
import sys

from pe_lab.parallel import has_accelerator, keep_freed_memory

TOUCH = """
import resource
import numpy as np
if {keep}:
    from pe_lab.parallel import keep_freed_memory
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(64_000_000, np.uint8)  # larger than the C library keeps by default
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults(keep: bool) -> int:
    run = subprocess.run([sys.executable, "-c", TOUCH.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_kept_memory_is_not_mapped_again():
    assert faults(keep=True) * 10 < faults(keep=False)


def test_only_linux_is_supported(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


def test_jax_platforms_selects_the_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not has_accelerator()
