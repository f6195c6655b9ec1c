"""Absolute positions, added to the embeddings of the tokens: learned (GPT-2, OPT), and sines (Vaswani et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from pe_lab.config import OMIT_DEFAULT
from pe_lab.positional.encodings import rope_spectrum
from pe_lab.positional.hooks import Encoding, HeadShape, Hidden, Parameter, Params, Positions, normal
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import angles, fixed_point_frequencies
from pe_lab.positional.scalings import Limits


@register("learned_positions")
@dataclass(frozen=True)
class LearnedPositions(Encoding):
    """A learned vector for each position, added to the embedding of the token (Radford et al. 2019): `table` [P, D].

    Longer sequences than `size` are refused: there is no vector for their positions.

    Attributes:
      size: positions, in tokens.
      offset: rows of the table before that of position 0, which belong to no position (2 in OPT). P = offset + size.
    """

    display_name = "learned positions"

    size: int = 1024
    offset: int = field(default=0, metadata=OMIT_DEFAULT)

    limits: ClassVar[Limits] = {
        "size": (lambda x: 1 <= x < 2**24 and x == int(x), "give a whole number of tokens from 1."),
        "offset": (lambda x: 0 <= x < 2**24 and x == int(x), "give a whole number from 0."),
    }

    @property
    def max_length(self) -> int:
        return self.size

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        table = normal(key, 0, self.offset + self.size, shape.d_model)
        return {"table": Parameter(table, (None, "embed"))}

    def embed(self, params: Params, x: Hidden, positions: Positions) -> Hidden:
        return x + params["table"].astype(x.dtype)[positions + self.offset]


@register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """sin(n w_i) and cos(n w_i), w_i = base^(-2i / D), added to channels 2i and 2i + 1 of the embedding of token n.

    Vaswani et al. 2017, section 3.5. There, embeddings are sqrt(D) times as large: `model.embedding_multiplier`.

    Attributes:
      base: of the wavelengths.
      amplitude: of the sines.
    """

    display_name = "sinusoidal"

    base: float = 10000.0
    amplitude: float = 1.0

    limits: ClassVar[Limits] = {
        "base": (lambda x: 1 < x <= 1e12, "it must lie in (1, 1e12]."),
        "amplitude": (lambda x: 0 < x <= 1e6, "it must lie in (0, 1e6]."),
    }

    def embed(self, params: Params, x: Hidden, positions: Positions) -> Hidden:
        D = x.shape[-1]
        fixed = jnp.asarray(fixed_point_frequencies(rope_spectrum(self.base, D + D % 2)))
        angle = angles(fixed, positions)
        waves = jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1).reshape(*positions.shape, -1)[..., :D]
        return x + (self.amplitude * waves).astype(x.dtype)
