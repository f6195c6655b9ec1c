"""Layers as texts a person writes, as JSON that reads back, and as names a person reads."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.errors import UserError, did_you_mean
from pe_lab.positional.encodings import ENCODINGS, Alibi, NoPE, NotebookBias, NotebookYarn, PartialRope, Rope
from pe_lab.positional.heads import HEAD_KINDS, HeadEdit
from pe_lab.positional.layers import Beta, Layer
from pe_lab.positional.scalings import SCALINGS

_ROPE_KEYS = ("base", "fraction")


def parse(text: str) -> Layer:
    """Reads a layer from a text: `NAME[:key=value,...][/OPTION...]`.

    NAME is an encoding (rope, partial_rope, nope, alibi, ...), or a scaling (pi, ntk, yarn, ...), which means RoPE
    under it: `yarn:factor=2,original_length=1024,base=1e6`. For another encoding under a scaling say
    `partial_rope:fraction=0.25,scaling=yarn,factor=2,original_length=1024`. Options:

      `/window=512`        a sliding window, in tokens
      `/logit_scale=1.2`   a factor on the logits
      `/beta=0.412@1024`   DroPE's 1 + 0.412 ln(n / 1024)
      `/heads=0-3,6:nope`  another encoding for some query heads

    Raises:
      UserError: naming the text, the part of it that cannot be read, and what is allowed.
    """
    head, *tail = text.strip().split("/")
    options: dict[str, Any] = {}
    edits = []
    for item in tail:
        key, _, value = item.partition("=")
        field = {"beta": "logit_scale"}.get(key, key)
        if field in options:
            raise UserError(f"'{text}': '{item}' comes after another {field}; say one of them.")
        if key == "window" and value.isdecimal():
            options["window"] = int(value)
        elif key == "logit_scale":
            options["logit_scale"] = _of_type("float", _number(value, text, item), f"'{text}': logit_scale")
        elif key == "beta" and "@" in value:
            coefficient, _, length = value.partition("@")
            numbers_ = {"coefficient": _number(coefficient, text, item), "original_length": _number(length, text, item)}
            options["logit_scale"] = _build(Beta, numbers_, text)
        elif key == "heads" and ":" in value:
            chosen, _, encoding = value.partition(":")
            edits.append(HeadEdit(tuple(_numbers(chosen, text)), _encoding(encoding, text)))
        else:
            raise UserError(
                f"'{text}': after '/' stands window=TOKENS, logit_scale=X, beta=C@LENGTH or heads=0-3:ENCODING, not "
                f"'{item}'."
            )
    return Layer(_encoding(head, text), heads=tuple(edits), **options)


def _encoding(part: str, text: str) -> Any:
    name, _, arguments = part.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, arguments.split(",")):
        key, _, value = item.partition("=")
        if key in values:
            raise UserError(f"'{text}': {key} is said twice; say it once.")
        values[key] = value if key == "scaling" else _number(value, text, item)
    if values.get("scaling") == "none":
        del values["scaling"]
    if name in SCALINGS:
        if "scaling" in values:
            raise UserError(f"'{text}': {name} is a scaling itself; say rope:scaling={name},... or {name}:... alone.")
        values["scaling"], name = name, "rope"
    if name not in ENCODINGS:
        raise UserError(f"'{text}': no encoding is called '{name}'. {did_you_mean(name, [*ENCODINGS, *SCALINGS])}")
    kind = ENCODINGS[name]
    if "scaling" in values and kind in (Rope, PartialRope):
        scaling = values.pop("scaling")
        if scaling not in SCALINGS:
            raise UserError(f"'{text}': no scaling is called '{scaling}'. {did_you_mean(scaling, list(SCALINGS))}")
        rope = {k: values.pop(k) for k in _ROPE_KEYS if k in values}
        return kind(**rope, scaling=_build(SCALINGS[scaling], values, text, also=_ROPE_KEYS))
    return _build(kind, values, text)


_WORDS = {"true": True, "false": False, "none": None}


def _number(value: str, text: str, item: str) -> Any:
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return float(value)
    except ValueError:
        raise UserError(f"'{text}': '{item}' is not key=number.") from None


def _numbers(chosen: str, text: str) -> list[int]:
    """`0-3,6` as a list."""
    found: list[int] = []
    for part in chosen.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise UserError(f"'{text}': '{part}' is not a number or a range such as 0-3.")
        found.extend(range(int(first), int(last) + 1))
    return found


def _build(kind: type, values: Mapping[str, Any], where: str, also: Sequence[str] = ()) -> Any:
    """A description from plain values, each checked against the type its field declares."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    ready = {}
    for key, value in values.items():
        if key not in fields:
            allowed = [*fields, *also]
            advice = did_you_mean(key, allowed) if allowed else "It takes nothing."
            raise UserError(f"'{where}': {kind.__name__} has no '{key}'. {advice}")
        ready[key] = _of_type(str(fields[key].type), value, f"'{where}': {kind.__name__}.{key}")
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if required:
        raise UserError(f"'{where}': {kind.__name__} needs {', '.join(required)}.")
    return kind(**ready)


