"""The hooks of one layer's encodings, applied to its queries, keys, logits and outputs; every result is checked."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pe_lab.attention.bias import PositionBias, chosen_heads, on_heads
from pe_lab.attention.key_block import MASKED, LogitFunctions
from pe_lab.attention.running_sums import running_sum, tokens_before
from pe_lab.errors import ConfigError, UnsupportedError, call
from pe_lab.parallel import balanced_order, context_size, padded_length
from pe_lab.positional import Encoding, HeadShape, LayerHooks, has
from pe_lab.positional.hooks import call_for_array, parameter_settings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hooks:
    """The encodings with hooks of one layer, and the parameters of each ({} for none). A pytree: `hooks` is static."""

    params: tuple[Any, ...] = ()
    hooks: tuple[LayerHooks, ...] = field(default=(), metadata={"static": True})

    def having(self, hook: str) -> Iterable[tuple[int, LayerHooks, Any]]:
        """The number, the description and the parameters of those that have a hook."""
        return [
            (n, one, params)
            for n, (one, params) in enumerate(zip(self.hooks, self.params, strict=True))
            if has(one.encoding, hook)
        ]


def refuse_hooks(hooks: Hooks, what: str) -> None:
    """Raises an `UnsupportedError` for a measurement that knows rotations and slopes only."""
    if hooks.hooks:
        names = ", ".join(type(one.encoding).__name__ for one in hooks.hooks)
        raise UnsupportedError(f"{what} of layers that rotate or have none; it does not know what {names} computes.")


def hook_features(hooks: Sequence[LayerHooks], positions: bool) -> set[str]:
    """What hooks require of an implementation; `positions`: those of tokens are not their indices."""
    found = set()
    for encoding, _, _ in hooks:
        if has(encoding, "bias"):
            found.add("distance bias" if encoding.relative and not positions else "position bias")
        for hook, feature in (("key_bias", "key bias"), ("logits", "logit functions"), ("sink", "sinks")):
            if has(encoding, hook):
                found.add(feature)
    return found


def _wrong(encoding: Encoding, hook: str, found: Any, wanted: str) -> ConfigError:
    def shape(x: Any) -> Any:
        return list(x.shape) if hasattr(x, "shape") else type(x).__name__

    shapes = [shape(x) for x in found] if isinstance(found, tuple) else shape(found)
    return ConfigError(f"{type(encoding).__name__}.{hook} returned shape {shapes}; it must return {wanted}.")


def index_positions(length: int) -> Int[np.ndarray, "1 T"]:
    """The positions of tokens that are their indices: 0, 1, 2, ... in the order of a context axis."""
    parts = context_size()
    order = np.arange(length) if parts == 1 else balanced_order(length, parts)
    return np.asarray(order, np.int32)[None]


def hook_inputs(
    hooks: Hooks,
    x: Float[Array, "B T D"],
    before: Sequence[Shaped[Array, " B *state"]] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[list[Array], list[Shaped[Array, "B T *state"]]]:
    """What each encoding takes for x: x itself, or its running sum; and the states of the running sums.

    Args:
      before: of the encodings that have a sum, the states after the token before; None: x begins with the first token.
      segments: document of each token; a sum begins with its document.
    """
    inputs: list[Array] = [x] * len(hooks.hooks)
    states = []
    for n, (encoding, _, _), params in hooks.having("running_sum"):
        terms = call_for_array(encoding, "running_sum", params, x, functools.partial(tokens_before, segments=segments))
        if terms.ndim < 2 or terms.shape[:2] != x.shape[:2]:
            raise _wrong(encoding, "running_sum", terms, f"[B, T, ...], with B {x.shape[0]} and T {x.shape[1]}")
        since = None if before is None else before[len(states)]
        inputs[n], state = running_sum(terms.astype(jnp.float32), segments, since, encoding.sums_angles)
        states.append(state)
    return inputs, states


def encode(
    hooks: Hooks,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    positions: Int[Array, "#B T"],
    inputs: Sequence[Array],
) -> tuple[Float[Array, "B T H any"], Float[Array, "B T heads any"]]:
    """Queries and keys after all `encode` hooks; keys of H heads where those of the query heads of a group differ."""
    H, G = query.shape[2], key.shape[2]
    for n, (encoding, _, heads), params in hooks.having("encode"):
        if key.shape[2] == G:
            q, k = _encoded(encoding, params, query, key, positions, inputs[n])
        else:
            # A hook takes G key heads: it is applied to the keys of each member of the groups.
            members = [key[:, :, m :: H // G] for m in range(H // G)]
            found = [_encoded(encoding, params, query, one, positions, inputs[n]) for one in members]
            q, k = found[0][0], key
            if any(new is not one for (_, new), one in zip(found, members, strict=True)):
                k = _interleaved([_repeated(new, H) for _, new in found])
        if not heads:
            query, key = q, k
            continue
        if q.shape[3] != query.shape[3]:
            raise ConfigError(
                f"{type(encoding).__name__}.encode changes the channels of a head from {query.shape[3]} to "
                f"{q.shape[3]}; it cannot act on some heads of a layer alone."
            )
        chosen = chosen_heads(heads, H)
        query = jnp.where(chosen[:, None], q, query)
        if k is key:
            continue
        groups = chosen.reshape(G, -1)
        if k.shape[2] == key.shape[2] == G and (groups == groups[:, :1]).all():
            key = jnp.where(groups[:, 0, None], k, key)
        else:
            key = jnp.where(chosen[:, None], _repeated(k, H), _repeated(key, H))
    return query, key


def encoded(
    hooks: Hooks,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    x: Float[Array, "B T D"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H any"], Float[Array, "B T heads any"], list[Array]]:
    """Queries and keys of whole sequences after all hooks, and what each encoding takes for x (see `hook_inputs`)."""
    if not hooks.hooks:
        return query, key, []
    x = jnp.zeros((*query.shape[:2], 0), query.dtype) if x is None else x
    inputs, _ = hook_inputs(hooks, x, segments=segments)
    positions = jnp.asarray(index_positions(query.shape[1])) if positions is None else positions
    return *encode(hooks, query, key, positions, inputs), inputs


def _encoded(
    encoding: Encoding, params: Any, query: Array, key: Array, positions: Array, x: Array
) -> tuple[Float[Array, "B T H any"], Float[Array, "B T heads any"]]:
    """What an `encode` hook returns, checked, in the dtype of the queries; unchanged keys are themselves."""
    found = call(encoding, "encode", params, query, key, positions, x)
    (B, T, H, _), G = query.shape, key.shape[2]
    wanted = f"queries [B, T, {H}, K] and keys [B, T, {G}, K] of one K, with B, T {[B, T]}"
    if not isinstance(found, tuple) or len(found) != 2 or any(getattr(one, "ndim", 0) != 4 for one in found):
        raise _wrong(encoding, "encode", found, wanted)
    q, k = found[0].astype(query.dtype), key if found[1] is key else found[1].astype(query.dtype)
    if q.shape[:3] != (B, T, H) or k.shape[:2] != (B, T) or k.shape[2] not in (G, H) or q.shape[3] != k.shape[3]:
        raise _wrong(encoding, "encode", found, wanted)
    return q, k


def _repeated(keys: Float[Array, "B T heads K"], num_heads: int) -> Float[Array, "B T H K"]:
    return jnp.repeat(keys, num_heads // keys.shape[2], axis=2)


def _interleaved(of_members: Sequence[Float[Array, "B T H K"]]) -> Float[Array, "B T H K"]:
    """The keys of query head h from array h modulo the number of arrays."""
    count = len(of_members)
    keys = jnp.stack([one[:, :, m::count] for m, one in enumerate(of_members)], axis=3)
    return keys.reshape(of_members[0].shape)


def position_bias(hooks: Hooks, relative: bool | None = None) -> PositionBias | None:
    """The `bias` hooks as a function of positions; `relative`: only those that are so, or are not."""
    found = [(one, p) for _, one, p in hooks.having("bias") if relative in (None, one.encoding.relative)]
    return PositionBias(tuple(p for _, p in found), tuple(one for one, _ in found)) if found else None


def distance_bias(hooks: Hooks, length: int, num_heads: int) -> Float[Array, "H D"] | None:
    """The relative `bias` hooks as a table by distance, for sequences of `length` tokens."""
    function = position_bias(hooks, relative=True)
    if function is None:
        return None
    distances = jnp.arange(length, dtype=jnp.int32)[None]
    return function.block(distances, jnp.zeros((1, 1), jnp.int32), num_heads)[0, :, :, 0]


def key_bias(hooks: Hooks, inputs: Sequence[Array], num_heads: int) -> Float[Array, "B H S"] | None:
    """The sum of the `key_bias` hooks, float32."""
    total = None
    for n, (encoding, _, heads), params in hooks.having("key_bias"):
        found = call_for_array(encoding, "key_bias", params, inputs[n])
        wanted = (inputs[n].shape[0], num_heads, inputs[n].shape[1])
        if found.shape != wanted:
            raise _wrong(encoding, "key_bias", found, f"[B, H, S], which is {list(wanted)}")
        found = on_heads(found.astype(jnp.float32).swapaxes(0, 1), heads, num_heads).swapaxes(0, 1)
        total = found if total is None else total + found
    return total


def logit_functions(hooks: Hooks, query: Float[Array, "B T H K"]) -> LogitFunctions | None:
    """The `logits` hooks, for queries that are neither encoded nor scaled."""
    found = hooks.having("logits")
    return LogitFunctions(query, tuple(p for _, _, p in found), tuple(one for _, one, _ in found)) if found else None


def sink(hooks: Hooks, num_heads: int) -> Float[Array, " H"] | None:
    """The `sink` hooks as one logit per head."""
    total = None
    for _, (encoding, _, heads), params in hooks.having("sink"):
        found = call_for_array(encoding, "sink", params)
        if found.shape != (num_heads,):
            raise _wrong(encoding, "sink", found, f"[H], which is [{num_heads}]")
        found = jnp.where(chosen_heads(heads, num_heads), found.astype(jnp.float32), MASKED)
        total = found if total is None else jnp.logaddexp(total, found)
    return total


def output(
    hooks: Hooks, inputs: Sequence[Array], out: Float[Array, "B T H K"], value: Float[Array, "B T G K"]
) -> Float[Array, "B T H K"]:
    """The output of attention after all `output` hooks."""
    for n, (encoding, _, heads), params in hooks.having("output"):
        found = call_for_array(encoding, "output", params, inputs[n], out, value)
        if found.shape != out.shape:
            raise _wrong(encoding, "output", found, f"[B, T, H, K], which is {list(out.shape)}")
        found = found.astype(out.dtype)
        out = jnp.where(chosen_heads(heads, out.shape[2])[:, None], found, out)
    return out


@dataclass(frozen=True)
class CachedSizes:
    """What a KV cache holds of a layer beside values: channels and heads of keys, the key bias, and running sums."""

    key_channels: int
    key_heads: int
    key_bias: bool
    sums: tuple[tuple[tuple[int, ...], str], ...]  # the shape of each state, without batch and tokens, and its dtype


def cached_sizes(hooks: tuple[LayerHooks, ...], shape: HeadShape) -> CachedSizes:
    """The sizes that a layer's hooks need of a KV cache; nothing is computed."""
    if not hooks:
        return CachedSizes(shape.head_dim, shape.num_kv_heads, False, ())

    def arrays(params: Any, q: Array, k: Array, x: Array) -> tuple[Array, list[Array], Array | None]:
        bound = Hooks(params, hooks)
        inputs, states = hook_inputs(bound, x)
        _, key = encode(bound, q, k, jnp.zeros((1, T), jnp.int32), inputs)
        return key, states, key_bias(bound, inputs, shape.num_heads)

    H, G, K, D = shape
    T = padded_length(1, context_size())  # the shortest sequence of this mesh
    float32 = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)  # noqa: E731
    params = tuple(
        {name: one.value for name, one in parameter_settings(hook.encoding, shape).items()} for hook in hooks
    )
    key, states, bias = jax.eval_shape(arrays, params, float32(1, T, H, K), float32(1, T, G, K), float32(1, T, D))
    sums = tuple((one.shape[2:], one.dtype.name) for one in states)
    return CachedSizes(key.shape[3], key.shape[2], bias is not None, sums)
