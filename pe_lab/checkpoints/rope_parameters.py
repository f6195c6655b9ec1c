"""Rotary encodings in `config.json`, read and written for transformers 4 and 5.

transformers 4 has the keys `rope_theta`, `rope_scaling` and `partial_rotary_factor`; transformers 5 has one dict,
`rope_parameters`. Version 4 ignores that key, and without `rope_theta` silently uses 10,000, so both are read and both
are written. In GPT-NeoX two keys are `rotary_emb_base` and `rotary_pct`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError
from pe_lab.positional import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYarn,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Scaling,
    Yarn,
    frequencies,
)
from pe_lab.positional.rotation import fixed_point_frequencies

# A linear factor that makes every angle zero in float32 (docs/checkpoints.md).
NO_ROTATION = 1e30

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # of the longest sequence
Rotary = Rope | PartialRope | NoPE


@dataclass(frozen=True)
class RopeKeys:
    """Where a family's `config.json` has its rotation, and transformers' values of keys that are absent.

    Attributes:
      theta, fraction: the base, and the share of the channels that rotate.
      length: tokens.
      partial: heads may rotate in part; else a share has no meaning.
      proportional: p-RoPE is written by transformers' name for it, which version 4 does not have.
      theta_key, fraction_key, length_key: names of older files, outside of the rope parameters.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    length: int = 2048
    partial: bool = False
    proportional: bool = False
    theta_key: str = "rope_theta"
    fraction_key: str = "partial_rotary_factor"
    length_key: str = "max_position_embeddings"


@dataclass(frozen=True)
class WriteOptions:
    """How encodings are written.

    Attributes:
      training_length: tokens.
      max_length: the longest sequence to declare, in tokens; None: the training length times the factor of the scaling.
      tables: a scaling whose frequencies do not depend on the length, and no rotation, are written as LongRoPE with
        equal short and long tables, and not by transformers' name.
    """

    training_length: int
    max_length: int | None = None
    tables: bool = False


def read_rope(config: Mapping[str, Any], head_dim: int, keys: RopeKeys) -> tuple[Rotary, int]:
    """The encoding of the layers that rotate, and the training length before any scaling.

    Raises:
      UnsupportedError: an unknown rope type, or a rotation for each type of layers.
      CheckpointError, ConfigError: a number that is missing or not valid; keys that contradict each other.
    """
    return read_rotation(one_rotation(config, keys), config, head_dim, keys)


