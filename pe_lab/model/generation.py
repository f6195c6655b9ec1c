"""Generation of tokens: batches of prompts of different lengths, prefilled in chunks, continued step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.model.programs import DecodingWeights, Programs, part_of
from pe_lab.model.request import GenerationRequest, GenerationStatistics, Schedules
from pe_lab.model.stopping import Decode, Ending
from pe_lab.parallel import fetch
from pe_lab.positional import Schedule

CHUNKS = (512, 128, 32)  # tokens per chunk of a prompt: at most one compilation each


def chunks(length: int) -> list[tuple[int, int]]:
    """The chunks of a prompt, (start, tokens), in sizes of CHUNKS; the last one may be padded.

    A chunk is more than half full; a shorter rest is split into smaller chunks. Every chunk starts at a multiple of its
    size, so that none exceeds a capacity that is a multiple of it.
    """
    found, start = [], 0
    while start < length:
        rest = length - start
        size = next((size for size in CHUNKS if rest > size // 2), CHUNKS[-1])
        found.append((start, size))
        start += size
    return found


WHOLE = 64  # tokens: passes over whole sequences have lengths of its multiples, for few compilations


class Decoder(Programs):
    """Continues prompts with a KV cache."""

    def generate(
        self,
        weights: DecodingWeights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: GenerationRequest,
        decode: Decode | None = None,
        statistics: GenerationStatistics | None = None,
    ) -> list[Ending]:
        """Continues prompts until each has ended, or has `max_new_tokens`.

        Args:
          weights: from `prepare`, to reuse between calls.
          prompts: token ids [n] each, of any lengths, without padding.
          schedules: the positional encoding.
          request: how prompts are continued.
          decode: ids -> text; needed for text and for stop strings.
          statistics: counts and seconds are added to it.

        Returns:
          The continuation of each prompt: its ids and its text.

        Raises:
          ConfigError: an empty prompt, ids outside the vocabulary, a prompt longer than the cache, stop strings without
            `decode`.
        """
        self.check(prompts, request, decode)
        endings = [Ending(prompt, request.eos_ids, request.stop, decode) for prompt in prompts]
        # Rows are decoded together, or each alone if the schedule depends on the length.
        numbers = range(len(prompts))
        for rows in [[i] for i in numbers] if any(schedules.follows) else [numbers] if prompts else []:
            chosen = [endings[i] for i in rows]
            batch = _GenerationBatch(self, weights, [prompts[i] for i in rows], schedules, request, rows, statistics)
            for tokens in batch.steps():
                for ending, token in zip(chosen, tokens, strict=True):
                    ending.push(int(token))
                if all(ending.done for ending in chosen):
                    break
        for ending in endings:
            ending.finish()
        return endings

    def stream(
        self,
        weights: DecodingWeights,
        prompt: np.ndarray,
        schedules: Schedules,
        request: GenerationRequest,
        decode: Decode,
        statistics: GenerationStatistics | None = None,
    ) -> Iterator[str]:
        """The continuation of one prompt in pieces of final text; arguments as in `generate`."""
        self.check([prompt], request, decode)
        ending = Ending(prompt, request.eos_ids, request.stop, decode)
        for tokens in _GenerationBatch(self, weights, [prompt], schedules, request, [0], statistics).steps():
            if piece := ending.push(int(tokens[0])):
                yield piece
            if ending.done:
                return
        if piece := ending.finish():
            yield piece

    def check(self, prompts: Sequence[np.ndarray], request: GenerationRequest, decode: Decode | None = None) -> None:
        """Raises a `ConfigError` for prompts or settings that `generate` cannot serve."""
        vocabulary = self.model.config.vocab_size
        for i, prompt in enumerate(prompts):
            where = f"Prompt {i}" if len(prompts) > 1 else "The prompt"
            if len(prompt) == 0:
                raise ConfigError(f"{where} is empty; there must be at least one token to continue.")
            if np.min(prompt) < 0 or np.max(prompt) >= vocabulary:
                raise ConfigError(
                    f"{where} has ids from {np.min(prompt)} to {np.max(prompt)}; the vocabulary has {vocabulary}."
                )
        if request.stop and decode is None:
            raise ConfigError("Stop strings need a tokenizer, and there is none; use eos ids instead.")
        request.capacity(prompts)


class _GenerationBatch:
    """A batch in generation: its KV cache, its lengths, and the schedule of the cache.

    `rows` are the prompts' numbers, on which sampling depends.
    """

    def __init__(
        self,
        programs: Programs,
        weights: DecodingWeights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: GenerationRequest,
        rows: Sequence[int],
        statistics: GenerationStatistics | None,
    ):
        self._programs, self._weights, self._schedules, self._request = programs, weights, schedules, request
        self._statistics = statistics or GenerationStatistics()
        # A mesh needs a multiple of its rows: copies of the last prompt fill up, and are removed from results.
        self._real = len(prompts)
        fill = -self._real % programs.rows_at_once
        self._prompts = [*prompts, *[prompts[-1]] * fill]
        numbers = [*rows, *[0] * fill]
        self._capacity = request.capacity(prompts)
        self._draw, self._rows = programs.place((request.sampling.arrays(), np.asarray(numbers, np.int32)))
        self._new: list[Any] = []  # tokens chosen so far, [B] each, on the device until they are read
        self._stale = 0  # tokens with another schedule than the cache

    def steps(self) -> Iterator[np.ndarray]:
        """Yields the next token of every row, [B], `max_new_tokens` times; stop conditions are ignored.

        The host reads one step behind: it starts the next step before it waits for the token of the last one.
        """
        token = self._begin()
        yield self._read(token)
        for n in range(1, self._request.max_new_tokens):
            following = self._advance(token)
            if n > 1:
                yield self._read(token)
            token = following
        if self._request.max_new_tokens > 1:
            yield self._read(token)

    def _begin(self) -> jax.Array:
        """Prefills the prompts; returns the first new token of each row."""
        statistics = self._statistics
        statistics.prompt_tokens += sum(map(len, self._prompts[: self._real]))
        with self._timed("prefill_seconds"):
            longest = max(map(len, self._prompts))
            token = self._prefill(self._prompts, self._schedules.at(longest))
            return jax.block_until_ready(token)

    def _advance(self, token: jax.Array) -> jax.Array:
        """Starts the next step on `token` of each row; returns the token after it."""
        with self._timed("decode_seconds"):
            exact = exact_cache(self._schedule)
            if any(self._schedules.follows) or not exact:
                length = max(map(len, self._prompts)) + len(self._new)
                schedule = self._schedules.at(length)
                if not exact or not same(schedule, self._schedule):
                    self._stale += 1
                    other = not exact or schedule.structure != self._schedule.structure
                    if other or self._stale == self._request.refresh:
                        self._statistics.refreshes += 1
                        new = np.stack([fetch(t) for t in self._new], axis=1)
                        sequences = [np.concatenate(pair) for pair in zip(self._prompts, new, strict=True)]
                        return self._prefill(sequences, schedule)
                    self._placed = self._place(schedule)
            with self._compiling():
                token, self._lengths, self._cache = self._programs.next(
                    self._params, self._cache, token, self._lengths, self._rows, self._draw, self._placed
                )
            self._new.append(token)
            return token

    def _read(self, token: jax.Array) -> np.ndarray:
        """The tokens on the host; waits for them."""
        first = len(self._new) == 1
        with self._timed("prefill_seconds" if first else "decode_seconds"):
            tokens = fetch(token)[: self._real]
        self._statistics.new_tokens += self._real
        if self._statistics.on_tokens is not None:
            self._statistics.on_tokens(self._real)
        self._statistics.decoded_tokens += 0 if first else self._real
        return tokens

    def _prefill(self, sequences: Sequence[np.ndarray], schedule: Schedule) -> jax.Array:
        """Computes the cache of whole sequences in chunks; returns the next token of each."""
        programs, config = self._programs, self._programs.model.config
        lengths = np.asarray([len(one) for one in sequences], np.int32)
        self._schedule, self._placed, self._stale = schedule, self._place(schedule), 0
        if not exact_cache(schedule):  # without a cache: a pass over the whole sequences
            size = min(self._capacity, -(-int(lengths.max()) // WHOLE) * WHOLE)
            tokens = part_of(sequences, 0, size)
            with self._compiling():
                token = programs.whole(
                    self._weights.params, tokens, programs.place(lengths), self._rows, self._draw, self._placed
                )
            self._new.append(token)
            return token
        layout = programs.layout(schedule.structure, self._schedules.follows, self._capacity)
        self._params = programs.arranged(self._weights, layout)
        self._lengths = programs.place(lengths)
        with self._compiling():
            self._cache = programs.allocate(layout, len(sequences))
        last = programs.place(jnp.zeros((len(sequences), config.d_model), config.dtype))
        on_tokens, behind = self._statistics.on_tokens, last
        for start, size in chunks(int(lengths.max())):
            if on_tokens is not None:  # waits one chunk behind, so that the device always has the next one
                jax.block_until_ready(behind)
                on_tokens(int(np.clip(lengths[: self._real] - start, 0, size).sum()))
                behind = last
            tokens = part_of(sequences, start, size)
            with self._compiling():
                last, self._cache = programs.prefill(
                    self._params, self._cache, last, tokens, np.int32(start), self._lengths, self._placed
                )
        with self._compiling():
            token = programs.first(self._params, last, self._lengths, self._rows, self._draw)
        self._new.append(token)
        return token

    def _place(self, schedule: Schedule) -> Schedule:
        return self._programs.place(with_shared_rotation(schedule))

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Context of a call of a program: sets its mesh, and counts its time as compilation if it was compiled."""
        traced, start = self._programs.traces.total(), time.perf_counter()
        with self._programs.on_mesh():
            yield
        if self._programs.traces.total() > traced:
            self._statistics.compile_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds the seconds of the context to a statistic, without those of compilation."""
        statistics = self._statistics
        start, compiling = time.perf_counter(), statistics.compile_seconds
        yield
        spent = time.perf_counter() - start - (statistics.compile_seconds - compiling)
        setattr(statistics, what, getattr(statistics, what) + spent)


def exact_cache(schedule: Schedule) -> bool:
    """Whether all encodings with hooks say that decoding with a KV cache equals passes over whole sequences."""
    return all(hook.encoding.exact_cache for hooks in schedule.hooks for hook in hooks)


def same(a: Schedule, b: Schedule) -> bool:
    """Whether two schedules are equal."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return a.structure == b.structure and all(np.array_equal(x, y) for x, y in leaves)


def with_shared_rotation(schedule: Schedule) -> Schedule:
    """The schedule with `same_rotation` set if all layers that rotate share a rotation: one table then serves them.

    `Schedule.generalize` does not set it, so that forward passes share a compilation.
    """
    rotating = [n for n, one in enumerate(schedule.structure) if one.rotates]
    kinds = {one.heads for one in schedule.structure if one.rotates}
    fixed_freq, gain = np.asarray(schedule.fixed_freq)[rotating], np.asarray(schedule.gain)[rotating]
    alike = len(kinds) == 1 and bool((fixed_freq == fixed_freq[:1]).all() and (gain == gain[:1]).all())
    return dataclasses.replace(schedule, same_rotation=alike)
