"""The decoder's parts as Flax NNX modules. NNX stays in this room: elsewhere, parameters are plain nested dicts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pe_lab.attention import Row, attention
from pe_lab.config import ModelConfig
from pe_lab.parallel import constrain


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, logical_axes=axes)


def _constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), logical_axes=axes)


def _project(x: Float[Array, "B T *in"], weights: Float[Array, "*in_out"], inputs: int = 1) -> Float[Array, "B T *out"]:
    """x times weights [*in, *out] in the dtype of x; `inputs` counts the axes summed over."""
    # As one product of two matrices: with more axes, XLA on a CPU copies the larger operand of the gradient's
    # products into another layout.
    rows, size = x.shape[: x.ndim - inputs], math.prod(weights.shape[:inputs])
    product = x.reshape(-1, size) @ weights.reshape(size, -1).astype(x.dtype)
    return product.reshape(*rows, *weights.shape[inputs:])


class RMSNorm(nnx.Module):
    """Root-mean-square normalization of the last axis, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, axis: str, epsilon: float):
        self.scale = _constant(1.0, (size,), (axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention: projections, optional QK-norm before rotation, and `pe_lab.attention`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, H, G, K, std = config.d_model, config.heads, config.kv_heads, config.head_dim, config.init_std
        self.query = _normal(rngs, (D, H, K), std, ("embed", "heads", "head_dim"))
        self.key = _normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim"))
        self.value = _normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim"))
        # Residual branches start small, so that the variance of the sum over 2N of them stays near one (GPT-2).
        self.out = _normal(rngs, (H, K, D), std / (2 * config.layers) ** 0.5, ("heads", "head_dim", "embed"))
        if config.attention_bias:
            self.query_bias = _constant(0.0, (H, K), ("heads", "head_dim"))
            self.key_bias = _constant(0.0, (G, K), ("kv_heads", "head_dim"))
            self.value_bias = _constant(0.0, (G, K), ("kv_heads", "head_dim"))
        if config.qk_norm:
            self.query_norm = RMSNorm(K, "head_dim", config.norm_epsilon)
            self.key_norm = RMSNorm(K, "head_dim", config.norm_epsilon)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T D"],
        row: Row,
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        window: int | None,
    ) -> Float[Array, "B T D"]:
        config = self.config
        q = _project(x, self.query[...])
        k = _project(x, self.key[...])
        v = _project(x, self.value[...])
        if config.attention_bias:
            q += self.query_bias[...].astype(x.dtype)
            k += self.key_bias[...].astype(x.dtype)
            v += self.value_bias[...].astype(x.dtype)
        q = constrain(q, "batch", "length", "heads", "head_dim")
        k = constrain(k, "batch", "length", "kv_heads", "head_dim")
        v = constrain(v, "batch", "length", "kv_heads", "head_dim")
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        out = attention(
            q,
            k,
            v,
            row,
            positions=positions,
            segments=segments,
            window=window,
            implementation=config.attention,
            chunk=config.attention_chunk,
        )
        out = constrain(out, "batch", "length", "heads", "head_dim")
        return _project(out, self.out[...], inputs=2)


class SwiGLU(nnx.Module):
    """Gated feed-forward: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F, std = config.d_model, config.d_ff, config.init_std
        self.gate = _normal(rngs, (D, F), std, ("embed", "mlp"))
        self.up = _normal(rngs, (D, F), std, ("embed", "mlp"))
        self.down = _normal(rngs, (F, D), std / (2 * config.layers) ** 0.5, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = _project(x, self.gate[...]), _project(x, self.up[...])
        hidden = constrain(jax.nn.silu(gate) * up, "batch", "length", "mlp")
        return _project(hidden, self.down[...])


class Block(nnx.Module):
    """One layer, normalized before each branch."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, "embed", config.norm_epsilon)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, "embed", config.norm_epsilon)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        row: Row,
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        window: int | None,
    ) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_norm(x), row, positions, segments, window)
        x = constrain(x, "batch", "length", "activation_embed")
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "length", "activation_embed")


class Trunk(nnx.Module):
    """What stands outside the layers: the embedding, the final norm, and an output embedding where untied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.embedding = _normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.final_norm = RMSNorm(D, "embed", config.norm_epsilon)
        if not config.tie_embeddings:
            self.unembedding = _normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.tied = config.tie_embeddings

    def embed(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        return self.embedding[...].astype(dtype)[tokens]

    def output_embedding(self) -> Float[Array, "V D"]:
        return self.embedding[...] if self.tied else self.unembedding[...]
