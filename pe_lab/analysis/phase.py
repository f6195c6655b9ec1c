r"""The range and the rounding of rotary phases: which pairs leave their trained range, and how exact an angle is.

Range (DroPE, Gelberg et al. 2025, section 4.1). Pair m rotates by w_m radians a token. At training length L its phase
at relative distances covers [0, w_m L]; where w_m L < 2 pi it never completes a cycle, and a longer sequence has
phases that training never saw, unless a scaling multiplies w_m by gamma_m <= L / target. The paper:
"for a standard RoPE base $b=10^{4}$, a transformer with head dimension $d_{k}=64$, will have at least five low
frequencies [...] even at a training context of $C_{\mathrm{train}}=32{,}000$"; counted, there are two.

Rounding. A phase that is computed as a float32 product n w has two roundings, that of w and that of the product:
|error| <= 2 u n w (1 + u/2) with u = 2^-24, plus u n w where n > 2^24 is itself rounded. Positions in bfloat16 (8
significant bits) are off by up to 2^-9 n before the product. pe_lab's angles are 64-bit fixed-point fractions of a
cycle, and wrap as integers do.

Finite precision bounds the base (as arXiv 2602.10959 states; these bounds are derived here). Take p significant bits,
rounding to nearest, ties to even. Between 1/2 and 1 numbers are 2^-p apart, so cos(w) rounds to 1 if and only if
1 - cos(w) = 2 sin^2(w/2) <= 2^-(p+1), that is

  w <= w_cos = 2 arcsin(2^-(p+2)/2), about 2^(-p/2): 2.4e-4 in float32 (p = 24), 0.0625 in bfloat16 (p = 8).

Of a rotation at distance 1 there then remains only the odd part, q1 k2 - q2 k1 times sin(w). Added to a number in
[1, 2), where numbers are 2^(1-p) apart, sin(w) is lost too if w <= w_sin = arcsin(2^-p). The slowest of d/2 pairs has
w = base^(-(d-2)/d): it is above w_cos if base < w_cos^(-d/(d-2)), and above w_sin if base < w_sin^(-d/(d-2)); for
large d these are 2^(p/2) and 2^p. At distance L the same holds of w L: base < (w_cos / L)^(-d/(d-2)).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.frequencies import incomplete_pairs
from pe_lab.analysis.schedule import DescribedModel, add_arguments, described
from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_length, parse_variants
from pe_lab.evaluation.targets import locate_all, parse_steps
from pe_lab.evaluation.variants import layers_under
from pe_lab.model import model_schedule
from pe_lab.positional import Rope, frequencies, label
from pe_lab.positional.codec import ranges
from pe_lab.positional.rotation import angles, fixed_point_frequencies
from pe_lab.results.figures import Figure, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.table import TextTable

PRECISIONS = {"float32": 24, "float16": 11, "bfloat16": 8}  # significant bits
COMPUTED = ("float32 product", "bfloat16 positions", "fixed point (pe_lab)")
TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


def exact_angles(inv_freq: Float[np.ndarray, " R"], positions: Int[np.ndarray, " P"]) -> Float[np.ndarray, "P R"]:
    """n w modulo 2 pi, in [-pi, pi), of float64 frequencies taken as exact numbers; by integers of any size."""
    one = 1 << 128
    cycles = [int(Fraction(float(w)) / TWO_PI * one) for w in inv_freq]
    found = [[(int(n) * c + one // 2) % one - one // 2 for c in cycles] for n in positions]
    return np.array([[float(Fraction(x, one)) for x in row] for row in found]) * (2 * math.pi)


def rounding_errors(inv_freq: Float[np.ndarray, " R"], positions: Int[np.ndarray, " P"]) -> dict[str, np.ndarray]:
    """|computed phase - exact phase| [P, R] in radians, on the circle, for each way of `COMPUTED`.

    Less than 1e-15 of a position is counted as 0: a float64 holds the 2 pi that is taken off the products.
    """
    w = inv_freq.astype(np.float32)
    rounded = positions.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    fixed = jnp.asarray(fixed_point_frequencies(inv_freq))
    computed = (
        positions.astype(np.float32)[:, None] * w,
        rounded[:, None] * w,
        np.asarray(angles(fixed, jnp.asarray(positions, jnp.int32)[None])[0]),
    )
    exact = exact_angles(inv_freq, positions)
    differences = [np.remainder(phase.astype(np.float64) - exact + math.pi, 2 * math.pi) for phase in computed]
    errors = [np.abs(x - math.pi) for x in differences]
    least = 1e-15 * positions[:, None]
    return {name: np.where(x > least, x, 0) for name, x in zip(COMPUTED, errors, strict=True)}


def product_bound(inv_freq: Float[np.ndarray, " R"], position: int) -> Float[np.ndarray, " R"]:
    """The largest possible error of a float32 product at positions up to `position`, which is at most 2^24."""
    unit = 2.0**-24
    return (2 + unit) * unit * position * np.asarray(inv_freq)


def slowest_cosine(bits: int) -> float:
    """The largest w in radians whose cosine rounds to 1 in numbers of `bits` significant bits."""
    return 2 * math.asin(2 ** (-(bits + 2) / 2))


def slowest_sine(bits: int) -> float:
    """The largest w in radians whose sine is lost when it is added to a number in [1, 2)."""
    return math.asin(2.0**-bits)


def largest_base(slowest: float, head_dim: int, distance: int = 1) -> float:
    """The base at which the slowest pair of full RoPE rotates by `slowest` radians in `distance` tokens.

    For a head with a single pair, which rotates by 1 whatever the base: infinity.
    """
    return math.inf if head_dim <= 2 else (slowest / distance) ** (-head_dim / (head_dim - 2))


# ---------------------------------------------------------------------------------------------------------------------
# The range

COMPARED = ("as trained", "PI", "NTK", "YaRN")
FAR = 2**20  # a position at which rounding is measured, besides the training length and the longest target
AROUND = 512  # positions up to a position, whose largest error is taken: that of one position may be small by chance
PAPER = (1e4, 64, 32_000, 5)  # base, head_dim, length, and "at least five" pairs


@dataclass(frozen=True)
class PhaseRotation:
    """Equal rotations of some layers, or of some heads of these, of one description.

    Attributes:
      name, where, encoding: the description, the layers (and heads), and their encoding, for people.
      length: of training sequences; distances in a window are shorter: `reach`.
      trained: [R] radians per token at the training length; 0: unrotated.
      targets: {(target length, variant): [R]}.
      window: of these layers.
    """

    name: str
    where: str
    encoding: str
    length: int
    trained: Float[np.ndarray, " R"]
    targets: Mapping[tuple[int, str], Float[np.ndarray, " R"]]
    window: int | None

    def reach(self, length: int) -> int:
        """The number of distances that a query sees in sequences of `length` tokens."""
        return length if self.window is None else min(length, self.window)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.where} ({self.encoding})"

    @property
    def rotating(self) -> int:
        return int((self.trained > 0).sum())

    def incomplete(self, length: int) -> int:
        """The number of rotating pairs that complete no cycle in sequences of `length` tokens, as trained."""
        return incomplete_pairs(self.trained[self.trained > 0], self.reach(length))

    def outside(self, target: int, variant: str) -> Bool[np.ndarray, " R"]:
        """The pairs with phases outside their trained range in sequences of `target` tokens under a variant."""
        return outside(self.trained, self.targets[target, variant], self.reach(self.length), self.reach(target))

    def gamma(self, target: int, variant: str) -> float:
        """The largest factor of a variant on a pair that completes no cycle in training; NaN if all complete one."""
        slow = (self.trained > 0) & (self.trained * self.reach(self.length) < 2 * math.pi)
        return float((self.targets[target, variant][slow] / self.trained[slow]).max()) if slow.any() else math.nan


def outside(
    trained: Float[np.ndarray, " R"], scaled: Float[np.ndarray, " R"], length: int, target: int
) -> Bool[np.ndarray, " R"]:
    """Pairs whose phase at distance `target` is one that no distance up to `length` had in training.

    Pairs that complete a cycle in `length` tokens have had every phase.
    """
    # PI takes the phase at the target to that of the training length, but for rounding.
    return (trained > 0) & (trained * length < 2 * math.pi) & (scaled * target > trained * length * (1 + 1e-9))


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--from", dest="source", metavar="RUN[,RUN...]", help="runs, phases, checkpoints, hf:DIR, gguf:FILE")
    add("--steps", help="checkpoints of each phase: all that are kept, or of steps 8000,14000 (default: the last)")
    add_arguments(parser)
    add("--length", help="the training length in tokens (default: that of the recipe or the checkpoint)")
    add("--target", default="2x,4x,16x", help="lengths to extend to, such as 2x,4x or 32k (default: %(default)s)")
    add("--variants", default="pi,ntk,yarn", help="scalings: of pi, ntk, yarn (default: %(default)s)")


def _run(args: argparse.Namespace) -> Findings:
    variants = tuple(dict.fromkeys([COMPARED[0], *parse_variants(args.variants)]))
    for variant in variants:
        if variant not in COMPARED:
            raise ConfigError(
                f"--variants={variant.replace(' ', '-')} changes no frequency; give some of pi, ntk, yarn."
            )
    sources = _described(args)
    found = [rotation for one in sources for rotation in rotations(one, _targets(args, one), variants)]
    found = [rotation for rotation in found if rotation.rotating]
    if not found:
        names = ", ".join(dict.fromkeys(one.name for one in sources))
        raise ConfigError(f"phase: no layer of {names} rotates. Name layers with RoPE, such as rope:base=10000.")
    figures, numbers, sentences, rounding = [], {}, [], []
    for r, rotation in enumerate(found):
        suffix = f"_{r}" if len(found) > 1 else ""
        at = sorted({rotation.length, max(n for n, _ in rotation.targets), FAR})
        largest = {n: _largest_errors(rotation.trained, n) for n in at}
        figures += [_range_figure(rotation, suffix), _rounding_figure(rotation, largest, suffix)]
        numbers[f"inv_freq{suffix}"] = rotation.trained
        for (target, variant), scaled in rotation.targets.items():
            numbers[f"inv_freq_{variant.replace(' ', '_')}_{target}{suffix}"] = scaled
        for n, errors in largest.items():
            numbers[f"rounding_{n}{suffix}"] = np.stack([errors[name] for name in COMPUTED])
            cells = [f"{errors[name].max():.1e}" for name in COMPUTED]
            bound = f"{product_bound(rotation.trained, n).max():.1e}" if n <= 2**24 else "-"
            rounding.append((rotation.title, f"{n:,}", *cells, bound))
        sentences += _sentences(rotation, variants, largest[at[-1]], at[-1])
    tables = (
        *_range_tables(found, variants),
        TextTable(
            f"Largest error of a phase in radians, of all pairs at the {AROUND} positions up to n",
            ("layers", "n", *COMPUTED, "bound of the product"),
            tuple(rounding),
        ),
        _precision_table(found),
    )
    shapes = {
        "inv_freq": "[R] radians per token, as trained; with a variant and a length: in sequences of that length",
        "rounding": f"[{len(COMPUTED)}, R] {', '.join(COMPUTED)}; largest error in radians at positions up to n",
    }
    metadata = {"rotations": [{"title": one.title, "length": one.length} for one in found]}
    return Findings(tuple(sentences), tables, tuple(figures), numbers, shapes, metadata)


def _described(args: argparse.Namespace) -> Sequence[DescribedModel]:
    if sum(map(bool, (args.source, args.config, args.positional))) != 1:
        raise ConfigError(
            "phase is about checkpoints (--from=...), a recipe (--config=...) or layers (--positional=...): "
            "give one of them."
        )
    if not args.source:
        return described(args)
    targets = locate_all(args.source, None if args.steps is None else parse_steps(args.steps))
    args.directory = targets[0].root / "analysis" / "phase"
    found = []
    for target in targets:
        for path in target.paths:
            source = open_source(path)
            phase = source.metadata.get("phase", "")  # of a converted checkpoint, the name of its directory
            name = " ".join(filter(None, dict.fromkeys((target.display_name, phase))))
            found.append(DescribedModel(name, source.layers, source.training_length, source.model, path))
    if args.out is None:
        targets[0].write_marker()
    return found


def _targets(args: argparse.Namespace, one: DescribedModel) -> tuple[int, tuple[int, ...]]:
    """The training length and the target lengths of a description."""
    length = one.length if args.length is None else parse_length("--length", args.length, one.length or 0)
    if length is None:
        raise ConfigError("phase: --positional does not tell the training length. Give --length=TOKENS.")
    targets = sorted({parse_length("--target", item, length) for item in args.target.split(",") if item.strip()})
    if not targets or targets[0] <= length or targets[-1] >= 2**31:
        raise ConfigError(
            f"--target={args.target}: give lengths above the training length of {length:,} tokens and below 2^31."
        )
    return length, tuple(targets)


def rotations(
    one: DescribedModel, lengths: tuple[int, Sequence[int]], variants: Sequence[str]
) -> Iterator[PhaseRotation]:
    """The distinct rotations of a model, in the order of layers and heads.

    Args:
      lengths: of training, and the targets.
      variants: of `COMPARED`.
    """
    (length, targets), shape = lengths, one.model

    def inv_freq(variant: str, target: int) -> Float[np.ndarray, "N H R"]:
        layers = layers_under(variant, one.layers, target, length)
        schedule = model_schedule(shape, layers, target)
        high, low = np.moveaxis(np.asarray(schedule.fixed_freq, np.float64), -1, 0)
        return (high + low * 2.0**-32) * 2.0**-32 * (2 * math.pi)

    trained = inv_freq("as trained", length)
    scaled = {(n, variant): inv_freq(variant, n) for n in targets for variant in variants}
    places: dict[Any, list[tuple[int, int]]] = {}
    for n, layer in enumerate(one.layers):
        for h in range(shape.heads):
            places.setdefault((layer, trained[n, h].tobytes()), []).append((n, h))
    for (layer, _), at in places.items():
        n, h = at[0]
        of = sorted({m for m, _ in at})
        where = f"layer{'s' * (len(of) > 1)} {ranges(of)}"
        if len(at) < len(of) * shape.heads:
            where += f", heads {ranges(sorted({head for m, head in at if m == n}))}"
        here = {key: values[n, h] for key, values in scaled.items()}
        yield PhaseRotation(one.name, where, label(layer), length, trained[n, h], here, layer.window)


def _largest_errors(inv_freq: Float[np.ndarray, " R"], position: int) -> dict[str, Float[np.ndarray, " R"]]:
    positions = np.arange(max(0, position - AROUND + 1), position + 1)
    return {name: errors.max(0) for name, errors in rounding_errors(inv_freq, positions).items()}


def _counted(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})"


def _range_tables(found: Sequence[PhaseRotation], variants: Sequence[str]) -> tuple[TextTable, TextTable]:
    complete, scaled = [], []
    for one in found:
        lengths = sorted({n for n, _ in one.targets})
        cells = [f"{n:,}: {_counted(one.incomplete(n), one.rotating)}" for n in (one.length, *lengths)]
        complete.append((one.title, str(one.rotating), cells[0], "  ".join(cells[1:])))
        for target in lengths:
            for variant in variants:
                count, gamma = int(one.outside(target, variant).sum()), one.gamma(target, variant)
                needed = f"{one.reach(one.length) / one.reach(target):.4g}"
                given = "-" if math.isnan(gamma) else f"{gamma:.4g}"
                scaled.append((one.title, variant, f"{target:,}", _counted(count, one.rotating), needed, given))
    return (
        TextTable(
            "Rotating pairs that complete no cycle, as trained",
            ("layers", "rotating", "in the training length", "in the target lengths"),
            tuple(complete),
        ),
        TextTable(
            "Pairs with phases outside their trained range, and gamma: the largest factor on a pair without a cycle",
            ("layers", "variant", "target", "outside", "gamma needed", "gamma of the variant"),
            tuple(scaled),
            words=2,
        ),
    )


def _precision_table(found: Sequence[PhaseRotation]) -> TextTable:
    """What numbers of a precision can tell of a rotation by one token."""
    rows = []
    for one in found:
        rotating, d = one.trained[one.trained > 0], 2 * len(one.trained)
        for name, bits in PRECISIONS.items():
            cosine, sine = slowest_cosine(bits), slowest_sine(bits)
            counts = [_counted(int((rotating <= w).sum()), len(rotating)) for w in (cosine, sine)]
            bases = [largest_base(*x) for x in ((cosine, d), (sine, d), (cosine, d, one.length))]
            rows.append((one.title, name, f"{cosine:.3g}", *counts, *(f"{base:.4g}" for base in bases)))
    header = ("layers", "precision", "w_cos", "cos(w) is 1", "sin(w) is lost", "base by cos", "by sin", "by cos at L")
    return TextTable("Pairs that a precision cannot tell from unrotated ones at distance 1", header, tuple(rows), 2)


def _sentences(
    one: PhaseRotation, variants: Sequence[str], errors: Mapping[str, np.ndarray], position: int
) -> list[str]:
    target = min(n for n, _ in one.targets)
    slow, reach = one.incomplete(one.length), one.reach(one.length)
    product, rounded, fixed = (errors[name].max() for name in COMPUTED)
    parts = [f"{variant} {int(one.outside(target, variant).sum())}" for variant in variants]
    sentences = [
        f"{one.title}: {slow} of {one.rotating} rotating pairs complete no cycle in {reach:,} tokens. In sequences of "
        f"{target:,} tokens, pairs with phases outside the trained range are: {', '.join(parts)}. To keep all inside, "
        f"a scaling must multiply these {slow} frequencies by at most {reach / one.reach(target):.4g}.",
        f"{one.title}: at position {position:,} a phase is off by up to {product:.2g} rad as a float32 product, "
        f"{rounded:.2g} rad with bfloat16 positions, and {fixed:.1g} rad in pe_lab's fixed point.",
    ]
    base, head_dim, length, stated = PAPER
    reference, _ = frequencies(Rope(base), head_dim)
    if len(reference) == len(one.trained) and np.allclose(one.trained, reference, rtol=1e-9, atol=0):
        counted = incomplete_pairs(reference, length)
        sentences.append(
            f"{one.title}: DroPE (section 4.1) states at least {stated} pairs without a cycle at {length:,} tokens for "
            f"this spectrum; counted, there are {counted}."
        )
    return sentences


def _range_figure(one: PhaseRotation, suffix: str) -> Figure:
    """The phase at the end of a sequence, by pair, in cycles: as trained, and at each target under each variant."""
    shown = np.flatnonzero(one.trained > 0)
    x, end = shown.astype(np.float64), one.reach(one.length)
    trained = one.trained[shown] * end / (2 * math.pi)
    panels = []
    for variant in dict.fromkeys(variant for _, variant in one.targets):
        lines = [Line(f"trained, {one.length:,} tokens", x, trained)]
        for target in sorted({n for n, _ in one.targets}):
            cycles = one.targets[target, variant][shown] * one.reach(target) / (2 * math.pi)
            lines.append(Line(f"{target:,} tokens", x, cycles))
        lines.append(Line("one cycle", x, np.ones_like(x)))
        panels.append((variant, tuple(lines)))
    slow = shown[trained < 1]
    return LineCharts(
        f"phase_range{suffix}",
        f"Phase at the largest distance: {one.title}",
        "In cycles. A pair below one cycle in training has phases outside its trained range wherever a line is above "
        "the trained one (DroPE, section 4.1).",
        tuple(panels),
        "pair of channels, from fast to slow",
        "cycles",
        log_y=True,
        marks=((float(slow[0]), "no cycle from here on"),) if len(slow) else (),
    )


def _rounding_figure(one: PhaseRotation, largest: Mapping[int, Mapping[str, np.ndarray]], suffix: str) -> Figure:
    shown = np.flatnonzero(one.trained > 0)
    x = shown.astype(np.float64)
    panels = []
    for n, errors in largest.items():
        values = {**errors, "2 u n w": product_bound(one.trained, n)}
        lines = [Line(name, x, np.where(y[shown] > 0, y[shown], np.nan)) for name, y in values.items()]
        panels.append((f"n = {n:,}", tuple(lines)))
    return LineCharts(
        f"phase_rounding{suffix}",
        f"Rounding error of the phase: {one.title}",
        f"The largest error at the {AROUND} positions up to n, against exact arithmetic. 2 u n w, with u = 2^-24, "
        "bounds that of the float32 product.",
        tuple(panels),
        "pair of channels, from fast to slow",
        "radians",
        log_y=True,
    )


ANALYSIS = Analysis("DroPE, section 4.1; arXiv 2602.10959", _options, _run, models=False)
