"""The memory of one chip during a train step, estimated from shapes."""

from __future__ import annotations

import dataclasses
import math
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
from pe_lab.training.step import TrainState, init_state, make_shardings


@dataclass(frozen=True)
class Estimate:
    """Bytes per chip. State and batch are exact; the rest is approximate."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int  # kept from the forward pass for the backward pass
    working: int  # the larger of one layer's backward pass and one chunk of logits

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def step_inputs(
    model: Model, optimizer: optax.GradientTransformation, phase: PhasePlan, segments: bool
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct], Any]:
    """(state, batch, schedule) of a phase as shapes and dtypes, to trace a step without data."""
    state = jax.eval_shape(lambda params: init_state(model, optimizer, params), model.shapes)
    shape = (phase.config.batch_size, phase.config.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if segments:
        dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    schedule = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), phase.schedule)
    return state, batch, schedule


def estimate_memory(model: Model, phase: PhasePlan, segments: bool, mesh: Mesh, rules: AxisRules) -> Estimate:
    """The memory of one chip during a train step of `phase`; the devices of `mesh` may be placeholders."""
    optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, model.axes)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state, batch, _ = step_inputs(model, optimizer, phase, segments)

    def bytes_of(shapes: Any, shardings: Any) -> int:
        def of(x: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(of, shapes, shardings)))

    parameters = bytes_of(state.params, shardings.state.params)
    activations, working = _activations(model, phase, mesh)
    return Estimate(
        parameters=parameters,
        optimizer=bytes_of(state.optimizer, shardings.state.optimizer),
        batch=bytes_of(batch, dict.fromkeys(batch, shardings.batch)),
        gradients=parameters * (2 if phase.config.accumulate > 1 else 1),
        activations=activations,
        working=working,
    )


def _activations(model: Model, phase: PhasePlan, mesh: Mesh) -> tuple[int, int]:
    """Bytes per chip: kept for the backward pass, and of the largest working set."""
    config, tensor = model.config, mesh.shape["tensor"]
    length, width = phase.config.sequence_length, np.dtype(config.dtype).itemsize
    sequences = phase.config.batch_size // phase.config.accumulate // (mesh.shape["data"] * mesh.shape["fsdp"])
    tokens = sequences * length // mesh.shape["context"]

    # Bytes per token and layer. `qkv`: queries, keys and values after their projections.
    heads = config.heads // tensor
    kv_heads = config.kv_heads // tensor if config.kv_heads % tensor == 0 else config.kv_heads
    qkv = (heads + 2 * kv_heads) * config.head_dim
    mlp_in = (2 if config.gated_mlp else 1) * (config.d_ff // tensor)  # gate and up, or up alone
    mlp = mlp_in + config.d_ff // tensor
    everything = width * (4 * config.d_model + 2 * qkv + heads * config.head_dim + mlp)
    whole = length <= config.attention_chunk if config.attention == "auto" else config.attention != "chunked"
    if whole:
        everything, block = everything + heads * length * width, heads * length * 4
    else:
        block = heads * min(config.attention_chunk, length) ** 2 // length * 4
    kept = {
        "none": everything,
        # The layer's input, and its matrix products: queries, keys, values, gate, up and both outputs.
        "dots": width * (3 * config.d_model + qkv + mlp_in),
        "full": width * config.d_model,
    }[config.remat]

    # One layer: its activations and their gradients, two blocks of logits, its weights gathered over fsdp.
    weights = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(model.shapes["layers"])) // tensor
    layer = 2 * tokens * (everything + block) + weights * (width + 4)
    # One chunk of logits, its part of the embedding with its gradient, and the gradient of the hidden states.
    chunk = config.vocab_size // (config.loss_chunks * tensor)
    logits = 4 * tokens * (chunk + config.d_model) + chunk * config.d_model * (width + 4)
    return config.layers * tokens * kept, max(layer, logits)
