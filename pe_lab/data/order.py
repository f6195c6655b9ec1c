"""The global order of training windows: each epoch of a source shuffled, and the sources mixed by weight.

Everything is a function of (seed, weights, number of sequences before), and is computed for many sequences at once.
"""

from __future__ import annotations

import bisect
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float64, Int, Int64, UInt

ROUNDS = 4  # of the shuffle's cipher
LEAST_BITS = 16  # of its block


def shuffled(indices: Int[np.ndarray, " n"], count: int, seed: int) -> Int64[np.ndarray, " n"]:
    """The places of `indices` in a pseudorandom permutation of 0..count - 1.

    It is the permutation of `grain.experimental.index_shuffle(index, count - 1, seed, rounds=4)`, which takes one index
    a call: a Simon cipher (Beaulieu et al. 2013) of few rounds, walked along its
    cycles until it is below `count` (Black and Rogaway 2002, section 3).
    """
    indices = np.asarray(indices, np.int64)
    if count <= 2**LEAST_BITS:
        return _whole_permutation(count, seed)[indices].astype(np.int64)
    bits = (count - 2).bit_length()  # ceil(log2(count - 1))
    places = _encrypt(indices, bits + bits % 2, seed)
    walking = np.flatnonzero(places >= count)
    while len(walking):
        places[walking] = _encrypt(places[walking], bits + bits % 2, seed)
        walking = walking[places[walking] >= count]
    if count - 1 == 1 << (bits + bits % 2):
        # The last index does not fit the block, and Grain gives it the place of index 0.
        places[indices == count - 1] = count - 1
    return places


@functools.lru_cache(64)
def _whole_permutation(count: int, seed: int) -> UInt[np.ndarray, " count"]:
    """The permutation of at most 2^16 indices. A walk along its cycles may be long: all are shortened at once."""
    cipher = _encrypt(np.arange(2**LEAST_BITS), LEAST_BITS, seed)
    # The first number below `count` on the cycle, from each number on; pointers are doubled.
    first = np.where(np.arange(2**LEAST_BITS) < count, np.arange(2**LEAST_BITS), cipher)
    while (first[cipher[:count]] >= count).any():
        first = first[first]
    return first[cipher[:count]].astype(np.uint16)


def _encrypt(values: Int64[np.ndarray, " n"], bits: int, seed: int) -> Int64[np.ndarray, " n"]:
    """The cipher of numbers of `bits` bits, an even number."""
    word = bits // 2
    kind = np.uint32 if word <= 24 else np.uint64  # a rotation by 8 needs 8 bits more
    mask = kind((1 << word) - 1)
    left, right = (values >> word).astype(kind) & mask, values.astype(kind) & mask

    def mixed(x: np.ndarray) -> np.ndarray:
        one, eight, two = ((x << kind(r)) | (x >> kind(word - r)) for r in (1, 8, 2))
        return (one & eight) ^ two

    keys = _round_keys(seed)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = (left ^ mixed(right) ^ kind(first)) & mask
        right = (right ^ mixed(left) ^ kind(second)) & mask
    return (left.astype(np.int64) << word) | right.astype(np.int64)


@functools.lru_cache(256)
def _round_keys(seed: int) -> tuple[int, ...]:
    """`std::seed_seq{seed}.generate` of C++ (ISO/IEC 14882, [rand.util.seedseq]) for `ROUNDS` numbers."""
    n, word = ROUNDS, 2**32 - 1
    numbers, shift = [0x8B8B8B8B] * n, (n - 1) // 2
    p = (n - shift) // 2
    q = p + shift

    def mix(x: int, factor: int) -> int:
        return (x ^ (x >> 27)) * factor & word

    for k in range(n):
        one = mix(numbers[k] ^ numbers[(k + p) % n] ^ numbers[k - 1], 1664525)
        two = one + (1 if k == 0 else k + seed if k == 1 else k) & word
        numbers[(k + p) % n] = numbers[(k + p) % n] + one & word
        numbers[(k + q) % n] = numbers[(k + q) % n] + two & word
        numbers[k] = two
    for k in range(n):
        three = mix(numbers[k] + numbers[(k + p) % n] + numbers[k - 1] & word, 1566083941)
        four = three - k & word
        numbers[(k + p) % n] ^= three
        numbers[(k + q) % n] ^= four
        numbers[k] = four
    return tuple(numbers)


