"""What a positional encoding is: a frozen dataclass whose methods are hooks, pure functions of parameters and arrays.

A class overrides the hooks that it has; a hook that it does not override costs nothing. `register` (in `registry`)
gives it the name by which recipes, texts and checkpoints know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.errors import ConfigError, call
from pe_lab.positional.scalings import CheckedFields

Params = Mapping[str, Array]
Earlier = Callable[[Array, int], Array]
Queries = Float[Array, "B T H K"]
Outputs = Float[Array, "B T H K"]  # of attention
Keys = Float[Array, "B T G K"]
Values = Float[Array, "B T G K"]
Hidden = Float[Array, "B T D"]
Bias = Float[Array, "H T S"]  # of logits
Positions = Int[Array, "#B T"]


class HeadShape(NamedTuple):
    """The sizes that the parameters of an encoding may depend on."""

    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # K
    d_model: int  # D


class Parameter(NamedTuple):
    """The initial value of a learned array of an encoding, and how it is trained.

    Attributes:
      value: float32, of one layer.
      axes: the logical name of each axis (`heads`, `kv_heads`, `head_dim`, `embed`, `vector`, `mlp`, ...), by which it
        is sharded; None for an axis that is never sharded.
      learning_rate: factor on the optimizer's rate.
      decay: whether weight decay acts on it.
    """

    value: Float[Array, "..."]
    axes: tuple[str | None, ...]
    learning_rate: float = 1.0
    decay: bool = False


class Encoding(CheckedFields):
    """Base of all positional encodings.

    B batch, T queries, S keys, H query heads, G key-value heads, K channels of a head, R = K / 2, D of the model. In
    hooks, `x` [B, T, D] is the input of the layer's attention, after its norm; for an encoding with `running_sum`, it
    is that sum instead.

    Attributes:
      display_name: in tables and figures; "": the registered name.
      stands_alone: it can be all that a layer or a head has; False for what acts beside another: a temperature, a gate,
        a sink, noise.
      relative: for equal hidden states, the logit of a query and a key depends on positions through their distance
        alone. A `bias` that is relative is computed once per distance, and kernels take it as a table.
      content: the encoding depends on the hidden states x, not only on positions.
      exact_cache: a token's encoded key, key bias and output do not depend on later tokens or on the length, so that
        decoding with a KV cache is exact. False: every new token takes a pass over the whole sequence.
      sums_angles: the terms of `running_sum` are radians, and their sum is kept modulo 2 pi. Each token adds an error
        of 2^-33 of a rotation at most: 1e-3 rad at the millionth.
    """

    display_name: ClassVar[str] = ""
    stands_alone: ClassVar[bool] = True
    relative: ClassVar[bool] = False
    content: ClassVar[bool] = False
    exact_cache: ClassVar[bool] = True
    sums_angles: ClassVar[bool] = False

    # Of the schedule: computed on the host, in float64, and outside the gradient.

    def frequencies(self, head_dim: int, length: int | None) -> tuple[np.ndarray, np.ndarray]:
        """inv_freq [R], radians per position in [0, 2 pi), and gain [R], the amplitude of a pair after rotation."""
        return np.zeros(head_dim // 2), np.ones(head_dim // 2)

    def slopes(self, num_heads: int) -> np.ndarray:
        """[H]: the penalty on a logit per token of distance."""
        return np.zeros(num_heads)

    @property
    def follows_length(self) -> bool:
        """Whether `frequencies` depends on the length of the sequence."""
        return False

    @property
    def max_length(self) -> int | None:
        """The tokens of the longest sequence that it has positions for; None: any."""
        return None

    def on(self, heads: tuple[int, ...]) -> Encoding:
        """The encoding that an edit gives to these query heads: itself, but where it depends on which they are."""
        return self

    # Of parameters and arrays: traced by JAX, and differentiated.

    def init(self, key: Array, shape: HeadShape) -> dict[str, Parameter]:
        """The parameters of one layer; those that change no function at their initial value let surgery add them."""
        return {}

    def embed(self, params: Params, x: Hidden, positions: Positions) -> Hidden:
        """The input of the first layer, from the embeddings x of the tokens.

        It acts once, whichever layers have the encoding; `params` are those of the first of them.
        """
        raise NotImplementedError

    def running_sum(self, params: Params, x: Hidden, earlier: Earlier) -> Float[Array, "B T *sums"]:
        """A term per token. Its sum over the tokens of the document, up to and including each, replaces x in hooks.

        A KV cache keeps the sum of the last token, so that a hook with a running sum is exact under a cache.

        Args:
          earlier: (y [B, T, ...], n) -> y of the token n places earlier in the same document, 0 where there is none.
            Other hooks compute each token from itself: on a mesh with a context axis, neighbours in x are no neighbours
            in the sequence. A KV cache does not have earlier tokens: `exact_cache` is False for what reads them.
        """
        raise NotImplementedError

    def encode(
        self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden
    ) -> tuple[Float[Array, "B T H any"], Float[Array, "B T heads any"]]:
        """Queries and keys of any equal number of channels; the logits are their products over sqrt(K).

        Keys have G heads, or H heads where the query heads of a group need different ones.
        """
        raise NotImplementedError

    def bias(self, params: Params, query_positions: Int[Array, " T"], key_positions: Int[Array, " S"]) -> Bias:
        """Added to the logits of a block of queries and keys; at a key after its query, any finite number."""
        raise NotImplementedError

    def key_bias(self, params: Params, x: Float[Array, "B S D"]) -> Float[Array, "B H S"]:
        """Added to all logits of a key."""
        raise NotImplementedError

    def logits(self, params: Params, q: Queries, logits: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
        """New logits of some queries against all keys, those that a query does not see at -1e30; no kernel has it."""
        raise NotImplementedError

    def sink(self, params: Params) -> Float[Array, " H"]:
        """A logit per head in the denominator of the softmax, which takes weight from all keys."""
        raise NotImplementedError

    def output(self, params: Params, x: Hidden, out: Outputs, value: Values) -> Outputs:
        """The output of attention, before its projection; `value` is that of the same tokens."""
        raise NotImplementedError

    # Of training alone.

    def penalty(self, params: Params) -> Float[Array, ""]:
        """Nats per token that training adds to the loss for the parameters of one layer; not in the logged losses."""
        raise NotImplementedError


Hook = Literal["embed", "running_sum", "encode", "bias", "key_bias", "logits", "sink", "output"]
HOOKS: tuple[Hook, ...] = ("embed", "running_sum", "encode", "bias", "key_bias", "logits", "sink", "output")


def has(encoding: Encoding, hook: str) -> bool:
    """Whether a class overrides a hook."""
    return getattr(type(encoding), hook) is not getattr(Encoding, hook)


def acts_in_layers(encoding: Encoding) -> bool:
    """Whether a class has other hooks than `embed`."""
    return any(has(encoding, hook) for hook in HOOKS if hook != "embed")


class LayerHooks(NamedTuple):
    """An encoding with hooks, on one layer. Static: part of the layer's structure.

    Attributes:
      encoding: the description.
      parameters: its key in the parameters' `layers.positional`; None: it has none.
      heads: the query heads it acts on; (): all.
    """

    encoding: Encoding
    parameters: str | None = None
    heads: tuple[int, ...] = ()


def call_for_array(encoding: Encoding, method: str, *arguments: Any) -> Array:
    """`call` for a hook that returns one array.

    Raises:
      ConfigError: it returned something else.
    """
    found = call(encoding, method, *arguments)
    try:
        return jnp.asarray(found)
    except (TypeError, ValueError):
        name = f"{type(encoding).__name__}.{method}"
        raise ConfigError(f"{name} returned a {type(found).__name__}; it must return an array.") from None


def initial(encoding: Encoding, shape: HeadShape, key: Array) -> dict[str, Parameter]:
    """The parameters of one layer, checked.

    Raises:
      ConfigError: names the encoding and what `init` returned.
    """
    name = type(encoding).__name__
    found = call(encoding, "init", key, shape)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}.init returned {type(found).__name__}; it must return a dict of Parameter(...).")
    for field, parameter in found.items():
        if not isinstance(parameter, Parameter):
            raise ConfigError(
                f"{name}.init: '{field}' is a {type(parameter).__name__}; give Parameter(value, axes), with the "
                "logical name of each axis, or None for one that is not sharded."
            )
        axes, rank = parameter.axes, jnp.ndim(parameter.value)
        if not isinstance(axes, tuple) or len(axes) != rank or not all(a is None or isinstance(a, str) for a in axes):
            raise ConfigError(
                f"{name}.init: '{field}' has shape {list(jnp.shape(parameter.value))} and axes {axes!r}; give one "
                f"name, or None, for each of the {rank} axes, such as ('heads', None)."
            )
    return dict(found)


def parameter_settings(encoding: Encoding, shape: HeadShape) -> dict[str, Parameter]:
    """`initial` with `jax.ShapeDtypeStruct`s for values: nothing is computed."""
    settings: dict[str, Parameter] = {}

    def values(key: Array) -> dict[str, Array]:
        settings.update(initial(encoding, shape, key))
        return {name: jnp.asarray(one.value, jnp.float32) for name, one in settings.items()}

    shapes = jax.eval_shape(values, jax.random.key(0))
    return {name: settings[name]._replace(value=shapes[name]) for name in settings}


# How the parameters of a scheme start. `published`: at the authors' values. `unchanged`: where the scheme changes no
# function, so that surgery can add it to a trained model.
Start = Literal["published", "unchanged"]

DEVIATION = 0.02  # standard deviation of the initial weights of language models


def normal(key: Array, index: int, *shape: int, deviation: float = DEVIATION) -> Float[Array, "*shape"]:
    """Normal numbers; `index` tells the parameters of one encoding apart."""
    return deviation * jax.random.normal(jax.random.fold_in(key, index), shape)


def uniform(key: Array, index: int, low: float, high: float, *shape: int) -> Float[Array, "*shape"]:
    """Uniform numbers; `index` tells the parameters of one encoding apart."""
    return jax.random.uniform(jax.random.fold_in(key, index), shape, minval=low, maxval=high)


def bounded(x: Float[Array, "*axes"], low: float, high: float | None = None) -> Float[Array, "*axes"]:
    """x between bounds, with the gradient of x: a parameter beyond a bound can come back.

    Where authors clamp a parameter in place before each step, its gradient passes in the same way.
    """
    return x + jax.lax.stop_gradient(jnp.clip(x, low, high) - x)
