"""The rotary frequencies under each scaling, and the bytes of a rotary cache.

The numbers are those of two papers' figures, computed from `pe_lab.positional` alone: DroPE's Figures 6 and 11 (Gelberg
et al. 2025; the factor gamma_m between a pair's frequency under a scaling and without it) and Partial RoPE's Figure 1
(the bytes of a rotary cache by length, its eq. 1).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis, items, number, numbers, whole
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.positional import Layer, PartialRope, Rope, Yarn, frequencies, to_json
from pe_lab.positional.scalings import SCALINGS
from pe_lab.results.figures import Figure, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.formatting import size_text
from pe_lab.results.table import TextTable

# The display name of a scaling by its name in recipes.
COMPARED = {
    "pi": "PI",
    "ntk": "NTK",
    "yarn": "YaRN",
    "ntk_by_parts": "NTK-by-parts",
    "dynamic_ntk": "dynamic NTK",
    "dynamic_yarn": "dynamic YaRN",
    "llama3": "Llama 3",
}
# 4,096 to 8,388,608 in powers of two, and the ten million of the paper's title figure.
CACHE_LENGTHS = (*(2**k for k in range(12, 24)), 10_000_000)
BYTES_PER_VALUE = 4  # float32, as in the paper
MAX_FACTORS, MAX_FRACTIONS, MAX_HEAD_DIM = 12, 8, 4096  # so that a figure stays readable
MAX_LENGTH = 2**31  # the last position that rotates
MAX_FACTOR = 1e30  # stands for "no rotation" in exported checkpoints


@dataclass(frozen=True)
class Settings:
    """The settings of the figures. The defaults are the heads of SmolLM-360M (DroPE) and of Pythia-1B (Partial RoPE).

    Attributes:
      head_dim: channels of a head, in the figures of scalings; even.
      base: RoPE's base in these figures.
      length: the training length in these figures, in tokens.
      factors: the scaling factors s; the first one is also drawn alone.
      variants: keys of `COMPARED`.
      cache_head_dim: channels of a head, in the figure of the cache; even.
      fractions: the shares of these channels that rotate, each in (0, 1].
    """

    head_dim: int = 64
    base: float = 1e4
    length: int = 2048
    factors: tuple[float, ...] = (2.0, 3.0, 4.0)
    variants: tuple[str, ...] = ("pi", "ntk", "yarn")
    cache_head_dim: int = 256
    fractions: tuple[float, ...] = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        for name, least in (("head_dim", 4), ("cache_head_dim", 2)):  # a curve needs two pairs
            value = getattr(self, name)
            if not least <= value <= MAX_HEAD_DIM or value % 2:
                raise ConfigError(f"{name} is {value}; it must be even, from {least} to {MAX_HEAD_DIM}.")
        if not 1 <= self.length <= MAX_LENGTH:
            raise ConfigError(f"length is {self.length}; give the training length, 1 to {MAX_LENGTH} tokens.")
        for name, most in (("factors", MAX_FACTORS), ("fractions", MAX_FRACTIONS), ("variants", len(COMPARED))):
            values = getattr(self, name)
            if not 1 <= len(values) <= most or len(set(values)) < len(values):
                raise ConfigError(f"{name} holds {len(values)} values; give 1 to {most}, all different.")
        for factor in self.factors:
            if not 1 <= factor <= MAX_FACTOR:
                raise ConfigError(f"factors holds {factor:g}; each must lie between 1 and {MAX_FACTOR:g}.")
        for fraction in self.fractions:
            if not 0 < fraction <= 1:
                raise ConfigError(f"fractions holds {fraction:g}; each must lie above 0 and be at most 1.")
        for variant in self.variants:
            if variant not in COMPARED:
                raise ConfigError(f"variants: there is no '{variant}'. {did_you_mean(variant, list(COMPARED))}")


@dataclass(frozen=True)
class ScalingCurve:
    """All pairs under one scaling.

    Attributes:
      variant: a key of `COMPARED`.
      factor: s.
      encoding: the description, as JSON.
      gamma: [R], a pair's new frequency over its old one; pair 0 is the fastest.
      attention_factor: multiplies cos and sin, and so logits by its square.
    """

    variant: str
    factor: float
    encoding: dict[str, Any]
    gamma: tuple[float, ...]
    attention_factor: float

    @property
    def label(self) -> str:
        return COMPARED[self.variant]


@dataclass(frozen=True)
class CacheCurve:
    """The bytes of a cache of sines and cosines, one number for each of `CACHE_LENGTHS`.

    A pair of the `rotated_channels` has one cosine and one sine, so the cache holds a number for each channel.
    """

    fraction: float
    rotated_channels: int
    bytes: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{100 * self.fraction:.4g}%"


@dataclass(frozen=True)
class Numbers:
    """The numbers of the figures: `scaling` has a curve for each factor and variant, `cache` one for each fraction."""

    settings: Settings
    scaling: tuple[ScalingCurve, ...]
    cache: tuple[CacheCurve, ...]

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON: pairs counted from 0, lengths in tokens."""
        return {
            "analysis": "frequencies",
            "settings": dataclasses.asdict(self.settings),
            "scaling": {
                "pairs": list(range(self.settings.head_dim // 2)),
                "curves": [dataclasses.asdict(curve) for curve in self.scaling],
            },
            "cache": {
                "lengths": list(CACHE_LENGTHS),
                "bytes_per_value": BYTES_PER_VALUE,
                "curves": [dataclasses.asdict(curve) for curve in self.cache],
            },
        }


def compute(settings: Settings) -> Numbers:
    """Computes every number of the three figures.

    Raises:
      ConfigError: a description refuses its numbers (a base of 1), or none of the fractions rotates a channel.
    """
    trained = (settings.head_dim, settings.base, settings.length)
    scaling = [scaling_curve(variant, factor, *trained) for factor in settings.factors for variant in settings.variants]
    cache = []
    for fraction in settings.fractions:
        # Partial RoPE's eq. 1, with the rotated channels instead of all channels.
        channels = PartialRope(fraction=fraction).rotated_channels(settings.cache_head_dim)
        sizes = tuple(length * channels * BYTES_PER_VALUE for length in CACHE_LENGTHS)
        cache.append(CacheCurve(fraction, channels, sizes))
    if not any(curve.rotated_channels for curve in cache):
        raise ConfigError(f"None of the fractions rotates a channel of {settings.cache_head_dim}; give larger ones.")
    return Numbers(settings, tuple(scaling), tuple(cache))


def scaling_curve(variant: str, factor: float, head_dim: int, base: float, length: int) -> ScalingCurve:
    """One variant at one factor: gamma_m = w'_m / w_m, DroPE's eq. 3 and 9 to 11.

    Pairs count from 0 here, as m - 1 for the paper's m, "$m=1,\\dots,\\tfrac{d_{k}}{2}$".
    """
    kind = SCALINGS[variant]
    fields = {field.name for field in dataclasses.fields(kind)}
    # A dynamic scheme computes s from the length of the sequence, here factor * length tokens.
    values = {"factor": factor, "original_length": length}
    given = {name: v for name, v in values.items() if name in fields and not (kind.dynamic and name == "factor")}
    encoding = Rope(base=base, scaling=kind(**given))
    plain, _ = frequencies(Rope(base=base), head_dim)
    scaled, gain = frequencies(encoding, head_dim, length=round(factor * length))
    described = to_json(Layer(encoding))["encoding"]
    return ScalingCurve(variant, factor, described, tuple((scaled / plain).tolist()), float(gain[0]))


def incomplete_pairs(inv_freq: Float[np.ndarray, " R"], length: int) -> int:
    """The number of pairs that rotate less than once (2 pi) in `length` tokens. `inv_freq`: radians per token."""
    return int(np.sum(np.asarray(inv_freq) * length / (2 * math.pi) < 1))


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


OPTIONS = {  # option -> how its text is read, its default, and its help
    "--head-dim": (whole, "64", "channels of a head (default: %(default)s)"),
    "--base": (number, "1e4", "RoPE's base (default: %(default)s)"),
    "--length": (whole, "2048", "training length in tokens (default: %(default)s)"),
    "--factors": (numbers, "2,3,4", "scaling factors s (default: %(default)s); the first is also drawn alone"),
    "--variants": (items, "pi,ntk,yarn", f"of {', '.join(COMPARED)} (default: %(default)s)"),
    "--cache-head-dim": (whole, "256", "channels of a head, for the cache (default: %(default)s)"),
    "--fractions": (numbers, "0.01,0.1,0.25,0.5,0.75,1", "shares that rotate there (default: %(default)s)"),
}


def _options(parser: argparse.ArgumentParser) -> None:
    for option, (_, default, help) in OPTIONS.items():
        parser.add_argument(option, default=default, help=help)


def _run(args: argparse.Namespace) -> Findings:
    settings = {}
    for option, (parse, *_) in OPTIONS.items():
        name = option.removeprefix("--").replace("-", "_")
        settings[name] = parse(option, getattr(args, name))
    found = compute(Settings(**settings))
    written = json.dumps(found.to_json(), allow_nan=False) + "\n"
    return Findings((), tables(found), figures(found), files={"frequencies.json": written.encode()})


def tables(numbers: Numbers) -> tuple[TextTable, TextTable]:
    """The numbers at chosen pairs and lengths."""
    settings = numbers.settings
    pairs = telling_pairs(settings)
    header = ("s", "variant", "cos, sin x", *(f"pair {pair}" if pair == pairs[0] else str(pair) for pair in pairs))
    rows = tuple(
        (f"{curve.factor:g}", curve.label, f"{curve.attention_factor:.6f}", *(f"{curve.gamma[n]:.4f}" for n in pairs))
        for curve in numbers.scaling
    )
    shown = [CACHE_LENGTHS.index(length) for length in (2**12, 2**15, 2**17, 2**20, 10_000_000)]
    cache_header = ("rotated", "channels", *(f"{CACHE_LENGTHS[i]:,}" for i in shown))
    cache = tuple(
        (part.label, str(part.rotated_channels), *(size_text(part.bytes[i]) for i in shown)) for part in numbers.cache
    )
    return (
        TextTable(
            f"New frequency / old frequency: {settings.head_dim} channels, base {settings.base:g}, trained on "
            f"{settings.length:,} tokens; pair 0 rotates fastest",
            header,
            rows,
            words=0,
        ),
        TextTable(
            f"Bytes of a float32 cache of sines and cosines by length in tokens: {settings.cache_head_dim} channels",
            cache_header,
            cache,
            words=0,
        ),
    )


def telling_pairs(settings: Settings) -> list[int]:
    """The pairs at which the variants differ most: the ends, the middle, and YaRN's ramp."""
    pairs = settings.head_dim // 2
    bounds = Yarn(factor=1.0, original_length=settings.length).ramp_bounds(settings.base, settings.head_dim)
    low, high = (int(min(max(bound, 0), pairs)) for bound in bounds)
    chosen = {0, 1, low, low + 1, low + 2, pairs // 2 - 1, high - 1, high, pairs - 2, pairs - 1}
    return sorted(pair for pair in chosen if 0 <= pair < pairs)


def figures(numbers: Numbers) -> tuple[Figure, ...]:
    """DroPE's Figures 6 (the first factor) and 11 (all factors), and Partial RoPE's Figure 1."""
    settings = numbers.settings
    pairs = np.arange(settings.head_dim // 2, dtype=np.float64)
    described = f"{settings.head_dim} channels, base {settings.base:,.10g}, trained on {settings.length:,} tokens."
    panels = []
    for factor in settings.factors:
        curves = [curve for curve in numbers.scaling if curve.factor == factor]
        panels.append((f"s = {factor:g}", tuple(Line(one.label, pairs, np.array(one.gamma)) for one in curves)))

    def scalings(name: str, some: tuple[tuple[str, tuple[Line, ...]], ...], source: str) -> LineCharts:
        return LineCharts(
            name,
            "RoPE's frequencies under each scaling",
            f"{described} {source}.",
            some,
            "pair of channels, from the fastest to the slowest",
            "new frequency / old frequency",
            y_limits=(0.0, 1.06),
        )

    lengths = np.array(CACHE_LENGTHS, np.float64)
    cache = [
        Line(f"{one.label}: {one.rotated_channels} channels", lengths, np.array(one.bytes, np.float64))
        for one in sorted(numbers.cache, key=lambda one: -one.fraction)
        if one.rotated_channels  # a logarithmic axis has no place for 0
    ]
    return (
        scalings("frequency_scaling", tuple(panels[:1]), "DroPE, Figure 6"),
        scalings("frequency_scaling_by_factor", tuple(panels), "DroPE, Figure 11"),
        LineCharts(
            "rotation_cache",
            f"A stored rotary cache, by the share of {settings.cache_head_dim} channels that rotates",
            "Sines and cosines in float32 (Partial RoPE, Figure 1).",
            (("", tuple(cache)),),
            "longest sequence, tokens",
            "bytes",
            log_x=True,
            log_y=True,
            x_unit="length",
            y_unit="bytes",
            x_ticks=(2.0**12, 2.0**14, 2.0**16, 2.0**18, 2.0**20, 2.0**22, 1e7),
        ),
    )


ANALYSIS = Analysis("DroPE, Figures 6 and 11; Partial RoPE, Figure 1", _options, _run, models=False)
