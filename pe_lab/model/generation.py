"""Generation of tokens: batches of prompts of different lengths, prefilled in chunks, continued step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.model.programs import DecodingWeights, Programs, part_of
from pe_lab.model.sampling import Sampling
from pe_lab.parallel import fetch
from pe_lab.positional import Schedule

SMALLEST_CAPACITY = 256


@dataclass(frozen=True)
class GenerationRequest:
    """How prompts are continued.

    Attributes:
      max_new_tokens: per prompt.
      sampling: how tokens are chosen.
      eos_ids: ids that end a sequence.
      stop: strings that end a text; they need a `decode`.
      cache_length: the largest number of tokens of prompt and continuation. None: as many as needed.
      refresh: for encodings that follow the length: recompute the cache after this many tokens whose schedule differs
        from that of the cache. At 1, every token equals that of a full forward pass. At 0, the cache is never
        recomputed, and new queries and all cached keys are rotated by the new schedule, which is an approximation.
    """

    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    eos_ids: Collection[int] = ()
    stop: tuple[str, ...] = ()
    cache_length: int | None = None
    refresh: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; ask for at least one.")
        if self.refresh < 0:
            raise ConfigError(f"refresh is {self.refresh}; it must be 0 (never) or above.")
        if not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(f"stop is {self.stop}; a stop string has at least one character.")

    def capacity(self, prompts: Sequence[np.ndarray]) -> int:
        """Slots for the longest of these sequences: a power of two, so that few programs serve all lengths."""
        longest = max(map(len, prompts), default=0)
        if self.cache_length is not None and longest + self.max_new_tokens > self.cache_length:
            raise ConfigError(
                f"A prompt of {longest} tokens and {self.max_new_tokens} new ones do not fit a cache of "
                f"{self.cache_length}. Shorten the prompt, ask for fewer, or give a larger cache_length."
            )
        needed = self.cache_length or longest + self.max_new_tokens
        return max(SMALLEST_CAPACITY, 1 << (needed - 1).bit_length())


@dataclass(frozen=True)
class Schedules:
    """The positional encoding as a function of the length.

    Attributes:
      at: length in tokens -> the schedule of a sequence of this length.
      follows: of each layer, whether its encoding depends on the length.
    """

    at: Callable[[int], Schedule]
    follows: tuple[bool, ...]

    @classmethod
    def fixed(cls, schedule: Schedule) -> Schedules:
        """One schedule for all lengths."""
        return cls(lambda _: schedule, (False,) * schedule.num_layers)


@dataclass
class GenerationStatistics:
    """Counts and seconds, summed over calls. Seconds of compilation are separate and in no other field.

    `on_tokens`, if given, is called with the number of tokens that were just read or generated.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    refreshes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decoded_tokens: int = 0  # without the first of each sequence, which is part of the prefill
    on_tokens: Callable[[int], None] | None = None

    def add(self, other: GenerationStatistics) -> None:
        """Adds the counts and seconds of other calls."""
        for field in dataclasses.fields(self):
            if field.name != "on_tokens":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


Decode = Callable[[Sequence[int]], str]

CONTEXT = 8  # tokens of the prompt before the new ones, because some tokenizers decode a first token differently
INCOMPLETE = "\ufffd"  # decoders write it for the bytes of an incomplete character


