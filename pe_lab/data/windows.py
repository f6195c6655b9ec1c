"""Windows of T + 1 tokens of a split, and batches made from them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int, Int32, Integer

from pe_lab.data.packing import Packing
from pe_lab.data.record_stream import RecordStream
from pe_lab.data.token_stream import TokenStream


class TokenWindows:
    """Random access to the windows of T + 1 tokens of a stream: window i is tokens[i*T : i*T + T + 1].

    Consecutive windows share one token, the last target of one and the first input of the next: every token but the
    first is a target exactly once. The last targets, fewer than T, are left out.
    """

    def __init__(self, stream: TokenStream | RecordStream, length: int):
        self._stream, self.length = stream, length

    def __len__(self) -> int:
        return max(0, (self._stream.tokens - 1) // self.length)

    def read(self, indices: Int[np.ndarray, " n"]) -> tuple[Integer[np.ndarray, "n W"], Float32[np.ndarray, "n T"]]:
        """Windows and loss weights: 0 where the target does not count, else 1."""
        starts = np.asarray(indices, np.int64) * self.length
        weights = np.ones((len(starts), self.length), np.float32)
        if self._stream.has_loss:
            weights[:] = self._stream.loss(starts + 1, self.length)
        return self._stream.gather(starts, self.length + 1), weights

    def read_documents(
        self, indices: Int[np.ndarray, " n"]
    ) -> tuple[Integer[np.ndarray, "n W"], Float32[np.ndarray, "n T"], Int32[np.ndarray, "n W"] | None]:
        """`read`, and the document of each token as `make_batch` takes it."""
        starts = np.asarray(indices, np.int64) * self.length
        return *self.read(indices), documents_of_chats(self._stream, starts, self.length + 1)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first token in the split, number of tokens) of each contiguous part of a window."""
        return [(index * self.length, self.length + 1)]


class PackedWindows:
    """Random access to windows of T + 1 tokens that have whole documents, by a plan; EOS fills them up."""

    def __init__(self, stream: TokenStream | RecordStream, plan: Packing, eos_id: int):
        self._stream, self._plan, self._eos_id = stream, plan, eos_id
        self.length = plan.window - 1
        self.efficiency, self.mean_tokens = plan.efficiency, plan.mean_inputs

    def __len__(self) -> int:
        return len(self._plan)

    def read(self, indices: Int[np.ndarray, " n"]) -> tuple[Integer[np.ndarray, "n W"], Float32[np.ndarray, "n T"]]:
        """Windows and loss weights, as `read_documents`."""
        return self.read_documents(indices)[:2]

    def read_documents(
        self, indices: Int[np.ndarray, " n"]
    ) -> tuple[Int32[np.ndarray, "n W"], Float32[np.ndarray, "n T"], Int32[np.ndarray, "n W"]]:
        """Windows, loss weights, and the number of each token's document in its window, from 1; padding is the last.

        The weight is 0 where the target is of another document, or does not count.
        """
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
            counted = self._stream.loss_of(np.repeat(starts - before, lengths) + np.arange(len(counted)))
        counted[before] = False  # the first token of a piece is no target
        targets[filled] = counted
        return tokens, targets[:, 1:], documents

    def input_tokens(self, indices: Int[np.ndarray, " n"]) -> int:
        """The number of input tokens of some windows that are no padding."""
        return int(np.minimum(self._plan.used(indices), self.length).sum())

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first token in the split, number of tokens) of each document, or part of one, in a window."""
        _, _, starts, lengths = self._plan.pieces(np.asarray([index]), self._stream.ends)
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def make_batch(
    windows: Integer[np.ndarray, "B W"],
    weights: Float32[np.ndarray, "B T"],
    *,
    segments: bool,
    eos_id: int,
    documents: Int32[np.ndarray, "B W"] | None = None,
) -> dict[str, np.ndarray]:
    """Tokens, next-token targets and weights; with `segments` also the document of each token and its position there.

    Segments count from 1 in each window, positions from 0 in each segment. Where the target is the first token of
    the next document, the weight is 0. `documents` are those of each token; by default they end with EOS.
    """
    batch = {"tokens": windows[:, :-1].astype(np.int32), "targets": windows[:, 1:].astype(np.int32), "weights": weights}
    if segments:
        if documents is None:
            documents = documents_of(windows, eos_id)
        batch["segments"] = np.ascontiguousarray(documents[:, :-1])
        batch["positions"] = positions_of(batch["segments"])
        batch["weights"] = np.where(documents[:, 1:] == documents[:, :-1], weights, np.float32(0))
    return batch


def documents_of_chats(
    stream: TokenStream | RecordStream, starts: Int[np.ndarray, " n"], length: int
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
