"""Frozen dataclasses from nested dicts and back to JSON: the checks of keys, types and bounds of every config."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal

from pe_lab.errors import ConfigError, UserError, did_you_mean, redacted

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
    """A frozen dataclass (`Config`, `ModelConfig`, ...) from nested dicts, checking every key and every type."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; it must be a set of keys: {', '.join(typing.get_type_hints(kind))}.")
    hints = typing.get_type_hints(kind)
    value = getattr(kind, "of_earlier_versions", dict)(value)
    for key in value:
        _check_known(key, hints, where)
    made = kind(**{key: _convert(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    check_bounds(made, where)
    return made


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
            hints = typing.get_type_hints(hint)
            _check_known(name, hints, where)
            where, hint = f"{where}.{name}", hints[name]
        else:
            return


def check_bounds(config: Any, where: str) -> None:
    """`ConfigError` for a number in a config, or in a part of one, that is outside the bounds of its field."""
    for declared in dataclasses.fields(config):
        given = getattr(config, declared.name)
        least, most = declared.metadata.get("bounds", (None, None))
        for i, value in enumerate(given) if isinstance(given, tuple) else ((None, given),):
            name = f"{where}.{declared.name}" + (f"[{i}]" if i is not None else "")
            if dataclasses.is_dataclass(type(value)) and declared.type != "Any":
                check_bounds(value, name)
            # A word such as "auto" has no bounds.
            elif least is not None and not isinstance(value, str | Mapping) and not least <= value <= most:
                limit = f"at most {most:,}" if value > most else f"at least {least}"
                raise ConfigError(f"{name} is {value}; it must be {'positive' if value < least == 1 else limit}.")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        if isinstance(value, list | tuple):
            return [_convert(hint, item, f"{where}[{i}]") for i, item in enumerate(value)]
        try:
            return _read_description(value) if isinstance(value, Mapping) else value
        except UserError as error:
            raise type(error)(f"{where}: {error}") from None
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kind, literal = typing.get_args(hint)
        if literal is types.NoneType:
            return None if value is None else _convert(kind, value, where)
        if typing.get_origin(literal) is not Literal:
            return _convert(literal if isinstance(value, Mapping) else kind, value, where)
        (word,) = typing.get_args(literal)
        if isinstance(value, str) and value != word:
            raise ConfigError(f"{where} is {value!r}; it must be {word!r} or of type {kind.__name__}.")
        return value if value == word else _convert(kind, value, where)
    if typing.get_origin(hint) is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise ConfigError(f"{where} is {value!r}. {did_you_mean(str(value), allowed)}")
        return value
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}; it must be a list.")
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is not None:  # Mapping[str, Any]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; it must be a set of keys and values.")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # An int may be too large for a float; no bounds contain it.
        return float(max(min(value, 10**300), -(10**300)))
    # 1e3 is how people write a thousand steps.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}.")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Back to plain data


# Positional encodings, patterns and edits are dataclasses of `pe_lab.positional`, which registers them here.
_KINDS: dict[type, str] = {}
_read_description: Callable[[Mapping[str, Any]], Any] = dict


def register_descriptions(kinds: Mapping[str, type], read: Callable[[Mapping[str, Any]], Any]) -> None:
    """Lets configs hold dataclasses from outside: `kinds` by their names in JSON, and the function that reads them."""
    global _read_description
    for name, kind in kinds.items():
        register_kind(name, kind)
    _read_description = read


def register_kind(name: str, kind: type) -> None:
    """Gives a dataclass its name in JSON."""
    _KINDS[kind] = name


def to_json(value: Any) -> Any:
    """A config, a part of one, or a description as plain JSON; registered kinds become {"kind": name, fields}.

    Credentials in addresses are `redacted`: what is written has none, and no fingerprint depends on them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not (f.metadata.get("omit_default") and getattr(value, f.name) == f.default)
        }
        return {"kind": _KINDS[type(value)], **fields} if type(value) in _KINDS else fields
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return redacted(value)
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value
