"""Frozen dataclasses from nested dicts and back to JSON: the checks of keys, types and bounds of every config."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pe_lab.errors import ConfigError, UserError, call, did_you_mean, redacted

INT32 = 2**31 - 1  # counts of steps and tokens are int32 on the devices
SEED = 2**32 - 1  # of a random key
OMIT_DEFAULT = {"omit_default": True}  # metadata of a field that JSON has only where it is not the default


def number(default: float | str | tuple[int, ...], least: float, most: float) -> Any:
    """A numeric field: its default, and the bounds, ends included, that `check_bounds` enforces.

    The bounds exclude what no machine can hold or no formula means, not what is unwise.
    """
    return field(default=default, metadata={"bounds": (least, most)})


# Keys of other training stacks, for the hint about an unknown key.
_ALIASES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "bs": "batch_size",
    "seq_len": "sequence_length",
    "max_steps": "steps",
    "num_steps": "steps",
    "gradient_accumulation_steps": "accumulate",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "n_layers": "layers",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
}


def from_dict(kind: type, value: Any, where: str = "config") -> Any:
    """A frozen dataclass (`Config`, `ModelConfig`, `Layer`, ...) from nested dicts, checking every key and every type.

    Raises:
      ConfigError: a key, a type or a bound that is wrong, or a field without default that is missing; names it.
    """
    if isinstance(value, kind):
        return value
    hints = field_types(kind)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; it must be a set of keys: {', '.join(hints)}.{_literal(value)}")
    for key in value:
        _check_known(key, hints, where)
    without = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in without if name not in value]:
        raise ConfigError(f"{where} needs {', '.join(missing)}.")
    values = {key: _convert(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    made = call(kind, "", **values)
    check_bounds(made, where)
    return made


@functools.cache
@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(f"The types of the fields of {kind.__qualname__} cannot be read: {error}.") from None
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _check_known(key: Any, hints: Mapping[str, Any], where: str) -> None:
    if key not in hints:
        known = _ALIASES[key] if _ALIASES.get(key) in hints else str(key)
        raise ConfigError(f"{where} has no key '{key}'. {did_you_mean(known, list(hints))}")


def check_key(kind: type, key: str, where: str = "config") -> None:
    """`ConfigError` for a dotted key, such as `phases.0.steps`, that no config of this kind has.

    What lies inside a description or a free set of keys is not known here, and passes.
    """
    hint: Any = kind
    for name in key.split("."):
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = next((one for one in typing.get_args(hint) if dataclasses.is_dataclass(one)), None)
        if typing.get_origin(hint) is tuple:
            where, hint = f"{where}[{name}]", typing.get_args(hint)[0]
        elif dataclasses.is_dataclass(hint):
            hints = field_types(hint)
            _check_known(name, hints, where)
            where, hint = f"{where}.{name}", hints[name]
        else:
            return


def check_bounds(config: Any, where: str) -> None:
    """`ConfigError` for a number in a config, or in a part of one, that is outside the bounds of its field."""
    hints = field_types(type(config))
    for declared in dataclasses.fields(config):
        given = getattr(config, declared.name)
        least, most = declared.metadata.get("bounds", (None, None))
        for i, value in enumerate(given) if isinstance(given, tuple) else ((None, given),):
            name = f"{where}.{declared.name}" + (f"[{i}]" if i is not None else "")
            if dataclasses.is_dataclass(type(value)) and hints[declared.name] is not Any:
                check_bounds(value, name)
            # A word such as "auto" has no bounds.
            elif least is not None and not isinstance(value, str | Mapping) and not least <= value <= most:
                limit = f"at most {most:,}" if value > most else f"at least {least}"
                raise ConfigError(f"{name} is {value}; it must be {'positive' if value < least == 1 else limit}.")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return with_descriptions(value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(hint), value, where)
    if typing.get_origin(hint) is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise ConfigError(f"{where} is {value!r}. {did_you_mean(str(value), allowed)}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}; it must be a list.{_literal(value)}")
        items = typing.get_args(hint)
        items = (items[0],) * len(value) if items[-1] is Ellipsis else items
        if len(items) != len(value):
            raise ConfigError(f"{where} is {value!r}; it must be a list of {len(items)}.")
        return tuple(_convert(item, v, f"{where}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True)))
    if typing.get_origin(hint) is not None:  # Mapping[str, Any]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; it must be a set of keys and values.{_literal(value)}")
        return dict(value)
    if _kinds_of((hint,)):
        return _described((hint,), value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # An int may be too large for a float; no bounds contain it.
        return float(max(min(value, 10**300), -(10**300)))
    # 1e3 is how people write a thousand steps.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is bool and value in (0, 1):
        return bool(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}.")
    return value


def _literal(value: Any) -> str:
    """How to write a list or a dict on a command line, where text was given."""
    return " Write it as a Python literal: names in quotes, {'key': 1} for a dict." if isinstance(value, str) else ""


def with_descriptions(value: Any, where: str) -> Any:
    """Plain data, whose sets of keys become descriptions."""
    if isinstance(value, list | tuple):
        return [with_descriptions(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping) or "" not in _KINDS:
        return value
    kind, fields = _kind_of((object,), value, where) if "kind" in value else (_KINDS[""], value)
    try:
        return from_dict(kind, fields, kind.__name__)
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None


def _one_of(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """A value of one of several types: None, words, numbers, sets of keys, or descriptions."""
    if value is None and types.NoneType in hints:
        return None
    words = [word for hint in hints if typing.get_origin(hint) is Literal for word in typing.get_args(hint)]
    others = tuple(hint for hint in hints if hint is not types.NoneType and typing.get_origin(hint) is not Literal)
    if isinstance(value, str) and words:
        if value not in words:
            raise ConfigError(f"{where} is {value!r}; it must be {words[0]!r} or of type {others[0].__name__}.")
        return value
    if _kinds_of(others):
        return _described(others, value, where)
    of_keys = [one for one in others if dataclasses.is_dataclass(one) or typing.get_origin(one) is not None]
    return _convert(of_keys[0] if of_keys and isinstance(value, Mapping) else others[0], value, where)


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions: dataclasses of other packages, which JSON holds as {"kind": name, fields}


_KINDS: dict[str, type] = {}
_OWN = "One of your own is registered by the file that defines it: --encodings=FILE.py."


def register_kind(name: str, kind: type) -> None:
    """Gives a dataclass its name in JSON; "" is that of a set of keys without a kind.

    Raises:
      ConfigError: another class has the name.
    """
    known = _KINDS.get(name, kind)
    if known.__qualname__ != kind.__qualname__:
        raise ConfigError(
            f"'{name}' is the name of {known.__qualname__} already; give {kind.__qualname__} another one."
        )
    _KINDS[name] = kind


def kind_name(kind: type) -> str:
    """The name of a description's class in JSON; "" for other dataclasses."""
    return next((name for name, known in _KINDS.items() if known is kind), "")