def by_layer_type(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]] | None:
    """The rope parameters of each type of layers; None: they are those of one rotation."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
            return {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    return None


def one_rotation(config: Mapping[str, Any], keys: RopeKeys) -> dict[str, Any]:
    """The keys of one rotation, wherever a `config.json` of transformers 4 or 5 has them.

    Raises:
      UnsupportedError: it has several.
      CheckpointError: two places contradict each other. transformers 4 reads the outer keys, 5 the inner ones.
    """
    if nested := by_layer_type(config):
        raise UnsupportedError(
            f"the rope parameters are those of types of layers ({', '.join(nested)}), and this architecture has one "
            "rotation: transformers ignores them there, or fails. Write the keys of one rotation."
        )
    outer = {"rope_theta": keys.theta_key, "partial_rotary_factor": keys.fraction_key}
    places = [(key, {name: config[key]}) for name, key in outer.items() if config.get(key) is not None]
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"the rope parameters are {rope!r}; they must be a set of keys.")
        if rope:
            kind = rope.get("rope_type") or rope.get("type") or "default"
            # A truncate of null is false in transformers; every other null is an absent key.
            given = {key: value for key, value in rope.items() if value is not None or key == "truncate"}
            given.pop("type", None)
            places.append((name, given | {"rope_type": kind}))
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    for place, values in places:
        for key, value in values.items():
            if key in found and found[key] != value:
                raise CheckpointError(
                    f"{key} is {found[key]!r} by {where[key]}, and {value!r} in {place}: versions of transformers read "
                    "different ones. Remove the wrong one."
                )
            found[key], where[key] = value, place
    return found


def read_rotation(
    rope: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, keys: RopeKeys
) -> tuple[Rotary, int]:
    """As `read_rope`, from the keys of one rotation; `config` has the lengths."""
    longest = _length(config, keys.length_key, keys.length)
    base = _number(rope, "rope_theta", keys.theta)
    part = _number(rope, "partial_rotary_factor", keys.fraction)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    holder = config if config.get("original_max_position_embeddings") is not None else rope
    inner = rope.get("original_max_position_embeddings")
    if holder is config and inner not in (None, config["original_max_position_embeddings"]):
        raise CheckpointError(
            f"original_max_position_embeddings is {config['original_max_position_embeddings']!r}, and {inner!r} in the "
            "rope parameters. Remove the wrong one."
        )

    def number(key: str, default: float | None = None) -> float:
        return _number(rope, key, default)

    def optional(key: str) -> float | None:
        return None if rope.get(key) is None else number(key)

    scaling: Scaling | None = None
    length = longest
    if kind == "linear":
        scaling = PI(number("factor"))
    elif kind == "dynamic":
        scaling = DynamicNTK(longest, number("factor"))
    elif kind == "proportional":
        # The factor divides the rotated frequencies, as PI does.
        factor = number("factor", 1.0)
        return Rope(base, part, PI(factor) if factor != 1 else None), length
    elif kind in ("yarn", "llama3", "longrope", "su"):
        length = _length(holder, "original_max_position_embeddings", longest)
        factor = optional("factor") or longest / length
        if kind == "yarn":
            attention_factor = optional("attention_factor")
            # transformers ignores one alone, and both beside an attention factor.
            mscales = (optional("mscale"), optional("mscale_all_dim"))
            both = attention_factor is None and all(mscales)
            scaling = Yarn(
                factor,
                length,
                optional("beta_fast") or 32.0,
                optional("beta_slow") or 1.0,
                *(mscales if both else (0.0, 0.0)),
                attention_factor=attention_factor,
                truncate=bool(rope.get("truncate", True)),
            )
        elif kind == "llama3":
            scaling = Llama3(factor, number("low_freq_factor"), number("high_freq_factor"), length)
        else:
            tables = [_table(rope, key) for key in ("short_factor", "long_factor")]
            # Without an attention factor, transformers 4 computes it from max_position_embeddings / original.
            scaling = LongRope(*tables, length, max(1.0, factor), optional("attention_factor"))
    elif kind != "default":
        raise UnsupportedError(
            f"rope_type '{kind}' is unknown. Known: default, linear, dynamic, yarn, llama3, longrope, proportional."
        )
    encoding = Rope(base, 1.0, scaling) if part == 1 else PartialRope(base, part, scaling)
    if part != 1 and not keys.partial:
        raise CheckpointError(
            f"partial_rotary_factor is {part:g}; this architecture rotates whole heads in transformers, so the key has "
            "no meaning."
        )
    if part != 1 and int(head_dim * part) % 2:
        raise UnsupportedError(
            f"{part:g} of {head_dim} channels are {int(head_dim * part)}, an odd number; transformers rotates "
            "one more of them, at frequencies that pe_lab's partial rotary heads do not have."
        )
    return nope_if_unrotated(encoding, head_dim), length


def nope_if_unrotated(encoding: Rotary, head_dim: int) -> Rotary:
    """The encoding, or NoPE if none of its pairs rotates."""
    return encoding if fixed_point_frequencies(frequencies(encoding, head_dim)[0]).any() else NoPE()


def write_rope(encoding: Rotary, head_dim: int, keys: RopeKeys, options: WriteOptions) -> dict[str, Any]:
    """The keys of `config.json` for the encoding of all rotating layers, for both majors of transformers.

    An encoding without a name in transformers, whose frequencies do not depend on the length and whose gain is one
    number, is written as LongRoPE with equal short and long tables, which divide each pair's frequency: p-RoPE, for
    example, and partial RoPE on an architecture that rotates whole heads.

    Raises:
      UnsupportedError: transformers cannot express the encoding; names the nearest that it can.
      ConfigError: a `max_length` for an encoding whose scaling declares a length (PI, dynamic NTK, YaRN).
    """
    length, max_length = options.training_length, options.max_length
    if isinstance(encoding, NoPE):
        if options.tables:
            return _as_table(encoding, head_dim, keys, options)
        return _keys(keys, 10000.0, {"rope_type": "linear", "factor": NO_ROTATION}, max_length or length)
    part, named = 1.0, encoding
    if isinstance(encoding, PartialRope) and keys.partial:
        part, named = _even_part(encoding, head_dim), Rope(encoding.base, 1.0, encoding.scaling)
    if keys.proportional and isinstance(named, Rope) and named.fraction != 1 and isinstance(named.scaling, PI | None):
        rope = {"rope_type": "proportional", "partial_rotary_factor": named.fraction}
        rope |= {"factor": float(named.scaling.factor)} if named.scaling else {}
        return _keys(keys, named.base, rope, max_length or length)
    if isinstance(named, PartialRope) or named.fraction != 1:
        return _as_table(encoding, head_dim, keys, options)
    base, scaling = named.base, named.scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    reach = longest(encoding, length)
    if max_length is not None and isinstance(scaling, PI | DynamicNTK | Yarn | NTKByParts):
        declared = round(scaling.factor * getattr(scaling, "original_length", length))
        raise ConfigError(
            f"--max-length goes with encodings whose scaling declares no length; {encoding} declares {declared:,} "
            "tokens by its factor. Change the factor instead."
        )
    one_table = isinstance(scaling, LongRope) and scaling.short_factor == scaling.long_factor
    if (options.tables and isinstance(scaling, PI | Yarn | NTKByParts | Llama3)) or (
        one_table and scaling.original_length != (max_length or reach)
    ):
        return _as_table(encoding, head_dim, keys, options)
    if isinstance(scaling, PI):
        # Servers multiply the declared length by the factor.
        rope, reach = _named("linear", scaling, "factor"), length
    elif isinstance(scaling, NTK):
        # NTK is exactly another base.
        width = encoding.rotated_channels(head_dim) if isinstance(encoding, PartialRope) else head_dim
        base *= scaling.factor ** (width / (width - 2))
    elif isinstance(scaling, DynamicNTK):
        rope = _named("dynamic", scaling, "factor")
    elif isinstance(scaling, Yarn | NTKByParts) and scaling.factor * scaling.original_length % 1 == 0:
        # Other reaches need a table: transformers 4 computes the factor from two whole lengths.
        rope = _named("yarn", scaling, "factor", "original_length", "beta_fast", "beta_slow", "truncate")
        if isinstance(scaling, NTKByParts):
            rope |= _attention_factor(1.0, scaling.factor)
        elif scaling.attention_factor is not None:
            rope |= _attention_factor(float(scaling.attention_factor), scaling.factor)
        elif scaling.mscale:
            rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    elif isinstance(scaling, Llama3):
        rope = _named("llama3", scaling, "factor", "low_freq_factor", "high_freq_factor", "original_length")
    elif isinstance(scaling, LongRope):
        gain = float(frequencies(encoding, head_dim)[1][0])
        rope = _named("longrope", scaling, "short_factor", "long_factor", "factor", "original_length")
        # transformers reads the first, vLLM and SGLang the other two.
        rope |= {"attention_factor": gain, "short_mscale": gain, "long_mscale": gain}
        if max_length is not None and not one_table:
            rope["factor"] = max_length / scaling.original_length
    elif isinstance(scaling, DynamicYarn):
        raise UnsupportedError(
            "transformers has no dynamic YaRN. Nearest: YaRN for one length, which --length=TOKENS writes (a factor of "
            f"TOKENS / {scaling.original_length})."
        )
    elif scaling is not None:
        return _as_table(encoding, head_dim, keys, options)
    return _keys(keys, base, rope, max_length or reach, part)


def longest(encoding: Rotary, length: int) -> int:
    """The longest sequence, in tokens, that an encoding is meant for: the original length times its factor."""
    scaling = getattr(encoding, "scaling", None)
    if isinstance(scaling, DynamicNTK):
        return scaling.original_length  # its base is computed from max_position_embeddings
    original = getattr(scaling, "original_length", length)
    return round(min(getattr(scaling, "factor", 1.0), 1e6) * original)


def declared_length(config: Mapping[str, Any]) -> int:
    """The longest sequence, in tokens, that an exported `config.json` declares, as vLLM and SGLang derive it."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    multiplied = rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "proportional")
    factor = rope.get("factor", 1.0) if multiplied else 1.0
    (length,) = [config[key] for key in LENGTH_KEYS if key in config][:1]
    return round(length * (1.0 if factor == NO_ROTATION else factor))


