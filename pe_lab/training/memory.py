"""The memory of one chip during a train step, estimated from shapes, and the settings chosen by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from pe_lab.config import ModelConfig, PhaseConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model, Params
from pe_lab.model.distillation import learns
from pe_lab.parallel import AxisRules
from pe_lab.parallel.topology import GIB, Chip
from pe_lab.positional import Schedule
from pe_lab.training.muon import newton_schulz_bytes
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import TrainState, init_state, make_shardings


@dataclass(frozen=True)
class Estimate:
    """Bytes per chip. State and batch are exact; the rest is approximate."""

    parameters: int
    optimizer: int
    batch: int
    activations: int  # kept from the forward pass for the backward pass
    working: int  # the larger of the loss, and of the gradients with one layer's backward pass or Muon's iteration

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def step_inputs(
    model: Model, optimizer: optax.GradientTransformation, phase: PhaseConfig, schedule: Schedule, segments: bool
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct], Any]:
    """(state, batch, schedule) of a phase as shapes and dtypes, to trace a step without data."""
    state = jax.eval_shape(lambda params: init_state(model, optimizer, params), model.shapes)
    shape = (phase.batch_size, phase.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if segments:
        dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    return state, batch, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), schedule)


def estimate_memory(
    model: Model, phase: PhaseConfig, schedule: Schedule, segments: bool, mesh: Mesh, rules: AxisRules
) -> Estimate:
    """The memory of one chip during a train step of `phase`; the devices of `mesh` may be placeholders."""
    return _estimator(model, phase, schedule, segments, mesh, rules)(model.config)


def _estimator(
    model: Model, phase: PhaseConfig, schedule: Schedule, segments: bool, mesh: Mesh, rules: AxisRules
) -> Callable[[ModelConfig], Estimate]:
    """A function from a config that differs from the model's at most in `remat` and `loss_chunks`."""
    optimizer = make_optimizer(phase.optimizer, phase.steps, model.axes, learned=model.encoding_settings)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state, batch, _ = step_inputs(model, optimizer, phase, schedule, segments)

    def bytes_of(shapes: Any, shardings: Any) -> int:
        def of(x: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(of, shapes, shardings)))

    parameters = bytes_of(state.params, shardings.state.params)
    moments = bytes_of(state.optimizer, shardings.state.optimizer)
    gradients = parameters * (2 if phase.accumulate > 1 else 1)
    inputs = bytes_of(batch, dict.fromkeys(batch, shardings.batch))
    if learns(phase.distill):  # a teacher of the same shape, and what it computes
        kept = model.config.layers if phase.distill.hidden or phase.distill.attention else 1
        width = np.dtype(model.config.dtype).itemsize
        inputs += parameters + kept * 2 * _tokens(phase, mesh) * model.config.d_model * width
    iteration = 0
    if phase.optimizer.name == "muon":
        iteration = newton_schulz_bytes(phase.optimizer.muon, model.shapes, model.axes, mesh.size)

    def estimate(config: ModelConfig) -> Estimate:
        activations, layer, loss = _activations(config, model.shapes, phase, mesh)
        # The update begins where the backward pass has ended, and what it kept is free.
        update = max(0, iteration - activations)
        return Estimate(parameters, moments, inputs, activations, max(gradients + max(layer, update), loss))

    return estimate


def _tokens(phase: PhaseConfig, mesh: Mesh) -> int:
    """The tokens of a micro-batch on one chip."""
    sequences = phase.batch_size // phase.accumulate // (mesh.shape["data"] * mesh.shape["fsdp"])
    return sequences * phase.sequence_length // mesh.shape["context"]


