"""Changes of what attention gives out: a gate, the removal of a token's own value, and learned sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pe_lab.positional.hooks import Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.scalings import Limits
from pe_lab.positional.schemes.starts import START, normal


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
    start: Literal["published", "unchanged"] = "published"

    limits: ClassVar[Limits] = START | {"per": (lambda x: x in ("channel", "head"), "it must be channel or head.")}

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        size, axes = (shape.d_model, shape.num_heads), ("embed", "heads")
        if self.per == "channel":
            size, axes = (*size, shape.head_dim), (*axes, "head_dim")
        return {"gate": Parameter(normal(key, 0, *size) * float(self.start == "published"), axes, decay=True)}

    def output(
        self,
        params: Params,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T H K"],
        value: Float[Array, "B T G K"],
    ) -> Float[Array, "B T H K"]:
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

    def output(
        self,
        params: Params,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T H K"],
        value: Float[Array, "B T G K"],
    ) -> Float[Array, "B T H K"]:
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

    def output(
        self,
        params: Params,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T H K"],
        value: Float[Array, "B T G K"],
    ) -> Float[Array, "B T H K"]:
        return out.astype(jnp.float32) - jnp.tanh(params["alpha"])[:, None] * _projected(out, value)


def _projected(out: Float[Array, "B T H K"], value: Float[Array, "B T G K"]) -> Float[Array, "B T H K"]:
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
