"""An encoding of one's own: RoPE whose base is learned, one for each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from pe_lab.positional import Encoding, Parameter, register, rotate, rotation_tables


@register("learned_base")
@dataclass(frozen=True)
class LearnedBase(Encoding):
    """Pair r rotates by base^(-2r / K) radians per position; `log_base` starts at the logarithm of `base`."""

    base: float = 10000.0
    relative = True

    def init(self, key, shape):
        return {"log_base": Parameter(jnp.asarray(math.log(self.base)), ())}

    def encode(self, params, q, k, positions, x):
        pairs = q.shape[-1] // 2
        freq = jnp.exp(-params["log_base"] * jnp.arange(pairs) / pairs)
        cos, sin = (table[:, :, None] for table in rotation_tables(freq, jnp.ones(pairs), positions))
        return rotate(q, cos, sin), rotate(k, cos, sin)
