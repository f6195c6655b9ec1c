"""Logits that depend on what the tokens between a query and a key say: forget gates, and contextual positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.positional.hooks import Earlier, Encoding, HeadShape, Parameter, Params
from pe_lab.positional.registry import register
from pe_lab.positional.scalings import Limits
from pe_lab.positional.schemes.starts import normal


@register("forgetting")
@dataclass(frozen=True)
class ForgettingGate(Encoding):
    """The forgetting transformer's gate (Lin et al. 2025, arXiv 2503.02130): tokens between reduce a key's weight.

    logit_ij += sum of ln f_l over l = j + 1 .. i, with f = sigmoid(x W + b), `weight` W [D, H] and `bias` b [H]. With
    c_t the sum up to t that is c_i - c_j: c_i is one number for all keys of a query, which the softmax cancels, so that
    the hook gives -c_j alone. Exact under a cache by its `running_sum`.

    It does not cancel against a sink: beside `LearnedSink` the sink weighs e^(-c_i) too little, which no hook can
    correct. Sums begin with the document. Float32 logits near c lose c 6e-8 in precision: 0.005 in a document of
    130,000 tokens of gates at 0.5.

    Attributes:
      memory: tokens after which a gate reduces a weight to 1/e at the start: b = -ln(e^(1 / memory) - 1) and W = 0. A
        large number changes no function. None: the authors' start, b = 0, where f is 0.5 and it takes 1.4 tokens.
    """

    display_name = "forgetting"
    relative = True
    content = True

    memory: float | None = None

    limits: ClassVar[Limits] = {
        "memory": (lambda x: x is None or 0.1 <= x < 2**31, "give a number of tokens from 0.1, or leave it out.")
    }

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        D, H = shape.d_model, shape.num_heads
        weight, bias = normal(key, 0, D, H), 0.0
        if self.memory is not None:
            weight, bias = jnp.zeros((D, H)), -math.log(math.expm1(1 / self.memory))
        return {
            "weight": Parameter(weight, ("embed", "heads"), decay=True),
            "bias": Parameter(jnp.full(H, bias), ("heads",)),
        }

    def running_sum(self, params: Params, x: Float[Array, "B T D"], earlier: Earlier) -> Float[Array, "B T H"]:
        gate = jnp.einsum("btd,dh->bth", x.astype(jnp.float32), params["weight"], precision="highest")
        return jax.nn.log_sigmoid(gate + params["bias"])

    def key_bias(self, params: Params, x: Float[Array, "B S H"]) -> Float[Array, "B H S"]:
        return -x.swapaxes(1, 2)


@register("cope")
@dataclass(frozen=True)
class ContextualPosition(Encoding):
    """Contextual position encoding, CoPE (Golovneva et al. 2024, arXiv 2405.18719): positions count chosen tokens.

    p_ij = min(sum over l = j .. i of sigmoid(z_il), P - 1), with z the logits q k / sqrt(K). A query's q `embedding`
    [K, P], interpolated at p_ij, is added to the logit. `embedding` starts at 0, where nothing changes, and is one for
    all heads of a layer. The logits of all keys are needed at once: memory is quadratic and no kernel has it.

    Queries are those before any rotation; z has the layer's rotation and biases, if there are any.

    Attributes:
      positions: P.
      scaled: q `embedding` is divided by sqrt(K) too: the default of the authors' repository. False: the listing in
        the paper.
    """

    display_name = "CoPE"
    relative = True
    content = True

    positions: int = 64
    scaled: bool = False

    limits: ClassVar[Limits] = {
        "positions": (lambda x: 2 <= x < 2**20 and x == int(x), "give a whole number of positions from 2.")
    }

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        return {"embedding": Parameter(jnp.zeros((shape.head_dim, self.positions)), ("head_dim", None))}

    def logits(
        self, params: Params, q: Float[Array, "B T H K"], logits: Float[Array, "B H T S"]
    ) -> Float[Array, "B H T S"]:
        gates = jnp.where(logits > -5e29, jax.nn.sigmoid(logits), 0.0)  # those that are not seen are at -1e30
        position = jnp.minimum(jax.lax.cumsum(gates, axis=3, reverse=True), self.positions - 1)
        by_position = jnp.einsum("bthk,kp->bhtp", q.astype(jnp.float32), params["embedding"])
        if self.scaled:
            by_position = by_position * np.float32(q.shape[-1] ** -0.5)
        below = jnp.floor(jax.lax.stop_gradient(position)).astype(jnp.int32)
        above = jnp.minimum(below + 1, self.positions - 1)
        share = position - below
        values = (jnp.take_along_axis(by_position, at, axis=3) for at in (below, above))
        low, high = values
        return logits + low * (1 - share) + high * share