def _even_part(encoding: PartialRope, head_dim: int) -> float:
    """The fraction for transformers, which rounds down, that gives the encoding's even number of channels."""
    channels = encoding.rotated_channels(head_dim)
    if int(head_dim * encoding.fraction) == channels:
        return encoding.fraction
    part = channels / head_dim
    return part if int(head_dim * part) == channels else math.nextafter(part, math.inf)


def _named(kind: str, scaling: Scaling, *fields: str) -> dict[str, Any]:
    """Fields of a scaling under transformers' names."""
    values = {"rope_type": kind}
    for field in fields:
        value = getattr(scaling, field)
        key = "original_max_position_embeddings" if field == "original_length" else field
        # A factor that is a whole number is a float as well: vLLM and SGLang iterate over any other one.
        values[key] = list(value) if isinstance(value, tuple) else float(value) if field == "factor" else value
    return values


def _attention_factor(wanted: float, factor: float) -> dict[str, float]:
    """An attention factor of YaRN, also as the two keys that SGLang reads instead of it.

    It is g(mscale) / g(mscale_all_dim) there, with g(m) = 0.1 m ln(factor) + 1. Where `attention_factor` is given,
    transformers and vLLM do not read these.
    """
    step = 0.1 * math.log(max(1.0, factor))
    if step == 0 and wanted != 1:
        return {"attention_factor": wanted}
    mscale = 1.0 if wanted == 1 else (wanted * (step + 1) - 1) / step
    return {"attention_factor": wanted, "mscale": mscale, "mscale_all_dim": 1.0}


