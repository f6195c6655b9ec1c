"""Which encoding on which layer: texts, patterns and JSON for lists of descriptions."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import UserError, did_you_mean
from pe_lab.positional.encodings import NTK, PI, Alibi, Encoding, NoPE, PartialRope, Rope, Yarn

_ENCODINGS = {"rope": Rope, "partial_rope": PartialRope, "nope": NoPE, "alibi": Alibi}
_SCALINGS = {"pi": PI, "ntk": NTK, "yarn": Yarn}


@dataclass(frozen=True)
class Layer:
    """One layer's way with positions: an encoding, a sliding window in tokens (None: all), a logit scale."""

    encoding: Encoding
    window: int | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"Layer.window is {self.window}; give at least 1 token, or None for no window.")


def parse(text: str) -> Layer:
    """Reads a layer from a text: `NAME[:key=value,...][/window=W]`.

    NAME is rope, partial_rope, nope, alibi, or a scaling (pi, ntk, yarn), which means RoPE under that scaling:
    `yarn:factor=2,original_length=1024,base=1e6`.
    """
    head, slash, tail = text.strip().partition("/")
    name, _, arguments = head.partition(":")
    window: int | None = None
    if slash:
        key, _, value = tail.partition("=")
        if key != "window" or not value.isdecimal():
            raise UserError(f"'{text}': after '/' stands 'window=TOKENS', not '{tail}'.")
        window = int(value)
    values: dict[str, float] = {}
    for item in filter(None, arguments.split(",")):
        key, _, value = item.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            raise UserError(f"'{text}': '{item}' is not key=number.") from None
    if name in _SCALINGS:
        rope = {k: values.pop(k) for k in ("base", "fraction") if k in values}
        scaling = _build(_SCALINGS[name], values, text, also=("base", "fraction"))
        return Layer(Rope(**rope, scaling=scaling), window)
    if name not in _ENCODINGS:
        raise UserError(f"'{text}': no encoding is called '{name}'. {did_you_mean(name, [*_ENCODINGS, *_SCALINGS])}")
    return Layer(_build(_ENCODINGS[name], values, text), window)


def _build(kind: type, values: Mapping[str, Any], where: str, also: Sequence[str] = ()) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"'{where}': {kind.__name__} has no '{key}'. {did_you_mean(key, [*fields, *also])}")
        if key != "scaling" and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise UserError(f"'{where}': {kind.__name__}.{key} is {value!r}; it must be a number.")
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if required:
        raise UserError(f"'{where}': {kind.__name__} needs {', '.join(required)}.")
    # 1024.0 becomes 1024; what is no whole number stays as it is, for the description to refuse.
    whole = {k: int(v) for k, v in values.items() if fields[k].type == "int" and float(v).is_integer()}
    return kind(**{**values, **whole})


def layers(description: Any, num_layers: int) -> tuple[Layer, ...]:
    """One `Layer` for each of N layers, from whatever a config says.

    `description` is an encoding, a `Layer`, a text (see `parse`), or a sequence of these, which is repeated as a
    pattern: its length must divide N.
    """
    items = description if isinstance(description, Sequence) and not isinstance(description, str) else [description]
    if not items or num_layers % len(items):
        raise UserError(f"A pattern of {len(items)} layers does not tile {num_layers} layers; its length must divide.")
    period = []
    for item in items:
        if isinstance(item, str):
            item = parse(item)
        elif isinstance(item, Rope | PartialRope | NoPE | Alibi):
            item = Layer(item)
        elif isinstance(item, Mapping):
            item = from_json(item)
        elif not isinstance(item, Layer):
            raise UserError(f"{item!r} does not describe a layer; give an encoding, a Layer, or a text like 'rope'.")
        period.append(item)
    return tuple(period * (num_layers // len(items)))


def to_json(layer: Layer) -> dict[str, Any]:
    """A `Layer` as plain JSON, read back by `from_json`."""
    encoding = _tagged(layer.encoding, _ENCODINGS)
    if encoding.get("scaling") is not None:
        encoding["scaling"] = _tagged(layer.encoding.scaling, _SCALINGS)
    return {"encoding": encoding, "window": layer.window, "logit_scale": layer.logit_scale}


def from_json(value: Mapping[str, Any]) -> Layer:
    """The `Layer` that `to_json` wrote; `UserError` for a kind or a field this version does not know."""
    fields = [f.name for f in dataclasses.fields(Layer)]
    for key in value:
        if key not in fields:
            raise UserError(f"'{dict(value)}': Layer has no '{key}'. {did_you_mean(key, fields)}")
    if not isinstance(value.get("encoding"), Mapping):
        raise UserError(f"'{dict(value)}': a layer needs an 'encoding', such as {{'kind': 'rope'}}.")
    encoding = dict(value["encoding"])
    if isinstance(encoding.get("scaling"), Mapping):
        encoding["scaling"] = _untagged(encoding["scaling"], _SCALINGS)
    return Layer(_untagged(encoding, _ENCODINGS), value.get("window"), value.get("logit_scale", 1.0))


def _tagged(value: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    kind = next(name for name, cls in kinds.items() if cls is type(value))
    return {"kind": kind, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}


def _untagged(value: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    rest = dict(value)
    kind = rest.pop("kind", "")
    if kind not in kinds:
        raise UserError(f"'{dict(value)}': no encoding or scaling is of kind '{kind}'. {did_you_mean(kind, [*kinds])}")
    return _build(kinds[kind], rest, str(dict(value)))


def label(layer: Layer) -> str:
    """A short readable name, such as `rope(base=10000) + yarn(factor=2, original_length=1024) / window 512`."""
    encoding = layer.encoding
    text = _call(next(n for n, cls in _ENCODINGS.items() if cls is type(encoding)), encoding, skip=("scaling",))
    scaling = getattr(encoding, "scaling", None)
    if scaling is not None:
        text += " + " + _call(next(n for n, cls in _SCALINGS.items() if cls is type(scaling)), scaling)
    return text + (f" / window {layer.window}" if layer.window else "")


def _call(name: str, value: Any, skip: Sequence[str] = ()) -> str:
    shown = []
    for f in dataclasses.fields(value):
        v = getattr(value, f.name)
        if f.name not in skip and (f.name == "base" or f.default is dataclasses.MISSING or v != f.default):
            # %g rounds to six digits: 1048576 would read 1.04858e+06.
            shown.append(f"{f.name}={v:g}" if float(f"{v:g}") == v else f"{f.name}={v!r}")
    return f"{name}({', '.join(shown)})" if shown else name


def family(layer: Layer) -> str:
    """What people call a model whose layers look like this: RoPE, p-RoPE, Partial RoPE, NoPE or ALiBi."""
    encoding = layer.encoding
    if isinstance(encoding, Rope):
        return "RoPE" if encoding.fraction == 1 else f"p-RoPE {encoding.fraction:g}"
    return {PartialRope: "Partial RoPE", NoPE: "NoPE", Alibi: "ALiBi"}[type(encoding)]
