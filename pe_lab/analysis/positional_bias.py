"""Positional bias of attention and its gradients, by layer and head: at initialization, and along a training.

DroPE (Gelberg et al. 2025), section 3: Definition 3.1, Figure 4, Propositions 3.2 and 3.3, Theorem 3.4. What is
measured stands in `bias_gradients`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.bias_gradients import LEAST, PATTERNS, PositionalBias, positional_bias
from pe_lab.analysis.sequences import Sequences, add_arguments, check_length
from pe_lab.analysis.session import Session
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import Interval, interval
from pe_lab.results.table import TextTable

__all__ = ["ANALYSIS", "PositionalBias", "positional_bias"]

PROTOCOL = "positional_bias-1"
MOST_LINES = 8  # layers in the figure of training steps


@dataclass(frozen=True)
class Group:
    """One line of the figures: a checkpoint under an encoding, or random initializations of one shape under one.

    Attributes:
      name: unique.
      layers: the measured ones.
      found: the arrays of `PositionalBias` [N, S, L, ...]: N initializations (1 for a checkpoint), S sequences.
      weights: equal for groups whose weights differ in nothing but the encoding that they are measured under.
      encoded: some layer has an encoding of positions; False: none has.
      series: equal for the checkpoints of one phase under one encoding.
      progress: (tokens of the phase, step); None where they are not known, or random.
    """

    name: str
    layers: tuple[int, ...]
    found: Mapping[str, np.ndarray]
    weights: str
    encoded: bool
    series: str = ""
    progress: tuple[int | None, int] | None = None

    def units(self, key: str) -> Float[np.ndarray, "U L *rest"]:
        """Independent values of one array: means over sequences of each initialization, or each sequence."""
        values = np.asarray(self.found[key], np.float64)
        return values.mean(1) if len(values) > 1 else values[0]

    def gradients(self) -> Float[np.ndarray, "U L P"]:
        """Norms with respect to W_Q and W_K together, mean over heads."""
        query, key = (np.asarray(self.found[f"{name}_gradient"], np.float64) for name in ("query", "key"))
        both = np.sqrt(query**2 + key**2).mean(-2)
        return both.mean(1) if len(both) > 1 else both[0]


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4)
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")


def _run(session: Session) -> Findings:
    check_length("positional_bias", session.sequences, LEAST)

    def measure(lm: LanguageModel, batch: Sequences) -> dict[str, Any]:
        places = dict(segments=batch.segments, positions=batch.positions)
        return positional_bias(lm, batch.tokens, session.layers(lm), **places)._asdict()

    groups = groups_of(session, session.measure(PROTOCOL, measure, session.arguments.layers))
    drawn = _without_middle_steps(groups)
    figures = [*_by_layer(drawn), *_by_step(groups), *_by_head(drawn)]
    sentences = [text for encoded, bare in _pairs(groups) for text in compare(encoded, bare)]
    sentences += [text for group in drawn for text in _sentences(group)]
    numbers = {f"{key}_{g}": value for g, group in enumerate(groups) for key, value in group.found.items()}
    axes = "initialization (1 for a checkpoint), sequence, layer"
    shapes = {
        "bias": f"[N, S, L, H, P] {axes}, query head, pattern ({', '.join(PATTERNS)})",
        "query_gradient": "[N, S, L, H, P] norm of the gradient of a head's bias with respect to its W_Q",
        "key_gradient": "[N, S, L, H, P] and to its W_K",
        "spread": f"[N, S, L] {axes}; prefix spread of the layer's input",
        "hidden_norm": "[N, S, L] root mean square norm of the layer's input",
    }
    metadata = {"groups": [{"name": group.name, "layers": group.layers} for group in groups], "patterns": PATTERNS}
    return Findings(tuple(sentences), _tables(groups), tuple(figures), numbers, shapes, metadata)


def groups_of(session: Session, measured: Sequence[Mapping[str, np.ndarray]]) -> list[Group]:
    """The variants of a session with their arrays; initializations that differ in the seed alone are one group."""
    found: dict[str, list[tuple[Variant, str, Mapping[str, np.ndarray]]]] = {}
    random = session.arguments.init is not None
    for variant, name, arrays in zip(session.variants, session.names, measured, strict=True):
        same = f"{variant.lm.config} {variant.fingerprint(session.length)}" if random else name
        members = found.setdefault(same, [])
        # The same weights may be found twice: in two checkpoints of one shape.
        if variant.subject.path not in [known.subject.path for known, _, _ in members] or not random:
            members.append((variant, name, arrays))
    groups = []
    for members in found.values():
        first, name, arrays = members[0]
        chosen = session.layers(first.lm)
        schedule = first.at(session.length).schedule_for(session.length)
        arrays_of = (schedule.inv_freq, schedule.alibi_slope, schedule.noise)  # a structure may be more general
        encoded = any(np.any(x) for x in arrays_of) or any(s.hooks for s in schedule.structure)
        stacked = {key: np.stack([one[key] for _, _, one in members]) for key in arrays}
        if random:
            seeds = "initialization 0" if len(members) == 1 else f"initializations 0 to {len(members) - 1}"
            groups.append(Group(f"{first.label} ({seeds})", chosen, stacked, str(first.lm.config), encoded))
            continue
        subject = first.subject
        series = f"{subject.run} {subject.checkpoint.metadata.get('phase', '')}, {first.label}"
        progress = (subject.tokens_trained, subject.checkpoint.step)
        groups.append(Group(name, chosen, stacked, subject.id, encoded, series, progress))
    names = [group.name for group in groups]
    return [
        g if names.count(g.name) == 1 else Group(**{**vars(g), "name": f"{g.name} #{n}"}) for n, g in enumerate(groups)
    ]


def _pairs(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Groups of the same weights: one with an encoding, one without any."""
    for one in groups:
        for other in groups:
            if one.encoded and not other.encoded and one.weights == other.weights and one.layers == other.layers:
                yield one, other


