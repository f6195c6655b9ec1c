"""Losses and scores of a model under edits of a few layers: what lies below an edit is computed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Float32, Int

from pe_lab.analysis.analysis import Identity
from pe_lab.analysis.sequences import Sequences
from pe_lab.analysis.session import AnalysisSession, sequence_groups
from pe_lab.attention.statistics import ArrayLike
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model import Model, Params, cross_entropy
from pe_lab.model.layer_pass import Stream, advance, begin, forward_model
from pe_lab.parallel import AxisRules, shared, use_mesh
from pe_lab.positional import HeadEdit, Layer, Schedule, to_json
from pe_lab.results.findings import Arrays
from pe_lab.results.records import digest

PROTOCOL = "layers-1"  # of the parts of `EditedLosses`
Layers = tuple[Layer, ...]
Edit = TypeVar("Edit")


class Streams:
    """The residual stream of some sequences at the input of each layer, computed when it is needed, and kept.

    A model whose lowest edited layer is n has the streams of the unedited model up to the input of layer n, and only
    the layers from n on are run (`under`). Kept streams lie in the memory of the host: N * B * T * D numbers.

    Args:
      lm: the model.
      tokens: as `lm.logits` takes them.
      segments, positions: of the tokens, for packed documents.
    """

    def __init__(
        self,
        lm: LanguageModel,
        tokens: Tokens,
        segments: Int[ArrayLike, "B T"] | None = None,
        positions: Int[ArrayLike, "#B T"] | None = None,
    ):
        self.lm, self._ids = lm, lm.sequences(tokens)
        self._places: dict[str, Any] = {"segments": segments, "positions": positions}
        self._model = forward_model(lm.whole_pass_config())
        self._kept: dict[int, Stream] = {0: self._first()}

    @property
    def _params(self) -> Params:
        return self.lm.checkpoint.params

    def under(self, lm: LanguageModel, first: int | None = None) -> Streams:
        """The streams of the same sequences in an edited model.

        Args:
          lm: the same model under other encodings or, with `first`, with other weights in the layers from `first` on.
          first: the lowest layer that differs; None: the first one whose description differs.
        """
        if first is None:
            first = first_difference(self.lm.layers, lm.layers)
        edited = object.__new__(Streams)
        edited.__dict__ |= vars(self) | {"lm": lm}
        if self._schedule.embeddings != edited._schedule.embeddings:
            edited._kept = {0: edited._first()}
            return edited
        self._input(first, keep=True)
        edited._kept = {n: stream for n, stream in self._kept.items() if n <= first}
        return edited

    def losses(self, targets: Int[ArrayLike, "B T"]) -> Float32[np.ndarray, "B T"]:
        """The cross-entropy of each target in nats."""
        x = self._input(self.lm.config.layers)
        with self._on_mesh():
            return np.asarray(_losses(self._model, self._params, x, jnp.asarray(targets)))

    def scores(
        self, at: Int[ArrayLike, "B Q"], answers: Int[ArrayLike, "B Q"]
    ) -> tuple[Float32[np.ndarray, "B Q"], Bool[np.ndarray, "B Q"]]:
        """The log-probability of each answer after its position `at`, nats, and whether it is the likeliest token."""
        x = self._input(self.lm.config.layers)
        with self._on_mesh():
            found = _scores(self._model, self._params, x, jnp.asarray(at), jnp.asarray(answers))
        log_probs, right = map(np.asarray, found)
        return log_probs, right

    @property
    def _schedule(self) -> Schedule:
        return self.lm.schedule_for(self._ids.shape[1])

    def _first(self) -> Stream:
        """The stream at the input of the first layer."""
        with self._on_mesh():
            ids = self._put(self._ids)
            stream = begin(self._model, self._params, ids, self._schedule, self._places["positions"])
            return jax.tree.map(np.asarray, stream)

    def _input(self, n: int, keep: bool = False) -> jax.Array | np.ndarray:
        """The residual stream at the input of layer n; with `keep`, also those before it are kept."""
        below = max(m for m in self._kept if m <= n)
        kept = self._kept[below]
        with self._on_mesh():
            stream = jax.tree.map(self._put, kept)
            run = functools.partial(advance, self._model, self._params, schedule=self._schedule, **self._places)
            if not keep:
                return run(stream, start=below, stop=n).x
            for m in range(below, n):
                stream = run(stream, start=m, stop=m + 1)
                of_sources = {
                    source: kept.keys_values.get(source) or jax.tree.map(np.asarray, found)
                    for source, found in stream.keys_values.items()
                }
                kept = self._kept[m + 1] = Stream(np.asarray(stream.x), of_sources, kept.embedded)
            return kept.x

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        mesh = self.lm.mesh
        return contextlib.nullcontext() if mesh is None else use_mesh(mesh, AxisRules())

    def _put(self, x: Any) -> Any:
        """The array, sharded over the mesh's data axis."""
        mesh = self.lm.mesh
        return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def first_difference(one: Sequence[Layer], other: Sequence[Layer]) -> int:
    """The lowest layer that is described differently; N if none is."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@functools.partial(jax.jit, static_argnums=0)
def _losses(
    model: Model, params: Params, x: Float[jax.Array, "B T D"], targets: Int[jax.Array, "B T"]
) -> Float32[jax.Array, "B T"]:
    return cross_entropy(model.output(params, x), model.head(params), targets)


@functools.partial(jax.jit, static_argnums=0)
def _scores(
    model: Model,
    params: Params,
    x: Float[jax.Array, "B T D"],
    at: Int[jax.Array, "B Q"],
    answers: Int[jax.Array, "B Q"],
) -> tuple[Float32[jax.Array, "B Q"], Bool[jax.Array, "B Q"]]:
    logits = model.logits(params, model.output(params, jnp.take_along_axis(x, at[..., None], axis=1)))
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, answers[..., None], axis=-1)[..., 0], jnp.argmax(logits, -1) == answers


def measure_edits(
    session: AnalysisSession,
    lm: LanguageModel,
    sequences: Sequences,
    indices: Sequence[int],
    edits: Sequence[Edit],
    identity: Callable[[Edit, int], Identity],
    measure: Callable[[Streams, Edit, Sequences], Sequence[Arrays]],
    costs: Sequence[float],
) -> Iterator[tuple[int, list[int], list[Arrays], bool]]:
    """For each group of sequences and each edit: its number, the sequences, their parts, and whether all existed.

    Args:
      indices: of the sequences.
      identity: of the part of an edit and a sequence.
      measure: the parts of some sequences under an edit, from their streams in `lm`.
      costs: of each edit and sequence.
    """
    groups = sequence_groups(lm, indices, sequences.length)
    pieces = [(group, count, e) for group, count in groups for e in range(len(edits))]
    identities = [[identity(edits[e], index) for index in group[:count]] for group, count, e in pieces]
    known = session.parts.find_all([one for of_piece in identities for one in of_piece])
    names = [[digest(one) for one in of_piece] for of_piece in identities]
    planned, fresh = set(known), []
    for n, of_piece in enumerate(names):
        if not planned.issuperset(of_piece):
            fresh.append(n)
            planned.update(of_piece)

    def measured(chosen: Iterable[int]) -> Iterator[Sequence[Arrays]]:
        streams, of = None, None
        for group, count, e in (pieces[n] for n in chosen):
            batch = sequences.batch(group)
            if streams is None or of != group:
                streams, of = Streams(lm, batch.tokens, **batch.places), group
            yield measure(streams, edits[e], batch)[:count]

    results = iter(shared(fresh, measured, [pieces[n][1] * costs[pieces[n][2]] for n in fresh]))
    waiting = set(fresh)
    for n, (group, count, e) in enumerate(pieces):
        if n in waiting:
            for one, name, part in zip(identities[n], names[n], next(results), strict=True):
                known[name] = part
                session.parts.put(one, part)
        else:
            session.reused += count
        yield e, group[:count], [known[name] for name in names[n]], n not in waiting


@dataclasses.dataclass
class EditedLosses:
    """Losses of sequences under edits of a model, by bins of positions. What was measured before is read.

    Attributes:
      session: keeps the parts.
      variant: the model without edits.
      after: all its layers, edited.
      sequences: with targets.
      edges: of the bins, from 0 to T.
      on_work: is called with the work that is done (see `work`), and with whether it was found done.
    """

    session: AnalysisSession
    variant: Variant
    after: Layers
    sequences: Sequences
    edges: Int[np.ndarray, " edges"]
    on_work: Callable[[float, bool], None] = lambda work, found: None

    def __post_init__(self) -> None:
        self.lm = self.variant.at(self.sequences.length)

    def layers(self, places: Sequence[EditPlace]) -> Layers:
        """The layers with some places edited."""
        return edited_layers(self.lm.layers, self.after, places)

    def measure(
        self, sets: Sequence[Sequence[EditPlace]], indices: Sequence[int], base: Sequence[EditPlace] = ()
    ) -> Float[np.ndarray, "E S bins 2"]:
        """Summed losses, nats, and their number, by set of edits, sequence and bin.

        Args:
          sets: the places that are edited in each model.
          indices: of the S sequences.
          base: places that are edited in all of them: the streams of the model with these edits are kept.
        """
        lm = dataclasses.replace(self.lm, layers=self.layers(base))
        edits = [self.layers(places) for places in sets]

        def losses(streams: Streams, edit: Layers, batch: Sequences) -> list[Arrays]:
            found = streams.under(dataclasses.replace(self.lm, layers=edit)).losses(batch.targets)
            return [{"bins": bins} for bins in by_bin(found, counted_targets(batch), self.edges)]

        found = np.zeros((len(edits), len(indices), len(self.edges) - 1, 2))
        row = {index: s for s, index in enumerate(indices)}
        costs = [self.work(places, base) for places in sets]
        measured = measure_edits(self.session, lm, self.sequences, indices, edits, self._part, losses, costs)
        for e, group, parts, existed in measured:
            for index, part in zip(group, parts, strict=True):
                found[e, row[index]] = part["bins"]
            self.on_work(len(group) * costs[e], existed)
        return found

    def work(self, places: Sequence[EditPlace], base: Sequence[EditPlace] = ()) -> float:
        """The work of one sequence under edits, in tokens times layers; the output counts as some layers.

        Without an edit all layers are run, and their inputs kept for the edits.
        """
        weights = self._layer_weights
        output = self.lm.config.d_model * self.lm.config.vocab_size / weights
        run = self.lm.config.layers - first_difference(self.layers(base), self.layers(places))
        return self.sequences.length * ((run or self.lm.config.layers) + output)

    @functools.cached_property
    def _layer_weights(self) -> float:
        leaves = jax.tree.leaves(self.lm.checkpoint.params["layers"])
        return sum(x.size for x in leaves) / self.lm.config.layers

    def _part(self, layers: Layers, index: int) -> dict[str, Any]:
        return {
            "checkpoint": self.variant.subject.id,
            "protocol": PROTOCOL,
            "encodings": digest([to_json(layer) for layer in layers]),
            "sequence": self.sequences.digests[index],
            "length": self.sequences.length,
            "edges": self.edges.tolist(),
        }


def shortened(sequences: Sequences, length: int) -> Sequences:
    """The first `length` tokens of each sequence of text."""
    arrays = (sequences.tokens, sequences.targets, sequences.segments, sequences.positions)
    tokens, *others = jax.tree.map(lambda x: x[:, :length], arrays)
    return Sequences(sequences.name, tokens, np.minimum(sequences.lengths, length), *others)


def counted_targets(sequences: Sequences) -> Bool[np.ndarray, "S T"]:
    """Which targets count: all but the first tokens of further documents, which nothing before them predicts."""
    counted = np.ones(sequences.tokens.shape, bool)
    if sequences.segments is not None:
        counted[:, :-1] = sequences.segments[:, 1:] == sequences.segments[:, :-1]
    return counted


def bin_edges(boundaries: Sequence[int], most: int = 32) -> Int[np.ndarray, " edges"]:
    """Edges of bins of positions from 0 to the highest boundary: all boundaries, and equal parts between them."""
    end = max(boundaries)
    edges = {0}
    for low, high in zip([0, *sorted(boundaries)], sorted(boundaries), strict=False):
        parts = max(1, min(high - low, round(most * (high - low) / end)))
        edges |= set(np.linspace(low, high, parts + 1).round().astype(int).tolist())
    return np.asarray(sorted(edges))


def by_bin(
    losses: Float[np.ndarray, "B T"], counted: Bool[np.ndarray, "B T"], edges: Int[np.ndarray, " edges"]
) -> Float[np.ndarray, "B bins 2"]:
    """The sum of the losses that count, and their number, in each bin."""
    values = np.stack([np.where(counted, losses, 0).astype(np.float64), counted.astype(np.float64)], -1)
    return np.add.reduceat(values, edges[:-1], axis=1)


def mean_loss(
    bins: Float[np.ndarray, "... bins 2"], edges: Int[np.ndarray, " edges"], first: int, end: int
) -> Float[np.ndarray, "..."]:
    """The mean loss at the positions first .. end, which are edges of bins."""
    low, high = np.searchsorted(edges, [first, end])
    total = bins[..., low:high, :].sum(-2)
    return total[..., 0] / np.maximum(total[..., 1], 1)


# ---------------------------------------------------------------------------------------------------------------------
# Edits


class EditPlace(NamedTuple):
    """What is edited: a layer, or a query head of it."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"layer {self.layer}" + ("" if self.head is None else f" head {self.head}")


def edited_layers(before: Layers, after: Layers, places: Sequence[EditPlace]) -> Layers:
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
