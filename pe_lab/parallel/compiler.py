"""Options of the compiler for a train step, by the kind of chip: which collectives run beside the computation.

The compiler's defaults (libtpu 0.0.51) already schedule for hidden latency, and on v5e run all-gathers beside matrix
products. What they leave out is below, with its effect on a step; `pe_lab.plan --explain` shows it for any recipe, and
`config.compiler_options` overrides each (`--config.compiler_options.NAME=VALUE`; "" removes one).

- v5p, v6e and TPU7x have SparseCores, which can run collectives while the TensorCore computes. Of the bytes that a step
  of an 8B model on v5p:4x4x4 sends, 96% then overlap with computation instead of 0%; and reduce-scatters over all three
  axes of a torus are reduce-scatters, which otherwise are compiled as all-reduces of twice the bytes (40.6 GiB instead
  of 54.3). 1.5B on v6e:16x16: 85% instead of 0%.
- v4 and v5e have none. Options of earlier libtpu releases for them (data-parallel overlap, asynchronous all-reduce,
  backward pipelining of all-gathers) give the same program as the defaults, and fusing reduce-scatters with products
  exceeds VMEM (docs/log.md).
- GPUs: the weights of a layer are gathered while the layer before computes. Of the bytes that all-gathers of a 494M
  model send on h100:8, 96% then overlap with computation instead of 0%, for 3% more memory; 8B on h100:16: 92% instead
  of 91%. XLA of JAX 0.10 does so across micro-batches too, for 58% more memory (of JAX 0.12, 3%): there it is off with
  `accumulate`. The latency-hiding scheduler is on by default. The other options that pipeline or combine collectives
  change nothing, or send less beside computation (docs/log.md).
- CPUs: a step that may skip its update overwrites moments that the new parameters are computed from. XLA copies them
  first unless it analyzes in which order they are used: 1.6% of the processor time of a 4M model's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORES: dict[str, Any] = {
    _OFFLOAD + name: True
    for name in (
        "all_gather",
        "2d_all_gather",
        "3d_all_gather",
        "all_reduce",
        "reduce_scatter",
        "nd_reduce_scatter",
    )
}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    "TPU v5": _SPARSE_CORES,
    "TPU v5p": _SPARSE_CORES,
    "TPU v6 lite": _SPARSE_CORES,
    "TPU v6e": _SPARSE_CORES,
    "TPU7x": _SPARSE_CORES,
}


def compiler_options(device: Any, accumulate: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a train step for devices such as `device`, for `jax.jit` and `Lowered.compile`.

    Args:
      device: of the mesh; its kind decides.
      accumulate: number of micro-batches of a step.
      overrides: of the recipe; "" removes an option.
    """
    chosen = _gpu_options(accumulate) if device.platform == "gpu" else OPTIONS.get(device.device_kind, {})
    options = chosen | dict(overrides)
    return {name: value for name, value in options.items() if value != ""}


def _gpu_options(accumulate: int) -> dict[str, Any]:
    version = jax.__version_info__[:2]
    if version >= (0, 12):
        return {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
    return {"xla_gpu_enable_pipelined_all_gather": True} if version == (0, 10) and accumulate == 1 else {}
