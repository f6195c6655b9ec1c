"""Silent corruption: the gradients of a step, computed twice and compared bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.families import leaf_paths
from pe_lab.errors import SilentCorruption
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, use_mesh
from pe_lab.parallel.compiler import compiler_options
from pe_lab.training.step import BATCH_AXES, Batch, Loss, RandomPositions, TrainState, gradients, make_shardings


class Replay:
    """Checks every `every`-th step: each device's gradients are computed twice, and their checksums compared.

    Where every device holds all parameters, its gradients are those of its own sequences, before they are added up, and
    a difference names the device that computed it. Elsewhere they are its part of the sum over all devices.
    """

    def __init__(
        self,
        every: int,
        model: Model,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        rules: AxisRules,
        accumulate: int,
        positions: RandomPositions | None,
        options: Mapping[str, Any],
        show: Callable[[str], None],
        distilled: tuple[Loss, Any] | None = None,
    ):
        self._every, self._mesh, self._show = every, mesh, show
        self._names = list(leaf_paths(model.shapes))
        shardings = make_shardings(model, optimizer, mesh, rules)
        loss, of_schedule = distilled or (model, shardings.replicated)
        everywhere = PartitionSpec(mesh.axis_names)
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings.state.params)
        self.alone = all(size == 1 for axis, size in mesh.shape.items() if axis != "data")
        batch_spec = rules.spec(BATCH_AXES)

        def checksums(params: Any, batch: Batch, schedule: Any, step: jax.Array) -> jax.Array:
            if positions is not None:
                batch = positions.replace(batch, step)
            if self.alone:

                def of_device(params: Any, batch: Batch, schedule: Any) -> jax.Array:
                    return _checksums(gradients(loss, accumulate, params, batch, schedule)[1])

                return jax.shard_map(
                    of_device,
                    mesh=mesh,
                    in_specs=(PartitionSpec(), batch_spec, PartitionSpec()),
                    out_specs=everywhere,
                    check_vma=False,
                )(params, batch, schedule)
            with use_mesh(mesh, rules):
                grads = gradients(loss, accumulate, params, batch, schedule)[1]
            return jax.shard_map(_checksums, mesh=mesh, in_specs=(specs,), out_specs=everywhere, check_vma=False)(grads)

        self._checksums = jax.jit(
            checksums,
            in_shardings=(shardings.state.params, shardings.batch, of_schedule, shardings.replicated),
            out_shardings=NamedSharding(mesh, everywhere),
            compiler_options=compiler_options(mesh, accumulate, model.config.scan, options),
        )
        # Every process sees the differences of all devices, and all stop together.
        self._differ = jax.jit(lambda one, other: one != other, out_shardings=shardings.replicated)
        self._agreed = 0  # the last step that was checked
        self._timed = False

    def check(self, step: int, state: TrainState, batch: Batch, schedule: Any) -> None:
        """Computes the gradients of a step twice, if it is due; `SilentCorruption` names devices where they differ."""
        if step % self._every:
            return
        began = time.perf_counter()
        one = self._checksums(state.params, batch, schedule, state.step)
        other = self._checksums(state.params, batch, schedule, state.step)
        differ = np.asarray(jax.device_get(self._differ(one, other)))  # [devices, parameters]
        if differ.any():
            raise SilentCorruption(self._message(step, differ))
        if self._agreed and not self._timed:  # the first one compiled
            self._timed = True
            seconds = time.perf_counter() - began
            self._show(f"one step in {self._every}: gradients are computed twice more and compared, in {seconds:.3g} s")
        self._agreed = step

    def _message(self, step: int, differ: np.ndarray) -> str:
        devices = self._mesh.devices.ravel()
        faulty = [devices[i] for i in np.flatnonzero(differ.any(axis=1))]
        processes = sorted({device.process_index for device in faulty})
        names = ", ".join(f"{device} of process {device.process_index}" for device in faulty[:8])
        parameter = self._names[int(np.flatnonzero(differ.any(axis=0))[0])]
        where = f"on {names}{' ...' if len(faulty) > 8 else ''} (first in '{parameter}')"
        if len(faulty) == len(devices) > 1:
            where += "; a sum over devices had spread the difference, so the faulty one is not known"
        return (
            f"Silent corruption: the gradients of step {step}, computed twice, differ {where}. Take the machine of "
            f"process {', '.join(map(str, processes))} out, and run the command again. Checkpoints after step "
            f"{self._agreed}, the last one that agreed, may be wrong: move them out of their directory."
        )


def _checksums(gradients: Any) -> jax.Array:
    """[1, leaves] uint32: of each array the sum of its words times odd numbers, which any flipped bit changes."""

    def of_leaf(x: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).ravel()
        return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jnp.stack([of_leaf(leaf) for leaf in jax.tree.leaves(gradients)])[None]