@functools.lru_cache(64)
def _ratios(weights: tuple[float, ...]) -> tuple[Fraction, ...]:
    """The part of each source, exactly that of the decimal numbers that a person writes: 0.1 is 1/10."""
    exact = [Fraction(str(float(weight))) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


@functools.lru_cache(64)
def _half_distances(weights: tuple[float, ...]) -> Float64[np.ndarray, " sources"]:
    """Half the mean distance of two elements of each source, in elements of all; infinite for weight 0."""
    halves = [1 / (2 * part) if part else math.inf for part in _ratios(weights)]
    return np.asarray([float(half) if half < sys.float_info.max else math.inf for half in halves])


def mixing_counts(weights: tuple[float, ...], number: int) -> Int64[np.ndarray, " sources"]:
    """How many of the first `number` elements of the order of `mixing_order` are of each source.

    They are the seats that the method of Sainte-Lague gives parties with these votes.
    """
    half = _half_distances(weights)
    counts = np.floor(number / (2 * half) + 0.5).astype(np.int64)  # to within the ties
    sources = np.arange(len(weights))
    while True:
        after, last = (2 * counts + 1) * half, np.where(counts > 0, (2 * counts - 1) * half, -math.inf)
        out, inside = np.lexsort((sources, after))[0], np.lexsort((sources, last))[-1]
        missing = number - counts.sum()
        if missing > 0:
            counts[out] += 1
        elif missing < 0 or (last[inside], inside) > (after[out], out):
            counts[inside] -= 1
        else:
            return counts


def mixing_order(
    weights: tuple[float, ...], start: int, stop: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """The source of each of the elements start..stop - 1 of a mixture, and its index in the source.

    A source of the part p of all weights has its element j at (j + 1/2) / p; ties go to the first source. So it is
    spread evenly, and any number of elements has its part, however small.
    """
    low, high = mixing_counts(weights, start), mixing_counts(weights, stop)
    sources = np.repeat(np.arange(len(weights)), high - low)
    indices = np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
    order = np.lexsort((sources, (2 * indices + 1) * _half_distances(weights)[sources]))
    return sources[order], indices[order]


@dataclass(frozen=True)
class Position:
    """A place in the global order, from which batches with the same weights go on."""

    batch: int  # the index of the batch that begins there
    sequence: int  # the number of sequences before it
    counts: tuple[int, ...]  # how many of them are of each source
    weights: tuple[float, ...] = ()  # of the sources there; () before anything was read
    place: int = 0  # the sequences before it since these weights began

    @property
    def base(self) -> Int64[np.ndarray, " sources"]:
        """The number of sequences of each source before those with these weights, as if all of them were there."""
        return np.asarray(self.counts) - mixing_counts(self.weights, self.place)

    def before(self, sequence: int) -> Int64[np.ndarray, " sources"]:
        """The number of sequences of each source before one with these weights."""
        return self.base + mixing_counts(self.weights, sequence - self.sequence + self.place)


class Order:
    """The global order of the sequences of a phase, from a position on.

    Args:
      windows: the number of windows of each source; 0: endless.
      seeds: of the shuffles; epoch e is shuffled by seed + e. None, and of endless sources: the windows come by number.
      stages: (first batch, weights of the sources), ascending, from batch 0 on.
      batch_size: the sequences of a batch.
      start: where the order begins; earlier sequences are not known.
    """

    def __init__(
        self,
        windows: Sequence[int],
        seeds: Sequence[int | None],
        stages: Sequence[tuple[int, tuple[float, ...]]],
        batch_size: int,
        start: Position | None = None,
    ):
        self.windows, self.seeds, self.stages = tuple(windows), tuple(seeds), tuple(stages)
        self.batch_size = batch_size
        start = start or Position(0, 0, (0,) * len(windows))
        self._stages: list[Position] = []  # the first one with each of the weights
        place, before = start.place, start.weights
        for number, (first, weights) in enumerate(stages):
            if number + 1 < len(stages) and stages[number + 1][0] <= start.batch:
                continue  # it has ended
            batch = max(first, start.batch)
            sequence = start.sequence + (batch - start.batch) * batch_size
            counts = tuple(map(int, self.counts(sequence))) if self._stages else start.counts
            if not before or _ratios(before) != _ratios(weights):
                place = 0
            elif self._stages:
                continue  # it goes on
            self._stages.append(Position(batch, sequence, counts, weights, place))
            before = weights

    def after(self, start: Position | None) -> Order:
        """The same order from a position of one of another batch size, or with other weights, on; None: the start."""
        return Order(self.windows, self.seeds, self.stages, self.batch_size, start)

    @property
    def first_sequence(self) -> int:
        """The first sequence that is known."""
        return self._stages[0].sequence

    def _stage(self, sequence: int) -> Position:
        return next(stage for stage in reversed(self._stages) if stage.sequence <= sequence)

    def sequence(self, batch: int) -> int:
        """The number of sequences before a batch."""
        return self._stages[0].sequence + (batch - self._stages[0].batch) * self.batch_size

    def shares(self, batch: int) -> np.ndarray:
        """The part of each source in the sequences around a batch."""
        return np.asarray([float(part) for part in _ratios(self._stage(self.sequence(batch)).weights)])

    def counts(self, sequence: int) -> np.ndarray:
        """The number of sequences of each source before a sequence."""
        return self._stage(sequence).before(sequence)

    def position(self, batch: int) -> Position:
        """Where a batch begins."""
        sequence = self.sequence(batch)
        stage = self._stage(sequence)
        place = sequence - stage.sequence + stage.place
        return Position(batch, sequence, tuple(map(int, stage.before(sequence))), stage.weights, place)

    def first_batch(self, source: int, count: int, last: int) -> int | None:
        """The first batch up to `last` that has more than the first `count` sequences of a source; None: no batch."""
        batches = range(self._stages[0].batch, last + 1)
        found = bisect.bisect_right(batches, count, key=lambda batch: self.counts(self.sequence(batch + 1))[source])
        return batches[found] if found < len(batches) else None

    def addresses(self, start: int, stop: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source and the window of each of the sequences start..stop - 1."""
        sources, ranks = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            low, high = max(start, stage.sequence), min(stop, following.sequence if following else stop)
            if low >= high:
                continue
            since = stage.place - stage.sequence
            source, rank = mixing_order(stage.weights, low + since, high + since)
            sources[low - start : high - start] = source
            ranks[low - start : high - start] = stage.base[source] + rank
        for source, (count, seed) in enumerate(zip(self.windows, self.seeds, strict=True)):
            mine = np.flatnonzero(sources == source)
            if not count or seed is None or not len(mine):
                continue
            epochs, places = np.divmod(ranks[mine], count)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                ranks[mine[now]] = shuffled(places[now], count, (seed + int(epoch)) % 2**32)
        return sources, ranks
