"""The encodings of all layers of a model: patterns, the papers' arrangements, and edits of earlier layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.config import with_descriptions
from pe_lab.errors import ConfigError
from pe_lab.positional.codec import parse
from pe_lab.positional.encodings import NoPE, Rope
from pe_lab.positional.hooks import Encoding
from pe_lab.positional.layers import Beta, Drop, Layer, Pattern, Rescale
from pe_lab.positional.scalings import SCALINGS


def pattern(items: Sequence[Any], cut: bool = False) -> Pattern:
    """A pattern such as `pattern(['rope/window=512'] * 3 + ['nope'])`; items as in `layers`."""
    return Pattern(tuple(items), cut)


def drop(layers: Sequence[int] | None = None, extras: bool = False) -> Drop:
    """For a phase's `positional`: the layers of the phase before without their encoding; None is all layers.

    `extras`: without their extras too.
    """
    return Drop(None if layers is None else tuple(layers), extras)


def rescale(scaling: Any, layers: Sequence[int] | None = None) -> Rescale:
    """For a phase's `positional`: the layers of the phase before with another scaling; None is all layers."""
    return Rescale(scaling, None if layers is None else tuple(layers))


def rnope_swa(window: int, base: float = 10000.0) -> Pattern:
    """RNoPE-SWA (Yang et al. 2025, Cohere 2): three rotary layers with a sliding window to one full NoPE layer.

    Layer i is the full one iff (i + 1) % 4 == 0. A window of the training length or more has no effect.
    """
    return Pattern((*[Layer(Rope(base), window)] * 3, Layer(NoPE())), cut=True)


def smollm3(base: float = 5_000_000.0) -> Pattern:
    """SmolLM3: every fourth layer has no encoding; no windows."""
    return Pattern((*[Layer(Rope(base))] * 3, Layer(NoPE())), cut=True)


def swan(window: int, original_length: int, coefficient: float = 0.0, base: float = 10000.0) -> Pattern:
    """SWAN (Puvvada et al. 2025): a full NoPE layer, then three rotary layers with a sliding window.

    The logits of the full layers are multiplied by 1 + coefficient ln(n / L) for sequences of n > L tokens. The paper
    fits its curve to a trained model, so the coefficient has to be fitted (see `Beta`); 0 is no scaling.
    """
    scale = Beta(coefficient, original_length) if coefficient else 1.0
    return Pattern((Layer(NoPE(), logit_scale=scale), *[Layer(Rope(base), window)] * 3), cut=True)


def layers(description: Any, num_layers: int, before: Sequence[Layer] | None = None) -> tuple[Layer, ...]:
    """One `Layer` for each of N layers, from the description in a config.

    Args:
      description: an encoding, a `Layer`, a text (see `parse`), the JSON of one, a sequence of these (or texts joined
        by `+`), which is repeated as a pattern and whose length must divide N, `pattern(...)`, or an edit of earlier
        layers: `drop(...)`, `rescale(...)`, the text 'drop'.
      num_layers: N.
      before: the layers that an edit changes; None if there are none.

    Raises:
      ConfigError: an unknown description, a pattern that does not tile, an edit without layers before it.
    """
    if isinstance(description, str) and description.strip() == "drop":
        description = Drop()
    if isinstance(description, Drop | Rescale):
        if before is None:
            raise ConfigError(
                f"{type(description).__name__.lower()}(...) edits the layers of the phase or checkpoint before, and "
                "there is none. Give this phase its own encodings, or an init_from whose checkpoint exists."
            )
        if len(before) != num_layers:
            raise ConfigError(f"An edit of {len(before)} layers cannot make {num_layers}: the model has another depth.")
        return description.apply(before)
    if isinstance(description, str):
        description = _split(description)
    if not isinstance(description, Pattern):
        description = Pattern(tuple(description) if isinstance(description, Sequence) else (description,))
    items, cut = description.items, description.cut
    if not items or (num_layers % len(items) and not cut):
        raise ConfigError(
            f"A pattern of {len(items)} layers does not tile {num_layers} layers; its length must divide, or use "
            "pattern([...], cut=True)."
        )
    period = [_layer(item) for item in items]
    return tuple((period * -(-num_layers // len(period)))[:num_layers])


def read_with(description: Any, before: Sequence[Layer], original_length: int) -> tuple[Layer, ...]:
    """The layers to apply to existing weights: as `layers`, except that a scaling rescales `before`.

    `yarn:factor=4` scales the rotation of `before`, with its base and with `original_length` as the length to stretch
    from. As an encoding of its own it would have the default base instead of the weights' base. Alone it scales all
    layers that rotate, and their edited heads; in a pattern, or followed by a slash, the layers it stands for.
    There the window, the logit scale and the heads are those of the text, as for every item of a pattern.
    `before` are the layers that the weights were trained with, in windows of `original_length` tokens.

    Raises:
      ConfigError: as `layers`; a scaling where no layer, or the layer of the pattern, rotates.
    """
    if isinstance(description, list | tuple) and all(isinstance(item, str) for item in description):
        description = "+".join(description)
    if not isinstance(description, str):
        return layers(description, len(before), before)
    texts = [_with_length(text, original_length) for text in _split(description)]
    if len(texts) == 1 and "/" not in description and _is_scaling(texts[0]):
        return Rescale(parse(texts[0]).encoding.scaling).apply(before)
    after = list(layers("+".join(texts), len(before), before))
    for n, layer in enumerate(after):
        text = texts[n % len(texts)]
        if not _is_scaling(text):
            continue
        if not hasattr(before[n].encoding, "scaling"):
            raise ConfigError(f"'{text}': layer {n} of these weights does not rotate; there is nothing to rescale.")
        encoding = dataclasses.replace(before[n].encoding, scaling=layer.encoding.scaling)
        after[n] = dataclasses.replace(layer, encoding=encoding)
    return tuple(after)


def _is_scaling(text: str) -> bool:
    """Whether a text such as `yarn:factor=4/window=512` names a scaling and no rotation of its own."""
    name, _, arguments = text.partition("/")[0].strip().partition(":")
    return name in SCALINGS and not {"base", "fraction"} & {item.partition("=")[0] for item in arguments.split(",")}


def _with_length(text: str, original_length: int) -> str:
    """The text of a scaling with the length to stretch from, where it leaves that out."""
    if not _is_scaling(text):
        return text
    head, slash, rest = text.partition("/")
    name, _, arguments = head.strip().partition(":")
    keys = {item.partition("=")[0] for item in arguments.split(",")}
    if "original_length" in keys or "original_length" not in {f.name for f in dataclasses.fields(SCALINGS[name])}:
        return text
    return f"{name}:{','.join(filter(None, [arguments, f'original_length={original_length}']))}{slash}{rest}"


def _split(text: str) -> list[str]:
    """The texts of a pattern that `+` joins; the sign of an exponent (1e+4) joins nothing."""
    return re.split(r"\+(?=\s*[A-Za-z])", text)


def _layer(item: Any) -> Layer:
    item = with_descriptions(item, "The layers") if isinstance(item, Mapping) else item
    if isinstance(item, Layer):
        return item
    if isinstance(item, str):
        return parse(item)
    if isinstance(item, Encoding):
        return Layer(item)
    raise ConfigError(f"{item!r} does not describe a layer; give an encoding, a Layer, or a text like 'rope'.")
