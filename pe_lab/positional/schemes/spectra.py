"""Rotations with other spectra: clipped RoPE, xPos, FoPE and PoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.positional.encodings import Rotary
from pe_lab.positional.hooks import Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import angles, fixed_point_frequencies, rotate
from pe_lab.positional.scalings import Limits, Scaling
from pe_lab.positional.schemes.starts import normal, uniform


@register("clipped_rope")
@dataclass(frozen=True)
class ClippedRope(Rotary):
    """RoPE whose slow pairs are slowed further, down to no rotation (arXiv 2602.05258; its authors call it CoPE).

    The frequencies of the last n pairs are multiplied by (1 + cos(pi m / (n - 1))) / 2, m = 0 .. n - 1: the first of
    them keeps its frequency and the last does not rotate. n = 1 changes nothing. Amplitudes stay 1.

    Attributes:
      original_length: the training length, in tokens.
      clipped: n. None: the pairs whose wavelength 2 pi / w exceeds `original_length`, before any scaling (mlx-lm's pull
        request 1387). The authors' code has 20.
      hard: none of the n pairs rotates.
      scaling: of the frequencies, before they are clipped.
    """

    display_name = "clipped RoPE"

    original_length: int
    base: float = 10000.0
    clipped: int | None = None
    hard: bool = False
    scaling: Scaling | None = None

    limits: ClassVar[Limits] = {
        "clipped": (
            lambda x: x is None or (0 <= x < 2**31 and x == int(x)),
            "give a number of pairs, or leave it out.",
        )
    }

    def frequencies(self, head_dim: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        R = head_dim // 2
        inv_freq, gain = self._spectrum(head_dim, head_dim, R, length)
        clipped = self.clipped
        if clipped is None:
            clipped = int((2 * math.pi / rope_spectrum(self.base, head_dim) > self.original_length).sum())
        clipped = min(int(clipped), R)
        taper = 0.5 * (1 + np.cos(np.linspace(0, math.pi, clipped)))
        inv_freq[R - clipped :] *= 0.0 if self.hard else taper
        return inv_freq, gain


def rope_spectrum(base: float, dim: int) -> np.ndarray:
    """RoPE's frequencies [dim / 2], radians per position."""
    return base ** (-2.0 * np.arange(dim // 2) / dim)


@register("xpos")
@dataclass(frozen=True)
class XPos(Encoding):
    """xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose logits decay with the distance, fast pairs more.

    Query at m: pair r rotates, and is multiplied by z_r^((m - c) / b); key at n: by z_r^(-(n - c) / b), with
    z_r = (2r / K + 0.4) / 1.4. The products depend on m - n alone. No parameters. The rotation is of the schedule.

    Attributes:
      scale_base: b, in tokens.
      origin: c. Powers stay within float32 up to 68 b (35,000 tokens for 512) on both sides of it: put it into the
        middle of longer sequences. The authors' code has half the length, which a KV cache does not know beforehand.
    """

    display_name = "xPos"
    relative = True

    base: float = 10000.0
    scale_base: float = 512.0
    origin: int = 0

    limits: ClassVar[Limits] = {
        "scale_base": (lambda x: 1 <= x < 2**31, "it must be a number of tokens from 1."),
        "origin": (lambda x: abs(x) < 2**31 and x == int(x), "give a position, a whole number."),
    }

    def frequencies(self, head_dim: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        return rope_spectrum(self.base, head_dim), np.ones(head_dim // 2)

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
        R = q.shape[-1] // 2
        log_zeta = np.log((np.arange(R) / R + 0.4) / 1.4)
        exponent = (positions - np.int32(self.origin)).astype(jnp.float32) / self.scale_base
        power = exponent[..., None, None] * jnp.asarray(np.concatenate([log_zeta, log_zeta]), jnp.float32)
        return q * jnp.exp(power), k * jnp.exp(-power)


@register("fope")
@dataclass(frozen=True)
class FoPE(Encoding):
    """Fourier position embedding (Hua et al. 2024, arXiv 2412.17739, eq. 11 to 13): a series of frequencies per pair.

    The frequencies w [D] are RoPE's that complete a rotation within the training length; the others are 0. Channels
    (a, b) of pair m at position t become (a C - b S, b C + a S), with C_m(t) = sum_d cos(w_d t) cos_coef[g, d, m] and
    S_m(t) likewise of sines. `sin_coef` and `cos_coef` [G, D, M] start as a selection of frequencies plus noise.

    As the authors' code: the first M = min(D, `fraction` R) pairs have a series, and coefficients are not trained.
    Logits depend on more than the distance. Query heads of a group share coefficients; the authors have no groups.

    Attributes:
      original_length: the training length, in tokens.
      base: of RoPE's frequencies.
      sigma: size of the noise, whose standard deviation is sigma sqrt(2 / (M (D + G))), as in the authors' code. The
        paper has 0.3 for 60M parameters, 0.4 for 180M, 0.6 for 1.2B.
      fourier_dim: 2 x the number of RoPE's frequencies to choose from; None: K.
      fraction: of the pairs, at most, that have a series.
      rest: what the other pairs do. `unrotated` (eq. 13): nothing. `doubled` (the authors' code): their sine is 1 too,
        so that their part of a logit counts twice.
      trained: coefficients are trained.
    """

    display_name = "FoPE"

    original_length: int
    base: float = 10000.0
    sigma: float = 0.3
    fourier_dim: int | None = None
    fraction: float = 0.5
    rest: Literal["unrotated", "doubled"] = "unrotated"
    trained: bool = False

    limits: ClassVar[Limits] = {
        "original_length": (
            lambda x: 7 <= x < 2**31 and x == int(x),
            "give the training length, at least 7 tokens.",
        ),
        "sigma": (lambda x: 0 <= x <= 1e6, "it must lie in [0, 1e6]."),
        "fourier_dim": (
            lambda x: x is None or (2 <= x < 2**20 and x % 2 == 0),
            "give an even number from 2, or leave it out.",
        ),
        "fraction": (lambda x: 0 < x <= 1, "it must lie in (0, 1]."),
        "rest": (lambda x: x in ("unrotated", "doubled"), "it must be unrotated or doubled."),
    }

    def series(self, head_dim: int) -> tuple[np.ndarray, int]:
        """The frequencies w [D], and M, the number of pairs that have a series."""
        spectrum = rope_spectrum(self.base, self.fourier_dim or head_dim)
        kept = spectrum[spectrum >= 2 * math.pi / self.original_length]
        return kept, min(len(kept), max(1, int(self.fraction * (head_dim // 2))))

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        kept, M = self.series(shape.head_dim)
        D, G = len(kept), shape.num_kv_heads
        step, at = -(-D // M), np.arange(M)
        chosen = np.zeros((D, M), np.float32)
        chosen[(at * step)[at * step < D], at[at * step < D]] = 1
        deviation = self.sigma * math.sqrt(2 / (M * (D + G)))
        rate = 1.0 if self.trained else 0.0
        return {
            name: Parameter(chosen + normal(key, n, G, D, M, deviation=deviation), ("kv_heads", None, None), rate)
            for n, name in enumerate(("sin_coef", "cos_coef"))
        }

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
        kept, M = self.series(q.shape[-1])
        angle = angles(jnp.asarray(fixed_point_frequencies(kept)), positions)
        rest = ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] // 2 - M))
        cos, sin = (
            jnp.pad(jnp.einsum("btd,gdm->btgm", wave, params[name], precision="highest"), rest, constant_values=filled)
            for wave, name, filled in (
                (jnp.cos(angle), "cos_coef", 1.0),
                (jnp.sin(angle), "sin_coef", float(self.rest == "doubled")),
            )
        )
        groups = q.shape[2] // k.shape[2]
        return rotate(q, *(jnp.repeat(one, groups, axis=2) for one in (cos, sin))), rotate(k, cos, sin)


@register("pope")
@dataclass(frozen=True)
class PoPE(Encoding):
    """Polar coordinate embedding (Gopalakrishnan et al. 2025, arXiv 2509.10534, eq. 3 to 10): content gives amplitudes
    alone, and positions give angles alone.

    logit = sum over channels c of softplus(q_c) softplus(k_c) cos((s - t) w_c + d_c) / sqrt(K), query at t and key at
    s, w_c = base^(-c / K). Queries and keys become 2K channels [cos parts, sin parts]: a KV cache has twice the keys.
    `delta` [G, K] is d, used within [-2 pi, 0].

    It replaces the layer's rotation, and follows a QK-norm where the model has one; the paper's models have none. As
    in code for it, the gradient of d ends beyond its bounds.

    Attributes:
      base: of the frequencies.
      initial: of d: `zero`, which the paper needs for longer sequences, or `uniform` in [-2 pi, 0].
    """

    display_name = "PoPE"
    relative = True

    base: float = 10000.0
    initial: Literal["zero", "uniform"] = "zero"

    limits: ClassVar[Limits] = {"initial": (lambda x: x in ("zero", "uniform"), "it must be zero or uniform.")}

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        size = (shape.num_kv_heads, shape.head_dim)
        value = jnp.zeros(size) if self.initial == "zero" else uniform(key, 0, -2 * math.pi, 0.0, *size)
        return {"delta": Parameter(value, ("kv_heads", "head_dim"))}

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H twice"], Float[Array, "B T G twice"]]:
        K = q.shape[-1]
        spectrum = fixed_point_frequencies(self.base ** (-np.arange(K) / K))
        angle = angles(jnp.asarray(spectrum), positions)[:, :, None]
        delta = params["delta"]
        # At a bound, where it starts, the whole gradient passes; jnp.clip halves it there.
        low = np.float32(-2 * math.pi)
        delta = jnp.where(delta > 0, 0.0, jnp.where(delta < low, low, delta))
        return _polar(q, angle), _polar(k, angle + delta)


def _polar(x: Float[Array, "B T H K"], angle: Float[Array, "#B T #H K"]) -> Float[Array, "B T H twice"]:
    size = jax.nn.softplus(x.astype(jnp.float32))
    return jnp.concatenate([size * jnp.cos(angle), size * jnp.sin(angle)], axis=-1)
