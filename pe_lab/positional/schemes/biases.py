"""Biases on logits: by distance (T5, KERPLE, learned slopes, FIRE), by forget gates, and by contextual positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.positional.encodings import alibi_slopes
from pe_lab.positional.hooks import (
    Bias,
    Earlier,
    Encoding,
    HeadShape,
    Hidden,
    Parameter,
    Params,
    Queries,
    Start,
    bounded,
    normal,
    uniform,
)
from pe_lab.positional.registry import register
from pe_lab.positional.scalings import Limits, require


def distances(queries: Int[Array, " T"], keys: Int[Array, " S"]) -> Int[Array, "T S"]:
    """The distance of each query and key; 0 at a key after its query, which no query sees."""
    return jnp.maximum(queries[:, None] - keys[None, :], 0)


@register("t5")
@dataclass(frozen=True)
class T5Bias(Encoding):
    """T5's bias (Raffel et al. 2020, arXiv 1910.10683): one learned number for each head and bucket of distances.

    With n buckets, distances below n / 2 have their own; those up to `max_distance` share the rest, whose edges grow
    geometrically; all beyond share the last. `table` [buckets, H] starts with deviation D^-0.5.

    Deviations: T5 shares one table among all layers, and does not divide logits by sqrt(K).
    """

    display_name = "T5's bias"
    relative = True

    buckets: int = 32
    max_distance: int = 128
    start: Start = "published"

    limits: ClassVar[Limits] = {
        "buckets": (lambda x: 2 <= x < 2**16 and x % 2 == 0, "give an even number from 2."),
        "max_distance": (lambda x: 1 <= x < 2**24 and x == int(x), "give a whole number of tokens."),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_distance > self.buckets // 2,
            f"T5Bias.max_distance is {self.max_distance}; it must be above buckets / 2, which is {self.buckets // 2}.",
        )

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        table = normal(key, 0, self.buckets, shape.num_heads, deviation=shape.d_model**-0.5)
        return {"table": Parameter(table * float(self.start == "published"), (None, "heads"))}

    def bucket_of(self) -> np.ndarray:
        """[max_distance + 1]: the bucket of each distance; those beyond have the last one's."""
        exact = self.buckets // 2
        distance = np.arange(1, self.max_distance + 1)
        far = np.log(distance / exact) / math.log(self.max_distance / exact) * (self.buckets - exact)
        # The rounding of a logarithm must not move a distance that is an edge.
        bucket = np.where(distance < exact, distance, exact + np.floor(far + 1e-9))
        return np.concatenate([[0], np.minimum(bucket, self.buckets - 1)]).astype(np.int32)

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        distance = jnp.minimum(distances(query_positions, key_positions), self.max_distance)
        return params["table"].T[:, jnp.asarray(self.bucket_of())[distance]]


@register("learned_alibi")
@dataclass(frozen=True)
class LearnedAlibi(Encoding):
    """ALiBi with learned slopes (Press et al. 2022, arXiv 2108.12409, section 3): -m d, with `slopes` m [H] >= 0.

    `unchanged`: m starts at 0 instead of ALiBi's slopes. KERPLE's code has bounds of 0.01 and a uniform start.
    """

    display_name = "learned ALiBi"
    relative = True

    start: Start = "published"

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        slopes = alibi_slopes(shape.num_heads) * float(self.start == "published")
        return {"slopes": Parameter(jnp.asarray(slopes, jnp.float32), ("heads",))}

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        distance = distances(query_positions, key_positions).astype(jnp.float32)
        return -bounded(params["slopes"], 0.0)[:, None, None] * distance


@dataclass(frozen=True)
class Kerple(Encoding):
    """Base of both kernels of KERPLE (Chi et al. 2022, arXiv 2205.09921), with learned `r1` and `r2` [H].

    They start uniform from 0 to `highest`. Both are used as `least` where they are below it, and their gradients pass:
    the authors clamp parameters in place. `unchanged`: r1 starts at 0, and with least=0 the bias does too.
    """

    relative = True
    highest: ClassVar[tuple[float, float]]

    least: float = 0.01
    start: Start = "published"

    limits: ClassVar[Limits] = {"least": (lambda x: 0 <= x < 1, "it must lie in [0, 1).")}

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        r1, r2 = (uniform(key, n, 0.0, high, shape.num_heads) for n, high in enumerate(self.highest))
        return {"r1": Parameter(r1 * float(self.start == "published"), ("heads",)), "r2": Parameter(r2, ("heads",))}


