"""The decoder's parts as Flax NNX modules. NNX stays in this room: elsewhere, parameters are plain nested dicts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pe_lab.attention import Row, attention
from pe_lab.config import ModelConfig
from pe_lab.parallel import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
QK_NORMS = ("none", "head", "flat", "query_head", "query_flat")


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, logical_axes=axes)


def _constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), logical_axes=axes)


def _project(
    x: Float[Array, "B T *in"], weights: nnx.Param, bias: nnx.Param | None = None, inputs: int = 1
) -> Float[Array, "B T *out"]:
    """x times weights [*in, *out], plus bias [*out], in the dtype of x; `inputs` counts the axes summed over."""
    # As one product of two matrices: with more axes, XLA on a CPU copies the larger operand of the gradient's
    # products into another layout.
    rows, size = x.shape[: x.ndim - inputs], math.prod(weights.shape[:inputs])
    product = x.reshape(-1, size) @ weights[...].reshape(size, -1).astype(x.dtype)
    product = product.reshape(*rows, *weights.shape[inputs:])
    return product if bias is None else product + bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalization, computed in float32 (Zhang & Sennrich 2019).

    The mean is over as many of the last axes as the scale has. With `plus_one` the scale is 1 + w, and w starts at 0:
    Gemma's, which multiplies in float32 as well, and rounds after.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], epsilon: float, plus_one: bool = False):
        self.scale = _constant(0.0 if plus_one else 1.0, shape, axes)
        self.epsilon, self.plus_one = epsilon, plus_one

    def __call__(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        scale = 1 + self.scale[...] if self.plus_one else self.scale[...]
        over = tuple(range(-scale.ndim, 0))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=over, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalization of the last axes to mean 0 and variance 1, scale and bias, in float32 (Ba et al. 2016)."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], epsilon: float):
        self.scale = _constant(1.0, shape, axes)
        self.bias = _constant(0.0, shape, axes)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        scale, bias = self.scale[...], self.bias[...]
        over = tuple(range(-scale.ndim, 0))
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=over, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=over, keepdims=True) + self.epsilon)
        return (wide * scale + bias).astype(x.dtype)


NORMS = {"rms": RMSNorm, "rms_plus_one": functools.partial(RMSNorm, plus_one=True), "layer": LayerNorm}


def _stream_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the kind that `config.norm` names."""
    return NORMS[config.norm]((config.d_model,), ("embed",), config.norm_epsilon)


def _qk_norm(config: ModelConfig, heads: int, axis: str) -> RMSNorm:
    """A norm of queries or keys [B, T, heads, K]: of each head (Qwen3), or of all heads in one (flat; OLMo2, DroPE).

    RMSNorm with a scale of 1 at the start, whatever norm the stream has. The mean of a flat one runs over heads that
    tensor parallelism cuts; XLA adds up the parts.
    """
    if config.qk_norm.endswith("flat"):
        return RMSNorm((heads, config.head_dim), (axis, "head_dim"), config.norm_epsilon)
    return RMSNorm((config.head_dim,), ("head_dim",), config.norm_epsilon)


