"""The rounding of rotary phases, and the frequencies that a precision can tell from none.

Rounding. A phase that is computed as a float32 product n w has two roundings, that of w and that of the product:
|error| <= 2 u n w (1 + u/2) with u = 2^-24, plus u n w where n > 2^24 is itself rounded. Positions in bfloat16 (8
significant bits) are off by up to 2^-9 n before the product. pe_lab's angles are 64-bit fixed-point fractions of a
cycle, and wrap as integers do.

Finite precision bounds the base (as arXiv 2602.10959 states; these bounds are derived here). Take p significant bits,
rounding to nearest, ties to even. Between 1/2 and 1 numbers are 2^-p apart, so cos(w) rounds to 1 if and only if
1 - cos(w) = 2 sin^2(w/2) <= 2^-(p+1), that is

  w <= w_cos = 2 arcsin(2^-(p+2)/2), about 2^(-p/2): 2.4e-4 in float32 (p = 24), 0.0625 in bfloat16 (p = 8).

Of a rotation at distance 1 there then remains only the odd part, q1 k2 - q2 k1 times sin(w). Added to a number in
[1, 2), where numbers are 2^(1-p) apart, sin(w) is lost too if w <= w_sin = arcsin(2^-p). The slowest of d/2 pairs has
w = base^(-(d-2)/d): it is above w_cos if base < w_cos^(-d/(d-2)), and above w_sin if base < w_sin^(-d/(d-2)); for
large d these are 2^(p/2) and 2^p. At distance L the same holds of w L: base < (w_cos / L)^(-d/(d-2)).
"""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from pe_lab.positional.rotation import angles, fixed_point_frequencies

PRECISIONS = {"float32": 24, "float16": 11, "bfloat16": 8}  # significant bits
COMPUTED = ("float32 product", "bfloat16 positions", "fixed point (pe_lab)")
TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


def exact_angles(inv_freq: Float[np.ndarray, " R"], positions: Int[np.ndarray, " P"]) -> Float[np.ndarray, "P R"]:
    """n w modulo 2 pi, in [-pi, pi), of float64 frequencies taken as exact numbers; by integers of any size."""
    one = 1 << 128
    cycles = [int(Fraction(float(w)) / TWO_PI * one) for w in inv_freq]
    found = [[(int(n) * c + one // 2) % one - one // 2 for c in cycles] for n in positions]
    return np.array([[float(Fraction(x, one)) for x in row] for row in found]) * (2 * math.pi)


def rounding_errors(inv_freq: Float[np.ndarray, " R"], positions: Int[np.ndarray, " P"]) -> dict[str, np.ndarray]:
    """|computed phase - exact phase| [P, R] in radians, on the circle, for each way of `COMPUTED`.

    Less than 1e-15 of a position is counted as 0: a float64 holds the 2 pi that is taken off the products.
    """
    w = inv_freq.astype(np.float32)
    rounded = positions.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    fixed = jnp.asarray(fixed_point_frequencies(inv_freq))
    computed = (
        positions.astype(np.float32)[:, None] * w,
        rounded[:, None] * w,
        np.asarray(angles(fixed, jnp.asarray(positions, jnp.int32)[None])[0]),
    )
    exact = exact_angles(inv_freq, positions)
    differences = [np.remainder(phase.astype(np.float64) - exact + math.pi, 2 * math.pi) for phase in computed]
    errors = [np.abs(x - math.pi) for x in differences]
    least = 1e-15 * positions[:, None]
    return {name: np.where(x > least, x, 0) for name, x in zip(COMPUTED, errors, strict=True)}


def product_bound(inv_freq: Float[np.ndarray, " R"], position: int) -> Float[np.ndarray, " R"]:
    """The largest possible error of a float32 product at positions up to `position`, which is at most 2^24."""
    unit = 2.0**-24
    return (2 + unit) * unit * position * np.asarray(inv_freq)


def slowest_cosine(bits: int) -> float:
    """The largest w in radians whose cosine rounds to 1 in numbers of `bits` significant bits."""
    return 2 * math.asin(2 ** (-(bits + 2) / 2))


def slowest_sine(bits: int) -> float:
    """The largest w in radians whose sine is lost when it is added to a number in [1, 2)."""
    return math.asin(2.0**-bits)


def largest_base(slowest: float, head_dim: int, distance: int = 1) -> float:
    """The base at which the slowest pair of full RoPE rotates by `slowest` radians in `distance` tokens.

    For a head with a single pair, which rotates by 1 whatever the base: infinity.
    """
    return math.inf if head_dim <= 2 else (slowest / distance) ** (-head_dim / (head_dim - 2))
