"""Faults of runtimes: their names, what to look at where one is found, and hypotheses, which are edits of a config.

An edit changes the description of the layers, the positions, the length for which encodings are computed, or the order
of the query and key channels. The weights stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from pe_lab.config import ModelConfig
from pe_lab.positional import Encoding, Layer, NoPE, PartialRope, Rope, has
from pe_lab.positional.codec import ranges

_NO_ROPE = "Look at `no_rope_layers`, or at the rule by which the runtime chooses layers without rotation."
_BY_TYPE = (
    "Look at which rope parameters each type of layer gets: `rope_theta` and `rope_local_base_freq`, or "
    "`rope_parameters` by `layer_types`."
)
# What to look at where a fault is found.
ADVICE: dict[str, str] = {
    "base ignored": "Look where the runtime reads the base: transformers 4 and most servers read `rope_theta`, "
    "transformers 5 writes it into `rope_parameters`. Give the config both.",
    "scaling ignored": "Look where the runtime reads the scaling: `rope_scaling` (transformers 4) or `rope_parameters` "
    "(transformers 5), with `rope_type` inside; and whether it knows this kind.",
    "base and scaling ignored": "The runtime finds neither where it looks: give the config the keys of both majors of "
    "transformers, `rope_theta` and `rope_scaling` beside `rope_parameters`.",
    "scaling applied twice": "Look for a second place that scales: positions divided by the factor beside scaled "
    "frequencies, or a converter that writes scaled frequencies and the scaling.",
    "attention factor": "Look at the factor on cos and sin: `attention_factor`, `mscale` and `mscale_all_dim`, and "
    "where the runtime multiplies by it.",
    "YaRN's ramp": "Look at the function that finds the ends of the ramp: its dimension is that of the rotated "
    "channels of a head, not half of it; and at `beta_fast`, `beta_slow` and `truncate`.",
    "query/key permutation": "Look at the converter: `q_proj` and `k_proj` are permuted where one side pairs channels "
    "i and i + K/2, and the other 2i and 2i + 1; keys with the number of key heads.",
    "proportional and partial": "Look at `rope_type` and `partial_rotary_factor`: `proportional` keeps the first "
    "frequencies of the whole head, a partial rotation fits all of them into its first channels.",
    "unrotated layers rotated": _NO_ROPE,
    "rotated layers not rotated": _NO_ROPE,
    "windows off by one": "Look at the mask: a window of W tokens contains the query's own, so that i - j < W; kernels "
    "take W - 1 as the left side.",
    "windows ignored": "Look at `sliding_window`, `use_sliding_window` and `layer_types`.",
    "windows on the wrong layers": "Look at `layer_types` and `sliding_window_pattern`: whether layers count from 0 or "
    "from 1, and which kind comes first.",
    "encodings on the wrong layers": _BY_TYPE,
    "bases exchanged": _BY_TYPE,
    "positions offset": "Look at the positions that the runtime gives to queries, and to the keys of its cache; and "
    "whether it counts them from 0 (OPT's table has two rows before the first).",
    "encoding ignored": "Look at which positional encodings the runtime knows beside rotations: ALiBi, learned tables.",
    "positions in bfloat16": "Look at the dtype of positions before they are multiplied with frequencies: bfloat16 "
    "cannot count past 256.",
    "frequencies in bfloat16": "Look at the dtype of the buffer `inv_freq`: a cast of the whole model rounds it.",
    "length ignored": "Look at the length that the runtime computes the frequencies for, and when it does it anew.",
}


class ChannelOrder(NamedTuple):
    """Another order of query and key channels in the weights of some layers.

    Attributes:
      layers: which.
      query: [H * K], where each channel is taken from; None: unchanged.
      key: [G * K]; None: unchanged.
      norms: whether the scales of the QK-norm are in that order too.
    """

    layers: tuple[int, ...]
    query: tuple[int, ...] | None
    key: tuple[int, ...] | None
    norms: bool = False

    def of(self, leaf: str) -> tuple[int, ...] | None:
        """The order of a leaf of `families.ROTATED`; None: it does not change."""
        if leaf.endswith("_norm.scale") and not self.norms:
            return None
        return self.query if ".query" in leaf else self.key


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

    def reordered(self, orders: Iterable[ChannelOrder]) -> Computation:
        """With more orders of channels."""
        return self._replace(orders=(*self.orders, *orders))


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """What a runtime may do instead of what the config says.

    Attributes:
      fault: a key of `ADVICE`.
      sentence: what the runtime does, with the layers.
      edit: makes its computation of that of the config.
      layers: those that it concerns.
    """

    fault: str
    sentence: str
    edit: Callable[[Computation], Computation]
    layers: tuple[int, ...]

    def then(self, other: Hypothesis, sentence: str = "") -> Hypothesis:
        """Both together."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        sentence = sentence or f"{self.sentence}; and {other.sentence}"
        return Hypothesis(self.fault, sentence, lambda c: other.edit(self.edit(c)), layers)


