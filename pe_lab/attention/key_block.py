"""Attention of a block of queries to a block of keys: its inputs, its partial result, merging, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from pe_lab.attention.bias import PositionBias, chosen_heads
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.positional import LayerHooks, angles, rotate, rotation_tables
from pe_lab.positional.hooks import call_for_array

Queries = Float[Array, "B T H K"]  # of whole sequences
Keys = Float[Array, "B T G K"]
Values = Float[Array, "B T G V"]  # V is K, but where a hook changes the channels of queries and keys
Outputs = Float[Array, "B T H V"]

MASKED = -1e30  # the logit of an invisible key: finite, so that a block without any visible key has no NaN
RESIDUALS = "attention"  # the name under which rematerialization may keep the output and the logsumexp
FLOOR = -5e29  # the first value of running maxima: above MASKED, so that an invisible key has weight exactly 0


class KeyRotation(NamedTuple):
    """Frequencies in fixed point and gains, for kernels that rotate keys inside; one rotation, G or H.

    Rotations are relative: a kernel may count positions from any origin, and uses the index of a key in its block.
    """

    fixed_freq: UInt32[Array, "rotations R 2"]
    gain: Float[Array, "rotations R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitFunctions:
    """The `logits` hooks of a layer. A pytree: `hooks` are static, `params` are theirs; `query` is neither scaled nor
    rotated."""

    query: Float[Array, "B T H K"]
    params: tuple[Any, ...]
    hooks: tuple[LayerHooks, ...] = field(metadata={"static": True})

    def apply(self, logits: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
        """New logits of these queries; invisible keys stay invisible.

        Raises:
          ConfigError: a hook returned another shape; names its encoding.
        """
        seen, H = logits > FLOOR, logits.shape[1]
        for (encoding, _, heads), params in zip(self.hooks, self.params, strict=True):
            found = call_for_array(encoding, "logits", params, self.query, logits)
            if found.shape != logits.shape:
                raise ConfigError(
                    f"{type(encoding).__name__}.logits returned shape {list(found.shape)}; it must return that of the "
                    f"logits, [B, H, T, S], which is {list(logits.shape)}."
                )
            chosen = chosen_heads(heads, H)[:, None, None]
            logits = jnp.where(chosen & seen, found.astype(jnp.float32), logits)
        return logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """Everything that attention takes beside queries, keys and values. None = absent from the compiled program.

    A pytree: `window` and `chunk` are static, the rest is data.

    Attributes:
      start: [B or 1] the index of the first query, counted from key 0; negative if its keys are later. None: 0.
      used: [B or 1] keys from this index on are ignored, whatever they hold. None: all keys are used.
      slope: [H] ALiBi's penalty per token.
      query_positions, key_positions: ALiBi's distances are differences of these, and `bias` is a function of them;
        None: of the indices.
      query_segments, key_segments: document of each token; a query sees only keys of its own document.
      distance_bias: added to the logit of a query and a key whose indices are d apart: entry min(d, D - 1).
      key_bias: added to all logits of a key.
      bias: added to the logits, a function of positions.
      logit_functions: replace all logits of a query; only for a whole sequence.
      sink: a logit in the denominator of each head's softmax; only for a whole sequence.
      rotation: keys are not rotated yet, and the kernel rotates them by their index; queries are rotated already.
      window: a query sees the last `window` tokens, itself included; None sees all.
      soft_cap: the products x of queries and keys become soft_cap tanh(x / soft_cap), before anything is added.
      chunk: queries and keys per block of chunked attention; other implementations do not read it.
    """

    start: Int[Array, "#B"] | None = None
    used: Int[Array, "#B"] | None = None
    slope: Float[Array, " H"] | None = None
    query_positions: Int[Array, "#B T"] | None = None
    key_positions: Int[Array, "#B S"] | None = None
    query_segments: Int[Array, "#B T"] | None = None
    key_segments: Int[Array, "#B S"] | None = None
    distance_bias: Float[Array, "H D"] | None = None
    key_bias: Float[Array, "#B H S"] | None = None
    bias: PositionBias | None = None
    logit_functions: LogitFunctions | None = None
    sink: Float[Array, " H"] | None = None
    rotation: KeyRotation | None = None
    window: int | None = field(default=None, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    chunk: int = field(default=512, metadata={"static": True})

    def of_tokens(
        self, queries: Callable[[jax.Array], jax.Array], keys: Callable[[jax.Array], jax.Array]
    ) -> AttentionInputs:
        """With `queries` applied to the arrays [B or 1, T, ...] of queries, and `keys` to those of keys."""
        return replace(
            self,
            query_positions=jax.tree.map(queries, self.query_positions),
            key_positions=jax.tree.map(keys, self.key_positions),
            query_segments=jax.tree.map(queries, self.query_segments),
            key_segments=jax.tree.map(keys, self.key_segments),
            key_bias=jax.tree.map(lambda x: keys(x.swapaxes(1, 2)).swapaxes(1, 2), self.key_bias),
        )

    def for_every_sequence(self, count: int) -> AttentionInputs:
        """With arrays of tokens as [B, T, ...], as kernels take them."""

        def whole(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (count, *x.shape[1:]))

        return self.of_tokens(whole, whole)

    def compared(self) -> dict[str, tuple[Int[Array, "#B T"], Int[Array, "#B S"]]]:
        """The arrays of queries and keys that kernels compare: segments, and positions for slopes."""
        positions = (self.query_positions, self.key_positions) if self.slope is not None else (None, None)
        pairs = {"segments": (self.query_segments, self.key_segments), "positions": positions}
        return {
            name: (queries.astype(jnp.int32), keys.astype(jnp.int32))
            for name, (queries, keys) in pairs.items()
            if queries is not None and keys is not None
        }

    def slots(self, count: int, keys: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """`start` and `used` of each of `count` sequences with this many keys."""
        start = 0 if self.start is None else self.start.astype(jnp.int32)
        used = keys if self.used is None else jnp.minimum(self.used, keys)
        return tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (count,)) for x in (start, used))


class PartialAttention(NamedTuple):
    """Attention to some of the keys, with the logsumexp that merging with attention to other keys requires.

    Attributes:
      out: the weighted mean of the values of these keys; 0 where none is visible.
      logsumexp: log of the sum over visible keys of exp(logit), float32; MASKED where none is visible.
    """

    out: Float[Array, "B H T K"]
    logsumexp: Float[Array, "B H T"]


class KeyBlockGradients(NamedTuple):
    """The gradients that come from one block of keys, float32; None for what the inputs do not have.

    Those of queries, keys and values have the shapes of these, the others the shapes in `AttentionInputs`.
    """

    query: Float[Array, "B H T K"]
    key: Float[Array, "B G S K"]
    value: Float[Array, "B G S K"]
    slope: Float[Array, " H"] | None = None
    distance_bias: Float[Array, "H D"] | None = None
    key_bias: Float[Array, "#B H S"] | None = None
    bias: PositionBias | None = None


KeyBlockKernel = Callable[..., PartialAttention]  # `chunked_key_block`, `tpu_key_block` or `gpu_key_block`
# (query, key, value, inputs, logsumexp [B, H, T], inner [B, H, T], d_out [B, H, T, K]) -> gradients, float32.
# Queries are rotated and scaled, keys rotated: inputs have neither a rotation nor functions of logits. The logsumexp is
# of all keys, of which these are a part, and MASKED for queries that see none. d_out is the gradient of the output of
# the whole attention. `inner` is the sum over channels of d_out times that output, minus the gradient of the
# logsumexp: the gradient of a logit is p (d_out . value - inner), with p = exp(logit - logsumexp).
KeyBlockGradient = Callable[..., KeyBlockGradients]


def padded(x: jax.Array, axis: int, multiple: int, mode: str = "constant") -> jax.Array:
    """An array whose axis is padded at its end to a multiple of a block."""
    axis %= x.ndim
    if x.shape[axis] % multiple == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[axis] % multiple if i == axis else 0) for i in range(x.ndim)], mode=mode)


def scaled(query: Float[Array, "*axes"], scale: Float[Array, ""]) -> Float[Array, "*axes"]:
    """Queries times the scale of the logits, multiplied in float32, in their own dtype."""
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def capped(products: Float[Array, "*axes"], soft_cap: float | None) -> Float[Array, "*axes"]:
    """The products of queries and keys under a soft cap (Gemma 2, 2024)."""
    return products if soft_cap is None else soft_cap * jnp.tanh(products / soft_cap)


def check_block(
    num_heads: int, key: jax.Array, value: jax.Array, inputs: AttentionInputs, *, soft_cap: bool = False
) -> int:
    """The number of rotations of keys [L, B, G, S, K] that a kernel computes, 0 for none.

    Args:
      soft_cap: the kernel has soft caps.

    Raises:
      UnsupportedError: a bias that is a function, functions of all logits, or a soft cap.
    """
    if value.shape != key.shape or num_heads % key.shape[2]:
        raise ValueError(
            f"{num_heads} query heads, keys of shape {key.shape} and values of {value.shape} do not go together."
        )
    if inputs.bias is not None or inputs.logit_functions is not None:
        raise UnsupportedError("attention kernel: no function of logits.")
    if inputs.soft_cap is not None and not soft_cap:
        raise UnsupportedError("attention kernel: no soft cap.")
    return 0 if inputs.rotation is None else inputs.rotation.fixed_freq.shape[0]


def heads_of_groups(x: Float[Array, "#B H *axes"], kv_heads: int) -> Float[Array, "#B G M *axes"]:
    """Query heads by their key head; one head stands for all."""
    return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def with_sink(part: PartialAttention, sink: Float[Array, " H"] | None, dtype: jnp.dtype) -> Float[Array, "B H T K"]:
    """The output of attention with a logit per head in the denominator of its softmax."""
    if sink is None:
        return part.out.astype(dtype)
    kept = jax.nn.sigmoid(part.logsumexp - sink.astype(jnp.float32)[:, None])
    return (part.out.astype(jnp.float32) * kept[..., None]).astype(dtype)


def merge(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Attention to all keys from attention to disjoint parts of them (Dao 2023, flash-decoding); `out` in float32."""
    logsumexps = jnp.stack([part.logsumexp for part in parts])
    highest = logsumexps.max(0)
    weights = jnp.exp(logsumexps - highest)
    total = weights.sum(0)
    out = sum(w[..., None] * part.out.astype(jnp.float32) for w, part in zip(weights, parts, strict=True))
    # Where no part has a visible key, all weights are 1 and all outputs 0; the logsumexp must not rise by log(parts).
    logsumexp = jnp.where(highest > FLOOR, highest + jnp.log(total), MASKED)
    return PartialAttention(out / total[..., None], logsumexp)


