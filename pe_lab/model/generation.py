"""Generation at the level of tokens: batches of unequal prompts, read in chunks, continued step by step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pe_lab.attention.cached_span import Span
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model.decoder import Params
from pe_lab.model.programs import Programs, Weights
from pe_lab.model.request import Request, Schedules, Statistics
from pe_lab.model.stopping import Decode, Ending
from pe_lab.parallel import AxisRules
from pe_lab.positional import Schedule

CHUNKS = (512, 128, 32)  # tokens of a prompt that are read at once: one compilation each, at most


def chunks(length: int) -> list[tuple[int, int]]:
    """Where a prompt of this length is cut: (start, tokens), in sizes of CHUNKS, of which the last may be padded.

    A chunk more than half full is taken whole; less is cut into smaller ones. Every chunk starts at a multiple of its
    size, so none reaches beyond a capacity that is a multiple of it.
    """
    found, start = [], 0
    while start < length:
        rest = length - start
        size = next((size for size in CHUNKS if rest > size // 2), CHUNKS[-1])
        found.append((start, size))
        start += size
    return found


class Decoder:
    """Continues texts with a cache.

    Args: as `Programs` takes them: the model's shape, the mesh that its parameters live on, if any, and so on.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        rules: AxisRules | None = None,
        scan: bool | None = None,
        span: Span | None = None,
    ):
        self.programs = Programs(config, mesh, rules, scan, span)

    @property
    def traces(self) -> collections.Counter[tuple[Any, ...]]:
        """(what, rows, tokens, capacity) -> how often it was compiled."""
        return self.programs.traces

    def prepare(self, params: Params) -> Weights:
        """Parameters as `generate` wants them, to keep between calls."""
        return self.programs.prepare(params)

    def generate(
        self,
        weights: Weights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: Request,
        decode: Decode | None = None,
        statistics: Statistics | None = None,
    ) -> list[Ending]:
        """Continues prompts until each has ended, or has `max_new_tokens`.

        Args:
          weights: as `prepare` makes them.
          prompts: token ids [n] each, of any lengths: none is padded on the left.
          schedules: the positional encoding.
          request: what is asked for.
          decode: ids -> text, where text is wanted or there are stop strings.
          statistics: is added to.

        Returns:
          What became of each prompt, its ids and its text.

        Raises:
          UserError: an empty prompt, ids outside the vocabulary, a prompt longer than the cache, stop strings without
            `decode`.
        """
        self.check(prompts, request, decode)
        endings = [Ending(prompt, request.eos_ids, request.stop, decode) for prompt in prompts]
        for rows in self._batches(prompts, schedules):
            chosen = [endings[i] for i in rows]
            for tokens in self.steps(
                weights, [prompts[i] for i in rows], schedules, request, decode, statistics, rows
            ):  # fmt: skip
                for ending, token in zip(chosen, tokens, strict=True):
                    ending.push(int(token))
                if all(ending.done for ending in chosen):
                    break
        for ending in endings:
            ending.finish()
        return endings

    def stream(
        self,
        weights: Weights,
        prompt: np.ndarray,
        schedules: Schedules,
        request: Request,
        decode: Decode,
        statistics: Statistics | None = None,
    ) -> Iterator[str]:
        """The continuation of one prompt in pieces, each as soon as it is final; arguments as in `generate`."""
        ending = Ending(prompt, request.eos_ids, request.stop, decode)
        for tokens in self.steps(weights, [prompt], schedules, request, decode, statistics):
            if piece := ending.push(int(tokens[0])):
                yield piece
            if ending.done:
                return
        if piece := ending.finish():
            yield piece

    def _batches(self, prompts: Sequence[np.ndarray], schedules: Schedules) -> list[list[int]]:
        """Rows that are decoded together: all, or each alone where each has a schedule of its own length."""
        if any(schedules.follows):
            return [[i] for i in range(len(prompts))]
        return [list(range(len(prompts)))] if prompts else []

    def check(self, prompts: Sequence[np.ndarray], request: Request, decode: Decode | None = None) -> None:
        """`UserError` for what `generate` cannot do, before it begins."""
        vocabulary = self.programs.model.config.vocab_size
        for i, prompt in enumerate(prompts):
            where = f"Prompt {i}" if len(prompts) > 1 else "The prompt"
            if len(prompt) == 0:
                raise UserError(f"{where} is empty; there must be at least one token to continue.")
            if np.min(prompt) < 0 or np.max(prompt) >= vocabulary:
                raise UserError(
                    f"{where} has ids from {np.min(prompt)} to {np.max(prompt)}; the vocabulary has {vocabulary}."
                )
        if request.stop and decode is None:
            raise UserError("Stop strings need a tokenizer, and there is none; end texts by eos ids instead.")
        request.capacity(prompts)

    def steps(
        self,
        weights: Weights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: Request,
        decode: Decode | None = None,
        statistics: Statistics | None = None,
        rows: Sequence[int] | None = None,
    ) -> Iterator[np.ndarray]:
        """The next token of every row, [B] at a time, `max_new_tokens` times, whatever ends the texts.

        The host reads one step behind: the device is given the next step, on a token the host has not seen, before
        the last one is waited for. `rows` are the prompts' numbers, which sampling depends on.
        """
        self.check(prompts, request, decode)
        if any(schedules.follows) and len(prompts) > 1:
            raise UserError("Texts whose encoding follows their length are decoded one at a time.")
        text = _Batch(self.programs, weights, prompts, schedules, request, rows, statistics)
        token = text.begin()
        yield text.read(token)
        for n in range(1, request.max_new_tokens):
            following = text.advance(token)
            if n > 1:
                yield text.read(token)
            token = following
        if request.max_new_tokens > 1:
            yield text.read(token)


