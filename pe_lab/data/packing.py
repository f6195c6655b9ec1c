"""Best-fit packing: documents are put whole into windows, and only those longer than a window are cut.

"Fewer Truncations Improve Language Modeling" (Ding et al. 2024): best-fit decreasing. Documents are taken by length,
the longest first, and each goes into the window with the least space left that has space for it. Windows with equal
space left are alike to it, so whole groups of equal documents are put into whole groups of equal windows: the plan
takes time by the number of different lengths, and its memory is four bytes a document.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt

from pe_lab.data.order import shuffled

SEEDS = 2**32


class _Filling(NamedTuple):
    """Pieces that were put into a group of windows at once, and those that were there before.

    Window i of the group has the pieces first + i * each, ... , first + (i + 1) * each - 1 of their length, and what
    window `offset` + i of `before` has.
    """

    length: int
    first: int
    each: int
    before: _Filling | None
    offset: int


@dataclass(frozen=True)
class Packing:
    """A plan: which piece of which document is in which window.

    A document of more than T + 1 tokens is cut into windows of its own, each of which begins with the last token of
    the one before, and a rest. All other documents, and the rests, are packed. The windows of cut documents come first.
    Arrays of one more than there are groups have the sums before each, and of all.
    """

    window: int  # T + 1
    tokens: int  # of all pieces
    cut: Int64[np.ndarray, " cut"]  # the documents that are cut, ascending
    cut_windows: Int64[np.ndarray, " cut_and_1"]  # the windows before those of each of them
    documents: UInt[np.ndarray, " packed"]  # with a piece to pack, by its length, shuffled among equal lengths
    group_windows: Int64[np.ndarray, " groups_and_1"]  # the packed windows before each group with equal lengths
    group_fillings: Int64[np.ndarray, " groups_and_1"]  # the fillings before those of each group
    length: Int64[np.ndarray, " fillings"]
    first: Int64[np.ndarray, " fillings"]  # a place in `documents`
    each: Int64[np.ndarray, " fillings"]

    def __len__(self) -> int:
        """The number of windows."""
        return int(self.cut_windows[-1] + self.group_windows[-1])

    @property
    def efficiency(self) -> float:
        """The part of the windows' tokens that is no padding."""
        return self.tokens / (len(self) * self.window) if len(self) else 0.0

    @functools.cached_property
    def _group_used(self) -> Int64[np.ndarray, " groups"]:
        """The tokens of a window of each group that are no padding."""
        return np.diff(np.concatenate([[0], np.cumsum(self.length * self.each)])[self.group_fillings])

    def used(self, indices: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The tokens of some windows that are no padding."""
        place = np.asarray(indices, np.int64) - self.cut_windows[-1]
        found = np.full(place.shape, self.window)
        group = np.searchsorted(self.group_windows, place[place >= 0], side="right") - 1
        found[place >= 0] = self._group_used[group]
        return found

    @property
    def mean_inputs(self) -> float:
        """The mean number of input tokens of a window that are no padding."""
        length = self.window - 1
        packed = np.diff(self.group_windows) @ np.minimum(self._group_used, length)
        return float(self.cut_windows[-1] * length + packed) / max(1, len(self))

    def pieces(
        self, indices: Int[np.ndarray, " n"], ends: Int64[np.ndarray, " documents"]
    ) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
        """The pieces of some windows, in their order: which of the windows, the document, the first token, the length.

        `ends` is the number of tokens up to the end of each document.
        """
        indices = np.asarray(indices, np.int64)
        of_cut = np.flatnonzero(indices < self.cut_windows[-1])
        which = np.searchsorted(self.cut_windows, indices[of_cut], side="right") - 1
        number, cut = indices[of_cut] - self.cut_windows[which], self.cut[which]
        begin = np.where(cut > 0, ends[cut - 1], 0) + number * (self.window - 1)

        packed = np.flatnonzero(indices >= self.cut_windows[-1])
        place = indices[packed] - self.cut_windows[-1]
        group = np.searchsorted(self.group_windows, place, side="right") - 1
        low, high = self.group_fillings[group], self.group_fillings[group + 1]
        owner, filling = _ranges(low, high - low)
        at = self.first[filling] + (place - self.group_windows[group])[owner] * self.each[filling]
        parts, documents = _ranges(at, self.each[filling])
        documents, length = self.documents[documents].astype(np.int64), self.length[filling][parts]

        window = np.concatenate([of_cut, packed[owner[parts]]])
        order = np.argsort(window, kind="stable")
        return tuple(
            np.concatenate(pair)[order]
            for pair in (
                (of_cut, packed[owner[parts]]),
                (cut, documents),
                (begin, ends[documents] - length),
                (np.full(len(of_cut), self.window), length),
            )
        )


def _ranges(starts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers start .. start + count - 1 of every range, one range after another, and the range of each."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (starts - (np.cumsum(counts) - counts))[which]


def pack(ends: Int64[np.ndarray, " documents"], length: int, seed: int) -> Packing:
    """The plan for documents with these ends and windows of T + 1 tokens, T = `length`.

    Which of the documents of one length goes where depends on `seed`.
    """
    lengths = np.diff(ends, prepend=0)
    window = length + 1
    cut = np.flatnonzero(lengths > window)
    own, rest = np.divmod(lengths[cut] - 1, length)
    sizes = lengths.astype(np.uint16 if window < 2**16 else np.uint32)  # NumPy sorts 16 bits by radix
    sizes[cut] = np.where(rest > 0, rest + 1, 0)  # the rest begins with the last token before it
    counts = np.bincount(sizes, minlength=window + 1)
    counts[0] = 0
    mixed = shuffled(np.arange(len(sizes)), len(sizes), seed % SEEDS) if len(sizes) else np.zeros(0, np.int64)
    documents = mixed[np.argsort(sizes[mixed], kind="stable")][len(sizes) - int(counts.sum()) :]
    groups = _fill(counts, window)

    fillings: list[tuple[int, int, int]] = []
    until = [0]
    before = np.cumsum(counts) - counts  # the documents of smaller sizes
    for _, start, filling in groups:
        node: _Filling | None = filling
        while node is not None:
            fillings.append((node.length, int(before[node.length]) + node.first + start * node.each, node.each))
            node, start = node.before, start + node.offset
        until.append(len(fillings))
    columns = np.asarray(fillings, np.int64).reshape(-1, 3).T
    return Packing(
        window,
        int(counts @ np.arange(len(counts)) + own.sum() * window),
        cut,
        np.concatenate([[0], np.cumsum(own)]).astype(np.int64),
        documents.astype(np.uint32 if len(lengths) < 2**32 else np.uint64),
        np.cumsum([0, *(count for count, _, _ in groups)]).astype(np.int64),
        np.asarray(until, np.int64),
        *columns,
    )


_Group = tuple[int, int, _Filling]  # so many windows, from this one of their filling on


def _fill(counts: Int[np.ndarray, " sizes"], window: int) -> list[_Group]:
    """Best-fit decreasing of counts[s] pieces of each size s into windows of `window` tokens."""
    by_space: dict[int, list[_Group]] = {}
    spaces: list[int] = []  # the keys of `by_space`, ascending

    def put(space: int, group: _Group) -> None:
        if space not in by_space:
            bisect.insort(spaces, space)
            by_space[space] = []
        by_space[space].append(group)

    for size in range(window, 0, -1):
        total, done = int(counts[size]), 0
        while done < total:
            at = bisect.bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces[at]
                windows, start, filling = by_space[space].pop()
                if not by_space[space]:
                    del by_space[space], spaces[at]
            else:
                space, windows, start, filling = window, total, 0, None
            # Once a piece is in a window, no other one with space for the next piece has less: it is filled up.
            each = space // size
            whole = min(windows, (total - done) // each)
            if whole:
                put(space - each * size, (whole, 0, _Filling(size, done, each, filling, start)))
                done += whole * each
            left = total - done
            if whole < windows and 0 < left < each:
                put(space - left * size, (1, 0, _Filling(size, done, left, filling, start + whole)))
                whole, done = whole + 1, total
            if filling is not None and whole < windows:
                put(space, (windows - whole, start + whole, filling))
    return [group for space in spaces for group in by_space[space]]
