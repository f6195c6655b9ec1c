"""Windows of T + 1 tokens of a split, and batches made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, Integer

from pe_lab.data.packing import Packing
from pe_lab.data.shards import TokenStream

Batch = dict[str, np.ndarray]


class WindowArrays(NamedTuple):
    """Windows of W = T + 1 tokens, as `make_batch` takes them."""

    tokens: Integer[np.ndarray, "n W"]
    weights: Float32[np.ndarray, "n T"]  # of the targets, tokens[:, 1:]; 0 where one does not count
    documents: Int32[np.ndarray, "n W"] | None = None  # of each token, from 1; None: they end with EOS
    positions: Int32[np.ndarray, "n W"] | None = None  # of each token; None: from 0 in each document


class Windows:
    """Random access to windows of T + 1 tokens, T = `length`."""

    length: int
    endless = False
    shuffled = True  # whether each epoch has an order of its own; else they come in the order of their numbers

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: Int[np.ndarray, " n"], segments: bool = False) -> WindowArrays:
        """Some windows; `segments`: with the documents of the tokens, where EOS does not tell them."""
        raise NotImplementedError

    def input_tokens(self, indices: Int[np.ndarray, " n"]) -> int:
        """The number of input tokens of some windows that are no padding."""
        return len(indices) * self.length

    @property
    def mean_tokens(self) -> float:
        """The mean of `input_tokens` of a window."""
        return self.length


class TokenWindows(Windows):
    """Random access to the windows of T + 1 tokens of a stream: window i is tokens[i*T : i*T + T + 1].

    Consecutive windows share one token, the last target of one and the first input of the next: every token but the
    first is a target exactly once. The last targets, fewer than T, are left out.
    """

    def __init__(self, stream: TokenStream, length: int):
        self._stream, self.length = stream, length

    def __len__(self) -> int:
        return max(0, (self._stream.tokens - 1) // self.length)

    def read(self, indices: Int[np.ndarray, " n"], segments: bool = False) -> WindowArrays:
        starts = np.asarray(indices, np.int64) * self.length
        weights = np.ones((len(starts), self.length), np.float32)
        if self._stream.has_loss:
            weights[:] = self._stream.loss(starts[:, None] + np.arange(1, self.length + 1))
        documents = documents_of_chats(self._stream, starts, self.length + 1) if segments else None
        return WindowArrays(self._stream.gather(starts, self.length + 1), weights, documents)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first token in the split, number of tokens) of each contiguous part of a window."""
        return [(index * self.length, self.length + 1)]