class OnlineSoftmax(NamedTuple):
    """The state of an online softmax (Milakov & Gimelshein 2018); sums are relative to the highest logit so far."""

    highest: Float[Array, "*queries"]
    total: Float[Array, "*queries"]
    out: Float[Array, "*queries K"]

    def add(
        self, logits: Float[Array, "*queries S"], weighted: Callable[[jax.Array], Float[Array, "*queries K"]]
    ) -> OnlineSoftmax:
        """The state after one more block of keys; `weighted(weights)` is the weighted sum of the block's values."""
        highest = jnp.maximum(self.highest, logits.max(-1))
        weights, shrink = jnp.exp(logits - highest[..., None]), jnp.exp(self.highest - highest)
        update = weighted(weights)
        return OnlineSoftmax(highest, self.total * shrink + weights.sum(-1), self.out * shrink[..., None] + update)


def visible(
    distance: Int[Array, "T S"], inputs: AttentionInputs, used: Bool[Array, " S"] | None = None
) -> Bool[Array, "#B T S"]:
    """Which keys queries see: none that is later, not `used`, out of the window or in another segment."""
    mask = distance >= 0
    if inputs.window is not None:
        mask = mask & (distance < inputs.window)
    mask = mask[None]
    if used is not None:
        mask = mask & used
    if inputs.query_segments is not None and inputs.key_segments is not None:
        mask = mask & (inputs.query_segments[:, :, None] == inputs.key_segments[:, None, :])
    return mask


