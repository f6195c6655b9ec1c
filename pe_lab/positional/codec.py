"""Descriptions from text and from JSON, and their names for tables."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections import ChainMap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from pe_lab.config import register_descriptions
from pe_lab.errors import ConfigError, did_you_mean, excerpt
from pe_lab.positional.encodings import PartialRope, Rope
from pe_lab.positional.hooks import call
from pe_lab.positional.layers import HEAD_KINDS, Beta, Drop, HeadEdit, Layer, Pattern, Rescale
from pe_lab.positional.registry import ENCODINGS, registered_name
from pe_lab.positional.scalings import SCALINGS

_ROPE_KEYS = ("base", "fraction")


def parse(text: str) -> Layer:
    """The layer of a text `NAME[:key=value,...][/OPTION...]`.

    NAME is an encoding (rope, partial_rope, nope, alibi, ...), or a scaling (pi, ntk, yarn, ...), which stands for
    RoPE with it: `yarn:factor=2,original_length=1024,base=1e6`. Other encodings name their scaling:
    `partial_rope:fraction=0.25,scaling=yarn,factor=2,original_length=1024`. Options:

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
    return build(Layer, {"encoding": _encoding(head, text), "heads": edits, "extras": extras, **options}, text)


def _encoding(part: str, text: str) -> dict[str, Any]:
    """The JSON of an encoding from its part of a text."""
    name, _, arguments = part.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, arguments.split(",")):
        key, _, value = item.partition("=")
        if key == "kind":
            raise ConfigError(f"'{text}': the kind is {name}, before the colon; leave '{item}' out.")
        if key in values or key in values.get("settings", {}):
            raise ConfigError(f"'{text}': {key} is given twice; give it once.")
        if _is_setting(name, key):
            values.setdefault("settings", {})[key] = _setting(value)
        else:
            values[key] = value if key == "scaling" or _is_word(name, key) else _number(value, text, item)
    if values.get("scaling") == "none":
        del values["scaling"]
    if name in SCALINGS:
        if "scaling" in values:
            raise ConfigError(
                f"'{text}': {name} is a scaling itself; give rope:scaling={name},... or {name}:... alone."
            )
        values["scaling"], name = name, "rope"
    if name not in ENCODINGS:
        raise ConfigError(
            f"'{text}': there is no encoding '{name}'. {did_you_mean(name, [*ENCODINGS, *SCALINGS])} {_YOUR_OWN}"
        )
    if "scaling" not in values or ENCODINGS[name] not in (Rope, PartialRope):
        return {"kind": name, **values}
    scaling = values.pop("scaling")
    if scaling not in SCALINGS:
        raise ConfigError(f"'{text}': there is no scaling '{scaling}'. {did_you_mean(scaling, list(SCALINGS))}")
    own = {key: values.pop(key) for key in _ROPE_KEYS if key in values}
    return {"kind": name, **own, "scaling": {"kind": scaling, **values}}


def _is_word(name: str, key: str) -> bool:
    """Whether a field of an encoding is a word, not a number."""
    fields = dataclasses.fields(ENCODINGS[name]) if name in ENCODINGS else ()
    return any(f.name == key and _declared(f).partition("[")[0] in ("str", "Literal") for f in fields)


def _is_setting(name: str, key: str) -> bool:
    """Whether a key of a text is an argument of a function, not a field of the encoding."""
    fields = {f.name: _declared(f) for f in dataclasses.fields(ENCODINGS[name])} if name in ENCODINGS else {}
    return fields.get("settings") == "Settings" and (key not in fields or key == "settings")


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


def _declared(field: dataclasses.Field[Any]) -> str:
    """The type of a field as it is written, with or without `from __future__ import annotations`."""
    kind = field.type
    return (
        kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
    )


_WORDS = {"true": True, "false": False, "none": None}


def _number(value: str, text: str, item: str) -> Any:
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return float(value)
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


def build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from plain values, each read as the type of its field says."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    ready = {}
    for key, value in values.items():
        if (key, value) == ("kind", kind.__name__):
            continue  # earlier versions wrote it where it need not be
        if key not in fields:
            # A text has the keys of RoPE among those of its scaling.
            allowed = [*fields, *(_ROPE_KEYS if kind in SCALINGS.values() else ())]
            advice = did_you_mean(key, allowed) if allowed else "It takes nothing."
            raise ConfigError(f"'{where}': {kind.__name__} has no '{key}'. {advice}")
        ready[key] = _of_type(_declared(fields[key]), value, where, f"{kind.__name__}.{key}")
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if required:
        raise ConfigError(f"'{where}': {kind.__name__} needs {', '.join(required)}.")
    return call(kind, "", **ready)


_YOUR_OWN = "One of your own is registered by the file that defines it: --encodings=FILE.py."
# By the type of a field: the descriptions that it may hold, and what a list of such items is called.
_DESCRIPTIONS: dict[str, Mapping[str, type]] = {"Encoding": ENCODINGS, "HeadKind": HEAD_KINDS, "Scaling": SCALINGS}
_LISTS = {
    "float": "a list of numbers; a text cannot hold one",
    "int": "a list of whole numbers",
    "Encoding": "a list of encodings, each written {'kind': ...}",
    "HeadEdit": "a list of edits, each written {'heads': [0], 'to': {'kind': ...}}",
    "Any": "a list of layers",
}