def _of_type(declared: str, value: Any, where: str) -> Any:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if declared == "bool":
        # A text has numbers only: truncate=0.
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise UserError(f"{where} is {value!r}; it must be true or false (1 or 0).")
    if declared.startswith("tuple"):
        if isinstance(value, Sequence) and not isinstance(value, str):
            item = declared.partition("[")[2].partition(",")[0]
            return tuple(_of_type(item, x, where) for x in value)
        raise UserError(f"{where} is {value!r}; it must be a list of numbers, which only an object can hold.")
    if declared in ("float", "int", "float | None"):
        if value is None and declared.endswith("None"):
            return None
        if not number:
            raise UserError(f"{where} is {value!r}; it must be a number.")
        # 1024.0 becomes 1024; what is no whole number stays as it is, for the description to refuse.
        return int(value) if declared == "int" and float(value).is_integer() else value
    return value


def to_json(layer: Layer) -> dict[str, Any]:
    """A `Layer` as plain JSON, read back by `from_json`."""
    scale = layer.logit_scale
    value: dict[str, Any] = {
        "encoding": _tagged(layer.encoding),
        "window": layer.window,
        "logit_scale": dataclasses.asdict(scale) if isinstance(scale, Beta) else scale,
    }
    if layer.heads:
        value["heads"] = [{"heads": list(edit.heads), "to": _tagged(edit.to)} for edit in layer.heads]
    return value


def from_json(value: Mapping[str, Any]) -> Layer:
    """The `Layer` that `to_json` wrote; `UserError` for a kind or a field this version does not know."""
    where = str(dict(value))
    _check_keys(value, [f.name for f in dataclasses.fields(Layer)], where, "Layer")
    scale = value.get("logit_scale", 1.0)
    if isinstance(scale, Mapping):
        scale = _build(Beta, scale, where)
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise UserError(f"'{where}': logit_scale is {scale!r}; it must be a number or a Beta's fields.")
    window = value.get("window")
    if window is not None and not _is_whole(window):
        raise UserError(f"'{where}': window is {window!r}; it must be a whole number of tokens, or null.")
    heads = value.get("heads") or []
    if not isinstance(heads, Sequence) or isinstance(heads, str):
        raise UserError(f"'{where}': heads is {heads!r}; it must be a list of edits.")
    edits = tuple(_edit_from_json(edit, where) for edit in heads)
    return Layer(_untagged(value.get("encoding"), ENCODINGS, where), window, scale, edits)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _edit_from_json(edit: Any, where: str) -> HeadEdit:
    if not isinstance(edit, Mapping):
        raise UserError(f"'{where}': heads holds {edit!r}; an edit is written {{'heads': [0], 'to': {{'kind': ...}}}}.")
    _check_keys(edit, ["heads", "to"], where, "A head edit")
    chosen = edit.get("heads", ())
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or not all(map(_is_whole, chosen)):
        raise UserError(f"'{where}': heads of an edit are {chosen!r}; they must be a list of whole numbers.")
    return HeadEdit(tuple(chosen), _untagged(edit.get("to"), HEAD_KINDS, where))


