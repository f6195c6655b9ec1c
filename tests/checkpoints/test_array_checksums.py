"""Checksums on several CPU devices, beside training steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
