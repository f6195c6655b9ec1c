"""Prompted suites: every variant answers every sample of every task; each answer is a sample record."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.evaluation.generation.backend import ModelBackend, Spent
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.breakdowns import by_depth, by_length
from pe_lab.evaluation.tasks.suites import SUITES
from pe_lab.evaluation.tasks.task import Sample, Task
from pe_lab.evaluation.variants import Variant
from pe_lab.results.intervals import mean_of
from pe_lab.results.records import Record, RecordFile, digest, finite
from pe_lab.results.samples import SampleFile, SampleRecord, key
from pe_lab.terminal import console
from pe_lab.training.machine import versions


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

    @cached_property
    def lengths(self) -> list[int]:
        """The length whose schedule each sample is read with."""
        if self.length is not None:
            return [self.length] * len(self.prompts.samples)
        return [schedule_length(tokens, self.variant.training_length) for tokens in self.prompts.sizes]

    @cached_property
    def identities(self) -> list[SampleRecord]:
        """The keys of each sample's record that make it the answer to one question and to no other."""
        readings = {length: self.variant.fingerprint(length) for length in set(self.lengths)}
        return [
            {
                "checkpoint_id": self.variant.subject.id,
                "reading": readings[length],
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


class Prompted:
    """Answers the samples of prompted tasks, and summarizes their scores.

    Args:
      variants: all samples of one are answered before those of the next.
      lengths: tokens, for tasks whose prompts are made to a length.
      count: samples a task and length, at most. None: as many as in the papers, or as the task's file has.
      directory: for `samples/SUITE.jsonl` (sample records) and `SUITE.jsonl` (summaries).
      again: whether answered samples are answered again.
      backend: makes the generation backend of a variant at a length.

    Attributes:
      spent: the cost of the answers so far.
      work: tokens of all groups, about.
      total, finished: all samples, and those that an earlier process answered.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        tasks: Sequence[Task],
        lengths: Sequence[int],
        count: int | None,
        seed: int,
        directory: Path,
        again: bool = False,
        backend: Callable[[Variant, int, Spent], ModelBackend] = ModelBackend.of,
    ):
        self.directory, self.again = directory, again
        self.spent, self._backend = Spent(), backend
        suites = dict.fromkeys(task.suite for task in tasks)
        self._sample_files = {suite: SampleFile(directory / "samples" / f"{suite}.jsonl") for suite in suites}
        self._record_files = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in suites}
        prompts: dict[Any, Prompts] = {}
        self.groups: list[Group] = []
        for variant in variants:
            tokenizer = variant.lm.tokenizer
            if tokenizer is None:
                raise CheckpointError(
                    f"{variant.lm.checkpoint.path} came without a tokenizer, so prompts cannot be read. Use a "
                    "checkpoint that has one (pe_lab.convert copies it)."
                )
            for task in tasks:
                for length in lengths if task.sized else [None]:
                    known = (id(task), tokenizer.fingerprint, length)
                    if known not in prompts:
                        prompts[known] = Prompts(task, tokenizer, length, count, seed)
                    self.groups.append(Group(variant, prompts[known]))
        # A length that is too short is refused before anything is measured.
        for one in prompts.values():
            for sample in one.samples[:1]:
                one.check_fits(sample)
        for group in self.groups:
            group.check_crop()
        self.work = sum(group.prompts.cost for group in self.groups)
        answered = [key(one) in self._sample_files[g.task.suite].records for g in self.groups for one in g.identities]
        self.total, self.finished = len(answered), 0 if again else sum(answered)

    def run(self) -> list[Record]:
        """Answers the samples that have no answer yet; returns and writes the summaries of all groups."""
        out = console()
        tasks = ", ".join(dict.fromkeys(f"{g.task.suite}:{g.task.name}" for g in self.groups))
        labels = ", ".join(dict.fromkeys(f"{g.variant.label} ({g.variant.subject.path})" for g in self.groups))
        out.print(f"{tasks} for {labels}")
        if self.finished:
            out.print(f"{self.finished:,} of {self.total:,} samples were answered before (--again: once more).")
        records = []
        with TokenProgress("compiling", self.work) as progress:
            for group in self.groups:
                size = f" {group.length:,}" if group.length else ""
                name = f"{group.task.suite}:{group.task.name}{size} {group.variant.label}"
                answered = self._answer(group, functools.partial(progress.add, name=name))
                records.append(self._summary(group, answered))
                self._record_files[group.task.suite].put(records[-1:])
        for record in records:
            if record["truncated"]:
                out.print(
                    f"{record['suite']}:{record['source']}, {record['label']}: {record['truncated']} of "
                    f"{record['samples']} prompts were cut in the middle, as the protocol requires."
                )
        if self.spent.read:
            out.print(self.spent.describe())
        out.print(f"Answers: {self.directory / 'samples'}")
        return records

    def answered(self) -> Iterator[tuple[Group, Sequence[Sample], list[SampleRecord]]]:
        """Every group with its samples and, in their order, their sample records; after `run`."""
        for group in self.groups:
            found = self._sample_files[group.task.suite].records
            yield group, group.prompts.samples, [found[key(one)] for one in group.identities]

    # --------------------------------------------------------------------------------------------------------
    # Answers

    def _answer(self, group: Group, on_tokens: Callable[[int], None]) -> list[SampleRecord]:
        """The sample records of a group, in the order of its samples."""
        file, prompts = self._sample_files[group.task.suite], group.prompts
        keys = [key(one) for one in group.identities]
        if self.again:
            file.forget(keys)
        done = [key in file.records for key in keys]
        on_tokens(int(prompts.cost * sum(done) / max(len(keys), 1)))
        for length, indices in group.by_length():
            if all(done[i] for i in indices):
                continue
            backend = self._backend(group.variant, length, self.spent)
            longest = length if group.length else max(prompts.sizes[i] for i in indices)
            for batch, filled in batches(indices, backend.batch_size(longest)):
                if all(done[i] for i in batch):
                    continue
                # A batch that was begun is answered whole: in another batch, sums may be rounded otherwise.
                asked = {i: prompts.samples[i] for i in batch}
                for sample in asked.values():
                    prompts.check_fits(sample)
                new = [asked[i] for i in batch if not done[i]]
                rest = Rest(sum(group.length or len(s.tokens) + s.max_new_tokens for s in new), on_tokens)
                backend.on_tokens, start = rest.take, time.perf_counter()
                answers = backend([asked[i] for i in filled])[: len(batch)]
                seconds = (time.perf_counter() - start) / len(batch)
                file.add(
                    [
                        self._sample_record(group, sample, answer, length, seconds)
                        for sample, answer in zip(asked.values(), answers, strict=True)
                    ]
                )
                rest.take(rest.tokens)
        return [file.records[key] for key in keys]

    def _sample_record(self, group: Group, sample: Sample, output: str, length: int, seconds: float) -> SampleRecord:
        scores = group.task.score(sample, output)
        found = getattr(group.task, "found", None)
        record = group.identities[sample.index] | {
            "prompt": sample.fingerprint,
            "tokens": len(sample.tokens),
            "depth": list(sample.depth),
            "references": list(sample.references),
            "output": output,
            "score": scores[group.task.metric],
            "scores": scores,
            "found": found(sample, output) if found else None,
            "facts": dict(sample.metadata),
            **group.variant.sample_record(length),
            "protocol": group.prompts.protocol,
            "seconds": seconds,
        }
        return finite(record)

    # --------------------------------------------------------------------------------------------------------
    # Summaries

    def _summary(self, group: Group, answered: Sequence[SampleRecord]) -> Record:
        """The result record of a group."""
        task, first = group.task, answered[0] if answered else {}
        # Questions about one problem or one paragraph are not independent.
        clusters = [record["facts"].get("cluster", record["index"]) for record in answered]
        mean = mean_of([record["score"] for record in answered], clusters)
        if mean is None:
            raise DataError(f"{task.suite}:{task.name} has no samples.")
        length = group.length or task.settings.get("max_length")  # which prompts were cut to, where the protocol cuts
        record: Record = {
            "suite": task.suite,
            "source": task.name,
            **group.variant.record(length),
            "positional": answered[-1]["positional"],
            "seed": group.prompts.seed,
            "metric": task.metric,
            "score": mean.score,
            "stderr": mean.stderr,
            "low": mean.low,
            "high": mean.high,
            "samples": mean.count,
            "scores": {
                name: math.fsum(record["scores"][name] for record in answered) / len(answered)
                for name in first["scores"]
            },
            "truncated": sum(bool(record["facts"].get("truncated")) for record in answered),
            "longest": max(record["tokens"] for record in answered),
            "settings": first["settings"],
            "higher_is_better": True,
            "seconds": math.fsum(record["seconds"] for record in answered),
            "protocol": first["protocol"],
            "versions": versions(),
            "devices": len(jax.local_devices()),
        }
        if any(record["depth"] for record in answered):
            record["by_depth"] = by_depth(answered)
        if group.length is None:
            record["by_length"] = by_length(answered, getattr(task, "edges_by_record_length", None))
        return finite(record)


@dataclass
class Rest:
    """Tokens of a batch that were not reported yet; all are in the end, however early the answers end."""

    tokens: int
    on_tokens: Callable[[int], None]

    def take(self, tokens: int) -> None:
        taken = min(tokens, self.tokens)
        self.tokens -= taken
        self.on_tokens(taken)


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
