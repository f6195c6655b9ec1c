"""What is asked of generation, what it needs to know of the positional encoding, and what it tells of its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.errors import UserError
from pe_lab.model.sampling import Sampling
from pe_lab.positional import Schedule

SMALLEST_CAPACITY = 256


@dataclass(frozen=True)
class Request:
    """What is asked for beside the prompts.

    Attributes:
      max_new_tokens: per prompt.
      sampling: how tokens are chosen.
      eos_ids: ids that end a text.
      stop: strings that end a text; they need a `decode`.
      cache_length: tokens of prompt and continuation that there is room for. None: as many as are needed.
      refresh: for encodings that follow the length. Read the text again after so many tokens whose schedule differs
        from that of the cache: at 1, every token is what a full forward pass gives; at 0, the text is never read
        again, and only new queries and all cached keys are turned by the new schedule, which is an approximation.
    """

    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    eos_ids: Collection[int] = ()
    stop: tuple[str, ...] = ()
    cache_length: int | None = None
    refresh: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; ask for at least one.")
        if self.refresh < 0:
            raise UserError(f"refresh is {self.refresh}; it must be 0 (never) or above.")
        if not all(isinstance(one, str) and one for one in self.stop):
            raise UserError(f"stop is {self.stop}; stop strings are texts of at least one character.")

    def capacity(self, prompts: Sequence[np.ndarray]) -> int:
        """Slots for the longest of these texts: a power of two, so that few programs serve all lengths."""
        longest = max(map(len, prompts), default=0)
        if self.cache_length is not None and longest + self.max_new_tokens > self.cache_length:
            raise UserError(
                f"A prompt of {longest} tokens and {self.max_new_tokens} new ones do not fit a cache of "
                f"{self.cache_length}. Shorten the prompt, ask for fewer, or give a larger cache_length."
            )
        needed = self.cache_length or longest + self.max_new_tokens
        return max(SMALLEST_CAPACITY, 1 << (needed - 1).bit_length())


@dataclass(frozen=True)
class Schedules:
    """The positional encoding of texts as they grow.

    Attributes:
      at: length in tokens -> the schedule that a text of this length is read with.
      follows: of each layer, whether that depends on the length.
    """

    at: Callable[[int], Schedule]
    follows: tuple[bool, ...]

    @classmethod
    def fixed(cls, schedule: Schedule) -> Schedules:
        """One schedule for texts of any length."""
        return cls(lambda _: schedule, (False,) * schedule.num_layers)


@dataclass
class Statistics:
    """Counts and seconds, added up over calls. Compilation is apart: the other seconds are without it.

    `heard`, where it is given, is told of tokens as they are read and written.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    refreshes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decoded_tokens: int = 0  # without the first of each text, which the prefill gives
    heard: Callable[[int], None] | None = None
