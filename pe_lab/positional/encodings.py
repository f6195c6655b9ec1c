"""Positional encodings as small frozen descriptions, and the pure function that makes frequencies of one.

All functions here run on the host, in float64. `schedule.py` lays out the arrays of a model; `scalings.py` has the
scalings of rotary frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.positional.scalings import SCALINGS, Checked, Limits, Scaling, require


class _Rotary(Checked):
    """Base of the encodings with a scaling."""

    scaling: Scaling | None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ", ".join(kind.__name__ for kind in SCALINGS.values())
        require(
            self.scaling is None or isinstance(self.scaling, Scaling),
            f"{type(self).__name__}.scaling is {self.scaling!r}; give None or one of {names}(...).",
        )


@dataclass(frozen=True)
class Rope(_Rotary):
    """Rotary embedding (Su et al. 2021) with an optional scaling.

    `fraction` < 1 is p-RoPE (Barbero et al. 2024): the full spectrum over head_dim, of which the lowest frequencies
    are set to zero. Partial RoPE instead fits a whole spectrum into the first channels.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: Scaling | None = None


@dataclass(frozen=True)
class PartialRope(_Rotary):
    """Rotary embedding on the first channels only: `fraction` of head_dim, made even by rounding up.

    The spectrum is that of a head as wide as the rotated part: w_i = base^(-2i/r).
    """

    base: float = 10000.0
    fraction: float = 0.25
    scaling: Scaling | None = None

    def rotated_channels(self, head_dim: int) -> int:
        channels = int(head_dim * self.fraction)
        return channels + channels % 2


@dataclass(frozen=True)
class NoPE:
    """No positional encoding: order enters only through the causal mask."""


@dataclass(frozen=True)
class Alibi:
    """A penalty of slope * distance on the logits, with one slope per head (Press et al. 2022)."""


@dataclass(frozen=True)
class NotebookYarn(Checked):
    """The notebook's "YaRN": RoPE with position n replaced by n * m(n).

    m goes from `alpha` to `beta` linearly over `blend` tokens on either side of `original_length`. There is no ramp
    over frequencies, and scores depend on more than the distance. Only for comparison with the notebook; `Yarn` is
    YaRN.
    """

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


@dataclass(frozen=True)
class NotebookBias(Checked):
    """The notebook's "NoPE": `strength` added to the diagonal of the logits, at positions below `original_length`.

    There is no other encoding. Only for comparison with the notebook; `NoPE` is NoPE.
    """

    strength: float = 2.0
    original_length: int = 128

    limits: ClassVar[Limits] = {"strength": (math.isfinite, "it must be finite.")}


Encoding = Rope | PartialRope | NoPE | Alibi | NotebookYarn | NotebookBias
ENCODINGS: dict[str, type] = {
    "rope": Rope,
    "partial_rope": PartialRope,
    "nope": NoPE,
    "alibi": Alibi,
    "notebook_yarn": NotebookYarn,
    "notebook_bias": NotebookBias,
}


def frequencies(encoding: Encoding, head_dim: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The rotation frequencies and amplitudes of one description.

    Args:
      encoding: the description.
      head_dim: K, channels per head; even.
      length: tokens of the sequence, for scalings that depend on it (see `follows_length`); None is the training
        length or less.

    Returns:
      `inv_freq` [R] in radians per position and `gain` [R], the amplitude of the pair after rotation; float64,
      R = K / 2. Pair r is channels r and r + R. Frequency 0 leaves the pair unrotated.

    Raises:
      ConfigError: an odd head_dim, no encoding, or a scaling that does not fit the rotated width.
    """
    require(head_dim > 0 and head_dim % 2 == 0, f"head_dim is {head_dim}; it must be even and positive.")
    require(length is None or length > 0, f"length is {length}; it must be a positive number of tokens, or None.")
    pairs = head_dim // 2
    inv_freq, gain = np.zeros(pairs), np.ones(pairs)
    if isinstance(encoding, Rope):
        dim, kept = head_dim, int(encoding.fraction * head_dim // 2)
    elif isinstance(encoding, PartialRope):
        dim = encoding.rotated_channels(head_dim)
        kept = dim // 2
    elif isinstance(encoding, NotebookYarn):
        dim, kept = head_dim, pairs
    elif isinstance(encoding, NoPE | Alibi | NotebookBias):
        return inv_freq, gain
    else:
        names = ", ".join(kind.__name__ for kind in ENCODINGS.values())
        raise ConfigError(f"{encoding!r} is not a positional encoding; use one of {names}.")
    if kept == 0:
        return inv_freq, gain
    spectrum, factor = encoding.base ** (-2.0 * np.arange(dim // 2) / dim), 1.0
    scaling = getattr(encoding, "scaling", None)
    if scaling is not None:
        spectrum, factor = scaling.scale(spectrum, encoding.base, dim, length)
    inv_freq[:kept] = spectrum[:kept]
    # The attention factor multiplies cos and sin of the whole rotary width, unrotated pairs of p-RoPE included.
    gain[: dim // 2] = factor
    return inv_freq, gain


def follows_length(encoding: object) -> bool:
    """Whether the frequencies of an encoding depend on the sequence's length (dynamic NTK, dynamic YaRN, LongRoPE)."""
    scaling = getattr(encoding, "scaling", None)
    return scaling is not None and scaling.dynamic


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slopes [H], float64: 2^(-8(h+1)/H) for H a power of two (Press et al. 2022).

    For another H: the slopes of the power of two below, then every second slope of the power above.
    """
    require(num_heads > 0, f"num_heads is {num_heads}; it must be positive.")
    power = 2 ** int(math.log2(num_heads))

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([geometric(power), geometric(2 * power)[0::2][: num_heads - power]])
