"""The rotation of queries and keys, with angles that are exact at every position, and the channels that it pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Shaped, UInt32

from pe_lab.errors import ConfigError
from pe_lab.positional.encodings import Rope, frequencies
from pe_lab.positional.scalings import PI


def fixed_point_frequencies(inv_freq: np.ndarray) -> np.ndarray:
    """Frequencies as fixed-point numbers: a 64-bit fraction of a full rotation, in two uint32 words.

    A float32 product of position and frequency is off by hundredths of a radian at a million tokens: the product is
    large, and only its remainder modulo 2 pi matters. Integer arithmetic that wraps around at one full rotation keeps
    exactly that remainder.

    Args:
      inv_freq: [...] radians per position, float64, in [0, 2 pi).

    Returns:
      [..., 2] uint32: the high and the low word of inv_freq / 2 pi.

    Raises:
      ConfigError: if a frequency lies outside that range.
    """
    inv_freq = np.asarray(inv_freq, np.float64)
    outside = inv_freq[~((inv_freq >= 0) & (inv_freq < 2 * math.pi))]
    if outside.size:
        raise ConfigError(f"inv_freq has {outside[0]}; a frequency must lie in [0, 2 pi) radians per position.")
    # 2^64 times a float64 in [0, 1) is exact to the 53 bits of a float64.
    high, low = np.divmod(inv_freq / (2 * math.pi) * 2.0**32, 1.0)
    return np.stack([high.astype(np.uint32), np.floor(low * 2.0**32).astype(np.uint32)], axis=-1)


def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    middle_2 = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (middle_2 >> 16)


def radians(fraction: UInt32[Array, "*shape"] | Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The angle in [-pi, pi] of a fraction of a full rotation, in units of 2^-32; float32."""
    signed = jax.lax.bitcast_convert_type(fraction, jnp.int32).astype(jnp.float32)
    return signed * jnp.float32(2 * math.pi / 2**32)


# x / 2 pi is x / 2^13 times 2^13 / 2 pi, of which these are the whole part and the 64 bits of the fraction.
_LARGEST_ANGLE = 2.0**13
_WHOLE, _HIGH, _LOW = 1303, 0xCC1B7272, 0x20A94FE1


def fraction_of_rotation(angle: Float[Array, "*shape"]) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """`fixed_point_frequencies` on the device: the words of angle / 2 pi modulo 1, exact to 1e-16 of a full rotation.

    Args:
      angle: radians, float32, of either sign; angles of 2^13 and more are reduced in float32.
    """
    angle = angle.astype(jnp.float32)
    angle = jnp.where(jnp.abs(angle) < _LARGEST_ANGLE, angle, jnp.fmod(angle, jnp.float32(2 * math.pi)))
    word = lambda x: jnp.uint32(x)  # noqa: E731
    # Products with powers of two, differences from the whole part and these conversions are exact.
    scaled = jnp.abs(angle) * jnp.float32(2**32 / _LARGEST_ANGLE)
    whole = jnp.floor(scaled)
    high, low = whole.astype(jnp.uint32), ((scaled - whole) * jnp.float32(2.0**32)).astype(jnp.uint32)
    parts = (
        (high * word(_WHOLE) + multiply_high(low, word(_WHOLE)), low * word(_WHOLE)),
        (multiply_high(high, word(_HIGH)), high * word(_HIGH)),
        (word(0), multiply_high(high, word(_LOW))),
        (word(0), multiply_high(low, word(_HIGH))),
    )
    high, low = word(0), word(0)
    for more_high, more_low in parts:
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)
    negative = angle < 0
    return jnp.where(negative, ~high + (low == 0), high), jnp.where(negative, ~low + word(1), low)


