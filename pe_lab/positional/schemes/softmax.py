"""Changes of the softmax and of its output: temperatures, learned sinks, gates, and a token without its own value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.config import OMIT_DEFAULT
from pe_lab.positional.hooks import (
    Encoding,
    HeadShape,
    Hidden,
    Keys,
    Outputs,
    Parameter,
    Params,
    Positions,
    Queries,
    Start,
    Values,
    normal,
)
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

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        factor = params["scale"] * jnp.log(positions.astype(jnp.float32) + 1)[..., None]
        return q * factor[..., None], k


@register("llama4_temperature")
@dataclass(frozen=True)
class Llama4Temperature(Encoding):
    """Llama 4's temperature (transformers, `Llama4TextAttention`): queries times 1 + a ln(1 + floor((n + o) / f)).

    No parameters; positions below f - o are not changed. Llama 4 has it on its layers without rotation only.

    Attributes:
      attn_scale: a.
      floor_scale: f, in tokens.
      offset: o; 1 in Llama 4, 0 in Ministral 3.
    """

    display_name = "Llama 4's temperature"
    stands_alone = False

    attn_scale: float = 0.1
    floor_scale: int = 8192
    offset: int = field(default=1, metadata=OMIT_DEFAULT)

    limits: ClassVar[Limits] = {
        "attn_scale": (lambda x: 0 <= x <= 1e6, "it must lie in [0, 1e6]."),
        "floor_scale": (lambda x: 1 <= x < 2**31 and x == int(x), "give a whole number of tokens from 1."),
        "offset": (lambda x: x in (0, 1), "give 0 or 1."),
    }

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        steps = (positions + self.offset) // np.int32(self.floor_scale)
        factor = 1 + self.attn_scale * jnp.log1p(steps.astype(jnp.float32))
        return q * factor[..., None, None], k


@register("gated_output")
@dataclass(frozen=True)
class GatedOutput(Encoding):
    """Gated attention (Qiu et al. 2025, arXiv 2505.06708): out * sigmoid(x W), before the output projection.

    `gate` is W, [D, H, K], or [D, H] with one gate a head. No bias.

    Attributes:
      per: a gate for every `channel` of the output, or one for each `head`.
      start: `published`: deviation 0.02, gates near 0.5. `unchanged`: W = 0, and the gate is 2 sigmoid, which is 1; the
        factor 2 is a deviation that the output projection can undo.
    """

    display_name = "gated output"
    stands_alone = False
    relative = True
    content = True

    per: Literal["channel", "head"] = "channel"
    start: Start = "published"

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        size, axes = (shape.d_model, shape.num_heads), ("embed", "heads")
        if self.per == "channel":
            size, axes = (*size, shape.head_dim), (*axes, "head_dim")
        return {"gate": Parameter(normal(key, 0, *size) * float(self.start == "published"), axes, decay=True)}

    def output(self, params: Params, x: Hidden, out: Outputs, value: Values) -> Outputs:
        # In the compute dtype: by channels, this product is as large as the queries'.
        gate = jnp.tensordot(x, params["gate"].astype(x.dtype), 1, preferred_element_type=jnp.float32)
        gate = jax.nn.sigmoid(gate) * (1.0 if self.start == "published" else 2.0)
        return out * (gate if self.per == "channel" else gate[..., None])


@register("xsa")
@dataclass(frozen=True)
class XSA(Encoding):
    """Exclusive self-attention (Zhai 2026, arXiv 2603.09078): out minus its projection on the token's own value.

    out - (out u) u, with u the value of the token, of the head's group, at unit length. No parameters.
    """

    display_name = "XSA"
    stands_alone = False
    relative = True

    def output(self, params: Params, x: Hidden, out: Outputs, value: Values) -> Outputs:
        return out.astype(jnp.float32) - _projected(out, value)


@register("gated_xsa")
@dataclass(frozen=True)
class GatedXSA(Encoding):
    """`XSA` with a learned share: out minus tanh(a) times its projection on the token's own value, `alpha` a [H].

    From modded-nanogpt. a starts at 0, where nothing changes.
    """

    display_name = "gated XSA"
    stands_alone = False
    relative = True

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return {"alpha": Parameter(jnp.zeros(shape.num_heads), ("heads",))}

    def output(self, params: Params, x: Hidden, out: Outputs, value: Values) -> Outputs:
        return out.astype(jnp.float32) - jnp.tanh(params["alpha"])[:, None] * _projected(out, value)


def _projected(out: Outputs, value: Values) -> Outputs:
    """The part of outputs [H] in the direction of their token's values [G]; float32, 0 for a value of 0."""
    own = jnp.repeat(value.astype(jnp.float32), out.shape[2] // value.shape[2], axis=2)
    size = jnp.maximum(jnp.square(own).sum(-1, keepdims=True), 1e-24)  # the square of 1e-12, as F.normalize has it
    return (out.astype(jnp.float32) * own).sum(-1, keepdims=True) / size * own


@register("sink")
@dataclass(frozen=True)
class LearnedSink(Encoding):
    """Learned sinks (gpt-oss in transformers): one logit more per head in the softmax's denominator, `sink` [H].

    The weights of keys then add up to less than 1. The logit is neither scaled nor rotated.

    Attributes:
      initial: its start, with deviation 0.02. -20 changes no function, to 2e-9 of a weight.
    """

    display_name = "sink"
    stands_alone = False
    relative = True

    initial: float = 0.0

    limits: ClassVar[Limits] = {"initial": (lambda x: abs(x) <= 1e6, "it must lie in [-1e6, 1e6].")}

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return {"sink": Parameter(self.initial + normal(key, 0, shape.num_heads), ("heads",))}

    def sink(self, params: Params) -> Float[Array, " H"]:
        return params["sink"]
