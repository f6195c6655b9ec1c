"""The global order of training windows: each epoch of a source shuffled, and the sources mixed by weight.

Everything is a function of (seed, weights, number of sequences before), and is computed for many sequences at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int, Int64, UInt

ROUNDS = 4  # of the shuffle's cipher
LEAST_BITS = 16  # of its block


def shuffled(indices: Int[np.ndarray, " n"], count: int, seed: int) -> Int64[np.ndarray, " n"]:
    """The places of `indices` in a pseudorandom permutation of 0..count - 1.

    It is the permutation of `grain.experimental.index_shuffle(index, count - 1, seed, rounds=4)`, which shuffled the
    data of earlier versions, one index a call: a Simon cipher (Beaulieu et al. 2013) of few rounds, walked along its
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


def mixing_order(weights: Sequence[float]) -> list[tuple[int, int]]:
    """(source, index in the source) of each element of one period; the elements of a source are spread evenly.

    Weights become ratios of whole numbers: exactly if the period has at most 100,000 elements, else rounded to
    1 in 10,000. A source of weight 0 is not in it.
    """
    read = [i for i, weight in enumerate(weights) if weight > 0]
    ratios = [Fraction(weights[i]).limit_denominator(10_000) for i in read]
    shares = [int(r * math.lcm(*(x.denominator for x in ratios))) for r in ratios]
    shares = [s // math.gcd(*shares) for s in shares]
    if min(shares) < 1 or sum(shares) > 100_000:
        shares = [max(1, round(10_000 * weights[i] / sum(weights))) for i in read]
    period = sum(shares)
    # Element j of the s elements of a source belongs at (j + 1/2) / s of the period; ties go to the first source.
    places = [((2 * j + 1) * period / (2 * s), i, j) for i, s in zip(read, shares, strict=True) for j in range(s)]
    return [(source, index) for _, source, index in sorted(places)]


@functools.lru_cache(64)
def _period(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sources of a period's elements, and how many of each source are before each element, and in all."""
    sources = np.asarray([source for source, _ in mixing_order(weights)])
    before = np.zeros((len(sources) + 1, len(weights)), np.int64)
    np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0, out=before[1:])
    return sources, before


@dataclass(frozen=True)
class Position:
    """A place in the global order.

    Attributes:
      batch: the index of the batch that begins there.
      sequence: the number of sequences before it.
      counts: how many of them are of each source.
      weights: of the sources there; () before anything was read.
      place: the sequences before it in the period of these weights.
    """

    batch: int
    sequence: int
    counts: tuple[int, ...]
    weights: tuple[float, ...] = ()
    place: int = 0


@dataclass(frozen=True)
class _Stage:
    """Batches with the same weights."""

    batch: int  # the first
    sequence: int  # the first one of that batch
    place: int  # of that sequence in the period
    counts: tuple[int, ...]  # sequences of each source before it
    weights: tuple[float, ...]

    @property
    def shares(self) -> np.ndarray:
        _, before = _period(self.weights)
        return before[-1] / before[-1].sum()

    def before(self, sequence: int) -> np.ndarray:
        """The number of sequences of each source before a sequence of this stage."""
        _, before = _period(self.weights)
        periods, place = divmod(sequence - self.sequence + self.place, len(before) - 1)
        return np.asarray(self.counts) + periods * before[-1] + before[place] - before[self.place]


class Order:
    """The global order of the sequences of a phase, from a position on.

    Args:
      windows: the number of windows of each source; 0: endless, and not shuffled.
      seeds: of the shuffles; epoch e is shuffled by seed + e.
      stages: (first batch, weights of the sources), ascending, from batch 0 on.
      batch_size: the sequences of a batch.
      start: where the order begins; earlier sequences are not known.
    """

    def __init__(
        self,
        windows: Sequence[int],
        seeds: Sequence[int],
        stages: Sequence[tuple[int, tuple[float, ...]]],
        batch_size: int,
        start: Position | None = None,
    ):
        self.windows, self.seeds, self.stages = tuple(windows), tuple(seeds), tuple(stages)
        self.batch_size = batch_size
        start = start or Position(0, 0, (0,) * len(windows))
        self._stages: list[_Stage] = []
        place, before = start.place, start.weights
        for number, (first, weights) in enumerate(stages):
            if number + 1 < len(stages) and stages[number + 1][0] <= start.batch:
                continue  # it has ended
            batch = max(first, start.batch)
            sequence = start.sequence + (batch - start.batch) * batch_size
            counts = tuple(map(int, self.counts(sequence))) if self._stages else start.counts
            if not before or not np.array_equal(_period(before)[0], _period(weights)[0]):
                place = 0
            elif self._stages:
                continue  # it goes on
            self._stages.append(_Stage(batch, sequence, place, counts, weights))
            before = weights

    def after(self, start: Position | None) -> Order:
        """The same order from a position of one of another batch size, or with other weights, on; None: the start."""
        return Order(self.windows, self.seeds, self.stages, self.batch_size, start)

    @property
    def first_sequence(self) -> int:
        """The first sequence that is known."""
        return self._stages[0].sequence

    def _stage(self, sequence: int) -> _Stage:
        return next(stage for stage in reversed(self._stages) if stage.sequence <= sequence)

    def sequence(self, batch: int) -> int:
        """The number of sequences before a batch."""
        return self._stages[0].sequence + (batch - self._stages[0].batch) * self.batch_size

    def shares(self, batch: int) -> np.ndarray:
        """The part of each source in the sequences around a batch."""
        return self._stage(self.sequence(batch)).shares

    def counts(self, sequence: int) -> np.ndarray:
        """The number of sequences of each source before a sequence."""
        return self._stage(sequence).before(sequence)

    def position(self, batch: int) -> Position:
        """Where a batch begins."""
        sequence = self.sequence(batch)
        stage = self._stage(sequence)
        place = (sequence - stage.sequence + stage.place) % len(_period(stage.weights)[0])
        return Position(batch, sequence, tuple(map(int, stage.before(sequence))), stage.weights, place)

    def first_batch(self, source: int, count: int, last: int) -> int | None:
        """The first batch up to `last` that has more than the first `count` sequences of a source; None: no batch."""
        low, high = self._stages[0].batch, last + 1
        if self.counts(self.sequence(high))[source] <= count:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(self.sequence(middle))[source] > count else (middle, high)
        return low

    def addresses(self, start: int, stop: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source and the window of each of the sequences start..stop - 1."""
        sources, ranks = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            low, high = max(start, stage.sequence), min(stop, following.sequence if following else stop)
            if low >= high:
                continue
            order, before = _period(stage.weights)
            place = np.arange(low, high) - stage.sequence + stage.place
            periods, place = place // len(order), place % len(order)
            source = order[place]
            base = np.asarray(stage.counts) - before[stage.place]
            sources[low - start : high - start] = source
            ranks[low - start : high - start] = base[source] + periods * before[-1][source] + before[place, source]
        for source, (count, seed) in enumerate(zip(self.windows, self.seeds, strict=True)):
            mine = np.flatnonzero(sources == source)
            if not count or not len(mine):
                continue
            epochs, places = np.divmod(ranks[mine], count)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                ranks[mine[now]] = shuffled(places[now], count, (seed + int(epoch)) % 2**32)
        return sources, ranks
