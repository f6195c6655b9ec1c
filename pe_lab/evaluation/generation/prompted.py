"""Prompted suites: every variant answers every sample of every task; each answer is a sample record."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pe_lab.errors import CheckpointError, DataError
from pe_lab.evaluation.generation.backend import ModelBackend, Spent
from pe_lab.evaluation.generation.groups import Batch, Group, Prompts, Rest, batches
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.breakdowns import by_depth, by_length
from pe_lab.evaluation.tasks.task import Sample, Task
from pe_lab.evaluation.variants import Variant
from pe_lab.identity import versions
from pe_lab.parallel import compute_devices, shared
from pe_lab.results.records import Record, RecordFile, SampleFile, SampleRecord, announced, finite, sample_key
from pe_lab.results.statistics import mean_of
from pe_lab.storage import AnyPath
from pe_lab.terminal import console


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
        directory: AnyPath,
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
        known = {suite: file.records for suite, file in self._sample_files.items()}
        answered = [sample_key(one) in known[g.task.suite] for g in self.groups for one in g.identities]
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
        planned = announced(self.directory, list(map(_name, self.groups)))
        with planned, TokenProgress("compiling", self.work) as progress:
            batches = self._batches()
            answers = shared(batches, functools.partial(self._answers, progress), [batch.cost for batch in batches])
            for group in self.groups:
                mine = [batch for batch in batches if batch.group is group]
                answered = self._answer(group, mine, answers, functools.partial(progress.add, name=group.name))
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
            yield group, group.prompts.samples, [found[sample_key(one)] for one in group.identities]

    # --------------------------------------------------------------------------------------------------------
    # Answers

    def _batches(self) -> list[Batch]:
        """The batches that have a sample without an answer, in the order of the groups."""
        found, planned = [], set()
        for group in self.groups:
            stored = () if self.again else self._sample_files[group.task.suite].records
            keys = [sample_key(one) for one in group.identities]
            done = [key in stored or key in planned for key in keys]
            planned |= set() if self.again else set(keys)  # variants that are one model at a length are asked once
            for length, indices in group.by_length():
                if all(done[i] for i in indices):
                    continue
                backend = self._backend(group.variant, length, self.spent)
                longest = length if group.length else max(group.prompts.sizes[i] for i in indices)
                for batch, filled in batches(indices, backend.batch_size(longest)):
                    # A batch that was begun is answered whole: in another batch, sums may be rounded otherwise.
                    if new := [i for i in batch if not done[i]]:
                        tokens = sum(group.length or group.prompts.sizes[i] for i in new)
                        found.append(Batch(group, length, backend, batch, filled, tokens))
        return found

    def _answers(self, progress: TokenProgress, asked: Iterable[Batch]) -> Iterator[Answers]:
        """The answers to each batch."""
        for batch in asked:
            samples = batch.group.prompts.samples
            for i in batch.indices:
                batch.group.prompts.check_fits(samples[i])
            batch.rest = Rest(batch.tokens, functools.partial(progress.add, name=batch.group.name))
            batch.backend.on_tokens, before, start = batch.rest.take, self.spent.copy(), time.perf_counter()
            answers = batch.backend([samples[i] for i in batch.filled])[: len(batch.indices)]
            yield Answers(answers, time.perf_counter() - start, self.spent.since(before))

    def _answer(
        self, group: Group, asked: Sequence[Batch], answers: Iterator[Answers], on_tokens: Callable[[int], None]
    ) -> list[SampleRecord]:
        """The sample records of a group, in the order of its samples; those of each batch are written as it ends."""
        file, prompts = self._sample_files[group.task.suite], group.prompts
        keys = [sample_key(one) for one in group.identities]
        if self.again:
            file.forget(keys)
        on_tokens(int(prompts.cost * sum(key in file.records for key in keys) / max(len(keys), 1)))
        for batch, answered in zip(asked, answers, strict=False):
            seconds = answered.seconds / len(batch.indices)
            file.add(
                [
                    self._sample_record(group, prompts.samples[i], text, batch.length, seconds)
                    for i, text in zip(batch.indices, answered.texts, strict=True)
                ]
            )
            if batch.rest is None:  # another process has answered it
                batch.rest = Rest(batch.tokens, on_tokens)
                self.spent.add(answered.spent)
            batch.rest.take(batch.rest.tokens)
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
            "metadata": dict(sample.metadata),
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
        clusters = [record["metadata"].get("cluster", record["index"]) for record in answered]
        mean = mean_of([record["score"] for record in answered], clusters)
        if mean is None:
            raise DataError(f"{task.suite}:{task.name} has no samples.")
        record: Record = {
            **_name(group),
            "positional": answered[-1]["positional"],
            "seed": group.prompts.seed,
            "metric": task.metric,
            "score": mean.mean,
            "stderr": mean.stderr,
            "low": mean.low,
            "high": mean.high,
            "samples": mean.count,
            "scores": {
                name: math.fsum(record["scores"][name] for record in answered) / len(answered)
                for name in first["scores"]
            },
            "truncated": sum(bool(record["metadata"].get("truncated")) for record in answered),
            "longest": max(record["tokens"] for record in answered),
            "settings": first["settings"],
            "higher_is_better": True,
            "seconds": math.fsum(record["seconds"] for record in answered),
            "protocol": first["protocol"],
            "versions": versions(),
            "devices": len(compute_devices()),
        }
        if any(record["depth"] for record in answered):
            record["by_depth"] = by_depth(answered)
        if group.length is None:
            record["by_length"] = by_length(answered, getattr(task, "edges_by_record_length", None))
        return finite(record)


def _name(group: Group) -> Record:
    """The keys of a group's result record that tell what it measures: suite, task, checkpoint, variant and length."""
    task = group.task
    length = group.length or task.settings.get("max_length")  # which prompts were cut to, where the protocol cuts
    return {"suite": task.suite, "source": task.name, **group.variant.record(length)}


class Answers(NamedTuple):
    """The texts that answer the samples of a batch, and their cost."""

    texts: list[str]
    seconds: float
    spent: Spent
