"""Options of the compiler for a train step, by the kind of chip: which collectives run beside the computation.

The compiler's defaults (libtpu 0.0.51) already schedule for hidden latency, and on v5e run all-gathers beside matrix
products. What they leave out is below, with its effect on a step; `pe_lab.plan --explain` shows it for any recipe, and
`config.compiler_options` overrides each (`--config.compiler_options.NAME=VALUE`; "" removes one).

- v5p, v6e and TPU7x have SparseCores, which can run collectives while the TensorCore computes. Of the bytes that a step
  of an 8B model on v5p:4x4x4 sends, 99% then overlap with computation instead of 0%; and reduce-scatters over all three
  axes of a torus are reduce-scatters, which otherwise are compiled as all-reduces of twice the bytes (40.6 GiB instead
  of 54.3). 1.5B on v6e:16x16: 94% instead of 0%.
- v4 and v5e have none. Options of earlier libtpu releases for them (data-parallel overlap, asynchronous all-reduce,
  backward pipelining of all-gathers) give the same program as the defaults, and fusing reduce-scatters with products
  exceeds VMEM (docs/log.md).
- GPUs: XLA's latency-hiding scheduler is on by default on Hopper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "TPU v5": _SPARSE_CORES,
    "TPU v5p": _SPARSE_CORES,
    "TPU v6 lite": _SPARSE_CORES,
    "TPU v6e": _SPARSE_CORES,
    "TPU7x": _SPARSE_CORES,
}


def compiler_options(device: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a program for devices such as `device`, for `jax.jit` and `Lowered.compile`.

    Args:
      device: of the mesh; its `device_kind` decides.
      overrides: of the recipe; "" removes an option.
    """
    options = OPTIONS.get(getattr(device, "device_kind", ""), {}) | dict(overrides)
    return {name: value for name, value in options.items() if value != ""}
