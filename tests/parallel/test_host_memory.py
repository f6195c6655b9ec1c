"""Freed memory is kept, which saves page faults, or returned; False where the C library has no such setting."""

import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_kept_memory_is_not_mapped_again():
    assert faults(keep=True) * 10 < faults(keep=False)


FRAGMENTS = """
import numpy as np
from pe_lab.parallel import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [np.ones(100_000, np.uint8) for _ in range(2000)]
kept = blocks[-1]  # at the end of the heap: the C library returns nothing below it by itself
del blocks
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.slow
def test_freed_memory_below_memory_in_use_is_returned():
    run = subprocess.run([sys.executable, "-c", FRAGMENTS], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 150_000_000


def test_only_linux_is_supported(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


def test_jax_platforms_selects_the_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not has_accelerator()
