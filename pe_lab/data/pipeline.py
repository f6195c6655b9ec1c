"""The pipeline: shuffled windows of all sources, mixed by weight, in global batches, which threads read ahead.

The global batches do not depend on the number of processes.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from pe_lab.config import DataConfig
from pe_lab.data.mixture import Mixture, Windows, mixture_stages, open_mixture
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.order import Order, Position
from pe_lab.data.supply import Supply
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.windows import PackedWindows, documents_of, make_batch
from pe_lab.errors import CheckpointError, ConfigError, DataError, redacted

Batch = dict[str, np.ndarray]
ADDRESSES = 4096  # sequences whose windows are computed at once, about
EPOCHS = 4  # of the smallest source that are computed at once: each is shuffled by itself, in milliseconds
AHEAD = 1  # batches that are read before they are asked for, beside one for each thread


class _Made(NamedTuple):
    """A batch with what the pipeline counts when it is given."""

    batch: Batch
    tokens: Int64[np.ndarray, " sources"]  # of the global batch, without padding
    expected: Float64[np.ndarray, " sources"]  # the tokens that the weights give it
    reached: Int64[np.ndarray, " sources"]  # the sequences of each source up to its end
    begun: Int64[np.ndarray, " sources"]  # the epochs of each source that have begun then


class Pipeline:
    """An endless iterator over this process's sequences of each global batch.

    Its position is the number of global batches so far, and of sequences of each source: a run that stops on one
    process may continue on two, and with other batch sizes and weights. Batches that are left out are passed over:
    batch `batch_index(n)` comes after n others.
    """

    def __init__(
        self,
        mixture: Mixture,
        windows: Sequence[Windows],
        order: Order,
        about: dict[str, Any],
        process: tuple[int, int],
        workers: int,
    ):
        self.vocab_size: int = mixture.vocab_size
        self.tokenizer: Tokenizer = mixture.tokenizer
        self._sources, self._windows, self._order = mixture.sources, tuple(windows), order
        self._about, self._process = about, process
        streams = [source.prepared.streams["train"] for source in mixture.sources if source.prepared is not None]
        self._threads = workers or max([stream.threads for stream in streams], default=1)
        self._local = local_size(order.batch_size, process[1])
        names, configs = zip(*((source.name, source.config) for source in mixture.sources), strict=True)
        self._supply = Supply(names, configs, order.windows)
        sequences = min([ADDRESSES, *(EPOCHS * count for count in order.windows if count)])
        self._per_block = max(1, sequences // order.batch_size)  # batches
        self._batches = 0
        self._left_out: tuple[int, ...] = ()  # ascending
        self._read = np.zeros(len(windows), np.int64)  # tokens
        self._expected = np.zeros(len(windows))
        self._mean_tokens = np.asarray([w.mean_tokens if isinstance(w, PackedWindows) else w.length for w in windows])
        self._begun = np.zeros(len(windows), np.int64)  # epochs
        self._repeats: list[tuple[str, int]] = []
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[_Made]]] = deque()
        self._block = functools.lru_cache(4)(self._addresses)

    def describe(self, steps: int) -> list[dict[str, Any]]:
        """For each source its name, `source`, weight, and number of tokens and windows, as JSON.

        With a schedule, `weights` has it, and `weight` is the source's part of all sequences of `steps` steps.
        """
        rows, stages = [], self._order.stages
        counts = self._order.after(None).counts(steps * self._order.batch_size) if len(stages) > 1 else None
        for i, (source, windows) in enumerate(zip(self._sources, self._windows, strict=True)):
            weight = stages[0][1][i] if counts is None else float(f"{counts[i] / counts.sum():.6g}")
            row = {"name": source.name, "source": redacted(source.config.source), "weight": weight}
            if counts is not None:
                row["weights"] = [[first, weights[i]] for first, weights in stages]
            row |= {"tokens": source.tokens("train"), "windows": self._order.windows[i] or None}
            if isinstance(windows, PackedWindows):
                row["packing_efficiency"] = round(windows.efficiency, 6)
            rows.append(row)
        return rows

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = self.batch_index(self._batches)
        self._read_ahead(index)
        made = self._ahead[0][1].result()
        self._ahead.popleft()
        self._count_epochs(made)
        self._batches += 1
        self._read = self._read + made.tokens
        self._expected = self._expected + made.expected
        return made.batch

    def read_ahead(self) -> None:
        """Has threads read the next batches, while the caller does something else.

        A thread that has work takes the interpreter from its caller: call this after a step is dispatched.
        """
        self._read_ahead(self.batch_index(self._batches))

    def _read_ahead(self, index: int) -> None:
        """Has threads read the batch of an index and some after it."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, "feeding")
        index = self._ahead[-1][0] + 1 if self._ahead else index
        while len(self._ahead) < self._threads + AHEAD:
            if index not in self._left_out:
                self._ahead.append((index, self._executor.submit(self._make, index)))
            index += 1

    def _make(self, index: int) -> _Made:
        """This process's part of the batch of an index."""
        size, (process, _) = self._order.batch_size, self._process
        per = self._per_block
        source, window = (part[index % per * size :][:size] for part in self._block(index // per))
        tokens = [_input_tokens(w, window[source == i]) for i, w in enumerate(self._windows)]
        mine = slice(process * self._local, (process + 1) * self._local)
        reached = self._order.counts(self._order.sequence(index + 1))
        batch = gather_batch(self._windows, source[mine], window[mine], self._about["segments"], self.tokenizer.eos_id)
        expected = self._order.shares(index) * size * self._mean_tokens
        return _Made(batch, np.asarray(tokens, np.int64), expected, reached, self._supply.epochs(reached))

    def _addresses(self, block: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source and the window of each sequence of a block of batches."""
        per = self._per_block
        start, first = self._order.sequence(block * per), self._order.first_sequence
        found = self._order.addresses(max(start, first), self._order.sequence((block + 1) * per))
        return tuple(np.pad(part, (max(0, first - start), 0)) for part in found)  # nothing is read before the first

    # -----------------------------------------------------------------------------------------------------------------
    # Epochs

    def _count_epochs(self, made: _Made) -> None:
        """Notes the epochs that begin in a batch. `DataError` if a source has run dry."""
        for i in np.flatnonzero(made.begun > np.maximum(1, self._begun)):
            self._repeats.append((self._sources[i].name, int(made.begun[i])))
        self._begun = np.maximum(made.begun, self._begun)
        self._supply.check_now(made.reached, self._batches + 1)

    def check_supply(self, steps: int) -> None:
        """`DataError` if a source that may not repeat runs dry before `steps` batches were given."""
        self._supply.check(self._order, self._batches, self.batch_index(self._batches), steps)

    def steps_of(self, epochs: float | Mapping[str, Any]) -> int:
        """The steps of a phase of so many epochs, as `Supply.steps_of`."""
        return self._supply.steps_of(self._order, epochs)

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
        for left_out in self._left_out:
            position += left_out <= position
        return position

    def leave_out(self, batches: Sequence[int]) -> None:
        """Passes over batches with these indices, besides those that are left out already."""
        self.close()
        self._left_out = tuple(sorted({*self._left_out, *batches}))

    def sequences(self, batch: int) -> Iterator[dict[str, Any]]:
        """What is in the global batch of an index, for a person: a record for each sequence.

        `source` and `window` name it, `tokens` are its T + 1 ids and `text` is what they decode to (without the symbols
        of needles). Of text, `first_token` is the place in the split, and `documents` the ordinal numbers of the first
        and the last document there, from 0; of a window with packed documents, both are lists of each part's.
        """
        start = self._order.sequence(batch)
        addresses = self._order.addresses(start, start + self._order.batch_size)
        for k, (i, window) in enumerate(zip(*(part.tolist() for part in addresses), strict=True)):
            source, windows = self._sources[i], self._windows[i]
            record: dict[str, Any] = {"batch": batch, "sequence": k, "source": source.name, "window": window}
            if source.prepared is not None:
                starts, lengths = np.asarray(windows.pieces(window)).T
                ends, packed = source.prepared.streams["train"].ends, isinstance(windows, PackedWindows)
                inside = starts if packed else np.asarray([starts[0], starts[0] + lengths[0] - 2])
                record["first_token"] = starts.tolist() if packed else int(starts[0])
                record["documents"] = np.searchsorted(ends, inside, side="right").tolist()
            record["tokens"] = windows.read(np.asarray([window]))[0][0].tolist()
            record["text"] = self.tokenizer.decode([t for t in record["tokens"] if t < self.tokenizer.vocab_size])
            yield record

    # -----------------------------------------------------------------------------------------------------------------
    # The position

    def get_state(self) -> dict[str, Any]:
        """The position as JSON.

        `batches` is the number of global batches so far, `left_out` those left out; `sequences` the number of sequences
        of the global order up to there, with those left out, and `sources` how many of them are of each source, with
        the tokens that were read and expected; `weights` those of the sources, and `place` the sequences since they
        began; `data` describes the data.
        """
        place = self._order.position(self.batch_index(self._batches))
        left_out = {"left_out": list(self._left_out)} if self._left_out else {}
        sources = [
            {"name": source.name, "sequences": count, "read_tokens": int(read), "expected_tokens": float(expected)}
            for source, count, read, expected in zip(
                self._sources, place.counts, self._read, self._expected, strict=True
            )
        ]
        where = {"sequences": place.sequence, "sources": sources, "weights": list(place.weights), "place": place.place}
        return {"batches": self._batches, **left_out, **where, "data": self._about}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after `state["batches"]` global batches; `CheckpointError` if they are of other data.

        The batch size and the weights may be others: each source goes on where it was.
        """
        saved = {"packing": "concatenate", **state.get("data", {})}
        mine, its = (_comparable(about) for about in (self._about, saved))
        for name in {**mine, **its}:
            if its.get(name) != mine.get(name):
                raise CheckpointError(
                    f"The checkpoint's data position does not fit this config: {name} was "
                    f"{its.get(name)!r}, is {mine.get(name)!r}. "
                    "Resume with the same data, or start a new workdir."
                )
        self.close()
        self._batches = int(state["batches"])
        self._left_out = tuple(sorted(state.get("left_out", ())))
        index = self.batch_index(self._batches)
        if "sources" in state:
            sources = state["sources"]
            counts = tuple(int(source["sequences"]) for source in sources)
            start = Position(index, int(state["sequences"]), counts, tuple(state["weights"]), int(state["place"]))
            self._read = np.asarray([source["read_tokens"] for source in sources], np.int64)
            self._expected = np.asarray([source["expected_tokens"] for source in sources], np.float64)
        else:
            start = self._of_earlier_version(saved, index)
        self._leave_out_again(index, start, saved["batch_size"])
        self._order = self._order.after(start)
        self._block.cache_clear()
        sizes = self._order.windows
        self._begun = np.asarray([-(-n // size) if size else 0 for n, size in zip(start.counts, sizes, strict=True)])
        self._repeats = []

    def _of_earlier_version(self, saved: Mapping[str, Any], index: int) -> Position:
        """The position of a state that has the number of batches alone; counts the tokens that were read."""
        weights = tuple(float(weight) for _, weight, _ in saved["sources"])
        order = Order(self._order.windows, self._order.seeds, [(0, weights)], saved["batch_size"])
        passed = [b for b in self._left_out if b < index]
        counts = order.counts(order.sequence(index))
        for batch in passed:
            counts = counts - order.counts(order.sequence(batch + 1)) + order.counts(order.sequence(batch))
        self._read = counts * saved["sequence_length"]
        sequences = (index - len(passed)) * saved["batch_size"]
        self._expected = order.shares(0) * sequences * saved["sequence_length"]
        return order.position(index)

    def _leave_out_again(self, index: int, start: Position, batch_size: int) -> None:
        """Renumbers batches that are still to be left out, where the batch size was another one."""
        if batch_size != self._order.batch_size and (ahead := [b for b in self._left_out if b >= index]):
            again = set()
            for batch in ahead:
                first = (batch - index) * batch_size
                size = self._order.batch_size
                again |= set(range(index + first // size, index + -(-(first + batch_size) // size)))
            self._left_out = tuple(sorted({*self._left_out} - {*ahead} | again))

    def close(self) -> None:
        """Stops the threads."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = None
        self._ahead.clear()


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
) -> Pipeline:
    """The pipeline of a data config's training split. `batch_size` is the global one.

    `weights` of sources by name replace those of the config, as `PhaseConfig.weights`.

    Raises:
      UserError: the data cannot be opened, a split is shorter than a window, a weight is wrong, or the batch does not
        divide.
    """
    local_size(batch_size, process_count)
    mixture = open_mixture(config, process_index)
    stages = mixture_stages(mixture.sources, weights or {})
    windows = [s.windows(sequence_length, seed, "train") for s in mixture.sources]
    for source, w in zip(mixture.sources, windows, strict=True):
        if not len(w):
            raise DataError(
                f"data source {source.name!r}: its train split has {source.tokens('train')} tokens, less "
                f"than one window of sequence_length={sequence_length} + 1. Use more text or shorter windows."
            )
    # Needles are random already. Epoch e is shuffled by seed + e, so the seeds of sources are far apart.
    sizes = [0 if isinstance(w, NeedleWindows) else len(w) for w in windows]
    order = Order(sizes, [_seed32(seed, i) for i in range(len(windows))], stages, batch_size)
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
    return Pipeline(mixture, windows, order, about, (process_index, process_count), config.workers)


def gather_batch(
    windows: Sequence[Windows],
    source: Int64[np.ndarray, " n"],
    window: Int64[np.ndarray, " n"],
    segments: bool,
    eos_id: int,
) -> Batch:
    """A batch of the windows with these numbers, of these of the sources."""
    shape = (len(source), windows[0].length + 1)
    tokens, weights = np.empty(shape, np.int32), np.empty((shape[0], shape[1] - 1), np.float32)
    documents, present = None, np.unique(source).tolist()
    for i in present:
        mine = np.flatnonzero(source == i)
        by_eos = not segments or isinstance(windows[i], NeedleWindows)
        *read, found = (*windows[i].read(window[mine]), None) if by_eos else windows[i].read_documents(window[mine])
        if len(present) == 1:
            return make_batch(*read, segments=segments, eos_id=eos_id, documents=found)
        tokens[mine], weights[mine] = read
        if found is not None:
            documents = np.zeros(shape, np.int32) if documents is None else documents
            documents[mine] = found
    if documents is not None and len(others := np.flatnonzero(documents[:, 0] == 0)):
        documents[others] = documents_of(tokens[others], eos_id)
    return make_batch(tokens, weights, segments=segments, eos_id=eos_id, documents=documents)


def _input_tokens(windows: Windows, indices: Int64[np.ndarray, " n"]) -> int:
    """The number of input tokens of some windows that are no padding."""
    return windows.input_tokens(indices) if isinstance(windows, PackedWindows) else len(indices) * windows.length


def local_size(batch_size: int, process_count: int) -> int:
    """The number of sequences of one process."""
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"batch_size={batch_size} does not divide into {process_count} processes. Make it a multiple of "
            f"{process_count}."
        )
    return batch_size // process_count


def _seed32(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"shuffle/{seed}/{source}".encode(), digest_size=4).digest(), "little")
