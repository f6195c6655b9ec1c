"""What the positional encoding of one layer, or of one head, is worth: the loss without it, and without several.

DroPE (Gelberg et al. 2025) drops the encoding of all layers at once. This analysis drops it from one layer at a time,
and then from more and more layers, without any training afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.losses import (
    EditedLosses,
    EditPlace,
    Layers,
    Streams,
    bin_edges,
    greedy_order,
    mean_loss,
    shortened,
)
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.statistics import ArrayLike
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_lengths
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.positional import drop, read_with
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable
from pe_lab.terminal import Progress, bounded, positive

TOKENS = 2**15  # by default
POINTS = 32  # of a curve of cumulative costs, at most


def measure(
    lm: LanguageModel,
    tokens: Tokens,
    targets: Int[ArrayLike, "B T"],
    edits: Sequence[Layers],
    **places: Any,
) -> Float32[np.ndarray, "E B T"]:
    """How much each edit adds to the loss of each target, nats. The mean over T is the cost in a sequence.

    The layers below an edit are run once: with one layer edited at a time, half of the layers are run.

    Args:
      tokens: as `lm.logits` takes them.
      targets: the next tokens.
      edits: the layers of each edited model; see `edited_layers`.
      places: `segments` and `positions` of the tokens, for packed documents.
    """
    streams = Streams(lm, tokens, **places)
    before = streams.losses(targets)
    return np.stack([streams.under(lm.with_positional(edit)).losses(targets) - before for edit in edits])


# ---------------------------------------------------------------------------------------------------------------------
# The measurement of one variant


@dataclass(frozen=True)
class VariantLosses:
    """The losses of one variant under sets of edits.

    Attributes:
      passes: by length. Where no encoding depends on the length, the longest alone: causality makes the losses of its
        first tokens those of a shorter sequence.
      choosing: the shortest, by which a greedy order is chosen.
    """

    ranges: tuple[Range, ...]
    passes: Mapping[int, EditedLosses]
    choosing: EditedLosses

    def __call__(self, sets: Sequence[Sequence[EditPlace]], indices: Sequence[int]) -> Means:
        """The losses under each set of edits, in the sequences of these indices."""
        bins = {length: one.measure(sets, indices) for length, one in self.passes.items()}
        longest = max(bins)
        means = []
        for r in self.ranges:
            length = r.length if r.length in bins else longest
            means.append(mean_loss(bins[length], self.passes[length].edges, r.first, r.end))
        return Means(np.stack(means), bins[longest])

    def choose(
        self, dropped: Sequence[EditPlace], candidates: Sequence[EditPlace], indices: Sequence[int]
    ) -> np.ndarray:
        """The mean loss of the shortest sequences with each candidate dropped beside those dropped already."""
        bins = self.choosing.measure([(*dropped, c) for c in candidates], indices, dropped)
        return mean_loss(bins, self.choosing.edges, 0, self.choosing.sequences.length).mean(-1)


def _losses_of(session: AnalysisSession, variant: Variant, lengths: Sequence[int], on_work: Any) -> VariantLosses:
    edit, trained = session.arguments.edit, variant.training_length
    boundaries = {*lengths, *(v.training_length for v in session.variants)}
    edges = bin_edges([b for b in boundaries if b <= max(lengths)])

    def at(length: int) -> EditedLosses:
        before = variant.layers_at(length)
        after = drop().apply(before) if edit == "drop" else read_with(edit, before, trained)
        sequences = shortened(session.sequences, length)
        return EditedLosses(session, variant, after, sequences, edges[edges <= length], on_work)

    each = {length: at(length) for length in lengths}
    described = {(one.lm.layers, one.after) for one in each.values()}
    follows = any(layer.follows_length for pair in described for layers in pair for layer in layers)
    passes = each if len(described) > 1 or follows else {max(lengths): each[max(lengths)]}
    ranges = [Range(length, 0, length) for length in lengths]
    ranges += [Range(length, trained, length) for length in lengths if length > trained and trained in edges]
    ranges.sort(key=lambda r: (r.length, r.first))
    return VariantLosses(tuple(ranges), passes, each[min(lengths)])


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", default="1x,2x", help="tokens of the sequences, such as 1x,2x or 512,1k (default: %(default)s)")
    add("--sequences", type=positive, metavar="N", help=f"how many (default: {TOKENS:,} tokens, in 8 to 256 sequences)")
    text = "a glob, or jsonl:, parquet:, arrow:, hf:, tfds:, stdlib (default: the text that the run's data holds out)"
    add("--text", metavar="SOURCE", help=f"the text of the sequences: {text}")
    add("--edit", default="drop", help="drop, or an encoding or scaling, such as yarn:factor=2 (default: %(default)s)")
    add("--by", choices=("layer", "head"), default="layer", help="what is edited alone (default: %(default)s)")
    add("--layers", help="such as 0,2,8-11 (default: all)")
    add("--greedy", nargs="?", const="all", metavar="K", help="also drop the least costly next, until K are dropped")
    add("--candidates", type=positive, metavar="C", help="with --greedy: try C each time, not all that are left")
    add("--points", metavar="K[,K...]", help=f"numbers dropped together, such as 5,10,30 (default: up to {POINTS})")
    add(
        "--random",
        type=bounded(int, 0, 10_000),
        default=0,
        metavar="R",
        help="also drop in R random orders (default: 0)",
    )


def _run(session: AnalysisSession) -> Findings:
    arguments = session.arguments
    lengths = parse_lengths(arguments.lengths, session.variants[0].training_length)
    arguments.length = str(max(lengths))
    if arguments.sequences is None:
        arguments.sequences = min(max(TOKENS // max(lengths), 8), 256)
    work = WorkDone()
    measured = [_losses_of(session, variant, lengths, work.add) for variant in session.variants]
    editable = [_places(session, variant, one) for variant, one in zip(session.variants, measured, strict=True)]
    unchanged = [name for name, places in zip(session.names, editable, strict=True) if not places]
    if not any(editable):
        raise ConfigError(
            f"layers: --edit={arguments.edit} changes none of the chosen layers of {', '.join(unchanged)}. "
            "Name a model whose layers have an encoding, or another --edit."
        )
    if arguments.points is not None:
        most = max(map(len, editable))
        given = numbers_and_ranges(arguments.points, "--points")
        if not 1 <= min(given) <= max(given) <= most:
            raise ConfigError(f"--points={arguments.points}: give numbers of dropped layers or heads from 1 to {most}.")
    total = len(session.sequences)
    # Orders are chosen on one half of the sequences and measured on the other, so that chance favours none. Fewer than
    # four sequences have no halves with intervals.
    choosing, measuring = (range(0, total, 2), range(1, total, 2)) if total > 3 else (range(total), range(total))
    results = []
    for name, losses, places in zip(session.names, measured, editable, strict=True):
        if not places:
            continue
        count = _greedy_count(arguments.greedy, len(places))
        expected = _expected_work(arguments, losses, places, count, (total, len(choosing), len(measuring)))
        with session.progress(f"layers: {name}", expected) as progress:
            work.start(progress, expected)
            alone = losses([(), *([place] for place in places)], range(total))
            single = alone.loss[0, 1:][:, list(choosing)].mean(-1)
            curves = []
            for label, orders in _orders(arguments, losses, places, single, count, choosing).items():
                points = _points(arguments, len(orders[0]))
                drawn = [losses([order[:k] for k in points], measuring) for order in orders]
                curves.append(Curve(label, orders, points, Means(*(np.mean(x, 0) for x in zip(*drawn, strict=True)))))
        edges = losses.passes[max(losses.passes)].edges
        results.append(EditLosses(name, places, losses.ranges, edges, alone, tuple(curves), tuple(measuring)))
    found = findings(arguments.edit, arguments.by, results)
    left_out = [f"{name} is left out: --edit={arguments.edit} changes none of its layers." for name in unchanged]
    return dataclasses.replace(found, sentences=(*found.sentences, *left_out))


class WorkDone:
    """Counts the work that is done, and shows it."""

    def start(self, progress: Progress, expected: float) -> None:
        self._progress, self._expected, self._done = progress, expected, 0.0

    def add(self, work: float, found: bool) -> None:
        self._done += work
        if found:
            self._progress.found(work)
        self._progress.update(self._done, f"{min(self._done / self._expected, 1):.0%}")


def _places(session: AnalysisSession, variant: Variant, losses: VariantLosses) -> tuple[EditPlace, ...]:
    """The chosen layers, or their heads, that the edit changes; none of a model without encodings that is dropped."""
    lm, one = variant.lm, losses.passes[max(losses.passes)]
    found = []
    for n in session.layers(lm):
        before, after = one.lm.layers[n], one.after[n]
        if session.arguments.by == "head":
            heads = range(lm.config.heads) if before.encoding != after.encoding else ()
            found += [EditPlace(n, h) for h in heads]
        elif before != after:
            found.append(EditPlace(n))
    return tuple(found)


def _greedy_count(text: str | None, places: int) -> int:
    """How many layers or heads are dropped in the greedy order."""
    if text is None or text == "all":
        return 0 if text is None else places
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= places:
        raise ConfigError(f"--greedy={text}: give how many of the {places} layers or heads to drop, or leave it out.")
    return int(text)


def _points(arguments: argparse.Namespace, count: int) -> tuple[int, ...]:
    """The numbers of dropped layers or heads of a curve of `count`: those of `--points`, or at most POINTS."""
    if arguments.points is None:
        return tuple(np.unique(np.linspace(1, count, min(count, POINTS)).round().astype(int)).tolist())
    given = sorted(set(numbers_and_ranges(arguments.points, "--points")))
    return tuple(k for k in given if k <= count) or (count,)


def _orders(
    arguments: argparse.Namespace,
    losses: VariantLosses,
    places: tuple[EditPlace, ...],
    single: Float[np.ndarray, " P"],
    count: int,
    choosing: Sequence[int],
) -> dict[str, tuple[tuple[EditPlace, ...], ...]]:
    """The orders in which layers or heads are dropped; several of the same name are drawn at random."""

    def loss(dropped: tuple[int, ...], candidates: tuple[int, ...]) -> np.ndarray:
        return losses.choose([places[i] for i in dropped], [places[i] for i in candidates], choosing)

    orders = {"cheapest first": [np.argsort(single, kind="stable").tolist()]}
    if count:
        orders["greedy"] = [list(greedy_order(loss, range(len(places)), count, arguments.candidates))]
    if arguments.random:
        draws = [np.random.default_rng(seed).permutation(len(places)).tolist() for seed in range(arguments.random)]
        orders[f"random, mean of {len(draws)}"] = draws
    return {name: tuple(tuple(places[i] for i in one) for one in drawn) for name, drawn in orders.items()}


def _expected_work(
    arguments: argparse.Namespace,
    losses: VariantLosses,
    places: Sequence[EditPlace],
    count: int,
    sequences: tuple[int, int, int],
) -> float:
    """The work of the measurements to come, as `EditedLosses.work` counts it."""
    total, choosing, measuring = sequences

    def alone(one: EditedLosses) -> float:
        return sum(one.work([place]) for place in places)

    passes = losses.passes.values()
    curves = len(_points(arguments, len(places))) * (1 + arguments.random)
    curves += len(_points(arguments, count)) if count else 0
    tried = arguments.candidates or len(places)
    steps = sum(min(len(places) - k, tried) for k in range(1, count)) + (len(places) if count else 0)
    found = sum(total * alone(one) + (total + measuring * curves) * one.work(places) for one in passes)
    return found + choosing * steps * alone(losses.choosing) / len(places)


# ---------------------------------------------------------------------------------------------------------------------
# What was found

NATS = "{:.3f}"
SHOWN = 10  # rows of a table at its cheap and at its costly end


class Range(NamedTuple):
    """The positions first .. end of sequences of `length` tokens, over which a loss is averaged."""

    length: int
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.length:,} tokens" + (f", beyond {self.first:,}" if self.first else "")


class Means(NamedTuple):
    """Losses under E sets of edits: means in each of M ranges, and the bins of the longest sequences."""

    loss: Float[np.ndarray, "M E S"]
    bins: Float[np.ndarray, "E S bins 2"]


@dataclass(frozen=True)
class Curve:
    """The losses with the first k places of an order edited.

    Attributes:
      name: of the order.
      orders: one, or several that were drawn at random.
      points: the numbers k.
      means: by k; of several orders, the mean.
    """

    name: str
    orders: tuple[tuple[EditPlace, ...], ...]
    points: tuple[int, ...]
    means: Means


@dataclass(frozen=True)
class EditLosses:
    """What was measured of one variant.

    Attributes:
      places: the P places that were edited alone.
      ranges: M of them.
      edges: of the bins of the longest sequences.
      alone: by edit: none, then each place.
      curves: measured on the sequences `measuring`; the orders are chosen on the others.
    """

    name: str
    places: tuple[EditPlace, ...]
    ranges: tuple[Range, ...]
    edges: Int[np.ndarray, " edges"]
    alone: Means
    curves: tuple[Curve, ...]
    measuring: tuple[int, ...]

    @property
    def costs(self) -> Float[np.ndarray, "M P S"]:
        """What each place alone adds to the loss."""
        return self.alone.loss[:, 1:] - self.alone.loss[:, :1]

    def cumulative(self, curve: Curve) -> Float[np.ndarray, "M k S"]:
        """What the first k places of an order add together, by point of its curve."""
        return curve.means.loss - self.alone.loss[:, :1, list(self.measuring)]

    def summed(self, curve: Curve) -> Float[np.ndarray, "M k S"]:
        """The sum of the costs that they have alone."""
        costs = self.costs[:, :, list(self.measuring)]
        index = {place: i for i, place in enumerate(self.places)}
        sums = [costs[:, [index[p] for p in order]].cumsum(1)[:, np.array(curve.points) - 1] for order in curve.orders]
        return np.mean(sums, axis=0)


def findings(edit: str, by: str, results: Sequence[EditLosses]) -> Findings:
    """Sentences, tables, figures and numbers of all variants."""
    several = len(results) > 1
    numbers: dict[str, np.ndarray] = {}
    figures: list[Figure] = []
    sentences: list[str] = []
    orders: dict[str, Any] = {}
    for v, one in enumerate(results):
        suffix = f"_{v}" if several else ""
        of = f" of {one.name}" if several else ""
        numbers |= {f"loss{suffix}": one.alone.loss, f"bins{suffix}": one.alone.bins, f"edges{suffix}": one.edges}
        numbers[f"places{suffix}"] = np.array([(p.layer, -1 if p.head is None else p.head) for p in one.places])
        for curve in one.curves:
            key = curve.name.split(",")[0].replace(" ", "_")
            numbers |= {f"{key}_loss{suffix}": curve.means.loss, f"{key}_points{suffix}": np.array(curve.points)}
            orders[f"{key}{suffix}"] = [[str(place) for place in order] for order in curve.orders]
        sentences += _sentences(edit, by, one)
        figures += [_cumulative(edit, by, one, of, suffix), _by_position(edit, by, one, of, suffix)]
        if by == "head":
            figures.append(_by_head(edit, one, of, suffix))
    if by == "layer":
        figures.insert(0, _by_layer(edit, results))
    shapes = {
        "loss": f"[M, 1 + P, S] range, nothing edited and each {by} alone, sequence; mean loss in nats",
        "bins": "[1 + P, S, bins, 2] the same by bin of positions: summed loss, and number of targets",
        "edges": "[bins + 1] first positions of the bins, and the end",
        "places": "[P, 2] layer and head; -1: the whole layer",
        "*_points": "[k] numbers of places edited together, in this order",
        "*_loss": "[M, k, S of the measuring half] range, number of places, sequence",
    }
    ranges = {one.name: [list(r) for r in one.ranges] for one in results}
    measuring = {one.name: list(one.measuring) for one in results}
    more = {"orders": orders, "ranges": ranges, "measuring": measuring}
    tables = (_costs_table(edit, by, results), _cumulative_table(by, results))
    return Findings(tuple(sentences), tables, tuple(figures), numbers, shapes, more)


def _done(edit: str) -> str:
    return "Dropping the encoding" if edit == "drop" else f"The encoding {edit}"


def _sentences(edit: str, by: str, one: EditLosses) -> list[str]:
    found = []
    for r, costs, losses in zip(one.ranges, one.costs, one.alone.loss, strict=True):
        order = np.argsort(costs.mean(-1), kind="stable")
        low, high = order[0], order[-1]
        least, most = (interval(costs[i]).words(NATS) for i in (low, high))
        text = (
            f"{one.name}, {r}: {_lower(_done(edit))} of one {by} alone costs from {least} nats "
            f"({one.places[low]}) to {most} ({one.places[high]}), on a loss of {interval(losses[0]).words(NATS)}"
        )
        if costs.shape[-1] > 1:
            around = interval(costs.T)
            zero = int(((around.low <= 0) & (around.high >= 0)).sum())
            text += f"; the intervals of {zero} of {len(costs)} include 0"
        found.append(f"{text}.")
    named = [curve for curve in one.curves if len(curve.orders) == 1]
    if len(named) == 2 and named[0].orders == named[1].orders:
        found.append(f"{one.name}: the greedy order is that of the costs alone.")
        named = named[:1]
    for m, r in enumerate(one.ranges):
        for curve in named if not r.first else ():
            together, alone = one.cumulative(curve)[m], one.summed(curve)[m]
            parts = []
            for i in _chosen_points(curve.points):
                k, cost, summed = curve.points[i], interval(together[i]).words(NATS), interval(alone[i]).words(NATS)
                several = f"{k} {by}s cost {cost} nats (the sum of their costs alone is {summed})"
                parts.append(several if k > 1 else f"1 {by} costs {cost} nats")
            found.append(f"{one.name}, {r}, {curve.name}: {'; '.join(parts)}.")
    return found


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _chosen_points(points: Sequence[int]) -> list[int]:
    """Indices of a third, a half and all of the points."""
    n = len(points)
    return sorted({max(n // 3 - 1, 0), max(n // 2 - 1, 0), n - 1})


def _costs_table(edit: str, by: str, results: Sequence[EditLosses]) -> TextTable:
    rows = []
    for one in results:
        order = np.argsort(one.costs[0].mean(-1), kind="stable").tolist()
        if by == "head" and len(order) > 2 * SHOWN:
            order = order[:SHOWN] + order[-SHOWN:]
        rows += [(one.name, str(one.places[i]), *(interval(costs[i]).cell(NATS) for costs in one.costs)) for i in order]
    header = tuple(dict.fromkeys(str(r) for one in results for r in one.ranges))
    cheap = f", the {SHOWN} cheapest and the {SHOWN} most costly" if len(rows) == 2 * SHOWN * len(results) else ""
    title = f"{_done(edit)} of one {by} alone: added loss in nats (95% intervals){cheap}"
    return TextTable(title, ("model", by, *header), tuple(rows), words=2)


def _cumulative_table(by: str, results: Sequence[EditLosses]) -> TextTable:
    rows = []
    for one in results:
        for curve in one.curves:
            together, alone = one.cumulative(curve), one.summed(curve)
            for i, k in list(enumerate(curve.points))[:: max(1, len(curve.points) // SHOWN)]:
                cells = [interval(x[i]).cell(NATS) for x in together] + [interval(alone[0, i]).cell(NATS)]
                rows.append((one.name, curve.name, str(k), *cells))
    header = tuple(dict.fromkeys(str(r) for one in results for r in one.ranges))
    title = f"Several {by}s together: added loss in nats (95% intervals)"
    last = f"sum alone, {results[0].ranges[0]}"
    return TextTable(title, ("model", "order", f"{by}s", *header, last), tuple(rows), words=2)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def _line(label: str, x: Sequence[float] | np.ndarray, values: Float[np.ndarray, "k S"]) -> Line:
    around = interval(values.T)
    bounds = (None, None) if values.shape[-1] == 1 else (around.low, around.high)
    return Line(label, np.asarray(x, np.float64), around.mean, *bounds)


def _by_layer(edit: str, results: Sequence[EditLosses]) -> LineCharts:
    panels = []
    for one in results:
        x = [place.layer for place in one.places]
        lines = tuple(_line(str(r), x, costs) for r, costs in zip(one.ranges, one.costs, strict=True))
        panels.append((one.name, lines))
    layers = 1 + max(place.layer for one in results for place in one.places)
    return LineCharts(
        "cost_by_layer",
        f"{_done(edit)} of one layer alone: added loss",
        "The loss with one layer edited, less the loss of the same sequence with none; means over sequences, with 95% "
        "intervals of the paired differences.",
        tuple(panels),
        "layer",
        "added loss, nats",
        x_names=tuple(map(str, range(layers))),
        points=True,
    )


def _by_head(edit: str, one: EditLosses, of: str, suffix: str) -> HeatMaps:
    layers = sorted({place.layer for place in one.places})
    heads = sorted({place.head for place in one.places if place.head is not None})
    values = np.full((len(one.ranges), len(layers), len(heads)), np.nan)
    for i, (layer, head) in enumerate(one.places):
        values[:, layers.index(layer), heads.index(head)] = one.costs[:, i].mean(-1)
    return HeatMaps(
        f"cost_by_head{suffix}",
        f"{_done(edit)} of one head alone{of}: added loss",
        "The loss with one head edited, less the loss with none; means over sequences.",
        values,
        tuple(str(r) for r in one.ranges),
        tuple(f"layer {n}" for n in layers),
        tuple(f"head {h}" for h in heads),
        "positions",
        "layer",
        "query head",
        "added loss, nats",
        "diverging",
    )


def _cumulative(edit: str, by: str, one: EditLosses, of: str, suffix: str) -> LineCharts:
    halves = len(one.measuring) < one.alone.loss.shape[-1]
    where = f"The orders were chosen on {'other sequences of the same text' if halves else 'the same sequences'}."
    panels = []
    for m, r in enumerate(one.ranges):
        lines = []
        for curve in one.curves:
            zero = np.zeros((1, len(one.measuring)))
            values = np.concatenate([zero, one.cumulative(curve)[m]])
            lines.append(_line(curve.name, (0, *curve.points), values))
        summed = np.concatenate([zero, one.summed(one.curves[0])[m]])
        lines.append(_line("sum of the costs alone", (0, *one.curves[0].points), summed))
        panels.append((str(r), tuple(lines)))
    return LineCharts(
        f"cumulative_cost{suffix}",
        f"{_done(edit)} of several {by}s{of}: added loss",
        f"By the number of {by}s. {where} Bands are 95% intervals over sequences.",
        tuple(panels),
        f"number of {by}s",
        "added loss, nats",
    )


def _by_position(edit: str, by: str, one: EditLosses, of: str, suffix: str) -> LineCharts:
    centres = (one.edges[1:] + one.edges[:-1]) / 2
    measuring = list(one.measuring)

    def of_bins(bins: Float[np.ndarray, "S bins 2"]) -> Float[np.ndarray, "bins S"]:
        pairs = zip(one.edges[:-1].tolist(), one.edges[1:].tolist(), strict=True)
        return np.stack([mean_loss(bins, one.edges, low, high) for low, high in pairs])

    lines = [_line("nothing edited", centres, of_bins(one.alone.bins[0][measuring]))]
    curve = one.curves[-1 if one.curves[-1].name == "greedy" else 0]
    for i in _chosen_points(curve.points):
        k = curve.points[i]
        lines.append(_line(f"{k} {by}{'s' * (k > 1)}, {curve.name}", centres, of_bins(curve.means.bins[i])))
    trained = sorted({r.first for r in one.ranges if r.first})
    return LineCharts(
        f"loss_by_position{suffix}",
        f"Loss by position{of}",
        f"{_done(edit)} of no, some and all {by}s. Bands are 95% intervals over sequences.",
        (("", tuple(lines)),),
        "position, tokens",
        "loss, nats",
        marks=tuple((float(at), "training length") for at in trained),
    )


ANALYSIS = Analysis("DroPE (Gelberg et al. 2025), which drops all layers at once", _options, _run)
