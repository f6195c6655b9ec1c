"""Encodings and windows in a GGUF's metadata, as llama.cpp's loader reads them.

Every architecture has a base, a linear factor, YaRN with the betas 32 and 1, and a gain (`attn_factor`) on the rotated
channels. What else one has is a field of `GgufPositions`; what its graph ignores is refused when written. Keys are
those below the architecture's name; `TABLES` holds the tensors with a divisor for each pair.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pe_lab.checkpoints.families import Config, PositionFormat, Positions
from pe_lab.checkpoints.families.family import lookup, whole
from pe_lab.checkpoints.families.formats import Sizes, check_layers, one_size, rotated_channels, single_rotation
from pe_lab.checkpoints.rope_parameters import NO_ROTATION, Rotary, WriteOptions, divisors, longest, nope_if_unrotated
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError, excerpt
from pe_lab.positional import (
    NTK,
    PI,
    Encoding,
    Layer,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Scaling,
    Yarn,
    frequencies,
)
from pe_lab.positional.schemes import Llama4Temperature

# The tensors with divisors, by name without `.weight`: of all lengths, and of contexts up to and beyond the original.
TABLES = "tables"
SHARED, SHORT, LONG = "rope_freqs", "rope_factors_short", "rope_factors_long"
BETAS = (32.0, 1.0)  # of YaRN
# The window of one layer of a model without windows, in an architecture that must have one: beyond every sequence.
UNLIMITED = 2**24


@dataclass(frozen=True)
class Rotation:
    """One rotation, in llama.cpp's terms."""

    base: float = 10000.0
    kind: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original: int = 0  # tokens; 0: the training length
    gain: float = 1.0  # `attn_factor`; YaRN has its own beside it
    betas: tuple[float, float] = BETAS
    tables: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def scaled(self) -> bool:
        """Whether it is more than a base."""
        return dataclasses.replace(self, base=10000.0) != Rotation()

    def keys(self, length: int) -> dict[str, Any]:
        """The metadata; `length` is the training length, in tokens."""
        rope: dict[str, Any] = {"freq_base": self.base}
        if self.scaled:
            scaling = {"type": self.kind, "original_context_length": self.original or length}
            scaling |= {} if self.kind in ("none", "longrope") else {"factor": self.factor}
            scaling |= {} if self.gain == 1 else {"attn_factor": self.gain}
            if self.betas != BETAS:
                scaling |= {"yarn_beta_fast": self.betas[0], "yarn_beta_slow": self.betas[1]}
            rope["scaling"] = scaling
        return {"rope": rope, TABLES: dict(self.tables)}


