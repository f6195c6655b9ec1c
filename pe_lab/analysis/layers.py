"""What the positional encoding of one layer, or of one head, is worth: the loss without it, and without several.

DroPE (Gelberg et al. 2025) drops the encoding of all layers at once. This analysis drops it from one layer at a time, and
then from more and more layers, without any training afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.layers_findings import Curve, EditLosses, Means, Place, Range, findings
from pe_lab.analysis.losses import EditedLosses, Streams, bin_edges, mean_loss, shortened
from pe_lab.analysis.session import Session
from pe_lab.attention.statistics import ArrayLike
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_lengths
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.positional import HeadEdit, Layer, drop, read_with
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.results.findings import Findings
from pe_lab.terminal import Progress, bounded, positive

PROTOCOL = "layers-1"
TOKENS = 2**15  # by default
POINTS = 32  # of a curve of cumulative costs, at most
Layers = tuple[Layer, ...]


def layer_costs(
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


def edited_layers(before: Layers, after: Layers, places: Sequence[Place]) -> Layers:
    """The layers `before` with the encoding of `after` in some places; the other heads of a layer keep theirs."""
    edited, heads = list(before), dict[int, list[int]]()
    for n, head in sorted(set(places), key=lambda place: (place.layer, -1 if place.head is None else place.head)):
        if head is None:
            edited[n] = after[n]
        else:
            heads.setdefault(n, []).append(head)
    for n, chosen in heads.items():
        edit = HeadEdit(tuple(chosen), after[n].encoding)
        edited[n] = dataclasses.replace(edited[n], heads=(*edited[n].heads, edit))
    return tuple(edited)


def greedy_order(
    loss: Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float] | Float[np.ndarray, " C"]],
    items: Sequence[int],
    count: int | None = None,
    candidates: int | None = None,
) -> tuple[int, ...]:
    """An order in which to drop items: each time the one that adds least to the loss, given those already dropped.

    Args:
      loss: (dropped, C candidates) -> the loss with each candidate dropped beside those dropped already.
      items: what can be dropped.
      count: how many are dropped; None: all.
      candidates: how many are tried each time, of those that were cheapest when they were tried last; None: all. The
        time is linear in it, where otherwise it is quadratic in the items.
    """
    dropped: list[int] = []
    latest = dict.fromkeys(items, -np.inf)
    for _ in range(len(items) if count is None else count):
        left = [item for item in items if item not in dropped]
        tried = left if candidates is None or not dropped else sorted(left, key=latest.__getitem__)[:candidates]
        found = dict(zip(tried, map(float, loss(tuple(dropped), tuple(tried))), strict=True))
        latest |= found
        dropped.append(min(tried, key=found.__getitem__))
    return tuple(dropped)


# ---------------------------------------------------------------------------------------------------------------------
# The measurement of one variant


@dataclass(frozen=True)
class Pass:
    """Sequences of one length, and the encodings of a variant at that length, without and with the edit."""

    losses: EditedLosses
    before: Layers
    after: Layers

    def sets(self, sets: Sequence[Sequence[Place]]) -> list[Layers]:
        """The layers of each set of edits."""
        return [edited_layers(self.before, self.after, places) for places in sets]


@dataclass(frozen=True)
class Measurement:
    """The losses of one variant under sets of edits.

    Attributes:
      passes: by length. Where no encoding depends on the length, the longest alone: causality makes the losses of its
        first tokens those of a shorter sequence.
      choosing: the pass by which a greedy order is chosen, of the shortest length.
    """

    ranges: tuple[Range, ...]
    passes: Mapping[int, Pass]
    choosing: Pass

    def __call__(self, sets: Sequence[Sequence[Place]], indices: Sequence[int]) -> Means:
        """The losses under each set of edits, in the sequences of these indices."""
        bins = {length: one.losses.measure(one.sets(sets), indices) for length, one in self.passes.items()}
        longest = max(bins)
        means = []
        for r in self.ranges:
            length = r.length if r.length in bins else longest
            means.append(mean_loss(bins[length], self.passes[length].losses.edges, r.first, r.end))
        return Means(np.stack(means), bins[longest])

    def choose(self, dropped: Sequence[Place], candidates: Sequence[Place], indices: Sequence[int]) -> np.ndarray:
        """The mean loss of the shortest sequences with each candidate dropped beside those dropped already."""
        one = self.choosing
        (base,) = one.sets([dropped])
        bins = one.losses.measure(one.sets([(*dropped, c) for c in candidates]), indices, base)
        return mean_loss(bins, one.losses.edges, 0, one.losses.sequences.length).mean(-1)


def _after(edit: str, before: Layers, variant: Variant) -> Layers:
    return drop().apply(before) if edit == "drop" else read_with(edit, before, variant.training_length)


def _measurement(session: Session, variant: Variant, lengths: Sequence[int], on_work: Any) -> Measurement:
    edit, trained = session.arguments.edit, variant.training_length
    boundaries = {*lengths, *(v.training_length for v in session.variants)}
    edges = bin_edges([b for b in boundaries if b <= max(lengths)])

    def at(length: int) -> Pass:
        before = variant.layers_at(length)
        part = edges[edges <= length]
        sequences, identity = shortened(session.sequences, length), {"checkpoint": variant.subject.id}
        losses = EditedLosses(session, PROTOCOL, identity, variant.at(length), sequences, part, on_work)
        return Pass(losses, before, _after(edit, before, variant))

    each = {length: at(length) for length in lengths}
    described = {(one.before, one.after) for one in each.values()}
    follows = any(layer.follows_length for pair in described for layers in pair for layer in layers)
    passes = each if len(described) > 1 or follows else {max(lengths): each[max(lengths)]}
    ranges = [Range(length, 0, length) for length in lengths]
    ranges += [Range(length, trained, length) for length in lengths if length > trained and trained in edges]
    ranges.sort(key=lambda r: (r.length, r.first))
    return Measurement(tuple(ranges), passes, each[min(lengths)])


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


def _run(session: Session) -> Findings:
    arguments = session.arguments
    lengths = parse_lengths(arguments.lengths, session.variants[0].training_length)
    arguments.length = str(max(lengths))
    if arguments.sequences is None:
        arguments.sequences = min(max(TOKENS // max(lengths), 8), 256)
    work = Work()
    measurements = [_measurement(session, variant, lengths, work.add) for variant in session.variants]
    editable = [_places(session, variant, one) for variant, one in zip(session.variants, measurements, strict=True)]
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
    for name, measure, places in zip(session.names, measurements, editable, strict=True):
        if not places:
            continue
        count = _greedy_count(arguments.greedy, len(places))
        expected = _expected_work(arguments, measure, places, count, (total, len(choosing), len(measuring)))
        with session.progress(f"layers: {name}", expected) as progress:
            work.start(progress, expected)
            alone = measure([(), *([place] for place in places)], range(total))
            single = alone.loss[0, 1:][:, list(choosing)].mean(-1)
            curves = []
            for label, orders in _orders(arguments, measure, places, single, count, choosing).items():
                points = _points(arguments, len(orders[0]))
                drawn = [measure([order[:k] for k in points], measuring) for order in orders]
                curves.append(Curve(label, orders, points, Means(*(np.mean(x, 0) for x in zip(*drawn, strict=True)))))
        edges = measure.passes[max(measure.passes)].losses.edges
        results.append(EditLosses(name, places, measure.ranges, edges, alone, tuple(curves), tuple(measuring)))
    found = findings(arguments.edit, arguments.by, results)
    left_out = [f"{name} is left out: --edit={arguments.edit} changes none of its layers." for name in unchanged]
    return dataclasses.replace(found, sentences=(*found.sentences, *left_out))


class Work:
    """Counts the work that is done, and shows it."""

    def start(self, progress: Progress, expected: float) -> None:
        self._progress, self._expected, self._done = progress, expected, 0.0

    def add(self, work: float, found: bool) -> None:
        self._done += work
        if found:
            self._progress.found(work)
        self._progress.update(self._done, f"{min(self._done / self._expected, 1):.0%}")


def _places(session: Session, variant: Variant, measure: Measurement) -> tuple[Place, ...]:
    """The chosen layers, or their heads, that the edit changes; none of a model without encodings that is dropped."""
    lm, one = variant.lm, measure.passes[max(measure.passes)]
    heads = range(lm.config.heads) if session.arguments.by == "head" else (None,)
    places = [Place(n, h) for n in session.layers(lm) for h in heads]
    return tuple(place for place in places if one.sets([[place]])[0] != one.before and _differs(one, place))


def _differs(one: Pass, place: Place) -> bool:
    return place.head is None or one.before[place.layer].encoding != one.after[place.layer].encoding


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
    measure: Measurement,
    places: tuple[Place, ...],
    single: Float[np.ndarray, " P"],
    count: int,
    choosing: Sequence[int],
) -> dict[str, tuple[tuple[Place, ...], ...]]:
    """The orders in which layers or heads are dropped; several of the same name are drawn at random."""

    def loss(dropped: tuple[int, ...], candidates: tuple[int, ...]) -> np.ndarray:
        return measure.choose([places[i] for i in dropped], [places[i] for i in candidates], choosing)

    orders = {"cheapest first": [np.argsort(single, kind="stable").tolist()]}
    if count:
        orders["greedy"] = [list(greedy_order(loss, range(len(places)), count, arguments.candidates))]
    if arguments.random:
        draws = [np.random.default_rng(seed).permutation(len(places)).tolist() for seed in range(arguments.random)]
        orders[f"random, mean of {len(draws)}"] = draws
    return {name: tuple(tuple(places[i] for i in one) for one in drawn) for name, drawn in orders.items()}


def _expected_work(
    arguments: argparse.Namespace,
    measure: Measurement,
    places: Sequence[Place],
    count: int,
    sequences: tuple[int, int, int],
) -> float:
    """The work of the measurements to come, as `EditedLosses.work` counts it."""
    total, choosing, measuring = sequences

    def alone(one: Pass) -> float:
        return sum(one.losses.work(layers) for layers in one.sets([[place] for place in places]))

    def whole(one: Pass) -> float:
        return one.losses.work(one.sets([places])[0])

    passes = measure.passes.values()
    curves = len(_points(arguments, len(places))) * (1 + arguments.random)
    curves += len(_points(arguments, count)) if count else 0
    tried = arguments.candidates or len(places)
    steps = sum(min(len(places) - k, tried) for k in range(1, count)) + (len(places) if count else 0)
    found = sum(total * (alone(one) + whole(one)) + measuring * curves * whole(one) for one in passes)
    return found + choosing * steps * alone(measure.choosing) / len(places)


ANALYSIS = Analysis(
    "layers",
    "what the encoding of each layer or head is worth: the loss without it, and without several",
    "DroPE (Gelberg et al. 2025), which drops all layers at once",
    _options,
    _run,
)
