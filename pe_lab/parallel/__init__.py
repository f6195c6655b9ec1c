"""Mesh, logical axes, multi-process start-up."""

from pe_lab.parallel.host_memory import keep_freed_memory
from pe_lab.parallel.mesh import check_batch, make_mesh, mesh_shape
from pe_lab.parallel.processes import has_accelerator, hide_absent_tpu, start_processes
from pe_lab.parallel.sharding import AxisRules, constrain, use_mesh

__all__ = [
    "AxisRules",
    "check_batch",
    "constrain",
    "has_accelerator",
    "hide_absent_tpu",
    "keep_freed_memory",
    "make_mesh",
    "mesh_shape",
    "start_processes",
    "use_mesh",
]