class PackedWindows(Windows):
    """Random access to windows of T + 1 tokens that have whole documents, by a plan; EOS fills them up."""

    def __init__(self, stream: TokenStream, plan: Packing, eos_id: int):
        self._stream, self._plan, self._eos_id = stream, plan, eos_id
        self.length, self.efficiency = plan.window - 1, plan.efficiency

    def __len__(self) -> int:
        return len(self._plan)

    def read(self, indices: Int[np.ndarray, " n"], segments: bool = True) -> WindowArrays:
        """The windows with their documents, of which padding is the last."""
        which, _, starts, lengths = self._plan.pieces(indices, self._stream.ends)
        shape = (len(indices), self._plan.window)
        tokens, documents = np.full(shape, self._eos_id, np.int32), np.zeros(shape, np.int32)
        targets = np.zeros(shape, np.float32)
        # Where each piece begins: in the flat arrays, in its window, and its number there.
        in_window = np.bincount(which, minlength=len(indices))
        number = np.arange(len(which)) - np.repeat(np.cumsum(in_window) - in_window, in_window) + 1
        before = np.cumsum(lengths) - lengths
        used = np.bincount(which, weights=lengths, minlength=len(indices)).astype(np.int64)
        filled = np.arange(shape[1]) < used[:, None]
        tokens[filled] = self._stream.gather_pieces(starts, lengths)
        documents[filled] = np.repeat(number, lengths)
        documents[~filled] = np.repeat(in_window + 1, shape[1] - used)
        counted = np.ones(int(used.sum()), bool)
        if self._stream.has_loss:
            counted = self._stream.loss(np.repeat(starts - before, lengths) + np.arange(len(counted)))
        counted[before] = False  # the first token of a piece is no target
        targets[filled] = counted
        return WindowArrays(tokens, targets[:, 1:], documents)

    def input_tokens(self, indices: Int[np.ndarray, " n"]) -> int:
        return int(np.minimum(self._plan.used(indices), self.length).sum())

    @property
    def mean_tokens(self) -> float:
        return self._plan.mean_inputs

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first token in the split, number of tokens) of each document, or part of one, in a window."""
        _, _, starts, lengths = self._plan.pieces(np.asarray([index]), self._stream.ends)
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def gather_batch(
    windows: Sequence[Windows],
    source: Int64[np.ndarray, " n"],
    window: Int64[np.ndarray, " n"],
    segments: bool,
    eos_id: int,
) -> Batch:
    """A batch of the windows with these numbers, of these of the sources."""
    parts = []
    for i in np.unique(source).tolist():
        mine = np.flatnonzero(source == i)
        parts.append((mine, make_batch(windows[i].read(window[mine], segments), segments=segments, eos_id=eos_id)))
    if len(parts) == 1:
        return parts[0][1]
    batch = {name: np.empty((len(source), array.shape[1]), array.dtype) for name, array in parts[0][1].items()}
    for mine, part in parts:
        for name in batch:
            batch[name][mine] = part[name]
    return batch


def make_batch(arrays: WindowArrays, *, segments: bool, eos_id: int) -> Batch:
    """Tokens, next-token targets and weights; with `segments` also the document of each token and its position there.

    Segments count from 1 in each window, positions from 0 in each segment. Where the target is the first token of
    the next document, the weight is 0.
    """
    windows = arrays.tokens
    batch = {
        "tokens": windows[:, :-1].astype(np.int32),
        "targets": windows[:, 1:].astype(np.int32),
        "weights": arrays.weights,
    }
    if segments:
        documents = documents_of(windows, eos_id) if arrays.documents is None else arrays.documents
        batch["segments"] = np.ascontiguousarray(documents[:, :-1])
        if arrays.positions is None:
            batch["positions"] = positions_of(batch["segments"])
        else:
            batch["positions"] = np.ascontiguousarray(arrays.positions[:, :-1])
        batch["weights"] = np.where(documents[:, 1:] == documents[:, :-1], arrays.weights, np.float32(0))
    return batch


def documents_of_chats(
    stream: TokenStream, starts: Int[np.ndarray, " n"], length: int
) -> Int32[np.ndarray, "n length"] | None:
    """The document of each of the `length` tokens from each start, from 1 in each window; None where EOS tells it.

    In chats it does not: many templates end every message with it.
    """
    if not stream.has_loss:
        return None
    documents = np.searchsorted(stream.ends, np.asarray(starts)[:, None] + np.arange(length), side="right")
    return (documents - documents[:, :1] + 1).astype(np.int32)


def documents_of(windows: Integer[np.ndarray, "B W"], eos_id: int) -> Int32[np.ndarray, "B W"]:
    """The document of each token, from 1 in each window; EOS is the last token of its document."""
    documents = np.ones(windows.shape, np.int32)
    np.cumsum(windows[:, :-1] == eos_id, axis=1, dtype=np.int32, out=documents[:, 1:])
    documents[:, 1:] += 1
    return documents


def positions_of(segments: Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
    """The position of each token in its segment, from 0."""
    place = np.arange(segments.shape[1], dtype=np.int32)
    first = np.zeros(segments.shape, np.int32)
    np.multiply(segments[:, 1:] != segments[:, :-1], place[1:], out=first[:, 1:])
    return place - np.maximum.accumulate(first, axis=1, out=first)
