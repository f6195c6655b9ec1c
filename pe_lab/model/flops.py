"""The weights that a token is multiplied with, and the FLOPs of a train step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pe_lab.config import ModelConfig
from pe_lab.model.feed_forward import FEED_FORWARDS, parameter_sizes
from pe_lab.model.layer_shapes import Stack, stacks
from pe_lab.positional import LayerStructure


def least_parameters(config: ModelConfig) -> int:
    """The parameters of the matrices of a completed config, by arithmetic alone; norms and biases are left out."""
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.d_model
    embeddings += config.vocab_size * config.layers * config.per_layer_input
    return sum(len(stack.layers) * layer_weights(stack) for stack in stacks(config)) + embeddings


def layer_weights(stack: Stack) -> int:
    """The parameters of one layer that a token is multiplied with; norms and biases are left out.

    Those of the projection of the embedding to the layer's own input are among them.
    """
    config = stack.config
    projections = 0 if stack.keys_of is not None else 2 - config.values_are_keys  # of keys and values
    attention = config.d_model * config.head_dim * (2 * config.heads + projections * config.kv_heads)
    return attention + feed_forward_weights(config) + 3 * config.d_model * config.per_layer_input


def feed_forward_weights(config: ModelConfig) -> int:
    """The parameters of one layer's feed-forward that a token is multiplied with; norms and biases are left out.

    A registered class says it by `active_weights(config)`, a static method; without one, all of its matrices count.
    """
    if not config.feed_forward:
        return (3 if config.gated_mlp else 2) * config.d_model * config.d_ff
    kind = FEED_FORWARDS[config.feed_forward]
    if hasattr(kind, "active_weights"):
        return kind.active_weights(config)
    return sum(math.prod(shape) for shape in parameter_sizes(kind, config) if len(shape) > 1)


class Flops(NamedTuple):
    """Floating-point operations per trained token, under two conventions of MFU.

    `full` counts every query with every key, as PaLM and MaxText do; `causal` counts only visible keys. Neither counts
    rematerialization.
    """

    full: float
    causal: float

    @property
    def forward(self) -> Flops:
        """Those of a forward pass: a third of a train step's."""
        return Flops(self.full / 3, self.causal / 3)

    def plus(self, other: Flops) -> Flops:
        """Both together."""
        return Flops(self.full + other.full, self.causal + other.causal)


def train_flops_per_token(
    config: ModelConfig, sequence_length: int, structure: Sequence[LayerStructure] | None = None
) -> Flops:
    """FLOPs per token of a train step: 6 per weight of a matrix product, and attention's two products three times.

    They are computed from the shape, because compilers count the body of a scan only once.

    Args:
      config: completed (`model.complete`).
      sequence_length: T of the training windows.
      structure: of the layers; their windows matter for the causal count. None: full attention.
    """
    T = sequence_length
    weights = sum(len(stack.layers) * layer_weights(stack) for stack in stacks(config))
    full = causal = 6.0 * (weights + config.d_model * config.vocab_size)
    for stack in stacks(config):
        channels = stack.config.heads * stack.config.head_dim
        for n in stack.layers:
            window = structure[n].window if structure else None
            seen = min(window or T, T)
            # The mean number of visible keys: the first `seen` queries see 1, 2, ... keys, the others `seen`.
            mean_keys = (seen * (seen + 1) / 2 + (T - seen) * seen) / T
            full += 12.0 * channels * T
            causal += 12.0 * channels * mean_keys
    return Flops(full, causal)
