"""Feed-forwards: pe_lab's MLP, and registered modules in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model.projections import constant, normal, project
from pe_lab.parallel import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021 (Primer)
}
FeedForward = TypeVar("FeedForward", bound=type[nnx.Module])


def branch_std(config: ModelConfig) -> float:
    """The standard deviation of the initial output projections of both branches."""
    # Scaled, the variance of the sum over the 2N residual branches of N layers does not depend on N (GPT-2).
    return config.init_std / (2 * config.layers) ** 0.5 if config.scaled_residual_init else config.init_std


class MLP(nnx.Module):
    """Feed-forward: gated, down(activation(gate x) * up x) (Shazeer 2020), or plain, down(activation(up x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F, std, gated, bias = config.d_model, config.d_ff, config.init_std, config.gated_mlp, config.mlp_bias
        self.gate = normal(rngs, (D, F), std, ("embed", "mlp")) if gated else None
        self.up = normal(rngs, (D, F), std, ("embed", "mlp"))
        self.down = normal(rngs, (F, D), branch_std(config), ("mlp", "embed"))
        self.gate_bias = constant(0.0, (F,), ("mlp",)) if gated and bias else None
        self.up_bias = constant(0.0, (F,), ("mlp",)) if bias else None
        self.down_bias = constant(0.0, (D,), ("vector",)) if bias else None
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = activation(project("up", x, self.up, self.up_bias))
        else:
            gate = project("gate", x, self.gate, self.gate_bias)
            up = project("up", x, self.up, self.up_bias)
            hidden = activation(gate) * up
        hidden = constrain(hidden, "batch", "length", "mlp")
        return project("down", hidden, self.down, self.down_bias)


class Auxiliary(NamedTuple):
    """What a layer gives beside its output: numbers by name, float32 scalars; empty costs nothing.

    Attributes:
      losses: nats per token, with their coefficients; training adds them to its loss, and logs them.
      metrics: are logged alone.
    """

    losses: dict[str, jax.Array] = {}
    metrics: dict[str, jax.Array] = {}


FEED_FORWARDS: dict[str, type[nnx.Module]] = {}


def register_feed_forward(name: str) -> Callable[[FeedForward], FeedForward]:
    """A class decorator: gives a feed-forward the name that `model.feed_forward` takes.

    The class is an `nnx.Module` made by `Class(config, rngs)`, with parameters from `normal` and `constant`. Its call
    takes x [B, T, D], the normed residual stream, and returns the update [B, T, D], or that and an `Auxiliary` of the
    same names in every layer. Its means are over the whole batch, also on a mesh.
    """

    def decorate(kind: FeedForward) -> FeedForward:
        known = FEED_FORWARDS.get(name, kind)
        if not name.isidentifier() or known.__qualname__ != kind.__qualname__:
            raise ConfigError(f"register_feed_forward('{name}'): give {kind.__qualname__} another name.")
        FEED_FORWARDS[name] = kind
        return kind

    return decorate


def parameter_sizes(kind: type[nnx.Module], config: ModelConfig) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a module that is made by `kind(config, rngs)`; none is made."""
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))))]