def angles(
    freq: UInt32[Array, "*rotations R 2"] | Float[Array, "*rotations R"], positions: Int[Array, "B T"]
) -> Float[Array, "B T *rotations R"]:
    """Rotation angles in [-pi, pi], float32, exact to 5e-7 rad at any position below 2^31.

    Args:
      freq: frequencies, fixed: see `fixed_point_frequencies`; or learned: float32 radians per position, below 2^13 in
        size, with the gradient of position times frequency.
      positions: token positions, not negative.
    """
    if jnp.issubdtype(freq.dtype, jnp.floating):
        return _learned_angles(jnp.asarray(freq, jnp.float32), positions)
    position = positions.astype(jnp.uint32).reshape(positions.shape + (1,) * (freq.ndim - 1))
    high, low = freq[..., 0], freq[..., 1]
    return radians(position * high + multiply_high(position, low))  # wraps at 2^32, one full rotation


@jax.custom_jvp
def _learned_angles(
    freq: Float[Array, "*rotations R"], positions: Int[Array, "B T"]
) -> Float[Array, "B T *rotations R"]:
    exact = angles(jnp.stack(fraction_of_rotation(freq), axis=-1), positions)
    return jnp.where(jnp.isfinite(freq), exact, jnp.nan)  # which no integer can say


@_learned_angles.defjvp
def _learned_angles_derivative(primals, tangents):  # noqa: ANN001, ANN202
    # Of the product; the remainder modulo 2 pi has the same derivative.
    freq, positions = primals
    by_position = positions.astype(jnp.float32).reshape(positions.shape + (1,) * freq.ndim)
    return _learned_angles(freq, positions), by_position * tangents[0]


