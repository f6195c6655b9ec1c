"""Checksums of arrays: what they tell apart, in checkpoints, and beside training steps on several CPU devices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tiny_runs import reseal

from pe_lab.checkpoints import array_checksums
from pe_lab.checkpoints.array_checksums import checksum
from pe_lab.checkpoints.locating import read_manifest
from pe_lab.checkpoints.store import Store
from pe_lab.config import MeshConfig
from pe_lab.errors import CheckpointError
from pe_lab.parallel import make_mesh

ROOT = Path(__file__).parents[2]
# Without the waits in `describe_arrays` the devices are stuck within 20 rounds, and XLA ends the process.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=10"
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pe_lab.checkpoints.array_checksums import describe_arrays, received

mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
on = lambda spec: jax.device_put(rng.standard_normal((16, 16)).astype(np.float32), NamedSharding(mesh, spec))
state = [on(spec) for spec in (P("fsdp", "tensor"), P("tensor", None), P("fsdp", None), P()) * 6]
x = on(P("data", None))

def step(state):
    def loss(state):
        y = x
        for matrix in state:
            y = jnp.tanh(y @ matrix)
        return (y**2).sum()
    return [a - 0.01 * g for a, g in zip(state, jax.grad(loss)(state))]

step = jax.jit(step, donate_argnums=0, out_shardings=[a.sharding for a in state])
for round in range(100):
    for _ in range(3):
        state = step(state)
    described = describe_arrays({str(i): a for i, a in enumerate(state)})
    if round % 3 == 0:
        received(described)
jax.block_until_ready(state)
print("done")
"""


@pytest.mark.slow
def test_checksums_beside_steps_on_eight_devices_end():
    """15 s, in two processes."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    for _ in range(2):
        run = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


@pytest.mark.parametrize("change", ["one value", "two values swapped", "dtype width"])
def test_a_checksum_tells_arrays_apart_but_not_shardings(change):
    values = np.random.default_rng(0).normal(size=(16, 8, 3)).astype(np.float32)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(values, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor")))
    expected = int(checksum(jnp.asarray(values)))
    assert int(checksum(spread)) == expected
    changed = values.copy()
    if change == "one value":
        changed.view(np.uint32)[3, 4, 1] ^= 1
    elif change == "two values swapped":
        changed[[2, 9]] = changed[[9, 2]]
    else:
        changed = values.astype(jnp.bfloat16)
    assert int(checksum(jnp.asarray(changed))) != expected


def test_a_large_checkpoint_of_an_accelerator_is_verified_on_a_cpu(tmp_path, monkeypatch):
    """An accelerator saves checksums of any size, which a CPU leaves out beyond CPU_BYTES."""
    store = Store(tmp_path / "checkpoints")

    def save(step, value):
        store.save(step, {"a": jnp.full(3000, value)}, None, {"format": 1, "step": step})

    save(5, 1.0)
    store.wait()
    monkeypatch.setattr(array_checksums, "CPU_BYTES", 0)
    template = {"a": jax.ShapeDtypeStruct((3000,), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))}
    restored, _ = store.restore(5, template)
    assert store.verified == "verified" and (restored["a"] == 1).all()
    save(10, 2.0)
    store.wait()
    five, ten = (store.directory / str(step) for step in (5, 10))
    assert read_manifest(ten).about["arrays"]["params"]["a"]["checksum"] is None
    shutil.rmtree(five / "params")
    shutil.copytree(ten / "params", five / "params")
    reseal(five)
    with pytest.raises(CheckpointError, match=r"1 of its arrays differ from what was saved: params.a"):
        store.restore(5, template)
    store.close()
