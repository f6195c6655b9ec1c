"""The generation backend: a language model writes the answers to prompts, in batches that one schedule reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pe_lab.evaluation.tasks.task import Sample
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import GenerationStatistics

BATCH = {"cpu": 8}  # sequences decoded together, at most: on a CPU more of them are no faster a token
BATCH_ELSEWHERE = 64  # per device
CACHE = {"cpu": 2**30}  # bytes of the KV caches of a batch
CACHE_SHARE = 0.3  # elsewhere, of a device's memory


@dataclass
class Spent:
    """The cost of answers: tokens read, tokens written, seconds without compiling, seconds of compiling."""

    read: int = 0
    written: int = 0
    seconds: float = 0.0
    compiling: float = 0.0

    def copy(self) -> Spent:
        return dataclasses.replace(self)

    def since(self, before: Spent) -> Spent:
        """What was added since a copy was made."""
        return Spent(
            *(now - then for now, then in zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True))
        )

    def add(self, other: Spent) -> None:
        """Adds another process's cost."""
        for name, value in dataclasses.asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def describe(self) -> str:
        """One line for the end of an evaluation."""
        rate = (self.read + self.written) / max(self.seconds, 1e-9)
        return (
            f"Read {self.read:,} tokens and wrote {self.written:,} in {self.seconds:.1f} s: {rate:,.1f} tokens/s "
            f"({self.compiling:.1f} s of compiling not counted)"
        )


@dataclass
class ModelBackend:
    """Greedy continuations by a language model, up to the samples' stop strings and tokens, and the end of text.

    Attributes:
      lm: the model; `at_length` of the samples' length, where its encoding follows the length.
      spent: is added to.
      crop: tokens of a prompt and its answer together, at most: a longer prompt keeps its end. None: no limit.
      on_tokens: is called with numbers of tokens as they are read and written.
    """

    lm: LanguageModel
    spent: Spent = field(default_factory=Spent)
    crop: int | None = None
    on_tokens: Callable[[int], None] = lambda tokens: None

    @classmethod
    def of(cls, variant: Variant, length: int, spent: Spent) -> ModelBackend:
        """The backend for sequences of a variant that are read with the schedule of `length` tokens."""
        return cls(variant.at(length), spent, variant.crop)

    def batch_size(self, length: int) -> int:
        """The largest batch of samples of `length` tokens with their answers, a power of two; see `BATCH`.

        The memory for KV caches limits it.
        """
        config, backend = self.lm.config, jax.default_backend()
        devices = self.lm.devices
        capacity = max(256, 1 << (length - 1).bit_length())
        cache = 2 * config.layers * config.kv_heads * config.head_dim * capacity * jnp.dtype(config.dtype).itemsize
        memory = CACHE.get(backend) or CACHE_SHARE * _device_memory() * devices
        most = BATCH.get(backend, BATCH_ELSEWHERE * devices)
        fitting = int(max(1, min(most, memory // cache)))
        rows = devices if self.lm.mesh is None else devices // self.lm.mesh.shape["context"]
        return max(1 << (fitting.bit_length() - 1), rows)

    def __call__(self, samples: Sequence[Sample]) -> list[str]:
        statistics, start = GenerationStatistics(on_tokens=self.on_tokens), time.perf_counter()
        new = max(sample.max_new_tokens for sample in samples)
        prompts = [sample.tokens for sample in samples]
        if self.crop is not None:
            prompts = [tokens[-max(1, self.crop - new) :] for tokens in prompts]
        eos_ids = {*self.lm.eos_ids, *samples[0].stop_ids}
        answers = self.lm.generate(
            prompts, new, stop=samples[0].stop, eos_ids=eos_ids, text=True, statistics=statistics
        )
        self.spent.read += statistics.prompt_tokens
        self.spent.written += statistics.new_tokens
        self.spent.compiling += statistics.compile_seconds
        self.spent.seconds += time.perf_counter() - start - statistics.compile_seconds
        return answers


def _device_memory() -> int:
    """Bytes of one accelerator's memory; 16 GB where it does not report any."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 16e9))
