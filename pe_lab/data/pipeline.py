"""The Grain pipeline: shuffled windows of all sources, mixed by weight, in global batches; and held-out data.

The global batches do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.config import DataConfig
from pe_lab.data.mixture import Mixture, MixtureSource, open_mixture
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.windows import TokenWindows, make_batch
from pe_lab.errors import CheckpointError, ConfigError, DataError

Batch = dict[str, np.ndarray]
ENDLESS = 2**62


class Pipeline:
    """An endless iterator over this process's sequences of each global batch.

    Its position is the number of global batches so far: a run that stops on one process may continue on two. Batches
    that are left out are passed over: batch `batch_index(n)` comes after n others.
    """

    def __init__(
        self,
        mixture: Mixture,
        mixed: Any,
        read: _ReadBatch,
        about: dict[str, Any],
        process: tuple[int, int],
        workers: int,
    ):
        self.vocab_size: int = mixture.vocab_size
        self.tokenizer: Tokenizer = mixture.tokenizer
        self.mixture = [{"source": s.name, "weight": s.weight, "tokens": s.tokens("train")} for s in mixture.sources]
        self._sources, self._addresses, self._read = mixture.sources, mixed, read
        self._about, self._process, self._workers = about, process, workers
        local = _local_size(about["batch_size"], process[1])
        self._local = local
        prepared = [s.prepared for s in mixture.sources if s.prepared is not None]
        self._in_memory = all(p.streams["train"].in_memory for p in prepared)
        self._batches = 0
        self._origin = (0, 0)  # a batch's index, and the first sequence of it in the global order
        self._index = 0  # of the batch that the iterator gives next
        self._left_out: tuple[int, ...] = ()  # ascending
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._index = self.batch_index(self._batches)
            self._iterator = self._start(self._index)
        batch = next(self._iterator)
        while self._index in self._left_out:
            batch = next(self._iterator)
            self._index += 1
        self._index += 1
        self._batches += 1
        return batch

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
        and the last document there, from 0, if the split is in memory.
        """
        size, length = self._about["batch_size"], self._about["sequence_length"]
        ends: dict[int, np.ndarray] = {}
        for k in range(size):
            address = int(self._addresses[self._first_sequence(batch) + k])
            i = int(np.searchsorted(self._read.starts, address, side="right")) - 1
            window, source = address - int(self._read.starts[i]), self._sources[i]
            tokens = self._read.window(i, window)
            record: dict[str, Any] = {"batch": batch, "sequence": k, "source": source.name, "window": window}
            if source.prepared is not None:
                record["first_token"] = window * length
                stream = source.prepared.streams["train"]
                if stream.in_memory:
                    if i not in ends:
                        ends[i] = np.flatnonzero(stream.read(0, stream.tokens) == self.tokenizer.eos_id)
                    inside = [window * length, window * length + length]
                    record["documents"] = np.searchsorted(ends[i], inside).tolist()
            record["tokens"] = tokens.tolist()
            record["text"] = self.tokenizer.decode([t for t in record["tokens"] if t < self.tokenizer.vocab_size])
            yield record

    def _start(self, batch: int) -> Iterator[Batch]:
        import grain

        index, count = self._process
        # The batches of the dataset have one process's size; process i takes every count-th one, from i on.
        rest = self._addresses[self._first_sequence(batch) :]
        mine = rest.batch(self._local, drop_remainder=True, batch_fn=self._read)[index::count]
        # Data in memory need one thread; more would compete for the interpreter's lock.
        threads = 1 if self._in_memory else 8
        batches = mine.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads + 2))
        if self._workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # Grain's workers use absl flags, which only absl programs parse
                flags.FLAGS.mark_as_parsed()
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=self._workers, per_worker_buffer_size=2)
            )
        return iter(batches)

    def get_state(self) -> dict[str, Any]:
        """The position as JSON: the number of global batches so far, those left out, and the data they are from."""
        left_out = {"left_out": list(self._left_out)} if self._left_out else {}
        sequences = self._first_sequence(self.batch_index(self._batches))
        return {"batches": self._batches, "sequences": sequences, **left_out, "data": self._about}

    def _first_sequence(self, batch: int) -> int:
        index, sequence = self._origin
        return sequence + (batch - index) * self._about["batch_size"]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after `state["batches"]` global batches; `CheckpointError` if they are of another data config."""
        saved = dict(state.get("data", {}))
        for name in {**self._about, **saved}:
            was, now = saved.get(name), self._about.get(name)
            if name == "sources" and isinstance(was, list):
                was, now = ([[s[0], s[2]] for s in sources] for sources in (was, now))
            if name != "batch_size" and was != now:
                raise CheckpointError(
                    f"The checkpoint's data position does not fit this config: {name} was "
                    f"{saved.get(name)!r}, is {self._about.get(name)!r}. "
                    "Resume with the same data, or start a new workdir."
                )
        self.close()
        self._batches = int(state["batches"])
        self._left_out = tuple(sorted(state.get("left_out", ())))
        index = self.batch_index(self._batches)
        self._origin = (index, int(state.get("sequences", index * saved.get("batch_size", 0))))

    def close(self) -> None:
        """Stops the reading threads or worker processes."""
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None


class _ReadBatch:
    """A function from window addresses to a batch. Source i has the addresses starts[i] .. starts[i + 1] - 1."""

    def __init__(self, windows: Sequence[TokenWindows | NeedleWindows], length: int, segments: bool, eos_id: int):
        self._windows, self._length, self._segments, self._eos_id = windows, length, segments, eos_id
        self.starts = np.concatenate([[0], np.cumsum([len(w) for w in windows])]).astype(np.int64)

    def __call__(self, addresses: Sequence[int]) -> Batch:
        at = np.asarray(addresses, np.int64)
        tokens = np.empty((len(at), self._length + 1), np.int32)
        weights = np.empty((len(at), self._length), np.float32)
        source = np.searchsorted(self.starts, at, side="right") - 1
        for i, windows in enumerate(self._windows):
            mine = np.flatnonzero(source == i)
            if len(mine):
                tokens[mine], weights[mine] = windows.read(at[mine] - self.starts[i])
        return make_batch(tokens, weights, segments=self._segments, eos_id=self._eos_id)

    def window(self, source: int, index: int) -> np.ndarray:
        """The T + 1 tokens of one window of a source."""
        return self._windows[source].read(np.asarray([index]))[0][0]


def build_pipeline(
    config: DataConfig,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Pipeline:
    """The pipeline of a data config's training split. `batch_size` is the global one.

    Raises:
      UserError: the data cannot be opened, a split is shorter than a window, or the batch does not divide.
    """
    import grain

    _local_size(batch_size, process_count)
    mixture = open_mixture(config, process_index)
    windows = [s.windows(sequence_length, seed, "train") for s in mixture.sources]
    for source, w in zip(mixture.sources, windows, strict=True):
        if not len(w):
            raise DataError(
                f"data source {source.name!r}: its train split has {source.tokens('train')} tokens, less "
                f"than one window of sequence_length={sequence_length} + 1. Use more text or shorter windows."
            )
    read = _ReadBatch(windows, sequence_length, config.segments, mixture.tokenizer.eos_id)
    addresses = []
    for i, w in enumerate(windows):
        dataset = grain.MapDataset.range(int(read.starts[i]), int(read.starts[i + 1]))
        # Needles are random already. Grain shuffles epoch e by seed + e, so the seeds of sources are far apart.
        addresses.append(dataset if isinstance(w, NeedleWindows) else dataset.shuffle(seed=_seed32(seed, i)).repeat())
    mixed = addresses[0]
    if len(addresses) > 1:
        mixed = grain.MapDataset.select_from_datasets(addresses, _Selection([s.weight for s in mixture.sources]))
    about = {
        "sources": [[s.name, s.weight, s.fingerprint] for s in mixture.sources],
        "tokenizer": mixture.tokenizer.fingerprint,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "segments": config.segments,
        "split": "train",
        "seed": seed,
    }
    return Pipeline(mixture, mixed, read, about, (process_index, process_count), config.workers)


def _local_size(batch_size: int, process_count: int) -> int:
    """The number of sequences of one process."""
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"batch_size={batch_size} does not divide into {process_count} processes. Make it a multiple of "
            f"{process_count}."
        )
    return batch_size // process_count


def _seed32(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"shuffle/{seed}/{source}".encode(), digest_size=4).digest(), "little")


class _Selection:
    """Maps element k of the mixture to (source, index in the source), with exact weights over each period.

    Grain's own mixing rounds weights to hundredths of the smallest.
    """

    def __init__(self, weights: Sequence[float]):
        self._order = mixing_order(weights)
        self._totals = Counter(source for source, _ in self._order)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, k: int) -> tuple[int, int]:
        period, place = divmod(k, len(self._order))
        source, index = self._order[place]
        return source, period * self._totals[source] + index


def mixing_order(weights: Sequence[float]) -> list[tuple[int, int]]:
    """(source, index in the source) of each element of one period; the elements of a source are spread evenly.

    Weights become ratios of whole numbers: exactly if the period has at most 100,000 elements, else rounded to
    1 in 10,000.
    """
    ratios = [Fraction(w).limit_denominator(10_000) for w in weights]
    shares = [int(r * math.lcm(*(x.denominator for x in ratios))) for r in ratios]
    shares = [s // math.gcd(*shares) for s in shares]
    if min(shares) < 1 or sum(shares) > 100_000:
        shares = [max(1, round(10_000 * w / sum(weights))) for w in weights]
    period = sum(shares)
    # Element j of the s elements of a source belongs at (j + 1/2) / s of the period; ties go to the first source.
    places = [((2 * j + 1) * period / (2 * s), i, j) for i, s in enumerate(shares) for j in range(s)]
    return [(source, index) for _, source, index in sorted(places)]


def validation_batches(
    config: DataConfig,
    *,
    sequence_length: int,
    batch_size: int,
    count: int,
    process_index: int = 0,
    process_count: int = 1,
    source: str | None = None,
) -> dict[str, list[Batch]]:
    """This process's part of up to `count` held-out batches of every source, or of one; equal at every call.

    The windows are spaced evenly over the split. A shorter split gives fewer batches, the last one padded with
    sequences of weight 0. A source without held-out data (`validation_fraction=0`) is left out.

    Raises:
      UserError: the data cannot be opened, the batch does not divide, or there is no such source.
    """
    local = _local_size(batch_size, process_count)
    mixture = open_mixture(config, process_index)
    names = [s.name for s in mixture.sources]
    if source is not None and source not in names:
        raise ConfigError(f"There is no data source {source!r} to validate on. The sources are: {', '.join(names)}.")
    found, eos_id = {}, mixture.tokenizer.eos_id
    for s in mixture.sources:
        if source not in (None, s.name) or s.tokens("validation") == 0:
            continue
        windows = s.windows(sequence_length, config.seed, "validation")
        wanted = count * batch_size
        if len(windows):
            chosen = np.arange(min(wanted, len(windows))) * (max(1, len(windows) // wanted) if s.needles is None else 1)
            tokens, weights = windows.read(chosen)
        else:  # less than one window: padded
            found_tokens = s.prepared.tokens("validation", 0, sequence_length + 1)
            tokens = np.pad(found_tokens, (0, sequence_length + 1 - len(found_tokens)), constant_values=eos_id)[None]
            weights = (np.arange(sequence_length)[None] < len(found_tokens) - 1).astype(np.float32)
        missing = ((0, -len(tokens) % batch_size), (0, 0))
        tokens, weights = np.pad(tokens, missing, constant_values=eos_id), np.pad(weights, missing)
        found[s.name] = [
            make_batch(tokens[i : i + local], weights[i : i + local], segments=config.segments, eos_id=eos_id)
            for i in range(process_index * local, len(tokens), batch_size)
        ]
    return found


def held_out_tokens(config: DataConfig, source_index: int, n_tokens: int) -> Int32[np.ndarray, " n"]:
    """The first `n_tokens` held-out tokens of a text source, or all if it has fewer; EOS ends every document.

    Raises:
      ConfigError: the source is needles (use `needle_windows`), or has no held-out data.
    """
    source = _source(config, source_index)
    if source.prepared is None:
        raise ConfigError("data source 'needles' has no held-out text: its windows are made for every length.")
    tokens = source.prepared.tokens("validation", 0, n_tokens)
    if not len(tokens):
        raise ConfigError(f"data source {source.name!r} holds out nothing. Set data.validation_fraction above 0.")
    return tokens


def needle_windows(
    config: DataConfig, source_index: int, length: int, seed: int | None = None, split: str = "validation"
) -> NeedleWindows:
    """The windows of a needles source, of any length, in the vocabulary of the config.

    Raises:
      ConfigError: the source is not needles, or the length is too short for it.
    """
    source = _source(config, source_index)
    if source.needles is None:
        raise ConfigError(f"data source {source.name!r} is not needles.")
    return source.windows(length, config.seed if seed is None else seed, split)


def _source(config: DataConfig, index: int) -> MixtureSource:
    sources = open_mixture(config).sources
    if not 0 <= index < len(sources):
        raise ConfigError(f"There is no data source number {index}: the config has {len(sources)}.")
    return sources[index]
