"""The pipeline: the batches of all steps as a Grain dataset, which Grain's threads read ahead.

Element i of the dataset is what step i takes from one process's part of the global batch, which does not depend on the
number of processes. Beside Grain's iterator are the counts of what was read, and the rest of the position in the data.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Float64, Int64

from pe_lab.config import INT32, DataConfig
from pe_lab.data.grain_data import GrainIteration
from pe_lab.data.mixture import Mixture, local_size, mixture_stages, open_mixture
from pe_lab.data.order import Order, Position
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.windows import Batch, PackedWindows, Windows, gather_batch, make_batch
from pe_lab.errors import CheckpointError, ConfigError, DataError, did_you_mean, redacted

ADDRESSES = 4096  # sequences whose windows are computed at once, about
EPOCHS = 4  # of the smallest source that are computed at once: each is shuffled by itself, in milliseconds
AHEAD = 1  # batches that are read before they are asked for, beside one for each thread


class StepCounts(NamedTuple):
    """What the pipeline counts of a global batch."""

    tokens: Int64[np.ndarray, " sources"]  # without padding
    expected: Float64[np.ndarray, " sources"]  # the tokens that the weights give each source
    reached: Int64[np.ndarray, " sources"]  # the sequences of each source up to its end


@dataclass(frozen=True, eq=False)
class StepBatches:
    """The batches of all steps, for `grain.MapDataset.source`: element i is what step i takes, and its counts."""

    windows: tuple[Windows | GrainIteration, ...]  # of each source
    order: Order  # of the sequences
    left_out: tuple[int, ...]  # the batches that are passed over, ascending
    process: tuple[int, int]  # the index and the number of the parts of a batch
    segments: bool  # whether documents are masked from each other
    eos_id: int  # ends a document

    @property
    def mine(self) -> slice:
        """The sequences of a batch that are this process's."""
        local = local_size(self.order.batch_size, self.process[1])
        return slice(self.process[0] * local, (self.process[0] + 1) * local)

    def __len__(self) -> int:
        return INT32

    def __getitem__(self, step: int) -> tuple[Batch, StepCounts]:
        index = self.batch_index(step)
        source, window = (part[self.mine] for part in self._sequences(index))
        return gather_batch(self.windows, source, window, self.segments, self.eos_id), self.counts(index)

    def batch_index(self, step: int) -> int:
        """The index of the batch that comes after `step` batches which are not left out."""
        for left_out in self.left_out:
            step += left_out <= step
        return step

    def counts(self, index: int) -> StepCounts:
        """The counts of the batch of an index."""
        source, window = self._sequences(index)
        tokens = [w.input_tokens(window[source == i]) for i, w in enumerate(self.windows)]
        expected = self.order.shares(index) * self.order.batch_size * self._mean_tokens
        return StepCounts(np.asarray(tokens), expected, self.order.counts(self.order.sequence(index + 1)))

    @functools.cached_property
    def _mean_tokens(self) -> Float64[np.ndarray, " sources"]:
        return np.asarray([w.mean_tokens for w in self.windows], np.float64)

    def _sequences(self, index: int) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """The source and the window of each sequence of the global batch of an index."""
        size = self.order.batch_size
        sequences = min([ADDRESSES, *(EPOCHS * count for count in self.order.windows if count)])
        per = max(1, sequences // size)  # batches of a block
        source, window = (part[index % per * size :][:size] for part in self._block(index // per * per, per))
        return source, window

    @functools.cached_property
    def _block(self) -> Callable[[int, int], tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]]:
        return functools.lru_cache(4)(self._addresses)

    def _addresses(self, batch: int, batches: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source and the window of each sequence of so many batches from one on."""
        start, first = self.order.sequence(batch), self.order.first_sequence
        found = self.order.addresses(max(start, first), self.order.sequence(batch + batches))
        return tuple(np.pad(part, (max(0, first - start), 0)) for part in found)  # nothing is read before the first


class Pipeline:
    """An endless iterator over this process's sequences of each global batch.

    Its position is the state of Grain's iterator, and the sequences of each source so far: a run that stops on one
    process may continue on two, and with other batch sizes and weights. Batches that are left out are passed over:
    batch `batch_index(n)` comes after n others.
    """

    def __init__(
        self,
        mixture: Mixture,
        steps: StepBatches,
        about: dict[str, Any],
        workers: int,
    ):
        self.vocab_size: int = mixture.vocab_size
        self.tokenizer: Tokenizer = mixture.tokenizer
        self._sources, self._steps, self._about, self._threads = mixture.sources, steps, about, max(1, workers)
        self._iteration = steps.windows[0] if isinstance(steps.windows[0], GrainIteration) else None
        if self._iteration is not None:
            self._iteration.configure(steps.order.batch_size, self._threads + AHEAD)
        self._batches = 0
        self._read = np.zeros(len(steps.windows), np.int64)  # tokens
        self._expected = np.zeros(len(steps.windows))
        self._begun = np.zeros(len(steps.windows), np.int64)  # epochs
        self._repeats: list[tuple[str, int]] = []
        self._iterator: grain.DatasetIterator | None = None

    def describe(self, steps: int) -> list[dict[str, Any]]:
        """For each source its name, `source`, weight, and number of tokens and windows, as JSON.

        With a schedule, `weights` has it, and `weight` is the source's part of all sequences of `steps` steps.
        """
        rows, stages = [], self._steps.order.stages
        counts = self._steps.order.after(None).counts(steps * self._steps.order.batch_size) if len(stages) > 1 else None
        for i, (source, windows) in enumerate(zip(self._sources, self._steps.windows, strict=True)):
            weight = stages[0][1][i] if counts is None else float(f"{counts[i] / counts.sum():.6g}")
            row = {"name": source.name, "source": redacted(source.config.source), "weight": weight}
            if counts is not None:
                row["weights"] = [[first, weights[i]] for first, weights in stages]
            row |= {"tokens": source.tokens("train"), "windows": self._steps.order.windows[i] or None}
            if isinstance(windows, PackedWindows):
                row["packing_efficiency"] = round(windows.efficiency, 6)
            rows.append(row)
        return rows

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch, counts = self._take()
            for i, count in enumerate(counts.reached):
                if count > self._limit(i):
                    raise self._dry(i, f"step {self._batches + 1}")
        except BaseException:
            self._close_iterator()  # which has gone on: the next call is for the same step
            raise
        begun = self._epochs(counts.reached)
        for i in np.flatnonzero(begun > np.maximum(1, self._begun)):
            self._repeats.append((self._sources[i].name, int(begun[i])))
        self._begun = np.maximum(begun, self._begun)
        self._batches += 1
        self._read = self._read + counts.tokens
        self._expected = self._expected + counts.expected
        return batch

    def _take(self) -> tuple[Batch, StepCounts]:
        """The batch of the next step, with its counts."""
        if self._iteration is None:
            return next(self._opened())
        index, mine = self.batch_index(self._batches), self._steps.mine
        first = self._steps.order.sequence(index)
        arrays = self._iteration.arrays(self._iteration.take(first)[mine], first + mine.start)
        batch = make_batch(arrays, segments=self._steps.segments, eos_id=self._steps.eos_id)
        return batch, self._steps.counts(index)

    def _opened(self) -> grain.DatasetIterator:
        """Grain's iterator over the steps, from the next one on."""
        if self._iterator is None:
            reading = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._threads + AHEAD)
            self._iterator = iter(grain.MapDataset.source(self._steps).to_iter_dataset(reading))
            self._iterator.set_state({"next_index": self._batches})
        return self._iterator

    # -----------------------------------------------------------------------------------------------------------------
    # Epochs

    def _epochs(self, read: Int64[np.ndarray, " sources"]) -> Int64[np.ndarray, " sources"]:
        """The epochs that have begun of each source, of which so many windows are read; of endless ones 0."""
        sizes = np.asarray(self._steps.order.windows)
        return np.where(sizes > 0, -(-read // np.maximum(sizes, 1)), 0)

    def _limit(self, source: int) -> float:
        """The windows of a source that a phase may read."""
        config, windows = self._sources[source].config, self._steps.order.windows[source]
        if not windows or not config.epochs or config.when_dry == "repeat":
            return math.inf
        return math.floor(config.epochs * windows)

    def _dry(self, source: int, when: str) -> DataError:
        return DataError(
            f"data source {self._sources[source].name!r} runs dry at {when}: "
            f"epochs={self._sources[source].config.epochs:g} of its {self._steps.order.windows[source]:,} windows are "
            f"{self._limit(source):,}. Train for fewer steps, lower its weight, raise its epochs, or set its "
            "when_dry='repeat'."
        )

    def check_supply(self, steps: int) -> None:
        """`DataError` if a source that may not repeat runs dry before `steps` batches were given."""
        done, index, found = self._batches, self.batch_index(self._batches), []
        for i in range(len(self._sources)):
            if self._limit(i) < math.inf and steps > done:
                batch = self._steps.order.first_batch(i, int(self._limit(i)), index + steps - done - 1)
                found += [] if batch is None else [(batch, i)]
        if found:
            batch, source = min(found)
            raise self._dry(source, f"step {done + 1 + batch - index} of {steps}")

    def steps_of(self, epochs: float | Mapping[str, Any]) -> int:
        """The most steps that read no source more than `epochs` times.

        `epochs` is a number, of every source that is not endless, or {name: number}.

        Raises:
          ConfigError: there is no such source, it is endless or never read so often, or has less than a batch.
        """
        sizes = {source.name: size for source, size in zip(self._sources, self._steps.order.windows, strict=True)}
        finite = [name for name, size in sizes.items() if size]
        wanted = epochs if isinstance(epochs, Mapping) else dict.fromkeys(finite, epochs)
        steps = []
        for name, number in wanted.items():
            if name not in finite:
                why = "is endless" if name in sizes else "does not exist"
                raise ConfigError(f"epochs names the data source {name!r}, which {why}. {did_you_mean(name, finite)}")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 10**6:
                raise ConfigError(f"epochs of data source {name!r} is {number!r}; it must be above 0, at most 10^6.")
            batch = self._steps.order.first_batch(list(sizes).index(name), math.floor(number * sizes[name]), INT32)
            steps += [] if batch is None else [batch]
        if not steps:
            sources = ", ".join(wanted) or "all sources are endless"
            raise ConfigError(f"epochs={epochs!r} is never reached ({sources}). Set steps, or a higher weight.")
        if min(steps) < 1:
            raise ConfigError(
                f"epochs={epochs!r} of the data is less than a batch of {self._steps.order.batch_size} windows."
            )
        return min(steps)

    def new_repeats(self) -> list[tuple[str, int]]:
        """(source, epoch from 1) of each epoch but the first that has begun since the last call."""
        found, self._repeats = self._repeats, []
        return found

    def tokens_read(self) -> dict[str, float]:
        """`read_tokens/NAME` of the batches given, without padding, and `expected_tokens/NAME` by the weights."""
        names = [source.name for source in self._sources]
        read = {f"read_tokens/{name}": int(count) for name, count in zip(names, self._read, strict=True)}
        by_weight = [round(float(count), 1) for count in self._expected]
        return read | {f"expected_tokens/{name}": count for name, count in zip(names, by_weight, strict=True)}

    # -----------------------------------------------------------------------------------------------------------------
    # Batches that are left out

    def batch_index(self, position: int) -> int:
        """The index of the batch that comes after `position` batches which are not left out."""
        return self._steps.batch_index(position)

    def leave_out(self, batches: Sequence[int]) -> None:
        """Passes over batches with these indices, besides those that are left out already."""
        self._close_iterator()
        left_out = tuple(sorted({*self._steps.left_out, *batches}))
        self._steps = dataclasses.replace(self._steps, left_out=left_out)

    def sequences(self, batch: int) -> Iterator[dict[str, Any]]:
        """What is in the global batch of an index, for a person: a record for each sequence.

        `source` and `window` name it, `tokens` are its T + 1 ids and `text` is what they decode to (without the symbols
        of needles). Of text, `first_token` is the place in the split, and `documents` the ordinal numbers of the first
        and the last document there, from 0; of a window with packed documents, both are lists of each part's. Of an
        `IterDataset`, which has no random access, only the batches given last are known.
        """
        start = self._steps.order.sequence(batch)
        if self._iteration is not None:
            elements = self._iteration.peek(start)
            tokens = self._iteration.arrays(elements, start).tokens if elements else ()
            for k, row in enumerate(tokens):
                yield self._record(batch, k, self._sources[0].name, start + k) | self._text_of(row.tolist())
            return
        addresses = self._steps.order.addresses(start, start + self._steps.order.batch_size)
        for k, (i, window) in enumerate(zip(*(part.tolist() for part in addresses), strict=True)):
            source, windows = self._sources[i], self._steps.windows[i]
            record = self._record(batch, k, source.name, window)
            if source.prepared is not None:
                starts, lengths = np.asarray(windows.pieces(window)).T
                ends, packed = source.prepared.streams["train"].ends, isinstance(windows, PackedWindows)
                inside = starts if packed else np.asarray([starts[0], starts[0] + lengths[0] - 2])
                record["first_token"] = starts.tolist() if packed else int(starts[0])
                record["documents"] = np.searchsorted(ends, inside, side="right").tolist()
            yield record | self._text_of(windows.read(np.asarray([window])).tokens[0].tolist())

    def _record(self, batch: int, sequence: int, source: str, window: int) -> dict[str, Any]:
        return {"batch": batch, "sequence": sequence, "source": source, "window": window}

    def _text_of(self, tokens: Sequence[int]) -> dict[str, Any]:
        text = self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])
        return {"tokens": tokens, "text": text}

    # -----------------------------------------------------------------------------------------------------------------
    # The position

    def get_state(self) -> dict[str, Any]:
        """The position as JSON.

        `iterator` is the state of Grain's iterator: of the steps, or of a person's `IterDataset`, of which so many
        elements were `drawn`. `batches` is the number of global batches so far, `left_out` those left out; `sequences`
        the number of sequences of the global order up to there, with those left out, and `sources` how many of them are
        of each source, with the tokens that were read and expected; `weights` those of the sources, and `place` the
        sequences since they began; `data` describes the data.
        """
        place = self._steps.order.position(self.batch_index(self._batches))
        left_out = {"left_out": list(self._steps.left_out)} if self._steps.left_out else {}
        sources = [
            {"name": source.name, "sequences": count, "read_tokens": int(read), "expected_tokens": float(expected)}
            for source, count, read, expected in zip(
                self._sources, place.counts, self._read, self._expected, strict=True
            )
        ]
        where = {"sequences": place.sequence, "sources": sources, "weights": list(place.weights), "place": place.place}
        if self._iteration is None:
            iterator = {"iterator": self._opened().get_state()}
        else:
            iterator = {"iterator": self._iteration.get_state(), "drawn": self._iteration.at}
        return {"batches": self._batches, **iterator, **left_out, **where, "data": self._about}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after `state["batches"]` global batches; `CheckpointError` if they are of other data.

        The batch size and the weights may be others: each source goes on where it was.
        """
        saved = state["data"]
        mine, its = (_comparable(about) for about in (self._about, saved))
        for name in {**mine, **its}:
            if its.get(name) != mine.get(name):
                raise CheckpointError(
                    f"The checkpoint's data position does not fit this config: {name} was "
                    f"{its.get(name)!r}, is {mine.get(name)!r}. "
                    "Resume with the same data, or start a new workdir."
                )
        sources = state["sources"]
        counts = tuple(int(source["sequences"]) for source in sources)
        weights, place = tuple(state["weights"]), int(state["place"])
        self.close()
        if self._iteration is None:
            self._batches = int(state["iterator"]["next_index"])
        else:
            self._batches = int(state["batches"])
            self._iteration.set_state(state["iterator"], int(state["drawn"]))
        steps = dataclasses.replace(self._steps, left_out=tuple(sorted(state.get("left_out", ()))))
        index = steps.batch_index(self._batches)
        order = steps.order.after(Position(index, int(state["sequences"]), counts, weights, place))
        left_out = _renumbered(steps.left_out, index, saved["batch_size"], order.batch_size)
        self._steps = dataclasses.replace(steps, order=order, left_out=left_out)
        self._read = np.asarray([source["read_tokens"] for source in sources], np.int64)
        self._expected = np.asarray([source["expected_tokens"] for source in sources], np.float64)
        self._begun = self._epochs(np.asarray(counts))
        self._repeats = []

    def close(self) -> None:
        """Stops the threads."""
        self._close_iterator()
        if self._iteration is not None:
            self._iteration.close()

    def _close_iterator(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None


def _renumbered(left_out: tuple[int, ...], index: int, former: int, size: int) -> tuple[int, ...]:
    """The batches from `index` on that have what is to be left out of batches of the `former` size."""
    if former == size:
        return left_out
    again = {batch for batch in left_out if batch < index}
    for first in ((batch - index) * former for batch in left_out if batch >= index):
        again |= set(range(index + first // size, index + -(-(first + former) // size)))
    return tuple(sorted(again))


def _comparable(about: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a position one of the same data."""
    kept = {key: value for key, value in about.items() if key != "batch_size"}
    return kept | {"sources": [fingerprint for _, _, fingerprint in about.get("sources", ())]}


def build_pipeline(
    config: DataConfig,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    weights: Mapping[str, Any] | None = None,
    process_index: int = 0,
    process_count: int = 1,
    vocab_size: int = 0,
) -> Pipeline:
    """The pipeline of a data config's training split. `batch_size` is the global one.

    `weights` of sources by name replace those of the config, as `PhaseConfig.weights`. `vocab_size` is that of the
    model, see `open_mixture`.

    Raises:
      UserError: the data cannot be opened, a split is shorter than a window, a weight is wrong, or the batch does not
        divide.
    """
    local_size(batch_size, process_count)
    mixture = open_mixture(config, process_index, vocab_size)
    if not mixture.vocab_size and not vocab_size:
        raise ConfigError("data.tokenizer='none' does not tell how many ids there are: set model.vocab_size.")
    stages = mixture_stages(mixture.sources, weights or {})
    windows = [s.windows(sequence_length, seed, "train") for s in mixture.sources]
    for source, w in zip(mixture.sources, windows, strict=True):
        if isinstance(w, GrainIteration):
            if len(windows) > 1:
                raise ConfigError(
                    f"data source {source.name!r} is a grain.IterDataset, which has no random access and so must be "
                    "the only source. Return a grain.MapDataset, or mix the sources in Grain."
                )
        elif not len(w):
            raise DataError(
                f"data source {source.name!r}: its train split has {source.tokens('train')} tokens, less "
                f"than one window of sequence_length={sequence_length} + 1. Use more text or shorter windows."
            )
    # Epoch e is shuffled by seed + e, so the seeds of sources are far apart.
    sizes = [0 if w.endless else len(w) for w in windows]
    seeds = [_seed32(seed, i) if w.shuffled else None for i, w in enumerate(windows)]
    order = Order(sizes, seeds, stages, batch_size)
    about = {
        "sources": [[s.name, s.weight, s.fingerprint] for s in mixture.sources],
        "tokenizer": mixture.tokenizer.fingerprint,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "segments": config.segments,
        "packing": config.packing,
        "split": "train",
        "seed": seed,
    }
    if isinstance(windows[0], GrainIteration):
        about["iterated"] = True
    process, eos_id = (process_index, process_count), mixture.tokenizer.eos_id
    steps = StepBatches(tuple(windows), order, (), process, config.segments, eos_id)
    return Pipeline(mixture, steps, about, config.workers)


def _seed32(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"shuffle/{seed}/{source}".encode(), digest_size=4).digest(), "little")