# ---------------------------------------------------------------------------------------------------------------------
# Sentences and tables


def of_norms(values: Float[np.ndarray, "n ..."]) -> Interval:
    """The geometric mean of positive values, with its 95% interval: norms and ratios are compared by factors."""
    around = interval(np.log(np.maximum(values, 1e-30)))
    return Interval(np.exp(around.mean), np.exp(around.low), np.exp(around.high))


def compare(encoded: Group, bare: Group) -> list[str]:
    """DroPE's Figure 4 in these numbers: gradients larger than without encoding, by a factor that grows with depth."""
    ratios = encoded.gradients() / np.maximum(bare.gradients(), 1e-30)
    depth, L = np.asarray(encoded.layers, np.float64), len(encoded.layers)
    claim = "DroPE's Figure 4, larger" if encoded.progress is None else "Larger"  # the figure is of initializations
    sentences = []
    for p, pattern in enumerate(PATTERNS):
        around = of_norms(ratios[..., p])
        places = ", ".join(f"{cell} in layer {encoded.layers[n]}" for n, cell in _some(around, encoded.layers))
        lower = int((around.mean > 1).sum())
        decided = "" if np.isnan(around.low).all() else f" (interval above 1 in {int((around.low > 1).sum())})"
        sentence = (
            f"{encoded.name} over {bare.name}, {pattern}: norms of the bias's gradient are {places} times as large, "
            f"and larger in {lower} of {L} layers{decided}."
        )
        everywhere = _verdict(around.low.min() > 1, around.mean.min() > 1, around.high.min() < 1)
        sentence += f" {claim} in every layer: {everywhere}."
        if L > 1:
            centred = depth - depth.mean()
            fits = (np.log(ratios[..., p]) * centred).sum(-1, keepdims=True) / (centred**2).sum()
            slope = of_norms(np.exp(fits))
            grows = _verdict(slope.low[0] > 1, slope.mean[0] > 1, slope.high[0] < 1)
            sentence += f" A gap that grows with depth: {grows}; the ratio changes by {_cell(slope, (0,))} a layer."
        sentences.append(sentence)
    return sentences


def _verdict(surely: Any, on_average: Any, surely_not: Any) -> str:
    """What 95% intervals decide about a claim; nothing without them."""
    if surely or surely_not:
        return "confirmed" if surely else "not confirmed"
    return f"undecided ({'so' if on_average else 'not so'} on average)"