def _check_keys(value: Mapping[str, Any], allowed: Sequence[str], where: str, what: str) -> None:
    for key in value:
        if key not in allowed:
            raise UserError(f"'{where}': {what} has no '{key}'. {did_you_mean(key, allowed)}")


def _kind_of(value: Any) -> str:
    return next(name for name, kind in {**HEAD_KINDS, **SCALINGS}.items() if kind is type(value))


def _tagged(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": _kind_of(value)}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.name == "scaling" and item is not None:
            item = _tagged(item)
        fields[field.name] = list(item) if isinstance(item, tuple) else item
    return fields


def _untagged(value: Any, kinds: Mapping[str, type], where: str) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"'{where}': {value!r} is no 'encoding'; write it as {{'kind': 'rope', ...}}.")
    rest = dict(value)
    kind = rest.pop("kind", "")
    if kind not in kinds:
        raise UserError(f"'{where}': no encoding or scaling is of kind '{kind}'. {did_you_mean(kind, [*kinds])}")
    if isinstance(rest.get("scaling"), Mapping):
        rest["scaling"] = _untagged(rest["scaling"], SCALINGS, where)
    return _build(kinds[kind], rest, where)


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
    return text


def label_layers(layers: Sequence[Layer]) -> str:
    """The labels of all layers in one line, equal ones joined: `rope(base=10000) on layers 0-2; nope on layer 3`."""
    equal: dict[str, list[int]] = {}
    for n, layer in enumerate(layers):
        equal.setdefault(label(layer), []).append(n)
    if len(equal) == 1:
        return next(iter(equal))
    return "; ".join(f"{text} on layer{'s' * (len(at) > 1)} {ranges(at)}" for text, at in equal.items())


def _name(kind: Any) -> str:
    text = _call(_kind_of(kind), kind, skip=("scaling",))
    scaling = getattr(kind, "scaling", None)
    return text if scaling is None else text + " + " + _call(_kind_of(scaling), scaling)


def _call(name: str, value: Any, skip: Sequence[str] = ()) -> str:
    shown = []
    for f in dataclasses.fields(value):
        v = getattr(value, f.name)
        if f.name not in skip and (f.name == "base" or f.default is dataclasses.MISSING or v != f.default):
            shown.append(f"{f.name}={_short(v)}")
    return f"{name}({', '.join(shown)})" if shown else name


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{_short(value[0])} .. {_short(value[-1])} [{len(value)}]" if value else "[]"
    if isinstance(value, str | bool):
        return str(value)
    # %g rounds to six digits: 1048576 would read 1.04858e+06.
    return f"{value:g}" if float(f"{value:g}") == value else f"{value!r}"


def ranges(numbers_: Sequence[int]) -> str:
    """`0-3,6` of a list of numbers, for people."""
    spans: list[list[int]] = []
    for h in sorted(set(numbers_)):
        if spans and spans[-1][1] == h - 1:
            spans[-1][1] = h
        else:
            spans.append([h, h])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def family(layer: Layer) -> str:
    """What people call a model whose layers look like this: RoPE, p-RoPE, Partial RoPE, NoPE or ALiBi."""
    encoding = layer.encoding
    if isinstance(encoding, Rope):
        return "RoPE" if encoding.fraction == 1 else f"p-RoPE {encoding.fraction:g}"
    names = {
        PartialRope: "Partial RoPE",
        NoPE: "NoPE",
        Alibi: "ALiBi",
        NotebookYarn: "the notebook's YaRN",
        NotebookBias: "the notebook's bias",
    }
    return names[type(encoding)]
