"""Prompted suites: every variant answers every sample of every task; each answer is a sample record."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.evaluation.generation.backend import GenerationBackend, ModelBackend, Spent
from pe_lab.evaluation.scoring.breakdowns import by_depth, by_length
from pe_lab.evaluation.tasks.suites import SUITES
from pe_lab.evaluation.tasks.task import Sample, Task
from pe_lab.evaluation.variants import Variant
from pe_lab.results.intervals import mean_of
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, SampleRecord, key
from pe_lab.training.machine import versions


@dataclass(frozen=True)
class Group:
    """The samples of one task for one variant; `length` None: prompts of their own lengths."""

    variant: Variant
    task: Task
    length: int | None


class Prompted:
    """Answers the samples of prompted tasks, and summarizes their scores.

    Args:
      variants: all samples of one are answered before those of the next.
      tasks: the tasks.
      lengths: tokens, for tasks whose prompts are made to a length.
      count: samples a task and length, at most. None: as many as in the papers, or as the task's file has.
      seed: of the samples.
      directory: for `samples/SUITE.jsonl` (sample records) and `SUITE.jsonl` (summaries).
      again: whether answered samples are answered again.
      backend: makes the generation backend of a variant at a length; by default its language model.

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
        backend: Callable[[Variant, int, Spent], GenerationBackend] | None = None,
    ):
        self.variants, self.tasks = list(variants), list(tasks)
        self.count, self.seed, self.directory, self.again = count, seed, directory, again
        self.spent = Spent()
        self._samples: dict[Any, Sequence[Sample]] = {}
        self._counted: dict[Any, list[int]] = {}
        self._backend = backend or (
            lambda variant, length, spent: ModelBackend(variant.at(length), spent, variant.crop)
        )
        suites = dict.fromkeys(task.suite for task in tasks)
        self._sample_files = {suite: SampleFile(directory / "samples" / f"{suite}.jsonl") for suite in suites}
        self._record_files = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in suites}
        for variant in self.variants:
            if variant.lm.tokenizer is None:
                raise CheckpointError(
                    f"{variant.lm.checkpoint.path} came without a tokenizer, so prompts cannot be read. Use a "
                    "checkpoint that has one (pe_lab.convert copies it)."
                )
        self.groups = [
            Group(variant, task, length)
            for variant in self.variants
            for task in self.tasks
            for length in (lengths if task.sized else [None])
        ]
        # A length that is too short is refused before anything is measured.
        for group in {(id(g.variant.lm.tokenizer), id(g.task), g.length): g for g in self.groups}.values():
            if len(samples := self.samples(group)):
                self._check_fits(group, samples[0])
        for group in self.groups:
            if group.variant.crop is not None and len(samples := self.samples(group)):
                self._check_crop(group, samples[0])
        self.work = sum(self.cost(group) for group in self.groups)
        answered = [key in self._sample_files[g.task.suite].records for g in self.groups for key in self._keys(g)]
        self.total, self.finished = len(answered), 0 if again else sum(answered)

    def tokenizer(self, group: Group) -> Tokenizer:
        tokenizer = group.variant.lm.tokenizer
        assert tokenizer is not None
        return tokenizer

    def samples(self, group: Group) -> Sequence[Sample]:
        """The group's samples; they do not depend on the variant."""
        tokenizer, task = self.tokenizer(group), group.task
        known = (id(task), tokenizer.fingerprint, group.length)
        if known not in self._samples:
            usual = SUITES[task.suite].samples.get(task.name, sys.maxsize)
            self._samples[known] = task.samples(tokenizer, group.length, self.count or usual, self.seed)
        return self._samples[known]

    def cost(self, group: Group) -> int:
        """Tokens of a group, about, for a progress bar."""
        if group.length is not None:
            return group.length * len(self.samples(group))
        return sum(self._sizes(group))

    def run(self, on_tokens: Callable[[Group, int], None] = lambda group, tokens: None) -> list[Record]:
        """Answers the samples that have no answer yet; returns and writes the summaries of all groups.

        Args:
          on_tokens: is called with a group and a number of tokens, in all `cost` of each group.
        """
        records = []
        for group in self.groups:
            answered = self._answer(group, lambda tokens, group=group: on_tokens(group, tokens))
            record = self._summary(group, answered)
            self._record_files[group.task.suite].put([record])
            records.append(record)
        return records

    def answered(self) -> Iterator[tuple[Group, Sequence[Sample], list[SampleRecord]]]:
        """Every group with its samples and, in their order, their sample records; after `run`."""
        for group in self.groups:
            found = self._sample_files[group.task.suite].records
            yield group, self.samples(group), [found[key] for key in self._keys(group)]

    # --------------------------------------------------------------------------------------------------------
    # Answers

    def _answer(self, group: Group, on_tokens: Callable[[int], None]) -> list[SampleRecord]:
        """The sample records of a group, in the order of its samples."""
        file, samples, keys = self._sample_files[group.task.suite], self.samples(group), self._keys(group)
        if self.again:
            file.forget(keys)
        done = [key in file.records for key in keys]
        on_tokens(int(self.cost(group) * sum(done) / max(len(keys), 1)))
        for length, indices in self._by_length(group):
            if all(done[i] for i in indices):
                continue
            backend = self._backend(group.variant, length, self.spent)
            longest = length if group.length else max(self._sizes(group)[i] for i in indices)
            for batch in batches(indices, backend.batch_size(longest)):
                if all(done[i] for i in batch.indices):
                    continue
                # A batch that was begun is answered whole: in another batch, sums may be rounded otherwise.
                asked = {i: samples[i] for i in batch.indices}
                for sample in asked.values():
                    self._check_fits(group, sample)
                new = [asked[i] for i in batch.indices if not done[i]]
                rest = Rest(sum(group.length or len(s.tokens) + s.max_new_tokens for s in new), on_tokens)
                backend.on_tokens, start = rest.take, time.perf_counter()
                answers = backend([asked[i] for i in batch.filled])[: len(batch.indices)]
                seconds = (time.perf_counter() - start) / len(batch.indices)
                file.add(
                    [
                        self._sample_record(group, sample, answer, length, seconds)
                        for sample, answer in zip(asked.values(), answers, strict=True)
                    ]
                )
                rest.take(rest.tokens)
        return [file.records[key] for key in keys]

    def _keys(self, group: Group) -> list[tuple[Any, ...]]:
        """The keys of the group's sample records, in the order of its samples."""
        lengths = self._lengths(group)
        settings = self._settings(group)
        readings = {length: group.variant.fingerprint(length) for length in set(lengths)}
        return [key(self._identity(group, i, readings[n], settings)) for i, n in enumerate(lengths)]

    def _sizes(self, group: Group) -> list[int]:
        """Tokens of each sample and its answer; counted once, as making the samples may take long."""
        known = (id(group.task), self.tokenizer(group).fingerprint)
        if known not in self._counted:
            self._counted[known] = [len(sample.tokens) + sample.max_new_tokens for sample in self.samples(group)]
        return self._counted[known]

    def _lengths(self, group: Group) -> list[int]:
        """The length whose schedule each sample is read with."""
        if group.length is not None:
            return [group.length] * len(self.samples(group))
        return [schedule_length(tokens, group.variant.training_length) for tokens in self._sizes(group)]

    def _by_length(self, group: Group) -> Iterator[tuple[int, list[int]]]:
        """Indices of samples by the length of their schedule, the shortest first; of their own lengths, too."""
        lengths = self._lengths(group)
        for length in sorted(set(lengths)):
            chosen = [i for i, one in enumerate(lengths) if one == length]
            if group.length is None:
                chosen.sort(key=self._sizes(group).__getitem__)
            yield length, chosen

    def _check_fits(self, group: Group, sample: Sample) -> None:
        needed = len(sample.tokens) + sample.max_new_tokens
        if group.length is not None and needed > group.length:
            raise ConfigError(
                f"{group.task.suite}:{group.task.name}, sample {sample.index}: its prompt of {len(sample.tokens):,} "
                f"tokens and {sample.max_new_tokens} new ones do not fit {group.length:,}; prompts are never cut here. "
                "Give a larger --lengths."
            )

    def _check_crop(self, group: Group, sample: Sample) -> None:
        crop, new = group.variant.crop, sample.max_new_tokens
        if crop is not None and crop < 2 * new and len(sample.tokens) + new > crop:
            raise ConfigError(
                f"--methods=cropped: of {crop:,} tokens, the training length, {group.task.suite}:{group.task.name} "
                f"keeps {new:,} for its answer, which leaves next to no prompt. Leave cropped out."
            )

    def _identity(self, group: Group, index: int, reading: str, settings: str) -> SampleRecord:
        task = group.task
        return {
            "checkpoint_id": group.variant.subject.id,
            "reading": reading,
            "suite": task.suite,
            "task": task.name,
            "length": group.length,
            "seed": self.seed,
            "settings": settings,
            "index": index,
        }

    def _settings(self, group: Group) -> str:
        """A fingerprint of the task's settings and the tokenizer, which the samples depend on."""
        task = group.task
        text = json.dumps([dict(task.settings), self.tokenizer(group).fingerprint], sort_keys=True, default=str)
        return f"{task.suite}-{SUITES[task.suite].protocol}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def _sample_record(self, group: Group, sample: Sample, output: str, length: int, seconds: float) -> SampleRecord:
        task, variant = group.task, group.variant
        scores = task.score(sample, output)
        found = getattr(task, "found", None)
        record = self._identity(group, sample.index, variant.fingerprint(length), self._settings(group)) | {
            "prompt": sample.fingerprint,
            "tokens": len(sample.tokens),
            "depth": list(sample.depth),
            "references": list(sample.references),
            "output": output,
            "score": scores[task.metric],
            "scores": scores,
            "found": found(sample, output) if found else None,
            "facts": dict(sample.metadata),
            **variant.sample_record(length),
            "protocol": f"{task.suite}-{SUITES[task.suite].protocol}",
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
            "seed": self.seed,
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


@dataclass(frozen=True)
class Batch:
    """Indices of samples answered together; `filled` repeats the last one to the batch size of the group."""

    indices: list[int]
    filled: list[int]


def batches(indices: Sequence[int], most: int) -> list[Batch]:
    """The smallest number of batches of at most `most`, all of one size, which is compiled once."""
    number = -(-len(indices) // most)
    size = -(-len(indices) // number)
    parts = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    return [Batch(part, part + [part[-1]] * (size - len(part))) for part in parts]
