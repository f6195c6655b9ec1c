"""A person's own Grain dataset as a source: `grain:FILE.py:FUNCTION`.

The function takes the split ("train" or "validation"), a seed and the length T of sequences, and returns a
`grain.MapDataset` or a `grain.IterDataset`; None: the split has no data. An element is a dict of arrays with T + 1
entries each, one for each token of a window:

| key | type | is |
|---|---|---|
| `tokens` | integers | the ids; tokens[1:] are the targets of tokens[:-1] |
| `weights` | numbers | how much each token counts as a target; the first is none. Without them each counts 1 |
| `segments` | integers | the document of each token, 0: padding, which never counts; needs `data.segments` |
| `positions` | integers | the position of each token; without them from 0 in each segment |

A `MapDataset` is read in its own order, element after element: shuffling it, and repeating it in another order, is its
own affair. A process reads its part of it. An `IterDataset` is read whole by every process, each of which keeps its
part, so that any number of processes may go on from its state.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from pe_lab.data.windows import WindowArrays, Windows
from pe_lab.errors import CheckpointError, ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    import grain

KEYS = ("tokens", "weights", "segments", "positions")
ENDLESS = 2**62  # elements, as a repeated MapDataset has
KEPT = 4  # states of the iterator, before the batches given last


@dataclass(frozen=True)
class GrainSource:
    """A function that makes Grain datasets, and what their elements must be."""

    name: str  # of the source
    address: str  # FILE.py:FUNCTION
    vocab_size: int  # ids are below it
    segments: bool  # whether documents are masked from each other, `data.segments`
    has_end: bool  # whether a token ends every document, so that segments follow from the ids where there are none

    @property
    def where(self) -> str:
        """Its name, for messages."""
        return f"data source {self.name!r}"

    def open(self, split: str, seed: int, length: int) -> GrainWindows | GrainIteration | None:
        """The dataset of a split; None if it has none.

        Raises:
          ConfigError: the function is missing, or raises something, or returns something else.
          DataError: the dataset is empty.
        """
        import grain

        function = self.function()
        try:
            dataset = function(split, seed, length)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self.where}: {self.address}({split!r}, {seed}, {length}) raises {type(error).__name__}: {reason}"
            ) from error
        if dataset is None and split != "train":
            return None
        if isinstance(dataset, grain.IterDataset):
            return GrainIteration(self, dataset, length)
        if not isinstance(dataset, grain.MapDataset):
            raise ConfigError(
                f"{self.where}: {self.address}({split!r}, ...) returns a {type(dataset).__name__}; it must return a "
                "grain.MapDataset or a grain.IterDataset."
            )
        windows = GrainWindows(self, dataset, length)
        if not len(windows):
            raise DataError(
                f"{self.where}: {self.address}({split!r}, ...) has no elements. Return None where there are none."
            )
        return windows

    def function(self) -> Callable[[str, int, int], Any]:
        """The function; `ConfigError` if there is none."""
        file, _, name = self.address.rpartition(":")
        path = Path(file).expanduser()
        if not file.endswith(".py") or not name:
            raise ConfigError(f"{self.where}: {self.address!r} is not FILE.py:FUNCTION.")
        if not path.is_file():
            raise ConfigError(f"{self.where}: there is no file {file!r}.")
        module = _module(str(path.resolve()), path.stat().st_mtime_ns)
        function = getattr(module, name, None)
        if not callable(function):
            known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
            raise ConfigError(f"{self.where}: {file} has no function {name!r}. {did_you_mean(name, known)}")
        return function

    def arrays(self, elements: Sequence[Any], length: int, numbers: Sequence[int]) -> WindowArrays:
        """Elements as windows. `DataError` names the first that is none; `numbers` are theirs."""
        keys = self._keys(elements, numbers)
        columns = {key: self._column(key, elements, length, numbers) for key in keys}
        tokens = columns["tokens"]
        outside = np.flatnonzero(((tokens < 0) | (tokens >= self.vocab_size)).any(axis=1))
        if len(outside):
            worst = tokens[outside[0]]
            wrong = worst[(worst < 0) | (worst >= self.vocab_size)][0]
            raise self._refused(
                numbers[outside[0]],
                f"has the token id {wrong}, and ids are below {self.vocab_size}",
                "Set model.vocab_size, or data.tokenizer to the tokenizer that the ids are of",
            )
        weights = columns.get("weights", np.ones(tokens.shape, np.float32))[:, 1:].astype(np.float32)
        segments, positions = (columns[key].astype(np.int32) if key in columns else None for key in KEYS[2:])
        if segments is not None:
            weights[segments[:, 1:] == 0] = 0
        return WindowArrays(tokens.astype(np.int32), weights, segments, positions)

    def _keys(self, elements: Sequence[Any], numbers: Sequence[int]) -> list[str]:
        """The keys of the elements, which all have the same."""
        keys = None
        for number, element in zip(numbers, elements, strict=True):
            if element is None:
                raise self._refused(
                    number, "is None, as MapDataset.filter leaves it", "Filter an IterDataset: .to_iter_dataset()"
                )
            if not isinstance(element, Mapping) or "tokens" not in element or not set(element) <= set(KEYS):
                found = sorted(map(str, element)) if isinstance(element, Mapping) else type(element).__name__
                raise self._refused(number, f"has {found}", f"It must be a dict of {', '.join(KEYS)} (tokens at least)")
            if keys is not None and set(element) != set(keys):
                raise self._refused(number, f"has {sorted(element)}, others {sorted(keys)}", "Give all the same keys")
            keys = keys or [key for key in KEYS if key in element]
        if not self.segments and (extra := [key for key in ("segments", "positions") if key in keys]):
            raise self._refused(numbers[0], f"has {extra}", "Set data.segments=True, or leave them out")
        if self.segments and "segments" not in keys and (not self.has_end or "positions" in keys):
            raise self._refused(numbers[0], "has no segments", "Give them, or set data.segments=False")
        return keys

    def _column(self, key: str, elements: Sequence[Any], length: int, numbers: Sequence[int]) -> np.ndarray:
        """The arrays of a key, one row for each element."""
        rows = [np.asarray(element[key]) for element in elements]
        for number, row in zip(numbers, rows, strict=True):
            if row.shape != (length + 1,):
                raise self._refused(
                    number, f"has {key} of shape {row.shape}", f"It must be ({length + 1},): sequence_length + 1"
                )
            if row.dtype.kind not in ("iufb" if key == "weights" else "iu"):
                allowed = "numbers" if key == "weights" else "integers"
                raise self._refused(number, f"has {key} of type {row.dtype}", f"They must be {allowed}")
            if key == "weights" and not np.isfinite(row).all():
                raise self._refused(number, "has weights that are not finite", "Mend them")
        return np.stack(rows)

    def element(self, dataset: grain.MapDataset, number: int) -> Any:
        """An element of a dataset; `DataError` if it cannot be made."""
        try:
            return dataset[number]
        except Exception as error:
            raise self.failed(number, error) from error

    def failed(self, number: int, error: Exception) -> DataError:
        """The error of an element, at or soon after that number, whose code raises one."""
        reason = " ".join(str(error).split())
        return self._refused(number, f"raises {type(error).__name__}: {reason}", "Mend the function")

    def _refused(self, number: int, what: str, advice: str) -> DataError:
        return DataError(f"{self.where}: element {number} of {self.address} {what}. {advice}.")


@functools.lru_cache(16)
def _module(path: str, modified: int) -> ModuleType:
    """The module of a file, as it is since `modified`."""
    name = f"pe_lab_grain_{Path(path).stem}_{modified}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"data source: {path} raises {type(error).__name__}: {reason}") from error
    return module


class GrainWindows(Windows):
    """The elements of a `MapDataset` as windows, in the order of their numbers. Number n is in epoch n // elements."""

    shuffled = False

    def __init__(self, source: GrainSource, dataset: grain.MapDataset, length: int):
        self._source, self._dataset, self.length = source, dataset, length
        self.endless = len(dataset) >= ENDLESS

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Int[np.ndarray, " n"], segments: bool = False) -> WindowArrays:
        numbers = np.asarray(indices).tolist()
        elements = [self._source.element(self._dataset, number) for number in numbers]
        return self._source.arrays(elements, self.length, numbers)


