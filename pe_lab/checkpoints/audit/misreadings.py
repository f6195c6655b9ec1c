"""Descriptions of what faulty runtimes compute, where an edit of the true description cannot express it.

They are for the audit alone: none is registered, so that no recipe and no checkpoint can name one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from pe_lab.positional import Encoding, Scaling, frequencies, rotate
from pe_lab.positional.hooks import Keys, Params, Positions, Queries
from pe_lab.positional.scalings import Scaled


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Float64 numbers, rounded to bfloat16."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


Misapplication = Literal[
    "twice",
    "twice with its factor",
    "divided again",
    "half ramp",
    "half ramp divided",
    "no factor",
    "factor twice",
    "factor alone",
    "rounded",
]


@dataclass(frozen=True)
class Misapplied(Scaling):
    """A scaling as a faulty runtime applies it.

    Attributes:
      inner: the scaling; None: the frequencies are those of the base.
      how: `twice`: its ratio of new to old frequencies is applied to the new ones (`with its factor`: and so is the
        attention factor); `divided again`: the positions are divided by its factor as well; `half ramp`: YaRN's ramp is
        computed for half of the channels (`divided`: both); `no factor`, `factor twice`: of the attention factor;
        `factor alone`: the frequencies are not scaled; `rounded`: the frequencies are stored in bfloat16.
    """

    inner: Scaling | None
    how: Misapplication

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        return self.inner is not None and self.inner.dynamic

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        """See `Scaling`."""
        scaled, factor = (inv_freq, 1.0) if self.inner is None else self.inner.scale(inv_freq, base, dim, length)
        if self.how == "rounded":
            return bfloat16(scaled), factor
        if self.how.startswith("twice"):
            return scaled * (scaled / inv_freq), factor**2 if "factor" in self.how else factor
        if self.how == "divided again":
            return scaled / self.inner.factor, factor
        if self.how.startswith("half ramp"):
            low, high = self.inner.ramp_bounds(base, dim // 2)
            slow = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)
            divisor = self.inner.factor if self.how == "half ramp divided" else 1.0
            return inv_freq * (1 - slow + slow / self.inner.factor) / divisor, factor
        if self.how == "factor alone":
            return inv_freq, factor
        return scaled, 1.0 if self.how == "no factor" else factor**2


def _rotated(
    x: Float[Array, "B T heads K"], angle: Float[Array, "#B T R"], gain: np.ndarray
) -> Float[Array, "B T heads K"]:
    cos, sin = jnp.cos(angle) * gain, jnp.sin(angle) * gain
    return rotate(x, cos[:, :, None], sin[:, :, None])


@dataclass(frozen=True)
class QueriesLater(Encoding):
    """Beside a rotation: queries are rotated as if they stood `tokens` positions after the key of their own token.

    `encoding` and `length` are of the layer's rotation.
    """

    encoding: Encoding
    tokens: int
    length: int | None

    stands_alone = False

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Array) -> tuple[Queries, Keys]:
        """See `Encoding`: the rotation of the layer, which follows, adds its angle to this one."""
        inv_freq, _ = frequencies(self.encoding, q.shape[-1], self.length)
        angle = jnp.broadcast_to(jnp.asarray(self.tokens * inv_freq, jnp.float32), (1, q.shape[1], len(inv_freq)))
        return _rotated(q, angle, np.ones(len(inv_freq), np.float32)), k


@dataclass(frozen=True)
class AnglesInBfloat16(Encoding):
    """A rotation whose positions, frequencies and their products are rounded to bfloat16."""

    encoding: Encoding
    length: int | None

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Array) -> tuple[Queries, Keys]:
        """See `Encoding`."""
        inv_freq, gain = frequencies(self.encoding, q.shape[-1], self.length)

        def rounded(a: Array) -> Array:  # XLA may leave out a conversion there and back, but not this
            return jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)

        at = rounded(positions.astype(jnp.float32))[..., None]
        angle = rounded(at * rounded(jnp.asarray(inv_freq, jnp.float32)))
        gain = gain.astype(np.float32)
        return _rotated(q, angle, gain), _rotated(k, angle, gain)
