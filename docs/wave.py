"""An encoding of one's own: attention logits with a learned wave over the distance, beside a learned decay."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pe_lab.positional import Encoding, Parameter, register


@register("wave")
@dataclass(frozen=True)
class Wave(Encoding):
    """h (cos(2 pi d / period) - 1) - s ln(1 + d) at distance d, with learned h and s of each head."""

    period: float = 16.0
    relative = True  # a function of the distance alone: kernels take it as a table

    def init(self, key, shape):
        zero = jnp.zeros(shape.num_heads)  # no change at the start, so that trained weights can get it too
        return {"height": Parameter(zero, ("heads",)), "decay": Parameter(zero, ("heads",), learning_rate=2.0)}

    def bias(self, params, query_positions, key_positions):
        distance = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(jnp.float32)
        wave = jnp.cos(2 * jnp.pi * distance / self.period) - 1
        height, decay = (params[name][:, None, None] for name in ("height", "decay"))
        return height * wave - decay * jnp.log1p(distance)