def _of_type(declared: str, value: Any, where: str, name: str) -> Any:
    """The value of a field, from plain data. What it refuses to hold is the description's to say."""

    def wrong(needed: str) -> ConfigError:
        return ConfigError(f"'{where}': {name} is {value!r}; it must be {needed}.")

    if value is None and declared.endswith("None"):
        return None
    declared = declared.removesuffix(" | None")
    if declared.startswith("tuple"):
        item = declared.partition("[")[2].partition(",")[0]
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong(_LISTS[item])
        items = tuple(_of_type(item, one, where, name) for one in value)
        if item == "int" and not all(isinstance(one, int) for one in items):
            raise wrong(_LISTS[item])
        return items
    if declared in _DESCRIPTIONS and (isinstance(value, Mapping) or declared != "Scaling"):
        return kind_from_json(value, _DESCRIPTIONS[declared], where)
    if declared == "Settings":
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, Sequence) or not all(isinstance(one, Sequence) and len(one) == 2 for one in pairs):
            raise wrong("arguments by name: [['NAME', value], ...]")
        return tuple((key, one) for key, one in pairs)
    if declared == "HeadEdit":
        if not isinstance(value, Mapping):
            raise wrong(_LISTS[declared])
        return build(HeadEdit, {"heads": (), "to": None, **value}, where)
    if declared == "float | Beta" and isinstance(value, Mapping):
        return build(Beta, value, where)
    if declared == "Any":
        return description_from_json(value) if isinstance(value, Mapping) else value
    if declared == "bool":
        # In a text true and false may be numbers: truncate=0.
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise wrong("true or false (1 or 0)")
    if declared.partition(" ")[0] in ("float", "int"):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise wrong("a number or a Beta's fields" if "Beta" in declared else "a number")
        # 1024.0 becomes 1024; the description refuses a fraction.
        if declared == "int" and not math.isfinite(value):
            raise wrong("a whole number")
        return int(value) if declared == "int" and float(value).is_integer() else value
    return value


def from_json(value: Mapping[str, Any]) -> Layer:
    """The `Layer` that `config.to_json` wrote; `ConfigError` for a kind or a field that this version does not know."""
    return build(Layer, {"encoding": None, **value}, str(dict(value)))


def kind_from_json(value: Any, kinds: Mapping[str, type], where: str) -> Any:
    """The description of one of `kinds`; earlier versions wrote the class's name for the kind."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"'{where}': {value!r} is no 'encoding'; write it as {{'kind': 'rope', ...}}.")
    rest = dict(value)
    written = rest.pop("kind", "")
    found = next((kind for name, kind in kinds.items() if written in (name, kind.__name__)), None)
    if found is None:
        advice = did_you_mean(str(written), [*kinds]) + (f" {_YOUR_OWN}" if "rope" in kinds else "")
        raise ConfigError(f"'{where}': there is no kind '{written}'. {advice}")
    return build(found, rest, where)


def description_from_json(value: Mapping[str, Any]) -> Any:
    """A `Layer`, an encoding, a pattern or an edit from the JSON of `config.to_json`, also of earlier versions."""
    if value.get("kind", "Layer") == "Layer":
        return from_json(value)
    return kind_from_json(value, ChainMap(_EDITS, ENCODINGS), str(dict(value)))


# Layer, HeadEdit and Beta have no kind: their place and their keys identify them.
_EDITS: dict[str, type] = {"pattern": Pattern, "drop": Drop, "rescale": Rescale}
register_descriptions({**HEAD_KINDS, **SCALINGS, **_EDITS}, description_from_json)


def label(layer: Layer) -> str:
    """A short readable name, such as `rope(base=10000) + yarn(factor=2, original_length=1024) / window 512`."""
    text = _name(layer.encoding)
    if layer.window:
        text += f" / window {layer.window}"
    if isinstance(layer.logit_scale, Beta):
        text += f" / logit scale 1 + {layer.logit_scale.coefficient:g} ln(n / {layer.logit_scale.original_length})"
    elif layer.logit_scale != 1:
        text += f" / logit scale {layer.logit_scale:g}"
    for edit in layer.heads:
        text += f" / heads {ranges(edit.heads)}: {_name(edit.to)}"
    return text + "".join(f" / with {_name(extra)}" for extra in layer.extras)


def label_layers(layers: Sequence[Layer]) -> str:
    """The labels of all layers in one line, equal ones joined: `rope(base=10000) on layers 0-2; nope on layer 3`."""
    equal = ranges_by(map(label, layers))
    if len(equal) == 1:
        return next(iter(equal))
    return "; ".join(f"{text} on layer{'s' * (not at.isdecimal())} {at}" for text, at in equal.items())


def _name(kind: Any) -> str:
    """A description's name with the values that its class does not determine, and its scaling's."""
    name = next(name for name, known in {**HEAD_KINDS, **SCALINGS}.items() if known is type(kind))
    shown = []
    for f in dataclasses.fields(kind):
        value = getattr(kind, f.name)
        if f.name not in ("scaling", "digest") and (
            f.name == "base" or f.default is dataclasses.MISSING or value != f.default
        ):
            shown.append(f"{f.name}={_short(value)}")
    text = f"{name}({', '.join(shown)})" if shown else name
    scaling = getattr(kind, "scaling", None)
    return text if scaling is None else f"{text} + {_name(scaling)}"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(one, tuple) and len(one) == 2 for one in value):
        return ", ".join(f"{name}={_short(one)}" for name, one in value)
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
