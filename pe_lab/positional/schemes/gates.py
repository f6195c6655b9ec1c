"""A gate on each head's rotation, learned under a penalty: which heads need positions?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.positional.hooks import Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import angles, fixed_point_frequencies, rotate
from pe_lab.positional.scalings import Limits
from pe_lab.positional.schemes.spectra import rope_spectrum

START = 2.0  # of the parameter: the gate is 0.957
STRETCH = 0.1  # beyond 0 and 1, so that a gate reaches both


@register("gated_rope")
@dataclass(frozen=True)
class GatedRope(Encoding):
    """RoPE and NoPE mixed by a gate for each query head: logit = g (rotated q . rotated k) + (1 - g) (q . k).

    g = clip(1.2 sigmoid(a) - 0.1, 0, 1) with a learned for each head, so that a gate can be 0 or 1 exactly. Training
    adds `penalty_per_head` nats per token for each open gate: a head keeps its rotation if that saves more. Many gates
    settle between 0 and 1, since a mix predicts better than either; `polarize_per_head`, in a second phase, drives them
    to 0 or 1. Queries and keys have 2K channels. `pe_lab.surgery --drop=gates` then makes a model of it in which heads
    with a closed gate have no encoding, and the others RoPE.

    Attributes:
      base: of RoPE.
      penalty_per_head: nats per token for an open gate; 0: none.
      polarize_per_head: nats per token for a half-open gate, as 4 g (1 - g); 0: none.
    """

    display_name = "gated RoPE"
    relative = True

    base: float = 10000.0
    penalty_per_head: float = 0.0
    polarize_per_head: float = 0.0

    limits: ClassVar[Limits] = dict.fromkeys(
        ("penalty_per_head", "polarize_per_head"), (lambda x: 0 <= x <= 1e6, "give nats per token, from 0 to 1e6.")
    )

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return {"gate": Parameter(jnp.full(shape.num_heads, START), ("heads",), learning_rate=10.0)}

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H twice"], Float[Array, "B T G twice"]]:
        spectrum = fixed_point_frequencies(rope_spectrum(self.base, q.shape[-1]))
        angle = angles(jnp.asarray(spectrum), positions)[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        gate = gates(params["gate"])[:, None]
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        mixed = jnp.concatenate([gate * rotate(q, cos, sin), (1 - gate) * q], axis=-1)
        return mixed, jnp.concatenate([rotate(k, cos, sin), k], axis=-1)

    def penalty(self, params: Params) -> Float[Array, ""]:
        gate = gates(params["gate"])
        return self.penalty_per_head * gate.sum() + self.polarize_per_head * (4 * gate * (1 - gate)).sum()


def gates(parameter: Float[Array | np.ndarray, "*layers H"]) -> Float[Array, "*layers H"]:
    """The gates of the parameter of `GatedRope`, in 0..1."""
    return jnp.clip((1 + 2 * STRETCH) * jax.nn.sigmoid(parameter) - STRETCH, 0.0, 1.0)