class _Batch:
    """Texts under way: their cache, their lengths, the schedule that the cache was computed with."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: Request,
        rows: Sequence[int] | None,
        statistics: Statistics | None,
    ):
        self._programs, self._weights, self._schedules, self._request = programs, weights, schedules, request
        self._statistics = statistics or Statistics()
        # A mesh takes rows in multiples: the last one fills up, and is cut off again.
        self._real = len(prompts)
        fill = -self._real % programs.rows_at_once
        self._prompts = [*prompts, *[prompts[-1]] * fill]
        numbers = [*(range(self._real) if rows is None else rows), *[0] * fill]
        self._capacity = request.capacity(prompts)
        self._kind = request.sampling.kind
        self._draw, self._rows = programs.place((request.sampling.arrays(), np.asarray(numbers, np.int32)))
        self._new: list[Any] = []  # tokens chosen so far, [B] each, on the device until they are read
        self._stale = 0  # tokens since the text was read whose schedule was another

    def begin(self) -> jax.Array:
        """Reads the prompts; the first new token of each row."""
        statistics = self._statistics
        statistics.prompt_tokens += sum(map(len, self._prompts[: self._real]))
        with self._timed("prefill_seconds"):
            longest = max(map(len, self._prompts))
            token = self._read(self._prompts, self._schedules.at(longest))
            return jax.block_until_ready(token)

    def advance(self, token: jax.Array) -> jax.Array:
        """Gives the device the next step: reads `token` of each row; what comes after it."""
        with self._timed("decode_seconds"):
            if any(self._schedules.follows):
                length = len(self._prompts[0]) + len(self._new)
                schedule = self._schedules.at(length)
                if not same(schedule, self._schedule):
                    self._stale += 1
                    if schedule.structure != self._schedule.structure or self._stale == self._request.refresh:
                        self._statistics.refreshes += 1
                        new = np.stack([np.asarray(t) for t in self._new], axis=1)
                        texts = [np.concatenate(pair) for pair in zip(self._prompts, new, strict=True)]
                        return self._read(texts, schedule)
                    self._placed = self._place(schedule)
            call = self._programs.next
            with self._compiling():
                token, self._lengths, self._cache = call(
                    self._params,
                    self._cache,
                    token,
                    self._lengths,
                    self._rows,
                    self._draw,
                    self._placed,
                    layout=self._layout,
                    kind=self._kind,
                )
            self._new.append(token)
            return token

    def read(self, token: jax.Array) -> np.ndarray:
        """The tokens on the host, once they are there."""
        first = len(self._new) == 1
        with self._timed("prefill_seconds" if first else "decode_seconds"):
            tokens = np.asarray(token)[: self._real]
        self._statistics.new_tokens += self._real
        if self._statistics.heard is not None:
            self._statistics.heard(self._real)
        self._statistics.decoded_tokens += 0 if first else self._real
        return tokens

    def _read(self, texts: Sequence[np.ndarray], schedule: Schedule) -> jax.Array:
        """Reads texts from their beginning, in chunks, into an empty cache; the next token of each."""
        programs, config = self._programs, self._programs.model.config
        lengths = np.asarray([len(text) for text in texts], np.int32)
        self._schedule, self._placed, self._stale = schedule, self._place(schedule), 0
        self._layout = programs.layout(schedule.structure, self._schedules.follows, self._capacity)
        self._params = programs.arranged(self._weights, self._layout)
        self._lengths = programs.place(lengths)
        with self._compiling():
            self._cache = programs.allocate(self._layout, len(texts))
        last = programs.place(jnp.zeros((len(texts), config.d_model), config.dtype))
        heard, behind = self._statistics.heard, last
        for start, size in chunks(int(lengths.max())):
            if heard is not None:  # one chunk behind, so that the device always has the next
                jax.block_until_ready(behind)
                heard(int(np.clip(lengths[: self._real] - start, 0, size).sum()))
                behind = last
            tokens = np.zeros((len(texts), size), np.int32)
            for row, text in zip(tokens, texts, strict=True):
                part = text[start : start + size]
                row[: len(part)] = part
            with self._compiling():
                last, self._cache = programs.read_chunk(
                    self._params,
                    self._cache,
                    last,
                    tokens,
                    np.int32(start),
                    self._lengths,
                    self._placed,
                    layout=self._layout,
                )
        with self._compiling():
            token = programs.first(self._params, last, self._lengths, self._rows, self._draw, kind=self._kind)
        self._new.append(token)
        return token

    def _place(self, schedule: Schedule) -> Schedule:
        return self._programs.place(with_shared_rotation(schedule))

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Around a call of a program: on its mesh, and if it was compiled, its time is that of compiling."""
        traced, start = self._programs.traces.total(), time.perf_counter()
        with self._programs.on_mesh():
            yield
        if self._programs.traces.total() > traced:
            self._statistics.compile_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds the seconds within to a statistic, but for those of compiling."""
        statistics = self._statistics
        start, compiling = time.perf_counter(), statistics.compile_seconds
        yield
        spent = time.perf_counter() - start - (statistics.compile_seconds - compiling)
        setattr(statistics, what, getattr(statistics, what) + spent)


def same(a: Schedule, b: Schedule) -> bool:
    """Whether two schedules turn and scale alike."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return a.structure == b.structure and all(np.array_equal(x, y) for x, y in leaves)


def with_shared_rotation(schedule: Schedule) -> Schedule:
    """The schedule marked as `same_rotation` where all layers that rotate do so alike: one table then serves them.

    What `Schedule.generalize` leaves open, so that forward passes share a compilation.
    """
    rotating = [n for n, one in enumerate(schedule.structure) if one.rotates]
    kinds = {(one.heads, one.warp) for one in schedule.structure if one.rotates}
    fixed_freq, gain = np.asarray(schedule.fixed_freq)[rotating], np.asarray(schedule.gain)[rotating]
    alike = len(kinds) == 1 and bool((fixed_freq == fixed_freq[:1]).all() and (gain == gain[:1]).all())
    return dataclasses.replace(schedule, same_rotation=alike)
