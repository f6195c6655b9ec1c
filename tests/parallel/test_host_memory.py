"""Freed memory is kept, which saves page faults, or returned; False where the C library has no such setting."""

import subprocess
import sys

import pytest

from pe_lab.parallel import has_accelerator, keep_freed_memory

TOUCH = """
import resource
import sys
if {keep}:
    from pe_lab.parallel import keep_freed_memory
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"1" * 100_000_000  # larger than the C library keeps by default, and than the heap of a thread
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


TRAINED = """
import threading
from pe_lab.train import main
assert main(sys.argv[1:]) == 0
def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(faults()))
    thread.start()
    thread.join()
    return found[0]
in_a_thread()
print(in_a_thread())
"""


@pytest.mark.slow  # 15 s
def test_training_keeps_what_its_threads_free(tmp_path):
    """XLA allocates a step's scratch memory in threads, whose own heaps hold at most 64 MiB."""
    recipe = tmp_path / "two_steps.py"
    recipe.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(arg=''):\n"
        "    config = ConfigDict()\n"
        "    config.model = dict(layers=1, d_model=8, d_ff=8, heads=1, kv_heads=1)\n"
        "    config.data = dict(sources=[dict(source='needles')], tokenizer='bytes')\n"
        "    optimizer = dict(learning_rate=1e-3, warmup_steps=1)\n"
        "    config.phases = [dict(name='pretrain', steps=2, positional='nope', sequence_length=64, batch_size=1, "
        "optimizer=optimizer)]\n"
        "    config.log = dict(validate_every_steps=1000, validation_batches=1)\n"
        "    return config\n"
    )
    code = TOUCH.format(keep=False) + TRAINED
    command = [sys.executable, "-c", code, f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < 5 * 100_000_000 / 4096 / 10