def _sentences(group: Group) -> list[str]:
    """The most biased heads of a group (DroPE's Figure 7 takes one), and Theorem 3.4's spread."""
    parts = []
    around = interval(group.units("bias"))
    for p, pattern in enumerate(PATTERNS):
        layer, head = np.unravel_index(np.argmax(around.mean[..., p]), around.mean.shape[:2])
        cell = _cell(around, (layer, head, p))
        parts.append(f"toward the {pattern} {cell} in head {head} of layer {group.layers[layer]}")
    spread = group.units("spread")
    growth = of_norms(spread / np.maximum(spread[:, :1], 1e-30))
    most = int(np.argmax(growth.mean))
    return [
        f"{group.name}: the largest bias is {' and '.join(parts)}; means over heads and layers are "
        f"{', '.join(f'{x:.3g}' for x in around.mean.mean((0, 1)))}.",
        f"{group.name}: the prefix spread of hidden states is at most {_cell(growth, (most,))} times that of layer "
        f"{group.layers[0]}'s input, in layer {group.layers[most]} (Theorem 3.4's constant for these weights).",
    ]


def _cell(around: Interval, at: tuple[Any, ...], digits: int = 3) -> str:
    """`mean [low, high]`, the bounds with `digits` digits."""
    mean, low, high = (np.asarray(part)[at] for part in (around.mean, around.low, around.high))
    return f"{mean:.3g}" if np.isnan(low) else f"{mean:.3g} [{low:.{digits}g}, {high:.{digits}g}]"


