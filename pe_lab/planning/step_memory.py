"""What one train step needs of a chip's memory: estimated from shapes, or as the compiler lays it out."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from pe_lab.model import Model
from pe_lab.parallel import AxisRules
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.run import PhasePlan
from pe_lab.training.step import TrainState, compile_train_step, init_state, make_shardings


@dataclass(frozen=True)
class Estimate:
    """Bytes per chip, added up from shapes: state and batch exactly, the rest as well as can be guessed."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int  # kept from the forward pass for the backward pass
    working: int  # the larger of one layer's backward pass and one chunk of logits

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Compiled:
    """Bytes per chip, as the compiler laid the step out. `aliased` outputs take the place of arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int
    seconds: float

    @property
    def needed(self) -> int:
        """The larger of the compiler's peak and the sum of the parts: each leaves something out."""
        return max(self.peak, self.arguments + self.outputs - self.aliased + self.temporaries + self.code)


class OutOfMemory(Exception):
    """The compiler refused the step. `used` and `capacity` in bytes, None where it gave no numbers."""

    def __init__(self, message: str, used: int | None, capacity: int | None):
        super().__init__(message)
        self.used, self.capacity = used, capacity


def step_inputs(
    model: Model, optimizer: optax.GradientTransformation, phase: PhasePlan, segments: bool
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct], Any]:
    """(state, batch, schedule) of a phase as shapes and dtypes, to trace a step where there is no data."""
    state = jax.eval_shape(lambda params: init_state(model, optimizer, params), model.shapes)
    shape = (phase.config.batch_size, phase.config.sequence_length)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if segments:
        kinds |= {"segments": jnp.int32, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in kinds.items()}
    schedule = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), phase.schedule)
    return state, batch, schedule


def estimate_memory(model: Model, phase: PhasePlan, segments: bool, mesh: Mesh, rules: AxisRules) -> Estimate:
    """The memory of one chip of `mesh` during a train step of `phase`; `mesh` may be of placeholders."""
    optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, model.axes)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state, batch, _ = step_inputs(model, optimizer, phase, segments)

    def bytes_of(shapes: Any, placed: Any) -> int:
        def of(x: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(of, shapes, placed)))

    parameters = bytes_of(state.params, shardings.state.params)
    saved, working = _activations(model, phase, mesh)
    return Estimate(
        parameters=parameters,
        optimizer=bytes_of(state.optimizer, shardings.state.optimizer),
        batch=bytes_of(batch, dict.fromkeys(batch, shardings.batch)),
        gradients=parameters * (2 if phase.config.accumulate > 1 else 1),
        activations=saved,
        working=working,
    )


def _activations(model: Model, phase: PhasePlan, mesh: Mesh) -> tuple[int, int]:
    """Bytes per chip (kept for the backward pass, largest working set)."""
    config, tensor = model.config, mesh.shape["tensor"]
    length, width = phase.config.sequence_length, np.dtype(config.dtype).itemsize
    rows = phase.config.batch_size // phase.config.accumulate // (mesh.shape["data"] * mesh.shape["fsdp"])
    tokens = rows * length // mesh.shape["context"]

    # Per token and layer: queries, keys, values, as projected; and everything that a backward pass reads.
    heads = config.heads // tensor
    kv_heads = config.kv_heads // tensor if config.kv_heads % tensor == 0 else config.kv_heads
    qkv = (heads + 2 * kv_heads) * config.head_dim
    mlp_in = (2 if config.gated_mlp else 1) * (config.d_ff // tensor)  # gate and up, or up alone, as projected
    mlp = mlp_in + config.d_ff // tensor
    everything = width * (4 * config.d_model + 2 * qkv + heads * config.head_dim + mlp)
    whole = length <= config.attention_chunk if config.attention == "auto" else config.attention != "chunked"
    if whole:
        everything, block = everything + heads * length * width, heads * length * 4
    else:
        block = heads * min(config.attention_chunk, length) ** 2 // length * 4
    kept = {
        "none": everything,
        # Products with weights (queries, keys, values, gate, up, both outputs), and the layer's input.
        "dots": width * (3 * config.d_model + qkv + mlp_in),
        "full": width * config.d_model,
    }[config.remat]

    # One layer's activations and their gradients, two blocks of logits, and its weights gathered over fsdp.
    weights = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(model.shapes["layers"])) // tensor
    layer = 2 * tokens * (everything + block) + weights * (width + 4)
    # A chunk of logits, its rows of the embedding and their gradient, and the gradient of the hidden states.
    chunk = config.vocab_size // (config.loss_chunks * tensor)
    logits = 4 * tokens * (chunk + config.d_model) + chunk * config.d_model * (width + 4)
    return config.layers * tokens * kept, max(layer, logits)


def compile_memory(model: Model, phase: PhasePlan, segments: bool, mesh: Mesh, rules: AxisRules) -> Compiled:
    """Compiles the step that `train` runs, for the devices of `mesh`, which need not exist.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, model.axes)
    inputs = step_inputs(model, optimizer, phase, segments)
    start = time.perf_counter()
    return analyze(compile_train_step(model, optimizer, mesh, rules, phase.config.accumulate).lower(*inputs), start)


def analyze(lowered: Any, start: float) -> Compiled:
    """What the compiler says of a program's memory; `start`: when its lowering began.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    try:
        analysis = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _out_of_memory(str(error)) from None
    return Compiled(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        peak=getattr(analysis, "peak_memory_in_bytes", 0),
        seconds=time.perf_counter() - start,
    )


# libtpu 0.0.51 says "... (32.57G) exceeds available HBM (15.75G)", earlier ones "Used 32.57G of 15.75G hbm".
_REFUSALS = (
    r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)",
    r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm",
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _out_of_memory(message: str) -> OutOfMemory:
    first = message.splitlines()[0][:300]
    for pattern in _REFUSALS:
        if found := re.search(pattern, message):
            used, used_unit, capacity, unit = found.groups()
            return OutOfMemory(first, int(float(used) * _UNITS[used_unit]), int(float(capacity) * _UNITS[unit]))
    return OutOfMemory(first, None, None)