@register("kerple_log")
@dataclass(frozen=True)
class KerpleLog(Kerple):
    """KERPLE's logarithmic kernel: -r1 ln(1 + r2 d). r1 starts in [0, 2], r2 in [0, 1]."""

    display_name = "KERPLE (log)"
    highest = (2.0, 1.0)

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        distance = distances(query_positions, key_positions).astype(jnp.float32)
        r1, r2 = (bounded(params[name], self.least)[:, None, None] for name in ("r1", "r2"))
        return -r1 * jnp.log1p(r2 * distance)


@register("kerple_power")
@dataclass(frozen=True)
class KerplePower(Kerple):
    """KERPLE's power kernel: -r1 d^r2, r2 at most 2. r1 starts in [0, 1], r2 in [0, 2]."""

    display_name = "KERPLE (power)"
    highest = (1.0, 2.0)

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        distance = distances(query_positions, key_positions).astype(jnp.float32)
        r1 = bounded(params["r1"], self.least)[:, None, None]
        r2 = bounded(params["r2"], self.least, 2.0)[:, None, None]
        # At d = 0 the power is 0, and the gradient of d^r2 would be 0 times -inf.
        log = jnp.log(jnp.maximum(distance, 1.0))
        return -r1 * jnp.where(distance > 0, jnp.exp(r2 * log), 0.0)


@register("fire")
@dataclass(frozen=True)
class Fire(Encoding):
    """FIRE (Li et al. 2023, arXiv 2310.04418): a small network of a distance in parts of the query's position.

    bias = MLP(psi(d) / (psi(max(i, |l L|)) + 1e-6)), psi(x) = ln(|c x| + 1), i the query's position, c = `c` and
    l = `length_multiplier` learned scalars. The MLP has `depth` hidden layers of `width` and ReLUs, one for all heads:
    `w1`, `b1`, ..., the last [width, H]. It depends on i and d. Each layer has its own; FIRE-S shares one.

    Attributes:
      initial_length: L.
      initial_c: where c starts.
      width, depth: of the hidden layers; one in the paper's listing.
      start: `unchanged`: the last layer is 0.
    """

    display_name = "FIRE"

    initial_length: float = 512.0
    initial_c: float = 0.1
    width: int = 32
    depth: int = 1
    start: Start = "published"

    limits: ClassVar[Limits] = {
        "initial_length": (lambda x: 1 <= x < 2**31, "it must be a number of tokens from 1."),
        "initial_c": (lambda x: 1e-6 <= x <= 1e6, "it must lie in [1e-6, 1e6]."),
        "width": (lambda x: 1 <= x < 2**16 and x == int(x), "give a whole number from 1."),
        "depth": (lambda x: 1 <= x <= 8 and x == int(x), "give a whole number from 1 to 8."),
    }

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        found = {
            "c": Parameter(jnp.asarray(self.initial_c, jnp.float32), ()),
            "length_multiplier": Parameter(jnp.ones(()), ()),
        }
        sizes = [1, *[self.width] * self.depth, shape.num_heads]
        for n, (inner, outer) in enumerate(zip(sizes, sizes[1:], strict=False)):
            # PyTorch's start of a linear layer, and of its bias.
            last = n == self.depth
            bound = inner**-0.5 * float(not last or self.start == "published")
            axis = "heads" if last else None
            found[f"w{n + 1}"] = Parameter(uniform(key, 2 * n, -bound, bound, inner, outer), (None, axis))
            found[f"b{n + 1}"] = Parameter(uniform(key, 2 * n + 1, -bound, bound, outer), (axis,))
        return found

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        def psi(x: jax.Array) -> jax.Array:
            return jnp.log1p(jnp.abs(params["c"] * x))

        distance = distances(query_positions, key_positions).astype(jnp.float32)
        threshold = jnp.abs(params["length_multiplier"] * self.initial_length)
        whole = psi(jnp.maximum(query_positions.astype(jnp.float32), threshold)) + 1e-6
        x = (psi(distance) / whole[:, None])[..., None]
        for n in range(1, self.depth + 1):
            x = jax.nn.relu(jnp.einsum("tsi,io->tso", x, params[f"w{n}"], precision="highest") + params[f"b{n}"])
        out = jnp.einsum("tsi,ih->hts", x, params[f"w{self.depth + 1}"], precision="highest")
        return out + params[f"b{self.depth + 1}"][:, None, None]


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

    def running_sum(self, params: Params, x: Hidden, earlier: Earlier) -> Float[Array, "B T H"]:
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

    def logits(self, params: Params, q: Queries, logits: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
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
