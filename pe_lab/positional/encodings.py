"""The encodings of the papers as small frozen descriptions, and the frequencies of any encoding.

All functions here run on the host, in float64. `schedule.py` lays out the arrays of a model; `scalings.py` has the
scalings of rotary frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pe_lab.errors import ConfigError, call
from pe_lab.positional.hooks import Encoding
from pe_lab.positional.registry import ENCODINGS, register
from pe_lab.positional.scalings import SCALINGS, Scaling, require


def rope_spectrum(base: float, dim: int) -> np.ndarray:
    """RoPE's frequencies [dim / 2], radians per position."""
    return base ** (-2.0 * np.arange(dim // 2) / dim)


class Rotary(Encoding):
    """Base of the encodings with a scaling."""

    relative = True

    base: float
    scaling: Scaling | None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ", ".join(kind.__name__ for kind in SCALINGS.values())
        require(
            self.scaling is None or isinstance(self.scaling, Scaling),
            f"{type(self).__name__}.scaling is {self.scaling!r}; give None or one of {names}(...).",
        )

    @property
    def follows_length(self) -> bool:
        return self.scaling is not None and self.scaling.dynamic

    def _spectrum(self, head_dim: int, dim: int, kept: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The frequencies of `dim` channels, of which the first `kept` pairs rotate, in a head of head_dim."""
        inv_freq, gain = np.zeros(head_dim // 2), np.ones(head_dim // 2)
        if kept == 0:
            return inv_freq, gain
        spectrum, factor = rope_spectrum(self.base, dim), 1.0
        if self.scaling is not None:
            spectrum, factor = self.scaling.scale(spectrum, self.base, dim, length)
        inv_freq[:kept] = spectrum[:kept]
        # The attention factor multiplies cos and sin of the whole rotary width, unrotated pairs of p-RoPE included.
        gain[: dim // 2] = factor
        return inv_freq, gain


@register("rope")
@dataclass(frozen=True)
class Rope(Rotary):
    """Rotary embedding (Su et al. 2021) with an optional scaling.

    `fraction` < 1 is p-RoPE (Barbero et al. 2024): the full spectrum over head_dim, of which the lowest frequencies
    are set to zero. Partial RoPE instead fits a whole spectrum into the first channels.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: Scaling | None = None

    def frequencies(self, head_dim: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        return self._spectrum(head_dim, head_dim, int(self.fraction * head_dim // 2), length)


@register("partial_rope")
@dataclass(frozen=True)
class PartialRope(Rotary):
    """Rotary embedding on the first channels only: `fraction` of head_dim, made even by rounding up.

    The spectrum is that of a head as wide as the rotated part: w_i = base^(-2i/r).
    """

    display_name = "Partial RoPE"

    base: float = 10000.0
    fraction: float = 0.25
    scaling: Scaling | None = None

    def rotated_channels(self, head_dim: int) -> int:
        channels = int(head_dim * self.fraction)
        return channels + channels % 2

    def frequencies(self, head_dim: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        dim = self.rotated_channels(head_dim)
        return self._spectrum(head_dim, dim, dim // 2, length)


@register("nope")
@dataclass(frozen=True)
class NoPE(Encoding):
    """No positional encoding: order enters only through the causal mask."""

    display_name = "NoPE"
    relative = True


@register("alibi")
@dataclass(frozen=True)
class Alibi(Encoding):
    """A penalty of slope * distance on the logits, with one slope per head (Press et al. 2022)."""

    display_name = "ALiBi"
    relative = True

    def slopes(self, num_heads: int) -> np.ndarray:
        return alibi_slopes(num_heads)


def frequencies(encoding: Encoding, head_dim: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The rotation frequencies and amplitudes of one description.

    Args:
      encoding: the description.
      head_dim: K, channels per head; even.
      length: tokens of the sequence, for scalings that depend on it (see `Encoding.follows_length`); None is the
        training length or less.

    Returns:
      `inv_freq` [R] in radians per position and `gain` [R], the amplitude of the pair after rotation; float64,
      R = K / 2. Pair r is channels r and r + R. Frequency 0 leaves the pair unrotated.

    Raises:
      ConfigError: an odd head_dim, no encoding, a scaling that does not fit the rotated width, or arrays of an encoding
        that have another shape or are not finite.
    """
    require(head_dim > 0 and head_dim % 2 == 0, f"head_dim is {head_dim}; it must be even and positive.")
    require(length is None or length > 0, f"length is {length}; it must be a positive number of tokens, or None.")
    if not isinstance(encoding, Encoding):
        names = ", ".join(kind.__name__ for kind in ENCODINGS.values())
        raise ConfigError(f"{encoding!r} is not a positional encoding; use one of {names}.")
    found = call(encoding, "frequencies", head_dim, length)
    name, wanted = type(encoding).__name__, (head_dim // 2,)
    require(
        isinstance(found, tuple) and len(found) == 2,
        f"{name}.frequencies returned a {type(found).__name__}; it must return inv_freq and gain, [{wanted[0]}] each.",
    )
    inv_freq, gain = (np.asarray(array, np.float64) for array in found)
    for what, array in (("inv_freq", inv_freq), ("gain", gain)):
        require(
            array.shape == wanted and bool(np.isfinite(array).all()),
            f"{name}.frequencies returned {what} of shape {list(array.shape)}; for heads of {head_dim} channels it "
            f"must return [{wanted[0]}] finite numbers.",
        )
    return inv_freq, gain


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slopes [H], float64: 2^(-8(h+1)/H) for H a power of two (Press et al. 2022).

    For another H: the slopes of the power of two below, then every second slope of the power above.
    """
    require(num_heads > 0, f"num_heads is {num_heads}; it must be positive.")
    power = 2 ** int(math.log2(num_heads))

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([geometric(power), geometric(2 * power)[0::2][: num_heads - power]])