@dataclass(frozen=True)
class GgufPositions(PositionFormat):
    """What llama.cpp's graph of an architecture does with positions.

    Attributes:
      length: of the training, of a file without it, in tokens.
      partial: only the first channels of a head may rotate.
      tables: divisors: `all` are one table, or two by the size of the context; `two` only these.
      windows: `yes`; `ignored`: the key is in files, and the graph ignores it; `none`.
      pattern: every so many layers one has no window, in a file with windows and without a pattern.
      sliding: the rotation of layers with a window: `same` as the others', with another `base`, or unscaled (`plain`);
        `plain_base` is an unscaled one with another base.
      unrotated: the layers that do not rotate: `none`, every `fourth`, those of `rope_pattern`, or those without a
        window (`full`), in some architectures only of a model with windows (`full_if_windows`).
      betas: YaRN's are read, too.
      temperature: Llama 4's, on all layers.
      extras: parameters beside the encoding that layers may have, or that all have when read.
      window_layers: the number of layers of the one model that has windows (EXAONE 4 32B); 0: any.
    """

    length: int = 2048
    partial: bool = False
    tables: Literal["all", "two", "none"] = "none"
    windows: Literal["yes", "ignored", "none"] = "none"
    pattern: int = 1
    sliding: Literal["same", "base", "plain", "plain_base"] = "same"
    unrotated: Literal["none", "fourth", "rope_pattern", "full", "full_if_windows"] = "none"
    betas: bool = False
    temperature: bool = False
    extras: tuple[Encoding, ...] = ()
    window_layers: int = 0

    # ---------------------------------------------------------------------------------------------------------------
    # Reading

    def read(self, config: Config, model: ModelConfig) -> Positions:
        """See `PositionFormat`."""
        windows = self._read_windows(config, model.layers)
        encoding, length = self._read_rotation(config, model)
        extras = self.extras
        if self.temperature and (slope := _number(config, "attention.temperature_scale", 0.0)):
            original = _tokens(config, "rope.scaling.original_context_length", length)
            extras += (Llama4Temperature(slope, original, offset=0),)
        by_window = {False: encoding, True: self._read_sliding(config, encoding)}
        rotates = self._read_rotates(config, windows)
        pairs = zip(rotates, windows, strict=True)
        layers = tuple(Layer(by_window[size is not None] if on else NoPE(), size, extras=extras) for on, size in pairs)
        return Positions(layers, length, rotated_channels(layers, model.head_dim))

    def _read_windows(self, config: Config, count: int) -> Sizes:
        size = lookup(config, "attention.sliding_window")
        if self.windows == "none" or not size or self.window_layers not in (0, count):
            return [None] * count
        size = whole(lookup(config, "attention"), "sliding_window")
        if size == UNLIMITED:
            return [None] * count
        pattern = lookup(config, "attention.sliding_window_pattern", self.pattern)
        if isinstance(pattern, list):
            if len(pattern) != count:
                raise CheckpointError(
                    f"attention.sliding_window_pattern has {len(pattern)} entries for {count} layers."
                )
            return [size if one else None for one in pattern]
        step = whole({"attention.sliding_window_pattern": pattern}, "attention.sliding_window_pattern")
        # As llama.cpp has it; with ignored windows all layers have one, as in the original model.
        every = step == 0 or self.windows == "ignored"
        return [size if every or n % step < step - 1 else None for n in range(count)]

    def _read_rotates(self, config: Config, windows: Sizes) -> list[bool]:
        count = len(windows)
        if self.unrotated == "fourth":
            return [(n + 1) % 4 != 0 for n in range(count)]
        if self.unrotated == "full" or self.unrotated == "full_if_windows" and any(windows):
            return [size is not None for size in windows]
        if self.unrotated == "rope_pattern":
            pattern = lookup(config, "attention.rope_pattern", [True] * count)
            if not isinstance(pattern, list) or len(pattern) < count:
                shown = excerpt(repr(pattern), 60)
                raise CheckpointError(f"attention.rope_pattern is {shown}; it must say which of {count} layers rotate.")
            return [bool(one) for one in pattern[:count]]
        return [True] * count

    def _read_sliding(self, config: Config, full: Rotary) -> Rotary:
        """The encoding of layers with a window."""
        if self.sliding == "same":
            return full
        base = getattr(full, "base", 10000.0)
        if self.sliding != "plain":
            base = _number(config, "rope.freq_base_swa", 10000.0 if self.sliding == "plain_base" else base)
        return dataclasses.replace(full, base=base) if self.sliding == "base" and full != NoPE() else Rope(base)

    def _read_rotation(self, config: Config, model: ModelConfig) -> tuple[Rotary, int]:
        """The encoding of layers without a window, and the training length before any scaling."""
        length = _tokens(config, "context_length", self.length)
        rotated = _number(config, "rope.dimension_count", model.head_dim)
        if rotated != model.head_dim and not self.partial:
            raise UnsupportedError(f"{rotated:g} of {model.head_dim} channels rotate; this architecture rotates all.")
        if not 2 <= rotated <= model.head_dim or rotated % 2:
            raise CheckpointError(f"rope.dimension_count is {rotated:g}, of heads of {model.head_dim} channels.")
        # llama.cpp divides by a factor without a type as well, and by its older name.
        kind = lookup(config, "rope.scaling.type", "linear")
        factor = _number(config, "rope.scaling.factor", 0.0) or _number(config, "rope.scale_linear", 0.0) or 1.0
        original = _tokens(config, "rope.scaling.original_context_length", length)
        gain = _number(config, "rope.scaling.attn_factor", 1.0)
        found = {name: tuple(table) for name, table in config.get(TABLES, {}).items()}
        divided = kind != "none" and factor != 1
        if (found and divided) or len(found) > 1 and SHARED in found or (SHORT in found) != (LONG in found):
            raise CheckpointError(
                f"its rope scaling is {kind} by {factor:g}, its attention factor {gain:g}, its tables "
                f"{', '.join(f'{name}.weight' for name in found)}: an unknown combination."
            )
        scaling: Scaling | None = None
        if found:
            short, long = (found[SHARED],) * 2 if SHARED in found else (found[SHORT], found[LONG])
            reach = 1.0 if SHARED in found else max(1.0, length / original)
            scaling, length = LongRope(short, long, original, reach, gain), original
        elif kind == "yarn":
            betas = tuple(
                _number(config, f"rope.scaling.yarn_beta_{x}", y) for x, y in zip(("fast", "slow"), BETAS, strict=True)
            )
            if betas != BETAS and not self.betas:
                raise CheckpointError(
                    f"its yarn_beta_fast and yarn_beta_slow are {betas[0]:g} and {betas[1]:g}, which llama.cpp ignores "
                    "for this architecture. Remove them, or import the model's Hugging Face directory."
                )
            mscale = _number(config, "rope.scaling.yarn_log_multiplier", 0.0) if self.betas else 0.0
            plain = Yarn(factor, original, *betas, *((1.0, mscale) if mscale else ()))
            own = float(frequencies(Rope(scaling=plain), model.head_dim)[1][0])
            scaling = plain if gain == 1 else dataclasses.replace(
                plain, mscale=0.0, mscale_all_dim=0.0, attention_factor=stored(gain * own)
            )  # fmt: skip
            length = original
        elif kind not in ("none", "linear", "longrope"):
            raise CheckpointError(f"rope scaling '{kind}' is unknown. Known: none, linear, yarn, longrope.")
        elif gain != 1:
            table = (factor if divided else 1.0,) * (int(rotated) // 2)
            scaling, length = LongRope(table, table, original, 1.0, gain), original
        elif divided:
            scaling, length = PI(factor), original
        base = _number(config, "rope.freq_base", 10000.0)
        whole_head = rotated == model.head_dim
        encoding = Rope(base, 1.0, scaling) if whole_head else PartialRope(base, rotated / model.head_dim, scaling)
        return nope_if_unrotated(encoding, model.head_dim), length

    # ---------------------------------------------------------------------------------------------------------------
    # Writing

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        """See `PositionFormat`."""
        kinds = tuple(type(extra) for extra in self.extras) + ((Llama4Temperature,) if self.temperature else ())
        check_layers(layers, kinds)
        windows = [layer.window for layer in layers]
        bare = [isinstance(layer.encoding, NoPE) for layer in layers]
        full = [layer for layer in layers if layer.window is None]
        sliding = [layer for layer in layers if layer.window is not None]
        keys: dict[str, Any] = {"attention": self._write_windows(windows) | self._write_rotates(bare, windows)}
        if self.sliding == "same":
            encoding = single_rotation(layers) or NoPE()
        else:
            encoding = single_rotation(full, "those without a window") or (NoPE() if full else sliding[0].encoding)
            if full and any(bare[n] != bare[windows.index(None)] for n, size in enumerate(windows) if size is None):
                raise UnsupportedError("layers without a window rotate all or not at all.")
        rotation = self._rotation(encoding, model)
        if sliding and self.sliding != "same":
            rotation, base = self._write_sliding(rotation, full, sliding, model)
        keys |= rotation.keys(options.training_length)
        if sliding and self.sliding in ("base", "plain_base"):
            keys["rope"]["freq_base_swa"] = base
        rotated = rotated_channels([Layer(encoding)], model.head_dim) if self.partial else None
        keys["rope"]["dimension_count"] = rotated or model.head_dim
        keys["context_length"] = options.max_length or longest(encoding, options.training_length)
        return self._write_temperature(layers, keys)

    def _write_windows(self, windows: Sizes) -> dict[str, Any]:
        size = one_size(windows)
        if size is None and (self.windows != "yes" or self.sliding in ("plain", "plain_base") or self.window_layers):
            if self.window_layers == len(windows):
                raise UnsupportedError(f"with {len(windows)} layers it has windows, and here are none.")
            return {}
        if self.windows != "yes" or self.window_layers not in (0, len(windows)):
            only = f", except with {self.window_layers} layers" if self.window_layers else ""
            raise UnsupportedError(f"it has no sliding windows{only}.")
        pattern = [one is not None or size is None and n == 0 for n, one in enumerate(windows)]
        return {"sliding_window": size or UNLIMITED, "sliding_window_pattern": pattern}

    def _write_rotates(self, bare: Sequence[bool], windows: Sizes) -> dict[str, Any]:
        """The keys of layers that do not rotate; `UnsupportedError` where llama.cpp rotates others than the model."""
        if self.unrotated == "rope_pattern":
            return {"rope_pattern": [not one for one in bare]}
        if all(bare) or self.sliding != "same":
            return {}
        expected = [not one for one in self._read_rotates({}, windows)]
        wrong = [n for n, (one, other) in enumerate(zip(bare, expected, strict=True)) if one != other]
        if wrong:
            n = wrong[0]
            rule = {
                "none": "it rotates on all layers or on none",
                "fourth": "it rotates on all layers but every fourth",
                "full": "its layers with a window rotate, and its others do not",
                "full_if_windows": "its layers with a window rotate, and its others only in models without windows",
            }[self.unrotated]
            has = "has no rotation, and would get one" if bare[n] else "has a rotation, and would lose it"
            raise UnsupportedError(f"{rule}: layer {n} {has}.")
        return {}

    def _write_sliding(
        self, rotation: Rotation, full: Sequence[Layer], sliding: Sequence[Layer], model: ModelConfig
    ) -> tuple[Rotation, float]:
        """The rotation of the file, and the base of the layers with a window."""
        encoding = single_rotation(sliding, "those with a window") or NoPE()
        if any(isinstance(layer.encoding, NoPE) for layer in sliding) and not isinstance(encoding, NoPE):
            raise UnsupportedError("layers with a window rotate all or not at all.")
        other = self._rotation(encoding, model)
        if not full:  # the others' rotation is nobody's
            rotation = other if self.sliding == "base" else Rotation(other.base)
        wanted = dataclasses.replace(rotation, base=other.base) if self.sliding == "base" else Rotation(other.base)
        if other != wanted or self.sliding == "plain" and other.base != rotation.base:
            rule = {
                "base": "its layers with a window differ from the others in their base alone",
                "plain": "its layers with a window have the others' base and no scaling",
                "plain_base": "its layers with a window have a base and no scaling",
            }[self.sliding]
            raise UnsupportedError(f"{rule}, and here they have {encoding}.")
        if rotation.gain != 1 and self.sliding != "base":
            raise UnsupportedError("its attention factor would be that of layers with a window, too.")
        return rotation, other.base

    def _write_temperature(self, layers: Sequence[Layer], keys: dict[str, Any]) -> dict[str, Any]:
        temperatures = {extra for layer in layers for extra in layer.extras if isinstance(extra, Llama4Temperature)}
        if not temperatures:
            return keys
        (temperature, *others) = temperatures
        if others or any(temperature not in layer.extras for layer in layers):
            raise UnsupportedError("all of its layers have one temperature.")
        scaling = keys["rope"].setdefault("scaling", {"type": "none"})
        if scaling.setdefault("original_context_length", temperature.floor_scale) != temperature.floor_scale:
            raise UnsupportedError(
                f"its temperature rises at multiples of the original length, {scaling['original_context_length']:,} "
                f"tokens; here it is {temperature}."
            )
        if temperature.offset:
            raise UnsupportedError(f"its temperature has no offset; here it is {temperature}.")
        keys["attention"]["temperature_scale"] = temperature.attn_scale
        return keys

    def _rotation(self, encoding: Rotary, model: ModelConfig) -> Rotation:
        """An encoding in llama.cpp's terms; `UnsupportedError` if the architecture cannot express it."""
        if isinstance(encoding, NoPE):
            return Rotation(kind="linear", factor=NO_ROTATION)
        width = model.head_dim
        if isinstance(encoding, PartialRope) and self.partial:  # of the channels that rotate
            width = encoding.rotated_channels(width)
            encoding = Rope(encoding.base, 1.0, encoding.scaling)
        if isinstance(encoding, PartialRope) or encoding.fraction != 1:
            return self._table(encoding, width)
        base, scaling = encoding.base, encoding.scaling
        if scaling is None:
            return Rotation(base)
        if isinstance(scaling, PI):
            return Rotation(base, "linear", scaling.factor)
        if isinstance(scaling, NTK):  # exactly another base
            return Rotation(base * scaling.factor ** (width / (width - 2)))
        if isinstance(scaling, Yarn | NTKByParts):
            betas = (float(scaling.beta_fast), float(scaling.beta_slow))
            if scaling.truncate and (betas == BETAS or self.betas):
                own = 0.1 * math.log(scaling.factor) + 1
                gain = float(frequencies(encoding, width)[1][0]) / own
                gain = 1.0 if abs(gain - 1) < 1e-9 else gain
                return Rotation(base, "yarn", scaling.factor, scaling.original_length, gain, betas)
        if isinstance(scaling, LongRope) and scaling.short_factor != scaling.long_factor and self.tables != "none":
            gain = float(frequencies(encoding, width)[1][0])
            tables = ((SHORT, scaling.short_factor), (LONG, scaling.long_factor))
            return Rotation(base, "longrope", 1.0, scaling.original_length, gain, tables=tables)
        return self._table(encoding, width)

    def _table(self, encoding: Rope | PartialRope, head_dim: int) -> Rotation:
        """The frequencies as one divisor for each pair of a head, and one gain."""
        if self.tables == "none":
            raise UnsupportedError(
                f"llama.cpp reads no divisors of single pairs for it, which {encoding} needs. Nearest: a larger base, "
                "PI or YaRN."
            )
        table, gain = divisors(encoding, head_dim, "llama.cpp")
        names = (SHARED,) if self.tables == "all" else (SHORT, LONG)
        original = getattr(encoding.scaling, "original_length", 0)
        kind = "none" if self.tables == "all" else "longrope"
        return Rotation(encoding.base, kind, 1.0, original, gain, tables=tuple((x, table) for x in names))


def _number(config: Config, key: str, default: float) -> float:
    """A finite number of the metadata."""
    value = lookup(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise CheckpointError(f"{key} is {excerpt(repr(value), 60)}; it must be a number.")
    return stored(float(value))


def stored(value: float) -> float:
    """A number that is stored in float32, without the digits of its rounding: 1e-5 is 9.9999997e-06 there."""
    return float(f"{value:.7g}")


def _tokens(config: Config, key: str, default: int) -> int:
    value = _number(config, key, default)
    if not 1 <= value < 2**31:
        raise CheckpointError(f"{key} is {value:g}; it must be a number of tokens.")
    return int(value)
