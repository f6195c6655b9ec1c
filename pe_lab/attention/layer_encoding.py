"""The positional encoding of one layer as arrays, and its application to queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pe_lab.attention.hooks import Hooks
from pe_lab.attention.key_block import KeyRotation
from pe_lab.errors import ConfigError
from pe_lab.positional import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerEncoding:
    """What a layer makes of the products of queries and keys: its part of the schedule, and the model's soft cap.

    A pytree: `soft_cap` is static. None = absent from the compiled program.

    Attributes:
      cos, sin: [B or 1, T, 1 or G or H, R] float32, gain included (see `positional.rotation_tables`). With H rotations,
        keys are rotated once per query head; with G, the queries of a group use that of their key head.
      slope: [H] ALiBi's penalty per token.
      logit_scale: scalar factor on the logits, beside 1 / sqrt(K).
      hooks: of encodings that are more than rotations and slopes.
      rotation: the frequencies and gains of cos and sin, for kernels that rotate keys inside; None where positions are
        not indices.
      soft_cap: the scaled products x of queries and keys become soft_cap tanh(x / soft_cap), before anything is added
        (Gemma 2).
    """

    cos: Float[Array, "B T rotations R"] | None = None
    sin: Float[Array, "B T rotations R"] | None = None
    slope: Float[Array, " H"] | None = None
    logit_scale: Float[Array, ""] | None = None
    hooks: Hooks = Hooks()
    rotation: KeyRotation | None = None
    soft_cap: float | None = field(default=None, metadata={"static": True})

    def scale(self, head_dim: int) -> Float[Array, ""]:
        """The factor on the product of a query and a key: 1 / sqrt(K) times the logit scale."""
        return jnp.float32(head_dim**-0.5) * (1.0 if self.logit_scale is None else self.logit_scale)


def encode_queries(query: Float[Array, "B T H K"], encoding: LayerEncoding, kv_heads: int) -> Float[Array, "B T H K"]:
    """Queries, rotated."""
    H = query.shape[2]
    if encoding.cos is not None and encoding.sin is not None:
        cos, sin = encoding.cos, encoding.sin
        _check_rotation(cos, query, kv_heads, H)
        if cos.shape[2] not in (1, H):
            cos, sin = jnp.repeat(cos, H // kv_heads, axis=2), jnp.repeat(sin, H // kv_heads, axis=2)
        query = rotate(query, cos, sin)
    return query


def encode_keys(key: Float[Array, "B T G K"], encoding: LayerEncoding, num_heads: int) -> Float[Array, "B T heads K"]:
    """Keys, rotated; of H heads where the heads of a group rotate differently.

    `key` may have H heads already, after hooks.

    Raises:
      ConfigError: rotations that fit no heads.
    """
    G = key.shape[2]
    if encoding.cos is not None and encoding.sin is not None:
        cos, sin = encoding.cos, encoding.sin
        if cos.shape[2] == num_heads != G:
            key = jnp.repeat(key, num_heads // G, axis=2)
        elif num_heads == G and cos.shape[2] not in (1, G):
            cos, sin = (jnp.repeat(x, G // cos.shape[2], axis=2) for x in (cos, sin))
        _check_rotation(cos, key, G, num_heads)
        key = rotate(key, cos, sin)
    return key


def check_heads(num_heads: int, kv_heads: int) -> None:
    """Raises a `ConfigError` if the key-value heads do not divide the query heads."""
    if num_heads % kv_heads:
        raise ConfigError(f"attention: {num_heads} query heads do not divide into {kv_heads} key-value heads.")


def _check_rotation(cos: jax.Array, x: jax.Array, kv_heads: int, num_heads: int) -> None:
    count, channels = cos.shape[2], 2 * cos.shape[3]
    if count not in (1, kv_heads, num_heads):
        raise ConfigError(f"attention: {count} rotations fit neither {kv_heads} key heads nor {num_heads} query heads.")
    if x.shape[3] != channels:
        raise ConfigError(
            f"attention: a hook of this layer makes heads of {x.shape[3]} channels, and the layer's rotation is for "
            f"{channels}. Give the layer no rotation (nope) beside that hook."
        )