def masked_logits(
    query: Float[Array, "B G M T K"],
    key: Float[Array, "B G S K"],
    distance: Int[Array, "T S"],
    inputs: AttentionInputs,
    used: Bool[Array, " S"] | None = None,
    bias: Float[Array, "#B H T S"] | None = None,
) -> Float[Array, "B G M T S"]:
    """Float32 logits of a block of queries against a block of keys; MASKED where a key is not visible.

    Args:
      query, key: rotated; queries scaled.
      distance: index of each query minus index of each key.
      inputs: slope, positions, segments, key bias, window and soft cap of these tokens; other fields are not read.
      used: which keys are real; None: all.
      bias: added to the logits.
    """
    logits = jnp.einsum("bgmtk,bgsk->bgmts", query, key, preferred_element_type=jnp.float32)
    logits, G = capped(logits, inputs.soft_cap), key.shape[1]
    if inputs.slope is not None:
        far = distance[None]
        if inputs.query_positions is not None and inputs.key_positions is not None:
            far = inputs.query_positions[:, :, None] - inputs.key_positions[:, None, :]
        logits -= inputs.slope.reshape(*logits.shape[1:3], 1, 1) * far[:, None, None].astype(jnp.float32)
    if bias is not None:
        logits += heads_of_groups(bias, G)
    if inputs.key_bias is not None:
        logits += heads_of_groups(inputs.key_bias, G)[:, :, :, None].astype(jnp.float32)
    return jnp.where(visible(distance, inputs, used)[:, None, None], logits, MASKED)


