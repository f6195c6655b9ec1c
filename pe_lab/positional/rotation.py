"""The rotation of queries and keys, with angles that are exact at every position."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

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


def angles(fixed_freq: UInt32[Array, "*rows R 2"], positions: Int[Array, "B T"]) -> Float[Array, "B T *rows R"]:
    """Rotation angles in [-pi, pi], float32, exact to 5e-7 rad at any position below 2^31.

    Args:
      fixed_freq: see `fixed_point_frequencies`.
      positions: token positions, not negative.
    """
    position = positions.astype(jnp.uint32).reshape(positions.shape + (1,) * (fixed_freq.ndim - 1))
    high, low = fixed_freq[..., 0], fixed_freq[..., 1]
    fraction = position * high + multiply_high(position, low)  # wraps at 2^32, one full rotation
    signed = jax.lax.bitcast_convert_type(fraction, jnp.int32).astype(jnp.float32)
    return signed * jnp.float32(2 * math.pi / 2**32)


def rotation_tables(
    fixed_freq: UInt32[Array, "*rows R 2"],
    gain: Float[Array, "*rows R"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T *rows R"], Float[Array, "B T *rows R"]]:
    """cos and sin of every pair's angle at every position, times the pair's gain; float32."""
    angle = angles(fixed_freq, positions)
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


@jax.custom_vjp
def rotate(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T #H R"], sin: Float[Array, "#B T #H R"]
) -> Float[Array, "B T H K"]:
    """Rotates pair r (channels r and r + R) of every head; in float32, returned in the dtype of `x`.

    The gradient of the tables is zero.
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
    return rotate(x, cos, sin), (cos, sin)


def _rotate_backward(tables, d_out):  # noqa: ANN001, ANN202
    # The transpose of a rotation is the rotation by the opposite angle.
    cos, sin = tables
    return rotate(d_out, cos, -sin), jnp.zeros_like(cos), jnp.zeros_like(sin)


rotate.defvjp(_rotate_forward, _rotate_backward)


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
