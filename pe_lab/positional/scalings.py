"""Scalings of rotary frequencies for longer sequences: small descriptions, each with its formula.

Notation as in the papers: w_i = base^(-2i/d) for i = 0 .. d/2 - 1, d rotated channels, L the training length, s the
factor by which sequences grow. `scale` returns the new w_i and the factor on cos and sin (logits change by its square).
All formulas agree with transformers' `modeling_rope_utils` where it has them.
"""

from __future__ import annotations

import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from pe_lab.config import field_types
from pe_lab.errors import ConfigError

Scaled = tuple[np.ndarray, float]  # (frequencies [d/2] in radians per position, factor on cos and sin)


def require(condition: bool, message: str) -> None:
    """Raises a `ConfigError` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


# For a field of descriptions: whether a value is valid, and the advice of the error message.
Limits = dict[str, tuple[Callable[[Any], bool], str]]
_SHARED: Limits = {
    # The smallest frequency of 64-bit fixed point is 3.4e-19 radians a token; that of base 1e18 is 1e-18.
    "base": (lambda x: 1 < x <= 1e18, "it must be above 1, and 1e18 at most."),
    "fraction": (lambda x: 0 <= x <= 1, "it must lie in [0, 1]."),
    # Positions are int32: no sequence grows by more.
    "factor": (lambda x: 1 <= x < 2**31, "it must be at least 1, and below 2^31."),
    "original_length": (lambda x: 0 < x < 2**31 and x == int(x), "give the training length, a number of tokens."),
    "attention_factor": (lambda x: x is None or 1e-6 <= x <= 1e6, "it must lie in [1e-6, 1e6], or be left out."),
}
LARGEST = 2.0**32  # of a number of a description that has no limits of its own; random seeds are as large


class CheckedFields:
    """Base of the descriptions, which are frozen dataclasses: raises a `ConfigError` for a value that is not valid.

    `limits` are of the fields that a class does not share with others. Any other number is at most `LARGEST` in size,
    and a field of type `Literal[...]` has one of its words.
    """

    limits: ClassVar[Limits] = {}

    def __post_init__(self) -> None:
        kind, values = type(self).__name__, vars(self)
        for name, hint in field_types(type(self)).items():
            if typing.get_origin(hint) is Literal:
                words = typing.get_args(hint)
                require(values[name] in words, f"{kind}.{name} is {values[name]!r}; it must be {' or '.join(words)}.")
        limits = _SHARED | self.limits
        for name, value in values.items():
            if name in limits:
                is_valid, advice = limits[name]
                require(is_valid(value), f"{kind}.{name} is {value!r}; {advice}")
            elif isinstance(value, int | float):
                require(
                    abs(value) <= LARGEST,
                    f"{kind}.{name} is {value!r}; it must be a number of at most {LARGEST:,.0f} in size.",
                )
        if "beta_fast" in values:
            fast, slow = values["beta_fast"], values["beta_slow"]
            require(fast > slow >= 1e-6, f"{kind} needs beta_fast > beta_slow >= 1e-6, and has {fast} and {slow}.")
        if "mscale" in values:
            one, other = values["mscale"], values["mscale_all_dim"]
            both = f"{kind}.mscale is {one} and mscale_all_dim {other}; "
            require(0 <= one < math.inf and 0 <= other < math.inf, both + "they must be finite and not negative.")
            # transformers ignores one without the other.
            require(bool(one) == bool(other), both + "give both, or neither.")


def stretch(length: int | None, original_length: int) -> float:
    """max(1, length / original_length): how much longer than in training a sequence is; 1 if `length` is None."""
    return max(1.0, (length or 0) / original_length)


class Scaling(CheckedFields, ABC):
    """Base of all scalings. `dynamic`: whether the frequencies depend on the length of the sequence."""

    dynamic: ClassVar[bool] = False

    @abstractmethod
    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        """The scaled frequencies [d/2], and the factor on cos and sin.

        `inv_freq` [d/2] is unscaled, in radians per position, of `base` and `dim` = d; `length` counts the tokens of
        the sequence, and None is the training length or less.
        """


@dataclass(frozen=True)
class PI(Scaling):
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    limits: ClassVar[Limits] = {  # exports write 1e30 for no rotation, which is a little more in float32
        "factor": (lambda x: 1 <= x <= 1e31, "it must be at least 1, and 1e31 at most.")
    }

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return inv_freq / self.factor, 1.0


def _enlarged_base(inv_freq: np.ndarray, dim: int, factor: float, kind: str) -> np.ndarray:
    """base -> base * factor^(d / (d - 2)), which is w_i * factor^(-2i / (d - 2))."""
    # d / (d - 2) is not defined at d = 2.
    require(dim > 2, f"{kind} needs at least 4 rotated channels, and there are {dim}.")
    return inv_freq * factor ** (-2.0 * np.arange(dim // 2) / (dim - 2))


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware scaling: a larger base divides the lowest frequency by `factor` and keeps the highest."""

    factor: float

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return _enlarged_base(inv_freq, dim, self.factor, "NTK"), 1.0


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware scaling by the sequence's length: base * (f n / L - (f - 1))^(d / (d - 2)) for n > L tokens.

    Factor f = 1 is NTK with s = n / L; larger factors stretch faster. Up to L tokens it is RoPE.
    """

    original_length: int
    factor: float = 1.0

    dynamic: ClassVar[bool] = True

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        growth = self.factor * stretch(length, self.original_length) - (self.factor - 1)
        return _enlarged_base(inv_freq, dim, growth, "DynamicNTK"), 1.0


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN: slow pairs are interpolated, fast ones kept, and logits scaled up (Peng et al. 2023).

    The ramp is linear in the pair index (see `ramp_bounds`), as in the published code. `mscale` and
    `mscale_all_dim` are DeepSeek's (both, or neither); `attention_factor` replaces the value computed from the factor.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def ramp_bounds(self, base: float, dim: int) -> tuple[float, float]:
        """The pair indices between which the ramp rises; unequal, within [0, dim - 1].

        They are the pairs that make `beta_fast` and `beta_slow` rotations within `original_length` tokens; `truncate`
        rounds them outwards.
        """

        def index(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, dim - 1.0)
        require(
            low <= high,
            f"YaRN: within {self.original_length} tokens, at base {base:g}, no pair of {dim} channels makes between "
            f"{self.beta_slow:g} and {self.beta_fast:g} rotations: nothing to interpolate. Check original_length and "
            "the base.",
        )
        return low, high + 0.001 if low == high else high

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        low, high = self.ramp_bounds(base, dim)
        slow = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)
        # In this order of operations factor 1 changes no bit: a dynamic scheme equals RoPE up to its length.
        return inv_freq * (1 - slow + slow / self.factor), self._attention_factor()

    def _attention_factor(self) -> float:
        """g(mscale) / g(mscale_all_dim) where both are given, else g(1), with g(m) = 0.1 m ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor

        def g(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1 if self.factor > 1 else 1.0

        return g(self.mscale) / g(self.mscale_all_dim) if self.mscale else g(1.0)


@dataclass(frozen=True)
class NTKByParts(Scaling):
    """NTK-by-parts: YaRN's frequencies without its attention factor (Peng et al. 2023, Section 3.2)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return Yarn(**vars(self), attention_factor=1.0).scale(inv_freq, base, dim, length)


@dataclass(frozen=True)
class DynamicYarn(Scaling):
    """YaRN with factor n / L for sequences of n > L tokens, and RoPE up to L (Peng et al. 2023)."""

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    dynamic: ClassVar[bool] = True

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        return Yarn(**vars(self), factor=stretch(length, self.original_length)).scale(inv_freq, base, dim, length)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1's scaling, by the number of rotations within the original length, with a linear ramp.

    Pairs with more than `high_freq_factor` rotations are kept; pairs with fewer than `low_freq_factor` are divided by
    `factor`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.high_freq_factor > self.low_freq_factor >= 1e-6,
            f"Llama3 needs high_freq_factor > low_freq_factor >= 1e-6, and has {self.high_freq_factor} and "
            f"{self.low_freq_factor}.",
        )

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        rotations = self.original_length * inv_freq / (2 * math.pi)
        kept = np.clip((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq, 1.0


@dataclass(frozen=True)
class LongRope(Scaling):
    """LongRoPE: every pair divided by a number found by search (Ding et al. 2024; Phi-3).

    `long_factor` is used for sequences longer than `original_length`, else `short_factor`; both hold one number for
    each rotated pair. The factor on cos and sin is sqrt(1 + ln(factor) / ln(original_length)) at every length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float
    attention_factor: float | None = None

    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.original_length > 1, "LongRope.original_length is 1; its logarithm is a divisor, so give more.")
        for field in ("short_factor", "long_factor"):
            table = tuple(getattr(self, field))
            object.__setattr__(self, field, table)  # JSON gives a list, which does not hash
            bad = [x for x in table if not 1e-6 <= x <= 1e31]
            require(not bad, f"LongRope.{field} holds {bad[:1]}; every number must lie in [1e-6, 1e31].")

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        for field in ("short_factor", "long_factor"):
            size = len(getattr(self, field))
            require(
                size == dim // 2,
                f"LongRope.{field} has {size} numbers; {dim} rotated channels need {dim // 2}, one for each pair.",
            )
        table = self.long_factor if stretch(length, self.original_length) > 1 else self.short_factor
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return inv_freq / np.array(table), attention_factor


SCALINGS: dict[str, type[Scaling]] = {
    "pi": PI,
    "ntk": NTK,
    "dynamic_ntk": DynamicNTK,
    "ntk_by_parts": NTKByParts,
    "yarn": Yarn,
    "dynamic_yarn": DynamicYarn,
    "llama3": Llama3,
    "longrope": LongRope,
}
