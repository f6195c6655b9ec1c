"""Encodings with one hook each, for tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pe_lab.attention import LayerEncoding
from pe_lab.attention.hooks import Hooks
from pe_lab.positional import Encoding, LayerHooks
from pe_lab.positional.notebook import NotebookBias


@dataclass(frozen=True)
class Table(Encoding):
    """A relative bias."""

    relative = True

    def bias(self, params, query_positions, key_positions):
        far = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(jnp.float32)
        return params["w"][:, None, None] * jnp.cos(0.7 * far)


@dataclass(frozen=True)
class Function(Encoding):
    """A bias that is no function of the distance."""

    def bias(self, params, query_positions, key_positions):
        return params["w"][:, None, None] * jnp.sin(0.3 * query_positions[:, None] * key_positions[None, :])


@dataclass(frozen=True)
class KeyBias(Encoding):
    content = True

    def key_bias(self, params, x):
        return params["w"][:, None] * x[..., 0].astype(jnp.float32)[:, None]


@dataclass(frozen=True)
class Logits(Encoding):
    def logits(self, params, q, logits):
        return 2 * jnp.tanh(logits / 2) + params["w"][:, None, None] * q[..., 0].swapaxes(1, 2)[..., None]


@dataclass(frozen=True)
class Sink(Encoding):
    def sink(self, params):
        return params["w"]


@dataclass(frozen=True)
class Diagonal(Encoding):
    """A bias w[position] on the logit of a token with itself."""

    def bias(self, params, query_positions, key_positions):
        own = query_positions[:, None] == key_positions[None, :]
        return jnp.where(own, params["w"][query_positions][:, None], 0)[None]


FEATURE_OF = {
    Table(): "distance bias",
    Function(): "position bias",
    KeyBias(): "key bias",
    Logits(): "logit functions",
    Sink(): "sinks",
}


def hooked(*encodings: Encoding, heads: int = 4) -> LayerEncoding:
    """A layer with these encodings; their parameter w is that of its head."""
    params = {"w": jnp.linspace(0.5, 1.5, heads)}
    return LayerEncoding(hooks=Hooks((params,) * len(encodings), tuple(LayerHooks(one, "w") for one in encodings)))


DIAGONAL = LayerEncoding(hooks=Hooks(({},), (LayerHooks(NotebookBias(2.5, 11)),)))
