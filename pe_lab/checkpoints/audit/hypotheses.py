"""Hypotheses: what a runtime may compute instead of what a config says, as edits of it on the same weights.

An edit changes the layers, the positions, the length for which encodings are computed, or the order of the query and
key channels. `faults.py` is the list of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.checkpoints.families.tensors import ROTATED
from pe_lab.config import ModelConfig
from pe_lab.model.shape import layer_heads, stacks
from pe_lab.positional import Encoding, Layer, LayerHeads, NoPE, PartialRope, Rope, Scaling, frequencies, has, rotate
from pe_lab.positional.codec import ranges
from pe_lab.positional.hooks import Keys, Params, Positions, Queries
from pe_lab.positional.scalings import Scaled


class ChannelOrder(NamedTuple):
    """Another order of query and key channels in the weights of some layers.

    Attributes:
      layers: which.
      query: [H * K], where each channel is taken from; None: unchanged.
      key: [G * K]; None: unchanged.
      norms: whether the scales of the QK-norm are in that order too.
      out: [H * K], of the inputs of the output projection, where values are keys, but are not in that order; or None.
    """

    layers: tuple[int, ...]
    query: tuple[int, ...] | None
    key: tuple[int, ...] | None
    norms: bool = False
    out: tuple[int, ...] | None = None

    def reordered(self, name: str, leaf: Array, chosen: Int[np.ndarray, " N"]) -> Array:
        """A leaf of layers, of which those at the places `chosen` have its channels in this order."""
        if name == "attention.out":  # [N, H, K, D]
            order, flat = self.out, jnp.moveaxis(leaf, -1, 1)
        elif name not in ROTATED or (name.endswith("_norm.scale") and not self.norms):
            return leaf
        else:  # [N, D, H, K], [N, H, K], or the scales [N, K] of a norm per head
            order, flat = self.query if ".query" in name else self.key, leaf
        if order is None:
            return leaf
        shape = flat.shape
        flat = flat.reshape(*shape[:-2], -1) if leaf.ndim > 2 else flat
        found = flat.at[chosen].set(flat[chosen][..., np.array(order)[: flat.shape[-1]]]).reshape(shape)
        return jnp.moveaxis(found, 1, -1) if name == "attention.out" else found


class Computation(NamedTuple):
    """What a runtime computes from the weights, as far as positions go.

    Attributes:
      positions: of the tokens.
      length: of the sequence, for encodings that depend on it; None: the training length.
      orders: applied to the channels, one after the other.
    """

    layers: tuple[Layer, ...]
    positions: Int[np.ndarray, " T"]
    length: int | None
    orders: tuple[ChannelOrder, ...] = ()


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """What a runtime may do instead of what the config says.

    Attributes:
      sentence: what it does, with the layers.
      layers: those that it concerns; none: nothing changes.
      edit: makes its computation of that of the config.
      some: the same of some of these layers, if single layers may have the fault.
      faults: names in `faults.FAULTS`; more than one for hypotheses together.
    """

    sentence: str
    layers: tuple[int, ...]
    edit: Callable[[Computation], Computation]
    some: Callable[[Sequence[int]], Hypothesis] | None = None
    faults: tuple[str, ...] = ()

    def then(self, other: Hypothesis, sentence: str = "") -> Hypothesis:
        """Both together."""
        return Hypothesis(
            sentence or f"{self.sentence}; and {other.sentence}",
            tuple(sorted({*self.layers, *other.layers})),
            lambda c: other.edit(self.edit(c)),
            faults=(*self.faults, *(one for one in other.faults if one not in self.faults)),
        )

    def of(self, fault: str) -> Hypothesis:
        """This hypothesis, of a fault."""
        some = None if self.some is None else lambda chosen: self.some(chosen).of(fault)
        return dataclasses.replace(self, faults=(fault,), some=some)


def rotary(encoding: Encoding) -> bool:
    """Whether an encoding is one of those that have a base and a scaling."""
    return isinstance(encoding, Rope | PartialRope)


@dataclass(frozen=True)
class AuditedModel:
    """What a config says of a model, and edits of it.

    Attributes:
      layers: their encodings and windows.
      model: the shape.
      begins: the token at which the error of the runtime begins, if that is known.
    """

    layers: tuple[Layer, ...]
    model: ModelConfig
    begins: int | None = None

    @property
    def every(self) -> range:
        """All layers."""
        return range(len(self.layers))

    @functools.cached_property
    def heads(self) -> tuple[LayerHeads, ...]:
        """Of every layer."""
        same = LayerHeads(self.model.kv_heads, self.model.head_dim)
        return layer_heads(self.model) or (same,) * len(self.layers)

    @property
    def values_are_keys(self) -> set[int]:
        """The layers whose values are their keys."""
        return {n for stack in stacks(self.model) if stack.config.values_are_keys for n in stack.layers}

    @property
    def encodings(self) -> list[Any]:
        return [layer.encoding for layer in self.layers]

    @property
    def windows(self) -> list[int | None]:
        return [layer.window for layer in self.layers]

    @property
    def rotated(self) -> list[int]:
        """The layers with a base."""
        return [n for n, encoding in enumerate(self.encodings) if rotary(encoding)]

    @property
    def bare(self) -> list[int]:
        """The layers without encoding."""
        return [n for n, encoding in enumerate(self.encodings) if isinstance(encoding, NoPE)]

    @property
    def rotations(self) -> list[Any]:
        """The distinct encodings with a base, in the order of their first layers."""
        return list(dict.fromkeys(self.encodings[n] for n in self.rotated))

    @property
    def acting(self) -> set[Encoding]:
        """All encodings of all layers, those of heads and extras too."""
        return {encoding for layer in self.layers for _, encoding in layer.acting()}

    @property
    def first_token_moves(self) -> bool:
        """Whether faults of positions can change the logits of the first token, which attends to itself alone.

        They can where positions are added to the embeddings, where a sink competes with its own key, and where values
        are keys, whose channels may be permuted.
        """
        of_encodings = any(has(encoding, "embed") or has(encoding, "sink") for encoding in self.acting)
        return of_encodings or bool(self.values_are_keys)

    def say(self, layers: Iterable[int], what: str) -> str:
        """A sentence: `all layers`, `layer 3` or `layers 3,7,11`, and what they are or have."""
        chosen = sorted(set(layers))
        named = "all layers" if len(chosen) == len(self.layers) else f"layers {ranges(chosen)}"
        if len(chosen) == 1 < len(self.layers):
            named = f"layer {chosen[0]}"
            what = re.sub(r"\b(are|have)\b", lambda plural: {"are": "is", "have": "has"}[plural.group()], what)
        return f"{named}{'' if what.startswith(',') else ' '}{what}"

    def edited(
        self, what: str, change: Callable[[int, Layer], Layer], among: Iterable[int], some: bool = False
    ) -> Hypothesis:
        """These layers are changed; those that this leaves as they are, are left out.

        `what` goes on from the names of the layers; `some`: some of them may have the fault, and others not.
        """
        changed = tuple(n for n in among if change(n, self.layers[n]) != self.layers[n])

        def edit(c: Computation) -> Computation:
            return c._replace(layers=tuple(change(n, one) if n in changed else one for n, one in enumerate(c.layers)))

        part = (lambda chosen: self.edited(what, change, chosen)) if some else None
        return Hypothesis(self.say(changed, what), changed, edit, part)

    def given(self, what: str, encodings: Mapping[int, Encoding], some: bool = False) -> Hypothesis:
        """Layers have these encodings."""
        return self.edited(what, lambda n, one: dataclasses.replace(one, encoding=encodings[n]), encodings, some)

    def rotating(self, what: str, change: Callable[[Any], Encoding], some: bool = False) -> Hypothesis:
        """The encodings of the layers with a base are changed."""
        return self.edited(
            what,
            lambda n, one: dataclasses.replace(one, encoding=change(one.encoding)) if rotary(one.encoding) else one,
            self.rotated,
            some,
        )

    def scaled(
        self,
        what: str,
        change: Callable[[Any], Scaling | None],
        when: Callable[[Any], bool] = lambda scaling: True,
        some: bool = False,
    ) -> Hypothesis:
        """The scalings that `when` is true of are changed."""

        def changed(e: Any) -> Encoding:
            return dataclasses.replace(e, scaling=change(e.scaling)) if e.scaling and when(e.scaling) else e

        return self.rotating(what, changed, some)

    def windowed(self, what: str, windows: Sequence[int | None], some: bool = False) -> Hypothesis:
        """The layers have these windows."""
        return self.edited(what, lambda n, one: dataclasses.replace(one, window=windows[n]), self.every, some)

    def reordered(self, sentence: str, orders: Mapping[int, Int[np.ndarray, " K"]], sides: Sequence[str]) -> Hypothesis:
        """The channels of each head are in the order of its layer; `sides` are of query, key, norm and value.

        `value` counts where values are keys.
        """

        def flat(side: str, heads: int, order: Sequence[int]) -> tuple[int, ...] | None:
            channels = len(order) * np.arange(heads)[:, None] + np.array(order)
            return tuple(channels.ravel().tolist()) if side in sides else None

        found: dict[ChannelOrder, list[int]] = {}
        for n, one in orders.items():
            order, apart = one.tolist(), n in self.values_are_keys and "value" not in sides
            query, key = flat("query", self.model.heads, order), flat("key", self.heads[n].num_kv_heads, order)
            out = flat("key", self.model.heads, order) if apart else None
            found.setdefault(ChannelOrder((), query, key, "norm" in sides, out), []).append(n)
        same = [order._replace(layers=tuple(layers)) for order, layers in found.items()]
        return Hypothesis(sentence, tuple(orders), lambda c: c._replace(orders=(*c.orders, *same)))


# Descriptions of what no description of a sound model says. They are for the audit alone: none is registered, so that
# no recipe and no checkpoint can name one.


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Float64 numbers, rounded to bfloat16."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


@dataclass(frozen=True)
class Misapplied(Scaling):
    """A scaling as a faulty runtime applies it.

    Attributes:
      inner: the scaling; None: there is none.
      how: makes the runtime's frequencies and factor on cos and sin of the unscaled frequencies, the scaled ones, and
        the factor.
    """

    inner: Scaling | None
    how: Callable[[np.ndarray, np.ndarray, float], Scaled]

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        return self.inner is not None and self.inner.dynamic

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        """See `Scaling`."""
        scaled = (inv_freq, 1.0) if self.inner is None else self.inner.scale(inv_freq, base, dim, length)
        return self.how(inv_freq, *scaled)


@dataclass(frozen=True)
class HalfRamp(Scaling):
    """YaRN with a ramp that is computed for half of the dimensions."""

    inner: Any  # Yarn

    def scale(self, inv_freq: np.ndarray, base: float, dim: int, length: int | None) -> Scaled:
        """See `Scaling`."""
        low, high = self.inner.ramp_bounds(base, dim // 2)
        slow = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)
        return inv_freq * (1 - slow + slow / self.inner.factor), self.inner.scale(inv_freq, base, dim, length)[1]


def _rotated(
    x: Float[Array, "B T heads K"], angle: Float[Array, "#B T R"], gain: np.ndarray
) -> Float[Array, "B T heads K"]:
    cos, sin = jnp.cos(angle) * gain, jnp.sin(angle) * gain
    return rotate(x, cos[:, :, None], sin[:, :, None])


@dataclass(frozen=True)
class QueriesLater(Encoding):
    """Beside a rotation: queries are rotated as if they stood `tokens` positions after the key of their own token.

    `encoding` and `length` are of the layer's rotation.
    """

    encoding: Encoding
    tokens: int
    length: int | None

    stands_alone = False

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Array) -> tuple[Queries, Keys]:
        """See `Encoding`: the rotation of the layer, which follows, adds its angle to this one."""
        inv_freq, _ = frequencies(self.encoding, q.shape[-1], self.length)
        angle = jnp.broadcast_to(jnp.asarray(self.tokens * inv_freq, jnp.float32), (1, q.shape[1], len(inv_freq)))
        return _rotated(q, angle, np.ones(len(inv_freq), np.float32)), k


@dataclass(frozen=True)
class KeysOfAnother(Encoding):
    """A rotation of queries, and the one that keys have in the layer that they come from."""

    query: Encoding
    key: Encoding
    length: int | None

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Array) -> tuple[Queries, Keys]:
        """See `Encoding`."""

        def by(encoding: Encoding, x: Array) -> Array:
            inv_freq, gain = (one.astype(np.float32) for one in frequencies(encoding, x.shape[-1], self.length))
            return _rotated(x, positions.astype(jnp.float32)[..., None] * inv_freq, gain)

        return by(self.query, q), by(self.key, k)


@dataclass(frozen=True)
class AnglesInBfloat16(Encoding):
    """A rotation whose positions, frequencies and their products are rounded to bfloat16."""

    encoding: Encoding
    length: int | None

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Array) -> tuple[Queries, Keys]:
        """See `Encoding`."""
        inv_freq, gain = frequencies(self.encoding, q.shape[-1], self.length)

        def rounded(a: Array) -> Array:  # XLA may leave out a conversion there and back, but not this
            return jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)

        at = rounded(positions.astype(jnp.float32))[..., None]
        angle = rounded(at * rounded(jnp.asarray(inv_freq, jnp.float32)))
        gain = gain.astype(np.float32)
        return _rotated(q, angle, gain), _rotated(k, angle, gain)