def divisors(encoding: Rope | PartialRope, head_dim: int, runtime: str) -> tuple[tuple[float, ...], float]:
    """LongRoPE's table of an encoding, w_i = 1 / (table_i base^(2i/K)) for each pair of a head, and its one gain.

    Raises:
      UnsupportedError: its frequencies depend on the length, or pairs have several gains; `runtime` names who has no
        such encoding.
    """
    inv_freq, gain = frequencies(encoding, head_dim)
    if (frequencies(encoding, head_dim, 2**30)[0] != inv_freq).any():
        raise UnsupportedError(
            f"{runtime} has no {encoding} that depends on the length. Nearest: its frequencies for one length "
            "(--length=TOKENS)."
        )
    if (gain != gain[0]).any():
        raise UnsupportedError(
            f"{runtime} multiplies all channels of a head by one attention factor, {encoding} only the rotary ones. "
            "Nearest: the same without an attention factor (ntk_by_parts for yarn)."
        )
    plain = encoding.base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    found = np.where(inv_freq > 0, plain / np.maximum(inv_freq, 1e-300), NO_ROTATION)
    return tuple(np.minimum(found, NO_ROTATION).tolist()), float(gain[0])


def _as_table(encoding: Rotary, head_dim: int, keys: RopeKeys, options: WriteOptions) -> dict[str, Any]:
    """The encoding as LongRoPE with equal tables.

    Its original length is the declared one: with equal tables it decides nothing, and servers serve no more than it.
    """
    declared = options.max_length or longest(encoding, options.training_length)
    if isinstance(encoding, NoPE):
        table, gain, named = (NO_ROTATION,) * (head_dim // 2), 1.0, Rope()
    elif isinstance(encoding, PartialRope) and keys.partial:  # of the channels that rotate
        whole = Rope(encoding.base, 1.0, encoding.scaling)
        (table, gain), named = divisors(whole, encoding.rotated_channels(head_dim), "transformers"), encoding
    else:
        (table, gain), named = divisors(encoding, head_dim, "transformers"), Rope(encoding.base)
    scaling = LongRope(table, table, declared, 1.0, gain)
    return write_rope(replace(named, scaling=scaling), head_dim, keys, WriteOptions(declared))


def _keys(keys: RopeKeys, base: float, rope: dict[str, Any], reach: int, part: float = 1.0) -> dict[str, Any]:
    """The same keys in both schemas."""
    plain = rope["rope_type"] == "default"
    new = {"rope_theta": base, **rope}
    found: dict[str, Any] = {keys.length_key: reach, "rope_theta": base, keys.theta_key: base}
    if keys.partial:
        found |= {keys.fraction_key: part, "partial_rotary_factor": part}
        new["partial_rotary_factor"] = part
    found |= {"rope_parameters": new, "rope_scaling": None if plain else dict(rope)}
    if rope["rope_type"] == "longrope":
        # transformers 4 reads this key outside of the others.
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return found


def _number(values: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = values.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"the rope parameters need '{key}', and have {', '.join(values) or 'nothing'}.")
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{key} is {value!r}; it must be a number.")
    return float(value)


def _length(values: Mapping[str, Any], key: str, default: int) -> int:
    """A number of tokens."""
    value = _number(values, key, default)
    if not 1 <= value < 2**31 or value != int(value):
        raise CheckpointError(f"{key} is {value:g}; it must be a positive number of tokens.")
    return int(value)


def _table(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    table = rope.get(key)
    if not isinstance(table, list) or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in table):
        raise CheckpointError(f"longrope needs '{key}', a list with one number for each pair, and has {table!r}.")
    return tuple(float(x) for x in table)
