"""The shape of a model: its completed config, its repeated layers, and the FLOPs of a train step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.key_block import RESIDUALS
from pe_lab.config import ModelConfig, check_bounds
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.model.feed_forward import ACTIVATIONS, FEED_FORWARDS, parameter_sizes
from pe_lab.model.modules import BLOCKS
from pe_lab.model.norms import NORMS, QK_NORMS
from pe_lab.positional import LayerStructure

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def _attention(primitive: Any, *_: Any, **settings: Any) -> bool:
    """Whether a value is an output of attention, or its logsumexp."""
    return settings.get("name") == RESIDUALS or primitive.name == "dot_product_attention_fwd_wrapper"  # cuDNN's


# What is kept of a layer for the backward pass, beside its input. None: everything.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots_attention": jax.checkpoint_policies.save_from_both_policies(_products, _attention),
    "dots": _products,
    "dots_offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def complete(config: ModelConfig) -> ModelConfig:
    """The config with head_dim set. Raises a `ConfigError` that names an invalid field."""
    check_bounds(config, "model")
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads is {config.heads} and model.kv_heads {config.kv_heads}; kv_heads must divide heads."
        )
    if config.head_dim == 0:
        if config.d_model % config.heads:
            raise ConfigError(
                f"model.d_model {config.d_model} does not divide into {config.heads} heads; set model.head_dim."
            )
        config = dataclasses.replace(config, head_dim=config.d_model // config.heads)
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"model.head_dim is {config.head_dim}; it must be even, since channels rotate in pairs.")
    if config.vocab_size < 1:
        raise ConfigError(f"model.vocab_size is {config.vocab_size}; it must be positive.")
    if config.feed_forward not in ("", *FEED_FORWARDS):
        advice = did_you_mean(config.feed_forward, [*FEED_FORWARDS]) if FEED_FORWARDS else "None is registered."
        raise ConfigError(
            f"model.feed_forward: there is no '{config.feed_forward}'. {advice} Import the file that registers it, in "
            "the recipe or by --encodings=FILE.py."
        )
    choices = {
        "norm": NORMS,
        "block": BLOCKS,
        "activation": ACTIVATIONS,
        "qk_norm": QK_NORMS,
        "remat": ("auto", *REMAT_POLICIES),
        "attention": ("auto", *IMPLEMENTATIONS),
    }
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ConfigError(f"model.{field} is '{value}'. " + did_you_mean(str(value), list(allowed)))
    if config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype is '{config.dtype}'; it must be float32 or bfloat16.")
    return config


def least_parameters(config: ModelConfig) -> int:
    """The parameters of the matrices of a completed config, by arithmetic alone; norms and biases are left out."""
    attention = 2 * config.d_model * config.head_dim * (config.heads + config.kv_heads)
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.d_model
    return config.layers * (attention + feed_forward_weights(config)) + embeddings


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


class Repetition(NamedTuple):
    """Layers `start` .. `start + period * repeats`, whose structure repeats with `period`."""

    start: int
    period: int
    repeats: int


def repetitions(structure: Sequence[Hashable]) -> list[Repetition]:
    """The repetitions that make up a stack of layers; only one period of each is compiled.

    Greedy from the first layer: at each layer, the pattern that saves most layers is taken, the shorter one among
    equals. 3 windowed + 1 full, repeated, is one of period 4; 12 rotary layers before 12 without are two of
    period 1.
    """
    found, start, total = [], 0, len(structure)
    while start < total:
        best = Repetition(start, 1, 1)
        for period in range(1, (total - start) // 2 + 1):
            pattern, repeats = structure[start : start + period], 1
            while structure[start + period * repeats : start + period * (repeats + 1)] == pattern:
                repeats += 1
            if period * (repeats - 1) > best.period * (best.repeats - 1):
                best = Repetition(start, period, repeats)
        found.append(best)
        start += best.period * best.repeats
    return found


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
    D, H, G, K, T = config.d_model, config.heads, config.kv_heads, config.head_dim, sequence_length
    of_layer = 2 * D * H * K + 2 * D * G * K + feed_forward_weights(config)
    weights = config.layers * of_layer + D * config.vocab_size
    full = causal = 6.0 * weights
    for n in range(config.layers):
        window = structure[n].window if structure else None
        seen = min(window or T, T)
        # The mean number of visible keys: the first `seen` queries see 1, 2, ... keys, the others `seen`.
        mean_keys = (seen * (seen + 1) / 2 + (T - seen) * seen) / T
        full += 12.0 * H * K * T
        causal += 12.0 * H * K * mean_keys
    return Flops(full, causal)