def _some(around: Interval, layers: Sequence[int]) -> list[tuple[int, str]]:
    """(place, cell) of the first, the middle and the last layer."""
    return [(n, _cell(around, (n,))) for n in sorted({0, len(layers) // 2, len(layers) - 1})]


def _tables(groups: Sequence[Group]) -> tuple[TextTable, ...]:
    """Biases and gradients, and the spread, in the first, the middle and the last layer."""

    def cells(values: Float[np.ndarray, "U L"], summary: Any) -> list[str]:
        L = values.shape[1]
        three = np.concatenate([values[:, [0, L // 2, L - 1]], values.mean(1, keepdims=True)], 1)
        return [_cell(summary(three), (n,), 2) for n in range(4)]

    places = ("first layer", "middle layer", "last layer", "all layers")
    rows, spreads = [], []
    for group in groups:
        for p, pattern in enumerate(PATTERNS):
            rows.append((group.name, pattern, "bias", *cells(group.units("bias").mean(2)[..., p], interval)))
            for kind, weight in (("query", "W_Q"), ("key", "W_K")):
                norms = group.units(f"{kind}_gradient").mean(2)[..., p]
                rows.append((group.name, pattern, f"gradient, {weight}", *cells(norms, of_norms)))
        spread, norm = group.units("spread"), group.units("hidden_norm")
        spreads.append((group.name, "spread", *cells(spread, of_norms)))
        spreads.append((group.name, "over the norm of hidden states", *cells(spread / norm, of_norms)))
    units = "sequences, or over initializations"
    return (
        TextTable(
            f"Positional bias and norms of its gradient, means over heads; 95% intervals over {units}",
            ("model", "pattern", "of", *places),
            tuple(rows),
            words=3,
        ),
        TextTable("Prefix spread of the input of a layer", ("model", "of", *places), tuple(spreads), words=2),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def _steps(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The series with several checkpoints, each in the order of steps."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if group.progress is not None:
            found.setdefault(group.series, []).append(group)
    ordered = {name: sorted(members, key=lambda g: g.progress[1]) for name, members in found.items()}
    return {name: members for name, members in ordered.items() if len(members) > 1}


def _without_middle_steps(groups: Sequence[Group]) -> list[Group]:
    """All groups but the checkpoints between the first and the last of a phase."""
    middle = {group.name for members in _steps(groups).values() for group in members[1:-1]}
    return [group for group in groups if group.name not in middle]


def _line(group: Group, values: Float[np.ndarray, "U L"], summary: Any) -> Line:
    around = summary(values)
    return Line(group.name, np.asarray(group.layers, np.float64), around.mean, around.low, around.high)


def _by_layer(groups: Sequence[Group]) -> list[Figure]:
    """Lines over layers: the gradient (Figure 4), the bias, and the prefix spread (Theorem 3.4)."""
    gradients, biases = (
        tuple((pattern, tuple(_line(g, of(g)[..., p], how) for g in groups)) for p, pattern in enumerate(PATTERNS))
        for of, how in ((lambda g: g.gradients(), of_norms), (lambda g: g.units("bias").mean(2), interval))
    )
    spread = (("prefix spread", tuple(_line(g, g.units("spread"), of_norms) for g in groups)),)
    relative = tuple(_line(g, g.units("spread") / g.units("hidden_norm"), of_norms) for g in groups)
    bands = "Bands are 95% intervals over initializations, or over sequences of one model."
    layer = "layer"
    return [
        LineCharts(
            "gradient_by_layer",
            "Gradient of the positional bias, by layer",
            f"Norm with respect to W_Q and W_K together, mean over heads (DroPE, Figure 4). {bands}",
            gradients,
            layer,
            "norm of the gradient",
            log_y=True,
        ),
        LineCharts(
            "bias_by_layer",
            "Positional bias, by layer",
            f"Mean over heads (DroPE, Definition 3.1): 0 for uniform attention, near 1 for all weight. {bands}",
            biases,
            layer,
            "positional bias",
        ),
        LineCharts(
            "prefix_spread",
            "Prefix spread of the input of each layer",
            f"The largest distance of a hidden state from the mean of a prefix with it (DroPE, Theorem 3.4). {bands}",
            spread,
            layer,
            "distance",
            log_y=True,
        ),
        LineCharts(
            "prefix_spread_relative",
            "Prefix spread relative to the norm of hidden states",
            f"The prefix spread, over the root mean square norm of the layer's input. {bands}",
            (("relative to the norm", relative),),
            layer,
            "ratio",
        ),
    ]


def _by_step(groups: Sequence[Group]) -> list[Figure]:
    """The gradient along a training, a line for each layer (some, in a deep model) and one for their mean."""
    series = _steps(groups)
    if not series:
        return []
    known = all(group.progress[0] is not None for members in series.values() for group in members)
    panels = []
    for name, members in series.items():
        x = np.array([group.progress[0 if known else 1] for group in members], np.float64)
        values = np.stack([group.gradients().mean(0) for group in members])  # [steps, L, P]
        layers = members[0].layers
        some = sorted({int(n) for n in np.linspace(0, len(layers) - 1, min(MOST_LINES, len(layers)))})
        for p, pattern in enumerate(PATTERNS):
            lines = [Line(f"layer {layers[n]}", x, values[:, n, p]) for n in some]
            lines.append(Line("mean of all layers", x, values[..., p].mean(1)))
            panels.append((f"{name}: {pattern}", tuple(lines)))
    return [
        LineCharts(
            "gradient_by_step",
            "Gradient of the positional bias along the training",
            "Norm with respect to W_Q and W_K together, mean over heads and sequences.",
            tuple(panels),
            "tokens of the phase" if known else "step of the phase",
            "norm of the gradient",
            log_y=True,
        )
    ]


def _by_head(groups: Sequence[Group]) -> list[Figure]:
    """Heat maps of layers and heads, one panel a group, for each pattern."""
    layers = sorted({n for group in groups for n in group.layers})
    heads = max(group.found["bias"].shape[-2] for group in groups)
    figures: list[Figure] = []
    for key, what, scale in (
        ("bias", "Positional bias", "diverging"),
        ("query_gradient", "Gradient norm of the positional bias with respect to W_Q", "sequential"),
        ("key_gradient", "Gradient norm of the positional bias with respect to W_K", "sequential"),
    ):
        for p, pattern in enumerate(PATTERNS):
            values = np.full((len(groups), len(layers), heads), np.nan)
            for g, group in enumerate(groups):
                mean = group.units(key).mean(0)[..., p]
                values[g, [layers.index(n) for n in group.layers], : mean.shape[1]] = mean
            figures.append(
                HeatMaps(
                    f"{key}_by_head_{pattern.split()[0]}",
                    f"{what}, toward the {pattern}",
                    "Each head's own bias (DroPE, Definition 3.1), mean over sequences and initializations.",
                    values,
                    tuple(group.name for group in groups),
                    layer_names(layers),
                    tuple(f"head {h}" for h in range(heads)),
                    "model",
                    "layer",
                    "query head",
                    "positional bias" if key == "bias" else "norm of the gradient",
                    scale,
                )
            )
    return figures


ANALYSIS = Analysis(
    "positional_bias",
    "bias of heads toward their own and the previous token, its gradients, and the prefix spread",
    "DroPE, section 3: Definition 3.1, Figure 4, Propositions 3.2 and 3.3, Theorem 3.4",
    _options,
    _run,
)