class Ending:
    """The ids and the text of one sequence, during generation.

    Args:
      prompt: its ids.
      eos_ids: ids that end the text. They are not part of it.
      stop: strings that end the text. They are not part of it, and may begin and end within tokens.
      decode: ids -> text. None if no text is needed; then there are no stop strings.

    Attributes:
      ids: the new ids so far. After a stop string, those before the token in which it begins.
      text: the final part of the text, without incomplete characters and possible beginnings of a stop string.
      done: the text has ended.
    """

    def __init__(
        self,
        prompt: np.ndarray | Sequence[int],
        eos_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        decode: Decode | None = None,
    ):
        self._eos, self._stop, self._decode = frozenset(eos_ids), tuple(stop), decode
        self._tokens = [int(i) for i in prompt[-CONTEXT:]]
        self._from, self._read = 0, len(self._tokens)
        self._whole = ""  # all complete characters: `text`, and those that may begin a stop string
        self._starts: list[int] = []  # of each id: the length of the complete text before it
        self.ids: list[int] = []
        self.text = ""
        self.done = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is final because of it."""
        if self.done:
            return ""
        if token in self._eos:
            return self.finish()
        self.ids.append(int(token))
        self._starts.append(len(self._whole))
        if self._decode is None:
            return ""
        self._tokens.append(int(token))
        text = self._pending()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return self._extend(text)

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        if self.done:
            return ""
        piece = "" if self._decode is None else self._extend(self._pending())
        if not self.done:
            self.done = True
            piece += self._whole[len(self.text) :]
            self.text = self._whole
        return piece

    def _pending(self) -> str:
        """The undecoded part of the text. It is decoded with the tokens before, on which it may depend."""
        if self._read == len(self._tokens):
            return ""
        known = self._decode(self._tokens[self._from : self._read])
        return self._decode(self._tokens[self._from :])[len(known) :]

    def _extend(self, complete: str) -> str:
        before, self._whole = len(self._whole), self._whole + complete
        end, begin = first_stop(self._whole, self._stop, before)
        if end:
            self.done, self._whole = True, self._whole[:begin]
            self.ids = [i for i, start in zip(self.ids, self._starts, strict=True) if start < begin]
            final = begin
        else:
            final = len(self._whole) - possible_stop(self._whole, self._stop)
        piece, self.text = self._whole[len(self.text) : final], self._whole[:final]
        return piece

    def result(self) -> np.ndarray:
        """The new ids [n] int32."""
        return np.asarray(self.ids, np.int32)


def first_stop(text: str, stop: Sequence[str], known: int = 0) -> tuple[int, int]:
    """The end and the beginning of the stop string that ends first; (0, 0) if there is none.

    Of several with the same end it is the longest, so that the result does not depend on the pieces of the text. No
    stop string ends within the first `known` characters.
    """
    found = []
    for one in stop:
        begin = text.find(one, max(0, known - len(one) + 1))
        if begin >= 0:
            found.append((begin + len(one), begin))
    return min(found, default=(0, 0))


def possible_stop(text: str, stop: Sequence[str]) -> int:
    """The number of last characters that may be the beginning of a stop string."""
    longest = max((len(one) for one in stop), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(one.startswith(tail) for one in stop if len(one) > size):
            return size
    return 0


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
        """The continuation of each prompt, ids and text, until it has ended or has `max_new_tokens`.

        Args:
          weights: from `prepare`, to reuse between calls.
          prompts: token ids [n] each, of any lengths, without padding.
          decode: ids -> text; needed for text and for stop strings.
          statistics: counts and seconds are added to it.

        Raises:
          ConfigError: an empty prompt, ids outside the vocabulary, a prompt longer than the cache, stop strings without
            `decode`.
        """
        self.check(prompts, request, decode)
        endings = [Ending(prompt, request.eos_ids, request.stop, decode) for prompt in prompts]
        # Sequences are decoded together, or each alone if the schedule depends on the length.
        numbers = range(len(prompts))
        for chosen in [[i] for i in numbers] if any(schedules.follows) else [numbers] if prompts else []:
            unfinished = [endings[i] for i in chosen]
            batch = _GenerationBatch(
                self, weights, [prompts[i] for i in chosen], schedules, request, chosen, statistics
            )
            for tokens in batch.steps():
                for ending, token in zip(unfinished, tokens, strict=True):
                    ending.push(int(token))
                if all(ending.done for ending in unfinished):
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
    """A batch in generation; `numbers` are those of the prompts, on which sampling depends."""

    def __init__(
        self,
        programs: Programs,
        weights: DecodingWeights,
        prompts: Sequence[np.ndarray],
        schedules: Schedules,
        request: GenerationRequest,
        numbers: Sequence[int],
        statistics: GenerationStatistics | None,
    ):
        self._programs, self._weights, self._schedules, self._request = programs, weights, schedules, request
        self._statistics = statistics or GenerationStatistics()
        # A mesh needs a multiple of its sequences: copies of the last prompt fill up, and are removed from results.
        self._real = len(prompts)
        fill = -self._real % programs.rows_at_once
        self._prompts = [*prompts, *[prompts[-1]] * fill]
        numbers = [*numbers, *[0] * fill]
        self._capacity = request.capacity(prompts)
        longest = max(map(len, prompts)) + request.max_new_tokens
        schedules.at(longest).check_length(longest)
        self._draw, self._rows = programs.place((request.sampling.arrays(), np.asarray(numbers, np.int32)))
        self._new: list[Any] = []  # tokens chosen so far, [B] each, on the device until they are read
        self._stale = 0  # tokens with another schedule than the cache

    def steps(self) -> Iterator[np.ndarray]:
        """Yields the next token of every sequence, [B], `max_new_tokens` times; stop conditions are ignored.

        The host reads one step behind: it starts the next step before it waits for the token of the last one.
        """
        self._statistics.prompt_tokens += sum(map(len, self._prompts[: self._real]))
        with self._timed("prefill_seconds"):
            longest = max(map(len, self._prompts))
            token = jax.block_until_ready(self._prefill(self._prompts, self._schedules.at(longest)))
        yield self._read(token)
        for n in range(1, self._request.max_new_tokens):
            following = self._advance(token)
            if n > 1:
                yield self._read(token)
            token = following
        if self._request.max_new_tokens > 1:
            yield self._read(token)

    def _advance(self, token: jax.Array) -> jax.Array:
        """Starts the next step on `token` of each sequence; returns the token after it."""
        programs, exact = self._programs, exact_cache(self._schedule)
        with self._timed("decode_seconds"):
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
                    self._placed = programs.place(with_shared_rotation(schedule))
            with self._compiling():
                token, self._lengths, self._cache = programs.next(
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
        self._schedule, self._stale = schedule, 0
        self._placed = programs.place(with_shared_rotation(schedule))
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
