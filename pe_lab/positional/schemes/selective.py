"""Rotations whose angles depend on hidden states: Selective RoPE, and its variant without a sum over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.errors import ConfigError
from pe_lab.positional.hooks import Earlier, Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.rotation import rotate
from pe_lab.positional.scalings import Limits
from pe_lab.positional.schemes.spectra import rope_spectrum
from pe_lab.positional.schemes.starts import START, normal

_LIMITS: Limits = START | {
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
    start: Literal["published", "unchanged"] = "published"

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

    def running_sum(self, params: Params, x: Float[Array, "B T D"], earlier: Earlier) -> Float[Array, "B T G R"]:
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
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T G R"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
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
    start: Literal["published", "unchanged"] = "published"

    limits: ClassVar[Limits] = _LIMITS

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return _projection(key, shape, self.rank, self.start)

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
        return _rotated(q, k, _phi(params, _units(params, x)) * _factors(self.base, self.temperature, q.shape[-1]))


def _projection(
    key: Array, shape: HeadShape, rank: int, start: Literal["published", "unchanged"]
) -> dict[str, Parameter]:
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


def _units(params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T H C"]:
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


def _rotated(
    q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], angle: Float[Array, "B T G R"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    groups = q.shape[2] // k.shape[2]
    return rotate(q, *(jnp.repeat(one, groups, axis=2) for one in (cos, sin))), rotate(k, cos, sin)
