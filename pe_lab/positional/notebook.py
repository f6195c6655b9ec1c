"""The encodings of a widely read notebook that are not those of their names; only for comparison with it.

Importing this module registers them: `--encodings=pe_lab.positional.notebook` in a command.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from pe_lab.config import register_kind
from pe_lab.positional.hooks import Encoding, Hidden, Keys, Params, Positions, Queries
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import angles, fixed_point_frequencies, multiply_high, rotate
from pe_lab.positional.scalings import LARGEST, SCALINGS, Limits, Scaled, Scaling, require


@register("notebook_yarn")
@dataclass(frozen=True)
class NotebookYarn(Encoding):
    """The notebook's "YaRN": RoPE with position n replaced by n * m(n).

    m goes from `alpha` to `beta` linearly over `blend` tokens on either side of `original_length`; in its code,
    `scale = (1-lam)*alpha + lam*beta`, `theta = n * (freqs[None, :] * scale)`. There is no ramp over frequencies, and
    scores depend on more than the distance. `Yarn` is YaRN.
    """

    display_name = "the notebook's YaRN"

    base: float = 10000.0
    alpha: float = 0.85
    beta: float = 1.25
    original_length: int = 128
    blend: int = 16

    limits: ClassVar[Limits] = dict.fromkeys(
        ("alpha", "beta"), (lambda x: 0 < x <= 16, "it must be above 0 and at most 16.")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.blend <= self.original_length and self.blend == int(self.blend),
            f"NotebookYarn.blend is {self.blend}; it must lie in [1, original_length], which is "
            f"{self.original_length}, and be whole.",
        )

    def spectrum(self, head_dim: int) -> Float[np.ndarray, " R"]:
        """RoPE's frequencies, in radians per position."""
        return self.base ** (-2.0 * np.arange(head_dim // 2) / head_dim)

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        angle = warped_angles(jnp.asarray(fixed_point_frequencies(self.spectrum(q.shape[-1]))), positions, self)
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)


def warped_angles(
    fixed_freq: UInt32[Array, "*rotations R 2"], positions: Int[Array, "B T"], warp: NotebookYarn
) -> Float[Array, "B T *rotations R"]:
    """Rotation angles at warped positions, float32, exact to 1e-6 rad at positions below 2^27 outside the blend.

    Within the blend the multiplier is a float32 (1e-7 of a position near `original_length`).
    """
    position = positions.astype(jnp.uint32)
    start = warp.original_length - warp.blend
    blended = jnp.clip((positions - start) / jnp.float32(2 * warp.blend), 0, 1)
    between = positions * (warp.alpha * (1 - blended) + warp.beta * blended)
    whole, rest = between.astype(jnp.uint32), between - jnp.floor(between)
    for multiplier, here in ((warp.alpha, blended == 0), (warp.beta, blended == 1)):
        # In fixed point: a float32 product would lose the fraction of a large position. The multiplier's fraction has
        # two words; the product of the lower word carries into the upper.
        high, low = (np.uint32(word) for word in divmod(int(multiplier % 1 * 2**64), 2**32))
        upper = position * high
        fraction = upper + multiply_high(position, jnp.full_like(position, low))
        carried = multiply_high(position, jnp.full_like(position, high)) + (fraction < upper).astype(jnp.uint32)
        whole = jnp.where(here, position * np.uint32(int(multiplier)) + carried, whole)
        rest = jnp.where(here, fraction.astype(jnp.float32) * jnp.float32(2.0**-32), rest)
    step = fixed_freq[..., 0].astype(jnp.float32) * jnp.float32(2 * math.pi / 2**32)
    return angles(fixed_freq, whole.astype(jnp.int32)) + rest.reshape(rest.shape + (1,) * (fixed_freq.ndim - 1)) * step


@register("notebook_bias")
@dataclass(frozen=True)
class NotebookBias(Encoding):
    """The notebook's "NoPE": `strength` added to the diagonal of the logits, at positions below `original_length`.

    There is no other encoding: "NoPE: absolute learned bias within training window", `B[:n, :n] += np.eye(n) * 2.0`.
    `NoPE` is NoPE.
    """

    display_name = "the notebook's bias"

    strength: float = 2.0
    original_length: int = 128

    limits: ClassVar[Limits] = {"strength": (lambda x: abs(x) <= LARGEST, "it must be at most 2^32 in size.")}

    def bias(
        self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]
    ) -> Float[Array, "1 T S"]:
        diagonal = query_positions[:, None] == key_positions[None, :]
        here = diagonal & (query_positions < self.original_length)[:, None]
        return jnp.where(here, jnp.float32(self.strength), 0)[None]


@dataclass(frozen=True)
class NotebookNTK(Scaling):
    """The notebook's "NTK": w_i * factor^(2i/d). It makes slow pairs faster; NTK makes them slower.

    In its code: `freqs = 1.0 / (base ** (2*i/d))`, `freqs = freqs * (scaling ** (i / (d/2)))`; in its text: "so that
    lower frequencies rotate more slowly".
    Only for comparison with the notebook; use `NTK` for anything else.
    """

    factor: float = 8.0

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return inv_freq * self.factor ** (2.0 * np.arange(dim // 2) / dim), 1.0


SCALINGS["notebook_ntk"] = NotebookNTK
register_kind("notebook_ntk", NotebookNTK)
