"""Gemma 4 in GGUF: llama.cpp's keys for layers that differ in shape, and its divisors for those without a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families import Config, Positions
from pe_lab.checkpoints.families.family import lookup, whole
from pe_lab.checkpoints.families.gemma4 import OfTypes, check_types
from pe_lab.checkpoints.gguf.positions import SHARED, TABLES, GgufPositions, Rotation
from pe_lab.checkpoints.rope_parameters import NO_ROTATION, Rotary, WriteOptions
from pe_lab.config import LayerShape, ModelConfig
from pe_lab.errors import CheckpointError, excerpt
from pe_lab.positional import Layer, LongRope, NoPE, Rope

NO_VALUES = "tensors.without_values"  # a key for the layers that have keys and no matrix of values


def _of_layers(config: Config, key: str, default: Any = None, kind: type = int) -> list[Any]:
    """A number of each layer, which may be one for all; `CheckpointError` for anything else."""
    value, count = lookup(config, key, default), whole(config, "block_count")
    found = value if isinstance(value, list) else [value] * count
    if len(found) != count or any(type(one) is not kind for one in found):
        shown = excerpt(repr(value), 60)
        raise CheckpointError(f"{key} is {shown}; it must be one {kind.__name__}, or one for each of {count} layers.")
    return found


def _windowed(config: Config) -> list[bool]:
    return _of_layers(config, "attention.sliding_window_pattern", False, bool)


def read_shapes(config: Config) -> tuple[LayerShape, ...]:
    """The shapes beside that of layers with a window."""
    windowed, count = _windowed(config), whole(config, "block_count")
    shared = _of_layers(config, "attention.shared_kv_layers", 0)[0]
    if not 0 <= shared < count:
        raise CheckpointError(f"attention.shared_kv_layers is {shared}, of {count} layers.")
    d_ff, full = _of_layers(config, "feed_forward_length"), [n for n in range(count) if not windowed[n]]
    heads = _of_layers(config, "attention.head_count_kv")[full[0]] if full else read_kv_heads(config)
    types = OfTypes(
        whole(lookup(config, "attention"), "key_length"),
        heads,
        any(n in lookup(config, NO_VALUES) for n in full if n < count - shared),
        shared,
        d_ff[-1] if shared and d_ff[-1] != d_ff[0] else 0,
    )
    return types.shapes(windowed, read_head_dim(config), read_kv_heads(config))


def read_head_dim(config: Config) -> int:
    """The channels of a head of layers with a window."""
    attention = lookup(config, "attention")
    return whole(attention, "key_length_swa", whole(attention, "key_length"))


def read_kv_heads(config: Config) -> int:
    """The key heads of layers with a window."""
    heads = _of_layers(config, "attention.head_count_kv")
    return next((one for one, windowed in zip(heads, _windowed(config), strict=True) if windowed), heads[0])


def read_d_ff(config: Config) -> int:
    """The width of the feed-forwards of layers with keys of their own."""
    return _of_layers(config, "feed_forward_length")[0]


@dataclass(frozen=True)
class Gemma4GgufPositions(GgufPositions):
    """A base for layers with a window; for the others, which have heads of their own, another one and divisors."""

    def read(self, config: Config, model: ModelConfig) -> Positions:
        """See `PositionFormat`."""
        wide = dataclasses.replace(model, head_dim=OfTypes.of(model).channels)
        return super().read(config, wide)._replace(rotated=None)

    def _read_rotation(self, config: Config, model: ModelConfig) -> tuple[Rotary, int]:
        encoding, length = super()._read_rotation(config, model)
        scaling = getattr(encoding, "scaling", None)
        if isinstance(scaling, LongRope) and scaling.attention_factor == 1:
            table = scaling.short_factor
            kept = table.count(1.0)
            unrotated = all(divisor >= 0.99 * NO_ROTATION for divisor in table[kept:])
            if kept and unrotated and table == scaling.long_factor:  # p-RoPE, or RoPE
                return Rope(encoding.base, kept / len(table)), length
        return encoding, length

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        """See `PositionFormat`; with the keys of the layers' shapes."""
        check_types(layers, model)
        types, windowed = OfTypes.of(model), [layer.window is not None for layer in layers]
        keys = super().write(layers, dataclasses.replace(model, head_dim=types.channels), options)
        keys["attention"] |= {
            "key_length": types.channels,
            "value_length": types.channels,
            "key_length_swa": model.head_dim,
            "value_length_swa": model.head_dim,
            "head_count_kv": [model.kv_heads if one else types.kv_heads for one in windowed],
            "shared_kv_layers": types.shared,
        }
        keys["rope"]["dimension_count_swa"] = model.head_dim
        keys[TABLES] = keys[TABLES] or {SHARED: (1.0,) * (types.channels // 2)}  # llama.cpp wants one
        own = len(layers) - types.shared
        keys["feed_forward_length"] = [model.d_ff] * own + [types.d_ff or model.d_ff] * types.shared
        return keys

    def _rotation(self, encoding: Rotary, model: ModelConfig) -> Rotation:
        """What layers without a window have beside a base is divisors, which the others do not read."""
        if isinstance(encoding, NoPE):
            return Rotation(tables=((SHARED, (NO_ROTATION,) * (model.head_dim // 2)),))
        plain = isinstance(encoding, Rope) and encoding.fraction == 1 and encoding.scaling is None
        return Rotation(encoding.base) if plain else self._table(encoding, model.head_dim)
