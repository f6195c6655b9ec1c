"""Norms of the residual stream, and of queries and keys, as Flax NNX modules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pe_lab.config import ModelConfig
from pe_lab.model.projections import constant

QK_NORMS = ("none", "head", "flat", "query_head", "query_flat", "layer_heads")


class RMSNorm(nnx.Module):
    """Root-mean-square normalization, computed in float32 (Zhang & Sennrich 2019).

    The mean is over as many of the last axes as the scale has. With `plus_one` the scale is 1 + w, as in Gemma. The
    product with the scale is computed in float32 and then rounded.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        epsilon: float,
        initial: float = 1.0,
        plus_one: bool = False,
    ):
        self.scale = constant(initial - plus_one, shape, axes)
        self.epsilon, self.plus_one = epsilon, plus_one

    def __call__(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        scale = 1 + self.scale[...] if self.plus_one else self.scale[...]
        over = tuple(range(-scale.ndim, 0))
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=over, keepdims=True) + self.epsilon)
            return (wide * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalization of the last axis to mean 0 and variance 1, scale and bias, in float32 (Ba et al. 2016)."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], epsilon: float, initial: float = 1.0, bias: bool = True
    ):
        self.scale = constant(initial, shape, axes)
        self.bias = constant(0.0, shape, axes) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
            wide = wide * self.scale[...]
            return (wide if self.bias is None else wide + self.bias[...]).astype(x.dtype)


def unscaled(x: Float[Array, "*batch K"], epsilon: float) -> Float[Array, "*batch K"]:
    """`RMSNorm` of the last axis, without a scale."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


NORMS = {
    "rms": RMSNorm,
    "rms_plus_one": functools.partial(RMSNorm, plus_one=True),
    "layer": LayerNorm,
    "layer_no_bias": functools.partial(LayerNorm, bias=False),
}


def stream_norm(config: ModelConfig, initial: float = 1.0) -> RMSNorm | LayerNorm:
    """A norm of the residual stream [B, T, D], with its initial scale."""
    return NORMS[config.norm]((config.d_model,), ("vector",), config.norm_epsilon, initial)


def qk_norm(config: ModelConfig, heads: int, axis: str, initial: float = 1.0) -> RMSNorm | LayerNorm:
    """A norm of queries or keys [B, T, heads, K], with its initial scale.

    An RMSNorm of each head (Qwen3), with 1 + w where those of the residual stream have it (Gemma 3), or of all heads
    (flat; OLMo 2, DroPE); or a LayerNorm of each head without bias, whose heads have a scale each (StableLM 2).
    """
    if config.qk_norm == "layer_heads":
        return LayerNorm((heads, config.head_dim), (axis, "head_dim"), config.norm_epsilon, initial, bias=False)
    plus_one = config.norm == "rms_plus_one"
    if config.qk_norm.endswith("flat"):
        return RMSNorm((heads, config.head_dim), (axis, "head_dim"), config.norm_epsilon, initial, plus_one)
    return RMSNorm((config.head_dim,), ("head_dim",), config.norm_epsilon, initial, plus_one)
