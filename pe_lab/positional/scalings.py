"""Ways of stretching rotary frequencies over longer texts: small descriptions, each with its formula.

Notation as in the papers: w_i = base^(-2i/d) for i = 0 .. d/2 - 1, d rotated channels, L the training length, s the
factor by which texts grow. `scale` gives the new w_i, and the factor on cos and sin (so logits change by its square).
All formulas agree with transformers' `modeling_rope_utils` where it has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pe_lab.errors import UserError

Scaled = tuple[np.ndarray, float]  # (frequencies [d/2] in radians per position, factor on cos and sin)


def require(condition: bool, message: str) -> None:
    """A `UserError` where a description makes no sense."""
    if not condition:
        raise UserError(message)


def _require_factor(kind: str, factor: float) -> None:
    require(1 <= factor < math.inf, f"{kind}.factor is {factor}; it must be finite and at least 1.")


def require_length(kind: str, length: float) -> None:
    """A `UserError` unless `length` is a positive whole number of tokens."""
    require(
        0 < length < math.inf and length == int(length),
        f"{kind}.original_length is {length}; give the training length, a number of tokens.",
    )


def _require_ramp(kind: str, beta_fast: float, beta_slow: float) -> None:
    require(
        math.inf > beta_fast > beta_slow > 0,
        f"{kind} needs beta_fast > beta_slow > 0, and has {beta_fast} and {beta_slow}.",
    )


def _require_magnitude(kind: str, field: str, value: float | None) -> None:
    require(
        value is None or 0 < value < math.inf,
        f"{kind}.{field} is {value}; it must be finite and above 0, or left out.",
    )


def stretch(length: int | None, original_length: int) -> float:
    """How much longer than in training a text is: max(1, length / original_length); 1 where no length is known."""
    return max(1.0, (length or 0) / original_length)


@dataclass(frozen=True)
class PI:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("PI", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return inv_freq / self.factor, 1.0


def _enlarged_base(inv_freq: np.ndarray, dim: int, factor: float, kind: str) -> np.ndarray:
    """base -> base * factor^(d / (d - 2)), which is w_i * factor^(-2i / (d - 2))."""
    # A single pair has no "lowest" beside its "highest": d / (d - 2) has no meaning at d = 2.
    require(dim > 2, f"{kind} needs at least 4 rotated channels, and here there are {dim}.")
    return inv_freq * factor ** (-2.0 * np.arange(dim // 2) / (dim - 2))


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: the base grows so that the lowest frequency is divided by `factor`, the highest by nothing."""

    factor: float

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("NTK", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return _enlarged_base(inv_freq, dim, self.factor, "NTK"), 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """NTK-aware scaling that follows the text: base * (f n / L - (f - 1))^(d / (d - 2)) for texts of n > L tokens.

    Factor f = 1 is NTK at exactly s = n / L, other factors stretch faster. Up to L tokens it is RoPE.
    """

    original_length: int
    factor: float = 1.0

    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_length("DynamicNTK", self.original_length)
        _require_factor("DynamicNTK", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        growth = self.factor * stretch(length, self.original_length) - (self.factor - 1)
        return _enlarged_base(inv_freq, dim, growth, "DynamicNTK"), 1.0


def ramp_bounds(
    base: float, dim: int, original_length: int, beta_fast: float, beta_slow: float, truncate: bool = True
) -> tuple[float, float]:
    """The pair indices between which YaRN's interpolation fades in; unequal, within [0, dim - 1].

    They belong to the pairs that turn `beta_fast` and `beta_slow` times within `original_length` tokens; `truncate`
    rounds them outwards.
    """

    def index(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    require(
        low <= high,
        f"YaRN: within {original_length} tokens, at base {base:g}, no pair of {dim} channels turns between "
        f"{beta_slow:g} and {beta_fast:g} times: nothing to interpolate. Check original_length and the base.",
    )
    return low, high + 0.001 if low == high else high


def _interpolated_by_parts(inv_freq: np.ndarray, factor: float, bounds: tuple[float, float]) -> np.ndarray:
    """Slow pairs divided by `factor`, fast ones kept, a ramp linear in the pair index between them."""
    low, high = bounds
    slow = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)
    # In this order factor 1 changes no bit: a dynamic scheme is RoPE up to its length.
    return inv_freq * (1 - slow + slow / factor)


@dataclass(frozen=True)
class NTKByParts:
    """NTK-by-parts: YaRN's frequencies without its attention factor (Peng et al. 2023, Section 3.2)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("NTKByParts", self.factor)
        require_length("NTKByParts", self.original_length)
        _require_ramp("NTKByParts", self.beta_fast, self.beta_slow)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        bounds = ramp_bounds(base, dim, self.original_length, self.beta_fast, self.beta_slow, self.truncate)
        return _interpolated_by_parts(inv_freq, self.factor, bounds), 1.0


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """g(mscale) / g(mscale_all_dim) where both are given, else g(1), with g(m) = 0.1 m ln(factor) + 1."""

    def g(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    return g(mscale) / g(mscale_all_dim) if mscale and mscale_all_dim else g(1.0)


@dataclass(frozen=True)
class Yarn:
    """YaRN: interpolate slow pairs, keep fast ones, and sharpen the logits (Peng et al. 2023).

    The ramp is linear in the pair index (see `ramp_bounds`). DroPE's eq. 11 thresholds the frequency instead, which
    taken literally is PI; this is the published code's formula. `mscale` and `mscale_all_dim` are DeepSeek's (both,
    or neither); `attention_factor` overrides what follows from the factor.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("Yarn", self.factor)
        require_length("Yarn", self.original_length)
        _require_ramp("Yarn", self.beta_fast, self.beta_slow)
        _require_mscales("Yarn", self.mscale, self.mscale_all_dim)
        _require_magnitude("Yarn", "attention_factor", self.attention_factor)

    def ramp_bounds(self, base: float, dim: int) -> tuple[float, float]:
        """See the function `ramp_bounds`."""
        return ramp_bounds(base, dim, self.original_length, self.beta_fast, self.beta_slow, self.truncate)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = yarn_attention_factor(self.factor, self.mscale, self.mscale_all_dim)
        return _interpolated_by_parts(inv_freq, self.factor, self.ramp_bounds(base, dim)), attention_factor


def _require_mscales(kind: str, mscale: float, mscale_all_dim: float) -> None:
    require(
        0 <= mscale < math.inf and 0 <= mscale_all_dim < math.inf,
        f"{kind}.mscale is {mscale} and mscale_all_dim {mscale_all_dim}; they must be finite and not negative.",
    )
    # transformers reads neither unless both are there: one alone would silently say nothing.
    require(
        bool(mscale) == bool(mscale_all_dim),
        f"{kind}.mscale is {mscale} and mscale_all_dim {mscale_all_dim}; give both, or neither.",
    )


@dataclass(frozen=True)
class DynamicYarn:
    """YaRN whose factor follows the text: s = n / L for texts of n > L tokens, and RoPE up to L (Peng et al. 2023)."""

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_length("DynamicYarn", self.original_length)
        _require_ramp("DynamicYarn", self.beta_fast, self.beta_slow)
        _require_mscales("DynamicYarn", self.mscale, self.mscale_all_dim)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        factor = stretch(length, self.original_length)
        bounds = ramp_bounds(base, dim, self.original_length, self.beta_fast, self.beta_slow, self.truncate)
        attention_factor = yarn_attention_factor(factor, self.mscale, self.mscale_all_dim)
        return _interpolated_by_parts(inv_freq, factor, bounds), attention_factor


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: by wavelength, with a ramp linear in the rotations within the original length.

    Pairs of more than `high_freq_factor` rotations are kept, of fewer than `low_freq_factor` divided by `factor`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("Llama3", self.factor)
        require_length("Llama3", self.original_length)
        require(
            math.inf > self.high_freq_factor > self.low_freq_factor > 0,
            f"Llama3 needs high_freq_factor > low_freq_factor > 0, and has {self.high_freq_factor} and "
            f"{self.low_freq_factor}.",
        )

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        rotations = self.original_length * inv_freq / (2 * math.pi)
        kept = np.clip((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq, 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: every pair divided by its own searched number (Ding et al. 2024; Phi-3).

    `long_factor` is read for texts longer than `original_length`, else `short_factor`; both hold one number a rotated
    pair. The factor on cos and sin is sqrt(1 + ln(factor) / ln(original_length)) at every length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float
    attention_factor: float | None = None

    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_factor("LongRope", self.factor)
        require_length("LongRope", self.original_length)
        require(self.original_length > 1, "LongRope.original_length is 1; its logarithm divides, so give more.")
        _require_magnitude("LongRope", "attention_factor", self.attention_factor)
        for field in ("short_factor", "long_factor"):
            table = tuple(getattr(self, field))
            object.__setattr__(self, field, table)  # a list, as JSON has it, would not hash
            bad = [x for x in table if not 0 < x < math.inf]
            require(not bad, f"LongRope.{field} holds {bad[:1]}; every number must be finite and above 0.")

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        for field in ("short_factor", "long_factor"):
            size = len(getattr(self, field))
            require(
                size == dim // 2,
                f"LongRope.{field} has {size} numbers; {dim} rotated channels need {dim // 2}, one a pair.",
            )
        table = self.long_factor if stretch(length, self.original_length) > 1 else self.short_factor
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return inv_freq / np.array(table), attention_factor


@dataclass(frozen=True)
class NotebookNTK:
    """What the notebook calls NTK: w_i * factor^(2i/d). It makes slow pairs faster, where NTK makes them slower.

    For comparison with the notebook alone; use `NTK` for anything else.
    """

    factor: float = 8.0

    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_factor("NotebookNTK", self.factor)

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return inv_freq * self.factor ** (2.0 * np.arange(dim // 2) / dim), 1.0


Scaling = PI | NTK | DynamicNTK | NTKByParts | Yarn | DynamicYarn | Llama3 | LongRope | NotebookNTK
SCALINGS: dict[str, type] = {
    "pi": PI,
    "ntk": NTK,
    "dynamic_ntk": DynamicNTK,
    "ntk_by_parts": NTKByParts,
    "yarn": Yarn,
    "dynamic_yarn": DynamicYarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "notebook_ntk": NotebookNTK,
}
