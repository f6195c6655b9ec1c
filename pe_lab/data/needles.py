"""Needles: synthetic windows of key-value facts in filler, with queries at a distance, made from (seed, index).

A window is `f f [MARK key value] f f f [MARK key value] f ... [ASK key value] [ASK key value]`. With
`facts="symbol"` a fact has one symbol for its key and its value: `[MARK key+value]`. The ids of the symbols follow
the tokenizer's vocabulary, so needles can be mixed with any tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt64

from pe_lab.config import SEED, check_bounds, from_dict, number
from pe_lab.data.windows import WindowArrays, Windows
from pe_lab.errors import ConfigError

QUERY = 3  # tokens of a query, [ASK key value]
FACTS = {"pair": 3, "symbol": 2}  # tokens of a fact: [MARK key value] or [MARK key+value]
FILLER_RUN = 32  # the chain of the filler starts anew after this many tokens, so that runs are drawn in parallel
WINDOWS = 2**40


@dataclass(frozen=True)
class NeedleOptions:
    """The options of a needles source; `ConfigError` for an impossible one."""

    pairs: int = number(4, 1, 2**20)  # facts per window
    queries: int = number(4, 1, 2**20)  # per window; at the end, each fact is asked for once before any is twice
    keys: int = number(64, 1, 2**20)  # key symbols; the keys of one window differ
    values: int = number(64, 1, 2**20)
    filler_symbols: int = number(64, 1, 2**13)  # the table of transitions is drawn symbol by symbol
    branches: int = number(4, 1, 2**13)  # a filler symbol is followed by one of this many, all equally likely
    filler_seed: int = number(0, 0, SEED)  # of the chain; the same for training, validation and evaluation
    answer_weight: float = number(4.0, 0, 10**9)  # loss weight of the answers to queries
    filler_weight: float = number(0.2, 0, 10**9)  # loss weight of all other tokens
    queries_at: Literal["end", "anywhere"] = "end"  # anywhere: each after its fact
    facts: Literal["pair", "symbol"] = "pair"  # a pair needs a previous-token head, a symbol does not

    def __post_init__(self) -> None:
        check_bounds(self, "needles")
        if self.pairs > self.keys:
            raise ConfigError(
                f"needles option pairs={self.pairs} is more than keys={self.keys}: the keys of a window differ."
            )
        if self.branches > self.filler_symbols:
            raise ConfigError(
                f"needles option branches={self.branches} is more than filler_symbols={self.filler_symbols}."
            )
        if needle_vocab(self) > 2**24:
            raise ConfigError(f"needles has {needle_vocab(self):,} symbols; a vocabulary has at most {2**24:,}.")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> NeedleOptions:
        return from_dict(cls, options, "needles")

    @property
    def vocabulary(self) -> tuple[int | str, ...]:
        """Needles sources with equal values share their symbols."""
        return (self.keys, self.values, self.filler_symbols, self.branches, self.filler_seed, self.facts)

    @property
    def shortest(self) -> int:
        """The smallest window length T with space for all facts and queries."""
        return FACTS[self.facts] * self.pairs + QUERY * self.queries - 1

    @property
    def guessing(self) -> float:
        """The mean accuracy of guessing: of a model that knows the values in its window, but not their keys.

        With queries at the end, the model excludes the values it has given since the last round: of P facts, the
        queries of a round are answered with probability 1/P, 1/(P-1) ... 1. With queries anywhere, it picks any of
        the facts so far, whose number is nearly uniform.
        """
        left = [self.pairs - q % self.pairs for q in range(self.queries)]
        if self.queries_at == "anywhere":
            left = list(range(1, self.pairs + 1))
        return sum(1 / n for n in left) / len(left)


def needle_vocab(options: NeedleOptions) -> int:
    """The number of symbols of needles: MARK, ASK, keys, values, filler, and with facts="symbol" the facts."""
    facts = options.keys * options.values if options.facts == "symbol" else 0
    return 2 + options.keys + options.values + options.filler_symbols + facts


def place_symbols(options: Mapping[int, NeedleOptions], size: int) -> tuple[dict[int, int], int]:
    """The first id of each needles source's symbols, after a vocabulary of `size`, and the size of both together.

    Sources with equal vocabularies share their symbols.
    """
    offsets, placed = {}, {}
    for i, option in options.items():
        if option.vocabulary not in placed:
            placed[option.vocabulary] = size
            size += needle_vocab(option)
        offsets[i] = placed[option.vocabulary]
    return offsets, size


class NeedleWindows(Windows):
    """Random access to windows of T + 1 tokens of needles, T = `length`.

    Equal (options, length, seed, split, index) give equal windows. Training and validation windows are drawn from
    different random streams.

    Raises:
      ConfigError: the window is too short for its facts and queries.
    """

    endless, shuffled = True, False  # they are random already

    def __init__(
        self, options: NeedleOptions | Mapping[str, Any], length: int, seed: int, split: str, offset_vocab: int
    ):
        self.options = options if isinstance(options, NeedleOptions) else NeedleOptions.from_mapping(options)
        self.length = length
        if length < self.options.shortest:
            raise ConfigError(
                f"sequence_length={length} is too short for needles with pairs={self.options.pairs} and "
                f"queries={self.options.queries}: they need {self.options.shortest}."
            )
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r}")
        digest = hashlib.blake2b(f"needles/{seed}/{split}".encode(), digest_size=8).digest()
        self._key = np.frombuffer(digest, np.uint64)
        self.mark, self.ask = offset_vocab, offset_vocab + 1
        self.first_key = offset_vocab + 2
        self.first_value = self.first_key + self.options.keys
        self.first_filler = self.first_value + self.options.values
        self.first_fact = self.first_filler + self.options.filler_symbols
        self._next = _transitions(self.options)

    def __len__(self) -> int:
        return WINDOWS

    def read(self, indices: Int[np.ndarray, " n"], segments: bool = False) -> WindowArrays:
        windows, distance = self._draw(indices)
        options = self.options
        weights = np.where(distance > 0, np.float32(options.answer_weight), np.float32(options.filler_weight))
        return WindowArrays(windows, weights)

    def batch(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `answers` and `distance` of windows, each of shape [n, T].

        `answers` is true where the target answers a query. `distance` is the number of tokens from that answer back
        to the value in its fact, and 0 elsewhere.
        """
        windows, distance = self._draw(indices)
        tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        return {"tokens": tokens, "targets": targets, "answers": distance > 0, "distance": distance}

    def _draw(self, indices: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Windows [n, T+1], and the distance of each answer from its fact [n, T] (0: no answer)."""
        o, size = self.options, self.length + 1
        state = _mix(self._key + _mix(np.asarray(indices).astype(np.uint64)))
        n, rows = len(state), np.arange(len(state))[:, None]
        # The first `pairs` of a random ranking of all keys.
        keys = self.first_key + _ranking(_random(state, 1, o.keys), o.pairs)
        values = self.first_value + _below(_random(state, 2, o.pairs), o.values)
        length = FACTS[o.facts]
        if o.queries_at == "end":
            facts = self._places(state, np.full((1, o.pairs), length), size - QUERY * o.queries)
            queries = np.broadcast_to(size - QUERY * np.arange(o.queries, 0, -1), (n, o.queries))
            rounds = -(-o.queries // o.pairs)
            order = np.argsort(_random(state, 3, rounds * o.pairs).reshape(n, rounds, o.pairs), axis=-1)
            asked = order.reshape(n, -1)[:, : o.queries]
        else:
            facts, queries, asked = self._interleaved(state, size)
        if o.facts == "pair":
            fact = (self.mark, keys, values)
        else:
            fact = (self.mark, self.first_fact + (keys - self.first_key) * o.values + (values - self.first_value))
        windows = np.empty((n, size), np.int32)
        free = np.ones((n, size), bool)
        for place, event in (
            (facts, fact),
            (queries, (self.ask, np.take_along_axis(keys, asked, 1), np.take_along_axis(values, asked, 1))),
        ):
            for step, symbol in enumerate(event):
                windows[rows, place + step] = symbol
                free[rows, place + step] = False
        # All windows have the same number of free positions, so a mask assigns the filler of all of them.
        windows[free] = self._filler(state, size - length * o.pairs - QUERY * o.queries).ravel()
        distance = np.zeros((n, self.length), np.int32)
        answer, value = queries + QUERY - 1, np.take_along_axis(facts, asked, 1) + length - 1
        distance[rows, answer - 1] = answer - value
        return windows, distance

    def _places(
        self, state: UInt64[np.ndarray, " n"], lengths: Int[np.ndarray, "#n events"], size: int
    ) -> Int[np.ndarray, "n events"]:
        """Sorted starts of events of these lengths, which do not overlap, within `size` tokens."""
        events, total = lengths.shape[1], int(lengths[0].sum())
        gaps = np.sort(_below(_random(state, 4, events), size - total + 1), axis=1)
        return gaps + np.cumsum(lengths, axis=1) - lengths

    def _interleaved(self, state: UInt64[np.ndarray, " n"], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Facts and queries in random order, a fact first; each query asks for a fact before it."""
        o, n = self.options, len(state)
        ranks = np.argsort(np.argsort(_random(state, 5, o.pairs + o.queries - 1), axis=1), axis=1)
        is_fact = np.concatenate([np.ones((n, 1), bool), ranks < o.pairs - 1], axis=1)
        places = self._places(state, np.where(is_fact, FACTS[o.facts], QUERY), size)
        before = np.cumsum(is_fact, axis=1)[~is_fact].reshape(n, o.queries)
        asked = _below(_random(state, 6, o.queries), before)
        return places[is_fact].reshape(n, o.pairs), places[~is_fact].reshape(n, o.queries), asked

    def _filler(self, state: UInt64[np.ndarray, " n"], count: int) -> Int[np.ndarray, "n count"]:
        """`count` tokens of the filler's chain per window."""
        if not count:
            return np.zeros((len(state), 0), np.int32)
        run = min(FILLER_RUN, count)
        runs = -(-count // run)
        random = _random(state, 7, runs * run).reshape(-1, run)
        draws = _below(random, self.options.branches).T.copy()  # [run, n * runs]
        symbols = np.empty(draws.shape, np.int64)
        symbols[0] = _below(_random(state, 8, runs).ravel(), self.options.filler_symbols)
        for step in range(1, run):
            symbols[step] = self._next[symbols[step - 1] * self.options.branches + draws[step]]
        return self.first_filler + symbols.T.reshape(len(state), runs * run)[:, :count]


def _transitions(options: NeedleOptions) -> Int[np.ndarray, " transitions"]:
    """The next symbol, by flattened [symbol, branch]; the branches of a symbol differ."""
    rng = np.random.Generator(np.random.PCG64(options.filler_seed))
    rows = [rng.permutation(options.filler_symbols)[: options.branches] for _ in range(options.filler_symbols)]
    return np.concatenate(rows).astype(np.int64)


def _mix(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _random(state: UInt64[np.ndarray, " n"], stream: int, count: int) -> UInt64[np.ndarray, "n count"]:
    """`count` random 64-bit numbers per window: SplitMix64, seeded by the window's state and a stream number."""
    start = _mix(state + np.uint64(stream) * np.uint64(0x632BE59BD9B4E019 >> 8))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(start[:, None] + steps)


def _below(random: UInt64[np.ndarray, "*shape"], bound: Any) -> Int[np.ndarray, "*shape"]:
    """Integers in 0..bound - 1 from random 64-bit numbers."""
    return (((random >> np.uint64(32)) * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def _ranking(random: UInt64[np.ndarray, "n m"], count: int) -> Int[np.ndarray, "n count"]:
    """`count` different numbers in 0..m - 1 per window, in random order."""
    m = random.shape[1]
    if count < m:
        chosen = np.argpartition(random, count, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(random, chosen, 1), axis=1)
        return np.take_along_axis(chosen, order, 1)
    return np.argsort(random, axis=1)