def rotary(encoding: Encoding) -> bool:
    """Whether an encoding is one of those that have a base and a scaling."""
    return isinstance(encoding, Rope | PartialRope)


def described(encoding: Encoding) -> str:
    """An encoding in a sentence: `base 10,000`, `base 10,000 and Yarn`."""
    if not rotary(encoding):
        return type(encoding).__name__
    return f"base {encoding.base:,.10g}" + (f" and {type(encoding.scaling).__name__}" if encoding.scaling else "")


@dataclass(frozen=True)
class AuditedModel:
    """What a config says of a model, and edits of it.

    Attributes:
      layers: their encodings.
      model: the shape.
    """

    layers: tuple[Layer, ...]
    model: ModelConfig

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
    def acting(self) -> set[Encoding]:
        """All encodings of all layers, those of heads and extras too."""
        return {encoding for layer in self.layers for _, encoding in layer.acting()}

    @property
    def first_token_moves(self) -> bool:
        """Whether faults of positions can change the logits of the first token, which attends to itself alone.

        They can where positions are added to the embeddings, and where a sink competes with its own key.
        """
        return any(has(encoding, "embed") or has(encoding, "sink") for encoding in self.acting)

    @property
    def rotations(self) -> list[Any]:
        """The distinct encodings with a base, in the order of their first layers."""
        return list(dict.fromkeys(self.encodings[n] for n in self.rotated))

    def named(self, layers: Iterable[int]) -> str:
        """`all layers`, `layer 3`, `layers 3,7,11`."""
        chosen = sorted(set(layers))
        if len(chosen) == len(self.layers):
            return "all layers"
        return f"layer{'s' if len(chosen) != 1 else ''} {ranges(chosen)}"

    def say(self, layers: Iterable[int], what: str) -> str:
        """A sentence about layers; `what` begins with `are` or `have`, or has it after a comma."""
        chosen = set(layers)
        if len(chosen) == 1 and len(self.layers) > 1:
            what = f" {what}".replace(" are ", " is ", 1).replace(" have ", " has ", 1)[1:]
        return f"{self.named(chosen)}{'' if what.startswith(',') else ' '}{what}"

    def given(self, fault: str, sentence: str, encodings: Mapping[int, Encoding]) -> Hypothesis:
        """These layers have these encodings; those that have them already are left out."""
        encodings = {n: encoding for n, encoding in encodings.items() if encoding != self.encodings[n]}

        def edit(c: Computation) -> Computation:
            pairs = enumerate(c.layers)
            layers = (dataclasses.replace(one, encoding=encodings.get(n, one.encoding)) for n, one in pairs)
            return c._replace(layers=tuple(layers))

        return Hypothesis(fault, sentence, edit, tuple(sorted(encodings)))

    def changed(self, fault: str, what: str, change: Callable[[Any], Encoding], among: Sequence[int]) -> Hypothesis:
        """The encodings that `change` changes, of the layers among `among`."""
        after = {n: change(self.encodings[n]) for n in among}
        changed = [n for n, encoding in after.items() if encoding != self.encodings[n]]
        return self.given(fault, self.say(changed, what), after)

    def windowed(self, fault: str, sentence: str, windows: Sequence[int | None]) -> Hypothesis:
        """The layers have these windows."""

        def edit(c: Computation) -> Computation:
            pairs = zip(c.layers, windows, strict=True)
            return c._replace(layers=tuple(dataclasses.replace(layer, window=size) for layer, size in pairs))

        changed = tuple(n for n, size in enumerate(self.windows) if size != windows[n])
        return Hypothesis(fault, sentence, edit, changed)