def _activations(config: ModelConfig, shapes: Params, phase: PhaseConfig, mesh: Mesh) -> tuple[int, int, int]:
    """Bytes per chip: kept for the backward pass, of the backward pass of one layer, and of the loss."""
    tensor, tokens = mesh.shape["tensor"], _tokens(phase, mesh)
    length, width = phase.sequence_length, np.dtype(config.dtype).itemsize

    # Bytes per token and layer. `qkv`: queries, keys and values after their projections.
    heads = config.heads // tensor
    kv_heads = config.kv_heads // tensor if config.kv_heads % tensor == 0 else config.kv_heads
    qkv = (heads + 2 * kv_heads) * config.head_dim
    mlp_in = (2 if config.gated_mlp else 1) * (config.d_ff // tensor)  # gate and up, or up alone
    everything = width * (4 * config.d_model + 2 * qkv + heads * config.head_dim + mlp_in + config.d_ff // tensor)
    whole = length <= config.attention_chunk if config.attention == "auto" else config.attention != "chunked"
    if whole:
        weights, block = heads * length * width, heads * length * 4
    else:
        weights, block = 0, heads * min(config.attention_chunk, length) ** 2 // length * 4
    dots = width * (2 * config.d_model + qkv + mlp_in)  # the input, and the products whose results are needed
    kept = {
        "none": everything + weights,
        "dots_attention": dots + heads * (config.head_dim * width + 4),
        "dots": dots,
        "dots_offload": width * config.d_model,
        "full": width * config.d_model,
    }[config.remat]

    # One layer: what the gradients of its two branches need at once, and its weights gathered over fsdp.
    of_layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(shapes["layers"])) // tensor
    layer = tokens * (width * (6 * config.d_model + 2 * qkv + 2 * mlp_in) + 2 * (weights + block)) + of_layer * width
    # One chunk of logits and of their gradient; the gathered unembedding and its gradient; hidden states.
    vocabulary = config.vocab_size // tensor
    logits = -(-tokens // config.loss_chunks) * vocabulary * (4 + width)
    loss = logits + vocabulary * config.d_model * (width + 4) + 2 * tokens * config.d_model * width
    return config.layers * tokens * kept, layer, loss


# ---------------------------------------------------------------------------------------------------------------------
# Settings "auto"

MARGIN = 0.92  # of a chip's memory that an estimate may need


def choose_settings(
    config: ModelConfig,
    phase: PhaseConfig,
    schedule: Schedule,
    segments: bool,
    mesh: Mesh,
    rules: AxisRules,
    chip: Chip,
    must_fit: bool,
) -> ModelConfig:
    """The config with `remat` and `loss_chunks` chosen where they are "auto": the fastest that fits by the estimate.

    Args:
      config: `remat` and `loss_chunks` may be "auto".
      chip: of the mesh; memory 0 is unknown, and anything fits.
      must_fit: otherwise, if nothing fits, the result is what needs the least memory.

    Raises:
      ConfigError: nothing fits.
    """
    if "auto" not in (config.remat, config.loss_chunks):
        return config
    tokens = _tokens(phase, mesh)
    remats = _REMATS if config.remat == "auto" else (config.remat,)
    chunks = [2**n for n in range(8) if 2**n <= tokens] if config.loss_chunks == "auto" else [config.loss_chunks]
    options = [dataclasses.replace(config, remat=remat, loss_chunks=n) for remat in remats for n in chunks]
    estimate = _estimator(Model(options[0], hooks=schedule.hooks), phase, schedule, segments, mesh, rules)
    needed = {option: estimate(option).total for option in options}
    for option in sorted(options, key=lambda option: _extra_seconds(option, phase, mesh, chip)):
        if not chip.memory or needed[option] <= MARGIN * chip.memory:
            return option
    smallest = min(options, key=needed.__getitem__)
    if must_fit:
        raise ConfigError(
            f"phase '{phase.name}': with any remat and loss_chunks, a step needs about "
            f"{needed[smallest] / GIB:.1f} GiB of {chip.memory / GIB:.4g} GiB a chip. "
            "pe_lab.plan names the settings with which it would fit."
        )
    return smallest


# "none" is not among them: it also keeps every elementwise result, and reading those takes longer than computing them.
_REMATS = ("dots_attention", "dots", "full")


def _extra_seconds(config: ModelConfig, phase: PhaseConfig, mesh: Mesh, chip: Chip) -> float:
    """The time of a micro-batch that a choice adds: recomputed products, and sums written to memory, at the peaks."""
    peak, bandwidth = chip.peak or 1e12, chip.bandwidth or 1e11
    tokens, tensor, length = _tokens(phase, mesh), mesh.shape["tensor"], phase.sequence_length
    D, H, G, K = config.d_model, config.heads, config.kv_heads, config.head_dim
    attention = 2 * H * K * length  # of a token: two products, each with half of the keys
    products = 4 * D * (H + G) * K + (6 if config.gated_mlp else 4) * D * config.d_ff
    again = {"full": attention + products, "dots": attention, "dots_offload": attention}.get(config.remat, 0)
    moved = 8 * D * config.vocab_size * config.loss_chunks  # the float32 sum of the gradient, read and written
    product = 2 * tokens * D * config.vocab_size / peak
    # Among choices that cost nothing, fewer chunks: a tenth of what they would cost if nothing else took time.
    adding = max(0.0, moved / bandwidth - product) + 0.1 * moved / bandwidth
    return (config.layers * tokens * again / peak + adding) / tensor
