"""The shape of a model: its completed config, and its repeated layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.key_block import RESIDUALS
from pe_lab.config import ModelConfig, check_bounds
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.model.feed_forward import ACTIVATIONS, FEED_FORWARDS
from pe_lab.model.layer_shapes import check_shapes
from pe_lab.model.modules import BLOCKS
from pe_lab.model.norms import NORMS, QK_NORMS

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
    check_shapes(config)
    return config


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
