"""Descriptions as people write them: texts, patterns of layers, edits of earlier layers; and their names in tables."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pe_lab.config import field_types, from_dict, kind_name, register_kind, with_descriptions
from pe_lab.errors import ConfigError, UserError, did_you_mean, excerpt
from pe_lab.positional.encodings import NoPE, PartialRope, Rope
from pe_lab.positional.hooks import Encoding
from pe_lab.positional.layers import Bands, Beta, Drop, Layer, Pattern, Rescale, Uniform
from pe_lab.positional.registry import ENCODINGS, registered_name
from pe_lab.positional.scalings import SCALINGS

_ROPE_KEYS = ("base", "fraction")


def parse(text: str) -> Layer:
    """The layer of a text `NAME[:key=value,...][/OPTION...]`.

    NAME is an encoding (rope, partial_rope, nope, alibi, ...), or a scaling (pi, ntk, yarn, ...), which stands for
    RoPE with it: `yarn:factor=2,original_length=1024,base=1e6`. Other encodings name their scaling:
    `partial_rope:fraction=0.25,scaling=yarn,factor=2,original_length=1024`.
    A table is its numbers joined by colons, `longrope:long_factor=1:1.2:4,...`; of one number, `2:`. Options:

      `/window=512`        a sliding window, in tokens
      `/logit_scale=1.2`   a factor on the logits
      `/beta=0.412@1024`   DroPE's 1 + 0.412 ln(n / 1024)
      `/heads=0-3,6:nope`  another encoding for some query heads
      `/with=NAME:key=...` an encoding that acts beside it, such as a learned bias or a temperature; any number of them

    Raises:
      ConfigError: names the text, the part that is not valid, and what is allowed.
    """
    head, *tail = text.strip().split("/")
    options: dict[str, Any] = {}
    edits, extras = [], []
    for item in tail:
        key, _, value = item.partition("=")
        field = "logit_scale" if key == "beta" else key
        if field in options:
            raise ConfigError(f"'{text}': '{item}' comes after another {field}; give one of them.")
        if key == "window" and re.fullmatch("[0-9]{1,10}", value):
            options[field] = int(value)
        elif key == "logit_scale":
            options[field] = _number(value, text, item)
        elif key == "beta" and "@" in value:
            coefficient, _, length = value.partition("@")
            values = {"coefficient": _number(coefficient, text, item), "original_length": _number(length, text, item)}
            options[field] = values
        elif key == "heads" and ":" in value:
            chosen, _, encoding = value.partition(":")
            edits.append({"heads": numbers_and_ranges(chosen, f"'{text}'"), "to": _encoding(encoding, text)})
        elif key == "with" and value:
            extras.append(_encoding(value, text))
        else:
            raise ConfigError(
                f"'{text}': after '/' give window=TOKENS, logit_scale=X, beta=C@LENGTH, heads=0-3:ENCODING or "
                f"with=ENCODING, not '{item}'."
            )
    return _layer({"encoding": _encoding(head, text), "heads": edits, "extras": extras, **options}, text)


def from_json(value: Mapping[str, Any]) -> Layer:
    """The `Layer` that `config.to_json` wrote; `ConfigError` for a kind or a field that this version does not know."""
    return _layer(value, str(dict(value)))


def _layer(value: Mapping[str, Any], text: str) -> Layer:
    try:
        return from_dict(Layer, value, "Layer")
    except UserError as error:
        raise type(error)(f"'{text}': {error}") from None


def _encoding(part: str, text: str) -> dict[str, Any]:
    """The JSON of an encoding from its part of a text."""
    name, _, arguments = part.partition(":")
    values: dict[str, Any] = {}
    types = field_types(ENCODINGS[name]) if name in ENCODINGS else {}
    for item in filter(None, arguments.split(",")):
        key, _, value = item.partition("=")
        if key == "kind":
            raise ConfigError(f"'{text}': the kind is {name}, before the colon; leave '{item}' out.")
        if key in values or key in dict(values.get("settings", ())):
            raise ConfigError(f"'{text}': {key} is given twice; give it once.")
        if "settings" in types and (key not in types or key == "settings"):  # an argument of a function
            values.setdefault("settings", []).append((key, _setting(value)))
        elif key == "scaling" or types.get(key) is str or typing.get_origin(types.get(key)) is Literal:
            values[key] = value
        else:
            values[key] = _number(value, text, item)
    if values.get("scaling") == "none":
        del values["scaling"]
    if name in SCALINGS:
        if "scaling" in values:
            raise ConfigError(
                f"'{text}': {name} is a scaling itself; give rope:scaling={name},... or {name}:... alone."
            )
        values["scaling"], name = name, "rope"
    if name not in ENCODINGS:
        own = "One of your own is registered by the file that defines it: --encodings=FILE.py."
        raise ConfigError(
            f"'{text}': there is no encoding '{name}'. {did_you_mean(name, [*ENCODINGS, *SCALINGS])} {own}"
        )
    if "scaling" not in values or ENCODINGS[name] not in (Rope, PartialRope):
        return {"kind": name, **values}
    scaling = values.pop("scaling")
    if scaling not in SCALINGS:
        raise ConfigError(f"'{text}': there is no scaling '{scaling}'. {did_you_mean(scaling, list(SCALINGS))}")
    own = {key: values.pop(key) for key in _ROPE_KEYS if key in values}
    allowed = [*field_types(SCALINGS[scaling]), *_ROPE_KEYS]
    for key in values:
        if key not in allowed:
            raise ConfigError(
                f"'{text}': {SCALINGS[scaling].__name__} has no key '{key}'. {did_you_mean(key, allowed)}"
            )
    return {"kind": name, **own, "scaling": {"kind": scaling, **values}}


def _setting(value: str) -> Any:
    """A number, true, false or none; else the text itself."""
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


_WORDS = {"true": True, "false": False, "none": None}


def _number(value: str, text: str, item: str) -> Any:
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return [float(one) for one in value.removesuffix(":").split(":")] if ":" in value else float(value)
    except ValueError:
        raise ConfigError(f"'{text}': '{item}' is not key=number.") from None


MOST = 2**14  # layers or heads of a model


def numbers_and_ranges(chosen: str, where: str) -> list[int]:
    """The numbers of a text such as `0-3,6`, all below `MOST`; the inverse of `ranges`."""
    found: list[int] = []
    for part in chosen.split(","):
        numbers_ = re.fullmatch("([0-9]{1,20})(?:-([0-9]{1,20}))?", part)
        first, last = (int(numbers_[1]), int(numbers_[2] or numbers_[1])) if numbers_ else (1, 0)
        if last < first:
            raise ConfigError(f"{where}: '{excerpt(part, 40)}' is not a number or a range such as 0-3.")
        if last >= MOST or len(found) + last - first >= MOST:
            shown = excerpt(part, 40)
            raise ConfigError(f"{where}: '{shown}' is beyond the {MOST:,} layers or heads that a model may have.")
        found.extend(range(first, last + 1))
    return found


# HeadEdit and Beta have no kind: their place and their keys identify them.
_DESCRIPTIONS = {"": Layer, "bands": Bands, "uniform": Uniform, "pattern": Pattern, "drop": Drop, "rescale": Rescale}
for _name, _kind in {**_DESCRIPTIONS, **SCALINGS}.items():
    register_kind(_name, _kind)


def text_of(layers: Sequence[Layer]) -> str:
    """The text that `layers` and `read_with` read as these layers, with all digits.

    Raises:
      ConfigError: a layer with something that has no text, such as a band of a head.
    """
    texts = [_text(layer) for layer in layers]
    return texts[0] if len(set(texts)) == 1 else "+".join(texts)


def _text(layer: Layer) -> str:
    text = _text_of_kind(layer.encoding)
    if layer.window:
        text += f"/window={layer.window}"
    if isinstance(layer.logit_scale, Beta):
        text += f"/beta={layer.logit_scale.coefficient!r}@{layer.logit_scale.original_length}"
    elif layer.logit_scale != 1:
        text += f"/logit_scale={float(layer.logit_scale)!r}"
    text += "".join(f"/heads={ranges(edit.heads)}:{_text_of_kind(edit.to)}" for edit in layer.heads)
    return text + "".join(f"/with={_text_of_kind(extra)}" for extra in layer.extras)


def _text_of_kind(kind: Any) -> str:
    """The text of an encoding, with its scaling: `rope:base=10000.0,scaling=yarn,factor=2.0,original_length=1024`."""
    if type(kind) not in ENCODINGS.values():
        raise ConfigError(f"{kind_name(type(kind))} has no text; describe it as an object, in Python or as JSON.")
    values = {f.name: getattr(kind, f.name) for f in dataclasses.fields(kind) if getattr(kind, f.name) != f.default}
    scaling = values.pop("scaling", None)
    if scaling is not None:
        name = kind_name(type(scaling))
        values |= {"scaling": name} | {f.name: getattr(scaling, f.name) for f in dataclasses.fields(scaling)}
    settings = ",".join(f"{name}={_text_of_value(value)}" for name, value in values.items() if value is not None)
    return f"{kind_name(type(kind))}:{settings}" if settings else kind_name(type(kind))


def _text_of_value(value: Any) -> str:
    if isinstance(value, tuple | list) and value and all(isinstance(one, int | float) for one in value):
        return ":".join(repr(float(one)) for one in value) + (":" if len(value) == 1 else "")
    if not isinstance(value, str | bool | int | float):
        raise ConfigError(f"{value!r} has no text; describe the encoding as an object, in Python or as JSON.")
    return value if isinstance(value, str) else repr(value)


def label(layer: Layer) -> str:
    """A short readable name, such as `rope(base=10000) + yarn(factor=2, original_length=1024) / window 512`."""
    text = _label(layer.encoding)
    if layer.window:
        text += f" / window {layer.window}"
    if isinstance(layer.logit_scale, Beta):
        text += f" / logit scale 1 + {layer.logit_scale.coefficient:g} ln(n / {layer.logit_scale.original_length})"
    elif layer.logit_scale != 1:
        text += f" / logit scale {layer.logit_scale:g}"
    for edit in layer.heads:
        text += f" / heads {ranges(edit.heads)}: {_label(edit.to)}"
    return text + "".join(f" / with {_label(extra)}" for extra in layer.extras)


def label_layers(layers: Sequence[Layer]) -> str:
    """The labels of all layers in one line, equal ones joined: `rope(base=10000) on layers 0-2; nope on layer 3`."""
    equal = ranges_by(map(label, layers))
    if len(equal) == 1:
        return next(iter(equal))
    return "; ".join(f"{text} on layer{'s' * (not at.isdecimal())} {at}" for text, at in equal.items())


def _label(kind: Any) -> str:
    """A description's name with the values that its class does not determine, and its scaling's."""
    name = kind_name(type(kind))
    shown = []
    for f in dataclasses.fields(kind):
        value = getattr(kind, f.name)
        if f.name not in ("scaling", "digest") and (
            f.name == "base" or f.default is dataclasses.MISSING or value != f.default
        ):
            shown.append(f"{f.name}={_short(value)}")
    text = f"{name}({', '.join(shown)})" if shown else name
    scaling = getattr(kind, "scaling", None)
    return text if scaling is None else f"{text} + {_label(scaling)}"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(one, tuple) and len(one) == 2 for one in value):
        return ", ".join(f"{name}={_short(one)}" for name, one in value)
    if isinstance(value, tuple) and len(value) == 1:
        return _short(value[0])
    if isinstance(value, tuple):
        return f"{_short(value[0])} .. {_short(value[-1])} [{len(value)}]" if value else "[]"
    if value is None or isinstance(value, str | bool):
        return str(value)
    # %g rounds to six digits: 1048576 would become 1.04858e+06.
    return f"{value:g}" if float(f"{value:g}") == value else f"{value!r}"


def ranges(numbers_: Sequence[int]) -> str:
    """A short text of a list of numbers, such as `0-3,6`."""
    runs: list[list[int]] = []
    for h in sorted(set(numbers_)):
        if runs and runs[-1][1] == h - 1:
            runs[-1][1] = h
        else:
            runs.append([h, h])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def ranges_by(values: Iterable[Hashable]) -> dict[Any, str]:
    """The places of each distinct value, such as {"rope": "0-2", "nope": "3"}, in the order of the first places."""
    places: dict[Hashable, list[int]] = {}
    for n, value in enumerate(values):
        places.setdefault(value, []).append(n)
    return {value: ranges(at) for value, at in places.items()}


def family(layer: Layer) -> str:
    """The usual name of a model with such layers: RoPE, p-RoPE, Partial RoPE, NoPE or ALiBi."""
    encoding = layer.encoding
    if isinstance(encoding, Rope):
        name = "RoPE" if encoding.fraction == 1 else f"p-RoPE {encoding.fraction:g}"
    else:
        name = encoding.display_name or registered_name(encoding)
    return " + ".join([name, *(extra.display_name or registered_name(extra) for extra in layer.extras)])


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
        layers: `drop(...)`, `rescale(...)`, the texts 'drop' and 'kept', which changes none.
      num_layers: N.
      before: the layers that an edit changes; None if there are none.

    Raises:
      ConfigError: an unknown description, a pattern that does not tile, an edit without layers before it.
    """
    if isinstance(description, str) and description.strip() in ("drop", "kept"):
        description = Drop() if description.strip() == "drop" else Drop(layers=())
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
    period = [_one_layer(item) for item in items]
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


def _one_layer(item: Any) -> Layer:
    item = with_descriptions(item, "The layers") if isinstance(item, Mapping) else item
    if isinstance(item, Layer):
        return item
    if isinstance(item, str):
        return parse(item)
    if isinstance(item, Encoding):
        return Layer(item)
    raise ConfigError(f"{item!r} does not describe a layer; give an encoding, a Layer, or a text like 'rope'.")
