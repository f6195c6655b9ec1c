"""What the analysis `layers` found, as sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pe_lab.analysis.losses import mean_loss
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

NATS = "{:.3f}"
SHOWN = 10  # rows of a table at its cheap and at its costly end


class Place(NamedTuple):
    """What is edited: a layer, or a query head of it."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"layer {self.layer}" + ("" if self.head is None else f" head {self.head}")


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
    orders: tuple[tuple[Place, ...], ...]
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
    places: tuple[Place, ...]
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


# ---------------------------------------------------------------------------------------------------------------------
# Words


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
