"""The positional encoding of one layer as a description, with its edits of single heads, and edits of all layers."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pe_lab.config import OMIT_DEFAULT
from pe_lab.errors import ConfigError
from pe_lab.positional.encodings import NoPE
from pe_lab.positional.hooks import Encoding, has
from pe_lab.positional.scalings import LARGEST, SCALINGS, CheckedFields, Limits, Scaling, require, stretch


@dataclass(frozen=True)
class Bands(CheckedFields):
    """DoPE-by-parts (eq. 32 to 34): the pairs on one side of a threshold are removed from queries and keys.

    Equation 32 keeps pairs of at most `threshold` radians a position ("slow"); its text, and the aim of the method,
    keep the faster ones ("fast"). The paper's threshold is 2 pi / training length (eq. 33).
    """

    threshold: float
    keep: Literal["slow", "fast"] = "fast"

    limits: ClassVar[Limits] = {
        "threshold": (lambda x: 0 < x <= LARGEST, "give radians per position, such as 2 pi / training length."),
    }


@dataclass(frozen=True)
class Uniform:
    """DoPE-by-all as eq. 35 is printed: queries and keys are zero, and the head's attention is uniform."""


HeadKind = Encoding | Bands | Uniform


@dataclass(frozen=True)
class HeadEdit:
    """Some query heads of a layer, and what their encoding becomes.

    `NoPE()` removes it (the prose of DoPE-by-all), another encoding replaces it, and `Bands` and `Uniform` remove a
    part of it. An encoding that does not stand alone, such as `Gaussian` or a temperature, acts on these heads beside
    it.
    Query heads that share a key head may differ.
    """

    heads: tuple[int, ...]
    to: HeadKind

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(int(h) for h in self.heads))
        require(bool(self.heads), "HeadEdit.heads is empty; name at least one query head.")
        require(
            isinstance(self.to, HeadKind),
            f"HeadEdit.to is {self.to!r}; a head can have an encoding, Bands or Uniform.",
        )


@dataclass(frozen=True)
class Beta(CheckedFields):
    """A logit scale that depends on the length: 1 + `coefficient` * ln(n / L) for n > L tokens, else 1.

    DroPE (App. C.2) fits the coefficient: 0.412 for its model trained from scratch, 0.103 for SmolLM.
    `pe_lab.evaluate --suite=beta` fits it for other models.
    """

    coefficient: float
    original_length: int

    limits: ClassVar[Limits] = {"coefficient": (lambda x: abs(x) <= 1e6, "it must lie in [-1e6, 1e6].")}

    def at(self, length: int | None) -> float:
        """The scale for sequences of `length` tokens; `ConfigError` where a negative coefficient makes it negative."""
        scale = 1 + self.coefficient * math.log(stretch(length, self.original_length))
        require(scale > 0, f"Beta.coefficient {self.coefficient} makes the logit scale {scale:.3g} at {length} tokens.")
        return scale


