"""Who answers prompts: a language model, in batches of equal reading; the contract for whoever else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp

from pe_lab.evaluation.tasks.task import Sample
from pe_lab.language_model import LanguageModel
from pe_lab.model import Statistics

ROWS = {"cpu": 8}  # texts decoded together, at most: on a CPU more of them are no faster a token
ROWS_ELSEWHERE = 64  # per device
CACHE = {"cpu": 2**30}  # bytes of keys and values held at once
CACHE_SHARE = 0.3  # elsewhere, of a device's memory

Heard = Callable[[int], None]  # is told of tokens as they are read and written


@dataclass
class Spent:
    """What answering took so far: tokens read, tokens written, seconds without compiling, seconds compiling."""

    read: int = 0
    written: int = 0
    seconds: float = 0.0
    compiling: float = 0.0

    def describe(self) -> str:
        """One line for the end of an evaluation."""
        rate = (self.read + self.written) / max(self.seconds, 1e-9)
        return (
            f"Read {self.read:,} tokens and wrote {self.written:,} in {self.seconds:.1f} s: {rate:,.1f} tokens/s "
            f"({self.compiling:.1f} s of compiling not counted)"
        )


class Answerer(Protocol):
    """Answers samples that are read alike, and asked for as many new tokens each.

    Attributes:
      heard: is told of tokens as they are read and written.
    """

    heard: Heard

    def rows(self, length: int) -> int:
        """How many samples of `length` tokens, the answer included, it takes at once."""
        ...

    def __call__(self, samples: Sequence[Sample]) -> list[str]:
        """The text that continues each prompt, up to its stop strings and its end-of-text token."""
        ...


@dataclass
class Model:
    """A language model's greedy continuations.

    Attributes:
      lm: as it is to read these samples: `at_length` of their length, where its encoding follows it.
      spent: is added to.
      crop: of a prompt, the last tokens alone that fit so many together with the answer.
    """

    lm: LanguageModel
    spent: Spent = field(default_factory=Spent)
    crop: int | None = None
    heard: Heard = lambda tokens: None

    def rows(self, length: int) -> int:
        """As many rows as their caches' memory allows, a power of two; see ROWS."""
        config, backend = self.lm.config, jax.default_backend()
        devices = self.lm.devices
        capacity = max(256, 1 << (length - 1).bit_length())
        row = 2 * config.layers * config.kv_heads * config.head_dim * capacity * jnp.dtype(config.dtype).itemsize
        memory = CACHE.get(backend) or CACHE_SHARE * device_memory() * devices
        most = ROWS.get(backend, ROWS_ELSEWHERE * devices)
        fitting = int(max(1, min(most, memory // row)))
        return max(1 << (fitting.bit_length() - 1), devices)

    def __call__(self, samples: Sequence[Sample]) -> list[str]:
        statistics, start = Statistics(on_tokens=self.heard), time.perf_counter()
        new = max(sample.max_new_tokens for sample in samples)
        prompts = [sample.tokens for sample in samples]
        if self.crop is not None:
            prompts = [tokens[-max(1, self.crop - new) :] for tokens in prompts]
        answers = self.lm.generate(
            prompts,
            new,
            stop=samples[0].stop,
            text=True,
            statistics=statistics,
        )
        self.spent.read += statistics.prompt_tokens
        self.spent.written += statistics.new_tokens
        self.spent.compiling += statistics.compile_seconds
        self.spent.seconds += time.perf_counter() - start - statistics.compile_seconds
        return answers


def device_memory() -> int:
    """Bytes of one accelerator's memory; 16 GB where it does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 16e9))
