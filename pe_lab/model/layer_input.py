"""What layers take beside the residual stream: keys of earlier layers, and a second embedding (Gemma 3n and 4)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pe_lab.config import ModelConfig
from pe_lab.model.embedding import embedding_lookup
from pe_lab.model.feed_forward import ACTIVATIONS, branch_std
from pe_lab.model.norms import RMSNorm, stream_norm
from pe_lab.model.projections import normal, project
from pe_lab.parallel import constrain

KeysValues = tuple[Float[Array, "B T G K"], Float[Array, "B T G K"]]


class LayerInputs(NamedTuple):
    """What a layer takes beside the residual stream, where its model has it.

    Attributes:
      keys_values: of an earlier layer, normalized and not rotated.
      embedded: its part of `LayerEmbedding`.
    """

    keys_values: KeysValues | None = None
    embedded: Float[Array, "B T P"] | None = None


NO_INPUTS = LayerInputs()


class LayerEmbedding(nnx.Module):
    """The inputs of all layers: a second embedding of the tokens, and a projection of their first."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        V, N, P = config.vocab_size, config.layers, config.per_layer_input
        self.embedding = normal(rngs, (V, N * P), config.init_std, ("vocab", "embed"))
        self.projection = normal(rngs, (N * P, config.d_model), config.init_std, (None, "embed"))
        self.norm = RMSNorm((P,), ("vector",), config.norm_epsilon, config.norm == "rms_plus_one")
        self.sizes = N, P

    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "N B T P"]:
        """The input of each layer, of tokens whose first embedding is x; both parts in the dtype of x."""
        (N, P), dtype = self.sizes, x.dtype
        found = embedding_lookup(self.embedding[...], tokens, dtype) * jnp.asarray(P**0.5, dtype)
        with jax.named_scope("layer_projection"):
            projected = jnp.einsum("btd,pd->btp", x, self.projection[...].astype(dtype))
        found, projected = (one.reshape(*tokens.shape, N, P) for one in (found, projected))
        projected = self.norm(projected * jnp.asarray(x.shape[-1] ** -0.5, dtype))
        found = (projected + found) * jnp.asarray(0.5**0.5, dtype)
        return constrain(jnp.moveaxis(found, 2, 0), None, "batch", "length", None)


class LayerInput(nnx.Module):
    """What a layer adds of its own input of the tokens: norm(projection(activation(gate x) * input))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, P = config.d_model, config.per_layer_input
        self.gate = normal(rngs, (D, P), config.init_std, ("embed", None))
        self.projection = normal(rngs, (P, D), branch_std(config), (None, "embed"))
        self.post_norm = stream_norm(config)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Float[Array, "B T D"], embedded: Float[Array, "B T P"]) -> Float[Array, "B T D"]:
        with jax.named_scope("layer_input"):
            hidden = self.activation(project("gate", x, self.gate)) * embedded
            return self.post_norm(project("projection", hidden, self.projection))