def _kinds_of(bases: tuple[Any, ...]) -> dict[str, type]:
    """The descriptions that fields of these types may hold, by name."""
    bases = tuple(base for base in bases if isinstance(base, type))
    return {name: kind for name, kind in _KINDS.items() if name and issubclass(kind, bases)}


def _described(bases: tuple[Any, ...], value: Any, where: str) -> Any:
    """The description that a field of these types holds."""
    if isinstance(value, bases) and dataclasses.is_dataclass(value):
        return value
    kind, fields = _kind_of(bases, value, where)
    return from_dict(kind, fields, kind.__name__)


def _kind_of(bases: tuple[Any, ...], value: Any, where: str) -> tuple[type, dict[str, Any]]:
    """The class of {"kind": name, fields}, which a field of these types holds, and the fields."""
    kinds = _kinds_of(bases)
    if not isinstance(value, Mapping):
        advice = did_you_mean(str(value), list(kinds))
        raise ConfigError(f"{where} is {value!r}; write it as {{'kind': NAME, ...}}. {advice}")
    fields = dict(value)
    written = str(fields.pop("kind", ""))
    if written not in kinds:
        raise ConfigError(f"{where}: there is no kind '{written}'. {did_you_mean(written, list(kinds))} {_OWN}")
    return kinds[written], fields


# ---------------------------------------------------------------------------------------------------------------------
# Back to plain data


def to_json(value: Any) -> Any:
    """A config, a part of one, or a description as plain JSON; registered kinds become {"kind": name, fields}.

    Credentials in addresses are `redacted`: what is written has none, and no fingerprint depends on them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        types = field_types(type(value))
        fields = {
            f.name: to_json(_as_declared(getattr(value, f.name), types[f.name]))
            for f in dataclasses.fields(value)
            if not (f.metadata.get("omit_default") and getattr(value, f.name) == f.default)
        }
        name = kind_name(type(value))
        return {"kind": name, **fields} if name else fields
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return redacted(value)
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _as_declared(value: Any, declared: Any) -> Any:
    """A whole number as a float where a float is declared, as `from_dict` reads it: both have one JSON."""
    is_float = declared is float or (float in typing.get_args(declared) and int not in typing.get_args(declared))
    return float(value) if is_float and type(value) is int else value