class GrainIteration:
    """The batches of an `IterDataset`, and its state.

    `at` is the number of elements that were drawn, those of batches that were left out too. To the order of sequences
    it is one endless source.
    """

    endless, shuffled = True, False

    def __init__(self, source: GrainSource, dataset: grain.IterDataset, length: int):
        self._source, self._dataset, self.length = source, dataset, length
        self._iterator: grain.DatasetIterator | None = None
        self._size = self._ahead = 0
        self._kept: dict[int, Any] = {}  # the state before each of the batches given last, by `at`
        self.at, self.mean_tokens = 0, float(length)

    def configure(self, size: int, ahead: int) -> None:
        """Sets the elements of a batch, and the batches that are read ahead."""
        self._size, self._ahead = size, ahead

    def input_tokens(self, indices: Int[np.ndarray, " n"]) -> int:
        """The number of input tokens of some elements, with their padding."""
        return len(indices) * self.length

    def first(self, count: int) -> list[Any]:
        """The first elements, at most so many."""
        try:
            with contextlib.closing(iter(self._dataset)) as iterator:
                return list(itertools.islice(iterator, count))
        except Exception as error:
            raise self._source.failed(0, error) from error

    def arrays(self, elements: Sequence[Any], first: int) -> WindowArrays:
        """Elements as windows; the first has that number."""
        return self._source.arrays(elements, self.length, range(first, first + len(elements)))

    def take(self, at: int) -> list[Any]:
        """The elements of the batch that begins with element `at`: that after the last one, or one of the last again.

        Raises:
          DataError: the dataset ends before.
        """
        if at != self.at:
            with contextlib.closing(self._from(at)) as iterator:
                self._continue(iterator.get_state(), at)
        self._kept[at] = self.get_state()
        for former in sorted(self._kept)[:-KEPT]:
            del self._kept[former]
        try:
            elements = next(self._opened())
        except StopIteration:
            raise self._ended(at) from None
        except Exception as error:
            raise self._source.failed(at, error) from error
        self.at += self._size
        return elements

    def peek(self, at: int) -> list[Any]:
        """The elements of a batch that begins with element `at`; [] of one before those given last."""
        if (found := self._from(at)) is None:
            return []
        with contextlib.closing(found) as iterator:
            return list(itertools.islice(iterator, self._size))

    def _from(self, at: int) -> grain.DatasetIterator | None:
        """An iterator over the elements from `at` on; None of one before those given last."""
        known = {self.at: self.get_state(), **self._kept}
        begin = max((former for former in known if former <= at), default=None)
        if begin is None:
            return None
        iterator = iter(self._dataset)
        iterator.set_state(known[begin])
        for passed in range(begin, at):
            try:
                next(iterator)
            except StopIteration:
                raise self._ended(passed) from None
        return iterator

    def get_state(self) -> dict[str, Any]:
        """Grain's state of the iterator. `DataError` if it is no JSON, which a checkpoint needs."""
        state = self._opened().get_state()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self._source.where}: the state of the iterator of {self._source.address} is no JSON ({error}), so "
                "that no checkpoint can have it."
            ) from error

    def set_state(self, state: Mapping[str, Any], at: int) -> None:
        """Continues from a state, before which `at` elements were drawn; `CheckpointError` if it does not fit."""
        self.close()
        try:
            self._continue(state, at)
        except Exception as error:
            raise CheckpointError(
                f"{self._source.where}: the checkpoint's state does not fit {self._source.address}, which has changed: "
                f"{type(error).__name__}: {error}. Bring it back, or start a new workdir."
            ) from error

    def close(self) -> None:
        """Stops the thread that reads ahead; the next batch is the first one again unless a state is set."""
        self._stop()
        self.at, self._kept = 0, {}

    def _stop(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def _continue(self, state: Mapping[str, Any], at: int) -> None:
        self._stop()
        self._opened().set_state(dict(state))
        self.at = at

    def _opened(self) -> grain.DatasetIterator:
        import grain

        if self._iterator is None:
            batches = self._dataset.batch(self._size, drop_remainder=True, batch_fn=list)
            self._iterator = iter(
                grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=self._ahead)
            )
        return self._iterator

    def _ended(self, at: int) -> DataError:
        return DataError(
            f"{self._source.where}: {self._source.address} ends after fewer than {at + self._size:,} elements. Train "
            "for fewer steps, or repeat the dataset."
        )
