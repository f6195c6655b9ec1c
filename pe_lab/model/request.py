"""The inputs of generation beside prompts and weights, and its statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.errors import ConfigError
from pe_lab.model.sampling import Sampling
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