def block_rotations(rotation: KeyRotation, blocks: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cosine and sine at the start of each block of positions, gain included, and at each position within a block.

    The angle of a position is the sum of both angles, so a kernel computes rotations by the addition theorems, with
    the accuracy of float32 at any position.

    Returns:
      Two arrays [rotations, blocks, R], then two arrays [rotations, size, R].
    """
    gain = rotation.gain[:, None]
    places = jnp.arange(max(blocks, size), dtype=jnp.int32)
    coarse, fine = (
        angles(rotation.fixed_freq, positions[None])[0].swapaxes(0, 1)  # [rotations, positions, R]
        for positions in (places[:blocks] * size, places[:size])
    )
    return jnp.cos(coarse) * gain, jnp.sin(coarse) * gain, jnp.cos(fine), jnp.sin(fine)


class Pair(NamedTuple):
    """A kernel for a block of keys, and the kernel of its gradient; None: it has none."""

    partial: KeyBlockKernel
    gradient: KeyBlockGradient | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S V"],
    inputs: AttentionInputs,
    pair: Pair,
    wide: bool = False,
) -> PartialAttention:
    """`pair.partial`, with gradients of the output and of the logsumexp.

    Queries, keys, values, slopes and biases have gradients; rotations and everything else have none.
    """
    return pair.partial(query, key, value, inputs, wide=wide)


def _forward_rule(query, key, value, inputs, pair, wide):  # noqa: ANN001, ANN202
    out, logsumexp = checkpoint_name(tuple(pair.partial(query, key, value, inputs, wide=wide)), RESIDUALS)
    return PartialAttention(out, logsumexp), (query, key, value, inputs, out, logsumexp)


def _backward_rule(pair, wide, saved, d):  # noqa: ANN001, ANN202
    query, key, value, inputs, out, logsumexp = saved
    if pair.gradient is None:
        raise UnsupportedError("attention: this kernel has no gradient.")
    inner = (d.out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d.logsumexp
    rotated, unrotate, plain = key, None, inputs
    if inputs.rotation is not None:
        # Gradients of rotated keys are rotated back; where the heads of a group rotate differently, they are summed.
        (rotated, value), unrotate = jax.vjp(functools.partial(rotated_keys, inputs=inputs), key, value)
        plain = replace(inputs, rotation=None)
    found = pair.gradient(query, rotated, value, plain, logsumexp, inner, d.out)
    d_key, d_value = found.key.astype(key.dtype), found.value.astype(value.dtype)
    if unrotate is not None:
        d_key, d_value = unrotate((d_key, d_value))
    return found.query.astype(query.dtype), d_key, d_value, gradient_of_inputs(inputs, found)


attend.defvjp(_forward_rule, _backward_rule)


def rotated_keys(
    key: Float[Array, "B G S K"], value: Float[Array, "B G S V"], inputs: AttentionInputs
) -> tuple[Float[Array, "B heads S K"], Float[Array, "B heads S V"]]:
    """Keys rotated by their index, and their values; of H heads where the heads of a group rotate differently."""
    assert inputs.rotation is not None
    positions = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
    cos, sin = rotation_tables(inputs.rotation.fixed_freq, inputs.rotation.gain, positions)
    heads = cos.shape[2]
    if heads not in (1, key.shape[1]):
        key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    return rotate(key.swapaxes(1, 2), cos, sin).swapaxes(1, 2), value


def gradient_of_inputs(inputs: AttentionInputs, found: KeyBlockGradients) -> Any:
    """The cotangents of the inputs: those that a kernel found, and zeros."""

    def no_gradient(x: jax.Array) -> jax.Array | np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros_like(x)
        return np.zeros(x.shape, jax.dtypes.float0)

    learned = {}
    for name in ("slope", "distance_bias", "key_bias", "bias"):
        gradient, given = getattr(found, name), getattr(inputs, name)
        if gradient is not None and given is not None:
            learned[name] = jax.tree.map(lambda d, like: d.astype(like.dtype), gradient, given)
    return replace(jax.tree.map(no_gradient, inputs), **learned)


def whole_sequence(pair: Pair) -> Callable[..., jax.Array]:
    """Attention of whole sequences, [B, T, H, K] as `reference_attention`, by a pair of kernels for a block of keys."""

    def run(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        sink, inputs = inputs.sink, replace(inputs.for_every_sequence(query.shape[0]), sink=None)
        found = attend(q, k, v, inputs, pair)
        return with_sink(found, sink, query.dtype).transpose(0, 2, 1, 3)

    return run
