"""What prompted suites answer: the samples of a task, the groups that a variant answers, and their batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.tasks.suites import SUITES
from pe_lab.evaluation.tasks.task import Sample, Task
from pe_lab.evaluation.variants import Variant
from pe_lab.results.records import SampleRecord, digest


class Prompts:
    """The samples of a task for a tokenizer, which all variants answer.

    Attributes:
      length: tokens of a prompt and its answer; None: prompts of their own lengths.
      settings: a fingerprint of the task's settings and the tokenizer, which the samples depend on.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, length: int | None, count: int | None, seed: int):
        suite = SUITES[task.suite]
        self.task, self.length, self.seed = task, length, seed
        self.samples = task.samples(tokenizer, length, count or suite.samples.get(task.name, sys.maxsize), seed)
        self.protocol = f"{task.suite}-{suite.protocol}"
        self.settings = f"{self.protocol}-{digest([dict(task.settings), tokenizer.fingerprint])}"

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each sample and its answer; counted once, as making the samples may take long."""
        return [len(sample.tokens) + sample.max_new_tokens for sample in self.samples]

    @property
    def cost(self) -> int:
        """Tokens of all samples, about, for a progress bar."""
        return sum(self.sizes) if self.length is None else self.length * len(self.samples)

    def check_fits(self, sample: Sample) -> None:
        needed = len(sample.tokens) + sample.max_new_tokens
        if self.length is not None and needed > self.length:
            raise ConfigError(
                f"{self.task.suite}:{self.task.name}, sample {sample.index}: its prompt of {len(sample.tokens):,} "
                f"tokens and {sample.max_new_tokens} new ones do not fit {self.length:,}; prompts are never cut here. "
                "Give a larger --lengths."
            )


@dataclass(frozen=True)
class Group:
    """The samples of one task at one length, for one variant."""

    variant: Variant
    prompts: Prompts

    @property
    def task(self) -> Task:
        return self.prompts.task

    @property
    def length(self) -> int | None:
        return self.prompts.length

    @property
    def name(self) -> str:
        """The name of the group in a progress bar."""
        size = f" {self.length:,}" if self.length else ""
        return f"{self.task.suite}:{self.task.name}{size} {self.variant.label}"

    @cached_property
    def lengths(self) -> list[int]:
        """The length whose schedule each sample is read with."""
        if self.length is not None:
            return [self.length] * len(self.prompts.samples)
        return [schedule_length(tokens, self.variant.training_length) for tokens in self.prompts.sizes]

    @cached_property
    def identities(self) -> list[SampleRecord]:
        """The keys of each sample's record that make it the answer to one question and to no other."""
        fingerprints = {length: self.variant.fingerprint(length) for length in set(self.lengths)}
        return [
            {
                "checkpoint_id": self.variant.subject.id,
                "fingerprint": fingerprints[length],
                "suite": self.task.suite,
                "task": self.task.name,
                "length": self.length,
                "seed": self.prompts.seed,
                "settings": self.prompts.settings,
                "index": index,
            }
            for index, length in enumerate(self.lengths)
        ]

    def by_length(self) -> Iterator[tuple[int, list[int]]]:
        """Indices of samples by the length of their schedule, the shortest first; of their own lengths, too."""
        for length in sorted(set(self.lengths)):
            chosen = [i for i, one in enumerate(self.lengths) if one == length]
            if self.length is None:
                chosen.sort(key=self.prompts.sizes.__getitem__)
            yield length, chosen

    def check_crop(self) -> None:
        """Raises `ConfigError` where a cropped variant would leave next to no prompt."""
        crop = self.variant.crop
        if crop is None or not len(self.prompts.samples):
            return
        sample = self.prompts.samples[0]
        new = sample.max_new_tokens
        if crop < 2 * new and len(sample.tokens) + new > crop:
            raise ConfigError(
                f"--methods=cropped: of {crop:,} tokens, the training length, {self.task.suite}:{self.task.name} "
                f"keeps {new:,} for its answer, which leaves next to no prompt. Leave cropped out."
            )


@dataclass
class Rest:
    """Tokens of a batch that were not reported yet; all are in the end, however early the answers end."""

    tokens: int
    on_tokens: Callable[[int], None]

    def take(self, tokens: int) -> None:
        taken = min(tokens, self.tokens)
        self.tokens -= taken
        self.on_tokens(taken)


@dataclass(eq=False)
class Batch:
    """Samples that are answered together.

    Attributes:
      length: of the schedule.
      backend: a `ModelBackend`.
      indices: of the samples.
      filled: the same, with the last one repeated up to the size of all batches of the group.
      tokens: of the samples without an answer, about.
      rest: of these tokens, those that were not reported yet; None: another process answers.
    """

    group: Group
    length: int
    backend: Callable[[Sequence[Sample]], list[str]]
    indices: list[int]
    filled: list[int]
    tokens: int
    rest: Rest | None = None

    @property
    def cost(self) -> int:
        """All tokens, about."""
        longest = self.group.length or max(self.group.prompts.sizes[i] for i in self.indices)
        return len(self.filled) * longest


def schedule_length(tokens: int, training_length: int) -> int:
    """The length whose schedule a sequence of `tokens` of its own length is read with.

    It is the training length times the smallest sufficient power of two, so that sequences share schedules and batches.
    """
    length = training_length
    while length < tokens:
        length *= 2
    return length


def batches(indices: Sequence[int], most: int) -> list[tuple[list[int], list[int]]]:
    """The smallest number of batches of at most `most`, all of one size, which is compiled once.

    Each is (its indices, its indices with the last one repeated up to that size).
    """
    number = -(-len(indices) // most)
    size = -(-len(indices) // number)
    parts = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    return [(part, part + [part[-1]] * (size - len(part))) for part in parts]
