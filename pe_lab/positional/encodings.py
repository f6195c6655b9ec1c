"""What a positional encoding is: small frozen descriptions, and the pure function that turns one into frequencies.

Everything here runs on the host, in float64. The arrays a model reads are laid out by `schedule.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pe_lab.config import UserError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_factor(kind: str, factor: float) -> None:
    _require(1 <= factor < math.inf, f"{kind}.factor is {factor}; it must be finite and at least 1.")


def _require_rope(kind: str, base: float, fraction: float, scaling: Scaling | None) -> None:
    _require(1 < base < math.inf, f"{kind}.base is {base}; it must be finite and above 1.")
    _require(0 <= fraction <= 1, f"{kind}.fraction is {fraction}; it must lie in [0, 1].")
    _require(
        scaling is None or isinstance(scaling, Scaling),
        f"{kind}.scaling is {scaling!r}; give PI(...), NTK(...), Yarn(...) or None.",
    )


@dataclass(frozen=True)
class PI:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        _require_factor("PI", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int) -> tuple[np.ndarray, float]:
        return inv_freq / self.factor, 1.0


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: the base grows so that the lowest frequency is divided by `factor`, the highest by nothing."""

    factor: float

    def __post_init__(self) -> None:
        _require_factor("NTK", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int) -> tuple[np.ndarray, float]:
        # A single pair has no "lowest" beside its "highest": d / (d - 2) has no meaning at d = 2.
        _require(dim > 2, f"NTK needs at least 4 rotated channels, and here there are {dim}.")
        return inv_freq * self.factor ** (-2.0 * np.arange(dim // 2) / (dim - 2)), 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN: interpolate slow pairs, keep fast ones, and sharpen the logits (Peng et al. 2023).

    The ramp is linear in the pair index, between the indices of the pairs that turn `beta_fast` and `beta_slow`
    times within `original_length` tokens, rounded outwards. DroPE's eq. 11 thresholds the frequency instead, which
    taken literally is PI; this is the published code's formula.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _require_factor("Yarn", self.factor)
        _require(
            0 < self.original_length < math.inf and self.original_length == int(self.original_length),
            f"Yarn.original_length is {self.original_length}; give the training length, a number of tokens.",
        )
        _require(
            self.beta_fast > self.beta_slow > 0,
            f"Yarn needs beta_fast > beta_slow > 0, and has {self.beta_fast} and {self.beta_slow}.",
        )

    def ramp_bounds(self, base: float, dim: int) -> tuple[float, float]:
        """The pair indices between which the interpolation fades in; unequal, within [0, dim - 1]."""

        def index(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(float(math.floor(index(self.beta_fast))), 0.0)
        high = min(float(math.ceil(index(self.beta_slow))), dim - 1.0)
        return low, high + 0.001 if low == high else high

    def scale(self, inv_freq: np.ndarray, base: float, dim: int) -> tuple[np.ndarray, float]:
        low, high = self.ramp_bounds(base, dim)
        interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        factor = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return inv_freq * (1 - interpolated) + inv_freq / self.factor * interpolated, factor


Scaling = PI | NTK | Yarn


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021) with an optional scaling.

    `fraction` < 1 is p-RoPE (Barbero et al. 2024): the full spectrum over head_dim, of which the lowest frequencies
    are set to zero. It is not partial RoPE, which squeezes a whole spectrum into the first channels.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _require_rope("Rope", self.base, self.fraction, self.scaling)


@dataclass(frozen=True)
class PartialRope:
    """Rotary embedding on the first channels only: `fraction` of head_dim, made even by rounding up.

    The spectrum is that of a head as wide as the rotated part: w_i = base^(-2i/r).
    """

    base: float = 10000.0
    fraction: float = 0.25
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _require_rope("PartialRope", self.base, self.fraction, self.scaling)

    def rotated_channels(self, head_dim: int) -> int:
        channels = int(head_dim * self.fraction)
        return channels + channels % 2


@dataclass(frozen=True)
class NoPE:
    """No positional encoding: the causal mask is all a head knows of order."""


@dataclass(frozen=True)
class Alibi:
    """A penalty of slope * distance on the logits, one slope a head (Press et al. 2022)."""


Encoding = Rope | PartialRope | NoPE | Alibi


def frequencies(encoding: Encoding, head_dim: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Turns one description into rotation frequencies and amplitudes.

    Args:
      encoding: the description.
      head_dim: K, channels per head; even.
      length: tokens the model is about to read. No scheme of today depends on it; dynamic ones will.

    Returns:
      `inv_freq` [R] in radians per position and `gain` [R], the amplitude of the pair after rotation; float64,
      R = K / 2. Pair r is channels r and r + R. Frequency 0 leaves the pair as it is.
    """
    _require(head_dim > 0 and head_dim % 2 == 0, f"head_dim is {head_dim}; it must be even and positive.")
    pairs = head_dim // 2
    inv_freq, gain = np.zeros(pairs), np.ones(pairs)
    if isinstance(encoding, Rope):
        dim, kept = head_dim, int(encoding.fraction * head_dim // 2)
    elif isinstance(encoding, PartialRope):
        dim = encoding.rotated_channels(head_dim)
        kept = dim // 2
    elif isinstance(encoding, NoPE | Alibi):
        return inv_freq, gain
    else:
        raise UserError(f"{encoding!r} is not a positional encoding; use Rope, PartialRope, NoPE or Alibi.")
    if kept == 0:
        return inv_freq, gain
    spectrum, factor = encoding.base ** (-2.0 * np.arange(dim // 2) / dim), 1.0
    if encoding.scaling is not None:
        spectrum, factor = encoding.scaling.scale(spectrum, encoding.base, dim)
    inv_freq[:kept] = spectrum[:kept]
    # The attention factor multiplies cos and sin of the whole rotary width, pairs that stand still included.
    gain[: dim // 2] = factor
    return inv_freq, gain


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slopes [H], float64: 2^(-8(h+1)/n) for n a power of two.

    For another n: the slopes of the power of two below, then every second one of the power above.
    """
    _require(num_heads > 0, f"num_heads is {num_heads}; it must be positive.")
    power = 2 ** int(math.log2(num_heads))

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([geometric(power), geometric(2 * power)[0::2][: num_heads - power]])
