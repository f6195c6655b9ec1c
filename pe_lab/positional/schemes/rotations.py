"""Rotations: of other frequencies, with amplitudes, with gates, and by angles that depend on hidden states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.errors import ConfigError
from pe_lab.positional.encodings import Rotary, rope_spectrum
from pe_lab.positional.hooks import (
    Earlier,
    Encoding,
    HeadShape,
    Hidden,
    Keys,
    Parameter,
    Params,
    Positions,
    Queries,
    Start,
    normal,
    uniform,
)
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import angles, fixed_point_frequencies, rotate
from pe_lab.positional.scalings import Limits, Scaling, require


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


@register("longrope_start")
@dataclass(frozen=True)
class LongRopeStart(Encoding):
    """LongRoPE's rotation with a start of unscaled tokens (arXiv 2402.13753, eq. 3 and 4).

    The first `start` tokens are rotated by RoPE's frequencies, later ones by these over `divisors`, at every length. A
    score between a token of the start and a later one depends on more than their distance. `LongRope` has no start, and
    divides beyond the training length alone; runtimes have that one.

    Attributes:
      divisors: 1 or more; one for each pair, or one for all.
      start: n-hat of the paper.
      attention_factor: on cos and sin of later tokens.
    """

    display_name = "LongRoPE with a start"

    divisors: tuple[float, ...]
    start: int = 4
    base: float = 10000.0
    attention_factor: float = 1.0

    limits: ClassVar[Limits] = {"start": (lambda x: 0 <= x < 2**31 and x == int(x), "give a number of tokens.")}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divisors", tuple(self.divisors))  # JSON gives a list, which does not hash
        bad = [x for x in self.divisors if not 1 <= x <= 1e31]
        require(not bad, f"LongRopeStart.divisors holds {bad[:1]}; every number must lie in [1, 1e31].")
        require(len(self.divisors) > 0, "LongRopeStart.divisors is empty; give one for each pair, or one for all.")

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        spectrum = rope_spectrum(self.base, q.shape[-1])
        divisors = np.array(self.divisors)
        require(
            len(divisors) in (1, len(spectrum)),
            f"LongRopeStart.divisors has {len(divisors)} numbers; {q.shape[-1]} channels need {len(spectrum)}, or 1.",
        )
        first, later = (
            angles(jnp.asarray(fixed_point_frequencies(one)), positions) for one in (spectrum, spectrum / divisors)
        )
        at_start = (positions < self.start)[..., None]
        angle, gain = jnp.where(at_start, first, later), jnp.where(at_start, 1.0, self.attention_factor)
        cos, sin = (gain * jnp.cos(angle))[:, :, None], (gain * jnp.sin(angle))[:, :, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)


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

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
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

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
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

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        size = (shape.num_kv_heads, shape.head_dim)
        value = jnp.zeros(size) if self.initial == "zero" else uniform(key, 0, -2 * math.pi, 0.0, *size)
        return {"delta": Parameter(value, ("kv_heads", "head_dim"))}

    def encode(
        self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden
    ) -> tuple[Float[Array, "B T H twice"], Float[Array, "B T G twice"]]:
        K = q.shape[-1]
        spectrum = fixed_point_frequencies(self.base ** (-np.arange(K) / K))
        angle = angles(jnp.asarray(spectrum), positions)[:, :, None]
        delta = params["delta"]
        # At a bound, where it starts, the whole gradient passes; jnp.clip halves it there.
        low = np.float32(-2 * math.pi)
        delta = jnp.where(delta > 0, 0.0, jnp.where(delta < low, low, delta))
        return _polar(q, angle), _polar(k, angle + delta)


def _polar(x: Queries, angle: Float[Array, "#B T #H K"]) -> Float[Array, "B T H twice"]:
    size = jax.nn.softplus(x.astype(jnp.float32))
    return jnp.concatenate([size * jnp.cos(angle), size * jnp.sin(angle)], axis=-1)


GATE_START = 2.0  # of the parameter: the gate is 0.957
GATE_STRETCH = 0.1  # beyond 0 and 1, so that a gate reaches both


@register("gated_rope")
@dataclass(frozen=True)
class GatedRope(Encoding):
    """RoPE and NoPE mixed by a gate for each query head: logit = g (rotated q . rotated k) + (1 - g) (q . k).

    g = clip(1.2 sigmoid(a) - 0.1, 0, 1) with a learned for each head, so that a gate can be 0 or 1 exactly. Training
    adds `penalty_per_head` nats per token for each open gate: a head keeps its rotation if that saves more. Many gates
    settle between 0 and 1, since a mix predicts better than either; `polarize_per_head`, in a second phase, drives them
    to 0 or 1. Queries and keys have 2K channels. `pe_lab.surgery --drop=gates` then makes a model of it in which heads
    with a closed gate have no encoding, and the others RoPE.

    Attributes:
      base: of RoPE.
      penalty_per_head: nats per token for an open gate; 0: none.
      polarize_per_head: nats per token for a half-open gate, as 4 g (1 - g); 0: none.
    """

    display_name = "gated RoPE"
    relative = True

    base: float = 10000.0
    penalty_per_head: float = 0.0
    polarize_per_head: float = 0.0

    limits: ClassVar[Limits] = dict.fromkeys(
        ("penalty_per_head", "polarize_per_head"), (lambda x: 0 <= x <= 1e6, "give nats per token, from 0 to 1e6.")
    )

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return {"gate": Parameter(jnp.full(shape.num_heads, GATE_START), ("heads",), learning_rate=10.0)}

    def encode(
        self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden
    ) -> tuple[Float[Array, "B T H twice"], Float[Array, "B T G twice"]]:
        spectrum = fixed_point_frequencies(rope_spectrum(self.base, q.shape[-1]))
        angle = angles(jnp.asarray(spectrum), positions)[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        gate = gates(params["gate"])[:, None]
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        mixed = jnp.concatenate([gate * rotate(q, cos, sin), (1 - gate) * q], axis=-1)
        return mixed, jnp.concatenate([rotate(k, cos, sin), k], axis=-1)

    def penalty(self, params: Params) -> Float[Array, ""]:
        gate = gates(params["gate"])
        return self.penalty_per_head * gate.sum() + self.polarize_per_head * (4 * gate * (1 - gate)).sum()


def gates(parameter: Float[Array | np.ndarray, "*layers H"]) -> Float[Array, "*layers H"]:
    """The gates of the parameter of `GatedRope`, in 0..1."""
    return jnp.clip((1 + 2 * GATE_STRETCH) * jax.nn.sigmoid(parameter) - GATE_STRETCH, 0.0, 1.0)


_LIMITS: Limits = {
    "rank": (lambda x: 1 <= x < 2**20 and x == int(x), "give a whole number from 1."),
    "temperature": (lambda x: 1e-6 <= x <= 1e6, "it must lie in [1e-6, 1e6]."),
    "convolution": (lambda x: 1 <= x <= 64 and x == int(x), "give the width in tokens, from 1 (none) to 64."),
}


@register("selective_rope")
@dataclass(frozen=True)
class SelectiveRope(Encoding):
    """Selective RoPE (Movahedi et al. 2025, arXiv 2511.17388): each token adds its own angle to the rotation.

    u = x in H slices of unit length; phi = W2 W1 u [G, R]; the angle of pair r of the token at t is
    `temperature` base^(-2r / K) times the sum of phi over the tokens of the document up to t. The sum is a
    `running_sum`, modulo 2 pi, so that decoding is exact. Parameters: `down` [H, D / H, rank], `up` [rank, G, R].

    Deviations: no convolution unless asked for; the query heads of a group share the angles of their key head; biases
    do not decay.

    Attributes:
      rank: between W1 and W2.
      base, temperature: of the factors of the angles, which are not trained.
      convolution: width in tokens of a causal convolution of phi, one filter a pair; 4 in the authors' code, 1: none.
        It reads the tokens before, of the same document, so that no KV cache is exact.
      log_bias: adds exp(b) to phi, with `log_bias` [G, R] learned from 0: RoPE, as long as phi is 0.
      gate: multiplies phi, its bias included, by sigmoid(u `gate` + `gate_bias`) [G].
      start: `unchanged`: `up` is 0, and no pair rotates before training; with `log_bias`, all rotate as in RoPE.
    """

    display_name = "Selective RoPE"
    relative = True
    content = True
    sums_angles = True

    rank: int = 32
    base: float = 500000.0
    temperature: float = 1.0
    convolution: int = 1
    log_bias: bool = False
    gate: bool = False
    start: Start = "published"

    limits: ClassVar[Limits] = _LIMITS

    @property
    def exact_cache(self) -> bool:  # type: ignore[override]
        return self.convolution == 1

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        H, G, R = shape.num_heads, shape.num_kv_heads, shape.head_dim // 2
        found = _projection(key, shape, self.rank, self.start)
        if self.convolution > 1:
            found["filter"] = Parameter(normal(key, 2, G, R, self.convolution), ("kv_heads", None, None), decay=True)
        if self.log_bias:
            found["log_bias"] = Parameter(jnp.zeros((G, R)), ("kv_heads", None))
        if self.gate:
            found["gate"] = Parameter(normal(key, 3, H, shape.d_model // H, G), (None, None, "kv_heads"), decay=True)
            found["gate_bias"] = Parameter(jnp.zeros(G), ("kv_heads",))
        return found

    def running_sum(self, params: Params, x: Hidden, earlier: Earlier) -> Float[Array, "B T G R"]:
        units = _units(params, x)
        phi = _phi(params, units)
        if self.convolution > 1:
            last = self.convolution - 1
            phi = sum(
                (earlier(phi, last - n) * params["filter"][..., n] for n in range(last)),
                phi * params["filter"][..., last],
            )
        if self.log_bias:
            phi = phi + jnp.exp(params["log_bias"])
        if self.gate:
            opened = jnp.einsum("bthc,hcg->btg", units, params["gate"], precision="highest") + params["gate_bias"]
            phi = phi * jax.nn.sigmoid(opened)[..., None]
        return phi * _factors(self.base, self.temperature, 2 * phi.shape[-1])

    def encode(
        self, params: Params, q: Queries, k: Keys, positions: Positions, x: Float[Array, "B T G R"]
    ) -> tuple[Queries, Keys]:
        return _rotated(q, k, x)


@register("content_rotation")
@dataclass(frozen=True)
class ContentRotation(Encoding):
    """Rotation by an angle of the token's own (arXiv 2511.17388, the ablation without convolution): no sum over tokens.

    As `SelectiveRope`, with phi in place of its sum: order enters through nothing.
    """

    display_name = "rotation by content"
    relative = True
    content = True

    rank: int = 32
    base: float = 500000.0
    temperature: float = 1.0
    start: Start = "published"

    limits: ClassVar[Limits] = _LIMITS

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return _projection(key, shape, self.rank, self.start)

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        return _rotated(q, k, _phi(params, _units(params, x)) * _factors(self.base, self.temperature, q.shape[-1]))


def _projection(key: Array, shape: HeadShape, rank: int, start: Start) -> dict[str, Parameter]:
    H, G, K, D = shape
    if D % H:
        raise ConfigError(
            f"Selective RoPE cuts the {D} channels of a token into {H} slices, one for each head: {H} must divide {D}."
        )
    up = normal(key, 1, rank, G, K // 2)
    return {
        "down": Parameter(normal(key, 0, H, D // H, rank), (None, None, None), decay=True),
        "up": Parameter(up * float(start == "published"), (None, "kv_heads", None), decay=True),
    }


def _units(params: Params, x: Hidden) -> Float[Array, "B T H C"]:
    """Each token's slices, one for each head, of unit length."""
    slices = x.astype(jnp.float32).reshape(*x.shape[:2], params["down"].shape[0], -1)
    return slices * jax.lax.rsqrt(jnp.square(slices).sum(-1, keepdims=True) + 1e-6)


def _phi(params: Params, units: Float[Array, "B T H C"]) -> Float[Array, "B T G R"]:
    # Angles add up over a sequence, so that products keep all of float32.
    low = jnp.einsum("bthc,hcp->btp", units, params["down"], precision="highest")
    return jnp.einsum("btp,pgr->btgr", low, params["up"], precision="highest")


def _factors(base: float, temperature: float, head_dim: int) -> Float[Array, " R"]:
    """Of phi, in the angle of each pair."""
    return jnp.asarray(temperature * rope_spectrum(base, head_dim), jnp.float32)


def _rotated(q: Queries, k: Keys, angle: Float[Array, "B T G R"]) -> tuple[Queries, Keys]:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    groups = q.shape[2] // k.shape[2]
    return rotate(q, *(jnp.repeat(one, groups, axis=2) for one in (cos, sin))), rotate(k, cos, sin)
