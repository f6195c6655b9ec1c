"""The device mesh, logical axes, and the start of several processes."""

from pe_lab.parallel.host_memory import check_memory, host_memory, keep_freed_memory, return_freed_memory
from pe_lab.parallel.processes import (
    all_values,
    compute_devices,
    computes_together,
    first_then_others,
    give_value,
    has_accelerator,
    hide_absent_tpu,
    is_first,
    on_first,
    one_program,
    shared,
    start_processes,
)
from pe_lab.parallel.sharding import (
    AxisRules,
    balanced_order,
    check_batch,
    compute_capability,
    constrain,
    context_size,
    current_mesh,
    fetch,
    make_mesh,
    padded_length,
    platform,
    put,
    sharding_axes,
    slots_are_sharded,
    use_mesh,
)
