"""Temperatures of the softmax that grow with the number of visible keys. Queries are scaled; keys are not changed.

n is a query's position + 1: the number of keys that it sees where positions count the tokens of its document from 0. It
is not that number under randomly drawn positions, nor on a layer with a window, where n grows beyond the window; put
these on layers without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.positional.hooks import Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.scalings import Limits


@register("ssmax")
@dataclass(frozen=True)
class SSMax(Encoding):
    """Scalable softmax (Nakanishi 2025, arXiv 2501.19399, eq. 2): logits times s ln(n), with s learned per head.

    `scale` [H] is s. A query's logits are s ln(n) q k / sqrt(K); those of the first token are 0.

    Attributes:
      original_length: s starts at 1 / mean of ln(n) for n from 1 to this length, so that the factor is 1 on average:
        0.168 at 1024 tokens, where the paper puts SSMax into a trained model.
      initial: s starts here instead (1 in TabICL's code). None: by `original_length`.
    """

    display_name = "SSMax"
    stands_alone = False

    original_length: int = 1024
    initial: float | None = None

    limits: ClassVar[Limits] = {
        "original_length": (lambda x: 2 <= x < 2**31 and x == int(x), "give the training length, at least 2 tokens."),
        "initial": (lambda x: x is None or abs(x) <= 1e6, "it must lie in [-1e6, 1e6], or be left out."),
    }

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        start = self.initial
        if start is None:
            start = self.original_length / math.lgamma(self.original_length + 1)  # the sum of ln(n) is ln of n!
        return {"scale": Parameter(jnp.full(shape.num_heads, start), ("heads",))}

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
        factor = params["scale"] * jnp.log(positions.astype(jnp.float32) + 1)[..., None]
        return q * factor[..., None], k


@register("llama4_temperature")
@dataclass(frozen=True)
class Llama4Temperature(Encoding):
    """Llama 4's temperature (transformers, `Llama4TextAttention`): queries times 1 + a ln(1 + floor(n / f)).

    No parameters; positions below f - 1 are not changed. Llama 4 has it on its layers without rotation only.

    Attributes:
      attn_scale: a.
      floor_scale: f, in tokens.
    """

    display_name = "Llama 4's temperature"
    stands_alone = False

    attn_scale: float = 0.1
    floor_scale: int = 8192

    limits: ClassVar[Limits] = {
        "attn_scale": (lambda x: 0 <= x <= 1e6, "it must lie in [0, 1e6]."),
        "floor_scale": (lambda x: 1 <= x < 2**31 and x == int(x), "give a whole number of tokens from 1."),
    }

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
        steps = (positions + 1) // np.int32(self.floor_scale)
        factor = 1 + self.attn_scale * jnp.log1p(steps.astype(jnp.float32))
        return q * factor[..., None, None], k
