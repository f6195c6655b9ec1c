"""The compiler: the devices to compile for without having them, and its options for a train step.

TPU slices are compiled for by libtpu, GPUs by JAX's CUDA plugin, CPUs as virtual ones.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from pe_lab.config import TOPOLOGIES
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.parallel.processes import GPU_MEMORY_SHARE
from pe_lab.parallel.topology import GENERATIONS, Topology


class NoCompiler(Exception):
    """No compiler on this machine supports the topology. The message says how to get one."""


def topology_devices(topology: Topology) -> list[Any]:
    """Devices to compile for: this machine's, virtual CPUs, or accelerators that only the compiler knows.

    Raises:
      NoCompiler: accelerators, without their compiler.
      ConfigError: there is no slice of this shape.
      UnsupportedError: JAX has started with fewer CPU devices.
    """
    if topology.kind == "local":
        return list(jax.devices())
    if topology.kind == "cpu":
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX has started, and keeps its devices
                jax.config.update("jax_num_cpu_devices", topology.count)
        devices = jax.devices("cpu")
        if len(devices) < topology.count:
            raise UnsupportedError(f"--topology={topology.text}: JAX has started with {len(devices)} CPU devices.")
        return list(devices[: topology.count])
    return _gpu_devices(topology) if topology.kind == "gpu" else _slice_devices(topology)


def compiler_name(topology: Topology) -> str:
    """The compiler of the programs for a topology, with its version: `libtpu 0.0.51`."""
    return f"libtpu {libtpu_version()}" if topology.kind == "tpu" else f"XLA of jax {jax.__version__}"


def libtpu_version() -> str:
    """The version of the TPU compiler on this machine, or "" where there is none."""
    return _version("libtpu")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _slice_devices(topology: Topology) -> list[Any]:
    if not libtpu_version():
        raise NoCompiler("libtpu is not installed: pip install 'pe-lab[aot]' (Linux), no TPU needed")
    from jax.experimental import topologies

    # Compiling uses no chip: several processes may do it at once, beside a run. Without a TPU, the other variables
    # keep libtpu from querying a metadata server and from printing warnings.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    options: dict[str, Any] = {"wrap": wrap_around(topology)}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if config := GENERATIONS[topology.text.partition(":")[0]].chip_config:
        options["chip_config_name"] = config
    try:
        return list(topologies.get_topology_desc(topology.text, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in reason:
            raise ConfigError(
                f"--topology: no slice is '{topology.text}' ({reason}). Examples: {TOPOLOGIES}."
            ) from None
        raise NoCompiler(f"libtpu does not start: {reason}") from None


def wrap_around(topology: Topology) -> tuple[bool, bool, bool]:
    """Whether the last chip of each physical axis of a TPU slice is linked to the first.

    libtpu leaves these links out by default, and then compiles gathers as all-reduces. v4, v5p and TPU7x: all axes wrap
    around if the slice consists of whole cubes of 4 x 4 x 4, which optical switches connect. v5e and v6e: an axis of 16
    wraps around. Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 2.
    """
    sizes = topology.shape
    if len(sizes) == 3:
        whole = all(size % 4 == 0 for size in sizes)
        return whole, whole, whole
    return sizes[0] == 16, sizes[1] == 16, False


class _Gpu(NamedTuple):
    """What XLA asks of a GPU to compile for it, from CUDA's tables of compute capabilities and NVIDIA's data sheets."""

    description: str
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    lanes: int  # float32 units of a multiprocessor
    shared: int  # KiB of a multiprocessor, of which a block may use all but one
    l2_mib: int


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 64, 164, 40),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 128, 228, 50),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 1.98, 128, 228, 50),
    "b200": _Gpu("NVIDIA B200", (10, 0), 148, 1.965, 128, 228, 126),
}


def _gpu_devices(topology: Topology) -> list[Any]:
    """The GPUs of one node, or of several nodes, each of them a process."""
    nvidia = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cudnn-cu13")
    if missing := [name for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt", *nvidia) if not _version(name)]:
        raise NoCompiler(f"without {', '.join(missing)}: pip install 'pe-lab[gpu]' (Linux), no GPU needed")
    from jax.experimental import topologies

    shape = f"1x{topology.nodes}x{topology.count // topology.nodes}"  # partitions x nodes x GPUs of each
    try:
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=_target_config(topology), topology=shape
        ).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise NoCompiler(f"JAX's CUDA plugin does not start: {str(error).splitlines()[0]}") from None
    return list(devices)


def _target_config(topology: Topology) -> str:
    """A `stream_executor.GpuTargetConfigProto` of XLA, as text."""
    gpu = _GPUS[topology.text.partition(":")[0]]
    major, minor = gpu.capability
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": gpu.shared * 1024,
        "shared_memory_per_block_optin": (gpu.shared - 1) * 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(topology.chip.bandwidth),
        "l2_cache_size": gpu.l2_mib * 2**20,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": int(topology.chip.memory / GPU_MEMORY_SHARE),  # all of it, also what JAX leaves free
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    info = " ".join(f"{name}: {value}" for name, value in limits.items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 } '
        f'device_description_str: "{gpu.description}"'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Options for a train step, by the kind of chip: which collectives run beside the computation.
#
# The compiler's defaults (libtpu 0.0.51) already schedule for hidden latency. What they leave out is below, with its
# effect on a step; `pe_lab.plan --explain` shows it for any recipe, and `config.compiler_options` overrides each
# (`--config.compiler_options.NAME=VALUE`; "" removes one). docs/log.md has what was tried in vain.
# - v5p, v6e and TPU7x have SparseCores, which can run collectives while the TensorCore computes. Of the bytes that a
#   step of an 8B model on v5p:4x4x4 sends, 96% then overlap with computation instead of 0%; and reduce-scatters over
#   all three axes of a torus are reduce-scatters, which otherwise are compiled as all-reduces of twice the bytes
#   (40.6 GiB instead of 54.3). 1.5B on v6e:16x16: 85% instead of 0%. v4 and v5e have none.
# - TPUs, with a context axis: the all-to-alls that exchange tokens for heads run beside computation, which else waits
#   for each: of the bytes that an 8B model sends on v5p:4x4x4 at 131,072 tokens, 81% overlap instead of 56%. libtpu
#   refuses to compile this for v5e where a group is a part of a ring of 16 chips.
# - GPUs, in a scan over layers: the weights of a layer are gathered while the layer before computes. Of the bytes that
#   all-gathers of a 494M model send on h100:8, 96% then overlap with computation instead of 0%, for 3% more memory; 8B
#   on h100:16: 92% instead of 91%. Without a scan over layers, XLA would do so across micro-batches, and keep the
#   weights of all layers twice; XLA of JAX 0.10 does that with a scan too, for 58% more memory.
# - GPUs: XLA computes again what it thinks does not fit in three quarters of the memory, beside what `remat` names: 6%
#   of the FLOPs of a 1.7B model on h100:8, which needs 62 of 72 GiB. Here `remat` alone says what is computed again.
# - CPUs: a step that may skip its update overwrites moments that the new parameters are computed from. XLA copies
#   them first unless it analyzes in which order they are used: 1.6% of the processor time of a 4M model's step.

_COLLECTIVES = ("all_gather", "2d_all_gather", "3d_all_gather", "all_reduce", "reduce_scatter", "nd_reduce_scatter")
_SPARSE_CORES = {f"xla_tpu_enable_sparse_core_collective_offload_{name}": True for name in _COLLECTIVES}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    **dict.fromkeys(("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"), _SPARSE_CORES),
}
OPTIONS_OF_CONTEXT = dict.fromkeys(
    ("TPU v4", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"), {"xla_tpu_enable_async_all_to_all": True}
)


def compiler_options(mesh: Mesh, accumulate: int, scan: bool, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a train step of `accumulate` micro-batches for the devices of a mesh, for `jax.jit` and `compile`.

    `scan`: the model scans over its layers. `overrides` are those of the recipe; "" removes an option.
    """
    device = mesh.devices.flat[0]
    chosen = OPTIONS.get(device.device_kind, {})
    if device.platform == "gpu":
        version = jax.__version_info__[:2]
        chosen = {"xla_gpu_memory_limit_slop_factor": 200}
        if scan and version >= (0, 12):
            chosen["xla_gpu_pipeline_all_gather"] = "COLLECTIVE_PIPELINING_MODE_ON"
        elif scan and version == (0, 10) and accumulate == 1:
            chosen["xla_gpu_enable_pipelined_all_gather"] = True
    if mesh.shape["context"] > 1:
        chosen = chosen | OPTIONS_OF_CONTEXT.get(device.device_kind, {})
    options = chosen | dict(overrides)
    return {name: value for name, value in options.items() if value != ""}