class Attention(nnx.Module):
    """Grouped-query attention: projections, optional QK-norm before rotation, and `pe_lab.attention`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, H, G, K, std = config.d_model, config.heads, config.kv_heads, config.head_dim, config.init_std
        self.query = _normal(rngs, (D, H, K), std, ("embed", "heads", "head_dim"))
        self.key = _normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim"))
        self.value = _normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim"))
        # Residual branches start small, so that the variance of the sum over 2N of them stays near one (GPT-2).
        self.out = _normal(rngs, (H, K, D), std / (2 * config.layers) ** 0.5, ("heads", "head_dim", "embed"))
        bias, out_bias = config.attention_bias, config.output_bias
        self.query_bias = _constant(0.0, (H, K), ("heads", "head_dim")) if bias else None
        self.key_bias = _constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.value_bias = _constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.out_bias = _constant(0.0, (D,), ("embed",)) if out_bias else None
        self.query_norm = _qk_norm(config, H, "heads") if config.qk_norm != "none" else None
        self.key_norm = _qk_norm(config, G, "kv_heads") if config.qk_norm in ("head", "flat") else None
        self.config = config

    def queries_keys_values(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """Queries, keys and values as attention takes them: projected and normalized, not yet rotated."""
        q = _project(x, self.query, self.query_bias)
        k = _project(x, self.key, self.key_bias)
        v = _project(x, self.value, self.value_bias)
        q = constrain(q, "batch", "length", "heads", "head_dim")
        k = constrain(k, "batch", "length", "kv_heads", "head_dim")
        v = constrain(v, "batch", "length", "kv_heads", "head_dim")
        return q if self.query_norm is None else self.query_norm(q), k if self.key_norm is None else self.key_norm(k), v

    def __call__(
        self,
        x: Float[Array, "B T D"],
        row: Row,
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        window: int | None,
        backward: bool = True,
    ) -> Float[Array, "B T D"]:
        q, k, v = self.queries_keys_values(x)
        out = attention(
            q,
            k,
            v,
            row,
            positions=positions,
            segments=segments,
            window=window,
            implementation=self.config.attention,
            chunk=self.config.attention_chunk,
            backward=backward,
        )
        return self.project_out(out)

    def project_out(self, out: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        """What attention gives back, as the residual stream takes it."""
        out = constrain(out, "batch", "length", "heads", "head_dim")
        return _project(out, self.out, self.out_bias, inputs=2)


class MLP(nnx.Module):
    """Feed-forward: gated, down(activation(gate x) * up x) (Shazeer 2020), or plain, down(activation(up x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F, std, gated, bias = config.d_model, config.d_ff, config.init_std, config.gated_mlp, config.mlp_bias
        self.gate = _normal(rngs, (D, F), std, ("embed", "mlp")) if gated else None
        self.up = _normal(rngs, (D, F), std, ("embed", "mlp"))
        self.down = _normal(rngs, (F, D), std / (2 * config.layers) ** 0.5, ("mlp", "embed"))
        self.gate_bias = _constant(0.0, (F,), ("mlp",)) if gated and bias else None
        self.up_bias = _constant(0.0, (F,), ("mlp",)) if bias else None
        self.down_bias = _constant(0.0, (D,), ("embed",)) if bias else None
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = activation(_project(x, self.up, self.up_bias))
        else:
            gate, up = _project(x, self.gate, self.gate_bias), _project(x, self.up, self.up_bias)
            hidden = activation(gate) * up
        hidden = constrain(hidden, "batch", "length", "mlp")
        return _project(hidden, self.down, self.down_bias)


class Block(nnx.Module):
    """One layer, normalized before each branch; the branches follow each other, or stand side by side (GPT-J, NeoX)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = _stream_norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _stream_norm(config)
        self.mlp = MLP(config, rngs)
        self.parallel = config.parallel_block

    def __call__(
        self,
        x: Float[Array, "B T D"],
        row: Row,
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        window: int | None,
        backward: bool = True,
    ) -> Float[Array, "B T D"]:
        attended = self.attention(self.attention_norm(x), row, positions, segments, window, backward)
        return self._add_branches(x, attended)

    def attend_by(
        self, x: Float[Array, "B T D"], attend: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The layer with another attention: `attend(q, k, v)` gives its output, and something to hand on (a cache)."""
        out, beside = attend(*self.attention.queries_keys_values(self.attention_norm(x)))
        return self._add_branches(x, self.attention.project_out(out)), beside

    def _add_branches(self, x: Float[Array, "B T D"], attended: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.parallel:
            # Neither waits for the other: under tensor parallelism, XLA joins their two all-reduces into one.
            x = x + (attended + self.mlp(self.mlp_norm(x)))
        else:
            x = constrain(x + attended, "batch", "length", "activation_embed")
            x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "length", "activation_embed")


class Embedder(nnx.Module):
    """What stands outside the layers: the embedding, the final norm, and an output embedding where untied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.embedding = _normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.final_norm = _stream_norm(config)
        self.unembedding = None if config.tie_embeddings else _normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.multiplier = D**0.5 if config.scale_embeddings else None

    def embed(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        x = self.embedding[...].astype(dtype)[tokens]
        # Rounded before it multiplies, as Gemma was trained: sqrt(2048) is 45.25 in bfloat16.
        return x if self.multiplier is None else x * jnp.asarray(self.multiplier, dtype)

    def output_embedding(self) -> Float[Array, "V D"]:
        return (self.embedding if self.unembedding is None else self.unembedding)[...]
