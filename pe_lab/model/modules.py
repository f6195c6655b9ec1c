"""The decoder's parts as Flax NNX modules: feed-forwards, inputs of single layers, attention, blocks, embedder.

Only this package uses NNX; elsewhere, parameters are plain nested dicts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pe_lab.attention import LayerEncoding, attention
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model.embedding import embedding_lookup
from pe_lab.model.loss import Head
from pe_lab.model.norms import RMSNorm, qk_norm, stream_norm, unscaled
from pe_lab.model.parametrization import hidden_std, logit_factor, query_factor
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
    return hidden_std(config) / (2 * config.layers) ** 0.5 if config.scaled_residual_init else hidden_std(config)


class MLP(nnx.Module):
    """Feed-forward: gated, down(activation(gate x) * up x) (Shazeer 2020), or plain, down(activation(up x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F, std, gated, bias = config.d_model, config.d_ff, hidden_std(config), config.gated_mlp, config.mlp_bias
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
        self.norm = RMSNorm((P,), ("vector",), config.norm_epsilon, plus_one=config.norm == "rms_plus_one")
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


BLOCKS = ("pre_norm", "post_norm", "pre_post_norm", "parallel", "parallel_one_norm")


class Attention(nnx.Module):
    """The parameters of grouped-query attention: projections, and optional QK-norm before rotation.

    `own_keys`: False for a layer that attends to another one's keys and values.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, own_keys: bool = True):
        D, H, G, K, std = config.d_model, config.heads, config.kv_heads, config.head_dim, hidden_std(config)
        norm, factor = config.qk_norm != "none", query_factor(config)
        self.query = normal(rngs, (D, H, K), std if norm else std * factor, ("embed", "heads", "head_dim"))
        own_values = own_keys and not config.values_are_keys
        self.key = normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim")) if own_keys else None
        self.value = normal(rngs, (D, G, K), std, ("embed", "kv_heads", "head_dim")) if own_values else None
        self.out = normal(rngs, (H, K, D), branch_std(config), ("heads", "head_dim", "embed"))
        bias, out_bias = config.attention_bias, config.output_bias
        self.query_bias = constant(0.0, (H, K), ("heads", "head_dim")) if bias else None
        self.key_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias and own_keys else None
        self.value_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias and own_values else None
        self.out_bias = constant(0.0, (D,), ("vector",)) if out_bias else None
        self.query_norm = qk_norm(config, H, "heads", factor) if norm else None
        of_keys = config.qk_norm in ("head", "flat", "layer_heads")
        self.key_norm = qk_norm(config, G, "kv_heads") if of_keys and own_keys else None
        self.config = config

    def queries_keys_values(
        self, x: Float[Array, "B T D"], shared: KeysValues | None = None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """Queries, keys and values, projected and normalized, not rotated; `shared`: those of an earlier layer."""
        bound = self.config.qkv_clip

        def projected(name: str, heads: str, weights: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            found = project(name, x, weights, bias)
            found = jnp.clip(found, -bound, bound) if bound else found
            return constrain(found, "batch", "length", heads, "head_dim")

        q = projected("query", "heads", self.query, self.query_bias)
        q = _applied(self.query_norm, q)
        if self.key is None:
            return q, *shared
        k = v = projected("key", "kv_heads", self.key, self.key_bias)
        if self.value is not None:
            v = projected("value", "kv_heads", self.value, self.value_bias)
        if self.config.value_norm:
            v = unscaled(v, self.config.norm_epsilon)
        return q, _applied(self.key_norm, k), v

    def project_out(self, out: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        """The output projection of attention."""
        out = constrain(out, "batch", "length", "heads", "head_dim")
        return project("out", out, self.out, self.out_bias, inputs=2)


class Block(nnx.Module):
    """One layer: attention and feed-forward, with the norms that `ModelConfig.block` places around them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, own_keys: bool = True):
        before, after = config.block != "post_norm", config.block in ("post_norm", "pre_post_norm")
        self.attention_norm = stream_norm(config) if before else None
        self.attention = Attention(config, rngs, own_keys)
        self.attention_post_norm = stream_norm(config) if after else None
        self.mlp_norm = stream_norm(config) if before and config.block != "parallel_one_norm" else None
        self.mlp = None if config.feed_forward else MLP(config, rngs)
        shape = dataclasses.replace(config, init_std=hidden_std(config))
        self.feed_forward = FEED_FORWARDS[config.feed_forward](shape, rngs) if config.feed_forward else None
        self.mlp_post_norm = stream_norm(config) if after else None
        self.layer_input = LayerInput(config, rngs) if config.per_layer_input else None
        self.layer_scale = constant(1.0, (1,), ("vector",)) if config.layer_scale else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoding: LayerEncoding,
        positions: Int[Array, "#B T"] | None,
        segments: Int[Array, "B T"] | None,
        window: int | None,
        backward: bool = True,
        given: LayerInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T H K"], KeysValues], Auxiliary]:
        """The output of the layer, that of its attention before the output projection with the keys and values, not
        rotated, and its auxiliary numbers."""
        config = self.attention.config
        attend = functools.partial(
            attention,
            encoding=encoding,
            positions=positions,
            segments=segments,
            window=window,
            implementation=config.attention,
            chunk=config.attention_chunk,
            backward=backward,
        )

        def named(q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
            with jax.named_scope("attend"):
                attended = attend(q, k, v, x=x)
                return attended, (attended, (k, v))

        return self.attend_by(x, named, given)

    def attention_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the attention's projections, from that of the layer."""
        return _applied(self.attention_norm, x)

    def attend_by(
        self,
        x: Float[Array, "B T D"],
        attend: Callable[..., tuple[jax.Array, Any]],
        given: LayerInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "B T D"], Any, Auxiliary]:
        """The layer with another attention: `attend(q, k, v, x)` returns its output and a second result (a KV cache).

        Its x is the input of the projections. The third result are the numbers of the feed-forward.
        """
        block, factor = self.attention.config.block, self.attention.config.residual_multiplier
        with jax.named_scope("attention"):
            normed = self.attention_input(x)
            attended, result = attend(*self.attention.queries_keys_values(normed, given.keys_values), normed)
            attended = _applied(self.attention_post_norm, self.attention.project_out(attended))
            attended = attended if factor == 1 else attended * factor
        stream = x if block.startswith("parallel") else constrain(x + attended, "batch", "length", "activation_embed")
        with jax.named_scope("mlp"):
            inputs = normed if block == "parallel_one_norm" else _applied(self.mlp_norm, stream)
            update = (self.mlp or self.feed_forward)(inputs)
            update, auxiliary = update if isinstance(update, tuple) else (update, Auxiliary())
            update = _applied(self.mlp_post_norm, update)
            update = update if factor == 1 else update * factor
        # Under tensor parallelism, XLA joins the all-reduces of two parallel branches into one.
        x = x + (attended + update) if stream is x else stream + update
        if self.layer_input is not None:
            x = x + self.layer_input(x, given.embedded)
        if self.layer_scale is not None:
            # Transformers has it as a buffer, which no optimizer changes.
            x = x * jax.lax.stop_gradient(self.layer_scale[...]).astype(x.dtype)
        return constrain(x, "batch", "length", "activation_embed"), result, auxiliary


def _applied(norm: nnx.Module | None, x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    return x if norm is None else norm(x)


class Embedder(nnx.Module):
    """The parameters outside the layers: embedding and its norm, final norm, output embedding if not tied, its bias."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.embedding = normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.embedding_norm = stream_norm(config) if config.embedding_norm else None
        self.final_norm = stream_norm(config, logit_factor(config))
        self.unembedding = None if config.tie_embeddings else normal(rngs, (V, D), config.init_std, ("vocab", "embed"))
        self.unembedding_bias = constant(0.0, (V,), ("vocab",)) if config.unembedding_bias else None
        self.layer_inputs = LayerEmbedding(config, rngs) if config.per_layer_input else None
        self.config = config

    def embed(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        """The input of the first layer."""
        x, factor = embedding_lookup(self.embedding[...], tokens, dtype), self.config.embedding_multiplier
        # The multiplier is rounded first, as in Gemma's training: sqrt(2048) is 45.25 in bfloat16.
        x = x if factor == 1 else x * jnp.asarray(factor, dtype)
        return _applied(self.embedding_norm, x)

    def output(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The input of the head: the final norm, times the multiplier of the logits."""
        x, factor = self.final_norm(x), self.config.logit_multiplier
        return x if factor == 1 else x * jnp.asarray(factor, x.dtype)

    def head(self) -> Head:
        """What makes logits of `output`."""
        table = self.embedding if self.unembedding is None else self.unembedding
        bias = None if self.unembedding_bias is None else self.unembedding_bias[...]
        return Head(table[...], bias, self.config.logit_soft_cap)
