"""The ways of reading a text longer than a model was trained on, as edits of its layers' descriptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.errors import UserError, did_you_mean
from pe_lab.positional import NTK, PI, DynamicYarn, Layer, NoPE, PartialRope, Rope, Yarn, drop, family
from pe_lab.positional import label as described

# In the order of tables. The first is always possible.
METHODS = ("as trained", "cropped", "PI", "NTK", "YaRN", "beta", "paper beta", "dropped")
ASKED_FOR = ("dropped",)  # measured when named, and not by default
STRETCHES = ("PI", "NTK", "YaRN")
# DroPE's logit scale for its models trained from scratch: beta(s) = 1 + 0.412 ln s (494M parameters, fitted there).
PAPER_COEFFICIENT = 0.412


def parse_methods(text: str) -> tuple[str, ...]:
    """Method names from a comma-separated text, in any capitals; `as-trained` for `as trained`."""
    known = {method.lower().replace(" ", "-"): method for method in METHODS}
    chosen = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name = item.lower().replace(" ", "-").replace("_", "-")
        if name not in known:
            raise UserError(f"--methods: no method is called '{item}'. {did_you_mean(name, list(known))}")
        chosen.append(known[name])
    if not chosen:
        raise UserError(f"--methods is empty. Allowed: {', '.join(known)}.")
    return tuple(dict.fromkeys(chosen))


def model_name(layers: Sequence[Layer], lineage: Sequence[Mapping[str, Any]] = ()) -> str:
    """What the weights are: RoPE, NoPE, DroPE (NoPE whose lineage knows a drop), ALiBi, or a mix."""
    families = list(dict.fromkeys(family(layer) for layer in layers))
    if families == ["NoPE"]:
        # Surgery, and a phase that changes the encoding, write `rope(base=10000) -> nope on layers 0-23`.
        dropped = any("-> nope" in str(ancestor.get("what", "")) for ancestor in lineage)
        return "DroPE" if dropped else "NoPE"
    scalings = dict.fromkeys(_scaling(layer) for layer in layers if _rotates(layer))
    names = [_scaling_name(s) for s in scalings if s is not None]
    return "/".join(families) + (f" ({', '.join(names)})" if names else "")


def methods_of(layers: Sequence[Layer], training_length: int) -> tuple[str, ...]:
    """The methods that make sense for a model.

    Cropping and stretching are for models that rotate. A layer that was stretched already is not stretched
    again, and neither is one whose window never shows it a distance it was not trained on. The logit scale is
    for models without any encoding, and without a scale of their own. `dropped`, the weights of a rotary model read
    without its rotation, shows what a drop costs before anything is recalibrated.
    """
    chosen = ["as trained"]
    if any(_rotates(layer) for layer in layers):
        chosen.append("cropped")
        if any(_stretches(layer, training_length) for layer in layers):
            chosen += STRETCHES
        chosen.append("dropped")
    elif all(isinstance(layer.encoding, NoPE) and layer.logit_scale == 1 for layer in layers):
        chosen += ["beta", "paper beta"]
    return tuple(chosen)


def label(model: str, method: str) -> str:
    """What people call a model read in some way."""
    if method in STRETCHES:
        return f"{model} + {method}"
    return {
        "as trained": model,
        "cropped": f"{model}, cropped context",
        "beta": f"{model}, β",
        "paper beta": f"{model}, paper's β",
        "dropped": f"{model}, dropped and not recalibrated",
    }[method]


def summary(layers: Sequence[Layer]) -> str:
    """The encodings of all layers in words, equal neighbours together: `rope(base=10000) on layers 0-11; nope ...`."""
    spans: list[tuple[str, int, int]] = []
    for n, layer in enumerate(layers):
        text = described(layer)
        if spans and spans[-1][0] == text:
            spans[-1] = (text, spans[-1][1], n)
        else:
            spans.append((text, n, n))
    if len(spans) == 1:
        return spans[0][0]
    return "; ".join(f"{text} on layers {first}-{last}" for text, first, last in spans)


def paper_beta(factor: float) -> float:
    """beta(s) = 1 + c ln s with the paper's c; 1 up to the training length."""
    return 1 + PAPER_COEFFICIENT * math.log(max(factor, 1.0))


def read_with(
    method: str, layers: Sequence[Layer], length: int, training_length: int, beta: float = 1.0
) -> tuple[Layer, ...]:
    """The layers under a method, for texts of `length` tokens.

    Up to the training length every method but `dropped` leaves the model as it is. `cropped` crops the text instead.
    """
    if method == "dropped":
        return drop().apply(layers)
    factor = length / training_length
    if factor <= 1 or method in ("as trained", "cropped"):
        return tuple(layers)
    if method in ("beta", "paper beta"):
        return tuple(dataclasses.replace(layer, logit_scale=layer.scale_at(length) * beta) for layer in layers)
    scaling = {"PI": PI(factor), "NTK": NTK(factor), "YaRN": Yarn(factor, training_length)}[method]
    return tuple(
        dataclasses.replace(layer, encoding=dataclasses.replace(layer.encoding, scaling=scaling))
        if _stretches(layer, training_length)
        else layer
        for layer in layers
    )


def _scaling_name(scaling: Any) -> str:
    name = type(scaling).__name__.replace("Yarn", "YaRN").replace("LongRope", "LongRoPE")
    return name if isinstance(scaling, DynamicYarn) else f"{name} {scaling.factor:g}"


def _scaling(layer: Layer) -> Any:
    return getattr(layer.encoding, "scaling", None)


def _rotates(layer: Layer) -> bool:
    return isinstance(layer.encoding, Rope | PartialRope) and layer.encoding.fraction > 0


def _stretches(layer: Layer, training_length: int) -> bool:
    beyond = layer.window is None or layer.window > training_length
    return _rotates(layer) and _scaling(layer) is None and beyond