@dataclass(frozen=True)
class Layer:
    """The positional encoding of one layer.

    Attributes:
      encoding: of all its heads except those in `heads`.
      window: the number of tokens that a query attends to, itself included; None is all. Static: a change recompiles.
      logit_scale: factor on the attention logits, a number or `Beta(...)`.
      heads: edits of single query heads.
      extras: encodings that act on all heads beside `encoding`, in this order: a bias, a temperature, a gated output.
    """

    encoding: Encoding
    window: int | None = None
    logit_scale: float | Beta = 1.0
    heads: tuple[HeadEdit, ...] = field(default=(), metadata=OMIT_DEFAULT)
    extras: tuple[Encoding, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or self.window % 1):
            raise ConfigError(f"Layer.window is {self.window}; give a whole number of tokens from 1, or None.")
        scale = self.logit_scale
        if not isinstance(scale, Beta) and not (isinstance(scale, numbers.Real) and 1e-6 <= scale <= 1e6):
            raise ConfigError(f"Layer.logit_scale is {self.logit_scale}; it must lie in [1e-6, 1e6], or be Beta(...).")
        object.__setattr__(self, "heads", tuple(self.heads))
        object.__setattr__(self, "extras", tuple(self.extras))
        for extra in self.extras:
            require(isinstance(extra, Encoding), f"Layer.extras: {extra!r} is no encoding.")
            own = [hook for hook in ("frequencies", "slopes") if has(extra, hook)]
            require(
                not own,
                f"Layer.extras: {type(extra).__name__} has {' and '.join(own)} of its own, so that it can only be the "
                "layer's encoding. Make the others extras of it.",
            )
        for edit in self.heads:
            require(
                not (isinstance(edit.to, Encoding) and has(edit.to, "embed")),
                f"Layer.heads: {type(edit.to).__name__} is added to the embeddings, which no head has of its own.",
            )
        acting = [one for _, one in self.acting() if has(one, "init")]
        twice = [one for n, one in enumerate(acting) if one in acting[:n]]
        require(not twice, f"Layer: {twice and type(twice[0]).__name__} acts on it twice; name it once.")

    def acting(self, num_heads: int = 0) -> list[tuple[tuple[int, ...], Encoding]]:
        """The encodings of the layer, each with the query heads that it acts on; () is all."""
        own = set(range(num_heads))
        edits = [(edit.heads, edit.to) for edit in self.heads if isinstance(edit.to, Encoding)]
        replaced = any(to.stands_alone for _, to in edits)
        of_heads: list[tuple[tuple[int, ...], Encoding]] = []
        for n, (heads, to) in enumerate(edits):
            later = {h for others, other in edits[n + 1 :] if other.stands_alone for h in others}
            left = tuple(h for h in sorted(set(heads)) if h not in later)
            of_heads.append((left, to.on(left)))
            own -= set(heads) if to.stands_alone else set()
        heads = tuple(sorted(own)) if replaced else ()
        found = [(heads, self.encoding)] if heads or not replaced or not num_heads else []
        return [*found, *((h, to) for h, to in of_heads if h), *(((), extra) for extra in self.extras)]

    def scale_at(self, length: int | None) -> float:
        """The logit scale for sequences of `length` tokens."""
        return self.logit_scale.at(length) if isinstance(self.logit_scale, Beta) else self.logit_scale

    @property
    def follows_length(self) -> bool:
        """Whether the layer's arrays depend on the sequence's length."""
        return isinstance(self.logit_scale, Beta) or any(
            getattr(one, "follows_length", False) for one in (self.encoding, *(edit.to for edit in self.heads))
        )

    @property
    def exact_cache(self) -> bool:
        """Whether decoding with a KV cache equals a pass over the whole sequence."""
        return all(encoding.exact_cache for _, encoding in self.acting())


@dataclass(frozen=True)
class Pattern:
    """Layers that repeat from the first layer up. With `cut`, the last repetition may be incomplete."""

    items: tuple[Any, ...]
    cut: bool = False


@dataclass(frozen=True)
class Drop:
    """DroPE's drop as an edit: the chosen layers (None: all) lose their encoding and head edits, and keep windows.

    `extras`: they lose their extras too.
    """

    layers: tuple[int, ...] | None = None
    extras: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", None if self.layers is None else tuple(self.layers))

    def apply(self, before: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers after the drop; `ConfigError` for a layer that does not exist."""

        def dropped(layer: Layer) -> Layer:
            return dataclasses.replace(layer, encoding=NoPE(), heads=(), extras=() if self.extras else layer.extras)

        return _edit("drop", before, self.layers, dropped)


@dataclass(frozen=True)
class Rescale:
    """An edit that gives the chosen layers (None: all), and their edited heads, another scaling where they rotate."""

    scaling: Scaling
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        names = ", ".join(kind.__name__ for kind in SCALINGS.values())
        require(isinstance(self.scaling, Scaling), f"rescale needs a scaling ({names}), not {self.scaling!r}.")
        object.__setattr__(self, "layers", None if self.layers is None else tuple(self.layers))

    def apply(self, before: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with the scaling; `ConfigError` where none of the chosen ones rotates."""
        after = _edit("rescale", before, self.layers, self._scaled_layer)
        chosen = before if self.layers is None else [before[n] for n in self.layers]
        rotary = any(hasattr(layer.encoding, "scaling") for layer in chosen)
        require(
            rotary or after != tuple(before), "rescale: none of these layers is rotary; there is nothing to rescale."
        )
        return after

    def _scaled_layer(self, layer: Layer) -> Layer:
        heads = tuple(dataclasses.replace(edit, to=self._scaled(edit.to)) for edit in layer.heads)
        return dataclasses.replace(layer, encoding=self._scaled(layer.encoding), heads=heads)

    def _scaled(self, encoding: Any) -> Any:
        return dataclasses.replace(encoding, scaling=self.scaling) if hasattr(encoding, "scaling") else encoding


def _edit(
    what: str, before: Sequence[Layer], chosen: Sequence[int] | None, change: Callable[[Layer], Layer]
) -> tuple[Layer, ...]:
    """`before` with the chosen layers changed; None is all layers."""
    for n in chosen or ():
        if not 0 <= n < len(before):
            raise ConfigError(f"{what}: there is no layer {n}; the model has layers 0 to {len(before) - 1}.")
    return tuple(change(layer) if chosen is None or n in chosen else layer for n, layer in enumerate(before))