def rotation_tables(
    freq: UInt32[Array, "*rotations R 2"] | Float[Array, "*rotations R"],
    gain: Float[Array, "*rotations R"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T *rotations R"], Float[Array, "B T *rotations R"]]:
    """cos and sin of every pair's angle at every position, times the pair's gain; float32.

    Args:
      freq: as in `angles`: of the schedule, or learned.
      gain: amplitude of each pair.
      positions: token positions, not negative.
    """
    angle = angles(freq, positions)
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


@jax.custom_vjp
def rotate(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T #H R"], sin: Float[Array, "#B T #H R"]
) -> Float[Array, "B T H K"]:
    """Rotates pair r (channels r and r + R) of every head; in float32, returned in the dtype of `x`.

    Tables that are learned have their gradient; where they are not, as those of a schedule, it costs nothing.
    """
    # Zero-filled shifts by half the channels fuse with the products into one loop, on a CPU too. Splitting and
    # concatenating halves does not, nor does jnp.roll under every XLA (docs/log.md).
    half, unshifted = x.shape[-1] // 2, [(0, 0, 0)] * (x.ndim - 1)
    zero = jnp.zeros((), x.dtype)
    up = jax.lax.pad(x, zero, [*unshifted, (half, -half, 0)])
    down = jax.lax.pad(x, zero, [*unshifted, (-half, half, 0)])
    cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([sin, sin], -1)
    return (x.astype(jnp.float32) * cos + (up - down).astype(jnp.float32) * sin).astype(x.dtype)


def _rotate_forward(x, cos, sin):  # noqa: ANN001, ANN202
    # Queries and keys are kept for the gradient of learned tables alone.
    learned = cos.perturbed or sin.perturbed
    x, cos, sin = (jnp.asarray(one.value) for one in (x, cos, sin))
    return rotate(x, cos, sin), (x if learned else None, cos, sin)


def _rotate_backward(saved, d_out):  # noqa: ANN001, ANN202
    # The transpose of a rotation is the rotation by the opposite angle.
    x, cos, sin = saved
    if isinstance(d_out, SymbolicZero):
        return None, None, None
    d_x = rotate(d_out, cos, -sin)
    if x is None:
        return d_x, None, None
    (a, b), (d_a, d_b) = (jnp.split(one.astype(jnp.float32), 2, axis=-1) for one in (x, d_out))

    def of_table(d: jax.Array, table: jax.Array) -> jax.Array:
        shared = tuple(n for n, size in enumerate(table.shape) if size == 1 != d.shape[n])
        return d.sum(shared, keepdims=True).astype(table.dtype)

    return d_x, of_table(a * d_a + b * d_b, cos), of_table(a * d_b - b * d_a, sin)


rotate.defvjp(_rotate_forward, _rotate_backward, symbolic_zeros=True)


def apply_encoding(x: Float[Array, "B T H K"], positions: Int[Array, "B T"], encoding: Rope) -> Float[Array, "B T H K"]:
    """Rotates queries or keys by one description."""
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    cos, sin = rotation_tables(
        jnp.asarray(fixed_point_frequencies(inv_freq)), jnp.asarray(gain, jnp.float32), positions
    )
    return rotate(x, cos[:, :, None], sin[:, :, None])


def apply_rope(
    inputs: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    *,
    base: float = 10000.0,
    scale_factor: float = 1.0,
) -> Float[Array, "B T H K"]:
    """Rotary embedding (Su et al. 2021); `scale_factor` > 1 interpolates positions (PI)."""
    scaling = PI(scale_factor) if scale_factor != 1 else None
    return apply_encoding(inputs, positions, Rope(base=base, scaling=scaling))


def apply_p_rope(
    inputs: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    head_dim: int,
    max_wavelength: int = 10000,
    rope_percentage: float = 1.0,
) -> Float[Array, "B T H K"]:
    """p-RoPE with the signature and the result of the paper (Barbero et al. 2024, Algorithm in App. C).

    The first int(rope_percentage * head_dim // 2) pairs rotate with the frequencies of full RoPE; the rest do not.
    """
    if inputs.shape[-1] != head_dim:
        raise ConfigError(f"apply_p_rope: head_dim is {head_dim}, but the inputs have {inputs.shape[-1]} channels.")
    return apply_encoding(inputs, positions, Rope(base=float(max_wavelength), fraction=rope_percentage))


@dataclass(frozen=True)
class Layout:
    """How a checkpoint's heads pair channels.

    Attributes:
      pairs: among the r channels that rotate, "half" pairs i with i + r / 2, and "interleaved" 2i with 2i + 1.
      rotated: r, the number of first channels that rotate. None: all of them.
    """

    pairs: Literal["half", "interleaved"] = "half"
    rotated: int | None = None

    def __post_init__(self) -> None:
        if self.pairs not in ("half", "interleaved"):
            raise ConfigError(f"Layout.pairs is {self.pairs!r}; it must be half or interleaved.")
        rotated = self.rotated
        if rotated is not None and (rotated < 0 or rotated % 2):
            raise ConfigError(f"Layout.rotated is {rotated}; give an even number of channels, or None for all of them.")


CANONICAL = Layout()


def channel_order(layout: Layout, head_dim: int) -> Int[np.ndarray, " K"]:
    """The permutation of a head's channels that makes a layout canonical: `canonical = array[..., order]`.

    Unrotated channels keep their order, half of them after each half of the rotated ones.

    Raises:
      ConfigError: an odd head_dim, or more rotated channels than it has.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; it must be even and positive.")
    rotated = head_dim if layout.rotated is None else layout.rotated
    if rotated > head_dim:
        raise ConfigError(f"Layout.rotated is {rotated}, more than the {head_dim} channels of a head.")
    rotating, passing = np.arange(rotated), np.arange(rotated, head_dim)
    if layout.pairs == "interleaved":
        first, second = rotating[0::2], rotating[1::2]
    else:
        first, second = np.split(rotating, 2)
    rest_first, rest_second = np.split(passing, 2)
    return np.concatenate([first, rest_first, second, rest_second])


def to_canonical(array: Shaped[Any, "..."], layout: Layout) -> Shaped[Any, "..."]:
    """A checkpoint's array in canonical channel order; its last axis has the K channels of one head.

    For query and key projections [D, H, K], their biases [H, K] and the scales of a per-head norm [K].
    """
    order = channel_order(layout, array.shape[-1])
    return array if layout == CANONICAL else array[..., order]


def from_canonical(array: Shaped[Any, "..."], layout: Layout) -> Shaped[Any, "..."]:
    """The exact inverse of `to_canonical`."""
    return array if layout == CANONICAL else array[..., np.argsort(channel_order(layout, array.shape[-1]))]
